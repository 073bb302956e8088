"""Interrupts every shape at random points and compares it with a run that was left alone: `scripts/torture loops`.

    python -m tests.session.loops.torture --seed 1 [--only WORD ...] [--interruptions 3]

Verdicts: `equal` (weights and logged values, bit for bit); `refused` before step 1, or by the check that trains two
steps twice; `warned` before step 1, or as soon as it happened (state that is not attached, data that grow), and then
different or refused at a resume; `LATE`, reported or refused only at a resume; `SILENTLY DIFFERENT`. Exits 1 for the
last two.
"""

from __future__ import annotations

import argparse
import importlib
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from tests.session.loops.table import MODULES, SHAPES
from tests.session.nursery import EVERY_SAVE, Ended, Nursery

PROGRAM = Path(__file__).parent / "program.py"
WARNINGS = (
    "a resume is refused if they depend on what training changes",
    "a second pass over these data gives other batches",
    "it is not known whether a second pass over these data",
    "random numbers were drawn between attach() and run.steps()",
    "counts batches with enumerate(run.steps())",
    "that are in no attached object, so they are in no checkpoint",
)
SAME_WORKERS = "a resume needs the same number of workers"  # a warning of this refusal alone:
OTHER_WORKERS = "error: the data were read by "
TWO_STEPS = "error: steps 1 and 2 give another result when they are trained again from the saved state"
IN_TIME = (  # said when it happens: data or models that grow, variables that the first steps or epoch change
    "or the resume is refused",
    "is in no checkpoint, so a resume starts it over",
    "unless a counter of the loop that starts from run.step explains it",
)
REPORTS = ("not bit-exact", "this resume is not exact", "the first step after the resume has")


@dataclass(frozen=True)
class Verdict:
    """What became of one shape. `text` is for a person who looks into it."""

    word: str
    text: str = ""


def judge(nursery: Nursery, name: str, folder: Path, dice: random.Random, *, interruptions: int = 3) -> Verdict:
    """Trains `name` twice: left alone, and interrupted by SIGKILL and SIGTERM."""
    places = [folder / "whole", folder / "interrupted"]
    for place in places:
        place.mkdir(parents=True)
    whole = nursery.run(PROGRAM, [name], places[0])
    if whole.code != 0:
        return Verdict("refused" if is_refused(whole) else "FAILED", whole.output)
    num_points = int(re.findall(r"^points (\d+)$", whole.output, re.M)[-1])
    ended = whole
    for number in range(interruptions + 1):
        env = {**EVERY_SAVE}
        if number < interruptions:
            instant = dice.randint(1, max(2, num_points * 6 // 10))
            how = dice.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGTERM])
            env.update(DIE=str(instant), SIGNAL=str(int(how)))
        ended = nursery.run(PROGRAM, [name], places[1], env)
        if ended.code not in (0, 75, -9):
            is_known = is_refused(ended) or is_warned(whole)
            return Verdict(refusal(whole, ended) if is_known else "FAILED", ended.output)
        if ended.code == 0:
            break
    return compare(whole, ended, *places)


def is_refused(ended: Ended) -> bool:
    """Whether an error of ours came before its first step, or from the check of the first two."""
    is_early = re.search(r"^jackline\.\S+: error: ", ended.output.split("began")[0], re.M) is not None
    return is_early or TWO_STEPS in ended.output


def refusal(whole: Ended, ended: Ended) -> str:
    """A refusal at a resume comes hours too late, unless the first attempt had warned of it."""
    is_told = SAME_WORKERS in whole.output.split("began")[0] and OTHER_WORKERS in ended.output
    return "warned" if is_warned(whole) or is_told else "LATE"


def is_warned(whole: Ended) -> bool:
    is_early = any(words in whole.output.split("began")[0] for words in WARNINGS)
    return is_early or any(words in whole.output for words in IN_TIME)


def compare(whole: Ended, ended: Ended, *places: Path) -> Verdict:
    wanted, found = (re.findall(r"^final .*$", one.output, re.M) for one in (whole, ended))
    recorded = dict(line.rsplit(" ", 1) for line in (places[0] / "values.txt").read_text().splitlines())
    lines = [line.rsplit(" ", 1) for line in (places[1] / "values.txt").read_text().splitlines()]
    wrong = [name for name, value in lines if recorded.get(name) != value]
    if wanted == found and not wrong:
        return Verdict("equal")
    outputs = "".join(path.read_text() for path in sorted(places[1].glob("out-*.txt")))
    text = f"{wanted} {found}, first wrong values: {wrong[:3]}\n{ended.output}"
    if is_warned(whole):
        return Verdict("warned", text)
    return Verdict("LATE" if any(words in outputs for words in REPORTS) else "SILENTLY DIFFERENT", text)


def is_bad(verdict: Verdict) -> bool:
    return verdict.word in ("FAILED", "SILENTLY DIFFERENT", "LATE")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--only", nargs="+", default=[""], help="shapes whose name has one of these words")
    parser.add_argument("--interruptions", type=int, default=3)
    given = parser.parse_args()
    for module in MODULES:
        importlib.import_module(module)
    folder = Path(tempfile.mkdtemp(prefix="jackline-loops-"))
    print(f"seed {given.seed}, in {folder}", flush=True)
    os.environ["PYTHONPATH"] = str(PROGRAM.parents[3])
    nursery = Nursery()
    tally: Counter[str] = Counter()
    bad: list[str] = []
    try:
        for number, name in enumerate(one for one in SHAPES if any(word in one for word in given.only)):
            place, began_s = folder / str(number), time.monotonic()
            dice = random.Random(f"{given.seed} {name}")
            verdict = judge(nursery, name, place, dice, interruptions=given.interruptions)
            tally[verdict.word] += 1
            print(f"{verdict.word:20} {name} ({time.monotonic() - began_s:.1f} s)", flush=True)
            if is_bad(verdict):
                bad.append(name)
                print("\n".join(f"    {line}" for line in verdict.text.splitlines()[-25:]), flush=True)
            else:
                shutil.rmtree(place, ignore_errors=True)  # a writer may still be at work there
    finally:
        nursery.close()
    print(f"{tally.total()} shapes: " + ", ".join(f"{count} {word}" for word, count in tally.most_common()))
    print("\n".join(f"bad: {name}" for name in bad))
    if not bad:
        shutil.rmtree(folder, ignore_errors=True)
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
