"""kill -9 at chance instants: the run goes on from an acknowledged state and ends bit-equal to one never killed."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("exact_trainer.py")
STEPS = 160


def start(run: Path, notes: Path, mode: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, str(PROGRAM), str(run), str(STEPS), str(notes), mode])


def lines_of(notes: Path) -> list[list[str]]:
    return [line.split() for line in notes.read_text().split("\n")[:-1]] if notes.exists() else []


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> list[list[str]]:
    """The notes of a run that was neither killed nor saved."""
    place = tmp_path_factory.mktemp("calm")
    assert start(place, place / "notes", "never").wait(300) == 0
    return lines_of(place / "notes")


@pytest.mark.xdist_group("exact-resume")  # they share the calm run
@pytest.mark.parametrize("mode", ["overlapped", "blocking"])
def test_a_run_killed_again_and_again_ends_bit_equal(tmp_path: Path, calm: list[list[str]], mode: str) -> None:
    expected = {words[1]: words[2] for words in calm if words[0] == "STEP"}
    notes, run = tmp_path / "notes", tmp_path / "run"
    run.mkdir()
    chance = random.Random(mode)
    num_kills = 0
    while True:
        process = start(run, notes, mode)
        seen = len(lines_of(notes))
        if num_kills == 3:
            assert process.wait(300) == 0
            break
        wanted = seen + chance.randrange(5, 60)
        while len(lines_of(notes)) < wanted and process.poll() is None:
            time.sleep(0.004)
        process.kill()
        num_kills += process.wait() == -9
    told = lines_of(notes)
    acks: dict[int, str] = {}
    for words in told:
        if words[0] == "ACK":
            acks[int(words[1])] = words[2]
        if words[0] == "RESUME":
            assert int(words[1]) >= max(acks, default=0), "an acknowledged checkpoint was lost"
            assert acks.get(int(words[1]), words[2]) == words[2], "what came back is not what was acknowledged"
        if words[0] == "STEP":
            assert words[2] == expected[words[1]], f"the loss of step {words[1]} differs"
    assert sum(words[0] == "RESUME" for words in told) >= 3
    assert told[-1] == calm[-1], "the last state differs"
