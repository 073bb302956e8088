"""Reads from a run directory what only files can tell of a death. The judging is in `diagnose`."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from jackline.machine.readings import OomCounters

_BLOCK = 1 << 16
_MAX_FAULT_BYTES = 1 << 20
# How out.log begins a line: a UTC stamp and one space.
_STAMP = re.compile(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|\+00:00)? ?")
_NOTE = "[jackline]"
_FATAL = re.compile(r"^Fatal Python error: ", re.MULTILINE)
_FAULT_FRAME = re.compile(r'^  File "(.+)", line (\d+) in .+$')


def oom_delta(before: OomCounters, after: OomCounters) -> tuple[int | None, int | None]:
    """Kills (in the cgroup, on the machine) between two readings; None where one of them could not be read."""
    is_same = before.cgroup == after.cgroup
    return (
        _increase(before.cgroup_kills, after.cgroup_kills) if is_same else None,
        _increase(before.machine_kills, after.machine_kills),
    )


def tail_lines(out_log: Path, count: int) -> tuple[str, ...]:
    """The last `count` lines the command itself wrote, without our stamps and notes."""
    raise NotImplementedError


def read_fault_text(stacks_folder: Path, pids: Iterable[int]) -> str:
    """What faulthandler wrote when one of `pids` died of a fatal signal; '' when none did."""
    raise NotImplementedError


def _increase(before: int | None, after: int | None) -> int | None:
    return None if before is None or after is None else max(0, after - before)
