"""Mirrors that are killed, stopped and doubled, over stores that fail, fill up and garble: `scripts/torture mirror`.

    python -m tests.checkpoint.mirror_torture --rounds 100 --seed 1

A case is one run with a real mirror process. Checkpoints are committed while the process is killed at random
instants and its store changes its mood (unruly_mirror.py), and objects in the store are damaged from outside. Then
the store becomes good and the last upload is asked for. Whatever happened, the answer must come, and what comes back
on an empty machine must be the run's newest checkpoint, byte for byte. Exits 1 when one case broke that.
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
from dataclasses import dataclass, field
from pathlib import Path

from jackline.checkpoint.format.catalogue import MIRROR, list_names
from jackline.checkpoint.format.manifest import MANIFEST
from jackline.checkpoint.mirror.engine import MirrorOptions
from jackline.checkpoint.mirror.fetch import fetch_newest
from jackline.checkpoint.mirror.process import MirrorProcess
from jackline.checkpoint.mirror.store import FolderStore
from jackline.rundir.layout import RunDir
from jackline.rundir.records.mirror import read_mirror
from tests.checkpoint.states import write_small
from tests.checkpoint.unruly_mirror import MOODS
from tests.shell import wait_for

COMMAND = (sys.executable, "-m", "tests.checkpoint.unruly_mirror")
ACTIONS = ("commit", "commit", "kill", "mood", "mood", "damage", "stop", "double")
NUM_ACTIONS = 14


@dataclass
class Tally:
    """What was done and what came of it."""

    actions: Counter[str] = field(default_factory=Counter)
    num_restarts: int = 0
    num_cases: int = 0
    wrong: list[str] = field(default_factory=list)

    def line(self) -> str:
        actions = ", ".join(f"{name} {count}" for name, count in sorted(self.actions.items()))
        return f"{self.num_cases} cases; {actions}; {self.num_restarts} restarts; {len(self.wrong)} wrong"


@dataclass
class Case:
    """One run, its store and the process between them."""

    folder: Path
    dice: random.Random
    tally: Tally
    step: int = 0

    def __post_init__(self) -> None:
        self.run = RunDir(self.folder / "runs" / "mine")
        self.run.checkpoints.mkdir(parents=True)
        self.run.run_file.write_text('{"name": "mine"}')
        self.far = self.folder / "far"
        self.process = self.new_process()
        self.others: list[MirrorProcess] = []

    def new_process(self) -> MirrorProcess:
        options = MirrorOptions(
            str(self.run.path), str(self.far), 0.0, os.getpid(), folder=str(self.run.checkpoints), patience_s=60.0
        )
        return MirrorProcess(COMMAND, options)

    def act(self, action: str) -> None:
        self.tally.actions[action] += 1
        getattr(self, f"_{action}")()

    def tend(self) -> None:
        if self.process.tend(time.monotonic()):
            self.tally.num_restarts += 1

    def heal(self) -> None:
        """Make the store good, ask for the last upload, and wait for the answer."""
        (self.folder / "mood").write_text("fine")
        number = time.time_ns() // 1_000_000

        def is_answered() -> bool:
            self.tend()
            self.process.ask(number)
            return read_mirror(self.run.checkpoints / MIRROR).answered >= number

        wait_for(is_answered, f"the last upload; {read_mirror(self.run.checkpoints / MIRROR)}")

    def check(self) -> None:
        """What comes back on an empty machine is the run's newest checkpoint."""
        fetched = fetch_newest(FolderStore(self.far), "mine", self.folder / "empty")
        newest = list_names(self.run.checkpoints)[0]
        assert fetched is not None and fetched.name == newest, f"{fetched} instead of {newest}"
        here = self.run.checkpoints / str(newest)
        for path in here.iterdir():
            assert (fetched.path / path.name).read_bytes() == path.read_bytes(), f"{path.name} of {newest} differs"
        store = FolderStore(self.far)
        unfinished = [
            name
            for name in store.names("mine/checkpoints")
            if name.startswith(f"{newest}-") and MANIFEST not in store.names(f"mine/checkpoints/{name}")
        ]
        assert not unfinished, f"unfinished uploads are left: {unfinished}"

    def end(self) -> None:
        for process in (self.process, *self.others):
            if process.pid is not None:
                with contextlib.suppress(OSError):
                    os.kill(process.pid, signal.SIGKILL)
                    wait_for(lambda process=process: process.tend(0.0), "its end")

    def _commit(self) -> None:
        self.step += self.dice.randint(1, 5)
        write_small(self.run.checkpoints, self.step)

    def _kill(self) -> None:
        self._signal(signal.SIGKILL)

    def _stop(self) -> None:
        """Stopped like by Ctrl-Z; whoever owns it wakes it."""
        self._signal(signal.SIGSTOP)

    def _mood(self) -> None:
        (self.folder / "mood").write_text(self.dice.choice(MOODS))

    def _damage(self) -> None:
        """Somebody damages an object in the store, or deletes it."""
        files = sorted(path for path in self.far.rglob("step-*/*") if path.is_file())
        if not files:
            return
        path = self.dice.choice(files)
        with contextlib.suppress(OSError):
            data = path.read_bytes()
            how = self.dice.choice(("flip", "cut", "delete"))
            if how == "delete":
                path.unlink()
            elif data:
                path.write_bytes(data[: len(data) // 2] if how == "cut" else data[:-1] + bytes([data[-1] ^ 1]))

    def _double(self) -> None:
        """A second process for the same run: only one of them may upload at a time."""
        self.others.append(self.new_process())
        self.others[-1].tend(time.monotonic())

    def _signal(self, number: int) -> None:
        if self.process.pid is not None:
            with contextlib.suppress(OSError):
                os.kill(self.process.pid, number)


def torture_one(folder: Path, dice: random.Random, tally: Tally) -> None:
    """One case. Raises AssertionError with what broke."""
    case = Case(folder, dice, tally)
    try:
        case.act("commit")
        for _ in range(NUM_ACTIONS):
            case.tend()
            time.sleep(dice.uniform(0.0, 0.15))  # not to wait for something: any instant will do
            case.act(dice.choice(ACTIONS))
        for other in case.others:
            if other.pid is not None:
                os.kill(other.pid, signal.SIGKILL)
        case.heal()
        case.check()
        tally.num_cases += 1
    finally:
        case.end()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    tally = Tally()
    for number in range(given.rounds):
        with tempfile.TemporaryDirectory() as folder:
            try:
                torture_one(Path(folder), random.Random(f"{given.seed} {number}"), tally)
            except AssertionError as broken:
                tally.wrong.append(f"seed {given.seed}, case {number}: {broken}")
                print(tally.wrong[-1], flush=True)
        if number % 10 == 9:
            print(tally.line(), flush=True)
    print(tally.line())
    sys.exit(bool(tally.wrong))


if __name__ == "__main__":
    main()
