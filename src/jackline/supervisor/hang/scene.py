"""The input of the hang rules: the processes of a run sorted by their role, and questions about them. Pure.

Owns the Verdict type, its thresholds, and questions that several rules ask. The rules themselves are in rules.py.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import field
from typing import Literal

from jackline.diagnosis.frames import Frame, ThreadStack
from jackline.diagnosis.waiting import effective_wait, looks_for_file_lock
from jackline.immutable import immutable
from jackline.supervisor.hang.deadlock import Deadlock
from jackline.supervisor.hang.movement import Movement
from jackline.supervisor.hang.text import collective_of
from jackline.supervisor.hang.views import ProcessView, leader_of, main_frames, without_helpers
from jackline.supervisor.stacks.take import is_housekeeping

Kind = Literal["PROGRESS", "BUSY", "WAITING", "PAUSED", "SUSPECT", "STUCK"]

_RECENT_S = 5.0
_LEAST_WAKE_S = 1e-5  # CPU time; less means that it did not wake up
_SAMPLING_S = 2.0  # what happens between two samples has no order
_MOST_TASKS = 4
_SHORT_SLEEP_S, _NOBODY_SLEEPS_S = 20.0, 3600.0
_CHOSEN_SLEEP_S = 1.0
_POOL_FILES = ("/concurrent/futures/", "/multiprocessing/pool.py", "/joblib/", "/queue.py")
_SIGNAL_FILES = ("/threading.py", "/queue.py", "/concurrent/futures/_base.py")
_JOINS = ("join", "_wait_for_tstate_lock", "Thread.join", "Thread._wait_for_tstate_lock")
WORKER_WAITS = ("child", "pipe", "local_socket", "poll", "sleep")


@immutable
class Thresholds:
    """Lower bounds. If the run's own intervals between signs of progress are long, the limits become longer."""

    suspect_after_s: float = 120.0
    stuck_after_s: float = 60.0
    keyboard_after_s: float = 5.0
    stopped_after_s: float = 10.0
    waiting_after_s: float = 5.0
    proved_after_s: float = 60.0  # of a proved deadlock; not longer for a run with long pauses
    can_type: bool = False  # the command has a terminal (--tty), so a question can be answered


@immutable
class Verdict:
    """`since_s` is when the condition began, on the clock of the samples. `frame` is the main process's line in the
    user's code. `pid` is the process at fault: a worker, when the main process only waits for it."""

    kind: Kind
    label: str
    since_s: float
    text: str
    frame: Frame | None = None
    pid: int | None = None
    next_kind: str = ""  # the alarm that follows if nothing changes, and when
    next_in_s: float | None = None
    deadlock: Deadlock | None = None
    is_final: bool = False  # nothing that can still come lets it continue
    rule: str = field(default="", compare=False)


@immutable
class Scene:
    """The newest state, sorted by role: the leading process, its workers, the others, and the limits in force."""

    state: Movement
    now_s: float
    leader: ProcessView
    workers: tuple[ProcessView, ...]  # descendants of the leader
    others: tuple[ProcessView, ...]  # all other processes in the tree, without helpers
    limits: Thresholds


def make_scene(state: Movement, limits: Thresholds) -> Scene:
    """The outermost Python process is the leader, because a shell around it only waits."""
    views = without_helpers(state.views)
    leader = leader_of(state.views)
    family = {leader.reading.pid}
    for view in views:  # parents come before their children
        if view.reading.ppid in family:
            family.add(view.reading.pid)
    rest = [view for view in views if view is not leader]
    workers = tuple(view for view in rest if view.reading.pid in family)
    others = tuple(view for view in rest if view.reading.pid not in family)
    return Scene(state, state.sample.at_s, leader, workers, others, limits)


def is_asleep(scene: Scene) -> bool:
    """The main thread sleeps or waits for a thread that does and has no live workers, or it waits for a worker that
    sleeps and wakes up again and again. A sleep ends by itself, so the verdict can wait."""
    # A server that waits for clients (a TensorBoard beside the training) is no worker that others wait for.
    workers = [view for view in live(scene.workers) if scene.now_s - view.listened_at_s > _RECENT_S]
    if not workers:
        return is_main_asleep(scene) or bool(_awaited_sleepers(scene))
    # Between two short sleeps it may be seen running.
    is_waiting = scene.leader.reading.wait.kind in WORKER_WAITS or is_main_asleep(scene)
    return is_waiting and any(naps(view, scene.now_s) for view in workers)


def is_main_asleep(scene: Scene) -> bool:
    return scene.now_s - scene.leader.slept_at_s <= _RECENT_S or _is_timed_loop(scene.leader, scene.now_s)


