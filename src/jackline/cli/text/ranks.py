"""The ranks of a distributed job as text: grouped by what they do, the smallest group first.

A job of several machines has a run on each of them. Each run knows its own ranks, so the table of the whole job is
read from all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jackline.cli.text.safety import safe_text
from jackline.rundir.layout import RunDir
from jackline.rundir.records.fields import decode
from jackline.rundir.records.ranks import RankRecord, is_part_of_job, machines_of_job
from jackline.rundir.registry import is_copy
from jackline.rundir.status import COPY_STALE_AFTER_S
from jackline.units import format_duration, rank_words

_MOST_GROUPS = 8
_STALE_S = 30.0


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


def is_of_several_machines(run: RunDir, ranks: Sequence[dict[str, Any]]) -> bool:
    return run.job_file.is_file() or is_part_of_job(ranks)


def job_lines(path: str, own: Sequence[dict[str, Any]], now_s: float) -> list[str]:
    """The ranks of the whole job, and which machine has which of them. A machine that is not heard of any more keeps
    its line, but its ranks are no longer counted as what the job does."""
    machines = machines_of_job(Path(path)) if is_of_several_machines(RunDir(Path(path)), own) else []
    if len(machines) < 2:
        return rank_lines(own)
    found: dict[int, dict[str, Any]] = {}
    told = []
    stale_s = COPY_STALE_AFTER_S if is_copy(RunDir(Path(path))) else _STALE_S
    for name, at_s, ranks in machines:
        age_s = max(0.0, now_s - at_s)
        present = [one for one in ranks if isinstance(one.get("rank"), int) and not one.get("is_gone")]
        numbers = [one["rank"] for one in present]
        words = rank_words(numbers) if numbers else "one process, or none"
        seen = f", last seen {format_duration(age_s)} ago" if age_s > stale_s else ""
        told.append(f"{safe_text(name, 80)}: {words}{seen}")
        if age_s <= stale_s:
            found.update({one["rank"]: one for one in present})
    return [*rank_lines(list(found.values())), f"machines: {'; '.join(told)}"]
