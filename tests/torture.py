"""All kinds of torture by turns, for as long as you like, with one sum at the end: `scripts/torture --hours 1`.

    python -m tests.torture --hours 1 --seed 7 [--at-once 2] [--only whole,disk]

The part that has had the least of its share of time plays next. A turn is one whole case of that part, judged by the
part's own rules: nothing acknowledged lost, weights bit-equal, no process left. Exits 1 when one case broke a rule.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from tests.checkpoint import mirror_torture
from tests.checkpoint.torture import torture_by_kill
from tests.places import Unavailable
from tests.session import ranks_torture
from tests.session import torture as session_torture
from tests.session.nursery import Nursery
from tests.stories import disk_torture, foreign_torture, process_torture, whole_torture

RANKS_STEPS = 200


@dataclass(frozen=True)
class Came:
    """What one turn did. `faults`: full disks, damaged files, failing stores."""

    kills: int = 0
    faults: int = 0
    wrong: tuple[str, ...] = ()


Turn = Callable[[Path, random.Random], Came]


@dataclass
class Part:
    """One kind of torture, its share of the time and what came of it so far."""

    name: str
    share: float
    turn: Turn
    used_s: float = 0.0
    turns: int = 0
    kills: int = 0
    faults: int = 0
    wrong: list[str] = field(default_factory=list)
    is_playing: bool = False

    def add(self, came: Came, took_s: float) -> None:
        self.turns, self.kills, self.faults = self.turns + 1, self.kills + came.kills, self.faults + came.faults
        self.used_s += took_s
        self.wrong += came.wrong

    def line(self) -> str:
        took = f"{self.used_s / 60:7.1f}"
        return f"{self.name:12}{self.turns:7}{self.kills:8}{self.faults:8}{len(self.wrong):7}{took}"


def choose_next(parts: list[Part]) -> Part | None:
    """The idle part that has had the least of its share."""
    idle = [part for part in parts if not part.is_playing]
    return min(idle, key=lambda part: part.used_s / part.share, default=None)


def table(parts: list[Part]) -> str:
    total = Part("all", 1.0, lambda _place, _dice: Came())
    for part in parts:
        total.add(Came(part.kills, part.faults, tuple(part.wrong)), part.used_s)
    total.turns = sum(part.turns for part in parts)
    head = f"{'':12}{'cases':>7}{'kills':>8}{'faults':>8}{'wrong':>7}{'min':>7}"
    return "\n".join([head, *(part.line() for part in (*parts, total))])


# -- the parts ------------------------------------------------------------------------------------------------------


def play_checkpoint(place: Path, dice: random.Random) -> Came:
    """Trainer and writer of a training without torch: the fastest way to meet every instant of a save."""
    tally = torture_by_kill(place / "run", dice, seconds=600.0, kills=12)
    return Came(sum(tally.kills.values()) + tally.kills["both"], wrong=tuple(tally.losses))


def play_processes(place: Path, dice: random.Random) -> Came:
    counts, left = process_torture.play(dice.randrange(1 << 30), place)
    return Came(counts.total(), wrong=(left,) if left else ())


def play_foreign(place: Path, dice: random.Random) -> Came:
    tally = foreign_torture.Tally()
    kind = dice.choice(list(foreign_torture.KINDS))
    foreign_torture.torture_case(place / kind, kind, dice.randrange(1 << 30), tally)
    return Came(tally.ends["kill"] + 2 * tally.ends["kill both"], wrong=tuple(tally.wrong))


def play_mirror(place: Path, dice: random.Random) -> Came:
    tally, wrong = mirror_torture.Tally(), ()
    try:
        mirror_torture.torture_one(place / "case", dice, tally)
    except AssertionError as broken:
        wrong = (str(broken),)
    return Came(tally.actions["kill"], tally.actions["mood"] + tally.actions["damage"], wrong)


class Session:
    """The examples of own loops, each until it has finished; one warm process serves all turns."""

    def __init__(self) -> None:
        self._nursery: Nursery | None = None
        self._wanted: dict[str, tuple[str, float]] = {}

    def play(self, place: Path, dice: random.Random) -> Came:
        self._nursery = self._nursery or Nursery()
        name = dice.choice(list(session_torture.SMALL))
        if name not in self._wanted:
            self._wanted[name] = session_torture.reference(self._nursery, place, name)
        tally = session_torture.Tally()
        session_torture.torture_one(self._nursery, place / name, (name, *self._wanted[name]), dice, tally)
        return Came(tally.kills.total(), wrong=tuple(tally.wrong))

    def close(self) -> None:
        if self._nursery is not None:
            self._nursery.close()


class Disk:
    """A disk that is full, has no inodes or is read-only at some moment of everything that writes."""

    def __init__(self) -> None:
        self._wanted: dict[str, str] = {}

    def play(self, _place: Path, dice: random.Random) -> Came:
        subject = dice.choice(disk_torture.SUBJECTS)
        fault, moment = dice.choice(list(disk_torture.FAULTS)), dice.choice(subject.moments)
        if subject.name not in self._wanted:
            self._wanted[subject.name] = disk_torture.undisturbed(subject)
        with disk_torture.new_world(subject) as world:
            wrong = disk_torture.one_round(world, subject, fault, moment, self._wanted[subject.name])
        return Came(0, 1, tuple(f"{subject.name}, {fault} after {moment!r}: {text}" for text in wrong))


class Whole:
    """All processes of a supervised run with a mirror, on a disk that is sometimes full."""

    def __init__(self) -> None:
        self._wanted: list[str] = []

    def play(self, place: Path, dice: random.Random) -> Came:
        self._wanted = self._wanted or whole_torture.undisturbed(place / "undisturbed")
        tally = whole_torture.Tally()
        whole_torture.torture_one(place / "case", self._wanted, dice, tally)
        return Came(tally.kills.total(), tally.full_disks, tuple(tally.wrong))


class Ranks:
    """Two ranks with DDP."""

    def __init__(self) -> None:
        self._wanted: ranks_torture.Wanted | None = None

    def play(self, place: Path, dice: random.Random) -> Came:
        crew = ranks_torture.Crew(total=RANKS_STEPS)
        self._wanted = self._wanted or crew.undisturbed(place / "undisturbed")
        found, problem = ranks_torture.torment(crew, place / "case", self._wanted, dice, kills=dice.randint(1, 4))
        return Came(found["rank"] + found["node"], wrong=(problem,) if problem else ())


# -- taking turns ---------------------------------------------------------------------------------------------------


class Turns:
    """Gives the parts their turns until the time is up. Several at once, but never two of one part."""

    def __init__(self, parts: list[Part], folder: Path, seed: int, seconds: float) -> None:
        self._parts, self._folder, self._seed = parts, folder, seed
        self._deadline_s = time.monotonic() + seconds
        self._lock = threading.Lock()
        self._number = 0

    def stop(self) -> None:
        self._deadline_s = 0.0

    def play(self) -> None:
        while time.monotonic() < self._deadline_s:
            with self._lock:
                part = choose_next(self._parts)
                if part is None:
                    return  # more workers than parts
                part.is_playing = True
                self._number += 1
                number = self._number
            self._one(part, number)

    def _one(self, part: Part, number: int) -> None:
        place, began_s = self._folder / f"{number}-{part.name}", time.monotonic()
        place.mkdir(parents=True)
        dice = random.Random(f"{self._seed} {part.name} {part.turns}")
        try:
            came = part.turn(place, dice)
        except Unavailable as reason:
            came = Came()
            print(f"{part.name}: not run: {reason}", flush=True)
        except Exception as problem:  # a case that could not be judged is no success, and the others still get turns
            came = Came(wrong=(f"seed {self._seed}, turn {part.turns}: {problem!r}",))
        with self._lock:
            part.add(came, time.monotonic() - began_s)
            part.is_playing = False
            for text in came.wrong:
                print(f"WRONG: {part.name}, turn {part.turns - 1}: {text}", flush=True)
            if number % 20 == 0:
                print(table(self._parts), flush=True)
        if not came.wrong:
            shutil.rmtree(place, ignore_errors=True)


def all_parts(stack: contextlib.ExitStack) -> list[Part]:
    session = Session()
    stack.callback(session.close)
    return [
        Part("whole", 0.28, Whole().play),
        Part("checkpoint", 0.30, play_checkpoint),
        Part("processes", 0.20, play_processes),
        Part("session", 0.06, session.play),
        Part("foreign", 0.05, play_foreign),
        Part("disk", 0.05, Disk().play),
        Part("mirror", 0.04, play_mirror),
        Part("ranks", 0.02, Ranks().play),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hours", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--at-once", type=int, default=2)
    parser.add_argument("--only", default="", help="parts, with commas between them")
    given = parser.parse_args()
    os.environ["XDG_STATE_HOME"] = os.environ["JACKLINE_RUNS"] = ""
    folder = Path(tempfile.mkdtemp(prefix="jackline-torture-"))
    print(f"seed {given.seed}, in {folder}", flush=True)
    with contextlib.ExitStack() as stack:
        parts = all_parts(stack)
        if given.only:
            parts = [part for part in parts if part.name in given.only.split(",")]
        turns = Turns(parts, folder, given.seed, given.hours * 3600)
        with ThreadPoolExecutor(given.at_once) as pool:
            for work in [pool.submit(turns.play) for _ in range(given.at_once)]:
                work.result()
    print(table(parts))
    num_wrong = sum(len(part.wrong) for part in parts)
    if not num_wrong:
        shutil.rmtree(folder, ignore_errors=True)
    print("nothing was lost" if not num_wrong else f"{num_wrong} WRONG")
    return int(bool(num_wrong))


if __name__ == "__main__":
    sys.exit(main())
