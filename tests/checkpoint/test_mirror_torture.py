"""A small, seeded part of `scripts/torture mirror`: whatever happened, the mirror ends with what the run has."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.checkpoint.mirror_torture import Tally, torture_one


@pytest.mark.parametrize("seed", [1, 2])
def test_a_mirror_that_was_killed_over_a_bad_store_ends_with_what_the_run_has(tmp_path: Path, seed: int) -> None:
    tally = Tally()
    torture_one(tmp_path, random.Random(f"suite {seed}"), tally)
    assert tally.num_cases == 1
