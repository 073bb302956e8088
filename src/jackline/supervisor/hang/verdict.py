"""Is it making progress, busy in one place, suspect or stuck? Pure decisions over what moved.

Owns the four verdicts, their thresholds and labels. What moved between two samples is `movement`, the sentences
about processes are `hang_words`. Takes no sample itself, reads no clock and no /proc.

What cannot be told from outside: catastrophic backtracking, an endless loop and one long call into C look alike, so
they are BUSY and never stuck; a loop that sleeps and looks at a flag looks like a hang, so it is called one late.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from jackline.diagnosis.frames import Frame
from jackline.supervisor.hang.movement import HELPER_COMMS, Movement, Sample, Stand, gpu_works, note
from jackline.supervisor.hang.words import frame_of, other_processes, other_threads, place_words, stand_words
from jackline.units import format_bytes, format_duration

__all__ = ["Judge", "Kind", "Sample", "Thresholds", "Verdict", "verdict"]

Kind = Literal["PROGRESS", "BUSY", "SUSPECT", "STUCK"]

_MOST_STUCK_AFTER_S = 900.0  # however slow its rhythm, a run in which nothing moves this long is stuck
_MOST_SUSPECT_AFTER_S = 1800.0
_INTERVALS_TO_LEARN = 5
_BUSY_AFTER_S = 5.0
# Above these a waiting main thread is being worked for: a pool of threads tokenises, a thread downloads.
_STRONG_CPU_CORES, _STRONG_TCP, _STRONG_DISK = 0.1, 64_000.0, 256_000.0
# Above these that is possible, but a logger that sends metrics can do as much.
_FAIR_TCP, _FAIR_DISK = 2_000.0, 16_000.0
_FAIR_PATIENCE = 5.0
# fsync moves no counter of its process while the kernel writes for minutes.
_DISK_PATIENCE = 5.0
_RECENT_S = 5.0
_WORKER_WAITS = ("child", "pipe", "local_socket", "poll", "sleep")


@dataclass(frozen=True)
class Thresholds:
    """Floors; the rhythm a run has shown can only lengthen them."""

    suspect_after_s: float = 120.0
    stuck_after_s: float = 60.0
    keyboard_after_s: float = 5.0
    stopped_after_s: float = 10.0


@dataclass(frozen=True)
class Verdict:
    """`since_s` is the moment it began, on the clock of the samples. `frame` is where the main process stands in the
    person's code, `pid` the process at fault: a worker when the main process only waits for it."""

    kind: Kind
    label: str
    since_s: float
    text: str
    frame: Frame | None = None
    pid: int | None = None


class Judge:
    """Holds what is known of one attempt. Add every sample, about one a second; costs microseconds a process."""

    def __init__(self, thresholds: Thresholds | None = None) -> None:
        self._floor = thresholds or Thresholds()
        self._movement: Movement | None = None

    def add(self, sample: Sample) -> Verdict:
        self._movement = note(self._movement, sample, window_s=_window_s(self._floor))
        return decide(self._movement, self._floor)


def verdict(history: Sequence[Sample], thresholds: Thresholds) -> Verdict:
    """The verdict after all these samples; the same as a Judge that was given them one by one."""
    state: Movement | None = None
    for sample in history:
        state = note(state, sample, window_s=_window_s(thresholds))
    if state is None:
        return Verdict("PROGRESS", "STARTING", 0.0, "nothing has been seen yet")
    return decide(state, thresholds)


def _window_s(thresholds: Thresholds) -> float:
    return min(8.0, max(2.0, thresholds.stuck_after_s / 4))


@dataclass(frozen=True)
class _Scene:
    """The newest state, sorted by part: who leads, who works for it, what limits hold."""

    state: Movement
    now_s: float
    leader: Stand
    workers: tuple[Stand, ...]  # descendants of the leader
    others: tuple[Stand, ...]  # everybody else in the tree, helpers left out
    limits: Thresholds


def decide(state: Movement, floor: Thresholds) -> Verdict:
    """The first rule that holds."""
    if not state.stands:
        return Verdict("PROGRESS", "ENDED", state.sample.at_s, "it has ended")
    scene = _scene(state, learned(state, floor))
    rules = (_keyboard, _stopped, _stuck, _gpu_spin, _suspect, _busy)
    for rule in rules:
        found = rule(scene)
        if found is not None:
            return found
    return _progress(scene)


