"""Loops as people write them, interrupted at random points: some of the table of `scripts/torture loops`."""

from __future__ import annotations

import importlib
import random
from pathlib import Path

import pytest

from tests.session.loops.table import MODULES, SHAPES
from tests.session.loops.torture import judge
from tests.session.nursery import Nursery

for module in MODULES:
    importlib.import_module(module)
SOME = {
    "SAM by hand": "equal",
    "WGAN with clipping and n_critic": "equal",
    "accumulation by run.batch": "equal",
    "EMA swapped in for validation": "equal",
    "weights that change during an epoch": "equal",
    "data that grow before each epoch": "equal",
    "a stream shuffled by its own generator": "equal",
    "a stream ordered by the clock": "warned",
    "accumulation by an own counter": "refused",
    "CycleGAN with image pools": "warned",
}


def test_the_table_has_a_hundred_shapes() -> None:
    assert len(SHAPES) >= 100


@pytest.mark.parametrize("name", list(SOME))
def test_an_interrupted_loop_ends_as_one_that_was_left_alone(name: str, nursery: Nursery, tmp_path: Path) -> None:
    verdict = judge(nursery, name, tmp_path, random.Random(f"5 {name}"), interruptions=2)
    assert verdict.word == SOME[name], verdict.text
