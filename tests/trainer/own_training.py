"""A recipe of one's own as a program: `own_training.py RUN_DIR FILE [settings]`.

KILL_AT=n        SIGKILL in the middle of the n-th update
"""

import os
import signal
import sys
from pathlib import Path

import torch

from jackline.rundir.layout import RunDir
from jackline.trainer.config import resolve
from jackline.trainer.loop import train
from jackline.trainer.own.task import OwnTask

update = OwnTask.update
num_updates = 0


def dying_update(task: OwnTask) -> torch.Tensor:
    global num_updates
    num_updates += 1
    if num_updates == int(os.environ.get("KILL_AT") or 0):
        os.kill(os.getpid(), signal.SIGKILL)
    return update(task)


if __name__ == "__main__":
    OwnTask.update = dying_update
    train(resolve(sys.argv[2], sys.argv[3:]), RunDir(Path(sys.argv[1])))