def learned(state: Movement, floor: Thresholds) -> Thresholds:
    """Ten times the slowest rhythm seen, but not less than the floor and not absurdly much."""
    stuck_s = min(_MOST_STUCK_AFTER_S, 10 * _p99(state.progress_intervals_s))
    suspect_s = min(_MOST_SUSPECT_AFTER_S, 10 * _p99(state.output_intervals_s))
    return replace(
        floor,
        stuck_after_s=max(floor.stuck_after_s, stuck_s),
        suspect_after_s=max(floor.suspect_after_s, suspect_s),
    )


def _p99(intervals_s: Sequence[float]) -> float:
    if len(intervals_s) < _INTERVALS_TO_LEARN:
        return 0.0
    return sorted(intervals_s)[math.ceil(0.99 * len(intervals_s)) - 1]


def _scene(state: Movement, limits: Thresholds) -> _Scene:
    """The outermost Python process leads: a shell around it only waits."""
    stands = [stand for stand in state.stands.values() if not _is_helper(stand)]
    stands = stands or list(state.stands.values())
    leader = next((stand for stand in stands if stand.reading.is_python), stands[0])
    family = {leader.reading.pid}
    for stand in stands:  # parents come before their children
        if stand.reading.ppid in family:
            family.add(stand.reading.pid)
    rest = [stand for stand in stands if stand is not leader]
    workers = tuple(stand for stand in rest if stand.reading.pid in family)
    others = tuple(stand for stand in rest if stand.reading.pid not in family)
    return _Scene(state, state.sample.at_s, leader, workers, others, limits)


# -- the rules ------------------------------------------------------------------------------------------------------


def _keyboard(scene: _Scene) -> Verdict | None:
    after_s = scene.limits.keyboard_after_s
    last_did = scene.state.window[-1] if scene.state.window else None
    is_busy = last_did is not None and last_did[2].cpu_s / last_did[1] >= 0.15
    if is_busy or scene.now_s - max(scene.state.moved_at_s, scene.state.output_at_s) < after_s:
        return None
    for stand in (scene.leader, *scene.workers, *scene.others):
        since_s = stand.keyboard_since_s
        if since_s is None or scene.now_s - since_s < after_s:
            continue
        kind: Kind = "STUCK" if scene.now_s - since_s >= scene.limits.stuck_after_s else "SUSPECT"
        return _asking(scene, stand, kind, since_s)
    return None


def _asking(scene: _Scene, stand: Stand, kind: Kind, since_s: float) -> Verdict:
    place = place_words(frame_of(stand) or frame_of(scene.leader))
    text = f"waiting for keyboard input for {format_duration(scene.now_s - since_s)}{f' at {place}' if place else ''}"
    text += f" (process {stand.reading.pid}); nobody can type unless it was started with --tty"
    return Verdict(kind, "KEYBOARD", since_s, text, frame_of(scene.leader), stand.reading.pid)


def _stopped(scene: _Scene) -> Verdict | None:
    quiet_s = scene.now_s - scene.state.progress_at_s
    stopped = [stand for stand in (scene.leader, *scene.workers, *scene.others) if stand.reading.state == "T"]
    if not stopped or quiet_s < min(scene.limits.stopped_after_s, scene.limits.stuck_after_s):
        return None
    first = stopped[0]
    is_leader = first is scene.leader
    kind: Kind = "STUCK" if quiet_s >= scene.limits.stuck_after_s else "SUSPECT"
    name = "the main process" if is_leader else f"process {first.reading.pid} ({first.reading.comm})"
    place = place_words(frame_of(first))
    text = f"{name} is stopped (SIGSTOP or Ctrl-Z){f' at {place}' if place else ''}"
    text += f" and nothing has moved for {format_duration(quiet_s)}"
    if not is_leader:
        text += f"; the main thread (pid {scene.leader.reading.pid}) {stand_words(scene.leader)}"
    text += f"; `kill -CONT {first.reading.pid}` lets it go on"
    label = "STOPPED" if is_leader else "STUCK_CHILD"
    return Verdict(kind, label, scene.state.progress_at_s, text, frame_of(scene.leader), first.reading.pid)


def _stuck(scene: _Scene) -> Verdict | None:
    quiet_s = scene.now_s - scene.state.progress_at_s
    limit_s = scene.limits.stuck_after_s
    if is_asleep(scene):
        limit_s = max(limit_s, 2 * scene.limits.suspect_after_s * _sleep_patience(scene))
    if _is_on_disk(scene):
        limit_s *= _DISK_PATIENCE
    if quiet_s < limit_s:
        return None
    if scene.leader.keyboard_since_s is not None:
        return _asking(scene, scene.leader, "STUCK", scene.state.progress_at_s)
    text = f"nothing has moved for {format_duration(quiet_s)}: {_positions(scene)}"
    return Verdict(
        "STUCK", _stuck_label(scene), scene.state.progress_at_s, text, frame_of(scene.leader), _at_fault(scene)
    )


