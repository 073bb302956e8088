"""The ranks of a distributed job, in supervisor.json and in attempts/NNN/ranks/rank-N.json.

A module of its own, so that commands that look at a single process do not pay for it.
"""

from __future__ import annotations

from jackline.immutable import immutable
from jackline.rundir.records.fields import left_out


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
