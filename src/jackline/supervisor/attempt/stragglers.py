"""The rank that the others wait for again and again, and why it is slower. Never an alarm: it is told once.

Ranks that train together meet in every step; the slowest one never waits there, and all others do. So once a second
the main thread of each rank is looked at: does it compute, wait for others, for data, for a disk or for a CPU. When
over a minute one rank hardly ever waits for the others and they wait for it much of the time, it is named, with what
it does more than they do. Others that do nothing but wait are left to hang/ranks: one rank evaluates, or is stuck.
With NCCL a rank that waits for others is busy on the CPU; then nothing is told. Owns this comparison.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

from jackline.immutable import immutable
from jackline.machine.readings import GpuReading, ProcessReading

WINDOW = 60  # looks, one a second
AGAIN_AFTER_S = 900.0
_NEVER_WAITS, _OFTEN_WAITS = 0.15, 0.4
_MORE = 0.2  # of the time, more than the others do
_CLOCK = 0.85  # of the clock of the others' GPUs
_OTHERS = ("lock", "poll", "network")  # waits for other ranks, as far as the kernel tells
_DATA = ("pipe", "local_socket", "child")
_DISK = ("disk", "file")


@immutable
class Look:
    """What one rank did in one second. `queued`: the share of it in which it wanted a CPU and had none."""

    wait: str
    queued: float = 0.0
    clock: float | None = None  # of its GPU, as a share of the highest
    slowdown: str = ""  # why the driver slows that GPU down


@immutable
class Habits:
    """Shares of the looks at one rank."""

    others: float
    data: float
    disk: float
    queued: float
    clock: float | None
    slowdown: str
    is_training: bool = True  # in both halves of the time it did something else than wait for others
    sleep: float = 0.0
    stopped: float = 0.0


class Stragglers:
    """The looks at the ranks of one attempt. `add` returns a text once a straggler is certain."""

    def __init__(self) -> None:
        self._looks: dict[int, deque[Look]] = {}
        self._cpu: dict[int, tuple[int, float, float]] = {}  # pid, CPU time wanted and used so far
        self._told_s = float("-inf")

    def add(self, now_s: float, ranks: Mapping[int, ProcessReading], gpus: Sequence[GpuReading]) -> str:
        if len(ranks) < 2:
            return ""
        if set(ranks) != set(self._looks):
            self._looks = {rank: deque(maxlen=WINDOW) for rank in ranks}
        for rank, reading in ranks.items():
            gpu = next((one for one in gpus if any(user.pid == reading.pid for user in one.processes)), None)
            clock, slowdown = (gpu.clock_share, gpu.slowdown) if gpu is not None else (None, "")
            self._looks[rank].append(Look(reading.wait.kind, self._queued(rank, reading), clock, slowdown))
        is_full = all(len(looks) == WINDOW for looks in self._looks.values())
        if not is_full or now_s - self._told_s < AGAIN_AFTER_S:
            return ""
        text = find_straggler({rank: habits_of(looks) for rank, looks in self._looks.items()})
        if text:
            self._told_s = now_s
        return text

    def _queued(self, rank: int, reading: ProcessReading) -> float:
        wanted_s, used_s = reading.wants_cpu_s or reading.cpu_s, reading.cpu_s
        before = self._cpu.get(rank)
        self._cpu[rank] = (reading.pid, wanted_s, used_s)
        if before is None or before[0] != reading.pid:
            return 0.0
        return min(1.0, max(0.0, (wanted_s - before[1]) - (used_s - before[2])))


def habits_of(looks: Sequence[Look]) -> Habits:
    def share(kinds: Sequence[str]) -> float:
        return sum(look.wait in kinds for look in looks) / len(looks)

    clocks = [look.clock for look in looks if look.clock is not None]
    half = len(looks) // 2
    return Habits(
        is_training=all(
            any(look.wait not in _OTHERS for look in part) for part in (list(looks)[:half], list(looks)[half:])
        ),
        sleep=share(("sleep",)),
        stopped=share(("stopped",)),
        others=share(_OTHERS),
        data=share(_DATA),
        disk=share(_DISK),
        queued=sum(look.queued for look in looks) / len(looks),
        clock=sum(clocks) / len(clocks) if clocks else None,
        slowdown=next((look.slowdown for look in reversed(looks) if look.slowdown), ""),
    )


def find_straggler(habits: Mapping[int, Habits]) -> str:
    """'' when no single rank is the one that the others wait for."""
    slow = [rank for rank, one in habits.items() if one.others <= _NEVER_WAITS]
    rest = [one for rank, one in habits.items() if rank not in slow]
    if len(slow) != 1 or not rest or not all(one.others >= _OFTEN_WAITS and one.is_training for one in rest):
        return ""
    waited = sum(one.others for one in rest) / len(rest)
    told = f"rank {slow[0]} is the slowest: the others wait for it {waited:.0%} of the time"
    return f"{told}; {_cause(habits[slow[0]], rest)}"


def _cause(own: Habits, rest: Sequence[Habits]) -> str:
    clocks = [one.clock for one in rest if one.clock is not None]
    if own.clock is not None and clocks and own.clock < _CLOCK * min(clocks):
        why = f" ({own.slowdown})" if own.slowdown else ""
        return f"its GPU runs at {own.clock:.0%} of its highest clock{why}, theirs at {min(clocks):.0%} or more"
    found = []
    for share, theirs, words in (
        (own.disk, [one.disk for one in rest], "it waits for a disk"),
        (own.data, [one.data for one in rest], "it waits for its data"),
        (own.stopped, [one.stopped for one in rest], "it is stopped by a signal (SIGSTOP) or a debugger"),
        (own.sleep, [one.sleep for one in rest], "it sleeps"),
        (own.queued, [one.queued for one in rest], "it wants a CPU and others have it"),
    ):
        if share - max(theirs) >= _MORE:
            found.append((share, f"{words} {share:.0%} of the time, the others at most {max(theirs):.0%}"))
    if found:
        return max(found)[1]
    return "it computes all that time, with no more waits for data, disk or CPU than they have: it has more to do"
