"""Host memory against its limit: how much is used, how fast it grows, how long until it is full.

Owns the sampling rate and when to warn. The readings and the growth rate come from `machine`.
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Collection, Sequence

from jackline.diagnosis.doing import imported_package
from jackline.diagnosis.frames import Frame, ProcessStack, innermost_user_frame
from jackline.machine.forecast import growth_bytes_per_s, has_grown_steadily, seconds_to_limit
from jackline.machine.memory import effective_limit, fills_it_itself, neighbour_text, read_memory
from jackline.machine.procfs import read_bytes
from jackline.machine.readings import MemoryLimit, MemoryReading, ProcessReading
from jackline.units import format_bytes, format_duration, format_limit

ARMED_SHARE = 0.5
SLOW_EVERY_S = 1.0
FAST_EVERY_S = 0.1
WINDOW_S = 20.0
WARN_BELOW_S = (60.0, 10.0)  # warn, and warn again when little time is left
CALM_AFTER_S = 30.0
RISING_BELOW_S = 30.0
RECENT_S = 2.5
PSS_EVERY_S = 10.0
# How often to look whether somebody else has changed the limit, which takes 0.4 ms; more often when memory is short.
LIMIT_EVERY_S, LIMIT_ARMED_EVERY_S = 10.0, 1.0
BURIED_WITHIN_S = 5.0
# The session normally saves and exits at a boundary, long before this. Where it cannot, this is the last moment at
# which we can end it before the kernel does: a kill frees memory within tenths of a second. A program may fill most
# of its memory fast and then stay there. So that it is not ended, memory must also be nearly full.
END_BELOW_S = 1.0
END_ABOVE_SHARE = 0.9
END_AT_ONCE_BELOW_S = 0.3
# The session forecasts by the same rule. Sometimes both become certain only late (growth with pauses, on a busy
# machine). Then this is how long the session has to reach a boundary before it is ended.
SESSION_HAS_S = 0.5


class MemoryWatch:
    """Recent memory readings of one attempt's process tree."""

    def __init__(self, pid: int) -> None:
        self.limit = effective_limit(pid)
        self._limit_of: tuple[int, bytes | None, bytes | None] | None = None
        self._limit_at_s = float("-inf")
        self.reading: MemoryReading | None = None
        self.peak_bytes = 0
        self.own_bytes = 0  # of the whole tree; pages that its processes share count once
        self._shared = 1.0  # PSS divided by RSS, when it was last measured
        self._pss_at_s = float("-inf")
        self._points: deque[tuple[float, int]] = deque()
        self._own_points: deque[tuple[float, int]] = deque()
        self._pids: frozenset[int] = frozenset()
        self._last_s = float("-inf")
        self._level = 0
        self._warned_at_s = float("-inf")
        self._foreseen_at_s: float | None = None  # since when the forecast has predicted that memory runs out

    def poll(self, now_s: float, pids: Sequence[int]) -> bool:
        """Take a reading when one is due; True when it was."""
        every_s = FAST_EVERY_S if self.share() >= ARMED_SHARE or self.is_rising() else SLOW_EVERY_S
        if now_s - self._last_s < every_s * 0.9 or not pids:
            return False
        self._last_s = now_s
        # PSS is read only from time to time: it costs up to 12 ms a process. A single process shares no pages.
        with_pss = len(pids) > 1 and now_s - self._pss_at_s >= PSS_EVERY_S
        reading = read_memory(pids, with_pss=with_pss, limit=self._newest_limit(now_s, pids[0]))
        if not reading.tree_rss_bytes:
            return False  # it has just ended: what we read now is neither its memory nor its limit
        if reading.limit.source != self.limit.source:
            self._points.clear()  # moved to another cgroup: old readings do not apply to the new limit
        self.reading, self.limit = reading, reading.limit
        if with_pss:
            self._pss_at_s = now_s
            self._shared = min(1.0, (reading.tree_pss_bytes or reading.tree_rss_bytes) / reading.tree_rss_bytes)
        self.own_bytes = int(reading.tree_rss_bytes * (self._shared if len(pids) > 1 else 1.0))
        self.peak_bytes = max(self.peak_bytes, self.own_bytes)
        self._pids = frozenset(pids)
        for points, size in ((self._points, reading.used_bytes), (self._own_points, reading.tree_rss_bytes)):
            points.append((now_s, size))
            while points and now_s - points[0][0] > WINDOW_S:
                points.popleft()
        return True

    def _newest_limit(self, now_s: float, pid: int) -> MemoryLimit:
        """The limit of a process. One that moves to another cgroup or limits itself has the new limit at once."""
        place = (pid, read_bytes(f"/proc/{pid}/cgroup"), read_bytes(f"/proc/{pid}/limits"))
        every_s = LIMIT_ARMED_EVERY_S if self.share() >= ARMED_SHARE else LIMIT_EVERY_S
        if place == self._limit_of and now_s - self._limit_at_s < every_s:
            return self.limit
        self._limit_of, self._limit_at_s = place, now_s
        return effective_limit(pid)

    def share(self) -> float:
        if self.reading is None or self.limit.limit_bytes <= 0:
            return 0.0
        return self.reading.used_bytes / self.limit.limit_bytes

    def is_rising(self) -> bool:
        """At the rate of the last seconds it would reach the limit soon: sample more often, but print nothing yet."""
        if len(self._points) < 2:
            return False
        recent = [point for point in self._points if self._points[-1][0] - point[0] <= RECENT_S]
        (first_s, first), (last_s, last) = recent[0], recent[-1]
        if last_s <= first_s or last <= first:
            return False
        return (self.limit.limit_bytes - last) / ((last - first) / (last_s - first_s)) < RISING_BELOW_S

    def seconds_left(self) -> float | None:
        return seconds_to_limit(tuple(self._points), self.limit.limit_bytes) if self.share() >= ARMED_SHARE else None

    def must_end(self) -> bool:
        """The kernel is about to kill the command, and the session has not acted in time."""
        left_s = self.seconds_left()
        if left_s is None or not self.is_own_growth():
            self._foreseen_at_s = None
            return False
        now_s = self._points[-1][0]
        if self._foreseen_at_s is None:
            self._foreseen_at_s = now_s
        return is_last_moment(left_s, self.share(), now_s - self._foreseen_at_s)

    def is_own_growth(self) -> bool:
        """False when another program fills the memory: ending this run would not help."""
        return self.reading is None or fills_it_itself(self.reading, self._points, self._own_points)

    def growth_bytes_per_s(self) -> float:
        return growth_bytes_per_s(tuple(self._points)) or 0.0

    def has_grown_steadily(self) -> bool:
        return has_grown_steadily(tuple(self._points))

    def warning(self, now_s: float, frame: Frame | None) -> str | None:
        """A sentence the first time each level is passed, None otherwise."""
        left_s = self.seconds_left()
        if left_s is None or left_s > WARN_BELOW_S[0]:
            if now_s - self._warned_at_s > CALM_AFTER_S:
                self._level = 0
            return None
        level = sum(left_s <= bound for bound in WARN_BELOW_S)
        if level <= self._level or self.reading is None:
            return None
        self._level, self._warned_at_s = level, now_s
        if not self.is_own_growth():
            return neighbour_text(self.reading, self.growth_bytes_per_s(), left_s, self._pids)
        return warning_text(self.reading, self.growth_bytes_per_s(), left_s, frame)


