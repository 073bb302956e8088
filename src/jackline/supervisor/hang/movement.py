"""What moved between samples, and since when nothing has moved. Pure bookkeeping over samples.

Owns two times: `progress_at_s` (when anything last moved) and `moved_at_s` (when a main thread last moved; a busy
background thread does not count). `totals` adds up what the tree did, `views` follows single processes. Also owns
when a GPU counts as working. Does not own verdicts or wording (`verdict`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import field, replace

from jackline.immutable import immutable
from jackline.machine.readings import GpuReading, TreeReading, ranks_among, traffic_between
from jackline.supervisor.hang.deadlock import Deadlock
from jackline.supervisor.hang.sample import Sample
from jackline.supervisor.hang.totals import HELPER_COMMS, NOTHING, Totals, busy_signs, sum_totals, totals_between
from jackline.supervisor.hang.views import (
    ProcessView,
    is_idle,
    is_paused,
    leader_of,
    new_view,
    ours_among,
    remembered,
    step_views,
    with_stacks,
)
from jackline.supervisor.stacks.flight import Flight
from jackline.supervisor.stacks.take import is_housekeeping

GPU_MEMORY_PERCENT = 1
GPU_POWER_FACTOR = 1.2  # relative to the lowest power seen
# A GPU without a CUDA context draws less power than one with an idle context (an H200: 80 and 125 of 700 W). So by
# the lowest power seen alone, a spinning kernel would count as work.
GPU_POWER_SHARE = 0.25


def lowest_power(known: Mapping[int, float], gpus: tuple[GpuReading, ...]) -> dict[int, float]:
    lowest = dict(known)
    for gpu in gpus:
        if gpu.power_w is not None:
            lowest[gpu.index] = min(gpu.power_w, lowest.get(gpu.index, gpu.power_w))
    return lowest


def gpu_works(gpus: tuple[GpuReading, ...], tree: TreeReading, idle_power_w: Mapping[int, float]) -> bool:
    """Whether a GPU of ours really works. Utilisation is no evidence: a hung kernel shows 100 %."""
    return any(is_ours(gpu, tree) and _gpu_works(gpu, idle_power_w) for gpu in gpus)


def _gpu_works(gpu: GpuReading, idle_power_w: Mapping[int, float]) -> bool:
    cold_w = max(
        GPU_POWER_FACTOR * idle_power_w.get(gpu.index, math.inf), GPU_POWER_SHARE * (gpu.power_limit_w or 0.0)
    )
    is_hot = gpu.power_w is not None and gpu.power_w > cold_w
    return is_hot or (gpu.memory_utilisation_percent or 0) >= GPU_MEMORY_PERCENT


def is_ours(gpu: GpuReading, tree: TreeReading) -> bool:
    """Whether a process of the tree uses it. Many containers hide which process does; then it counts as ours."""
    if gpu.is_ours is not None:
        return gpu.is_ours
    pids = {process.pid for process in tree.processes}
    return not gpu.processes or any(process.pid in pids for process in gpu.processes)


def is_spinning(gpus: tuple[GpuReading, ...], tree: TreeReading, idle_power_w: Mapping[int, float]) -> bool:
    """Whether a GPU of ours shows full utilisation without using its memory or drawing power."""
    for gpu in gpus:
        is_full = (gpu.utilisation_percent or 0) >= 90 and gpu.memory_utilisation_percent == 0
        if is_full and gpu.power_w is not None and is_ours(gpu, tree) and not _gpu_works(gpu, idle_power_w):
            return True
    return False


DATA_BYTES = 100  # a keep-alive of HTTP/2 and its answer are 34 bytes, 78 under TLS
LATE_S = 5.0  # if the supervisor is this late, the whole machine was suspended
_MOST_INTERVALS = 256
_MOST_ENDED = 16
_MOST_SIGNS = 6


@immutable
class Movement:
    """The state that `note` carries from sample to sample."""

    sample: Sample
    progress_at_s: float
    moved_at_s: float
    output_at_s: float
    views: Mapping[int, ProcessView] = field(default_factory=dict)
    window: tuple[tuple[float, float, Totals], ...] = ()  # (end time, duration, totals) in the last seconds
    rates: Totals = NOTHING
    background: Totals = NOTHING
    output_intervals_s: tuple[float, ...] = ()
    progress_intervals_s: tuple[float, ...] = ()
    idle_power_w: Mapping[int, float] = field(default_factory=dict)
    spin_since_s: float | None = None
    has_stacks: bool = False
    signs: tuple[tuple[float, str], ...] = ()  # the newest signs of movement, the newest first
    ended: tuple[tuple[int, int, float], ...] = ()  # (pid, its parent, when) of processes that have ended lately
    deadlock: Deadlock | None = None  # proved, and none of its threads has run since
    proved_at_s: float = 0.0
    ranks: frozenset[int] = frozenset()  # of a distributed job: all that have been seen, also those that have ended
    flight: Flight | None = None  # the newest answers of their flight recorders
    mark_at_s: float = -math.inf  # when a step, a bar or a checkpoint was last counted
    data_at_s: float = -math.inf  # when sockets last moved more than a keep-alive

    @property
    def is_gpu_working(self) -> bool:
        return gpu_works(self.sample.gpus, self.sample.tree, self.idle_power_w)


def note(before: Movement | None, sample: Sample, *, window_s: float = 8.0) -> Movement:
    """The next state. Costs a few microseconds per process."""
    if before is None:
        return _begin(sample)
    if sample.late_s > LATE_S:
        # The machine was suspended or the supervisor got no CPU. Nothing is known about that time, so it does not
        # count as time without progress.
        fresh = _begin(sample)
        views = {pid: remembered(view, before.views.get(pid)) for pid, view in fresh.views.items()}
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
    views = {process.pid: new_view(process, at_s) for process in sample.tree.processes}
    ranks = frozenset(ranks_among(sample.tree.processes))
    state = Movement(sample, at_s, at_s, at_s, views, idle_power_w=lowest_power({}, sample.gpus), ranks=ranks)
    return replace(state, views=with_stacks(views, sample), has_stacks=bool(sample.stacks))


def _advance(before: Movement, sample: Sample, window_s: float) -> Movement:
    at_s = sample.at_s
    span_s = max(1e-3, at_s - before.sample.at_s)
    signalled = {pid for pid, view in before.views.items() if view.is_signalled}
    ours = ours_among(before.views, sample)
    left_out = ours | sample.rescued
    did = totals_between(
        before.sample.tree, sample.tree, signalled=signalled, disturbed=sample.disturbed, left_out=left_out
    )
    window = tuple(part for part in before.window if part[0] > at_s - window_s) + ((at_s, span_s, did),)
    rates = sum_totals(part[2] for part in window).per_s(sum(part[1] for part in window))
    active = traffic_between(before.sample.tree, sample.tree).active
    views = step_views(before.views, sample, span_s, active)
    idle_power_w = lowest_power(before.idle_power_w, sample.gpus)

    has_output = sample.output_bytes > before.sample.output_bytes
    has_mark = sample.marks > before.sample.marks
    main_signs = _main_signs(before, sample, views)
    # A rate is one of the last seconds: it goes on after the last byte, and only what came now is movement.
    lately = replace(
        rates,
        cpu_s=rates.cpu_s if did.cpu_s else 0.0,
        disk_bytes=rates.disk_bytes if did.disk_bytes else 0.0,
        socket_events=rates.socket_events if did.socket_events else 0.0,
    )
    other_signs = _other_signs(sample, views, lately, idle_power_w, has_output=has_output)
    is_main_moving, is_moving = bool(main_signs), bool(main_signs or other_signs)

    def quiet_s(since_s: float) -> float:
        return max(0.0, at_s - since_s - span_s)  # minus our sampling period, which is the resolution

    was_paused = any(is_paused(view, at_s) for view in before.views.values())
    return Movement(
        sample=sample,
        progress_at_s=at_s if is_moving else before.progress_at_s,
        moved_at_s=at_s if is_main_moving else before.moved_at_s,
        output_at_s=at_s if has_output or has_mark else before.output_at_s,
        views=views,
        window=window,
        rates=rates,
        background=NOTHING if is_main_moving else before.background.plus(did),
        output_intervals_s=_grown(
            before.output_intervals_s, (has_output or has_mark) and not was_paused, quiet_s(before.output_at_s)
        ),
        progress_intervals_s=_grown(
            before.progress_intervals_s, is_moving and not was_paused, quiet_s(before.progress_at_s)
        ),
        idle_power_w=idle_power_w,
        spin_since_s=_spin_since(before, sample, idle_power_w),
        has_stacks=bool(sample.stacks) or (before.has_stacks and not is_main_moving),
        signs=(*((at_s, sign) for sign in (*main_signs, *other_signs)), *before.signs)[:_MOST_SIGNS],
        ended=(*before.ended, *_ended(before.sample.tree, sample))[-_MOST_ENDED:],
        deadlock=sample.deadlock if sample.was_asked else _still_dead(before, views),
        proved_at_s=at_s if sample.was_asked and sample.deadlock else before.proved_at_s,
        ranks=before.ranks | frozenset(ranks_among(sample.tree.processes)),
        flight=sample.flight or before.flight,
        mark_at_s=at_s if has_mark else before.mark_at_s,
        data_at_s=at_s if did.tcp_bytes >= DATA_BYTES else before.data_at_s,
    )


def _main_signs(before: Movement, sample: Sample, views: Mapping[int, ProcessView]) -> list[str]:
    """What shows that a main thread has moved."""
    signs = [
        f"the main thread of process {pid} moved"
        for pid, view in views.items()
        if view.moved_at_s >= sample.at_s and not _is_aside(view, views)
    ]
    if sample.marks > before.sample.marks:
        signs.append("a sign of progress: a step, a bar or a checkpoint")
    ours = {pid for pid, view in (*before.views.items(), *views.items()) if view.is_ours}
    if _live_pids(before.sample.tree, ours) != _live_pids(sample.tree, ours):
        signs.append("a process started or ended")
    # Output is no evidence when every main thread is known to have been asleep: a logger thread wrote it.
    is_logger = all(is_idle(view) for view in views.values())
    if sample.output_bytes > before.sample.output_bytes and not is_logger:
        signs.append("output of a main thread")
    return signs[:_MOST_SIGNS]


def _is_aside(view: ProcessView, views: Mapping[int, ProcessView]) -> bool:
    """Whether what it does says nothing about the run: a helper, or a process that repeats a little work (a monitor
    does) beside a main thread that waits for a lock of the user's own."""
    if view.reading.comm in HELPER_COMMS or view.is_ours:
        return True
    if not view.is_repeating:
        return False
    leader = leader_of(views)
    main = leader.stack.main if leader.stack else None
    is_at_lock = main is not None and main.wait.startswith("lock") and bool(main.frames) and main.frames[0].is_user
    return view is not leader and is_at_lock


