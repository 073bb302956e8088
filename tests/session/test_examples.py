"""The examples, killed at random instants with the number of workers changing, end as if nothing had happened."""

from __future__ import annotations

import random
import re
import time
from pathlib import Path

import pytest

from tests.session.nursery import ROOT, Nursery

EXAMPLES = ROOT / "examples"
SMALL = {
    "regression": ["--steps", "400", "--save-every-steps", "7"],
    "image_classifier": ["--epochs", "2", "--images", "600", "--save-every-steps", "3"],
    "gpt_loop": ["--steps", "40", "--width", "32", "--context", "32", "--save-every-steps", "3"],
}
KILLS = {"regression": 3, "image_classifier": 4, "gpt_loop": 3}


def weights_of(output: str) -> str:
    found = re.findall(r"^weights (\w+ after \d+ steps)$", output, re.MULTILINE)
    assert len(found) == 1, output
    return found[0]


@pytest.mark.parametrize("name", SMALL)
def test_a_killed_example_ends_with_the_same_weights(name: str, nursery: Nursery, tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    whole.mkdir()
    began_s = time.monotonic()
    wanted = weights_of(nursery.run(EXAMPLES / f"{name}.py", [*SMALL[name], "--name", "whole"], whole).output)
    took_s = time.monotonic() - began_s
    dice = random.Random(name)
    num_killed = num_finished = 0
    while num_finished == 0 or num_killed < KILLS[name]:
        arguments = [*SMALL[name], "--name", f"killed-{num_finished}", "--workers", str(dice.randint(0, 2))]
        child = nursery.start(EXAMPLES / f"{name}.py", arguments, tmp_path)
        if num_killed < KILLS[name]:
            time.sleep(dice.uniform(0.02, 0.6) * took_s)  # the instant of the kill, not a wait for anything
            child.kill()
        ended = child.wait()
        assert ended.code in (-9, 0), ended.output
        if ended.code == 0:
            assert weights_of(ended.output) == wanted
        num_killed += ended.code == -9
        num_finished += ended.code == 0
