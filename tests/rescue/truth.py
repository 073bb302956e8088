"""Imported by the scripts of `zoo`: what they would have saved themselves at every step, and how they end.

`note` stands at the end of an iteration, where a script would save. It writes the objects' own state_dict to
truth-STEP.pt. At step END it ends the script in the way that the variable WAY names.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch

END = 12
FOLDER = Path(os.environ.get("TRUTH", "."))
WAY = os.environ.get("WAY", "finish")


def note(step: int, loss: Any = None, **objects: Any) -> None:
    if loss is not None:
        print(step, loss.detach().item().hex(), flush=True)
    if "TRUTH" in os.environ:
        states = {name: _state(value) for name, value in objects.items()}
        path = FOLDER / f"truth-{step}.pt"
        torch.save(states, path.with_suffix(".new"))
        path.with_suffix(".new").rename(path)
    if step == END:
        end()
    if WAY == "asked" and step > 4:
        time.sleep(0.02)  # a loop that the question meets before it ends


def _state(value: Any) -> Any:
    return value.state_dict() if hasattr(value, "state_dict") else value


def end() -> None:
    if WAY == "exception":
        raise RuntimeError("a mistake in the validation")
    if WAY == "oom":
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    if WAY == "interrupt":
        os.kill(os.getpid(), signal.SIGINT)
    if WAY == "sigterm":
        os.kill(os.getpid(), signal.SIGTERM)
    if WAY == "stuck":
        lock = threading.Lock()
        lock.acquire()
        lock.acquire()
    if WAY == "finish":
        sys.exit(0)
