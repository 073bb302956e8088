"""Whether GPU memory grew steadily until the end (a leak), and which lines may keep it.

Owns telling a leak from one large allocation. Pure, except for reading the user's source files.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Sequence
from pathlib import Path

from jackline.diagnosis.deaths.evidence import GpuGrowth
from jackline.diagnosis.deaths.traceback_text import fatal_chain
from jackline.diagnosis.frames import Frame

_LEAST_POINTS = 5
_LEAST_S = 4.0
_LEAST_BYTES = 128 << 20
_LEAST_SHARE = 0.15  # of the memory at the end
_EACH_PART = 0.15  # of the whole growth: a warm-up grows only at the start, a spike only at the end
_NUM_PARTS = 3
_MAX_SOURCE_BYTES = 1 << 20
# A tensor that is added to a list or a sum without .item(), .detach() or a conversion keeps its graph.
_KEEPS = re.compile(
    r"\.append\(\s*\(?\s*(?P<kept>\w*(?:loss|out|output|logit|pred|hidden|feat|embed|score|grad|act)\w*)\s*[,)]"
    r"|(?:^|\s)\w+\s*\+=\s*(?P<sum>\w*loss\w*)\s*(?:#|$|\*|/)"
    r"|=\s*\w+\s*\+\s*(?P<added>\w*loss\w*)\s*(?:#|$)"
)


def steady_growth(points: Collection[tuple[float, int]]) -> GpuGrowth | None:
    """`points`: (time, bytes), oldest first. None for a spike, for a warm-up, or where too little was seen."""
    used = list(itertools.dropwhile(lambda point: point[1] <= 0, points))
    if len(used) < _LEAST_POINTS:
        return None
    grew, over_s = used[-1][1] - used[0][1], used[-1][0] - used[0][0]
    if grew < max(_LEAST_BYTES, _LEAST_SHARE * used[-1][1]) or over_s < _LEAST_S:
        return None
    cuts = [used[round(part * (len(used) - 1) / _NUM_PARTS)][1] for part in range(_NUM_PARTS + 1)]
    if any(after - before < _EACH_PART * grew for before, after in itertools.pairwise(cuts)):
        return None
    return GpuGrowth(grew, over_s, grew / over_s)


def lines_that_keep(output_tail: Sequence[str]) -> tuple[Frame, ...]:
    """Lines in the files of the error's traceback that add a tensor to a list or a sum; [] without an error."""
    chain = fatal_chain(output_tail)
    if chain is None or "memory" not in chain.last.text.lower():
        return ()
    files = dict.fromkeys(frame.file for error in chain.errors for frame in error.frames if frame.is_user)
    return tuple(frame for file in list(files)[:4] for frame in _scan(file))[:4]


def _scan(file: str) -> list[Frame]:
    try:
        with open(file, "rb") as source:
            text = source.read(_MAX_SOURCE_BYTES).decode("utf-8", "replace")
    except OSError:
        return []
    lines = text.splitlines()
    if not any("torch" in line for line in lines[:200]):
        return []
    name = str(Path(file))
    return [Frame("", name, at, line.strip(), True) for at, line in enumerate(lines, 1) if _KEEPS.search(line)]
