"""Kills, damage and faults without end: `scripts/torture`. Prints what it did and exits 1 at the first loss.

python -m tests.checkpoint.torture --seconds 60 --seed 1
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from jackline.checkpoint.catalogue import LOCK, list_names
from jackline.checkpoint.format import Damage
from jackline.checkpoint.lock import read_holder
from jackline.checkpoint.verify import verify_checkpoint
from jackline.rundir.lock import RunLock
from jackline.rundir.process_id import is_alive
from tests.checkpoint.light_trainer import is_right, newest_whole

PROGRAM = Path(__file__).with_name("light_trainer.py")
VICTIMS = ("trainer", "writer", "both")


@dataclass
class Tally:
    """What was done and what came of it."""

    kills: dict[str, int] = field(default_factory=lambda: dict.fromkeys(VICTIMS, 0))
    commits: int = 0
    resumes: int = 0
    unheard: int = 0  # saves that were committed although their trainer was killed
    losses: list[str] = field(default_factory=list)

    def line(self) -> str:
        kills = ", ".join(f"{who} {count}" for who, count in self.kills.items())
        return (
            f"{sum(self.kills.values())} kills ({kills}); {self.commits} commits acknowledged, "
            f"{self.resumes} resumes, {self.unheard} committed that a dead trainer never heard of; "
            f"{len(self.losses)} acknowledged lost"
        )


def torture_by_kill(folder: Path, chance: random.Random, *, seconds: float, kills: int, size: int = 300_000) -> Tally:
    """SIGKILL to trainer, writer or both at chance instants, again and again on the same run."""
    tally = Tally()
    acks = folder.parent / "acks"
    checkpoints = folder / "checkpoints"
    checkpoints.mkdir(parents=True)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and sum(tally.kills.values()) < kills and not tally.losses:
        victim = chance.choice(VICTIMS)
        _one_life(checkpoints, acks, victim, chance, size)
        tally.kills[victim] += 1
        _judge(checkpoints, acks, tally, size)
    return tally


def _one_life(checkpoints: Path, acks: Path, victim: str, chance: random.Random, size: int) -> None:
    before = acks.stat().st_size if acks.exists() else 0
    words = [sys.executable, str(PROGRAM), str(checkpoints), str(acks), str(size)]
    process = subprocess.Popen(words, stderr=subprocess.DEVNULL, start_new_session=True)
    deadline = time.monotonic() + 60
    while process.poll() is None and time.monotonic() < deadline:
        if acks.exists() and acks.stat().st_size > before:
            break
        if chance.random() < 0.002:
            break  # now and then while it is still starting
        time.sleep(0.002)
    time.sleep(chance.random() ** 2 * 0.15)
    writer = read_holder(checkpoints / LOCK).writer
    if victim in ("trainer", "both"):
        process.kill()
    if victim in ("writer", "both") and writer is not None and is_alive(writer):
        with contextlib.suppress(ProcessLookupError):
            os.kill(writer.pid, signal.SIGKILL)
    try:
        process.wait(10)  # a trainer whose writer is gone ends by itself
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _judge(checkpoints: Path, acks: Path, tally: Tally, size: int) -> None:
    lines = acks.read_text().split("\n")[:-1] if acks.exists() else []
    acknowledged = [int(line.split()[1]) for line in lines if line.startswith("ACK")]
    tally.commits, tally.resumes = len(acknowledged), sum(line.startswith("RESUME") for line in lines)
    if any(line.startswith("WRONG") for line in lines):
        tally.losses.append(lines[-1])
    deadline = time.monotonic() + 60
    lock = RunLock(checkpoints / LOCK)
    while not lock.try_acquire() and time.monotonic() < deadline:
        time.sleep(0.005)  # an orphan is finishing its save
    lock.release()
    found = newest_whole(checkpoints)
    last = acknowledged[-1] if acknowledged else 0
    if last and (found is None or found[0] < last):
        tally.losses.append(f"step {last} was acknowledged, the newest whole one is {found and found[0]}")
    if found is not None:
        if not is_right(found[1], found[0], size):
            tally.losses.append(f"step {found[0]} is whole but wrong")
        tally.unheard += found[0] > last


def damage_every_file(folder: Path, chance: random.Random, *, rounds: int, size: int = 300_000) -> tuple[int, int]:
    """Flips, cuts, empties, deletes and swaps files of the newest checkpoint; returns (damaged, detected)."""
    checkpoints = folder / "checkpoints"
    names = list_names(checkpoints)
    newest, older = checkpoints / str(names[0]), checkpoints / str(names[1])
    damaged = detected = 0
    for _ in range(rounds):
        for file in sorted(path.name for path in newest.iterdir()):
            for how in ("flip", "cut", "empty", "delete", "swap", "hole"):
                kept = (newest / file).read_bytes()
                if not _damage(newest / file, older / file, how, chance):
                    continue
                damaged += 1
                try:
                    verify_checkpoint(newest, is_direct=False)
                except Damage:
                    found = newest_whole(checkpoints)
                    detected += found is not None and found[1] == older and is_right(older, names[1].step, size)
                (newest / file).write_bytes(kept)
    return damaged, detected


def _damage(path: Path, other: Path, how: str, chance: random.Random) -> bool:
    data = bytearray(path.read_bytes())
    if how == "delete":
        path.unlink()
        return True
    if how == "flip":
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        if path.name == "manifest.json" and _same_json(path.read_bytes(), bytes(data)):
            return False  # a blank became another blank: nothing is said differently
    elif how == "cut":
        del data[chance.randrange(len(data) - 1) :]
    elif how == "empty":
        data.clear()
    elif how == "swap":
        data = bytearray(other.read_bytes())
    elif how == "hole":
        start = chance.randrange(len(data))
        data[start : start + 4096] = bytes(len(data[start : start + 4096]))
    if bytes(data) == path.read_bytes():
        return False
    path.write_bytes(data)
    return True


def _same_json(first: bytes, second: bytes) -> bool:
    import json

    try:
        return bool(json.loads(first) == json.loads(second))
    except ValueError:
        return False


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--seconds", type=float, default=60.0)
    options.add_argument("--kills", type=int, default=1 << 60)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--size", type=int, default=300_000, help="bytes of each of the two tensor files")
    options.add_argument("--folder", type=Path, default=None, help="where to work; default: a temporary folder")
    given = options.parse_args()
    chance = random.Random(given.seed)
    place = Path(tempfile.mkdtemp(prefix="jackline-torture-", dir=given.folder))
    try:
        tally = torture_by_kill(place / "run", chance, seconds=given.seconds, kills=given.kills, size=given.size)
        print(f"seed {given.seed}: {tally.line()}")
        damaged, detected = damage_every_file(place / "run", chance, rounds=20, size=given.size)
        print(f"{damaged} damaged files of the newest checkpoint: {detected} detected and the one before it used")
    finally:
        shutil.rmtree(place, ignore_errors=True)
    for loss in tally.losses:
        print(f"LOST: {loss}")
    sys.exit(1 if tally.losses or damaged != detected else 0)


if __name__ == "__main__":
    main()
