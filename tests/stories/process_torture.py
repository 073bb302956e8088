"""Random subsets of a run's processes are killed with SIGKILL; afterwards no process of it may be left.

A round starts a command with workers, kills any of supervisor, keeper, main process and workers in any order, and
then does what a person would do: stop it if it lives, look at it once. Run by `scripts/torture processes`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.shell import Shell, wait_for

WORKER = """
import signal, sys, time
signal.signal(15, signal.SIG_IGN if 'deaf' in sys.argv[1] else signal.SIG_DFL)
time.sleep(3600)
"""
SCRIPT = f"""
import pathlib, subprocess, sys, time
shape = sys.argv[1]
worker = [sys.executable, "-c", {WORKER!r}, shape]
workers = [subprocess.Popen(worker, start_new_session="own" in shape) for _ in range(2)]
pathlib.Path("workers-" + shape + ".txt").write_text(" ".join(str(one.pid) for one in workers))
print("training", flush=True)
time.sleep(3600)
"""
SHAPES = ("plain", "own-session", "deaf", "own-deaf")
TARGETS = ("supervisor", "keeper", "child", "worker-0", "worker-1")


def play(seed: int, folder: Path) -> tuple[Counter[str], str]:
    """One round; returns what was killed, and what is left over ('' for nothing)."""
    chance = random.Random(seed)
    shell = Shell(folder / str(seed))
    counts: Counter[str] = Counter()
    try:
        shape = chance.choice(SHAPES)
        options = chance.choice(([], ["--restart", "1"], ["--when-done", "true"]))
        command = shell.python("train.py", SCRIPT, shape)
        started = shell.jackline("run", "--name", "mine", "--grace", "2s", *options, "--detach", "--", *command)
        assert started.code == 0, started
        pids = processes_of(shell, shape)
        killed = chance.sample(TARGETS, chance.randint(1, len(TARGETS)))
        for name in killed:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pids[name], signal.SIGKILL)
                counts[name] += 1
            time.sleep(chance.choice((0.0, 0.0, 0.0, 0.02, 0.3)))
        end(shell)
        left = shell.left_over()
        return counts, f"seed {seed}: {shape} {options} killed {killed}: left {left}" if left else ""
    finally:
        shell.close()


def processes_of(shell: Shell, shape: str) -> dict[str, int]:
    file = shell.work / f"workers-{shape}.txt"
    wait_for(lambda: file.exists() and len(file.read_text().split()) == 2, "the workers")
    state: dict[str, Any] = shell.run_dir("mine").state()
    workers = [int(word) for word in file.read_text().split()]
    known = {name: int(state[name]["pid"]) for name in ("supervisor", "keeper", "child")}
    return {**known, "worker-0": workers[0], "worker-1": workers[1]}


def end(shell: Shell) -> None:
    """What a person does: ask how it is, stop it if it lives, and look at its end once."""
    for _ in range(6):
        found = shell.jackline("status", "mine", "--json")
        state = json.loads(found.out)["state"]
        if state in ("alive", "unwatched"):
            shell.jackline("stop", "mine")
        elif not (shell.runs / "mine" / "attempts" / last(shell) / "exit.json").exists():
            shell.jackline("watch", "mine")
        else:
            return


def last(shell: Shell) -> str:
    return max(path.name for path in (shell.runs / "mine" / "attempts").iterdir())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--at-once", type=int, default=4)
    given = parser.parse_args()
    counts: Counter[str] = Counter()
    wrong: list[str] = []
    rounds, seed = 0, given.seed
    with tempfile.TemporaryDirectory() as made, ThreadPoolExecutor(given.at_once) as pool:
        while sum(counts.values()) < given.kills:
            seeds = range(seed, seed + given.at_once)
            seed += given.at_once
            for killed, left in pool.map(lambda one: play(one, Path(made)), seeds):
                counts += killed
                rounds += 1
                wrong += [left] if left else []
            print(f"{sum(counts.values())} kills in {rounds} rounds, {len(wrong)} with orphans", flush=True)
    print("\n".join(wrong))
    print(f"{sum(counts.values())} kills ({dict(counts)}), {rounds} rounds: {len(wrong)} rounds left orphans")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
