"""kill -9 at chance instants: the run resumes from an acknowledged state and ends bit-equal to one never killed."""

from __future__ import annotations

import random
import time
from pathlib import Path

from tests.session.nursery import Child, Nursery

PROGRAM = Path(__file__).with_name("exact_trainer.py")
STEPS = 200
HOLD = 45  # steps; a life has written the lines that are waited for by then, and four of them do not reach the end
LIVES = ("overlapped", "blocking", "overlapped", "blocking", "overlapped")  # all but the last are killed


def start(nursery: Nursery, run: Path, notes: Path, mode: str, *more: str) -> Child:
    run.mkdir(exist_ok=True)
    return nursery.start(PROGRAM, [str(run), str(STEPS), str(notes), mode, *more], run.parent)


def lines_of(notes: Path) -> list[list[str]]:
    return [line.split() for line in notes.read_text().split("\n")[:-1]] if notes.exists() else []


def test_a_run_killed_again_and_again_ends_bit_equal(nursery: Nursery, tmp_path: Path) -> None:
    """Both kinds of save share one run and one calm one. A life waits for its kill, so that none ends before it."""
    calm_run = start(nursery, tmp_path / "calm", tmp_path / "calm.notes", "never")
    notes, run = tmp_path / "notes", tmp_path / "run"
    rng_state = random.Random(1)
    for mode in LIVES[:-1]:
        wanted = len(lines_of(notes)) + rng_state.randrange(5, 40)
        process = start(nursery, run, notes, mode, str(HOLD))
        while len(lines_of(notes)) < wanted and not process.has_ended:
            time.sleep(0.004)
        process.kill()
        ended = process.wait()
        assert ended.code == -9, ended.output
    for last in (start(nursery, run, notes, LIVES[-1]), calm_run):
        ended = last.wait()
        assert ended.code == 0, ended.output
    calm, told = lines_of(tmp_path / "calm.notes"), lines_of(notes)
    expected = {words[1]: words[2] for words in calm if words[0] == "STEP"}
    acks: dict[int, str] = {}
    for words in told:
        if words[0] == "ACK":
            acks[int(words[1])] = words[2]
        if words[0] == "RESUME":
            assert int(words[1]) >= max(acks, default=0), "an acknowledged checkpoint was lost"
            assert acks.get(int(words[1]), words[2]) == words[2], "what came back is not what was acknowledged"
        if words[0] == "STEP":
            assert words[2] == expected[words[1]], f"the loss of step {words[1]} differs"
    assert sum(words[0] == "RESUME" for words in told) == len(LIVES) - 1
    assert told[-1] == calm[-1], "the last state differs"
