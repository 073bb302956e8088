"""Whether this run fills the memory or a program beside it, and which program that is."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

from jackline.machine.forecast import Point, is_own_growth
from jackline.machine.proc import read_command
from jackline.machine.procfs import read_fields
from jackline.machine.readings import MemoryReading, OtherUser
from jackline.units import format_bytes, format_duration


def fills_it_itself(reading: MemoryReading, used: Sequence[Point], own: Sequence[Point]) -> bool:
    """False when others fill the memory, so that ending this run would not help. `own`: the sizes of its processes.

    An rlimit applies to each process alone, so nobody else can use it up.
    """
    return reading.limit.source.startswith("RLIMIT") or is_own_growth(used, own)


def largest_other(own_pids: Collection[int]) -> OtherUser | None:
    """The largest process that is not among `own_pids`. Reads all of /proc: for a warning, not for each sample."""
    largest: OtherUser | None = None
    for name in (path.name for path in Path("/proc").iterdir()):
        if not name.isdigit() or int(name) in own_pids:
            continue
        size = read_fields(f"/proc/{name}/status").get("VmRSS", 0)
        if size and (largest is None or size > largest.rss_bytes):
            largest = OtherUser(int(name), read_command(int(name)) or "?", size)
    return largest


def neighbour_text(reading: MemoryReading, growth: float, left_s: float, own_pids: Collection[int]) -> str:
    """The warning for growth in which this run has no part."""
    text = (
        f"host RAM: {format_bytes(reading.used_bytes)} of {format_bytes(reading.limit.limit_bytes)}"
        f" ({reading.limit.source}), growing {format_bytes(growth)}/s: full in about {format_duration(left_s)}."
        f" This run does not grow (its processes have {format_bytes(reading.tree_rss_bytes)})"
    )
    other = largest_other(own_pids)
    if other is None:
        return text
    return (
        f"{text}; the largest other process is {other.pid} with {format_bytes(other.rss_bytes)}: {other.command[:80]}"
    )
