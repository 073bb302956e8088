"""Healthy programs, several at once and again and again beside busy loops: how many false alarms sound?

    python -m tests.stories.soak --minutes 20 --at-once 6 --load 2 --seed 1

Each program runs under `jackline run` with limits ten times shorter than usual (`--stuck-after 6`), so a watched hour
counts at least as much as ten. Prints every alarm with the run directory that it keeps, and the watched time every
five minutes and at the end. Exits 1 after a STUCK, or after more than one SUSPECT in ten watched hours.
"""

from __future__ import annotations

import argparse
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from tests.expectations import alarms_of
from tests.places import Unavailable
from tests.zoo import HEALTHY, Program, list_programs, run_program

BURN = "import os\nparent = os.getppid()\nwhile os.getppid() == parent:\n    for _ in range(1_000_000): pass"
SUSPECTS_PER_S = 1 / 36_000


@dataclass
class Soak:
    """What has been seen so far."""

    folder: Path
    watched_s: float = 0.0
    num_runs: int = 0
    stuck: list[str] = field(default_factory=list)
    suspect: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    told_s: float = field(default_factory=time.monotonic)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def watch(self, program: Program) -> None:
        with self.lock:
            self.num_runs += 1
            folder = self.folder / f"{self.num_runs:05d}-{program.name}"
        try:
            outcome = run_program(program, folder)
        except Unavailable:
            return
        alarms = alarms_of(outcome)
        with self.lock:
            self.watched_s += outcome.ended_s - outcome.began_s
            for alarm in alarms:
                kind = self.stuck if "STUCK" in alarm else self.suspect
                kind.append(f"{program.name}: {alarm} (kept in {folder})")
                print(kind[-1], flush=True)
            if outcome.exit.get("cause") != "finished":
                self.failed.append(f"{program.name}: {outcome.exit.get('text')} (kept in {folder})")
                print(self.failed[-1], flush=True)
        if not alarms and outcome.exit.get("cause") == "finished":
            shutil.rmtree(folder, ignore_errors=True)

    def tell_now_and_then(self, every_s: float = 300.0) -> None:
        with self.lock:
            if time.monotonic() - self.told_s >= every_s:
                self.told_s = time.monotonic()
                print(f"so far: {self.told()}", flush=True)

    def told(self) -> str:
        return (
            f"{self.watched_s / 60:.0f} minutes watched in {self.num_runs} runs: {len(self.stuck)} STUCK, "
            f"{len(self.suspect)} SUSPECT or other alarms, {len(self.failed)} failed"
        )

    def is_held(self) -> bool:
        return not self.stuck and not self.failed and len(self.suspect) <= max(1.0, self.watched_s * SUSPECTS_PER_S)


def soak(minutes: float, at_once: int, load: int, rng: random.Random) -> Soak:
    found = Soak(Path(tempfile.mkdtemp(prefix="soak-")))
    programs = list_programs(HEALTHY)
    end_s = time.monotonic() + 60 * minutes
    burners = [subprocess.Popen([sys.executable, "-c", BURN]) for _ in range(load)]

    def work() -> None:
        while time.monotonic() < end_s:
            found.watch(rng.choice(programs))
            found.tell_now_and_then()

    try:
        with ThreadPoolExecutor(at_once) as pool:
            for task in [pool.submit(work) for _ in range(at_once)]:
                task.result()
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--at-once", type=int, default=6)
    parser.add_argument("--load", type=int, default=2, help="busy loops beside them")
    parser.add_argument("--seed", type=int, default=0)
    words = parser.parse_args()
    found = soak(words.minutes, words.at_once, words.load, random.Random(words.seed))
    print(found.told())
    return 0 if found.is_held() else 1


if __name__ == "__main__":
    raise SystemExit(main())
