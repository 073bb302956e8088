"""A training as a program: `training.py RUN_DIR CORPUS [settings]`. It may be told to die or to run out of memory.

KILL_AT=n        SIGKILL in the middle of the n-th update of this process
SLOW_AT=n        the forward pass of the n-th step takes longer than the trainer may be silent
OOM_AT=n         out of memory in every slice of more than two sequences, in the n-th step of the run
The losses of the run stand in its metrics, the final weights in its last checkpoint.
"""

import os
import signal
import sys
import time
from pathlib import Path

import torch

from jackline.errors import JacklineError
from jackline.rundir.layout import RunDir
from jackline.trainer.config import resolve
from jackline.trainer.language import LanguageTask
from jackline.trainer.loop import train
from jackline.trainer.report.console import SILENT_AT_MOST_S

MESSAGE = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 15.90 GiB of which 613.56 MiB is"
    " free."
)
TINY = [
    *("--quick", "seq_len=16", "batch_size=4", "max_steps=12", "warmup_steps=2", "save_every_steps=3"),
    *("eval_every=4", "full_eval=no", "eval_share=0.02"),
]
num_updates = 0
loss_sum, update = LanguageTask.loss_sum, LanguageTask.update


def dying_update(task: LanguageTask) -> torch.Tensor:
    global num_updates
    num_updates += 1
    if num_updates == int(os.environ.get("KILL_AT") or 0):
        os.kill(os.getpid(), signal.SIGKILL)
    return update(task)


def hungry_loss(task: LanguageTask, tokens: torch.Tensor) -> tuple[torch.Tensor, int]:
    if num_updates + 1 == int(os.environ.get("SLOW_AT") or 0):
        time.sleep(1.5 * SILENT_AT_MOST_S)
    if num_updates + 1 == int(os.environ.get("OOM_AT") or 0) and len(tokens) > 2:
        raise torch.OutOfMemoryError(MESSAGE)
    return loss_sum(task, tokens)


if __name__ == "__main__":
    LanguageTask.update, LanguageTask.loss_sum = dying_update, hungry_loss
    run, corpus = Path(sys.argv[1]), Path(sys.argv[2])
    words = [*TINY, f"data={corpus / 'text'}", f"data_dir={corpus / 'data'}", "val_fraction=0.2", *sys.argv[3:]]
    try:
        # The rehearsal updates too, and its updates are not steps.
        if "rehearse=yes" not in words:
            words.append("rehearse=no")
        train(resolve(os.environ.get("RECIPE", "demo"), words), RunDir(run))
    except JacklineError as error:
        print(error)
        sys.exit(error.exit_code)