def _awaited_sleepers(scene: Scene) -> list[ThreadStack]:
    """Threads that sleep and for which the main thread may wait. A thread that wakes up again and again beside a lock
    may be a heartbeat and counts only where the main thread waits for the end of threads that all sleep; one that has
    slept since anything last moved may hold what others wait for."""
    if scene.leader.reading.wait.kind != "lock":
        return []
    users = _user_threads(scene)
    sleeping = [thread for thread in users if thread.wait == "sleep"]
    is_awaiting_end = _is_joining(scene) or _is_inside(main_frames(scene.leader), _POOL_FILES[:3])
    if is_awaiting_end and len(sleeping) == len(users):
        return sleeping
    return [thread for thread in sleeping if not _has_run_since_progress(scene, thread)]


def _has_run_since_progress(scene: Scene, thread: ThreadStack) -> bool:
    return scene.leader.ran_at_s.get(thread.thread_id, math.inf) > scene.state.progress_at_s + _SAMPLING_S


def _user_threads(scene: Scene) -> list[ThreadStack]:
    """Threads in the user's own code, without the main thread."""
    threads = scene.leader.stack.threads if scene.leader.stack else ()
    return [thread for thread in threads if not thread.is_main and any(frame.is_user for frame in thread.frames)]


def _is_joining(scene: Scene) -> bool:
    frames = main_frames(scene.leader)
    return any(frame.file.endswith("/threading.py") and frame.function in _JOINS for frame in frames)


def _is_timed_loop(view: ProcessView, now_s: float) -> bool:
    """Whether its main thread is in an event loop whose timers wake it up: one of its tasks sleeps and repeats."""
    has_tasks = view.stack is not None and any(task.startswith("task ") for task in view.stack.tasks)
    return has_tasks and now_s - view.polled_at_s <= _RECENT_S and view.woke_s >= _LEAST_WAKE_S


def naps(view: ProcessView, now_s: float) -> bool:
    """Whether it is in a loop of sleeps, not in one long sleep: it has woken up, or worked after an earlier sleep."""
    return now_s - view.slept_at_s <= _RECENT_S and (view.woke_s >= _LEAST_WAKE_S or view.num_naps > 0)


def sleep_patience(scene: Scene) -> float:
    """Factor on the limit: 2 for a loop of short sleeps (retries, waits for slow data), 1 for one endless sleep."""
    views = (scene.leader, *live(scene.workers))
    is_loop = scene.leader.reading.main_cpu_s is None or _is_timed_loop(scene.leader, scene.now_s)
    is_loop = is_loop or any(naps(view, scene.now_s) for view in views)
    is_loop = is_loop or any(_has_run_since_progress(scene, thread) for thread in _awaited_sleepers(scene))
    return 2.0 if is_loop else 1.0


@immutable
class Sleep:
    """A sleep, or a wait with a time limit, that ends by itself: how long it takes, and when it ends."""

    span_s: float
    ends_at_s: float


def is_polling(scene: Scene) -> bool:
    """Whether the main thread is in a loop of sleeps so long that somebody chose them: it looks for something outside
    (a file, the end of a job) that comes when it likes."""
    call = _call_of(scene.leader)
    return naps(scene.leader, scene.now_s) and call is not None and call.span_s >= _CHOSEN_SLEEP_S


def main_sleep(scene: Scene) -> Sleep | None:
    return _sleep_of(scene.leader)


def awaited_sleep(scene: Scene) -> Sleep | None:
    """The longest of the sleeps that began before anything last moved, of threads and processes that the main thread
    may wait for. One that has ended since then without any effect is a heartbeat, and says nothing."""
    leader = scene.leader
    kind, found = leader.reading.wait.kind, []
    is_looking = scene.now_s - max(leader.slept_at_s, leader.polled_at_s) <= _RECENT_S and main_sleep(scene) is None
    if is_looking or kind in ("child", "file_lock", "pipe", "local_socket"):
        sleepers = [view for view in live((*scene.workers, *scene.others)) if not has_napped(scene, view)]
        found += [_sleep_of(view) for view in sleepers]
    if is_looking or kind in ("lock", "pipe", "local_socket"):
        found += _thread_sleeps(scene)
    return max((one for one in found if one is not None), key=lambda one: one.ends_at_s, default=None)


def _thread_sleeps(scene: Scene) -> list[Sleep | None]:
    threads = scene.leader.stack.threads if scene.leader.stack else ()
    threads = tuple(one for one in threads if not one.is_main and not is_housekeeping(one))
    asleep = [one for one in threads if one.until_s is not None and not _has_run_since_progress(scene, one)]
    began = {one.thread_id: scene.leader.ran_at_s.get(one.thread_id, scene.now_s) for one in asleep}
    ends = [(one.until_s, began[one.thread_id]) for one in asleep if one.until_s is not None]
    return [_sleep(until_s - began_s, until_s) for until_s, began_s in ends if until_s > scene.now_s]


