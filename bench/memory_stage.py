"""One stage of bench/memory.py in a process of its own.

    python bench/memory_stage.py STAGE OUT [--limit-s S] [--smoke] [--part K/N] [--every N]

Each stage appends lines of JSON to OUT as it goes, so that a stage cut off by its time limit is not lost.
"""

from __future__ import annotations

import argparse
import contextlib
import json
from collections.abc import Callable, Iterator
from typing import Any

import torch
from memory_drills import caps, drill
from memory_grid import Write, measure_grid, predict_all, snapshots
from memory_segments import segments

STAGES: dict[str, Callable[[Write, argparse.Namespace], None]] = {
    "predict": predict_all,
    "grid": measure_grid,
    "snapshots": snapshots,
    "caps": caps,
    "drill": drill,
    "segments": segments,
}


@contextlib.contextmanager
def lines_to(path: str) -> Iterator[Write]:
    with open(path, "a") as file:

        def write(record: dict[str, Any]) -> None:
            file.write(json.dumps(record, default=str) + "\n")
            file.flush()

        yield write


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("stage", choices=STAGES)
    parser.add_argument("out")
    parser.add_argument("--limit-s", type=float, default=1e9)
    parser.add_argument("--part", default="0/1")
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--smoke", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1 if args.stage == "predict" else 4)
    with lines_to(args.out) as write:
        STAGES[args.stage](write, args)


if __name__ == "__main__":
    main()
