"""Device memory that creeps up: when it will be full, and the line that holds what was added.

Host memory that runs out does so within seconds; a GPU's creeps up by megabytes for hours, because the caching
allocator hides everything but what is kept. So this looks at minutes to hours, at each GPU that the run uses. Once a
creep is suspected, the process is asked several times which of its lines hold the memory added since then
(child/inside/gpu_memory): steps allocate and free on every line, and only a line that leaks has more each time. Owns
what counts as a creep and when it is told. Does not own the readings (machine/gpu).
"""

from __future__ import annotations

import contextlib
import json
import linecache
import os
from bisect import bisect_left
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from jackline.immutable import immutable
from jackline.machine.procfs import read_bytes
from jackline.machine.readings import GpuReading
from jackline.rundir.layout import AttemptDir
from jackline.supervisor.events import Events
from jackline.supervisor.stacks.inside import signal_inside
from jackline.units import format_bytes, format_duration

Point = tuple[float, int]
Line = tuple[str, int, str]

EVERY_S = 5.0
JUDGED_EVERY_S = 10.0
KEPT_S = 6 * 3600.0
WINDOWS_S = (120.0, 240.0, 480.0, 960.0, 1920.0, 3840.0, 7680.0, 15360.0)
LEAST_GROWN_BYTES = 24 << 20  # the allocator takes 20 MiB at a time
LEAST_RISES = 4
LEAST_SHARE = 0.4  # of the mean growth that every part of the window must show
BELIEVED = 20.0  # a growth seen for a minute says something about twenty
WARN_BELOW_S = (float("inf"), 3600.0, 600.0)
LOOK_EVERY_S = 8.0
NUM_LOOKS = 5
_PARTS = 5
_MOST_BYTES = 1 << 20


@immutable
class Creep:
    """`left_s`: until it is full at this rate. `window_s`: for how long it has been seen."""

    gpu: int
    used_bytes: int
    total_bytes: int
    bytes_per_s: float
    left_s: float
    window_s: float


def find_creep(points: Sequence[Point], gpu: GpuReading) -> Creep | None:
    """Steady growth of what the run holds, over the longest window that shows it; None when there is none.

    Peaks of five equal parts are compared, so a cache that is emptied now and then does not hide a leak, and a growth
    that slows down, as that of an allocator which still meets larger batches, is none.
    """
    free_bytes = max(0, gpu.total_bytes - gpu.used_bytes)
    found = None
    for window_s in WINDOWS_S:
        begin = bisect_left(points, (points[-1][0] - window_s,))
        rate = _steady_rate(points[begin:], window_s)
        if rate is not None and free_bytes / rate <= BELIEVED * window_s:
            found = Creep(gpu.index, gpu.used_bytes, gpu.total_bytes, rate, free_bytes / rate, window_s)
    return found


def _steady_rate(points: Sequence[Point], window_s: float) -> float | None:
    if len(points) < 2 * _PARTS or points[-1][0] - points[0][0] < 0.95 * window_s:
        return None
    begin_s, width_s = points[0][0], (points[-1][0] - points[0][0]) / _PARTS
    parts: list[list[int]] = [[] for _ in range(_PARTS)]
    for at_s, size in points:
        parts[min(_PARTS - 1, int((at_s - begin_s) / width_s))].append(size)
    if not all(parts):
        return None
    peaks = [max(part) for part in parts]
    steps = [after - before for before, after in pairwise(peaks)]
    grown = peaks[-1] - peaks[0]
    num_rises = sum(after[1] > before[1] for before, after in pairwise(points))
    if grown < LEAST_GROWN_BYTES or num_rises < LEAST_RISES or min(steps) < LEAST_SHARE * grown / len(steps):
        return None
    return grown / (width_s * len(steps))


def growing_line(looks: Sequence[Mapping[Line, int]]) -> tuple[Line, int] | None:
    """The line that holds more at every look, and how much more in all; the one that grew most steadily."""
    if len(looks) < 3:
        return None
    found: dict[Line, int] = {}
    for line in looks[-1]:
        sizes = [look.get(line, 0) for look in looks]
        found[line] = min(after - before for before, after in pairwise(sizes))
    best = max(found, key=lambda one: found[one], default=None)
    return (best, looks[-1][best] - looks[0].get(best, 0)) if best is not None and found[best] > 0 else None


@dataclass
class _Search:
    """Questions to one process, for the line."""

    pid: int
    asked_s: float
    looks: list[dict[Line, int]] = field(default_factory=list)
    num_asked: int = 0


