"""The readings of `machine` as plain data, and the difference between two readings of a process tree.

The modules beside this one create them. `at_s` is `time.monotonic()`: rates must not jump when the clock is set.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from jackline.immutable import immutable

WaitKind = Literal[
    "running",  # on a CPU or waiting for one
    "sleep",  # nanosleep and similar calls
    "lock",  # futex
    "file_lock",  # flock, fcntl locks
    "network",  # recv/send/connect/poll on an internet socket
    "local_socket",
    "pipe",
    "keyboard",  # reading a terminal, or fd 0 when it is a pipe without a writer
    "child",  # wait4 and similar calls
    "poll",  # poll/epoll/select on several or unknown descriptors
    "disk",  # D state, fsync
    "file",
    "stopped",
    "zombie",
    "unknown",
]


UNTIL_A_SIGNAL = "until a signal"  # target of a sleep that only a signal ends


@immutable
class Wait:
    """What one thread waits for. `target` is a text for people, e.g. '10.0.0.3:443' or a file's path."""

    kind: WaitKind
    target: str = ""
    fd: int | None = None
    fds: tuple[int, ...] = ()  # all of them, when it waits for several at once
    is_endless: bool = False  # the call has no time limit: the thread runs again only if what it waits for comes
    is_writing: bool = False  # it waits for room, not for data
    address: int | None = None  # of the futex, equal for threads that wait for the same lock
    # When a sleep or a wait with a time limit ends by itself, on the clock of `time.monotonic`; None if not known.
    until_s: float | None = field(default=None, compare=False)
    lasts_s: float | None = field(default=None, compare=False)  # how long the sleep takes, where its end is not known


def other_end_of(terminal: str) -> str:
    """The target of a process that has made this terminal for another program and waits for what that prints."""
    return f"the program in {terminal}"


@dataclass(frozen=True, slots=True)
class RankPlace:
    """Which rank of a distributed job a process is, as its launcher put it into the environment. `job`: the same text
    for all ranks of a job on all its machines, where the launcher tells one."""

    rank: int
    world_size: int
    local_rank: int
    job: str = ""


@dataclass(frozen=True, slots=True)
class ProcessReading:
    """One process at one time. Counters grow over its life; subtract two readings."""

    pid: int
    ppid: int
    start_ticks: int
    comm: str
    state: str
    cpu_s: float
    wants_cpu_s: float  # on-CPU plus run-queue delay: robust on an overloaded machine
    rss_bytes: int
    num_threads: int
    read_bytes: int
    write_bytes: int
    wait: Wait  # of the main thread
    is_python: bool = False
    # Only of the main thread, because a busy helper thread changes the counters of the whole process.
    main_cpu_s: float | None = None  # on-CPU only (task/PID/schedstat, field 1)
    main_wchar_bytes: int | None = None  # passed to write(), for any file (task/PID/io, wchar)
    main_rchar_bytes: int | None = None  # returned by read(), for any file; recv() is not counted
    # How often it has given up the CPU by itself, to sleep or to wait (voluntary context switches).
    main_sleeps: int | None = None
    # (thread id, on-CPU time in ns). A thread whose time has not changed has not run at all.
    threads: tuple[tuple[int, int], ...] = ()
    thread_runs: tuple[int, ...] = ()  # how often each of `threads` was given a CPU
    awaited_sockets: frozenset[int] = frozenset()  # inodes of the internet sockets that the main thread waits for
    rank: RankPlace | None = None  # also of processes that a rank has started; `ranks_among` finds the rank itself


@immutable
class MemoryLimit:
    """The smallest limit that applies to a process, and which one it is."""

    limit_bytes: int
    source: str  # 'cgroup /sys/fs/cgroup/...', 'MemTotal', 'RLIMIT_AS'


@immutable
class MemoryReading:
    """Host memory against the effective limit. `used_bytes` has reclaimable page cache subtracted."""

    at_s: float
    used_bytes: int
    limit: MemoryLimit
    tree_rss_bytes: int
    tree_pss_bytes: int | None = None


@immutable
class OtherUser:
    """A process outside the run that holds host memory."""

    pid: int
    command: str
    rss_bytes: int


@immutable
class OomCounters:
    """OOM kills counted by the kernel: in the nearest memory cgroup that counts them, and on the whole machine."""

    cgroup_kills: int | None
    cgroup: str | None
    machine_kills: int | None


@immutable
class GpuProcess:
    pid: int
    used_bytes: int | None


@immutable
class GpuReading:
    index: int
    name: str
    total_bytes: int
    used_bytes: int
    utilisation_percent: int | None
    memory_utilisation_percent: int | None
    power_w: float | None
    processes: tuple[GpuProcess, ...] = ()
    power_limit_w: float | None = None
    is_ours: bool | None = None  # whether a watched process uses it; None: nobody has looked
    clock_share: float | None = None  # of its highest clock
    slowdown: str = ""  # why the driver slows it down: 'too hot', 'power cap' ...


@immutable
class KernelKill:
    """A line of the kernel log about an out-of-memory kill."""

    pid: int
    text: str
    is_cgroup: bool


@immutable
class Protection:
    """Something Jackline can or cannot do on this machine, and why."""

    name: str
    is_on: bool
    why: str = ""
    hint: str = ""


@immutable
class TreeReading:
    """A process and all its descendants, the root first. `sockets` has the bytes that each TCP socket of the tree has
    received and sent, by inode; None when the machine does not report them. `silent`: addresses to which the tree has
    sent what is not acknowledged for seconds."""

    at_s: float
    processes: tuple[ProcessReading, ...] = field(default_factory=tuple)
    sockets: Mapping[int, int] | None = None
    silent: tuple[str, ...] = ()


@immutable
class Traffic:
    """What TCP sockets did between two readings. `active` are the inodes of sockets that are new, grown or closed."""

    num_bytes: int = 0
    active: frozenset[int] = frozenset()


def traffic_between(before: TreeReading, after: TreeReading) -> Traffic:
    """Counted per socket: in a sum over open sockets, the bytes of closed connections would cancel those of new
    ones."""
    if before.sockets is None or after.sockets is None:
        return Traffic()
    old, new = before.sockets, after.sockets
    grown = {inode: moved - old.get(inode, 0) for inode, moved in new.items() if moved > old.get(inode, -1)}
    return Traffic(sum(grown.values()), frozenset(grown) | (frozenset(old) - frozenset(new)))


@immutable
class Rates:
    cpu_cores: float = 0.0
    disk_bytes_per_s: float = 0.0
    net_bytes_per_s: float = 0.0


def rates_between(before: TreeReading | None, after: TreeReading) -> Rates:
    """A process that started or exited in between does not count: its totals are not the work of this interval."""
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
    return Rates(cpu_s / span_s, disk_bytes / span_s, traffic_between(before, after).num_bytes / span_s)


def ranks_among(processes: Iterable[ProcessReading]) -> dict[int, ProcessReading]:
    """The process of each rank, by rank. Parents come before children: the outermost process counts, or the first
    Python process below it where a shell was started for each rank. A rank's own workers inherit its variables."""
    found: dict[int, ProcessReading] = {}
    for process in processes:
        if process.rank is None or process.state in ("Z", "X"):
            continue
        held = found.get(process.rank.rank)
        if held is None or (process.is_python and not held.is_python):
            found[process.rank.rank] = process
    return dict(sorted(found.items()))