def is_last_moment(left_s: float, share: float, foreseen_s: float) -> bool:
    """`foreseen_s`: for how long the forecast has predicted that memory runs out."""
    if left_s < END_AT_ONCE_BELOW_S:
        return True
    return left_s < END_BELOW_S and share >= END_ABOVE_SHARE and foreseen_s >= SESSION_HAS_S


class GrowthPlaces:
    """Lines seen in each process while its memory grew; the line seen working most often is the likely cause.

    A process that was killed for its memory keeps its lines: by then memory is free again and its stack is gone.
    """

    def __init__(self) -> None:
        self._working: dict[int, Counter[Frame]] = {}
        self._any: dict[int, Counter[Frame]] = {}
        self._rss_bytes: dict[int, int] = {}
        self._cleared: tuple[int, Frame, float] | None = None
        self._lost: Frame | None = None

    def grower(self, processes: Sequence[ProcessReading]) -> int | None:
        """The process that has grown most since the last call; the largest where none has."""
        before, self._rss_bytes = self._rss_bytes, {process.pid: process.rss_bytes for process in processes}
        gains = {pid: rss - before.get(pid, 0) for pid, rss in self._rss_bytes.items()}
        return max(gains, key=lambda pid: (gains[pid] if gains[pid] > 0 else 0, self._rss_bytes[pid]), default=None)

    def add(self, stack: ProcessStack | None) -> None:
        thread = stack.main if stack else None
        frame = innermost_user_frame(thread)
        if stack is None or thread is None or frame is None or imported_package(thread):
            return  # an import takes memory once: it is never what grows
        self._any.setdefault(stack.pid, Counter())[frame] += 1
        # A thread that sleeps or waits in this sample did not allocate anything then. Neither did one that is inside
        # Jackline, taking a batch or saving.
        inside = itertools.takewhile(lambda inner: inner != frame, thread.frames)
        is_ours = any("/jackline/session/" in inner.file for inner in inside)
        # The line of a task that awaits is in no frame: its event loop is idle.
        is_idle = frame.sleeps or thread.awaiting is not None
        if not is_ours and not is_idle and (not thread.wait or thread.wait.startswith("running")):
            self._working.setdefault(stack.pid, Counter())[frame] += 1

    @property
    def lost(self) -> Frame | None:
        """The line of a process that was ended for its memory."""
        return self._lost

    def likely(self) -> Frame | None:
        found = self._most()
        return found[1] if found is not None else self._lost

    def _most(self) -> tuple[int, Frame] | None:
        """The process seen most often while memory grew, and its line."""
        for counters in (self._working, self._any):
            if counters:
                pid = max(counters, key=lambda pid: counters[pid].total())
                return pid, counters[pid].most_common(1)[0][0]
        return None

    def clear(self, now_s: float) -> None:
        """Memory is free again: because it was freed, or because the kernel is ending the process that had it."""
        found = self._most()
        if found is not None:
            self._cleared = (*found, now_s)
        self._working.clear()
        self._any.clear()

    def bury(self, alive: Collection[int], now_s: float) -> None:
        """A process that ended as its memory became free was ended for it: its line is the one that grew."""
        if self._cleared is None or now_s - self._cleared[2] > BURIED_WITHIN_S:
            self._cleared = None
        elif self._cleared[0] not in alive:
            self._lost, self._cleared = self._cleared[1], None


def warning_text(reading: MemoryReading, growth: float, left_s: float, frame: Frame | None) -> str:
    where = f"; it grows at {frame.place} `{frame.source.strip()}`" if frame else ""
    # A limit of the process itself (ulimit -v) refuses memory; only a cgroup's or the machine's limit kills.
    is_refused = reading.limit.source.startswith("RLIMIT")
    end = "an allocation will fail (MemoryError)" if is_refused else "the kernel will kill this run"
    limit = format_limit(reading.limit.limit_bytes, reading.limit.source)
    return (
        f"host RAM: {format_bytes(reading.used_bytes)} of {limit}"
        f", growing {format_bytes(growth)}/s:"
        f" {end} in about {format_duration(left_s)}{where}"
    )