class GpuCreep:
    """The GPUs of one attempt. `poll` is called once a second."""

    def __init__(self, attempt: AttemptDir, events: Events, *, is_injected: bool) -> None:
        self._attempt, self._events, self._is_injected = attempt, events, is_injected
        self._points: dict[int, deque[Point]] = {}
        self._read_s = self._judged_s = float("-inf")
        self._creep: Creep | None = None
        self._search: _Search | None = None
        self._line: tuple[Line, int] | None = None
        self._is_searched = False
        self._level = 0

    def poll(self, now_s: float, gpus: Sequence[GpuReading], pids: Sequence[int]) -> None:
        if now_s - self._read_s >= EVERY_S:
            self._read_s = now_s
            for gpu in gpus:
                if gpu.is_ours and gpu.total_bytes:
                    self._add(now_s, gpu, pids)
        if now_s - self._judged_s >= JUDGED_EVERY_S:
            self._judged_s = now_s
            creeps = [found for gpu in gpus if gpu.is_ours and (found := self._find(gpu))]
            self._creep = min(creeps, key=lambda creep: creep.left_s, default=None)
        if self._creep is None:
            return
        self._look_for_line(now_s, pids)
        self._tell(self._creep)

    def close(self) -> None:
        """The process has ended, or is not watched any more."""
        with contextlib.suppress(OSError):
            for path in (*self._attempt.stacks.glob("gpu-ask.*"), *self._attempt.stacks.glob("gpu.*")):
                path.unlink()

    def _add(self, now_s: float, gpu: GpuReading, pids: Sequence[int]) -> None:
        own = [user.used_bytes or 0 for user in gpu.processes if user.pid in pids]
        points = self._points.setdefault(gpu.index, deque(maxlen=int(KEPT_S / EVERY_S)))
        points.append((now_s, sum(own) or gpu.used_bytes))

    def _find(self, gpu: GpuReading) -> Creep | None:
        points = self._points.get(gpu.index)
        return find_creep(tuple(points), gpu) if points else None

    # -- the line ----------------------------------------------------------------------------------------------------

    def _look_for_line(self, now_s: float, pids: Sequence[int]) -> None:
        if self._is_searched or not self._is_injected:
            self._is_searched = True
            return
        search = self._search
        if search is None:
            pid = next((pid for pid in pids if (self._attempt.stacks / f"fh.{pid}").exists()), None)
            if pid is None:
                self._is_searched = True
                return
            search = self._search = _Search(pid, float("-inf"))
        self._read_answer(search)
        if now_s - search.asked_s < LOOK_EVERY_S:
            return
        if search.num_asked > NUM_LOOKS + 2 or len(search.looks) >= NUM_LOOKS:
            self._line = growing_line(search.looks)
            self._is_searched = True
            self._ask(search.pid, "stop")
            return
        search.asked_s = now_s
        search.num_asked += 1
        self._ask(search.pid, "look")

    def _ask(self, pid: int, word: str) -> None:
        path = self._attempt.stacks / f"gpu-ask.{pid}"
        with contextlib.suppress(OSError):
            path.write_text(word)
            if not signal_inside(pid, self._attempt.stacks):
                path.unlink(missing_ok=True)

    def _read_answer(self, search: _Search) -> None:
        path = self._attempt.stacks / f"gpu.{search.pid}"
        data = read_bytes(str(path))
        if data is None:
            return
        with contextlib.suppress(OSError):
            path.unlink()
        search.looks.append(read_lines(data))

    # -- telling -----------------------------------------------------------------------------------------------------

    def _tell(self, creep: Creep) -> None:
        level = sum(creep.left_s <= bound for bound in WARN_BELOW_S)
        is_waiting = not self._is_searched and creep.left_s > 900.0  # the line is known within two minutes
        if level <= self._level or is_waiting:
            return
        self._level = level
        text = creep_text(creep, self._line)
        place = f"{self._line[0][0]}:{self._line[0][1]}" if self._line else None
        self._events.emit("memory", text, gpu=creep.gpu, seconds_to_limit=creep.left_s, line=place)


def read_lines(data: bytes) -> dict[Line, int]:
    """The answer of a process; what is damaged or strange counts as nothing."""
    try:
        raw = json.loads(data[:_MOST_BYTES])
        rows = raw.get("lines", ()) if isinstance(raw, dict) else ()
        return {(str(file), int(line), str(name)): int(size) for file, line, name, size in rows}
    except (ValueError, TypeError, RecursionError):
        return {}


def creep_text(creep: Creep, line: tuple[Line, int] | None) -> str:
    where = ""
    if line is not None:
        (file, number, _), grown = line
        source = linecache.getline(file, number).strip()[:120]
        shown = os.path.relpath(file) if not os.path.relpath(file).startswith("..") else file
        where = f"; the line that holds more and more ({format_bytes(grown)} since it is watched): {shown}:{number}"
        where += f" `{source}`" if source else ""
    return (
        f"GPU {creep.gpu}: {format_bytes(creep.used_bytes)} of {format_bytes(creep.total_bytes)} used, growing "
        f"{format_bytes(creep.bytes_per_s * 60)} a minute for {format_duration(creep.window_s)}: full in about "
        f"{format_duration(creep.left_s)}{where}"
    )
