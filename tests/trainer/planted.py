"""A training with a fault in it: `planted.py RUN_DIR FOLDER FAULT [settings]`, for sentinels beside the real loop.

nan:N       a weight becomes infinite before the N-th update
kill:N      SIGKILL in the middle of the N-th update of this process, when the last save before it is on the disk, and
            the numbers of all steps before it are in the run's files
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
from jackline.session.metrics import scalars
from jackline.trainer.config import resolve
from jackline.trainer.language import LanguageTask
from jackline.trainer.loop import train

SAVE_EVERY = 3
SETTINGS = [
    *("--quick", "seq_len=16", "batch_size=4", "max_steps=14", "warmup_steps=2", "rehearse=no"),
    f"save_every_steps={SAVE_EVERY}",
    *("eval_every=0", "full_eval=no", "val_fraction=0.2"),
]
fault, _, number = sys.argv[3].partition(":")
num_updates = 0
update = LanguageTask.update


def faulty_update(task: LanguageTask) -> torch.Tensor:
    global num_updates
    num_updates += 1
    if fault == "kill" and num_updates == int(number):
        wait_until_written(RunDir(Path(sys.argv[1])), num_updates - 1)
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "nan" and num_updates == int(number):
        with torch.no_grad():
            task.learner.model.blocks[0].up.weight[0, 0] = math.inf
    return update(task)


def wait_until_written(run: RunDir, step: int) -> None:
    wait_for(lambda: (run.checkpoints / f"step-{step // SAVE_EVERY * SAVE_EVERY:08d}").exists())
    wait_for(lambda: f'"step":{step},' in run.metrics(0).read_text())
    # The state is written after the numbers and their curves, once a second.
    before = run.session_file(0).stat().st_mtime_ns
    wait_for(lambda: run.session_file(0).stat().st_mtime_ns != before)


def wait_for(holds: Callable[[], bool]) -> None:
    while not holds():
        time.sleep(0.005)


if __name__ == "__main__":
    scalars._SEND_EVERY_S = 0.0  # the numbers of a step leave the loop with the step
    LanguageTask.update = faulty_update
    folder = Path(sys.argv[2])
    words = [*SETTINGS, f"data={folder / 'text'}/*.txt", f"data_dir={folder / 'data'}", *sys.argv[4:]]
    try:
        train(resolve("demo", words), RunDir(Path(sys.argv[1])))
    except JacklineError as error:
        print(error)
        sys.exit(error.exit_code)
