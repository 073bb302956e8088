"""The ranks of a distributed job as text: grouped by what they do, the smallest group first. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jackline.cli.text.safety import safe_text
from jackline.rundir.records.fields import decode
from jackline.rundir.records.ranks import RankRecord
from jackline.units import rank_words

_MOST_GROUPS = 8


def rank_lines(found: Sequence[dict[str, Any]]) -> list[str]:
    """'rank 1 of 4: sleeping at train.py:11 `time.sleep(9)`'; a job of one process has none."""
    ranks = [decode(RankRecord, entry) for entry in found]
    groups: dict[tuple[str, str], list[int]] = {}
    for record in ranks:
        if record.rank is not None:
            groups.setdefault((safe_text(record.what or "running", 100), _place(record)), []).append(record.rank)
    size = max((record.world_size or 0 for record in ranks), default=0)
    ordered = sorted(groups.items(), key=lambda entry: (len(entry[1]), entry[1]))
    lines = [
        f"{rank_words(numbers)} of {size}: {what}{f' at {place}' if place else ''}"
        for (what, place), numbers in ordered[:_MOST_GROUPS]
    ]
    return lines + ([f"and {len(ordered) - _MOST_GROUPS} more groups"] if len(ordered) > _MOST_GROUPS else [])


def _place(record: RankRecord) -> str:
    if not record.file or record.line is None:
        return ""
    source = f" `{safe_text(record.source, 100)}`" if record.source else ""
    return f"{safe_text(record.file, 300)}:{record.line}{source}"
