"""The rules that tell stuck, suspect and busy apart, one function each. The first that returns a verdict wins. Pure.

To add a rule: write a function from Scene to a Verdict or None, and put it into RULES at its place. Nothing else
needs a change. The thresholds are at the top; the questions that a rule may ask are in scene.py.
"""

from __future__ import annotations

import math

from jackline.diagnosis.doing import describe_wait
from jackline.machine.readings import other_end_of
from jackline.supervisor.hang.movement import stands_since_s
from jackline.supervisor.hang.places import positions, progress_label, still_moving, stillness, waiting_label
from jackline.supervisor.hang.ranks import collective
from jackline.supervisor.hang.scene import (
    WORKER_WAITS,
    Kind,
    Scene,
    Verdict,
    awaited_sleep,
    awaits_ranks,
    has_napped,
    is_asleep,
    is_fed_by_network,
    is_fed_by_threads,
    is_idle_server,
    is_joining_threads,
    is_listening,
    is_main_advancing,
    is_main_asleep,
    is_on_disk,
    is_polling,
    is_serving,
    is_worked_for,
    live,
    main_sleep,
    nap_of_child,
    process_at_fault,
    sleep_patience,
    stuck_label,
)
from jackline.supervisor.hang.text import frame_of, name_of, place_text, view_text, work_text
from jackline.supervisor.hang.views import ProcessView, is_paused
from jackline.units import format_duration

_BUSY_AFTER_S = 5.0
_BUSY_SAMPLES = 3
_LOOPING_AFTER_S, _LOOPING_SAMPLES = 30.0, 4
# Above these, others do work that a waiting main thread needs: a thread pool tokenises, a thread downloads.
_STRONG_CPU_CORES, _STRONG_TCP, _STRONG_DISK = 0.1, 64_000.0, 256_000.0
# Above these that is possible, but a logger that sends metrics can cause as much.
_FAIR_TCP, _FAIR_DISK = 2_000.0, 16_000.0
_FAIR_PATIENCE = 5.0
# A program that sleeps for 45 s at a time may do so ten times in vain.
_SLEEPS, _MOST_SLEEPS_S, _WAKES_WITHIN_S = 10, 1800.0, 10.0
_CLIENT_PATIENCE = 4.0  # of a server: its clients come when they like
# During fsync no counter of the process changes, while the kernel writes for minutes.
_DISK_PATIENCE = 5.0


def keyboard(scene: Scene) -> Verdict | None:
    after_s = scene.limits.keyboard_after_s
    last_did = scene.state.window[-1] if scene.state.window else None
    is_working = last_did is not None and last_did[2].cpu_s / last_did[1] >= 0.15
    if is_working or scene.now_s - max(scene.state.moved_at_s, scene.state.output_at_s) < after_s:
        return None
    for view in (scene.leader, *scene.workers, *scene.others):
        since_s = view.keyboard_since_s
        if since_s is not None and scene.now_s - since_s >= after_s:
            return _asking(scene, view, since_s)
    return None


def _asking(scene: Scene, view: ProcessView, since_s: float) -> Verdict:
    """STUCK only if the question goes to the program itself. Else an answer would continue it, and whoever holds the
    other end of its input may still give one."""
    place = place_text(frame_of(view) or frame_of(scene.leader))
    text = f"waiting for keyboard input for {format_duration(scene.now_s - since_s)}{f' at {place}' if place else ''}"
    target = view.reading.wait.target
    is_terminal = target.startswith("/dev/")
    views = (scene.leader, *scene.workers, *scene.others)
    asked = next((one for one in views if one.reading.wait.target == other_end_of(target)), None)
    if asked is not None and asked.reading.wait.is_endless:
        return _asks_itself(scene, view, asked, since_s)
    if is_terminal and scene.limits.can_type:
        how = "type the answer in the terminal of this run (`jackline watch` shows it)"
    elif asked is not None:
        how = f"process {asked.reading.pid} ({name_of(asked)}) has made the terminal {target} and could answer"
    elif is_terminal:
        how = f"it can be answered in the terminal {target}"
    else:
        how = "its input is connected, but nothing comes; without --tty you cannot type to it"
    kind: Kind = "WAITING" if is_terminal else "SUSPECT"
    words = f"{text} (process {view.reading.pid}); {how}"
    return Verdict(kind, "KEYBOARD", since_s, words, frame_of(scene.leader), view.reading.pid)


