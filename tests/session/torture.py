"""kill -9 at random instants over the examples, the number of workers changing: `scripts/torture session`.

    python -m tests.session.torture --kills 200 --seed 1

Every finished run must have the weights, bit for bit, of a run that was never killed; exits 1 at the first that
has not. Instants are spread over whole attempts: start, proof, steps, saves, evaluation, end.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from tests.session.nursery import Nursery
from tests.session.test_examples import EXAMPLES, SMALL, weights_of


@dataclass
class Tally:
    """What was done and what came of it."""

    kills: Counter[str] = field(default_factory=Counter)
    finished: Counter[str] = field(default_factory=Counter)
    resumed_from: Counter[str] = field(default_factory=Counter)
    workers: Counter[int] = field(default_factory=Counter)  # attempts, by their number of workers
    commits: int = 0  # those the attempts lived to hear of
    wrong: list[str] = field(default_factory=list)

    def line(self) -> str:
        each = ", ".join(f"{name} {count}" for name, count in sorted(self.kills.items()))
        return (
            f"{self.kills.total()} kills ({each}); {self.commits} commits heard of; "
            f"{self.finished.total()} runs finished, "
            f"{self.resumed_from['a checkpoint']} attempts continued from a checkpoint, "
            f"{self.resumed_from['the beginning']} from the beginning; {len(self.wrong)} runs were not bit-equal; "
            f"attempts with 0, 1, 2 workers: {', '.join(str(self.workers[count]) for count in range(3))}"
        )


def torture(folder: Path, *, kills: int, seed: int) -> Tally:
    tally, dice, nursery = Tally(), random.Random(seed), Nursery()
    try:
        wanted = {name: reference(nursery, folder, name) for name in SMALL}
        for name, (weights, took_s) in wanted.items():
            print(f"{name}: {weights}, {took_s:.1f} s without a kill", flush=True)
        number = 0
        while tally.kills.total() < kills and not tally.wrong:
            name = min(SMALL, key=lambda name: tally.kills[name])
            weights, took_s = wanted[name]
            number += 1
            torture_one(nursery, folder / f"{name}-{number}", (name, weights, took_s), dice, tally)
            print(tally.line(), flush=True)
    finally:
        nursery.close()
    return tally


def reference(nursery: Nursery, folder: Path, name: str) -> tuple[str, float]:
    place = folder / f"{name}-whole"
    place.mkdir()
    began_s = time.monotonic()
    ended = nursery.run(EXAMPLES / f"{name}.py", [*SMALL[name], "--name", "whole"], place)
    return weights_of(ended.output), time.monotonic() - began_s


def torture_one(
    nursery: Nursery, folder: Path, example: tuple[str, str, float], dice: random.Random, tally: Tally
) -> None:
    """One run from its first start to its end, killed again and again."""
    name, weights, took_s = example
    folder.mkdir()
    while True:
        workers = dice.randint(0, 2)
        tally.workers[workers] += 1
        arguments = [*SMALL[name], "--name", "killed", "--workers", str(workers)]
        child = nursery.start(EXAMPLES / f"{name}.py", arguments, folder)
        if dice.random() < 0.85:  # after the start, which most instants would else fall into on a busy machine
            child.wait_for("[jackline] ", 120.0)
        time.sleep(dice.uniform(0.0, 0.7 * took_s))
        child.signal(signal.SIGKILL)
        ended = child.wait()
        has_resumed = "resuming from step-" in ended.output
        tally.resumed_from["a checkpoint" if has_resumed else "the beginning"] += 1
        if ended.code == -9:
            tally.kills[name] += 1
            continue
        if ended.code != 0 or weights_of(ended.output) != weights:
            tally.wrong.append(f"{folder}: exit code {ended.code}, wanted {weights}\n{ended.output}")
            return
        tally.finished[name] += 1
        tally.commits += (folder / "runs" / "killed" / "events-0.jsonl").read_text().count('"checkpoint_committed"')
        shutil.rmtree(folder)
        return


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    arguments = parser.parse_args()
    os.environ["XDG_STATE_HOME"] = os.environ["JACKLINE_RUNS"] = ""
    folder = Path(tempfile.mkdtemp(prefix="jackline-torture-"))
    print(f"seed {arguments.seed}, in {folder}", flush=True)
    tally = torture(folder, kills=arguments.kills, seed=arguments.seed)
    print(tally.line())
    for wrong in tally.wrong:
        print(wrong)
    if not tally.wrong:
        shutil.rmtree(folder, ignore_errors=True)
    return int(bool(tally.wrong))


if __name__ == "__main__":
    sys.exit(main())
