"""One process over time: where its main thread is, when it last moved, when each of its threads last ran. Pure.

Owns what counts as movement of one process. `movement` combines the processes of a tree.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import field, replace

from jackline.diagnosis.frames import Frame, ProcessStack, ThreadStack, innermost_user_frame
from jackline.diagnosis.waiting import looks_for_file_lock
from jackline.immutable import immutable
from jackline.machine.readings import ProcessReading, Wait
from jackline.supervisor.hang.sample import Sample
from jackline.supervisor.hang.totals import CPU_CORES, HELPER_COMMS
from jackline.supervisor.stacks.take import main_hash, others_hash, own_path

BURST_S = 0.002  # least CPU of real work in a main thread; waking up to check a flag costs 0.02 to 0.2 ms
# Work that repeats all the time is no burst. It is known by its CPU time for each sleep: a loop that only checks a
# flag uses 0.05 to 0.15 ms, a listing of files 0.35 ms (with a load of 13 on 2 cores). Between both limits it may be
# either: such a process is not stuck, but it may be suspect.
WORK_PER_SLEEP_S = 0.001
LITTLE_PER_SLEEP_S, LITTLE_CORES = 0.0003, 0.003
BURST_WHEN_SIGNALLED_S = 0.010  # our own signal makes it write its stacks, which costs 1 to 3 ms
# A library that tries a file lock 20 times a second uses 0.01 cores on a busy machine, in uneven parts.
BURST_BETWEEN_TRIES_S, CORES_BETWEEN_TRIES = 0.025, 0.05
_POLLS = ("poll", "local_socket", "network")
_MOST_DELTAS = 15
_RECENT_DELTAS, _RECENT_WORK_S = 5, 0.2
# A tracer that only looks (py-spy for native stacks) holds a process for milliseconds; a debugger holds it longer.
TRACED_S = 2.5
_SAME_END_S = 0.2  # the end of one sleep is read from clocks that differ by less


@immutable
class ProcessView:
    """The position of the main thread of one process in its code, and since when it has been there."""

    reading: ProcessReading
    moved_at_s: float
    hash_since_s: float
    stack: ProcessStack | None = None
    hash: str = ""
    hash_seen_s: float = 0.0  # when the same stack was seen last
    num_seen: int = 0  # in how many samples of stacks it was there
    path: str = ""  # the functions that its main thread is in, where the innermost is the user's own
    path_since_s: float = 0.0
    num_on_path: int = 0
    others_hash: str = ""
    others_moved_at_s: float = -math.inf  # when another thread was last seen at another line
    woken_at_s: float = -math.inf  # when a thread of the user's was last seen to have been given what it waits for
    little_at_s: float = -math.inf  # when the main thread last did more than check a flag, perhaps
    worked_at_s: Mapping[int, float] = field(
        default_factory=dict
    )  # thread -> when it last did more than check a flag
    is_repeating: bool = False  # its last movement was the work that it repeats all the time, and nothing else
    io_at_s: float = -math.inf  # when the main thread last read or wrote a byte
    keyboard_since_s: float | None = None
    paused_since_s: float | None = None  # stopped by a signal or held by a tracer
    # When it was last seen asleep or waiting for the disk: a loop of sleeps is awake in some samples.
    slept_at_s: float = -math.inf
    num_naps: int = 0  # how often it has worked right after a sleep
    polled_at_s: float = -math.inf  # waited for descriptors with a time limit, as an event loop with a timer does
    listened_at_s: float = -math.inf  # waited for somebody to connect
    disk_at_s: float = -math.inf
    main_deltas_s: tuple[float, ...] = ()  # CPU of the main thread in the last intervals
    main_cores: float = 0.0
    woke_s: float = 0.0  # CPU time of the main thread since it last moved; 0 means it did not even wake up
    is_signalled: bool = False
    ran_at_s: Mapping[int, float] = field(default_factory=dict)  # thread -> when it was last seen to have run
    threads_at_s: float = -math.inf  # when one of its threads last started or ended
    is_ours: bool = False  # started by a rescue that we asked for


def new_view(process: ProcessReading, at_s: float) -> ProcessView:
    paused_since_s = at_s if _is_held(process) else None
    ran_at_s = dict.fromkeys((tid for tid, _ in process.threads), at_s)
    view = ProcessView(process, at_s, at_s, paused_since_s=paused_since_s, ran_at_s=ran_at_s)
    return _with_waits(view, process, at_s)


def _with_waits(view: ProcessView, process: ProcessReading, at_s: float) -> ProcessView:
    """With the time at which it was last seen in each kind of wait: between two waits it is seen in none of them."""
    wait = process.wait
    return replace(
        view,
        slept_at_s=at_s if wait.kind == "sleep" else view.slept_at_s,
        polled_at_s=at_s if wait.kind in _POLLS and not wait.is_endless else view.polled_at_s,
        listened_at_s=at_s if wait.target.startswith("listening on") else view.listened_at_s,
        disk_at_s=at_s if wait.kind == "disk" else view.disk_at_s,
    )


def _is_held(process: ProcessReading) -> bool:
    return process.state in "Tt" or process.wait.kind == "stopped"


def is_paused(view: ProcessView, at_s: float) -> bool:
    """Whether a signal stopped it (T), its cgroup is frozen, or a debugger has held it for a while (t)."""
    since_s = view.paused_since_s
    return since_s is not None and (view.reading.state != "t" or at_s - since_s >= TRACED_S)


def step_views(
    before: Mapping[int, ProcessView], sample: Sample, span_s: float, active_sockets: frozenset[int]
) -> dict[int, ProcessView]:
    """The views after `sample`. `active_sockets` are the inodes of sockets that moved bytes since the last one."""
    views = {}
    for process in sample.tree.processes:
        old = before.get(process.pid)
        if old is None or old.reading.start_ticks != process.start_ticks:
            is_ours = process.pid in ours_among(before, sample)
            views[process.pid] = replace(new_view(process, sample.at_s), is_ours=is_ours)
        else:
            is_disturbed = process.pid in sample.disturbed or process.pid in sample.rescued
            is_rescued = process.pid in sample.rescued
            view = _step(old, process, sample.at_s, span_s, is_disturbed=is_disturbed, is_rescued=is_rescued)
            awaited = process.awaited_sockets & old.reading.awaited_sockets & active_sockets
            views[process.pid] = replace(view, moved_at_s=sample.at_s) if awaited else view
    return with_stacks(views, sample)


def ours_among(before: Mapping[int, ProcessView], sample: Sample) -> frozenset[int]:
    """The processes that a rescue has started: a writer, and one that tries what it would save."""
    ours = {pid for pid, view in before.items() if view.is_ours}
    for process in sample.tree.processes:
        old = before.get(process.pid)
        is_new = old is None or old.reading.start_ticks != process.start_ticks
        if is_new and (process.ppid in sample.rescued or process.ppid in ours):
            ours.add(process.pid)
        elif is_new:
            ours.discard(process.pid)  # its number was one of ours before
    return frozenset(ours)


def _step(
    old: ProcessView, process: ProcessReading, at_s: float, span_s: float, *, is_disturbed: bool, is_rescued: bool
) -> ProcessView:
    if is_disturbed and process.state == "t":  # held by our own stack reader
        process = replace(process, state=old.reading.state, wait=old.reading.wait)
    spent_s = 0.0 if is_disturbed else _main_cpu_s(old.reading, process)
    is_held = _is_held(process)
    # The time of a pause says nothing about the program, so its end counts as movement.
    is_continued = not is_held and is_paused(old, at_s)
    is_working = _is_working(old, spent_s, span_s) or _is_woken(old, process, spent_s)
    is_repeating = not is_disturbed and _is_repeating(old, process, spent_s)
    has_written = not is_disturbed and _main_wrote(old, process)
    has_news = is_working or is_continued or has_written
    has_moved = process.comm not in HELPER_COMMS and (has_news or is_repeating)
    is_little = not is_disturbed and _is_little(old, process, spent_s, span_s)
    is_typing = process.wait.kind == "keyboard" or (process.wait.fd == 0 and _asks(old.stack))
    return replace(
        _with_waits(old, process, at_s),
        reading=process,
        moved_at_s=at_s if has_moved else old.moved_at_s,
        is_repeating=is_repeating and not has_news if has_moved else old.is_repeating,
        little_at_s=at_s if is_little else old.little_at_s,
        io_at_s=at_s if has_written or _main_read(old, process) else old.io_at_s,
        keyboard_since_s=(at_s if old.keyboard_since_s is None else old.keyboard_since_s) if is_typing else None,
        paused_since_s=(at_s if old.paused_since_s is None else old.paused_since_s) if is_held else None,
        num_naps=old.num_naps + (has_moved and old.reading.wait.kind == "sleep"),
        main_deltas_s=(*old.main_deltas_s[-_MOST_DELTAS + 1 :], spent_s or 0.0),
        main_cores=(spent_s or 0.0) / span_s,
        woke_s=0.0 if has_moved else old.woke_s + (spent_s or 0.0),
        worked_at_s=old.worked_at_s if is_disturbed else _worked(old, process, at_s),
        ran_at_s=_ran(old, process, at_s, is_disturbed=is_disturbed),
        threads_at_s=at_s if not is_rescued and _are_others(old.reading, process) else old.threads_at_s,
    )


def _ran(old: ProcessView, process: ProcessReading, at_s: float, *, is_disturbed: bool) -> Mapping[int, float]:
    former = dict(old.reading.threads)
    ran = {}
    for tid, on_cpu_ns in process.threads:
        has_run = tid not in former or (on_cpu_ns != former[tid] and not is_disturbed)
        has_run = has_run or (tid == process.pid and _is_another_call(old.reading.wait, process.wait))
        ran[tid] = at_s if has_run else old.ran_at_s.get(tid, at_s)
    return ran


def _is_another_call(before: Wait, now: Wait) -> bool:
    """Whether a wait ends by itself at another time than the wait before. Our own look cannot cause it."""
    if before.until_s is None or now.until_s is None:
        return False
    return abs(now.until_s - before.until_s) > _SAME_END_S


def _are_others(before: ProcessReading, after: ProcessReading) -> bool:
    """Whether a thread has started or ended."""
    if before.num_threads != after.num_threads or len(before.threads) != len(after.threads):
        return before.num_threads != after.num_threads
    return {tid for tid, _ in before.threads} != {tid for tid, _ in after.threads}


def _is_working(old: ProcessView, spent_s: float | None, span_s: float) -> bool:
    burst_s, cores = BURST_WHEN_SIGNALLED_S if old.is_signalled else BURST_S, CPU_CORES
    if looks_for_file_lock(old.stack):
        burst_s, cores = BURST_BETWEEN_TRIES_S, CORES_BETWEEN_TRIES
    usual_s = _median(old.main_deltas_s)
    return spent_s is not None and (spent_s >= usual_s + burst_s or spent_s / span_s >= cores)


def _is_repeating(old: ProcessView, process: ProcessReading, spent_s: float | None) -> bool:
    """Whether its main thread does more, each time that it wakes up, than check a flag. On a busy machine a program
    that works for 5 ms and sleeps for 0.2 s uses less than the share of a core that counts as work."""
    return _spent_per_sleep_s(old, process, spent_s) >= WORK_PER_SLEEP_S


def _is_little(old: ProcessView, process: ProcessReading, spent_s: float | None, span_s: float) -> bool:
    is_often = spent_s is not None and spent_s / span_s >= LITTLE_CORES
    return is_often and _spent_per_sleep_s(old, process, spent_s) >= LITTLE_PER_SLEEP_S


def _spent_per_sleep_s(old: ProcessView, process: ProcessReading, spent_s: float | None) -> float:
    before, after = old.reading.main_sleeps, process.main_sleeps
    if spent_s is None or before is None or after is None or looks_for_file_lock(old.stack):
        return 0.0
    caused_s = BURST_WHEN_SIGNALLED_S if old.is_signalled else 0.0
    return (spent_s - caused_s) / max(1, after - before)


def _worked(old: ProcessView, process: ProcessReading, at_s: float) -> Mapping[int, float]:
    """When each of the other threads last worked. A thread that lost the CPU to others has more runs than sleeps, so
    its work may look smaller than it is, never larger."""
    if old.is_signalled or process.comm in HELPER_COMMS or len(process.threads) < 2:
        return {}
    before = zip(old.reading.threads, old.reading.thread_runs, strict=False)
    former = {tid: (on_cpu_ns, runs) for (tid, on_cpu_ns), runs in before}
    worked = {tid: old.worked_at_s[tid] for tid in former if tid in old.worked_at_s}
    for (tid, on_cpu_ns), runs in zip(process.threads, process.thread_runs, strict=False):
        if tid != process.pid and tid in former:
            spent_s = (on_cpu_ns - former[tid][0]) / 1e9
            if spent_s >= WORK_PER_SLEEP_S * max(1, runs - former[tid][1]):
                worked[tid] = at_s
    return worked


def _is_woken(old: ProcessView, process: ProcessReading, spent_s: float | None) -> bool:
    """Whether its main thread has run since it was in a call without a time limit: what it waited for came. A thread
    that wakes up by itself to check a flag uses calls with a limit."""
    has_counter = old.reading.main_cpu_s is not None and process.main_cpu_s is not None
    return old.reading.wait.is_endless and has_counter and bool(spent_s) and not old.is_signalled


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


def _main_read(old: ProcessView, process: ProcessReading) -> bool:
    before, after = old.reading.main_rchar_bytes, process.main_rchar_bytes
    return before is not None and after is not None and after > before


def is_idle(view: ProcessView) -> bool:
    """Whether its main thread is known to have written nothing and computed nothing in the last interval."""
    is_known = view.reading.main_wchar_bytes is not None and not view.is_signalled
    return is_known and view.main_cores < CPU_CORES


def main_frames(view: ProcessView) -> tuple[Frame, ...]:
    main = view.stack.main if view.stack else None
    return main.frames if main else ()


def busiest_of(views: Sequence[ProcessView]) -> ProcessView | None:
    """The process whose main thread has computed most in the last seconds; None when none has."""
    busiest = max(views, key=_recent_cpu_s, default=None)
    return busiest if busiest is not None and _recent_cpu_s(busiest) >= _RECENT_WORK_S else None


def _recent_cpu_s(view: ProcessView) -> float:
    return sum(view.main_deltas_s[-_RECENT_DELTAS:])


def without_helpers(views: Mapping[int, ProcessView]) -> list[ProcessView]:
    """All but housekeeping processes, such as the resource tracker, which always waits."""
    found = [view for view in views.values() if not _is_helper(view)]
    return found or list(views.values())


def leader_of(views: Mapping[int, ProcessView]) -> ProcessView:
    """The outermost Python process, because a shell around it only waits."""
    found = without_helpers(views)
    return next((view for view in found if view.reading.is_python), found[0])


def _is_helper(view: ProcessView) -> bool:
    if view.reading.comm in HELPER_COMMS or view.is_ours:
        return True
    return any(frame.file.endswith("multiprocessing/resource_tracker.py") for frame in main_frames(view))


def stands_at_lock(view: ProcessView) -> float | None:
    """Since when a thread has waited for a lock at a line of the user's own code; None when none does."""
    threads = view.stack.threads if view.stack else ()
    waiting = [one for one in threads if one.wait.startswith("lock") and one.frames and one.frames[0].is_user]
    return min((view.ran_at_s[one.thread_id] for one in waiting if one.thread_id in view.ran_at_s), default=None)


