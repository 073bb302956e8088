"""A real training program: RUN STEPS NOTES MODE [HOLD]. Saves at every step it can, notes what it did, and resumes.
MODE "never" saves nothing. With HOLD it waits after that many steps of its own until it is killed.

NOTES gets lines: RESUME step print, STEP step loss, ACK step print, END print.
"""

from __future__ import annotations

import os
import random
import signal
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy
import torch

from jackline.checkpoint.engine import CheckpointEngine
from jackline.rundir.layout import RunDir
from tests.checkpoint.states import fingerprint, make_state, train_step


def main() -> None:
    torch.set_num_threads(1)
    random.seed(1)
    numpy.random.seed(1)
    run, steps, notes, mode = RunDir(Path(sys.argv[1])), int(sys.argv[2]), sys.argv[3], sys.argv[4]
    hold_after = int(sys.argv[5]) if len(sys.argv) > 5 else None
    fd = os.open(notes, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def note(*words: Any) -> None:
        os.write(fd, (" ".join(str(word) for word in words) + "\n").encode())

    engine = CheckpointEngine(run) if mode != "never" else None
    state = make_state(width=32)
    average = {name: tensor.detach().clone() for name, tensor in state["model"].named_parameters()}
    state["average"] = average
    receipt = engine.load_newest(state) if engine else None
    if receipt is not None:
        note("RESUME", receipt.step, fingerprint(state))
    prints: dict[int, str] = {}
    while state["counters"]["step"] < steps:
        loss = train_step(state, engine.before_change if engine else lambda: None)
        with torch.no_grad():
            for name, tensor in state["model"].named_parameters():
                average[name].lerp_(tensor, 0.1)
        step = state["counters"]["step"]
        note("STEP", step, loss.hex())
        if engine is None:
            continue
        prints[step] = fingerprint(state)
        engine.save(state, step=step, overlap=mode == "overlapped")
        for event in engine.poll():
            if event.kind == "committed" and event.step is not None:
                note("ACK", event.step, prints[event.step])
        while len(prints) == hold_after:
            signal.pause()
    if engine is not None:
        engine.save(state, step=step, overlap=False, wait="writer").wait()
        engine.close()
    note("END", fingerprint(state))


if __name__ == "__main__":
    main()