def _asks_itself(scene: Scene, view: ProcessView, asked: ProcessView, since_s: float) -> Verdict:
    """pexpect and the like: a process has made a terminal for a program and waits for other words than those that the
    program has printed to ask for its input. Nobody else can type there."""
    since_s = max(since_s, scene.state.progress_at_s)
    for_s, after_s = scene.now_s - since_s, scene.limits.stuck_after_s
    place, own_place = place_text(frame_of(asked)), place_text(frame_of(view))
    at, own_at = f" at {place}" if place else "", f" at {own_place}" if own_place else ""
    text = (
        f"process {view.reading.pid} ({name_of(view)}) waits for input{own_at} in the terminal "
        f"{view.reading.wait.target}, which process {asked.reading.pid} ({name_of(asked)}) has made; that one waits "
        f"for more output{at}: they wait for each other"
    )
    frame, pid = frame_of(scene.leader), view.reading.pid
    if for_s >= after_s:
        text = f"nothing has moved for {format_duration(for_s)}: {text}"
        return Verdict("STUCK", "STUCK_CHILD", since_s, text, frame, pid)
    next_in_s = max(1.0, after_s - for_s)
    text += f"; if nothing changes, STUCK in {format_duration(next_in_s)}"
    return Verdict("WAITING", "WAITING_CHILD", since_s, text, frame, pid, "STUCK", next_in_s)


def paused(scene: Scene) -> Verdict | None:
    """Somebody stopped it on purpose (SIGSTOP, Ctrl-Z, a debugger), so it is no hang, however long it takes. A paused
    worker pauses the run once nothing else moves."""
    if is_paused(scene.leader, scene.now_s):
        return _paused_by(scene, scene.leader)
    quiet_s = scene.now_s - scene.state.moved_at_s
    held = [view for view in (*scene.workers, *scene.others) if is_paused(view, scene.now_s)]
    if not held or quiet_s < min(scene.limits.stopped_after_s, scene.limits.stuck_after_s):
        return None
    return _paused_by(scene, held[0])


def _paused_by(scene: Scene, view: ProcessView) -> Verdict:
    is_leader, reading = view is scene.leader, view.reading
    name = f"the main process (pid {reading.pid})" if is_leader else f"process {reading.pid} ({reading.comm})"
    name = f"rank {reading.rank.rank} (pid {reading.pid})" if reading.rank else name
    place = place_text(frame_of(view))
    text = f"{describe_wait(reading.wait)}: {name}{f' at {place}' if place else ''}"
    if not is_leader:
        text += f"; the main thread (pid {scene.leader.reading.pid}) {view_text(scene.leader)}"
    hints = {"T": f"`kill -CONT {reading.pid}` continues it", "t": "detach the debugger to continue"}
    text += f"; {hints.get(reading.state, 'it continues when its cgroup is thawed (docker unpause)')}"
    since_s = scene.now_s if view.paused_since_s is None else view.paused_since_s
    label = "STOPPED" if is_leader else "STOPPED_CHILD"
    return Verdict("PAUSED", label, since_s, text, frame_of(scene.leader), reading.pid)


def deadlocked(scene: Scene) -> Verdict | None:
    """A proved deadlock is stuck, whatever other threads print, send or write. One that does not hold the main thread
    counts only if that does no work either."""
    found = scene.state.deadlock
    if found is None or (not found.has_main and is_main_advancing(scene)):
        return None
    since_s = stands_since_s(scene.state)
    for_s, after_s = scene.now_s - since_s, scene.limits.proved_after_s
    frame, pid = frame_of(scene.leader), found.members[-1].pid
    label, word = ("DEADLOCK", "deadlock") if found.is_cycle else (stuck_label(scene), "it cannot continue")
    if for_s >= after_s:
        text = f"{word}, standing still for {format_duration(for_s)}: {found.text}"
        return Verdict("STUCK", label, since_s, text, frame, pid, deadlock=found)
    if for_s < min(scene.limits.waiting_after_s, after_s):
        return None
    next_in_s = max(1.0, after_s - for_s)
    text = f"{word}: {found.text}; if nothing changes, STUCK in {format_duration(next_in_s)}"
    return Verdict("WAITING", label, since_s, text, frame, pid, "STUCK", next_in_s, found)


