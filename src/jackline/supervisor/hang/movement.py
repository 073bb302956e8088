"""What moved between samples, and since when nothing has moved. Pure bookkeeping over samples.

Owns the measured limits of "moves" and two times: `progress_at_s` (when anything last moved) and `moved_at_s` (when a
main thread last moved; a busy background thread does not count). Does not own verdicts or wording (`verdict`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from jackline.diagnosis.frames import ProcessStack, innermost_user_frame
from jackline.machine.readings import GpuReading, ProcessReading, TreeReading
from jackline.supervisor.stacks.take import main_hash

LATE_S = 5.0  # if the supervisor is this late, the whole machine was suspended
CPU_CORES = 0.02  # times the square root of the number of processes, because their noise adds up
STARVED_WANTS_CORES = 0.5
STARVED_CPU_CORES = 0.005
DISK_BYTES_PER_S = 1000.0
TCP_BYTES_PER_S = 64.0
BURST_S = 0.002  # least CPU of real work in a main thread; waking up to check a flag costs 0.02 to 0.2 ms
BURST_WHEN_SIGNALLED_S = 0.010  # our own signal makes it write its stacks, which costs 1 to 3 ms
DUMP_BYTES = 128_000  # up to this much may be a stack dump that our signal caused, not its own work
GPU_MEMORY_PERCENT = 1
GPU_POWER_FACTOR = 1.2  # relative to the lowest power seen
# A GPU without a CUDA context draws less power than one with an idle context (an H200: 80 and 125 of 700 W). So by
# the lowest power seen alone, a spinning kernel would count as work.
GPU_POWER_SHARE = 0.25
_MOST_INTERVALS = 256
_MOST_DELTAS = 15
# A tracer that only looks (py-spy for native stacks) holds a process for milliseconds; a debugger holds it longer.
TRACED_S = 2.5
HELPER_COMMS = ("wandb-core", "wandb-service", "gpu_stats", "nvidia-smi", "tensorboard", "py-spy")


@dataclass(frozen=True)
class Sample:
    """All readings at one time. `stacks` is set only if stacks were taken then; `late_s` is how late the supervisor
    took it (large after a suspend); `marks` counts signs of progress: bars, protocol lines, checkpoints."""

    at_s: float
    late_s: float
    tree: TreeReading
    gpus: tuple[GpuReading, ...] = ()
    output_bytes: int = 0
    marks: int = 0
    stacks: tuple[ProcessStack, ...] | None = None


@dataclass(frozen=True)
class ProcessView:
    """The position of the main thread of one process in its code, and since when it has been there."""

    reading: ProcessReading
    moved_at_s: float
    hash_since_s: float
    stack: ProcessStack | None = None
    hash: str = ""
    hash_seen_s: float = 0.0  # when the same stack was seen last
    keyboard_since_s: float | None = None
    paused_since_s: float | None = None  # stopped by a signal or held by a tracer
    # When it was last seen asleep or waiting for the disk: a loop of sleeps is awake in some samples.
    slept_at_s: float = -math.inf
    disk_at_s: float = -math.inf
    main_deltas_s: tuple[float, ...] = ()  # CPU of the main thread in the last intervals
    main_cores: float = 0.0
    woke_s: float = 0.0  # CPU time of the main thread since it last moved; 0 means it did not even wake up
    is_signalled: bool = False


@dataclass(frozen=True)
class Totals:
    """What the whole tree did in an interval. `wants_s` is CPU time plus the time spent waiting for a CPU."""

    cpu_s: float = 0.0
    wants_s: float = 0.0
    disk_bytes: float = 0.0
    tcp_bytes: float = 0.0

    def plus(self, other: Totals) -> Totals:
        return Totals(
            self.cpu_s + other.cpu_s,
            self.wants_s + other.wants_s,
            self.disk_bytes + other.disk_bytes,
            self.tcp_bytes + other.tcp_bytes,
        )

    def per_s(self, span_s: float) -> Totals:
        span_s = max(span_s, 1e-3)
        return Totals(self.cpu_s / span_s, self.wants_s / span_s, self.disk_bytes / span_s, self.tcp_bytes / span_s)

    @property
    def is_starved(self) -> bool:
        """For rates: it works as much as a fully loaded machine allows. Waiting for a CPU alone is no evidence: on
        such a machine a thread that only wakes up to check a flag waits for as long as others compute."""
        return self.wants_s >= STARVED_WANTS_CORES and self.cpu_s >= STARVED_CPU_CORES


@dataclass(frozen=True)
class Movement:
    """The state that `note` carries from sample to sample."""

    sample: Sample
    progress_at_s: float
    moved_at_s: float
    output_at_s: float
    views: Mapping[int, ProcessView] = field(default_factory=dict)
    window: tuple[tuple[float, float, Totals], ...] = ()  # (end time, duration, totals) in the last seconds
    rates: Totals = Totals()
    background: Totals = Totals()
    output_intervals_s: tuple[float, ...] = ()
    progress_intervals_s: tuple[float, ...] = ()
    idle_power_w: Mapping[int, float] = field(default_factory=dict)
    spin_since_s: float | None = None
    has_stacks: bool = False


def note(before: Movement | None, sample: Sample, *, window_s: float = 8.0) -> Movement:
    """The next state. Costs a few microseconds per process."""
    if before is None:
        return _begin(sample)
    if sample.late_s > LATE_S:
        # The machine was suspended or the supervisor got no CPU. Nothing is known about that time, so it does not
        # count as time without progress.
        fresh = _begin(sample)
        views = {pid: _remember(view, before.views.get(pid)) for pid, view in fresh.views.items()}
        return replace(
            fresh,
            views=views,
            output_intervals_s=before.output_intervals_s,
            progress_intervals_s=before.progress_intervals_s,
            idle_power_w=before.idle_power_w,
            has_stacks=before.has_stacks,
        )
    return _advance(before, sample, window_s)


def _begin(sample: Sample) -> Movement:
    at_s = sample.at_s
    views = {process.pid: _new_stand(process, at_s) for process in sample.tree.processes}
    state = Movement(sample, at_s, at_s, at_s, views, idle_power_w=_lowest_power({}, sample.gpus))
    return replace(state, views=_with_stacks(views, sample), has_stacks=bool(sample.stacks))


def _remember(view: ProcessView, old: ProcessView | None) -> ProcessView:
    if old is None or view.hash:
        return view
    return replace(view, stack=old.stack, hash=old.hash, is_signalled=old.is_signalled)


def _advance(before: Movement, sample: Sample, window_s: float) -> Movement:
    at_s = sample.at_s
    span_s = max(1e-3, at_s - before.sample.at_s)
    signalled = {pid for pid, view in before.views.items() if view.is_signalled}
    did = _between(before.sample.tree, sample.tree, signalled)
    window = tuple(part for part in before.window if part[0] > at_s - window_s) + ((at_s, span_s, did),)
    rates = _sum(part[2] for part in window).per_s(sum(part[1] for part in window))
    views = _with_stacks(_step_views(before, sample, span_s), sample)
    idle_power_w = _lowest_power(before.idle_power_w, sample.gpus)

    has_output = sample.output_bytes > before.sample.output_bytes
    has_mark = sample.marks > before.sample.marks
    has_new_process = _live_pids(before.sample.tree) != _live_pids(sample.tree)
    has_moved = any(s.moved_at_s >= at_s and s.reading.comm not in HELPER_COMMS for s in views.values())
    is_main_moving = has_mark or has_new_process or has_moved
    # Output is no evidence when every main thread is known to have been asleep: a logger thread wrote it.
    is_main_moving = is_main_moving or (has_output and not all(_is_idle(view) for view in views.values()))

    def quiet_s(since_s: float) -> float:
        return max(0.0, at_s - since_s - span_s)  # minus our sampling period, which is the resolution

    is_moving = is_main_moving or has_output or _is_busy(rates, views) or gpu_works(sample, idle_power_w)
    was_paused = any(is_paused(view, at_s) for view in before.views.values())
    return Movement(
        sample=sample,
        progress_at_s=at_s if is_moving else before.progress_at_s,
        moved_at_s=at_s if is_main_moving else before.moved_at_s,
        output_at_s=at_s if has_output or has_mark else before.output_at_s,
        views=views,
        window=window,
        rates=rates,
        background=Totals() if is_main_moving else before.background.plus(did),
        output_intervals_s=_grown(
            before.output_intervals_s, (has_output or has_mark) and not was_paused, quiet_s(before.output_at_s)
        ),
        progress_intervals_s=_grown(
            before.progress_intervals_s, is_moving and not was_paused, quiet_s(before.progress_at_s)
        ),
        idle_power_w=idle_power_w,
        spin_since_s=_spin_since(before, sample, idle_power_w),
        has_stacks=bool(sample.stacks) or (before.has_stacks and not is_main_moving),
    )


def _between(before: TreeReading, after: TreeReading, signalled: set[int]) -> Totals:
    """What the tree did between two readings. A new process counts in full; a counter that fell counts as zero."""
    old = {(process.pid, process.start_ticks): process for process in before.processes}
    cpu_s = wants_s = disk_bytes = 0.0
    for process in after.processes:
        if process.comm in HELPER_COMMS:
            continue
        former = old.get((process.pid, process.start_ticks))
        cpu_s += max(0.0, process.cpu_s - (former.cpu_s if former else 0.0))
        wants_s += max(0.0, process.wants_cpu_s - (former.wants_cpu_s if former else 0.0))
        disk_bytes += max(0, process.read_bytes - (former.read_bytes if former else 0))
        written = max(0, process.write_bytes - (former.write_bytes if former else 0))
        disk_bytes += written if process.pid not in signalled or written > DUMP_BYTES else 0
    is_known = before.tcp_bytes is not None and after.tcp_bytes is not None
    tcp_bytes = max(0, (after.tcp_bytes or 0) - (before.tcp_bytes or 0)) if is_known else 0
    return Totals(cpu_s, wants_s, disk_bytes, tcp_bytes)


def _sum(parts: Iterable[Totals]) -> Totals:
    total = Totals()
    for part in parts:
        total = total.plus(part)
    return total


def _is_busy(rates: Totals, views: Mapping[int, ProcessView]) -> bool:
    return (
        rates.cpu_s >= CPU_CORES * math.sqrt(max(1, len(views)))
        or rates.is_starved
        or rates.disk_bytes >= DISK_BYTES_PER_S
        or rates.tcp_bytes >= TCP_BYTES_PER_S
    )


def _step_views(before: Movement, sample: Sample, span_s: float) -> dict[int, ProcessView]:
    views = {}
    for process in sample.tree.processes:
        old = before.views.get(process.pid)
        if old is None or old.reading.start_ticks != process.start_ticks:
            views[process.pid] = _new_stand(process, sample.at_s)
        else:
            views[process.pid] = _step(old, process, sample.at_s, span_s)
    return views


def _new_stand(process: ProcessReading, at_s: float) -> ProcessView:
    return ProcessView(process, at_s, at_s, paused_since_s=at_s if process.state in "Tt" else None)


def is_paused(view: ProcessView, at_s: float) -> bool:
    """Whether a signal stopped it (T), or a debugger has held it for a while (t)."""
    since_s = view.paused_since_s
    return since_s is not None and (view.reading.state == "T" or at_s - since_s >= TRACED_S)


def _step(old: ProcessView, process: ProcessReading, at_s: float, span_s: float) -> ProcessView:
    spent_s = _main_cpu_s(old.reading, process)
    usual_s = _median(old.main_deltas_s)
    burst_s = BURST_WHEN_SIGNALLED_S if old.is_signalled else BURST_S
    is_working = spent_s is not None and (spent_s >= usual_s + burst_s or spent_s / span_s >= CPU_CORES)
    is_held = process.state in "Tt"
    # The time of a pause says nothing about the program, so its end counts as movement.
    is_continued = not is_held and is_paused(old, at_s)
    has_moved = process.comm not in HELPER_COMMS and (is_working or is_continued or _main_wrote(old, process))
    is_typing = process.wait.kind == "keyboard" or (process.wait.fd == 0 and _asks(old.stack))
    return replace(
        old,
        reading=process,
        moved_at_s=at_s if has_moved else old.moved_at_s,
        keyboard_since_s=(at_s if old.keyboard_since_s is None else old.keyboard_since_s) if is_typing else None,
        paused_since_s=(at_s if old.paused_since_s is None else old.paused_since_s) if is_held else None,
        slept_at_s=at_s if process.wait.kind == "sleep" else old.slept_at_s,
        disk_at_s=at_s if process.wait.kind == "disk" else old.disk_at_s,
        main_deltas_s=(*old.main_deltas_s[-_MOST_DELTAS + 1 :], spent_s or 0.0),
        main_cores=(spent_s or 0.0) / span_s,
        woke_s=0.0 if has_moved else old.woke_s + (spent_s or 0.0),
    )


def _median(values: tuple[float, ...]) -> float:
    """The median, the upper one of two middle values. `statistics` is not used: it costs 30 ms to import."""
    return sorted(values)[len(values) // 2] if values else 0.0


def _asks(stack: ProcessStack | None) -> bool:
    """The user's line asks for input. Then stdin counts as a keyboard, whatever it is connected to."""
    frame = innermost_user_frame(stack.main) if stack else None
    return frame is not None and re.search(r"\b(input|getpass|breakpoint|set_trace)\(", frame.source) is not None


