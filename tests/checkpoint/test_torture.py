"""A small seeded part of scripts/torture."""

from __future__ import annotations

import random
from pathlib import Path

from tests.checkpoint import torture


def test_random_kills_lose_nothing_and_every_damage_is_found(tmp_path: Path) -> None:
    """Five lives, however long they take; each waits for its first acknowledged save, but for those killed early."""
    rng_state = random.Random(7)
    tally = torture.torture_by_kill(tmp_path / "run", rng_state, seconds=float("inf"), kills=5, size=100_000)
    print(tally.line())
    assert tally.losses == [] and sum(tally.kills.values()) == 5 and tally.resumes > 0
    torture.save_calmly(tmp_path / "run", 2, size=100_000)  # a slow machine may have killed every save
    damaged, detected = torture.damage_every_file(tmp_path / "run", rng_state, rounds=2, size=100_000)
    assert damaged == detected > 30


def test_an_error_before_and_after_every_call_loses_nothing(tmp_path: Path) -> None:
    faults, losses = torture.fail_every_call(tmp_path)
    assert faults > 100 and losses == 0
