"""`scripts/torture --hours` gives every kind of torture its share and loses no failure."""

from __future__ import annotations

import random
from pathlib import Path

from tests.torture import Came, Part, Turns, choose_next, table


def test_the_part_with_the_least_of_its_share_plays_next_and_none_twice_at_once() -> None:
    parts = [Part("often", 0.75, play_well, used_s=60.0), Part("rare", 0.25, play_well, used_s=30.0)]
    assert choose_next(parts) is parts[0]
    parts[0].is_playing = True
    assert choose_next(parts) is parts[1]
    parts[1].is_playing = True
    assert choose_next(parts) is None


def test_a_turn_that_breaks_counts_as_wrong_and_the_others_still_play(tmp_path: Path) -> None:
    turned: list[str] = []

    def play_badly(_place: Path, _dice: random.Random) -> Came:
        turned.append("bad")
        raise RuntimeError("this case cannot be judged")

    def play_once(place: Path, dice: random.Random) -> Came:
        turned.append("good")
        turns.stop()
        return play_well(place, dice)

    parts = [Part("bad", 1.0, play_badly), Part("good", 1.0, play_once, used_s=1e-9)]
    turns = Turns(parts, tmp_path, seed=1, seconds=3600.0)
    turns.play()
    assert turned == ["bad", "good"]
    assert [part.kills for part in parts] == [0, 3]
    assert "this case cannot be judged" in parts[0].wrong[0]
    assert table(parts).splitlines()[-1].split()[:5] == ["all", "2", "3", "1", "1"]


def play_well(_place: Path, _dice: random.Random) -> Came:
    return Came(kills=3, faults=1)