def _other_signs(
    sample: Sample,
    views: Mapping[int, ProcessView],
    rates: Totals,
    idle_power_w: Mapping[int, float],
    *,
    has_output: bool,
) -> list[str]:
    """What shows that anything else moves."""
    signs = busy_signs(rates, len(views))
    signs += ["output"] if has_output else []
    moved = [pid for pid, view in views.items() if view.others_moved_at_s >= sample.at_s]
    signs += [f"threads of process {pid} are at other lines" for pid in moved]
    changed = [pid for pid, view in views.items() if view.threads_at_s >= sample.at_s]
    signs += [f"a thread of process {pid} started or ended" for pid in changed]
    woken = [view for view in views.values() if view.woken_at_s >= sample.at_s and view.reading.wait.kind == "lock"]
    if woken and any(view is leader_of(views) for view in woken):
        signs.append("threads of the main process hand something on")
    little = [view for view in views.values() if _worked_at_s(view) >= sample.at_s]
    little = [view for view in little if view.reading.comm not in HELPER_COMMS and not view.is_ours]
    signs += [f"process {view.reading.pid} works a little" for view in little]
    return signs + (["the GPU works"] if gpu_works(sample.gpus, sample.tree, idle_power_w) else [])


def _worked_at_s(view: ProcessView) -> float:
    threads = view.stack.threads if view.stack else ()
    aside = {thread.thread_id for thread in threads if is_housekeeping(thread)}
    worked = [at_s for thread_id, at_s in view.worked_at_s.items() if thread_id not in aside]
    return max(view.moved_at_s, view.little_at_s, *worked)