def stuck_limit_s(scene: Scene) -> float:
    """How long nothing at all may move."""
    limit_s = scene.limits.stuck_after_s * (_CLIENT_PATIENCE if is_listening(scene) else 1.0)
    if is_serving(scene):
        return math.inf
    if is_asleep(scene):
        patience = sleep_patience(scene) * (_FAIR_PATIENCE if is_polling(scene) else 1.0)
        limit_s = max(limit_s, 2 * scene.limits.suspect_after_s * patience)
    limit_s = max(limit_s, 2 * _own_sleeps_s(scene, scene.state.progress_at_s))
    limit_s = max(limit_s, _others_sleep_s(scene, scene.state.progress_at_s))
    return limit_s * _DISK_PATIENCE if is_on_disk(scene) else limit_s


def _own_sleeps_s(scene: Scene, since_s: float) -> float:
    """How long a main thread, or the program whose end it waits for, may sleep or wait with a limit again and again
    without doing anything else. The first such call is always waited for."""
    napping = nap_of_child(scene)
    found = main_sleep(scene) or napping
    if found is None or awaits_ranks(scene.leader):
        return 0.0
    again_s = max(min(_SLEEPS * found.span_s, _MOST_SLEEPS_S), 2 * found.span_s)
    is_first = napping is None and not has_napped(scene, scene.leader)
    return max(again_s, found.ends_at_s + _WAKES_WITHIN_S - since_s) if is_first else again_s


def _others_sleep_s(scene: Scene, since_s: float) -> float:
    """Until those for whom the main thread may wait have slept."""
    found = awaited_sleep(scene)
    if found is None or awaits_ranks(scene.leader):
        return 0.0
    return found.ends_at_s + _WAKES_WITHIN_S - since_s


def stuck(scene: Scene) -> Verdict | None:
    quiet_s = scene.now_s - scene.state.progress_at_s
    # Ready to run, but on a busy machine no CPU was free yet: it will move.
    is_queued = any(view.reading.state == "R" for view in (scene.leader, *scene.workers, *scene.others))
    if quiet_s < stuck_limit_s(scene) or is_queued:
        return None
    if scene.leader.keyboard_since_s is not None:
        return _asking(scene, scene.leader, scene.state.progress_at_s)
    text = f"{stillness(scene, 'nothing has moved')} for {format_duration(quiet_s)}: {positions(scene)}"
    return Verdict(
        "STUCK", stuck_label(scene), scene.state.progress_at_s, text, frame_of(scene.leader), process_at_fault(scene)
    )


def gpu_spin(scene: Scene) -> Verdict | None:
    since_s = scene.state.spin_since_s
    if since_s is None or scene.now_s - since_s < scene.limits.waiting_after_s:
        return None
    # The stack must not have changed either, because short kernels that use no memory do exist.
    if scene.leader.hash and scene.leader.hash_since_s > since_s + 1:
        return None
    if scene.state.output_at_s > since_s:
        return None
    for_s, frame, pid = scene.now_s - since_s, frame_of(scene.leader), scene.leader.reading.pid
    text = f"the GPU shows full use but has touched no memory and drawn idle power for {format_duration(for_s)}"
    next_in_s = scene.limits.stuck_after_s - for_s
    if next_in_s > 0:
        text += f" at {place_text(frame)}; if nothing changes, SUSPECT in {format_duration(max(1.0, next_in_s))}"
        return Verdict("BUSY", "GPU_SPIN", since_s, text, frame, pid, "SUSPECT", next_in_s)
    text += f": a kernel or a collective seems to hang; {positions(scene)}"
    return Verdict("SUSPECT", "GPU_SPIN", since_s, text, frame, pid)


