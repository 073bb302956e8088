"""Where the main thread and those around it are, in words for a verdict. Pure.

Owns the label and the words of a wait, and the list of positions. Decides nothing (`rules`).
"""

from __future__ import annotations

from jackline.diagnosis.doing import MEETING_HINT, meeting, waiting_words
from jackline.diagnosis.waiting import awaited_by, effective_wait, is_at_file_lock, looks_for_file_lock
from jackline.supervisor.hang.scene import WORKER_WAITS, Scene, awaits_ranks, naps, process_at_fault
from jackline.supervisor.hang.text import collective_of, other_processes, other_threads, view_text
from jackline.supervisor.hang.views import main_frames
from jackline.units import format_bytes, format_duration

_MOST_TASKS = 4
_JUST_S = 5.0  # a worker that ended so long before its parent began to wait may be the reason


def stillness(scene: Scene, words: str) -> str:
    """`words`, or what is true of a main thread in a loop of sleeps; one that tries a lock has words of its own."""
    is_only_napping = naps(scene.leader, scene.now_s) and not looks_for_file_lock(scene.leader.stack)
    return "the main thread has only woken up to sleep again" if is_only_napping else words


def progress_label(scene: Scene) -> tuple[str, str]:
    rates, kind = scene.state.rates, scene.leader.reading.wait.kind
    disk = f"{format_bytes(rates.disk_bytes)}/s"
    if (rates.disk_bytes > 256_000 and rates.cpu_s < 0.9) or kind == "disk":
        return "WAITING_DISK", f"reading or writing the disk ({disk})"
    if rates.cpu_s > 0.15:
        return "RUNNING_CPU", f"running ({rates.cpu_s:.1f} cores)"
    if scene.state.is_gpu_working and scene.state.sample.gpus:
        return "GPU_BUSY", "the GPU works"
    return waiting_label(scene)


def waiting_label(scene: Scene) -> tuple[str, str]:
    """What the main thread waits for."""
    wait = effective_wait(scene.leader.stack, scene.leader.reading.wait)
    rate = f"{format_bytes(scene.state.rates.tcp_bytes)}/s"
    kind = wait.kind
    if meets := meeting(scene.leader.stack):
        return "WAITING_START", f"{meets}: {MEETING_HINT}"
    if awaits_ranks(scene.leader):
        return "WAITING_RANKS", f"waiting for other ranks ({collective_of(scene.leader)})"
    if scene.leader.stack and scene.leader.stack.tasks and kind != "network":
        return "WAITING_TASK", f"its event loop is idle: {scene.leader.stack.tasks[0]}"
    if kind == "network":
        far_end = f"{wait.target}, " if wait.target else ""
        return "WAITING_NETWORK", f"waiting for the network ({far_end}{rate})"
    if kind in WORKER_WAITS[:4] and scene.workers:
        return "WAITING_CHILD", "waiting for a child process"
    if kind == "file_lock" or is_at_file_lock(scene.leader.stack, wait):
        return "WAITING_LOCK", waiting_words(scene.leader.stack, wait)
    awaited = awaited_by(scene.leader.stack.main) if scene.leader.stack else ""
    words = {
        "lock": ("WAITING_LOCK", f"waiting for {awaited or 'another thread'}"),
        "sleep": ("SLEEPING", "sleeping"),
        "stopped": ("STOPPED", "paused"),
        "zombie": ("ZOMBIE", "ended"),
        "keyboard": ("KEYBOARD", "waiting for keyboard input"),
        "disk": ("WAITING_DISK", "waiting for the disk"),
        "pipe": ("WAITING_PIPE", "waiting on a pipe"),
        "local_socket": ("WAITING_PIPE", "waiting on a local socket"),
        "poll": ("WAITING_EVENT", "waiting for events"),
        "child": ("WAITING_CHILD", "waiting for a child process"),
    }
    return words.get(kind, ("RUNNING_CPU", "running"))


def positions(scene: Scene) -> str:
    parts = [f"the main thread (pid {scene.leader.reading.pid}) {view_text(scene.leader)}"]
    parts += list(scene.leader.stack.tasks[:_MOST_TASKS]) if scene.leader.stack else []
    parts += lost_workers(scene)
    parts += other_threads(scene.leader)
    at_fault = process_at_fault(scene)
    others = [*scene.workers, *(view for view in scene.others if view.reading.is_python)]
    parts += other_processes(sorted(others, key=lambda view: view.reading.pid != at_fault))
    return "; ".join(parts)


def lost_workers(scene: Scene) -> list[str]:
    """Workers that ended while the main thread waited for the results of a Pool: it starts another and waits on."""
    frames = main_frames(scene.leader)
    if not any("multiprocessing/pool.py" in frame.file for frame in frames):
        return []
    since_s = scene.leader.hash_since_s - _JUST_S
    lost = [
        (pid, at_s) for pid, ppid, at_s in scene.state.ended if at_s >= since_s and ppid == scene.leader.reading.pid
    ]
    return [
        f"process {pid}, a worker of the pool, ended {format_duration(scene.now_s - at_s)} ago: if it was killed, "
        "its task is lost, and a Pool waits for it for ever"
        for pid, at_s in lost[:2]
    ]


def still_moving(scene: Scene) -> str:
    recent_s = (scene.now_s - scene.state.moved_at_s) / 2
    if scene.now_s - scene.state.progress_at_s > recent_s:
        return ""
    what = "output continues" if scene.now_s - scene.state.output_at_s < recent_s else "background threads still do"
    return f", though {what}"
