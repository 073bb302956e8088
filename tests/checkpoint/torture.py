"""Kills, damage and faults without end: `scripts/torture`. Prints what it did and exits 1 at the first loss.

python -m tests.checkpoint.torture --seconds 60 --seed 1
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import json
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

from jackline.checkpoint.format.catalogue import LOCK, list_names
from jackline.checkpoint.format.manifest import Damage
from jackline.checkpoint.format.verify import verify_checkpoint
from jackline.checkpoint.writer.lock import read_holder
from jackline.rundir.lock import RunLock
from jackline.rundir.process_id import is_alive
from tests.checkpoint.faults import FaultyDisk, fail_after, fail_at, kill_at
from tests.checkpoint.light_trainer import LightTrainer, is_right, newest_whole
from tests.checkpoint.states import write_small
from tests.checkpoint.test_power_loss import judge as judge_power
from tests.checkpoint.test_power_loss import record
from tests.deadline import HANGS_S

PROGRAM = Path(__file__).with_name("light_trainer.py")
FAULTY_WRITER = (sys.executable, str(PROGRAM.with_name("faulty_writer.py")))
EARLY = 0.15  # of all lives
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


def torture_by_kill(
    folder: Path, rng_state: random.Random, *, seconds: float, kills: int, size: int = 300_000
) -> Tally:
    """SIGKILL to trainer, writer or both at chance instants, again and again on the same run."""
    tally = Tally()
    acks = folder.parent / "acks"
    checkpoints = folder / "checkpoints"
    checkpoints.mkdir(parents=True)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and sum(tally.kills.values()) < kills and not tally.losses:
        victim = rng_state.choice(VICTIMS)
        _one_life(checkpoints, acks, victim, rng_state, size)
        tally.kills[victim] += 1
        _judge(checkpoints, acks, tally, size)
    return tally


def _one_life(checkpoints: Path, acks: Path, victim: str, rng_state: random.Random, size: int) -> None:
    # The first line says that it has resumed, the others are acknowledged saves.
    wanted = _num_lines(acks) + rng_state.choice((1, 2, 3))
    # Now and then while it is still starting. Decided once a life: a slow machine must not have more of them.
    early_s = time.monotonic() + rng_state.random() if rng_state.random() < EARLY else float("inf")
    words = [sys.executable, str(PROGRAM), str(checkpoints), str(acks), str(size)]
    process = subprocess.Popen(words, stderr=subprocess.DEVNULL, start_new_session=True)
    deadline = time.monotonic() + HANGS_S
    while process.poll() is None and time.monotonic() < deadline:
        if _num_lines(acks) >= wanted or time.monotonic() > early_s:
            break
        time.sleep(0.002)
    time.sleep(rng_state.random() ** 2 * 0.15)
    holder = read_holder(checkpoints / LOCK)
    writer = holder.writer
    # The writer of the life before may still be finishing a save: without it, this trainer would live for ever.
    is_its_own = holder.trainer is not None and holder.trainer.pid == process.pid
    if victim in ("trainer", "both") or not is_alive(writer) or not is_its_own:
        process.kill()
    if victim in ("writer", "both") and writer is not None and is_alive(writer):
        with contextlib.suppress(ProcessLookupError):
            os.kill(writer.pid, signal.SIGKILL)
    try:
        process.wait(HANGS_S)  # a trainer whose writer is gone ends by itself
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _num_lines(acks: Path) -> int:
    return acks.read_bytes().count(b"\n") if acks.exists() else 0


def _judge(checkpoints: Path, acks: Path, tally: Tally, size: int) -> None:
    lines = acks.read_text().split("\n")[:-1] if acks.exists() else []
    acknowledged = [int(line.split()[1]) for line in lines if line.startswith("ACK")]
    tally.commits, tally.resumes = len(acknowledged), sum(line.startswith("RESUME") for line in lines)
    if any(line.startswith("WRONG") for line in lines):
        tally.losses.append(lines[-1])
    deadline = time.monotonic() + HANGS_S
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


def save_calmly(folder: Path, saves: int, size: int) -> None:
    trainer = LightTrainer(folder / "checkpoints", size)
    try:
        trainer.wait_for("ready")
        found = newest_whole(folder / "checkpoints")
        for step in range(1, saves + 1):
            assert (trainer.save((found[0] if found else 0) + step) or {})["event"] == "committed"
    finally:
        _end(trainer)


def damage_every_file(folder: Path, rng_state: random.Random, *, rounds: int, size: int = 300_000) -> tuple[int, int]:
    """Flips, cuts, empties, deletes and swaps files of the newest checkpoint; returns (damaged, detected)."""
    checkpoints = folder / "checkpoints"
    names = list_names(checkpoints)
    newest, older = checkpoints / str(names[0]), checkpoints / str(names[1])
    damaged = detected = 0
    for _ in range(rounds):
        for file in sorted(path.name for path in newest.iterdir()):
            for how in ("flip", "cut", "empty", "delete", "swap", "hole"):
                kept = (newest / file).read_bytes()
                if not _damage(newest / file, older / file, how, rng_state):
                    continue
                damaged += 1
                try:
                    verify_checkpoint(newest, is_direct=False)
                except Damage:
                    found = newest_whole(checkpoints)
                    detected += found is not None and found[1] == older and is_right(older, names[1].step, size)
                (newest / file).write_bytes(kept)
    return damaged, detected


def _damage(path: Path, other: Path, how: str, rng_state: random.Random) -> bool:
    data = bytearray(path.read_bytes())
    if how == "delete":
        path.unlink()
        return True
    if how == "flip":
        data[rng_state.randrange(len(data))] ^= 1 << rng_state.randrange(8)
        if path.name == "manifest.json" and _same_json(path.read_bytes(), bytes(data)):
            return False  # a blank became another blank: nothing is said differently
    elif how == "cut":
        del data[rng_state.randrange(len(data) - 1) :]
    elif how == "empty":
        data.clear()
    elif how == "swap":
        data = bytearray(other.read_bytes())
    elif how == "hole":
        start = rng_state.randrange(len(data))
        data[start : start + 4096] = bytes(len(data[start : start + 4096]))
    if bytes(data) == path.read_bytes():
        return False
    path.write_bytes(data)
    return True


def _same_json(first: bytes, second: bytes) -> bool:
    try:
        return bool(json.loads(first) == json.loads(second))
    except ValueError:
        return False


def kill_around_every_call(place: Path, size: int = 60_000) -> tuple[int, int]:
    """The writer dies before or after each of its calls, and its trainer with it; returns (kills, losses)."""
    kills = losses = 0
    for when in ("before", "after"):
        for nth in range(1, 1000):
            folder, fired = place / f"{when}-{nth}", place / f"fired-{when}-{nth}"
            first = LightTrainer(folder, size)
            assert (first.save(1) or {})["event"] == "committed"
            _end(first)
            os.environ["FAULT"] = kill_at(nth, when, fired=str(fired)).to_json()
            second = LightTrainer(folder, size, FAULTY_WRITER)
            report = second.save(2)
            _end(second)
            found = newest_whole(folder)
            is_kept = found is not None and is_right(found[1], found[0], size) and found[0] >= (2 if report else 1)
            shutil.rmtree(folder, ignore_errors=True)
            if not fired.exists():
                break  # a save has no more calls than that
            kills += 1
            losses += not is_kept
    return kills, losses


def _end(trainer: LightTrainer) -> None:
    trainer.writer.send({"op": "close"}, timeout_s=1)
    trainer.writer.wait_end(30)
    trainer.writer.let_go()


def fail_every_call(place: Path) -> tuple[int, int]:
    """ENOSPC, EIO and EDQUOT at each call of a commit, before it and after it; returns (faults, losses)."""
    faults = losses = 0
    for make in (fail_at, fail_after):
        for number in (errno.ENOSPC, errno.EIO, errno.EDQUOT):
            for nth in range(1, 1000):
                folder = place / f"{make.__name__}-{number}-{nth}"
                folder.mkdir()
                write_small(folder, 1)
                disk = FaultyDisk(make(None, nth=nth, with_errno=number))
                acknowledged = True
                try:
                    write_small(folder, 2, disk=disk)
                except OSError:
                    acknowledged = False
                names = list_names(folder)
                wholes = [name for name in names if _is_whole(folder / str(name))]
                losses += len(wholes) != len(names) or (acknowledged and wholes[0].step != 2) or wholes[-1].step != 1
                shutil.rmtree(folder)
                if not disk.num_fired:
                    break
                faults += 1
    return faults, losses


def _is_whole(path: Path) -> bool:
    try:
        verify_checkpoint(path, is_direct=False, threads=1)
    except Damage:
        return False
    return True


def cut_the_power(place: Path, saves: int) -> tuple[int, int]:
    """Every state after a power cut in the middle of several saves; returns (states, states that loaded)."""
    disk = record(place / "real", saves=saves, keep=2)
    states = judge_power(disk, place / "replay")
    return len(disk.calls), states


def kill_real_training(place: Path, rng_state: random.Random, *, seconds: float) -> tuple[int, int]:
    """A real torch program, killed until the time is up, then left to end; returns (kills, differences)."""
    place.mkdir()
    (place / "calm").mkdir()
    (place / "run").mkdir()
    words = [sys.executable, str(PROGRAM.with_name("exact_trainer.py"))]
    subprocess.run([*words, str(place / "calm"), "300", str(place / "calm.notes"), "overlapped"], check=True)
    last = (place / "calm.notes").read_text().split("\n")[-2]
    deadline = time.monotonic() + seconds
    kills = 0
    while True:
        process = subprocess.Popen([*words, str(place / "run"), "300", str(place / "notes"), "overlapped"])
        if time.monotonic() > deadline:
            process.wait()
            break
        size = (place / "notes").stat().st_size if (place / "notes").exists() else 0
        while process.poll() is None and (not (place / "notes").exists() or (place / "notes").stat().st_size == size):
            time.sleep(0.002)
        time.sleep(rng_state.random() * 0.5)
        process.kill()
        kills += process.wait() == -9
    lines = (place / "notes").read_text().split("\n")[:-1]
    expected = {
        w[1]: w[2] for w in map(str.split, (place / "calm.notes").read_text().split("\n")[:-1]) if w[0] == "STEP"
    }
    differences = sum(words[2] != expected[words[1]] for words in map(str.split, lines) if words[0] == "STEP")
    return kills, differences + (lines[-1] != last)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--minutes", type=float, default=3.0, help="for the kills at chance instants")
    options.add_argument("--kills", type=int, default=1 << 60, help="end earlier, after so many")
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--size", type=int, default=300_000, help="bytes of each of the two tensor files")
    options.add_argument("--folder", type=Path, default=None, help="where to work; default: a temporary folder")
    given = options.parse_args()
    rng_state = random.Random(given.seed)
    place = Path(tempfile.mkdtemp(prefix="jackline-torture-", dir=given.folder))
    losses = 0
    try:
        seconds = given.minutes * 60
        tally = torture_by_kill(place / "run", rng_state, seconds=seconds * 0.75, kills=given.kills, size=given.size)
        print(f"seed {given.seed}: {tally.line()}", flush=True)
        losses += len(tally.losses)
        save_calmly(place / "run", 2, given.size)
        damaged, detected = damage_every_file(place / "run", rng_state, rounds=20, size=given.size)
        print(
            f"{damaged} times a file of the newest checkpoint damaged: {detected} detected and the one before it used"
        )
        losses += damaged - detected
        for name, done in (
            ("SIGKILL of writer and trainer around every call of a save", kill_around_every_call(place)),
            ("errors at every call of a save", fail_every_call(place)),
        ):
            print(f"{done[0]} times {name}: {done[1]} lost", flush=True)
            losses += done[1]
        calls, states = cut_the_power(place, saves=5)
        print(
            f"power cut after each of {calls} calls: {states} possible disks, all load what was acknowledged",
            flush=True,
        )
        kills, differences = kill_real_training(place / "real-training", rng_state, seconds=seconds * 0.25)
        print(f"{kills} SIGKILLs of a real training: {differences} losses or states differ from the run never killed")
        losses += differences
        for loss in tally.losses:
            print(f"LOST: {loss}")
    finally:
        shutil.rmtree(place, ignore_errors=True)
    print("nothing was lost" if not losses else f"{losses} LOST")
    sys.exit(1 if losses else 0)


if __name__ == "__main__":
    main()
