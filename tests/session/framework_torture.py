"""transformers, Lightning and Accelerate, disturbed at each position and resumed: `scripts/torture frameworks`.

    python -m tests.session.framework_torture [--only lightning] [--extras] [--cells 12 --seed 3]

The matrix: 6 positions x accumulation 1 or 3 (the last step of an epoch has fewer) x 0 or 2 workers x 3 schedulers x
kill or SIGTERM x a save every 1 or 4 steps, for each framework. Then what people add: samplers, callbacks, data. A
cell is equal if weights, learning rate, logged values, validations and the samples of each step are those of a run
that was never disturbed; or it is refused, by name and before training. Anything else is silently different: exits 1.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import re
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.session.nursery import EVERY_SAVE, Ended, Nursery

SCRIPTS = Path(__file__).parent / "frameworks"
IMPORTS = {"transformers": "transformers.trainer", "lightning": "lightning.pytorch", "accelerate": "accelerate"}
POSITIONS = {1: (1, 6, 12, 13, 14, 30), 3: (1, 3, 4, 5, 6, 12)}  # 13 or 5 steps an epoch
MEMORY = Path("/dev/shm")
EXTRAS: dict[str, dict[str, str]] = {
    "transformers": {
        "group_by_length": "",
        "batch_rebalance": "",
        "sequential": "",
        "weighted sampler": "",
        "own loader": "",
        "iterable": "",
        "stateful stream": "",
        "max_steps": "",
        "early stopping": "",
        "counting callback": "",
        "average callback": "",
        "short epochs": "",
        "persistent evaluation": "",
        "evaluation at start": "",
        "auto_find_batch_size": "auto_find_batch_size=True cannot be used",
        "ignore_data_skip": "ignore_data_skip=True cannot be used",
    },
    "lightning": {
        "jackline.Loader": "",
        "weighted sampler": "",
        "iterable": "",
        "stateful stream": "",
        "max_steps": "",
        "val_check_interval": "",
        "validation every other epoch": "",
        "limit_train_batches": "",
        "manual optimization": "",
        "outputs kept": "",
        "metric of the epoch": "",
        "mean of the epoch": "",
        "early stopping": "",
        "counting callback": "",
        "estimated steps": "",
        "accumulation scheduler": "",
        "fine-tuning": "",
        "model checkpoint": "",
        "two loaders": "several training loaders together",
        "weight averaging": "StochasticWeightAveraging cannot be used",
    },
    "accelerate": {
        "weighted sampler": "",
        "subset sampler": "",
        "fewer samples": "",
        "iterable": "cannot be positioned once Accelerate has prepared it",
    },
}
# Settings that differ in the second attempt: what is said when it refuses, or "" where it must be equal.
CHANGES: tuple[tuple[dict[str, Any], str], ...] = (
    ({"batch": 3}, "data changed since it was saved"),
    ({"accumulate_now": 2}, "data changed since it was saved"),
    ({"workers": 1}, ""),
)


@dataclass(frozen=True)
class Cell:
    """One way to be disturbed. `changes` hold in the second attempt."""

    library: str
    at: int
    accumulate: int = 1
    workers: int = 0
    scheduler: str = "step"
    how: str = "kill"
    save_every: int = 1
    extra: str = ""
    changes: tuple[tuple[str, Any], ...] = ()
    refusal: str = ""

    @property
    def script(self) -> dict[str, Any]:
        words = ("accumulate", "workers", "scheduler", "save_every", "extra")
        return {word: getattr(self, word) for word in words}

    @property
    def reference(self) -> tuple[str, int, str, str]:
        return self.library, self.accumulate, self.scheduler, self.extra


def matrix(library: str) -> Iterator[Cell]:
    choices = itertools.product(range(6), (1, 3), (0, 2), ("step", "cosine", "plateau"), ("kill", "term"), (1, 4))
    for place, accumulate, workers, scheduler, how, save_every in choices:
        yield Cell(library, POSITIONS[accumulate][place], accumulate, workers, scheduler, how, save_every)


def extras(library: str) -> Iterator[Cell]:
    for extra, refusal in EXTRAS[library].items():
        for at, how, workers in ((3, "kill", 0), (5, "term", 1), (13, "kill", 0), (16, "kill", 1), (19, "term", 0)):
            if not refusal or at == 3:
                workers = 0 if extra in ("stateful stream", "iterable") else workers  # theirs must not change
                scheduler = "plateau" if "epoch" in extra or "stop" in extra else "step"
                yield Cell(library, at, 1, workers, scheduler, how, extra=extra, refusal=refusal)
    for change, refusal in CHANGES:
        if library == "accelerate" and "accumulate_now" in change:
            continue  # the loop is the user's own
        for at in (6, 13):
            yield Cell(library, at, changes=tuple(change.items()), refusal=refusal, extra="")


@dataclass
class Tally:
    """What came of the cells."""

    counts: dict[str, Counter[str]] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)

    def add(self, cell: Cell, verdict: str, text: str) -> None:
        part = "extras" if cell.extra or cell.changes else "matrix"
        self.counts.setdefault(f"{cell.library} {part}", Counter())[verdict] += 1
        if verdict == "different":
            self.wrong.append(f"{cell}\n{text}")

    def table(self) -> str:
        lines = [f"{'':22}{'equal':>8}{'refused':>9}{'different':>11}"]
        for name, counts in sorted(self.counts.items()):
            lines.append(f"{name:22}{counts['equal']:8}{counts['refused']:9}{counts['different']:11}")
        return "\n".join(lines)


class Bench:
    """Runs cells: one warm process has imported torch and the framework, each attempt is a fork of it."""

    def __init__(self, folder: Path, nursery: Nursery) -> None:
        self._folder = folder
        self._nursery = nursery
        self._references: dict[tuple[str, int, str, str], dict[str, Any]] = {}
        self._number = itertools.count()

    def judge(self, cell: Cell) -> tuple[str, str]:
        """(verdict, text): equal, refused or different."""
        wanted = {} if cell.refusal and not cell.changes else self._reference(cell)
        place = self._folder / f"cell-{next(self._number)}"
        place.mkdir(parents=True)
        first = self._start(cell, place, cell.script, f"{cell.how}:{place_of(cell, wanted)}")
        if cell.refusal and not cell.changes:
            return self._judge_refusal(cell, place, first)
        if first.code != {"kill": -9, "term": 75}[cell.how]:
            return "different", f"the first attempt ended with {first.code}\n{first.output}"
        ended = self._start(cell, place, {**cell.script, **dict(cell.changes)}, "")
        if cell.refusal:
            return self._judge_refusal(cell, place, ended)
        if ended.code != 0:
            return "different", f"the second attempt ended with {ended.code}\n{ended.output}"
        found = read_result(place, ended)
        if found != wanted:
            return "different", f"{describe_difference(wanted, found)}\n{ended.output}"
        shutil.rmtree(place)
        return "equal", ""

    def _judge_refusal(self, cell: Cell, place: Path, ended: Ended) -> tuple[str, str]:
        if ended.code in (1, 2, 3) and cell.refusal in ended.output:
            shutil.rmtree(place)
            return "refused", ""
        return "different", f"not refused by '{cell.refusal}': ended with {ended.code}\n{ended.output}"

    def _reference(self, cell: Cell) -> dict[str, Any]:
        key = cell.reference
        if key not in self._references:
            place = self._folder / f"reference-{next(self._number)}"
            place.mkdir(parents=True)
            ended = self._start(cell, place, {**cell.script, "workers": 0, "save_every": 1000}, "")
            assert ended.code == 0, ended.output
            self._references[key] = read_result(place, ended)
            shutil.rmtree(place)
        return self._references[key]

    def _start(self, cell: Cell, place: Path, script: dict[str, Any], die: str) -> Ended:
        env = {**EVERY_SAVE, "CELL": json.dumps(script), "DIE": die}
        return self._nursery.run(SCRIPTS / f"{cell.library}_cell.py", [], place, env)


def place_of(cell: Cell, wanted: dict[str, Any]) -> int:
    """The step to be disturbed at: inside the run, which what people add may have made shorter."""
    last = max((int(step) for step in wanted.get("samples", ())), default=cell.at)
    return min(cell.at, last if cell.how == "kill" else last - 1)


def read_result(place: Path, ended: Ended) -> dict[str, Any]:
    """Everything that must be the same: the last line, and what each step was trained on."""
    last = re.findall(r"^final (.*)$", ended.output, re.MULTILINE)
    assert len(last) == 1, ended.output
    steps: dict[str, list[list[int]]] = {}
    previous = None
    for line in (place / "samples.jsonl").read_text().splitlines():
        process, step, numbers = json.loads(line)
        if (process, step) != previous:  # a step that is trained again begins anew
            steps[str(step)] = []
        previous = (process, step)
        steps[str(step)].append(numbers)
    validations = place / "validations.txt"
    validated = sorted({int(line) for line in validations.read_text().split()}) if validations.exists() else []
    return {**json.loads(last[0]), "samples": steps, "validations": validated}


def describe_difference(wanted: dict[str, Any], found: dict[str, Any]) -> str:
    lines = []
    for word in wanted:
        if wanted[word] != found.get(word):
            one, other = wanted[word], found.get(word)
            if isinstance(one, dict) and isinstance(other, dict):
                keys = [key for key in {**one, **other} if one.get(key) != other.get(key)][:3]
                one, other = {key: one.get(key) for key in keys}, {key: other.get(key) for key in keys}
            lines.append(f"{word}: wanted {one}, found {other}")
    return "\n".join(lines)


def choose_cells(libraries: list[str], *, count: int | None, seed: int, only_extras: bool) -> list[Cell]:
    cells = []
    for library in libraries:
        ours = [] if only_extras else list(matrix(library))
        ours += list(extras(library))
        cells += random.Random(seed).sample(ours, len(ours) if count is None else count)
    return cells


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=tuple(IMPORTS), help="one framework")
    parser.add_argument("--extras", action="store_true", help="without the matrix")
    parser.add_argument("--cells", type=int, help="so many of each framework, chosen by the seed")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--jobs", type=int, default=2)
    given = parser.parse_args()
    os.environ["XDG_STATE_HOME"] = os.environ["JACKLINE_RUNS"] = ""
    # In memory where there is such a place: what a disk does to checkpoints is tested elsewhere.
    folder = Path(tempfile.mkdtemp(prefix="jackline-frameworks-", dir=MEMORY if MEMORY.is_dir() else None))
    print(f"seed {given.seed}, in {folder}", flush=True)
    libraries = [given.only] if given.only else list(IMPORTS)
    tally = Tally()
    for library in libraries:
        cells = choose_cells([library], count=given.cells, seed=given.seed, only_extras=given.extras)
        with ThreadPoolExecutor(given.jobs) as pool:
            nurseries = [Nursery(IMPORTS[library]) for _ in range(given.jobs)]
            shares = [cells[number :: given.jobs] for number in range(given.jobs)]
            for _ in pool.map(
                run_share, [folder / f"{library}-{n}" for n in range(given.jobs)], nurseries, shares, [tally] * 9
            ):
                pass
            for nursery in nurseries:
                nursery.close()
        print(tally.table(), flush=True)
    for wrong in tally.wrong:
        print(wrong)
    if not tally.wrong:
        shutil.rmtree(folder, ignore_errors=True)
    return int(bool(tally.wrong))


def run_share(folder: Path, nursery: Nursery, cells: list[Cell], tally: Tally) -> None:
    bench = Bench(folder, nursery)
    for number, cell in enumerate(cells):
        try:
            verdict, text = bench.judge(cell)
        except (AssertionError, TimeoutError) as problem:
            verdict, text = "different", str(problem)
        tally.add(cell, verdict, text)
        if verdict == "different":
            print(f"different: {cell}", flush=True)
        if number % 20 == 19:
            print(f"{number + 1} of {len(cells)}\n{tally.table()}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