def suspect_limit_s(scene: Scene) -> float:
    """How long no main thread may move; infinite while others visibly work for it."""
    did = scene.state.background.per_s(scene.now_s - scene.state.moved_at_s)
    are_many_busy = did.cpu_s >= _STRONG_CPU_CORES or did.is_starved
    is_data_moving = did.tcp_bytes >= _STRONG_TCP or did.disk_bytes >= _STRONG_DISK
    if are_many_busy or is_data_moving or scene.state.is_gpu_working:
        return math.inf
    if is_fed_by_threads(scene) or is_worked_for(scene) or is_fed_by_network(scene) or is_idle_server(scene):
        return math.inf
    if awaits_ranks(scene.leader):
        return (
            scene.limits.suspect_after_s
        )  # asking the store again and again whether the others are there is no work
    limit_s = scene.limits.suspect_after_s * (sleep_patience(scene) if is_asleep(scene) else 1.0)
    if is_on_disk(scene):
        limit_s *= _DISK_PATIENCE / 2
    if is_listening(scene):
        limit_s *= _CLIENT_PATIENCE
    since_s = scene.state.moved_at_s
    limit_s = max(limit_s, _own_sleeps_s(scene, since_s), _others_sleep_s(scene, since_s))
    has_threads = scene.now_s - scene.leader.threads_at_s <= scene.limits.stuck_after_s  # timers are threads
    is_fair = did.tcp_bytes >= _FAIR_TCP or did.disk_bytes >= _FAIR_DISK or is_joining_threads(scene)
    is_fair = is_fair or is_polling(scene) or scene.now_s - scene.leader.little_at_s <= scene.limits.waiting_after_s
    return limit_s * _FAIR_PATIENCE if is_fair or has_threads else limit_s


def suspect(scene: Scene) -> Verdict | None:
    quiet_s = scene.now_s - scene.state.moved_at_s
    if quiet_s < suspect_limit_s(scene) or not scene.state.has_stacks:
        return None
    is_sleep = is_main_asleep(scene) and not live(scene.workers) and not awaits_ranks(scene.leader)
    label = "SLEEPING" if is_sleep else stuck_label(scene)
    stands = f"{stillness(scene, 'no main thread has moved')} for {format_duration(quiet_s)}"
    text = f"{stands}{still_moving(scene)}: {positions(scene)}"
    return Verdict("SUSPECT", label, scene.state.moved_at_s, text, frame_of(scene.leader), process_at_fault(scene))


def busy(scene: Scene) -> Verdict | None:
    """Python stays at the same line and uses CPU: one long call, or an endless loop."""
    leader, state = scene.leader, scene.state
    # Output, or a byte read or written, may mean a loop that passes this line again and again. So the time counts
    # from the last one: it may also have been the last byte before the line was reached.
    since_s = max(leader.hash_since_s, state.output_at_s, leader.io_at_s)
    is_same_place = leader.hash_seen_s - since_s >= _BUSY_AFTER_S and leader.num_seen >= _BUSY_SAMPLES
    if not leader.hash or not is_same_place or state.rates.cpu_s < _STRONG_CPU_CORES:
        return None
    for_words = format_duration(scene.now_s - since_s)
    place = place_text(frame_of(leader))
    if leader.main_cores >= 0.05 or not leader.reading.wait.kind.startswith(("child", *WORKER_WAITS, "lock")):
        text = f"busy in {place} for {for_words}, in each of {leader.num_seen} looks ({state.rates.cpu_s:.1f} cores)"
        return Verdict("BUSY", "RUNNING_NATIVE", since_s, text, frame_of(leader), leader.reading.pid)
    busiest = max(scene.workers, key=lambda view: view.main_cores, default=None)
    is_child = busiest is not None and busiest.main_cores >= 0.05
    whom = work_text(busiest) if busiest and is_child else "others work"
    text = f"waiting at {place} for {for_words} while {whom} ({state.rates.cpu_s:.1f} cores)"
    label = "WAITING_CHILD" if is_child else "WAITING_LOCK"
    pid = busiest.reading.pid if busiest and is_child else leader.reading.pid
    return Verdict("BUSY", label, since_s, text, frame_of(leader), pid)