def _gpu_spin(scene: _Scene) -> Verdict | None:
    since_s = scene.state.spin_since_s
    if since_s is None or scene.now_s - since_s < scene.limits.stuck_after_s:
        return None
    # The stack must not have moved either: short kernels that use no memory do exist.
    if scene.leader.hash and scene.leader.hash_since_s > since_s + 1:
        return None
    if scene.state.output_at_s > since_s:
        return None
    text = (
        f"the GPU shows full use but has touched no memory and drawn idle power for "
        f"{format_duration(scene.now_s - since_s)}: a kernel or a collective seems to hang; {_positions(scene)}"
    )
    return Verdict("SUSPECT", "GPU_SPIN", since_s, text, frame_of(scene.leader), scene.leader.reading.pid)


def _suspect(scene: _Scene) -> Verdict | None:
    quiet_s = scene.now_s - scene.state.moved_at_s
    limit_s = scene.limits.suspect_after_s * (_sleep_patience(scene) if is_asleep(scene) else 1.0)
    if _is_on_disk(scene):
        limit_s *= _DISK_PATIENCE / 2
    did = scene.state.background.per_s(quiet_s)
    is_worked_for = did.cpu_s >= _STRONG_CPU_CORES or did.is_starved
    is_worked_for = is_worked_for or did.tcp_bytes >= _STRONG_TCP or did.disk_bytes >= _STRONG_DISK
    if is_worked_for or gpu_works(scene.state.sample, scene.state.idle_power_w):
        return None
    if did.tcp_bytes >= _FAIR_TCP or did.disk_bytes >= _FAIR_DISK:
        limit_s *= _FAIR_PATIENCE
    if quiet_s < limit_s or not scene.state.has_stacks:
        return None
    label = "SLEEPING" if is_asleep(scene) else _stuck_label(scene)
    text = f"no main thread has moved for {format_duration(quiet_s)}{_still_moving(scene)}: {_positions(scene)}"
    return Verdict("SUSPECT", label, scene.state.moved_at_s, text, frame_of(scene.leader), _at_fault(scene))


def _busy(scene: _Scene) -> Verdict | None:
    """Python has been at the same line all the time, and CPU is used: one long call, or an endless loop."""
    leader, state = scene.leader, scene.state
    is_same_place = bool(leader.hash) and leader.hash_seen_s - leader.hash_since_s >= _BUSY_AFTER_S
    if not is_same_place or state.output_at_s > leader.hash_since_s or state.rates.cpu_s < _STRONG_CPU_CORES:
        return None
    for_words = format_duration(scene.now_s - leader.hash_since_s)
    place = place_words(frame_of(leader))
    if leader.main_cores >= 0.05 or not leader.reading.wait.kind.startswith(("child", *_WORKER_WAITS, "lock")):
        text = f"busy in {place} for {for_words} ({state.rates.cpu_s:.1f} cores)"
        return Verdict("BUSY", "RUNNING_NATIVE", leader.hash_since_s, text, frame_of(leader), leader.reading.pid)
    busiest = max(scene.workers, key=lambda stand: stand.main_cores, default=None)
    is_child = busiest is not None and busiest.main_cores >= 0.05
    whom = f"process {busiest.reading.pid} ({busiest.reading.comm}) works" if busiest and is_child else "others work"
    text = f"waiting at {place} for {for_words} while {whom} ({state.rates.cpu_s:.1f} cores)"
    label = "WAITING_CHILD" if is_child else "WAITING_LOCK"
    pid = busiest.reading.pid if busiest and is_child else leader.reading.pid
    return Verdict("BUSY", label, leader.hash_since_s, text, frame_of(leader), pid)


def _progress(scene: _Scene) -> Verdict:
    label, words = _progress_label(scene)
    quiet_s = scene.now_s - scene.state.progress_at_s
    if quiet_s >= 5:
        words = f"{words}; nothing has moved for {format_duration(quiet_s)}"
    return Verdict(
        "PROGRESS", label, scene.state.progress_at_s, words, frame_of(scene.leader), scene.leader.reading.pid
    )


