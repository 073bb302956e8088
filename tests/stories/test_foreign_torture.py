"""A small, seeded part of `scripts/torture foreign`: random ends, never an older start, never a lost checkpoint."""

from __future__ import annotations

import random

import pytest

from tests.shell import Shell
from tests.stories.foreign_torture import KINDS, Tally, torture_one

pytestmark = pytest.mark.zoo


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.slow if at % 2 else ()) for at, kind in enumerate(KINDS)]
)
def test_an_attempt_starts_from_the_newest_checkpoint_that_loads(shell: Shell, kind: str, seed: int) -> None:
    tally = Tally()
    torture_one(shell, kind, random.Random(f"{kind} {seed}"), tally)
    assert tally.ends.total() == tally.starts.total() == 4