def with_stacks(views: Mapping[int, ProcessView], sample: Sample) -> dict[int, ProcessView]:
    updated = dict(views)
    for stack in sample.stacks or ():
        view = updated.get(stack.pid)
        if view is not None:
            updated[stack.pid] = _with_stack(view, stack, sample.at_s)
        if view is not None and stack.pid in sample.rescued:  # a thread of ours is among the others
            others = {"others_hash": view.others_hash, "others_moved_at_s": view.others_moved_at_s}
            updated[stack.pid] = replace(updated[stack.pid], **others)  # type: ignore[arg-type]
    return updated


def _with_stack(view: ProcessView, stack: ProcessStack, at_s: float) -> ProcessView:
    new, others = main_hash(stack), others_hash(stack)
    is_same_method = view.stack is not None and view.stack.method == stack.method
    is_elsewhere = bool(new and view.hash) and is_same_method and new != view.hash
    have_others_moved = is_same_method and bool(view.others_hash and others) and others != view.others_hash
    path = own_path(stack)
    is_same_path = bool(path) and is_same_method and path == view.path
    if view.stack is not None and not is_elsewhere and not stack.role and not stack.tasks:
        stack = _with_known(stack, view.stack)
    return replace(
        view,
        stack=stack if new or not view.hash else view.stack,
        hash=new or view.hash,
        hash_since_s=at_s if is_elsewhere or not view.hash else view.hash_since_s,
        hash_seen_s=at_s if new else view.hash_seen_s,
        num_seen=1 if is_elsewhere or not view.hash else view.num_seen + bool(new),
        others_hash=others if new else view.others_hash,  # '' once the other threads have ended
        path=path,
        path_since_s=view.path_since_s if is_same_path else at_s,
        num_on_path=view.num_on_path + 1 if is_same_path else 1,
        others_moved_at_s=at_s if have_others_moved else view.others_moved_at_s,
        woken_at_s=at_s if _is_handed_on(view, stack) else view.woken_at_s,
        moved_at_s=at_s if is_elsewhere else view.moved_at_s,
        is_signalled=view.is_signalled or stack.method == "faulthandler",
    )