def _main_cpu_s(before: ProcessReading, after: ProcessReading) -> float | None:
    """CPU time of the main thread, or of the process if that has only one thread; None when unknown."""
    if before.main_cpu_s is not None and after.main_cpu_s is not None:
        return max(0.0, after.main_cpu_s - before.main_cpu_s)
    return max(0.0, after.cpu_s - before.cpu_s) if after.num_threads == 1 else None


def _main_wrote(old: ProcessView, process: ProcessReading) -> bool:
    if old.is_signalled or old.reading.main_wchar_bytes is None or process.main_wchar_bytes is None:
        return False
    return process.main_wchar_bytes > old.reading.main_wchar_bytes


def _is_idle(view: ProcessView) -> bool:
    """Whether its main thread is known to have written nothing and computed nothing in the last interval."""
    is_known = view.reading.main_wchar_bytes is not None and not view.is_signalled
    return is_known and view.main_cores < CPU_CORES


def _with_stacks(views: Mapping[int, ProcessView], sample: Sample) -> dict[int, ProcessView]:
    updated = dict(views)
    for stack in sample.stacks or ():
        view = updated.get(stack.pid)
        if view is None:
            continue
        new = main_hash(stack)
        is_comparable = bool(new and view.hash) and view.stack is not None and view.stack.method == stack.method
        is_elsewhere = is_comparable and new != view.hash
        updated[stack.pid] = replace(
            view,
            stack=stack if new or not view.hash else view.stack,
            hash=new or view.hash,
            hash_since_s=sample.at_s if is_elsewhere or not view.hash else view.hash_since_s,
            hash_seen_s=sample.at_s if new else view.hash_seen_s,
            moved_at_s=sample.at_s if is_elsewhere else view.moved_at_s,
            is_signalled=view.is_signalled or stack.method == "faulthandler",
        )
    return updated