def _progress_label(scene: _Scene) -> tuple[str, str]:
    rates, kind = scene.state.rates, scene.leader.reading.wait.kind
    disk = f"{format_bytes(rates.disk_bytes)}/s"
    if (rates.disk_bytes > 256_000 and rates.cpu_s < 0.9) or kind == "disk":
        return "WAITING_DISK", f"reading or writing the disk ({disk})"
    if rates.cpu_s > 0.15:
        return "RUNNING_CPU", f"running ({rates.cpu_s:.1f} cores)"
    if gpu_works(scene.state.sample, scene.state.idle_power_w) and scene.state.sample.gpus:
        return "GPU_BUSY", "the GPU works"
    if kind == "network":
        return "WAITING_NETWORK", f"waiting for the network ({format_bytes(rates.tcp_bytes)}/s)"
    if kind in _WORKER_WAITS[:4] and scene.workers:
        return "WAITING_CHILD", "waiting for a child process"
    words = {
        "lock": ("WAITING_LOCK", "waiting for another thread"),
        "file_lock": ("WAITING_LOCK", "waiting for a file lock"),
        "sleep": ("SLEEPING", "sleeping"),
        "stopped": ("STOPPED", "stopped"),
        "zombie": ("ZOMBIE", "ended"),
        "keyboard": ("KEYBOARD", "waiting for keyboard input"),
    }
    return words.get(kind, ("RUNNING_CPU", "running"))


# -- parts of the rules ---------------------------------------------------------------------------------------------


def is_asleep(scene: _Scene) -> bool:
    """The main thread sleeps by choice, with nobody working for it. A sleep ends by itself: no hurry to call it."""
    return scene.now_s - scene.leader.slept_at_s <= _RECENT_S and not _live(scene.workers)


def _sleep_patience(scene: _Scene) -> float:
    """A loop of short sleeps is what retries and slow data look like; one endless sleep is not."""
    return 1.0 if scene.leader.woke_s < 1e-5 and scene.leader.reading.main_cpu_s is not None else 2.0


def _is_on_disk(scene: _Scene) -> bool:
    stands = (scene.leader, *scene.workers, *scene.others)
    threads = scene.leader.stack.threads if scene.leader.stack else ()
    is_main = any(scene.now_s - stand.disk_at_s <= _RECENT_S for stand in stands)
    return is_main or any(thread.wait.startswith("disk") for thread in threads)


def _live(stands: Sequence[Stand]) -> list[Stand]:
    return [stand for stand in stands if stand.reading.state not in ("Z", "X")]


def _stuck_label(scene: _Scene) -> str:
    kind = scene.leader.reading.wait.kind
    if kind == "network":
        return "STUCK_NET"
    if kind in _WORKER_WAITS and scene.workers:
        return "STUCK_CHILD"
    return {"lock": "STUCK_LOCK", "file_lock": "STUCK_LOCK", "child": "STUCK_CHILD", "disk": "STUCK_DISK"}.get(
        kind, "STUCK"
    )


def _at_fault(scene: _Scene) -> int:
    """A dead worker nobody noticed, else a worker that is not merely waiting for work, else the main process."""
    if _stuck_label(scene) != "STUCK_CHILD" or not scene.workers:
        return scene.leader.reading.pid
    dead = [stand for stand in scene.workers if stand.reading.state in ("Z", "X")]
    busy = [stand for stand in scene.workers if not _waits_for_work(stand)]
    return (dead or busy or list(scene.workers))[0].reading.pid


def _is_helper(stand: Stand) -> bool:
    """A process that keeps house for others and always waits."""
    is_tracker = any(frame.file.endswith("multiprocessing/resource_tracker.py") for frame in _main_frames(stand))
    return is_tracker or stand.reading.comm in HELPER_COMMS


def _waits_for_work(stand: Stand) -> bool:
    """It waits for the next task, or for other ranks: the one that is somewhere else is at fault."""
    parts = ("multiprocessing/", "concurrent/futures/", "torch/distributed/")
    inside = itertools.takewhile(lambda frame: not frame.is_user, _main_frames(stand))
    return any(part in frame.file for frame in inside for part in parts)


def _main_frames(stand: Stand) -> tuple[Frame, ...]:
    return stand.stack.main.frames if stand.stack and stand.stack.main else ()


def _positions(scene: _Scene) -> str:
    parts = [f"the main thread (pid {scene.leader.reading.pid}) {stand_words(scene.leader)}"]
    parts += other_threads(scene.leader)
    at_fault = _at_fault(scene)
    others = [*scene.workers, *(stand for stand in scene.others if stand.reading.is_python)]
    parts += other_processes(sorted(others, key=lambda stand: stand.reading.pid != at_fault))
    return "; ".join(parts)


def _still_moving(scene: _Scene) -> str:
    recent_s = (scene.now_s - scene.state.moved_at_s) / 2
    if scene.now_s - scene.state.progress_at_s > recent_s:
        return ""
    what = "output goes on" if scene.now_s - scene.state.output_at_s < recent_s else "background threads still do"
    return f", though {what}"
