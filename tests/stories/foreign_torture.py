"""Scripts that write their own checkpoints, ended at random instants and resumed: `scripts/torture foreign`.

    python -m tests.stories.foreign_torture --rounds 30 --seed 1

Every case is one run of one kind of script (saves_its_own.py): several attempts, each ended in a random way at some
instant, also in the middle of a write. Before every attempt the newest checkpoint that truly loads, on disk or among
the kept copies, is found by loading all of them; the attempt must start there, and nowhere else. What an attempt was
started from must still be there, or something newer, when it has ended. Exits 1 when one case broke that.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from jackline.rundir.layout import RunDir
from jackline.rundir.status import read_status
from tests.shell import Live, Shell, wait_for
from tests.stories.saves_its_own import read_step

PROGRAM = Path(__file__).with_name("saves_its_own.py")
# kind of script: its --checkpoints
KINDS = {
    "nanogpt": "ckpt.pt",
    "fixed": "last.pt",
    "renamed": "last.pt",
    "numbered": "step-*.pt",
    "hf": "checkpoint-*",
    "lightning": "*.ckpt",
    "keras": "*.h5",
    "latest": "latest",
    "turns": "model_*.pt",
}
ENDS = ("stop", "interrupt", "kill", "term", "crash", "kill both")
ATTEMPTS = 4


@dataclass
class Tally:
    """What was done and what came of it."""

    ends: Counter[str] = field(default_factory=Counter)
    starts: Counter[str] = field(default_factory=Counter)
    num_cases: int = 0
    wrong: list[str] = field(default_factory=list)

    def line(self) -> str:
        ends = ", ".join(f"{name} {count}" for name, count in sorted(self.ends.items()))
        starts = ", ".join(f"{count} {name}" for name, count in sorted(self.starts.items()))
        return f"{self.num_cases} cases; ends: {ends}; starts: {starts}; {len(self.wrong)} wrong"


def loadable(shell: Shell, kind: str) -> list[int]:
    """The step of everything that truly loads, whatever Jackline thinks of it."""
    paths = [*shell.work.glob(KINDS[kind]), *(shell.runs / "mine" / "kept").glob("[0-9]*/*")]
    steps = []
    for path in paths:
        with contextlib.suppress(Exception):
            steps.append(read_step(path))
    return steps


def torture_one(shell: Shell, kind: str, dice: random.Random, tally: Tally) -> None:
    """One run, its attempts ended one after another. Raises AssertionError with what broke."""
    resume_arg = "--init_from=resume" if kind == "nanogpt" else "--resume {checkpoint}"
    command = [sys.executable, str(PROGRAM), kind, "--pause-ms", str(dice.choice((0, 1, 3)))]
    words = ["run", "--name", "mine", "--checkpoints", KINDS[kind], "--resume-arg", resume_arg, "--restart", "0"]
    run = [*words, "--", *command]
    for attempt in range(1, ATTEMPTS + 1):
        before = loadable(shell, kind)
        has_any = attempt > 1 and any(shell.work.glob(KINDS[kind]))
        again = run if attempt == 1 or dice.random() < 0.5 else ["resume", "mine"]
        if has_any and not before:  # torn, and no copy yet: only a person may begin anew
            refused = shell.jackline(*again)
            assert refused.code == 3, f"attempt {attempt} was not refused: {refused}"
            again = ["resume", "mine", "--from-scratch"]
        tally.starts["from a checkpoint" if before else "refused, then anew" if has_any else "anew"] += 1
        live = shell.start(*again)
        started = one_attempt(shell, live, dice, tally)
        assert started == max(before, default=0), (
            f"attempt {attempt} started at {started}, there was {sorted(before)}"
        )
        after = loadable(shell, kind)
        assert max(after, default=0) >= started, f"attempt {attempt} lost what it began with: {started}, now {after}"


def one_attempt(shell: Shell, live: Live, dice: random.Random, tally: Tally) -> int:
    """Let it save a few times, then end it; the step it started at."""
    journal = shell.work / "journal.txt"
    known = len(lines_of(journal))
    wait_for(lambda: len(lines_of(journal)) > known or live.code() is not None, "the start of the script")
    assert len(lines_of(journal)) > known, f"it did not start: {ended_text(live)}"
    started = lines_of(journal)[known]
    wanted = known + 1 + dice.choice((0, 0, 1, 2, 4))
    wait_for(lambda: len(lines_of(journal)) >= wanted, f"{wanted - known - 1} saves")
    time.sleep(dice.uniform(0.0, 0.08))  # not to wait for something: any instant will do
    end = dice.choice(ENDS)
    tally.ends[end] += 1
    end_it(shell, end)
    live.wait()
    run = RunDir(shell.runs / "mine")
    wait_for(lambda: read_status(run).state not in ("alive", "unwatched"), f"its end by {end}: {live.text()}")
    wait_for(lambda: not shell.pids(), f"everything to end by {end}")
    return int(started.split()[2])


def end_it(shell: Shell, end: str) -> None:
    files = shell.run_dir("mine")
    number = max(int(path.name) for path in (files.path / "attempts").iterdir())
    child = files.child_pid(number)
    with contextlib.suppress(ProcessLookupError):
        if end == "stop":
            shell.jackline("stop", "mine")
        elif end == "interrupt":  # as a viewer at a terminal hands Ctrl-C on
            os.kill(files.supervisor_pid(), signal.SIGINT)
        elif end == "crash":
            (shell.work / "crash").touch()
        elif end == "kill both":
            os.kill(files.supervisor_pid(), signal.SIGKILL)
            os.kill(child, signal.SIGKILL)
        else:
            os.kill(child, signal.SIGKILL if end == "kill" else signal.SIGTERM)


def lines_of(journal: Path) -> list[str]:
    return journal.read_text().splitlines() if journal.exists() else []


def ended_text(live: Live) -> str:
    live.wait()
    return live.text()


def torture_case(folder: Path, kind: str, seed: int, tally: Tally) -> None:
    shell = Shell(folder)
    try:
        torture_one(shell, kind, random.Random(f"{kind} {seed}"), tally)
    except AssertionError as wrong:
        tally.wrong.append(f"{kind}, seed {seed}: {wrong}")
    finally:
        shell.close()
    tally.num_cases += 1


def main() -> int:
    parser = argparse.ArgumentParser(description="Random ends of scripts with checkpoints of their own.")
    parser.add_argument("--rounds", type=int, default=30, help="cases of each kind")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--at-once", type=int, default=3)
    options = parser.parse_args()
    tally = Tally()
    kinds = options.kinds.split(",")
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.at_once) as pool:
        cases = [(kind, options.seed + number) for number in range(options.rounds) for kind in kinds]
        works = [
            pool.submit(torture_case, Path(folder) / f"{kind}-{seed}", kind, seed, tally) for kind, seed in cases
        ]
        for number, work in enumerate(works, start=1):
            work.result()
            if number % 10 == 0 or number == len(works):
                print(tally.line(), flush=True)
    for wrong in tally.wrong:
        print(wrong)
    return 1 if tally.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
