"""The ranks of a distributed job, in supervisor.json and in attempts/NNN/ranks/rank-N.json.

A job of several machines has a run on each of them, in a folder that all see (`machines_of_job`).

A module of its own, so that commands that look at a single process do not pay for it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jackline.immutable import immutable
from jackline.rundir.access.reading import read_json
from jackline.rundir.layout import RunDir
from jackline.rundir.records.fields import left_out
from jackline.rundir.records.supervisor import read_supervisor

_MOST_MACHINES = 256
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


def machines_of_job(path: Path) -> list[tuple[str, float, tuple[dict[str, Any], ...]]]:
    """(run, when its supervisor wrote last, its ranks) of every run of the same job in this folder."""
    job = read_json(RunDir(path).job_file)
    if not isinstance(job, dict):
        return []
    found = []
    for place in sorted(path.parent.iterdir())[:_MOST_MACHINES]:
        run = RunDir(place)
        if run.job_file.is_file() and read_json(run.job_file) == job:
            record = read_supervisor(run)
            found.append((place.name, record.at_s or 0.0, record.ranks))
    return found