def _still_dead(before: Movement, views: Mapping[int, ProcessView]) -> Deadlock | None:
    """The deadlock that was proved, unless one of its threads has run or is gone since then."""
    if before.deadlock is None:
        return None
    for pid, tid in before.deadlock.nodes:
        view = views.get(pid)
        if view is None or view.ran_at_s.get(tid, before.proved_at_s) > before.proved_at_s:
            return None
    return before.deadlock


def stands_since_s(state: Movement) -> float:
    """Since when no thread of the deadlock has run."""
    nodes = state.deadlock.nodes if state.deadlock else ()
    views = [(state.views[pid], tid) for pid, tid in nodes if pid in state.views]
    return max((view.ran_at_s.get(tid, view.moved_at_s) for view, tid in views), default=state.proved_at_s)


def _ended(before: TreeReading, sample: Sample) -> list[tuple[int, int, float]]:
    now = _live_pids(sample.tree)
    gone = [process for process in before.processes if (process.pid, process.start_ticks) not in now]
    return [(one.pid, one.ppid, sample.at_s) for one in gone if one.state not in ("Z", "X")]


def _spin_since(before: Movement, sample: Sample, idle_power_w: Mapping[int, float]) -> float | None:
    if not is_spinning(sample.gpus, sample.tree, idle_power_w):
        return None
    return sample.at_s if before.spin_since_s is None else before.spin_since_s


def _live_pids(tree: TreeReading, without: Collection[int] = ()) -> set[tuple[int, int]]:
    return {
        (process.pid, process.start_ticks)
        for process in tree.processes
        if process.state not in ("Z", "X") and process.comm not in HELPER_COMMS and process.pid not in without
    }


def _grown(intervals_s: tuple[float, ...], is_event: bool, interval_s: float) -> tuple[float, ...]:
    return (*intervals_s[-_MOST_INTERVALS + 1 :], interval_s) if is_event else intervals_s