def _is_handed_on(view: ProcessView, stack: ProcessStack) -> bool:
    """Whether a thread in the user's code has run between two waits without a time limit, one in each of the last two
    stacks: what it waited for came, though it costs too little CPU to be seen otherwise."""
    before = {thread.thread_id for thread in (view.stack.threads if view.stack else ()) if thread.is_endless}
    waiting = [thread for thread in stack.threads if thread.is_endless and thread.thread_id in before]
    users = [thread for thread in waiting if not thread.is_main and any(frame.is_user for frame in thread.frames)]
    return any(view.ran_at_s.get(thread.thread_id, -math.inf) > view.hash_seen_s for thread in users)


def _with_known(stack: ProcessStack, before: ProcessStack) -> ProcessStack:
    """A stack of the same place, with what was read from inside the process before."""
    known = {thread.thread_id: thread for thread in before.threads}
    threads = tuple(_with_awaited(thread, known.get(thread.thread_id)) for thread in stack.threads)
    return replace(stack, threads=threads, tasks=before.tasks, role=before.role)


def _with_awaited(thread: ThreadStack, before: ThreadStack | None) -> ThreadStack:
    if before is None:
        return thread
    is_there_still = thread.frames == before.frames
    awaits = thread.awaits or (before.awaits if is_there_still else "")
    return replace(thread, awaiting=thread.awaiting or before.awaiting, awaits=awaits)


def remembered(view: ProcessView, old: ProcessView | None) -> ProcessView:
    """A fresh view with the place in the code that an older one knew."""
    if old is None or view.hash:
        return view
    return replace(view, stack=old.stack, hash=old.hash, is_signalled=old.is_signalled)