def nap_of_child(scene: Scene) -> Sleep | None:
    """The sleep of a program whose end the main thread waits for, if it has woken from an earlier one: then it counts
    as the main thread's own. What such a program does between two sleeps may be less than a sample sees."""
    wait = scene.leader.reading.wait
    if wait.kind != "child":
        return None
    views = live((*scene.workers, *scene.others))
    awaited = [view for view in views if wait.target == f"process {view.reading.pid}"] or views
    found = [_call_of(view) for view in awaited if has_napped(scene, view)]
    long = [one for one in found if one is not None and one.span_s > scene.limits.stuck_after_s / 3]
    return max(long, key=lambda one: one.span_s, default=None)


def has_napped(scene: Scene, view: ProcessView) -> bool:
    """Whether the main thread of a process has run since anything last moved."""
    return view.ran_at_s.get(view.reading.pid, math.inf) > scene.state.progress_at_s + _SAMPLING_S


def _sleep_of(view: ProcessView) -> Sleep | None:
    call = _call_of(view)
    return _sleep(call.span_s, call.ends_at_s) if call else None


def _call_of(view: ProcessView) -> Sleep | None:
    """The call that the main thread of a process is in, if it ends by itself, however short it is."""
    wait, began_s = view.reading.wait, view.ran_at_s.get(view.reading.pid)
    if began_s is None:
        return None
    if wait.until_s is not None:
        return Sleep(wait.until_s - began_s, wait.until_s)
    return Sleep(wait.lasts_s, began_s + wait.lasts_s) if wait.lasts_s is not None else None


def _sleep(span_s: float, ends_at_s: float) -> Sleep | None:
    """None for one so short that it is a look at a flag, or so long that nobody plans it."""
    return Sleep(span_s, ends_at_s) if _SHORT_SLEEP_S < span_s < _NOBODY_SLEEPS_S else None


def is_on_disk(scene: Scene) -> bool:
    views = (scene.leader, *scene.workers, *scene.others)
    threads = scene.leader.stack.threads if scene.leader.stack else ()
    is_main = any(scene.now_s - view.disk_at_s <= _RECENT_S for view in views)
    return is_main or any(thread.wait.startswith("disk") for thread in threads)


def is_main_working(scene: Scene) -> bool:
    """Whether the main thread really works: it uses the CPU, or is seen at changing lines. Words that it prints while
    it stands at one line are no evidence."""
    recent_s = scene.limits.proved_after_s
    is_elsewhere = bool(scene.leader.hash) and scene.now_s - scene.leader.hash_since_s < recent_s
    return scene.leader.main_cores >= 0.05 or is_elsewhere or scene.state.is_gpu_working


def is_main_advancing(scene: Scene) -> bool:
    """Whether the main thread works, counts steps, or moves without printing: then threads beside it may be dead, but
    the run is not, and must not be ended for them. Words alone ("still waiting") are no evidence."""
    state, recent_s = scene.state, scene.limits.proved_after_s
    is_counting = scene.now_s - state.mark_at_s < recent_s
    has_moved = scene.now_s - scene.leader.moved_at_s < recent_s and not scene.leader.is_repeating
    is_silent = scene.now_s - state.output_at_s >= recent_s
    return is_main_working(scene) or is_counting or (has_moved and is_silent)


def is_fed_by_threads(scene: Scene) -> bool:
    """The main thread waits for the results of a pool, and threads of that pool were seen at different lines lately.
    Requests that a pool makes cost too little CPU to be seen otherwise."""
    is_collecting = _is_inside(main_frames(scene.leader), _POOL_FILES)
    threads = scene.leader.stack.threads if scene.leader.stack else ()
    is_pool = any(_is_inside(thread.frames, _POOL_FILES) for thread in threads if not thread.is_main)
    return is_collecting and is_pool and scene.now_s - scene.leader.others_moved_at_s <= scene.limits.stuck_after_s


def is_joining_threads(scene: Scene) -> bool:
    """The main thread waits for the end of other threads, and one in the user's own code has run lately."""
    users = [thread for thread in _user_threads(scene) if not is_housekeeping(thread)]
    ran = [scene.leader.ran_at_s.get(thread.thread_id, 0.0) for thread in users]
    return _is_joining(scene) and any(scene.now_s - ran_s <= scene.limits.stuck_after_s for ran_s in ran)


