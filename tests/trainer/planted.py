"""A training with a fault in it: `planted.py RUN_DIR FOLDER FAULT [settings]`, for sentinels beside the real loop.

nan:N       a weight becomes infinite before the N-th update
kill:N      SIGKILL in the middle of the N-th update of this process, when the last save before it is on the disk
none        nothing
"""

import math
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from jackline.errors import JacklineError
from jackline.rundir.layout import RunDir
from jackline.trainer.build import Parts
from jackline.trainer.config import resolve
from jackline.trainer.loop import train

SAVE_EVERY = 3
SETTINGS = [
    *("--quick", "seq_len=16", "batch_size=4", "max_steps=14", "warmup_steps=2", "rehearse=no"),
    f"save_every_steps={SAVE_EVERY}",
    *("eval_every=0", "full_eval=no", "val_fraction=0.2"),
]
fault, _, number = sys.argv[3].partition(":")
num_updates = 0
update = Parts.update


def faulty_update(parts: Parts, before_change: Callable[[], None]) -> torch.Tensor:
    global num_updates
    num_updates += 1
    if fault == "kill" and num_updates == int(number):
        saved = (num_updates - 1) // SAVE_EVERY * SAVE_EVERY
        while not (RunDir(Path(sys.argv[1])).checkpoints / f"step-{saved:08d}").exists():
            time.sleep(0.005)
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "nan" and num_updates == int(number):
        before_change()
        with torch.no_grad():
            parts.model.blocks[0].up.weight[0, 0] = math.inf
    return update(parts, before_change)


if __name__ == "__main__":
    Parts.update = faulty_update
    folder = Path(sys.argv[2])
    words = [*SETTINGS, f"data={folder / 'text'}/*.txt", f"data_dir={folder / 'data'}", *sys.argv[4:]]
    try:
        train(resolve("demo", words), RunDir(Path(sys.argv[1])))
    except JacklineError as error:
        print(error)
        sys.exit(error.exit_code)
