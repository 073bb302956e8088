"""The ranks of a distributed job, in supervisor.json and in attempts/NNN/ranks/rank-N.json.

A job of several machines has a run on each of them, in a folder that all see (`machines_of_job`). `jackline train`
writes down which runs belong together; ranks that somebody else's launcher has started meet at the same address.

A module of its own, so that commands that look at a single process do not pay for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from jackline.immutable import immutable
from jackline.rundir.access.reading import read_json
from jackline.rundir.layout import RunDir
from jackline.rundir.records.fields import left_out
from jackline.rundir.records.supervisor import read_supervisor

_MOST_MACHINES = 256
_CLOCKS_DIFFER_S = 60.0
WAITING = "waiting for other ranks"  # how `what` begins for a rank in a collective


@immutable
class RankRecord:
    """One rank of a distributed job and what it does. `is_gone`: it has ended while others run."""

    rank: int | None = None
    world_size: int | None = None
    pid: int | None = None
    what: str | None = None
    file: str | None = left_out()
    line: int | None = left_out()
    source: str | None = left_out()
    out: str | None = left_out()  # the file with its output
    is_gone: bool | None = left_out()
    job: str | None = left_out()  # equal for all ranks of a job on all its machines: where they meet


def machines_of_job(path: Path) -> list[tuple[str, float, tuple[dict[str, Any], ...]]]:
    """(run, when its supervisor wrote last, its ranks) of every run of the same job in this folder."""
    job, own = read_json(RunDir(path).job_file), read_supervisor(RunDir(path))
    jobs = _jobs(own.ranks)
    if not isinstance(job, dict) and not jobs:
        return []
    found = []
    for place in sorted(path.parent.iterdir())[:_MOST_MACHINES]:
        run = RunDir(place)
        is_of_job = isinstance(job, dict) and run.job_file.is_file() and read_json(run.job_file) == job
        if not is_of_job and not (jobs and run.supervisor_file.is_file()):
            continue
        record = read_supervisor(run)
        # Another job may have met at the same address before this one: its machines wrote last before this one began.
        is_of_now = (record.at_s or 0.0) >= (own.started_at_s or 0.0) - _CLOCKS_DIFFER_S and not record.is_finished
        if is_of_job or (is_of_now and jobs & _jobs(record.ranks)):
            found.append((place.name, record.at_s or 0.0, record.ranks))
    return found


def _jobs(ranks: Iterable[dict[str, Any]]) -> frozenset[str]:
    return frozenset(one["job"] for one in ranks if isinstance(one.get("job"), str))


def is_part_of_job(ranks: Sequence[dict[str, Any]]) -> bool:
    """Whether the job has more ranks than these, so that others have to be on other machines."""
    sizes = [one["world_size"] for one in ranks if isinstance(one.get("world_size"), int) and not one.get("is_gone")]
    return bool(_jobs(ranks)) and max(sizes, default=0) > len(sizes)
