"""Differences between two readings of a process tree: how busy it was in between."""

from __future__ import annotations

from dataclasses import dataclass

from jackline.machine.readings import TreeReading


@dataclass(frozen=True)
class Rates:
    cpu_cores: float = 0.0
    disk_bytes_per_s: float = 0.0
    net_bytes_per_s: float = 0.0


def rates_between(before: TreeReading | None, after: TreeReading) -> Rates:
    """A process that came or went in between counts from nothing: its past is not this second's work."""
    if before is None or after.at_s <= before.at_s:
        return Rates()
    span_s = after.at_s - before.at_s
    old = {(process.pid, process.start_ticks): process for process in before.processes}
    cpu_s = 0.0
    disk_bytes = 0
    for process in after.processes:
        former = old.get((process.pid, process.start_ticks))
        if former is None:
            continue
        cpu_s += max(0.0, process.cpu_s - former.cpu_s)
        disk_bytes += max(0, process.read_bytes - former.read_bytes)
        disk_bytes += max(0, process.write_bytes - former.write_bytes)
    net_bytes = max(0, (after.tcp_bytes or 0) - (before.tcp_bytes or 0))
    return Rates(cpu_s / span_s, disk_bytes / span_s, net_bytes / span_s)
