"""A checkpoint of every format ever written stays readable."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from jackline.checkpoint.format.verify import verify_checkpoint
from tests.checkpoint.test_roundtrip import load

GOLDEN = Path(__file__).parents[1] / "golden"


def test_format_1_is_read_as_it_was_written() -> None:
    place = GOLDEN / "checkpoint-1" / "step-00000003"
    assert verify_checkpoint(place, is_direct=False).step == 3
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    into: dict[str, Any] = {
        "model": model,
        "optim": optimizer,
        "counters": None,
        "z": torch.zeros(2, dtype=torch.complex64),
    }
    restored = load(place, into)
    assert restored.not_restored == ()
    assert model[0].weight.tolist() == [[0, 1], [2, 3], [4, 5]]
    assert into["counters"] == {"step": 3, "list": [1, (2, float("inf"))]}
    assert into["z"].tolist() == [1 + 2j, 3 - 4j]
    assert optimizer.param_groups[0]["lr"] == 0.5
    state = optimizer.state[model[0].weight]
    assert state["step"].item() == 1 and torch.allclose(state["exp_avg"], torch.full((3, 2), 0.1))