def _live_pids(tree: TreeReading) -> set[tuple[int, int]]:
    return {
        (process.pid, process.start_ticks)
        for process in tree.processes
        if process.state not in ("Z", "X") and process.comm not in HELPER_COMMS
    }


def _grown(intervals_s: tuple[float, ...], is_event: bool, interval_s: float) -> tuple[float, ...]:
    return (*intervals_s[-_MOST_INTERVALS + 1 :], interval_s) if is_event else intervals_s


def _lowest_power(known: Mapping[int, float], gpus: tuple[GpuReading, ...]) -> dict[int, float]:
    lowest = dict(known)
    for gpu in gpus:
        if gpu.power_w is not None:
            lowest[gpu.index] = min(gpu.power_w, lowest.get(gpu.index, gpu.power_w))
    return lowest


def gpu_works(sample: Sample, idle_power_w: Mapping[int, float]) -> bool:
    """Whether a GPU of ours really works. Utilisation is no evidence: a hung kernel shows 100 %."""
    return any(is_ours(gpu, sample.tree) and _gpu_works(gpu, idle_power_w) for gpu in sample.gpus)


def _gpu_works(gpu: GpuReading, idle_power_w: Mapping[int, float]) -> bool:
    cold_w = max(
        GPU_POWER_FACTOR * idle_power_w.get(gpu.index, math.inf), GPU_POWER_SHARE * (gpu.power_limit_w or 0.0)
    )
    is_hot = gpu.power_w is not None and gpu.power_w > cold_w
    return is_hot or (gpu.memory_utilisation_percent or 0) >= GPU_MEMORY_PERCENT


def is_ours(gpu: GpuReading, tree: TreeReading) -> bool:
    """Whether a process of the tree uses it. Many containers hide which process does; then it counts as ours."""
    pids = {process.pid for process in tree.processes}
    return not gpu.processes or any(process.pid in pids for process in gpu.processes)


def _spin_since(before: Movement, sample: Sample, idle_power_w: Mapping[int, float]) -> float | None:
    """Since when a GPU of ours has shown full utilisation without using its memory or drawing power."""
    for gpu in sample.gpus:
        is_full = (gpu.utilisation_percent or 0) >= 90 and gpu.memory_utilisation_percent == 0
        if is_full and gpu.power_w is not None and is_ours(gpu, sample.tree) and not _gpu_works(gpu, idle_power_w):
            return sample.at_s if before.spin_since_s is None else before.spin_since_s
    return None
