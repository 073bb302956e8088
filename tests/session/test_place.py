"""Where a loop is and what its best is: in session-0.json, for a person's own loop as for a recipe."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.session.nursery import Nursery

SCRIPT = """
import sys
import torch, jackline
LOSSES = [5.0, 3.0, 4.0, 2.0, 6.0, 7.0]
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = torch.utils.data.DataLoader(torch.ones(9, 3), batch_size=3, shuffle=True)
with jackline.attach(model=model, optimizer=optimizer, loader=loader, name="x", seed=1, keep_last=1,
                     keep_best=sys.argv[1]) as run:
    for epoch in run.epochs(2):
        for batch in run.steps():
            model(batch).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            run.save(best_score=LOSSES[run.step - 1])
"""


def state_after(nursery: Nursery, keep_best: str, folder: Path) -> dict[str, Any]:
    ended = nursery.run(SCRIPT, [keep_best], folder)
    assert ended.code == 0, ended.output
    found: dict[str, Any] = json.loads((folder / "runs" / "x" / "session-0.json").read_bytes())
    return found


def test_the_lowest_is_the_best_and_epochs_and_batches_are_counted(nursery: Nursery, tmp_path: Path) -> None:
    state = state_after(nursery, "best_score", tmp_path)
    assert state["best"] == {"name": "score", "step": 4, "value": 2.0}
    assert state["place"] == {"epoch": 3, "epochs": 2, "batch": 0, "num_batches": 3}
    assert state["last_checkpoint"]["step"] == 6


def test_with_a_plus_the_highest_is_the_best(nursery: Nursery, tmp_path: Path) -> None:
    assert state_after(nursery, "+best_score", tmp_path)["best"] == {"name": "score", "step": 6, "value": 7.0}


def test_a_number_that_was_never_saved_has_no_best(nursery: Nursery, tmp_path: Path) -> None:
    assert state_after(nursery, "accuracy", tmp_path)["best"] is None
