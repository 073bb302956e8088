"""Host memory, watched from inside the training process: save and exit before the OOM killer acts. No torch.

Owns the sampling inside the process, the decision at a step boundary, and the smaller settings of the next attempt.
`machine` owns the readings and the forecast; the caller owns saving and exiting. "Never killed" cannot be promised:
another process may take the memory within one step, and a loop that never reaches a boundary is ended by the
supervisor.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from jackline.machine.forecast import Point, growth_bytes_per_s, seconds_to_limit
from jackline.machine.memory import effective_limit, fills_it_itself, neighbour_text, read_memory
from jackline.machine.proc import list_tree
from jackline.machine.readings import MemoryReading
from jackline.units import format_bytes, format_duration, format_limit

ARMED_SHARE = 0.5
SLOW_EVERY_S = 1.0
FAST_EVERY_S = 0.1
_LOOKS_A_SAMPLE = 8  # of 0.1 ms each
WINDOW_S = 60.0
TRIM_BELOW_S = 60.0
# Exit when the limit is nearer in time than this many times one more step and a save.
_LEAVE_FACTOR = 2.0
# Exit when the limit is nearer than this, however short steps and saves are: a busy machine makes both longer, and in
# the last second the supervisor ends the process.
_LEAVE_BELOW_S = 2.0


@dataclass(frozen=True)
class Go:
    """Nothing to do."""


@dataclass(frozen=True)
class Trim:
    """Return unused memory to the system, and use fewer workers and less prefetch from now on."""

    left_s: float


@dataclass(frozen=True)
class SaveAndExit:
    """Save now and exit with code 75: the next boundary may be too late."""

    left_s: float


def guard_action(left_s: float | None, step_s: float, save_s: float) -> Go | Trim | SaveAndExit:
    """`left_s` is the forecast time until the limit; None when memory does not grow towards it."""
    if left_s is None:
        return Go()
    if left_s < max(_LEAVE_BELOW_S, _LEAVE_FACTOR * (step_s + save_s)):
        return SaveAndExit(left_s)
    return Trim(left_s) if left_s < TRIM_BELOW_S else Go()


class HostGuard:
    """Samples in a thread of its own: once a second, ten times a second above half of the limit; 0.3 ms each."""

    def __init__(
        self,
        *,
        read: Callable[[], MemoryReading] | None = None,
        on_growth: Callable[[], None] | None = None,
    ) -> None:
        limit = effective_limit()
        self._read = read or (lambda: read_memory(list_tree(os.getpid()), limit=limit))
        self._on_growth = on_growth  # called by the thread while memory grows and is above half of the limit
        self._growing_share = 0.0
        self._points: deque[Point] = deque()
        self._own: deque[Point] = deque()  # this process and its children
        self._lock = threading.Lock()
        self._is_over = threading.Event()
        self._thread: threading.Thread | None = None
        self.reading: MemoryReading | None = None

    def start(self) -> HostGuard:
        self._sample()
        self._thread = threading.Thread(target=self._watch, name="jackline-host-guard", daemon=True)
        self._thread.start()
        return self

    def stop(self) -> None:
        self._is_over.set()
        if self._thread is not None:
            self._thread.join()

    def _watch(self) -> None:
        while not self._pause():
            # A guard that fails must never end the run: the run continues unguarded.
            with contextlib.suppress(Exception):
                self._sample()

    def _pause(self) -> bool:
        """Wait until the next sample; true once the guard is stopped.

        While memory grows, `_on_growth` is called more often than samples are taken. A loop may fill the memory in
        seconds and spend most of them asleep or saving; at the rate of the samples its work would be seen once or
        never.
        """
        if self.share() < ARMED_SHARE:
            # A process that grows fast passes half of the limit before one slow interval is over.
            soon = self.share() + self._growing_share * 2 * SLOW_EVERY_S
            return self._is_over.wait(SLOW_EVERY_S if soon < ARMED_SHARE else FAST_EVERY_S)
        for _ in range(_LOOKS_A_SAMPLE):
            if self._is_over.wait(FAST_EVERY_S / _LOOKS_A_SAMPLE):
                return True
            with contextlib.suppress(Exception):
                self._look()
        return False

    def _look(self) -> None:
        if self._growing_share and self._on_growth is not None and self.share() >= ARMED_SHARE:
            self._on_growth()

    def _sample(self) -> None:
        reading, before = self._read(), self.reading
        self._growing_share = 0.0  # of the limit, per second
        if before is not None and reading.used_bytes > before.used_bytes and reading.at_s > before.at_s:
            grown = (reading.used_bytes - before.used_bytes) / max(1, reading.limit.limit_bytes)
            self._growing_share = grown / (reading.at_s - before.at_s)
        self._look()
        with self._lock:
            self.reading = reading
            for points, size in ((self._points, reading.used_bytes), (self._own, reading.tree_rss_bytes)):
                points.append((reading.at_s, size))
                while reading.at_s - points[0][0] > WINDOW_S:
                    points.popleft()

    def share(self) -> float:
        reading = self.reading
        return reading.used_bytes / reading.limit.limit_bytes if reading and reading.limit.limit_bytes else 0.0

    def is_calm(self) -> bool:
        """Whether there is nothing to decide: memory was far from the limit a moment ago."""
        reading = self.reading
        is_fresh = reading is not None and time.monotonic() - reading.at_s <= 2 * SLOW_EVERY_S
        return is_fresh and self.share() < ARMED_SHARE

    def left_s(self, kept_bytes: int = 0) -> float | None:
        with self._lock:
            points = tuple(self._points)
        if self.reading is None or self.share() < ARMED_SHARE:
            return None
        return seconds_to_limit(points, self.reading.limit.limit_bytes - kept_bytes)

    def is_own_growth(self) -> bool:
        """False when another program fills the memory: leaving would lose time and free next to nothing."""
        with self._lock:
            return self.reading is None or fills_it_itself(self.reading, tuple(self._points), tuple(self._own))

    def describe_neighbour(self, left_s: float) -> str:
        if self.reading is None:
            return "host RAM: not known"
        with self._lock:
            growth = growth_bytes_per_s(tuple(self._points))
        return neighbour_text(self.reading, growth, left_s, list_tree(os.getpid()))

    def action(self, step_s: float, save_s: float, kept_bytes: int = 0) -> Go | Trim | SaveAndExit:
        """Call this at every step boundary; it costs microseconds while memory is calm. `kept_bytes` is what a save
        will take of the same memory before it is written.

        It takes a reading of its own when the thread is late: code that holds the GIL keeps the thread from sampling.
        """
        reading = self.reading
        if reading is None or time.monotonic() - reading.at_s > 2 * SLOW_EVERY_S:
            with contextlib.suppress(Exception):
                self._sample()
        return guard_action(self.left_s(kept_bytes), step_s, save_s)

    def describe(self, left_s: float) -> str:
        """'host RAM: 3.1 GiB of 4.0 GiB (cgroup ...), growing 200 MiB/s: the limit is 4.6 s away'."""
        reading = self.reading
        if reading is None:
            return "host RAM: not known"
        with self._lock:
            growth = growth_bytes_per_s(tuple(self._points))
        limit = format_limit(reading.limit.limit_bytes, reading.limit.source)
        return (
            f"host RAM: {format_bytes(reading.used_bytes)} of {limit}"
            f", growing {format_bytes(growth)}/s:"
            f" the limit is {format_duration(left_s)} away"
        )


def smaller_settings(*, num_workers: int, prefetch: int) -> dict[str, int]:
    """What the next attempt should start with: half the workers (one becomes none), and at most two batches ahead."""
    return {"num_workers": num_workers // 2, "prefetch": max(1, min(2, prefetch // 2))}


def trim_host_memory() -> None:
    """Return free heap to the system: after a peak glibc keeps it, and it counts as used."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
