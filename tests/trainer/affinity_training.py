"""The affinity recipe as a program: `affinity_training.py RUN_DIR [settings]`; KILL_AT=n dies in the n-th update."""

import os
import signal
import sys
from pathlib import Path

import torch

from jackline.errors import JacklineError
from jackline.rundir.layout import RunDir
from jackline.trainer.build import Parts
from jackline.trainer.config import resolve
from jackline.trainer.loop import train

num_updates = 0
update = Parts.update


def dying_update(parts: Parts, *words: object) -> torch.Tensor:
    global num_updates
    num_updates += 1
    if num_updates == int(os.environ.get("KILL_AT") or 0):
        os.kill(os.getpid(), signal.SIGKILL)
    return update(parts, *words)


if __name__ == "__main__":
    Parts.update = dying_update
    try:
        # The rehearsal updates too, and its updates are not steps.
        train(resolve("agab", ["rehearse=no", *sys.argv[2:]]), RunDir(Path(sys.argv[1])))
    except JacklineError as error:
        print(error)
        sys.exit(error.exit_code)
