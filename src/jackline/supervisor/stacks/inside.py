"""Asks a process who waits for whom, by a signal, and reads its answer (`child/inside` writes it).

Owns the signal, when it is safe to send, and the types of the answer. Every field is checked: the file may be damaged
or forged. Does not decide what the answer means (`hang.deadlock`).
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from jackline.immutable import immutable
from jackline.machine.proc import catches_signal, read_command, read_environ
from jackline.machine.procfs import read_bytes, read_link
from jackline.machine.ties import find_holders
from jackline.rundir.access.secrets import without_credentials
from jackline.supervisor.child.environment import stack_signal
from jackline.supervisor.stacks.dumps import is_own_code
from jackline.supervisor.stacks.interrupts import would_break_off

_ANSWER_S = 1.5
_LARGEST_BYTES = 4 << 20
_LONGEST_WORDS = 200
_MOST_PATHS = 4
_LONGEST_COMMAND = 60


@immutable
class Hold:
    """A lock that a thread holds, and the line that took it."""

    lock: str
    name: str = ""
    file: str = ""
    line: int = 0


@immutable
class ThreadWait:
    """`kind` is lock, semaphore, join, exit, threads, idle or file_lock. `owner` and `target` are threads of the same
    process; `held_at` is the line at which the owner took the lock; one of `paths` is the file that is locked;
    `lost_owner` is the name of an owner that has ended."""

    kind: str
    what: str = ""
    lock: str = ""
    name: str = ""
    owner: int | None = None
    target: int | None = None
    held_at: Hold | None = None
    paths: tuple[str, ...] = ()
    lost_owner: str = ""


@immutable
class ThreadReport:
    """`pool` names the ThreadPoolExecutor that it works for, in which `num_queued` tasks wait for a free thread."""

    tid: int
    name: str
    is_main: bool
    is_daemon: bool = False
    file: str = ""
    line: int = 0
    waits: ThreadWait | None = None
    holds: tuple[Hold, ...] = ()
    pool: str = ""
    num_queued: int = 0

    @property
    def place(self) -> str:
        return f"{self.file}:{self.line}" if self.file else ""


@immutable
class TaskReport:
    name: str
    awaits: str = ""
    coroutine: str = ""
    file: str = ""
    line: int = 0

    @property
    def place(self) -> str:
        return f"{self.file}:{self.line}" if self.file else ""


@immutable
class LoopReport:
    """An event loop and its tasks."""

    tid: int
    library: str
    num_tasks: int = 0
    num_timers: int = 0
    tasks: tuple[TaskReport, ...] = ()


@immutable
class ForkedFrom:
    """Where the other threads of the parent were when this process was forked: (thread, file, line)."""

    parent: int
    threads: tuple[tuple[str, str, int], ...] = ()


@immutable
class InsideReport:
    pid: int
    threads: tuple[ThreadReport, ...] = ()
    loops: tuple[LoopReport, ...] = ()
    held: tuple[str, ...] = ()  # multiprocessing locks
    children: tuple[tuple[int, str], ...] = ()  # (pid, name)
    fork: ForkedFrom | None = None
    role: str = ""  # 'DataLoader worker 1', 'rank 3'
    remarks: tuple[str, ...] = ()

    @property
    def main(self) -> ThreadReport | None:
        return next((thread for thread in self.threads if thread.is_main), None)


_OTHER_TASKS = ("task", "a _Gathering", "the tasks")


def leaf_of(loop: LoopReport) -> TaskReport | None:
    """The task that the others wait for: one that waits for no other task, in the user's own code if there is one."""
    ranked = sorted(loop.tasks, key=lambda task: (not is_own_code(task.file), task.awaits.startswith(_OTHER_TASKS)))
    return ranked[0] if ranked else None


def file_lock_words(pid: int, paths: Sequence[str]) -> str:
    """Of a lock that a library tries again and again: its file, and who holds it. The file is one of `paths`."""
    folder = read_link(f"/proc/{pid}/cwd") or "/"
    there = []
    for path in (os.path.join(folder, name) for name in paths):
        with contextlib.suppress(OSError, ValueError):
            there.append((path, find_holders(f"/proc/{pid}/root{path}")))
    if not there:
        return "a file lock"
    path, holders = next((one for one in there if one[1]), there[0])
    known = [f"process {one} ({_brief(read_command(one))})" for one in holders if one != pid]
    known += ["this process itself"] if pid in holders else []
    if known:
        return f"file lock '{_text(path)}', held by {' and '.join(known[:2])}"
    owner = _text(
        (read_bytes(f"/proc/{pid}/root{path}") or b"")[:_LONGEST_COMMAND].decode("utf-8", "replace")
    ).strip()
    content = f" (the file says '{owner}')" if owner else ""
    return (
        f"file lock '{_text(path)}'{content}; its holder is not visible here: it may run in another container or on "
        "another machine, or have exited without deleting the file"
    )


def _brief(command: str) -> str:
    command = without_credentials(command)
    return command if len(command) <= _LONGEST_COMMAND else f"{command[:_LONGEST_COMMAND]}..."


def ask_inside(pids: Sequence[int], folder: Path) -> tuple[InsideReport, ...]:
    """The reports of the processes that answer. All are asked before the first answer is awaited."""
    asked = [pid for pid in pids if signal_inside(pid, folder)]
    end_s = time.monotonic() + _ANSWER_S
    found = []
    while asked and time.monotonic() < end_s:
        time.sleep(0.02)
        for pid in list(asked):
            data = read_bytes(str(_path(folder, pid)))
            if data is not None:
                asked.remove(pid)
                report = parse_report(data, pid)
                found += [report] if report else []
    return tuple(found)


