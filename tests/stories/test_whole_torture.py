"""Two rounds of `scripts/torture whole`: every process of a run may be killed, on a disk that is sometimes full."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.places import Unavailable
from tests.stories.whole_torture import Tally, torture_one, undisturbed

pytestmark = [pytest.mark.zoo, pytest.mark.slow]


def test_no_subset_of_killed_processes_costs_a_saved_step(tmp_path: Path) -> None:
    tally, wanted = Tally(), undisturbed(tmp_path / "undisturbed")
    try:
        for seed in (1, 2):
            torture_one(tmp_path / f"round-{seed}", wanted, random.Random(seed), tally)
    except Unavailable as reason:
        pytest.skip(str(reason))
    assert tally.wrong == []
    assert tally.kills.total() > 0
