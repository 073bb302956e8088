"""A run that became slower than it was, and why: against its own earlier rhythm, for any script that counts steps.

The rhythm is the time a step takes, read from the progress that the output tells, by medians: a validation or a save
in between is one outlier. When it slows down, what else is known is compared with how it was when the rhythm was
usual: the GPU's clock and what the driver says about it, other processes on the GPU, swap, what the main thread waits
for, the pressure on the disk, and how long it waits for a CPU. Owns what "slower" means and the order in which causes
are believed. Does not own the readings (machine). Recipes have a sentinel of their own (trainer/sentinels/speed).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from jackline.diagnosis.frames import ProcessStack
from jackline.immutable import immutable
from jackline.machine import procfs
from jackline.machine.proc import read_command
from jackline.machine.readings import GpuReading, ProcessReading
from jackline.supervisor.events import Events
from jackline.units import format_bytes, format_duration

SKIPPED = 4  # compilation, autotuning, caches
REFERENCE = 24
RECENT = 12
EVERY_S = 1.0
SLOWER = 1.5  # times the usual time of a step
FASTER = 0.8
LEAST_S = 20.0
LEAST_MORE_S = 0.005  # of a step: smaller differences are those of our own reading
AGAIN_AFTER_S = 600.0
STACKS_EVERY_S = 5.0
AROUND_EVERY_S = 4.0
_KEPT = 90
_CLOCK = 0.85
_WAITS_MORE = 0.3
_PRESSURE = 0.15
_QUEUED = 0.2
_SWAPPED_BYTES = 64 << 20
_LOADING = ("/torch/utils/data/", "/multiprocessing/queues.py", "/multiprocessing/connection.py")


@immutable
class Around:
    """What else was seen in one second. None: not known here."""

    clock_share: float | None = None  # of the GPU's highest
    slowdown: str = ""  # 'too hot', 'power cap' ... as the driver says
    gpu_others: tuple[int, ...] = ()
    swapped_bytes: int | None = None  # of the processes of the run
    io_pressure: float | None = None  # share of the last 10 s in which something waited for the disk
    queued: float | None = None  # seconds a second that the main process waited for a CPU


class Rhythm:
    """The time of a step, now and usually. `add` returns how many times slower it has become, once it is certain."""

    def __init__(self) -> None:
        self._last: tuple[float, float] | None = None
        self._num_seen = 0
        self._first: list[float] = []
        self._recent: deque[tuple[float, float]] = deque(maxlen=RECENT)  # when, seconds a step
        self._slow_since_s: float | None = None
        self.doubtful_s = 0.0  # when it slows down: from here on steps may have been slow already
        self.usual_s = 0.0
        self.now_s = 0.0

    @property
    def is_known(self) -> bool:
        return self.usual_s > 0

    @property
    def is_slowing(self) -> bool:
        return self._slow_since_s is not None

    @property
    def slow_since_s(self) -> float:
        return self._slow_since_s if self._slow_since_s is not None else float("inf")

    def add(self, told_s: float, at_s: float, step: float) -> float | None:
        """Step number `step` was reported at `told_s`, by any clock; `at_s` is now."""
        last = self._last
        if last is None or step < last[1]:
            self._last = (told_s, step)
            self._recent.clear()
            return None
        if step == last[1] or told_s - last[0] < EVERY_S:
            return None
        self._last = (told_s, step)
        self._num_seen += 1
        return self._take(at_s, (told_s - last[0]) / (step - last[1])) if self._num_seen > SKIPPED else None

    def _take(self, at_s: float, step_s: float) -> float | None:
        if not self.is_known:
            self._first.append(step_s)
            if len(self._first) >= REFERENCE:
                self.usual_s = _median(self._first)
            return None
        self._recent.append((at_s, step_s))
        if len(self._recent) < RECENT:
            return None
        self.now_s = _median([value for _, value in self._recent])
        if self.now_s < FASTER * self.usual_s:
            self.usual_s = self.now_s
        if self.now_s < SLOWER * self.usual_s or self.now_s - self.usual_s < LEAST_MORE_S:
            self._slow_since_s = None
            return None
        if self._slow_since_s is None:
            self._slow_since_s, self.doubtful_s = at_s, self._recent[0][0]
        return self.now_s / self.usual_s if at_s - self._slow_since_s >= LEAST_S else None

    def accept(self) -> None:
        """What it is now becomes the usual, so that a further drop is seen and this one is told once."""
        self.usual_s = self.now_s
        self._slow_since_s = None
        self._recent.clear()


class Slowness:
    """One attempt. `look` is called once a second."""

    def __init__(self, events: Events) -> None:
        self._events = events
        self.rhythm = Rhythm()
        self._around: deque[tuple[float, Around]] = deque(maxlen=_KEPT)
        self._waits: deque[tuple[float, bool]] = deque(maxlen=_KEPT)
        self._seen_s = 0.0
        self._queue: tuple[int, float, float] | None = None
        self._told_s = float("-inf")
        self._stacks_s = self._read_s = float("-inf")

    def look(
        self,
        now_s: float,
        report: tuple[float, float | None],
        gpus: Sequence[GpuReading],
        processes: Sequence[ProcessReading],
    ) -> bool:
        """`report`: when the newest step was reported, and its number. True when a stack of the main thread would
        help to find the cause."""
        at_s, step = report
        if step is None or not processes:
            return False
        self._seen_s = now_s
        times = self.rhythm.add(at_s, now_s, step)
        if now_s - self._read_s >= AROUND_EVERY_S:
            self._read_s = now_s
            around = read_around(gpus, processes, self._queued(now_s, processes[0]))
            self._around.append((now_s, around))
        if times is not None:
            self._tell(now_s)
        wants = self.rhythm.is_slowing and now_s - self._stacks_s >= STACKS_EVERY_S
        self._stacks_s = now_s if wants else self._stacks_s
        return wants

    def note_stack(self, stack: ProcessStack | None) -> None:
        """Where the main process was, also in usual times."""
        thread = stack.main if stack is not None else None
        if thread is not None and thread.frames:
            waits = any(part in frame.file for frame in thread.frames[:12] for part in _LOADING)
            self._waits.append((self._seen_s, waits))

    def _tell(self, now_s: float) -> None:
        rhythm = self.rhythm
        usual = [around for at_s, around in self._around if at_s < rhythm.doubtful_s]
        slow = [around for at_s, around in self._around if at_s >= rhythm.slow_since_s]
        waits = [waits for at_s, waits in self._waits if at_s < rhythm.doubtful_s]
        waits_now = [waits for at_s, waits in self._waits if at_s >= rhythm.slow_since_s]
        shares = (_mean_of(waits), _mean_of(waits_now))
        cause, hint = find_cause(usual, slow, shares)
        text = (
            f"slower than before: a step takes {format_duration(rhythm.now_s)}, it was "
            f"{format_duration(rhythm.usual_s)}: {cause}"
        )
        if now_s - self._told_s >= AGAIN_AFTER_S:
            self._told_s = now_s
            self._events.emit("slow", f"{text}\n  {hint}", step_s=rhythm.now_s, usual_step_s=rhythm.usual_s)
        rhythm.accept()
        self._around.clear()
        self._waits.clear()

    def _queued(self, now_s: float, main: ProcessReading) -> float | None:
        waited_s, before = main.wants_cpu_s - main.cpu_s, self._queue
        self._queue = (main.pid, now_s, waited_s)
        if before is None or before[0] != main.pid or now_s <= before[1]:
            return None
        return max(0.0, (waited_s - before[2]) / (now_s - before[1]))


def read_around(gpus: Sequence[GpuReading], processes: Sequence[ProcessReading], queued: float | None) -> Around:
    ours = [gpu for gpu in gpus if gpu.is_ours]
    pids = {process.pid for process in processes}
    shares = [gpu.clock_share for gpu in ours if gpu.clock_share is not None]
    return Around(
        clock_share=min(shares, default=None),
        slowdown=next((gpu.slowdown for gpu in ours if gpu.slowdown), ""),
        gpu_others=tuple(user.pid for gpu in ours for user in gpu.processes if user.pid not in pids),
        swapped_bytes=sum(procfs.read_fields(f"/proc/{pid}/status").get("VmSwap") or 0 for pid in sorted(pids)[:16]),
        io_pressure=_read_pressure(),
        queued=queued,
    )


def _read_pressure() -> float | None:
    words = (procfs.read_text("/proc/pressure/io") or "").partition("\n")[0].split()
    for word in words:
        if word.startswith("avg10="):
            return float(word.removeprefix("avg10=")) / 100
    return None


def find_cause(
    usual: Sequence[Around], slow: Sequence[Around], waits: tuple[float | None, float | None]
) -> tuple[str, str]:
    """(cause, hint). `waits`: the share of stacks in which the main thread waited for data, usually and now."""
    now = slow[-1] if slow else Around()
    clock, clock_before = _mean(slow, "clock_share"), _mean(usual, "clock_share")
    is_lower = clock is not None and clock_before is not None and clock < _CLOCK * clock_before
    new_reason = now.slowdown and not any(one.slowdown == now.slowdown for one in usual)
    if is_lower or new_reason:
        share = f" (clock at {100 * clock:.0f} % of its highest)" if clock is not None else ""
        return f"the GPU slowed itself down: {now.slowdown or 'lower clock'}{share}", "cooling, or the power limit"
    before = {pid for one in usual for pid in one.gpu_others}
    others = [pid for pid in now.gpu_others if pid not in before and read_command(pid)]
    if others:
        named = ", ".join(f"pid {pid} ({read_command(pid)[:40]})" for pid in others[:3])
        return f"others work on the same GPU since then: {named}", "`jackline doctor` names them"
    swapped, swapped_before = now.swapped_bytes or 0, usual[-1].swapped_bytes or 0 if usual else 0
    if swapped > swapped_before + _SWAPPED_BYTES:
        return f"{format_bytes(swapped - swapped_before)} of it were swapped to disk since then", "free host memory"
    return _waiting_cause(usual, slow, waits)


def _waiting_cause(
    usual: Sequence[Around], slow: Sequence[Around], waits: tuple[float | None, float | None]
) -> tuple[str, str]:
    pressure, pressure_before = _mean(slow, "io_pressure") or 0.0, _mean(usual, "io_pressure") or 0.0
    is_disk = pressure > pressure_before + _PRESSURE
    disk = f"something waits for a disk {100 * pressure:.0f} % of the time, {100 * pressure_before:.0f} % before"
    if waits[1] is not None and waits[1] >= max(0.5, (waits[0] or 0.0) + _WAITS_MORE):
        text = f"it waits for data in {100 * waits[1]:.0f} % of the looks at it"
        return text + (f"; {disk}" if is_disk else ""), "more loader workers, or a faster place for the data"
    if is_disk:
        return f"slower disk: {disk}", "who else uses it, or a local copy of the data"
    queued, queued_before = _mean(slow, "queued") or 0.0, _mean(usual, "queued") or 0.0
    if queued > queued_before + _QUEUED:
        text = f"its main process waits {queued:.1f} s a second for a CPU, {queued_before:.1f} before"
        return text, "other processes use the CPUs"
    return "the cause was not found (GPU clock, others on it, swap, data, disk and CPU are as before)", (
        "longer samples or a larger batch make slower steps too; `jackline why` shows where the time goes"
    )


def _mean(seen: Sequence[Around], name: str) -> float | None:
    return _mean_of([value for one in seen if (value := getattr(one, name)) is not None])


# `statistics` is not imported: it would take 0.8 MB for the whole life of a supervisor.
def _mean_of(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _median(values: Sequence[float]) -> float:
    ordered = sorted(values)
    return (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2