def is_worked_for(scene: Scene) -> bool:
    """The main thread waits for a signal of other threads (an Event, a queue, the end of a thread), and one of them
    has lately done more than check a flag in the user's own code, or was given what it had waited for."""
    frames = main_frames(scene.leader)
    is_signal = bool(frames) and frames[0].file.endswith(_SIGNAL_FILES)
    worked = [scene.leader.worked_at_s.get(thread.thread_id, -math.inf) for thread in _user_threads(scene)]
    worked.append(scene.leader.woken_at_s)
    return is_signal and any(scene.now_s - at_s <= scene.limits.stuck_after_s for at_s in worked)


# Libraries in which a main thread waits, while threads without Python code receive what it waits for.
_CLIENTS = tuple(
    f"/{name}/" for name in ("grpc", "aiohttp", "httpx", "httpcore", "websockets", "redis", "pika", "ray")
)


def is_fed_by_network(scene: Scene) -> bool:
    """The main thread waits inside of a client of a service, and more than keep-alives has come or gone lately."""
    inner = itertools.takewhile(lambda frame: not frame.is_user, main_frames(scene.leader))
    is_client = any(part in frame.file for frame in inner for part in _CLIENTS)
    return is_client and scene.now_s - scene.state.data_at_s <= scene.limits.stuck_after_s


def is_listening(scene: Scene) -> bool:
    """Whether the main thread waits for somebody to connect; between two such waits its timers may run."""
    return scene.now_s - scene.leader.listened_at_s <= _RECENT_S


def is_serving(scene: Scene) -> bool:
    """A loop that waits for clients and wakes up in between, as `serve_forever` does. Without clients it is as good
    as one with them."""
    wait = scene.leader.reading.wait
    # Between two waits it may be seen running.
    return is_listening(scene) and not wait.is_endless and wait.kind in ("network", "running")


_SERVERS = ("/socketserver.py", "/werkzeug/", "/gunicorn/", "/waitress/", "/cheroot/")


def is_idle_server(scene: Scene) -> bool:
    """The loop of a server's library, or a listening event loop with a timer whose tasks only sleep."""
    if is_serving(scene) and _is_inside(main_frames(scene.leader), _SERVERS):
        return True
    tasks = [task for task in scene.leader.stack.tasks if task.startswith("task ")] if scene.leader.stack else []
    is_idle = all("awaits the end of a sleep" in task for task in tasks)
    return is_listening(scene) and is_idle and _is_timed_loop(scene.leader, scene.now_s)


def _is_inside(frames: Sequence[Frame], files: Sequence[str]) -> bool:
    return any(part in frame.file for frame in frames for part in files)


def live(views: Sequence[ProcessView]) -> list[ProcessView]:
    return [view for view in views if view.reading.state not in ("Z", "X")]


def stuck_label(scene: Scene) -> str:
    kind = effective_wait(scene.leader.stack, scene.leader.reading.wait).kind
    kind = "file_lock" if looks_for_file_lock(scene.leader.stack) else kind
    if awaits_ranks(scene.leader):
        return "STUCK_RANKS"
    if kind == "network":
        return "STUCK_NET"
    if kind in WORKER_WAITS and scene.workers:
        return "STUCK_CHILD"
    return {"lock": "STUCK_LOCK", "file_lock": "STUCK_LOCK", "child": "STUCK_CHILD", "disk": "STUCK_DISK"}.get(
        kind, "STUCK"
    )


def process_at_fault(scene: Scene) -> int:
    """A dead worker that was not noticed, else a worker that is not just waiting for work, else the main process."""
    label = stuck_label(scene)
    if label == "STUCK_RANKS":
        elsewhere = [view for view in live(scene.others) if view.reading.is_python and not awaits_ranks(view)]
        return (elsewhere or [scene.leader])[0].reading.pid
    if label != "STUCK_CHILD" or not scene.workers:
        return scene.leader.reading.pid
    dead = [view for view in scene.workers if view.reading.state in ("Z", "X")]
    busy = [view for view in scene.workers if not _waits_for_work(view)]
    return (dead or busy or list(scene.workers))[0].reading.pid


def awaits_ranks(view: ProcessView) -> bool:
    """Whether its main thread is in a collective or a barrier of torch.distributed."""
    return bool(collective_of(view))


def _waits_for_work(view: ProcessView) -> bool:
    """Whether it waits for its next task or for other ranks. Then a process that does neither is at fault."""
    parts = ("multiprocessing/", "concurrent/futures/", "torch/distributed/")
    inside = itertools.takewhile(lambda frame: not frame.is_user, main_frames(view))
    return any(part in frame.file for frame in inside for part in parts)