def looping(scene: Scene) -> Verdict | None:
    """The user's own function computes for long and calls nothing that is seen: long work, or a loop without end.
    Nobody can tell from outside which it is."""
    leader, state = scene.leader, scene.state
    since_s = max(leader.path_since_s, state.output_at_s, leader.io_at_s)
    is_long = leader.hash_seen_s - since_s >= _LOOPING_AFTER_S and leader.num_on_path >= _LOOPING_SAMPLES
    frame = frame_of(leader)
    if not leader.path or frame is None or not is_long or leader.main_cores < _STRONG_CPU_CORES:
        return None
    text = (
        f"busy in {frame.function}, now at {place_text(frame)}, for {format_duration(scene.now_s - since_s)} "
        f"({state.rates.cpu_s:.1f} cores): it neither prints nor reads nor calls anything else that was seen in "
        f"{leader.num_on_path} looks; long work, or a loop that does not end"
    )
    return Verdict("BUSY", "RUNNING_CPU", since_s, text, frame, leader.reading.pid)


def waiting(scene: Scene) -> Verdict | None:
    """Nothing has moved for some seconds. That is no alarm yet, and the text says when it becomes one."""
    state = scene.state
    quiet_s = scene.now_s - state.progress_at_s
    suspect_in_s = suspect_limit_s(scene) - (scene.now_s - state.moved_at_s)
    stuck_in_s = stuck_limit_s(scene) - quiet_s
    is_main_only = quiet_s < scene.limits.waiting_after_s
    if is_main_only and (scene.now_s - state.moved_at_s < scene.limits.waiting_after_s or math.isinf(suspect_in_s)):
        return None
    label, words = waiting_label(scene)
    since_s = state.moved_at_s if is_main_only else state.progress_at_s
    place = place_text(frame_of(scene.leader))
    what = "the main thread has not moved" if is_main_only else "nothing has moved"
    still = f"{stillness(scene, what)} for {format_duration(scene.now_s - since_s)}"
    text = f"{words}{f' at {place}' if place else ''}; {still}"
    if asleep := None if awaits_ranks(scene.leader) else main_sleep(scene):
        text += f"; that ends by itself in {format_duration(max(0.0, asleep.ends_at_s - scene.now_s))}"
    is_suspect_next = is_main_only or suspect_in_s < stuck_in_s
    next_kind, next_in_s = ("SUSPECT", suspect_in_s) if is_suspect_next else ("STUCK", stuck_in_s)
    frame, pid = frame_of(scene.leader), scene.leader.reading.pid
    if math.isinf(next_in_s):
        return Verdict("WAITING", label, since_s, text, frame, pid)
    next_in_s = max(1.0, next_in_s)
    text += f"; if nothing changes, {next_kind} in {format_duration(next_in_s)}"
    return Verdict("WAITING", label, since_s, text, frame, pid, next_kind, next_in_s)


def progress(scene: Scene) -> Verdict:
    label, words = progress_label(scene)
    return Verdict(
        "PROGRESS", label, scene.state.progress_at_s, words, frame_of(scene.leader), scene.leader.reading.pid
    )


# For `why --evidence`: what a rule would have to see to give another verdict.
MIND_CHANGERS = {
    "paused": "the process continues (SIGCONT, or the debugger detaches)",
    "keyboard": "an answer on its standard input, or 0.15 cores of CPU",
    "collective": "the missing rank arrives, or one of its processes moves",
    "deadlocked": "one of the threads named runs again",
    "stuck": "any CPU above 0.02 cores, a thread that computes for 1 ms between two sleeps, disk above 1 kB/s, "
    "a byte on a socket, output, a thread at another line or one that was given what it waited for",
    "gpu_spin": "memory use or power of the GPU above idle, output, or another stack",
    "suspect": "the main thread runs, prints or is at another line; or others work for it: 0.1 cores, 64 kB/s",
    "busy": "another line in one of the next looks, output, or a byte read or written by the main thread",
    "looping": "output, a byte read or written by the main thread, or another function in one of the next looks",
    "waiting": "anything that moves; or the time that the text names, without movement",
    "progress": "5 s in which nothing moves, or in which the main thread does not and nobody works for it",
}

# Tried in this order. If none returns a verdict, the verdict is `progress`.
RULES = (paused, keyboard, collective, deadlocked, stuck, gpu_spin, suspect, busy, looping, waiting)
