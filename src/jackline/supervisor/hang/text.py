"""Sentences for people about where processes are: pid, what it waits for, file:line and the source text.

Pure wording over `movement.ProcessView`; decides nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import PurePath

from jackline.diagnosis.doing import MEETING_HINT, meeting, waiting_words
from jackline.diagnosis.frames import Frame, ThreadStack, innermost_user_frame
from jackline.diagnosis.waiting import awaited_by, effective_wait
from jackline.supervisor.hang.views import ProcessView
from jackline.supervisor.stacks.take import is_housekeeping

_MOST_GROUPS = 4
_MOST_THREADS = 3
_MOST_PIDS = 4


def frame_of(view: ProcessView) -> Frame | None:
    return innermost_user_frame(view.stack.main) if view.stack else None


def place_text(frame: Frame | None) -> str:
    """'train.py:41 `with lock:`', '' when nothing is known."""
    if frame is None:
        return ""
    return f"{frame.place} `{frame.source}`" if frame.source else f"{frame.place} in {frame.function}"


def view_text(view: ProcessView) -> str:
    """'is waiting for a lock at train.py:41 `with lock:`'."""
    waiting = waiting_words(view.stack, effective_wait(view.stack, view.reading.wait))
    place = place_text(frame_of(view))
    main = view.stack.main if view.stack else None
    if (
        view.stack
        and view.stack.role.startswith("worker of")
        and main
        and not any(one.is_user for one in main.frames)
    ):
        return "is waiting for its next task"
    if calls := _calls_in_manager(view):
        return calls
    if words := meeting(view.stack):
        waiting = f"{words}: {MEETING_HINT}"
    elif collective := collective_of(view):
        waiting = f"waiting for other ranks ({collective})"
    words = f"is {waiting or 'running'}"
    return f"{words} at {place}" if place else words


def _calls_in_manager(view: ProcessView) -> str:
    """Of the server of a multiprocessing.Manager, which stands idle while each of its clients has a thread in it."""
    main = view.stack.main if view.stack else None
    if view.stack is None or main is None or not any(_is_manager(frame, "_run_server") for frame in main.frames):
        return ""
    groups: dict[str, list[str]] = {}
    for thread in view.stack.threads:
        serving = next((at for at, frame in enumerate(thread.frames) if _is_manager(frame, "serve_client")), None)
        inner = thread.frames[:serving] if serving is not None else ()
        is_idle = any(frame.file.endswith("multiprocessing/connection.py") for frame in inner)
        if serving is not None and not is_idle and thread.wait.partition(" ")[0] == "lock":
            groups.setdefault(thread_wait_text(thread), []).append(f"'{thread.name}'")
    words = [f"the call of {' and of '.join(names[:_MOST_PIDS])} {wait}" for wait, names in groups.items()]
    return f"is serving, and in it {'; '.join(words)}" if words else ""


def _is_manager(frame: Frame, function: str) -> bool:
    return frame.file.endswith("multiprocessing/managers.py") and frame.function.rpartition(".")[2] == function


def other_threads(view: ProcessView) -> list[str]:
    """One sentence for each thread, other than the main one, that is in the user's own code."""
    sentences = []
    for thread in view.stack.threads if view.stack else ():
        frame = next((frame for frame in thread.frames if frame.is_user), None)
        if thread.is_main or frame is None or is_housekeeping(thread):
            continue
        name = f"thread '{thread.name}'" if thread.name else "another thread"
        sentences.append(f"{name} {thread_wait_text(thread)} at {place_text(frame)}")
    more = [f"and {len(sentences) - _MOST_THREADS} more threads"] if len(sentences) > _MOST_THREADS else []
    return sentences[:_MOST_THREADS] + more


def thread_wait_text(thread: ThreadStack) -> str:
    word = thread.wait.partition(" ")[0]
    awaited = awaited_by(thread) or "a lock"
    known = {"lock": f"waits for {awaited}", "network": "waits for the network", "sleep": "sleeps", "running": "runs"}
    return known.get(word, f"waits ({thread.wait})" if thread.wait else "stands")


def other_processes(views: Sequence[ProcessView]) -> list[str]:
    """Where the other processes are; those at the same place share a sentence."""
    groups: dict[str, list[ProcessView]] = {}
    for view in views:
        groups.setdefault(view_text(view), []).append(view)
    sentences = [_group_text(words, group) for words, group in groups.items()]
    more = len(views) - sum(len(group) for group in list(groups.values())[:_MOST_GROUPS])
    return sentences[:_MOST_GROUPS] + ([f"and {more} more processes"] if more else [])


def collective_of(view: ProcessView) -> str:
    """The function of torch.distributed that the user's line has called: 'all_reduce'; '' when it is in none."""
    main = view.stack.main if view.stack else None
    inside = list(itertools.takewhile(lambda frame: not frame.is_user, main.frames if main else ()))
    # py-spy prints '_exception_logger.<locals>.wrapper' where faulthandler prints 'wrapper'.
    called = [frame.function.rpartition(".")[2] for frame in inside if "torch/distributed/" in frame.file]
    outermost = next((name for name in reversed(called) if name != "wrapper"), "")
    return "" if outermost == "<module>" else outermost  # torch.distributed is only being imported


def name_of(view: ProcessView) -> str:
    return view.stack.role if view.stack and view.stack.role else view.reading.comm


def work_text(view: ProcessView, *, is_short: bool = False) -> str:
    """'process 12 (worker of a Pool) works at data.py:40 `rows.sort()`'; its line is where it was seen last."""
    rank, frame = view.reading.rank, frame_of(view)
    who = f"rank {rank.rank} (pid {view.reading.pid})" if rank else f"process {view.reading.pid} ({name_of(view)})"
    if frame is None or not frame.line:
        return f"{who} works"
    return f"{who} works at {f'{PurePath(frame.file).name}:{frame.line}' if is_short else place_text(frame)}"


def _group_text(words: str, group: Sequence[ProcessView]) -> str:
    if len(group) == 1:
        return f"process {group[0].reading.pid} ({name_of(group[0])}) {words}"
    pids = ", ".join(str(view.reading.pid) for view in group[:_MOST_PIDS])
    more = ", ..." if len(group) > _MOST_PIDS else ""
    return f"{len(group)} processes ({pids}{more}) are {words.removeprefix('is ')}"
