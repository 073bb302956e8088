"""Host memory: the limit that really applies to a process, how much of it is used, and OOM kills; whether
this run fills the memory or a program beside it.

Owns the meaning of memory cgroup files (v1 and v2), /proc/meminfo and rlimits. `forecast` owns growth over time; the
supervisor and the session decide what to do about it. Times are `time.monotonic()`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from jackline.machine.cgroups import memory_cgroups
from jackline.machine.forecast import Point, is_own_growth
from jackline.machine.proc import read_command
from jackline.machine.procfs import read_bytes, read_fields, read_int
from jackline.machine.readings import MemoryLimit, MemoryReading, OomCounters, OtherUser
from jackline.units import format_bytes, format_duration

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_CGROUP = "cgroup "
# Above this there is no limit: version 1 shows 2^63 minus a page for "no limit".
_NO_LIMIT_BYTES = 2**60
_RLIMITS = (("Max address space", "RLIMIT_AS"), ("Max data size", "RLIMIT_DATA"))
_RLIMIT_FIELDS = {"RLIMIT_AS": "VmSize", "RLIMIT_DATA": "VmData"}


def effective_limit(pid: int | None = None, *, root: Path = Path("/")) -> MemoryLimit:
    """The smallest of every cgroup ancestor's limit, the machine's memory and the process's own rlimits.

    memory.high is left out: above it the kernel slows a process down but does not kill it.
    """
    total = read_fields(f"{_base(root)}/proc/meminfo").get("MemTotal", 0)
    limits = [MemoryLimit(total, "MemTotal")] if total else []
    limits += _rlimits(pid, root)
    limits += _cgroup_limits(pid, root)
    # Of equal limits the first wins: a container as large as its machine is limited by the machine.
    return min(limits, key=lambda limit: limit.limit_bytes, default=MemoryLimit(_NO_LIMIT_BYTES, "none known"))


def _base(root: Path) -> str:
    return str(root).rstrip("/")


def _cgroup_limits(pid: int | None, root: Path) -> Iterator[MemoryLimit]:
    # A process that has exited has no cgroup any more; it was in ours or near it.
    cgroups = memory_cgroups(pid, root) or memory_cgroups(None, root)
    for cgroup in cgroups:
        limit = read_int(cgroup.file("memory.max")) if cgroup.version == 2 else None
        if limit is not None:
            yield MemoryLimit(limit, _CGROUP + _shown(cgroup.path, root))
    yield from _limit_v1([cgroup.path for cgroup in cgroups if cgroup.version == 1], root)


def _limit_v1(folders: list[str], root: Path) -> Iterator[MemoryLimit]:
    """Nearest first. The kernel's own minimum includes ancestors that are not mounted in this container, and leaves
    out those that do not count (use_hierarchy 0). The folders say which cgroup has the limit, and so which cgroup's
    usage to measure."""
    own = [(read_int(f"{folder}/memory.limit_in_bytes"), folder) for folder in folders]
    limits = [(limit, folder) for limit, folder in own if limit is not None]
    if not limits:
        return
    inherited = read_fields(f"{limits[0][1]}/memory.stat").get("hierarchical_memory_limit")
    lowest = min(limit for limit, _ in limits) if inherited is None else inherited
    if lowest < _NO_LIMIT_BYTES:
        holder = next((folder for limit, folder in limits if limit == lowest), limits[-1][1])
        yield MemoryLimit(lowest, _CGROUP + _shown(holder, root))


def _shown(path: str, root: Path) -> str:
    return path[len(_base(root)) :]


def _rlimits(pid: int | None, root: Path) -> Iterator[MemoryLimit]:
    text = (read_bytes(f"{_base(root)}/proc/{pid or 'self'}/limits") or b"").decode("ascii", "replace")
    for line in text.splitlines():
        for label, name in _RLIMITS:
            soft = line[len(label) :].split()[:1] if line.startswith(label) else []
            if soft and soft[0].isdigit():
                yield MemoryLimit(int(soft[0]), name)


def read_memory(
    pids: Sequence[int], *, with_pss: bool = False, limit: MemoryLimit | None = None, root: Path = Path("/")
) -> MemoryReading:
    """Usage against the limit of the first of these processes, and the size of all of them.

    Costs about 0.3 ms; 10 times a second is negligible. A caller that passes a known `limit` saves half of that.
    `with_pss` reads the page tables, which costs 0.1 to 12 ms per process: use it every 30 s.
    """
    first = pids[0] if pids else None
    limit = limit or effective_limit(first, root=root)
    return MemoryReading(
        at_s=time.monotonic(),
        used_bytes=used_against(limit, pids, root=root),
        limit=limit,
        tree_rss_bytes=sum(_rss_bytes(pid, root) for pid in pids),
        tree_pss_bytes=_tree_pss(pids, root) if with_pss else None,
    )


def used_against(limit: MemoryLimit, pids: Sequence[int] = (), *, root: Path = Path("/")) -> int:
    """How much of a limit is used, without the page cache that the kernel would free at once."""
    base = _base(root)
    if limit.source.startswith(_CGROUP):
        return _cgroup_used(base + limit.source.removeprefix(_CGROUP))
    if limit.source in _RLIMIT_FIELDS:
        field = _RLIMIT_FIELDS[limit.source]
        # An rlimit applies to each process separately, so the largest process is nearest to it.
        return max((read_fields(f"{base}/proc/{pid}/status").get(field, 0) for pid in pids), default=0)
    fields = read_fields(f"{base}/proc/meminfo")
    return fields.get("MemTotal", 0) - fields.get("MemAvailable", fields.get("MemFree", 0))


def _cgroup_used(folder: str) -> int:
    stat = read_fields(f"{folder}/memory.stat")
    usage = read_int(f"{folder}/memory.current")
    cache = stat.get("inactive_file", 0)
    if usage is None:
        # The total_ fields include the child cgroups, as usage does.
        usage, cache = read_int(f"{folder}/memory.usage_in_bytes") or 0, stat.get("total_inactive_file", cache)
    return max(0, usage - cache)


def _rss_bytes(pid: int, root: Path) -> int:
    words = (read_bytes(f"{_base(root)}/proc/{pid}/statm") or b"").split()
    return int(words[1]) * _PAGE_BYTES if len(words) > 1 else 0


def _tree_pss(pids: Sequence[int], root: Path) -> int | None:
    """Memory of the tree with shared pages counted once (PSS). None when we may not read a live process."""
    total = 0
    for pid in pids:
        pss = read_pss(pid, root=root)
        if pss is not None:
            total += pss
        elif _rss_bytes(pid, root):
            return None
    return total


def read_pss(pid: int, *, root: Path = Path("/")) -> int | None:
    return read_fields(f"{_base(root)}/proc/{pid}/smaps_rollup").get("Pss")


def read_oom_counters(pid: int | None = None, *, cgroup: str | None = None, root: Path = Path("/")) -> OomCounters:
    """Kills counted so far; subtract two readings.

    A process that has exited has no cgroup any more: for the second reading pass the first one's `cgroup`. In v1 only
    the killed process's own cgroup counts the kill, in v2 its ancestors do too.
    """
    machine = read_fields(f"{_base(root)}/proc/vmstat").get("oom_kill")
    if cgroup is not None:
        return OomCounters(_kills_in(_base(root) + cgroup), cgroup, machine)
    for candidate in memory_cgroups(pid, root) or memory_cgroups(None, root):
        kills = _kills_in(candidate.path)
        if kills is not None:
            return OomCounters(kills, _shown(candidate.path, root), machine)
    return OomCounters(None, None, machine)


def _kills_in(folder: str) -> int | None:
    for name in ("memory.events", "memory.oom_control"):
        kills = read_fields(f"{folder}/{name}").get("oom_kill")
        if kills is not None:
            return kills
    return None


def shm_free_bytes(path: str = "/dev/shm") -> int | None:
    """Free space for tensors shared between workers; None where there is no such mount."""
    try:
        status = os.statvfs(path)
    except OSError:
        return None
    return status.f_bavail * status.f_frsize


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
