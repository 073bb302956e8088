"""A run that became slower than it was, and why: against its own earlier rhythm, for any script that counts steps.

The rhythm is the time a step takes, read from the progress that the output tells, by medians: a validation or a save
in between is one outlier. When it slows down, what else is known is compared with how it was when the rhythm was
usual: the GPU's clock and what the driver says about it, other processes on the GPU, swap, what the main thread waits
for, the disk, and what keeps it from a CPU (a limit, a hypervisor, other processes). Where none of them has changed,
the line at which it now stands more often. Owns what "slower" means and the order in which causes are believed. Does
not own the readings (around). Recipes have a sentinel of their own (trainer/sentinels/speed).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sequence

from jackline.diagnosis.frames import ProcessStack, innermost_user_frame
from jackline.immutable import immutable
from jackline.machine.proc import read_command
from jackline.machine.readings import GpuReading, ProcessReading
from jackline.supervisor.attempt.around import Around, Surroundings, busiest, read_cpu_times
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
STACKS_EVERY_S = 2.0  # only while it slows down: four looks in 20 s met by chance the same short sleep three times
AROUND_EVERY_S = 4.0
_KEPT = 90
_CLOCK = 0.85
_WAITS_MORE = 0.3
_PRESSURE = 0.15
_QUEUED = 0.2
_HELD = 0.1
_STOLEN = 0.1
_LEAST_LOOKS, _LEAST_USUAL_LOOKS = 6, 3  # in usual times a look every 30 s must do
_GOLDEN = 0.618034
_SWAPPED_BYTES = 64 << 20
_LOADING = ("/torch/utils/data/", "/multiprocessing/queues.py", "/multiprocessing/connection.py")


@immutable
class Look:
    """Where the main thread was at one moment."""

    at_s: float
    waits: bool  # for data
    place: str = ""  # 'train.py:42 `x = load(i)`'


@immutable
class Seen:
    """All that was noted about one time of the run."""

    around: Sequence[Around] = ()
    looks: Sequence[Look] = ()

    def mean(self, name: str) -> float | None:
        return _mean_of([value for one in self.around if (value := getattr(one, name)) is not None])

    def more_than(self, before: Seen, name: str, by: float) -> tuple[float, float] | None:
        """(now, before) where its mean is higher by that much."""
        now, was = self.mean(name) or 0.0, before.mean(name) or 0.0
        return (now, was) if now > was + by else None

    @property
    def waits(self) -> float | None:
        return _mean_of([float(one.waits) for one in self.looks])


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
        self._surroundings = Surroundings()
        self._around: deque[tuple[float, Around]] = deque(maxlen=_KEPT)
        self._looks: deque[Look] = deque(maxlen=_KEPT)
        self._others: tuple[float, dict[int, float]] | None = None  # since when, their CPU seconds
        self._pids: frozenset[int] = frozenset()
        self._seen_s = 0.0
        self._told_s = float("-inf")
        self._stacks_s = self._read_s = float("-inf")
        self._num_wanted = 0

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
            self._around.append((now_s, self._surroundings.read(now_s, gpus, processes)))
        self._pids = frozenset(process.pid for process in processes)
        if self.rhythm.is_slowing and self._others is None:
            self._others = (now_s, read_cpu_times(self._pids))
        elif not self.rhythm.is_slowing:
            self._others = None
        if times is not None:
            self._tell(now_s)
        wants = self.rhythm.is_slowing and now_s - self._stacks_s >= STACKS_EVERY_S
        self._stacks_s = now_s if wants else self._stacks_s
        self._num_wanted += wants
        return wants

    @property
    def delay_s(self) -> float:
        """How long the look that is wanted should wait. Steps of 0.4 s and looks every 2 s would meet the same line
        each time; by parts of the golden ratio they are spread evenly over a step."""
        return self._num_wanted * _GOLDEN % 1.0 * min(1.0, self.rhythm.now_s)

    def note_stack(self, stack: ProcessStack | None) -> None:
        """Where the main process was, also in usual times."""
        thread = stack.main if stack is not None else None
        if thread is not None and thread.frames:
            waits = any(part in frame.file for frame in thread.frames[:12] for part in _LOADING)
            frame = innermost_user_frame(thread)
            place = f"{frame.file}:{frame.line} `{frame.source}`" if frame is not None and frame.is_user else ""
            self._looks.append(Look(self._seen_s, waits, place))

    def _tell(self, now_s: float) -> None:
        rhythm = self.rhythm
        usual = self._between(float("-inf"), rhythm.doubtful_s)
        slow = self._between(rhythm.slow_since_s, float("inf"))
        cause, hint = find_cause(usual, slow, self._busiest(now_s))
        text = (
            f"slower than before: a step takes {format_duration(rhythm.now_s)}, it was "
            f"{format_duration(rhythm.usual_s)}: {cause}"
        )
        if now_s - self._told_s >= AGAIN_AFTER_S:
            self._told_s = now_s
            self._events.emit("slow", f"{text}\n  {hint}", step_s=rhythm.now_s, usual_step_s=rhythm.usual_s)
        rhythm.accept()
        self._around.clear()
        self._looks.clear()

    def _between(self, first_s: float, end_s: float) -> Seen:
        return Seen(
            [around for at_s, around in self._around if first_s <= at_s < end_s],
            [look for look in self._looks if first_s <= look.at_s < end_s],
        )

    def _busiest(self, now_s: float) -> str:
        if self._others is None:
            return ""
        since_s, before = self._others
        return busiest(before, read_cpu_times(self._pids), now_s - since_s)


def find_cause(usual: Seen, slow: Seen, others: str = "") -> tuple[str, str]:
    """(cause, hint). `others`: who else used the CPUs while it was slow."""
    now = slow.around[-1] if slow.around else Around()
    clock, clock_before = slow.mean("clock_share"), usual.mean("clock_share")
    is_lower = clock is not None and clock_before is not None and clock < _CLOCK * clock_before
    new_reason = now.slowdown and not any(one.slowdown == now.slowdown for one in usual.around)
    if is_lower or new_reason:
        share = f" (clock at {100 * clock:.0f} % of its highest)" if clock is not None else ""
        return f"the GPU slowed itself down: {now.slowdown or 'lower clock'}{share}", "cooling, or the power limit"
    before = {pid for one in usual.around for pid in one.gpu_others}
    on_gpu = [pid for pid in now.gpu_others if pid not in before and read_command(pid)]
    if on_gpu:
        named = ", ".join(f"pid {pid} ({read_command(pid)[:40]})" for pid in on_gpu[:3])
        return f"others work on the same GPU since then: {named}", "`jackline doctor` names them"
    swapped, swapped_before = now.swapped_bytes or 0, usual.around[-1].swapped_bytes or 0 if usual.around else 0
    if swapped > swapped_before + _SWAPPED_BYTES:
        return f"{format_bytes(swapped - swapped_before)} of it were swapped to disk since then", "free host memory"
    return _waiting_cause(usual, slow, others)


def _waiting_cause(usual: Seen, slow: Seen, others: str) -> tuple[str, str]:
    """What it waits for: the first of these, and the others beside it, because each may be why another one waits."""
    found = [*_data_cause(usual, slow), *_cpu_causes(usual, slow, others), *_disk_cause(usual, slow)]
    if found:
        return "; ".join(text for text, _ in found), found[0][1]
    if place := _new_place(usual, slow):
        return place, "what it does there takes longer than before; nothing around it has changed"
    return "the cause was not found (GPU clock, others on it, swap, data, disk and CPU are as before)", (
        "longer samples or a larger batch make slower steps too; `jackline why` shows where the time goes"
    )


def _data_cause(usual: Seen, slow: Seen) -> Iterator[tuple[str, str]]:
    waits, before = slow.waits, usual.waits
    if waits is not None and len(slow.looks) >= _LEAST_LOOKS and waits >= max(0.5, (before or 0.0) + _WAITS_MORE):
        text = f"it waits for data in {100 * waits:.0f} % of the looks at it"
        yield text, "more loader workers, or a faster place for the data"


def _cpu_causes(usual: Seen, slow: Seen, others: str) -> Iterator[tuple[str, str]]:
    if shares := slow.more_than(usual, "throttled", _HELD):
        now, before = shares
        text = f"the CPU limit of its cgroup holds it {now:.1f} s a second, {before:.1f} before"
        yield text, "fewer threads and workers, or a higher CPU limit of the container or job"
    if shares := slow.more_than(usual, "stolen", _STOLEN):
        now, before = shares
        text = (
            f"the hypervisor gives {100 * now:.0f} % of the CPU time to other machines, {100 * before:.0f} % before"
        )
        yield text, "another machine, or one with CPUs of its own"
    if shares := slow.more_than(usual, "queued", _QUEUED):
        now, before = shares
        text = f"its main process waits {now:.1f} s a second for a CPU, {before:.1f} before"
        yield text + (f"; most of it is used by {others}" if others else ""), "other processes use the CPUs"


def _disk_cause(usual: Seen, slow: Seen) -> Iterator[tuple[str, str]]:
    """Its own waits are proof; the pressure is that of the whole machine, and may be another program's alone."""
    own = slow.more_than(usual, "on_disk", _WAITS_MORE)
    pressure = slow.more_than(usual, "io_pressure", _PRESSURE)
    if own is None and pressure is None:
        return
    words = [f"it waits for a disk in {100 * own[0]:.0f} % of the looks, {100 * own[1]:.0f} % before"] if own else []
    if pressure:
        words.append(
            f"something waits for a disk {100 * pressure[0]:.0f} % of the time, {100 * pressure[1]:.0f} % before"
        )
    yield f"slower disk: {', and '.join(words)}", "who else uses it, or a local copy of the data"


def _new_place(usual: Seen, slow: Seen) -> str:
    """The line of the script at which it stands much more often than before; '' without one."""
    before, now = (Counter(one.place for one in seen.looks if one.place) for seen in (usual, slow))
    if sum(before.values()) < _LEAST_USUAL_LOOKS or sum(now.values()) < _LEAST_LOOKS:
        return ""
    place, count = now.most_common(1)[0]
    share, former = count / sum(now.values()), before[place] / sum(before.values())
    if share < max(0.5, former + _WAITS_MORE):
        return ""
    return f"it is at {place} in {100 * share:.0f} % of the looks at it, {100 * former:.0f} % before"


# `statistics` is not imported: it would take 0.8 MB for the whole life of a supervisor.
def _mean_of(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _median(values: Sequence[float]) -> float:
    ordered = sorted(values)
    return (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2