def _path(folder: Path, pid: int) -> Path:
    return folder / f"in.{pid}"


def signal_inside(pid: int, folder: Path) -> bool:
    """Send the signal, if a handler of ours is sure to get it: an uncaught one would kill the process."""
    number = stack_signal(read_environ(pid)) + 2
    if number > 64 or not (folder / f"fh.{pid}").exists() or not catches_signal(pid, number) or would_break_off(pid):
        return False
    try:
        _path(folder, pid).unlink(missing_ok=True)
        os.kill(pid, number)
    except OSError:
        return False
    return True


def parse_report(data: bytes, pid: int) -> InsideReport | None:
    """None for what is not a report."""
    try:
        raw = json.loads(data[:_LARGEST_BYTES])
    except (ValueError, RecursionError):
        return None
    if not isinstance(raw, dict):
        return None
    entries = [entry for entry in _entries(raw, "threads") if _number(entry.get("ident"))]
    # A thread whose id in the kernel is not known gets a number that fits no thread, so that nothing is proved by it.
    tids = {entry["ident"]: _number(entry.get("tid")) or -number for number, entry in enumerate(entries, 1)}
    return InsideReport(
        pid=pid,
        threads=tuple(_thread(entry, pid, tids) for entry in entries),
        loops=tuple(_loop(entry, tids) for entry in _entries(raw, "loops")),
        held=tuple(_text(name) for name in raw.get("held") or () if isinstance(name, str)),
        children=tuple(
            (_number(entry.get("pid")) or 0, _text(entry.get("name"))) for entry in _entries(raw, "children")
        ),
        fork=_fork(raw.get("fork")),
        role=_text(raw.get("role")),
        remarks=tuple(_text(one) for one in raw.get("remarks") or () if isinstance(one, str)),
    )


def _entries(raw: dict[str, Any], key: str) -> Iterator[dict[str, Any]]:
    found = raw.get(key)
    yield from (entry for entry in (found if isinstance(found, list) else ()) if isinstance(entry, dict))


def _text(value: object) -> str:
    return "".join(letter if letter.isprintable() else " " for letter in str(value or ""))[:_LONGEST_WORDS]


def _number(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _thread(entry: dict[str, Any], pid: int, tids: dict[int, int]) -> ThreadReport:
    waits, pool = entry.get("waits"), entry.get("pool")
    pool = pool if isinstance(pool, dict) else {}
    return ThreadReport(
        tid=tids[entry["ident"]],
        name=_text(entry.get("name")),
        is_main=tids[entry["ident"]] == pid,
        is_daemon=entry.get("is_daemon") is True,
        file=_text(entry.get("file")),
        line=_number(entry.get("line")) or 0,
        waits=_wait(waits, tids) if isinstance(waits, dict) else None,
        holds=tuple(_hold(hold) for hold in _entries(entry, "holds")),
        pool=_text(pool.get("id")),
        num_queued=_number(pool.get("waiting")) or 0,
    )


def _wait(raw: dict[str, Any], tids: dict[int, int]) -> ThreadWait:
    held_at = raw.get("held_at")
    return ThreadWait(
        kind=_text(raw.get("kind")),
        what=_text(raw.get("what")),
        lock=_text(raw.get("lock")),
        name=_text(raw.get("name")),
        owner=tids.get(_number(raw.get("owner")) or 0),
        target=tids.get(_number(raw.get("target")) or 0),
        held_at=_hold(held_at) if isinstance(held_at, dict) else None,
        paths=_paths(raw.get("paths")),
        lost_owner=_text(raw.get("lost_owner")),
    )


def _paths(value: object) -> tuple[str, ...]:
    found = value if isinstance(value, list) else []
    return tuple(path for path in found[:_MOST_PATHS] if isinstance(path, str) and path and "\0" not in path)


def _hold(raw: dict[str, Any]) -> Hold:
    line = _number(raw.get("line")) or 0
    return Hold(_text(raw.get("lock")), _text(raw.get("name")), _text(raw.get("file")), line)


def _loop(raw: dict[str, Any], tids: dict[int, int]) -> LoopReport:
    tasks = tuple(
        TaskReport(
            name=_text(task.get("name")),
            awaits=_text(task.get("awaits")),
            coroutine=_text(task.get("coroutine")),
            file=_text(task.get("file")),
            line=_number(task.get("line")) or 0,
        )
        for task in _entries(raw, "tasks")
    )
    count, timers = _number(raw.get("num_tasks")) or len(tasks), _number(raw.get("num_timers")) or 0
    return LoopReport(tids.get(_number(raw.get("ident")) or 0, 0), _text(raw.get("library")), count, timers, tasks)


def _fork(raw: object) -> ForkedFrom | None:
    if not isinstance(raw, dict):
        return None
    threads = []
    for entry in _entries(raw, "threads"):
        places = entry.get("places")
        first = next((place for place in places or () if isinstance(place, list) and len(place) == 3), None)
        if first is not None:
            threads.append((_text(entry.get("name")), _text(first[0]), _number(first[1]) or 0))
    return ForkedFrom(_number(raw.get("parent")) or 0, tuple(threads))
