"""Takes stacks of live processes, by the cheapest method that works.

Owns the order: py-spy without stopping the process; where py-spy is not permitted or not able to read it, the
faulthandler armed by the injected file; else what /proc says each thread waits for. Every method has a time limit.

faulthandler can crash a busy process when it dumps all threads: it reads frames that running threads are freeing (a
compile with 20 threads crashed within a minute). So it dumps only the main thread, and all threads only at an
incident, in a process in which no thread runs. If py-spy was only late, no signal is sent instead.
Does not own the formats (`dumps`) or what a stack means (`jackline.diagnosis.doing`).
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from jackline.diagnosis.frames import Frame, ProcessStack, ThreadStack
from jackline.diagnosis.waiting import around_tries
from jackline.immutable import immutable
from jackline.machine.host import find_program
from jackline.machine.proc import catches_signal, is_python, list_threads, read_command, read_environ, read_wait
from jackline.machine.procfs import read_bytes, read_text
from jackline.machine.readings import Wait
from jackline.machine.ties import fds_of
from jackline.supervisor.child.environment import stack_signal
from jackline.supervisor.stacks.dumps import (
    fatal_part,
    is_own_code,
    parse_faulthandler,
    parse_py_spy,
    without_inherited,
)
from jackline.supervisor.stacks.inside import InsideReport, ThreadWait, file_lock_words, leaf_of
from jackline.supervisor.stacks.interrupts import would_cut_a_transfer
from jackline.supervisor.stacks.sources import SourceReader, script_frames

MOST_PIDS = 16
# py-spy needs 40 ms of CPU, which take seconds where many others compute. Only a dead disk makes it hang.
DEADLINE_S = 10.0
_AT_ONCE = 4
_MOST_THREADS = 64
_ANSWER_S = 1.0  # a handler runs within milliseconds; a process that has not answered by then will not answer
_STILL_S = 0.2
_WHOLE_S = 0.1
_LARGEST_DUMP_BYTES = 1 << 20
_sources = SourceReader()


def sample_stacks(
    pids: Sequence[int], *, stacks_folder: Path | None, deadline_s: float | None = None, native: bool = False
) -> tuple[ProcessStack, ...]:
    """The stacks of up to 16 processes, in the given order: put the main process first.

    Costs about 40 ms of CPU per Python process and stops none, unless `native` (includes C functions; stops each
    process for about 0.15 s). When some are left out, a last entry with pid 0 says how many.
    """
    wanted = list(dict.fromkeys(pids))
    end_s = time.monotonic() + (DEADLINE_S if deadline_s is None else deadline_s)
    found: list[ProcessStack] = []
    for start in range(0, min(len(wanted), MOST_PIDS), _AT_ONCE):
        group = wanted[start : min(start + _AT_ONCE, MOST_PIDS)]
        found += _sample_group(group, stacks_folder, end_s, native=native)
    if len(wanted) > MOST_PIDS:
        found.append(ProcessStack(0, "", problem=f"{len(wanted) - MOST_PIDS} more processes were not looked at"))
    return tuple(found)


def with_reports(
    stacks: Sequence[ProcessStack], reports: Sequence[InsideReport], *, deadline_s: float = 1.0
) -> tuple[ProcessStack, ...]:
    """The same stacks with what only the processes themselves know: tasks of event loops, and their role."""
    known = {report.pid: report for report in reports}
    return tuple(
        _with_report(stack, known[stack.pid], deadline_s) if stack.pid in known else stack for stack in stacks
    )


def _with_report(stack: ProcessStack, report: InsideReport, deadline_s: float) -> ProcessStack:
    waits = {one.tid: one.waits for one in report.threads if one.waits and one.waits.what != "a lock"}
    awaited = {tid: _awaited_words(stack.pid, wait, deadline_s) for tid, wait in waits.items()}
    for one in stack.threads:  # in a call of flock or fcntl, of which the process itself knows nothing
        if one.wait.startswith(_AT_FILE_LOCK) and "/" in one.wait:
            wait = ThreadWait("file_lock", "a file lock", paths=(one.wait.removeprefix(_AT_FILE_LOCK),))
            awaited[one.thread_id] = _awaited_words(stack.pid, wait, deadline_s)
    threads = [replace(one, awaits=awaited.get(one.thread_id, "")) for one in stack.threads]
    sentences = list(report.remarks)
    for loop in report.loops:
        leaf = leaf_of(loop)
        if leaf is not None and is_own_code(leaf.file):
            frame = Frame(leaf.coroutine, leaf.file, leaf.line, "", is_user=True)
            (filled,) = _sources.fill(stack.pid, [ThreadStack(0, "", (frame,))], limit_s=deadline_s)
            threads = [
                replace(one, awaiting=filled.frames[0]) if one.thread_id == loop.tid else one for one in threads
            ]
        tasks = sorted(loop.tasks, key=lambda task: task is not leaf)
        sentences += [f"task '{task.name}' awaits {task.awaits or 'something'} at {task.place}" for task in tasks]
    return replace(stack, threads=tuple(threads), tasks=tuple(sentences[:8]), role=report.role)


def _awaited_words(pid: int, wait: ThreadWait, limit_s: float) -> str:
    if not wait.paths:
        return wait.what
    return _sources.read(lambda: file_lock_words(pid, wait.paths), wait.what, limit_s=limit_s)


_AT_FILE_LOCK = "file lock "


def main_hash(stack: ProcessStack) -> str:
    """A hash that is equal, in this process, while the main thread is at the same place; '' when its frames are not
    known. That a shell script is in the same loop says nothing."""
    if stack.method == "proc":
        return ""
    return _hash([replace(stack.main, frames=around_tries(stack.main))] if stack.main else [])


def own_path(stack: ProcessStack) -> str:
    """Equal while the main thread is in the same functions, whatever their lines; '' unless the innermost is the
    user's own: then it computes in a loop of that function, or in what Python calls without a frame."""
    frames = stack.main.frames if stack.main and stack.method != "proc" else ()
    if not frames or not frames[0].is_user or not frames[0].line:
        return ""
    return _hash([ThreadStack(0, "", tuple(replace(frame, line=0) for frame in frames))])


def others_hash(stack: ProcessStack) -> str:
    """Like `main_hash`, but of the other threads, without housekeeping ones (progress monitors, loggers)."""
    return _hash([thread for thread in stack.threads if not thread.is_main and not is_housekeeping(thread)])


_HOUSEKEEPING_FILES = (
    "tqdm/_monitor.py",
    "/wandb/",
    "data/_utils/pin_memory.py",
    "multiprocessing/resource_tracker.py",
    "event_file_writer.py",
    "logging/handlers.py",
    "ipykernel/iostream.py",
)


def is_housekeeping(thread: ThreadStack) -> bool:
    """A helper thread whose movement says nothing about training."""
    if thread.is_main:
        return False
    return any(part in frame.file for frame in thread.frames for part in _HOUSEKEEPING_FILES)


def _hash(threads: Sequence[ThreadStack]) -> str:
    # py-spy prints 'Thread.run' where faulthandler prints 'run'. Only the last part is used, so that both agree.
    places = [(frame.function.rpartition(".")[2], frame.file, frame.line) for t in threads for frame in t.frames]
    return f"{hash(tuple(places)) & (1 << 64) - 1:016x}" if places else ""


@immutable
class _Started:
    """A running py-spy. Its output goes to a file in memory, so that a large one cannot block on a full pipe."""

    pid: int
    process: subprocess.Popen[bytes]
    answer_fd: int


def _sample_group(pids: Sequence[int], folder: Path | None, end_s: float, *, native: bool) -> list[ProcessStack]:
    tool = find_tool("py-spy")
    pythons = [pid for pid in pids if tool is not None and is_python(pid) and end_s > time.monotonic()]
    started = {pid: _start(_py_spy(str(tool), pid, native=native), pid) for pid in pythons}
    stacks = []
    for pid in pids:
        missing: tuple[tuple[ThreadStack, ...], str] = ((), "" if tool else "py-spy is not installed")
        threads, problem = _collect(started[pid], end_s) if pid in started else missing
        asked = folder if not threads and (tool is None or _is_refused(problem)) else None
        stacks.append(_finish(pid, threads, problem, asked, end_s, is_incident=native))
    return stacks


def _is_refused(problem: str) -> bool:
    """Whether py-spy lacks the permission or does not support this interpreter; a retry would fail too."""
    lowered = problem.lower()
    return any(word in lowered for word in ("permission", "not permitted", "eperm", "unsupported", "python version"))


def find_tool(name: str) -> str | None:
    """Look beside our own interpreter first, because it was installed there with us."""
    beside = Path(sys.executable).parent / name
    return str(beside) if os.access(beside, os.X_OK) else find_program(name)


def _py_spy(tool: str, pid: int, *, native: bool) -> list[str]:
    # Only the non-blocking mode can read a stopped process, since stopping it a second time fails.
    is_blocking = native and _state(pid) not in ("T", "t", "") and not would_cut_a_transfer(pid)
    return [tool, "dump", "--json", "--native" if is_blocking else "--nonblocking", "--pid", str(pid)]


def _start(command: list[str], pid: int) -> _Started | None:
    fd = os.memfd_create("stacks", os.MFD_CLOEXEC)
    try:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=fd, stderr=fd, env=_plain_environment())
    except OSError:
        os.close(fd)
        return None
    return _Started(pid, process, fd)


def _plain_environment() -> dict[str, str]:
    """The environment without the user's LD_PRELOAD, which could print into the answer."""
    return {name: value for name, value in os.environ.items() if name not in ("LD_PRELOAD", "RUST_LOG")}


def _collect(started: _Started | None, end_s: float) -> tuple[tuple[ThreadStack, ...], str]:
    if started is None:
        return (), "py-spy could not be started"
    text = _answer(started, end_s)
    if text is None:
        return (), "py-spy did not answer in time"
    try:
        return parse_py_spy(text, started.pid), ""
    except (ValueError, TypeError, AttributeError):
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        return (), f"py-spy: {lines[0].removeprefix('Error: ')[:200]}" if lines else "py-spy said nothing"


def _answer(started: _Started, end_s: float) -> str | None:
    process = started.process
    try:
        process.wait(max(0.05, end_s - time.monotonic()))
        return os.pread(started.answer_fd, 64 << 20, 0).decode("utf-8", "replace")
    except subprocess.TimeoutExpired:
        process.kill()
        # A process that hangs on a dead disk does not exit even after a kill, so another thread waits for it.
        threading.Thread(target=process.wait, name="jackline-reaper", daemon=True).start()
        return None
    finally:
        os.close(started.answer_fd)


def _finish(
    pid: int,
    threads: tuple[ThreadStack, ...],
    problem: str,
    folder: Path | None,
    end_s: float,
    *,
    is_incident: bool = False,
) -> ProcessStack:
    """Fall back where needed (`folder` given), then add waits, names and source texts."""
    method = "py-spy" if threads else ""
    if not threads and folder is not None and is_python(pid):
        limit_s = min(_ANSWER_S, max(0.1, end_s - time.monotonic()))
        threads, why = ask_faulthandler(pid, folder, limit_s=limit_s, all_threads=is_incident and is_still(pid))
        method, problem = ("faulthandler", "") if threads else ("", "; ".join(filter(None, (problem, why))))
    if not threads:
        return _from_proc(pid, problem if is_python(pid) else "")
    threads = tuple(_with_wait(pid, without_inherited(thread)) for thread in threads)
    threads = _sources.fill(pid, threads, limit_s=max(0.2, min(1.0, end_s - time.monotonic())))
    return ProcessStack(pid, read_command(pid), threads, method, problem)


def _with_wait(pid: int, thread: ThreadStack) -> ThreadStack:
    if not os.path.isdir(f"/proc/{pid}/task/{thread.thread_id}"):  # noqa: PTH112 - faulthandler knows no kernel ids
        return thread
    name = thread.name or (read_text(f"/proc/{pid}/task/{thread.thread_id}/comm") or "").strip()
    wait = read_wait(pid, thread.thread_id)
    return replace(thread, name=name, wait=wait_words(wait), is_endless=wait.is_endless, until_s=wait.until_s)


def wait_words(wait: Wait) -> str:
    kind = wait.kind.replace("_", " ")
    return f"{kind} {wait.target}" if wait.target and wait.target != kind else kind


def _from_proc(pid: int, problem: str) -> ProcessStack:
    threads = []
    nothing: tuple[Frame, ...] = ()
    script = _sources.read(lambda: script_frames(pid), nothing, limit_s=_ANSWER_S)
    for tid in list_threads(pid)[:_MOST_THREADS]:
        name = (read_text(f"/proc/{pid}/task/{tid}/comm") or "").strip()
        frames = script if tid == pid else ()
        threads.append(ThreadStack(tid, name, frames, tid == pid, wait_words(read_wait(pid, tid))))
    if not threads:
        return ProcessStack(pid, "", (), "", "the process is gone")
    return ProcessStack(pid, read_command(pid), tuple(threads), "proc", problem)


def is_still(pid: int) -> bool:
    """Whether none of its threads is running or runnable, checked twice with a short pause between."""
    before = _thread_times(pid)
    time.sleep(_STILL_S)
    return bool(before) and before == _thread_times(pid)


def _thread_times(pid: int) -> dict[int, bytes]:
    return {tid: read_bytes(f"/proc/{pid}/task/{tid}/schedstat") or b"" for tid in list_threads(pid)}


def ask_faulthandler(
    pid: int, folder: Path, *, limit_s: float, all_threads: bool = False
) -> tuple[tuple[ThreadStack, ...], str]:
    """Signal the process and read what it appended to its dump file. The signal is sent only if our handler is sure
    to catch it, because an uncaught signal kills. Use `all_threads` only if no thread of the process runs."""
    path = folder / f"fh.{pid}"
    number = stack_signal(read_environ(pid)) + (1 if all_threads else 0)
    try:
        before = path.stat().st_size
    except OSError:
        return (), "no dump file: the injected file did not run there"
    if _state(pid) in ("T", "t", "Z", "X", ""):
        return (), "a stopped process runs no handler"
    if not catches_signal(pid, number) or not _holds_open(pid, path):
        return (), f"signal {number} is not armed there"
    if would_cut_a_transfer(pid):
        return (), "not asked: a signal would cut the transfer that it is in"
    try:
        os.kill(pid, number)
    except OSError as error:
        return (), f"signal {number}: {error.strerror}"
    text = _appended(path, before, limit_s)
    threads = parse_faulthandler(text, pid)
    if threads and path.stat().st_size > _LARGEST_DUMP_BYTES and not fatal_part(text):
        os.truncate(path, 0)  # the writer opened it for appending, so it continues at the new end
    return threads, "" if threads else "the process did not answer the signal"


def _appended(path: Path, before: int, limit_s: float) -> str:
    """The text after offset `before`, once it has not grown for a moment. The handler writes it in many small pieces:
    a process that still runs, or waits for a CPU, may have lost the CPU between two of them."""
    end_s = time.monotonic() + limit_s
    pid = int(path.suffix[1:])
    seen, seen_s = before, time.monotonic()
    while time.monotonic() < end_s:
        time.sleep(0.01)
        size = path.stat().st_size
        if size != seen:
            seen, seen_s = size, time.monotonic()
        elif size > before and (_state(pid) not in ("R", "D") or time.monotonic() - seen_s >= _WHOLE_S):
            break
    with open(path, "rb") as file:
        file.seek(before)
        return file.read(_LARGEST_DUMP_BYTES).decode("utf-8", "replace")


def _holds_open(pid: int, path: Path) -> bool:
    try:
        wanted = path.stat()
    except OSError:
        return False
    return next(fds_of(pid, wanted), None) is not None


def _state(pid: int) -> str:
    data = read_bytes(f"/proc/{pid}/stat") or b""
    return chr(data[data.rfind(b")") + 2]) if data else ""


def native_text(pids: Sequence[int], *, deadline_s: float = 10.0) -> str:
    """Native stacks as text, for an incident file. Stops each process for 0.1 to 0.3 s, so once per incident."""
    end_s = time.monotonic() + deadline_s
    parts = []
    for pid in list(dict.fromkeys(pids))[:_AT_ONCE]:
        is_whole = _state(pid) not in ("T", "t", "Z", "") and not would_cut_a_transfer(pid)
        if is_python(pid) and is_whole and end_s > time.monotonic():
            text = next(filter(None, _native_answers(pid, end_s)), "")
            parts.append(f"process {pid}\n{text}" if text else "")
    return "\n".join(filter(None, parts))


def _native_answers(pid: int, end_s: float) -> Iterator[str]:
    # pystack, which is optional, adds the C file and line where debug information exists.
    for name, words in (("pystack", ("remote", "--native")), ("py-spy", ("dump", "--native", "--pid"))):
        tool = find_tool(name)
        started = _start([tool, *words, str(pid)], pid) if tool else None
        text = (_answer(started, end_s) if started else None) or ""
        yield text.rstrip() if started and started.process.returncode == 0 else ""


def forget_dead(stacks_folder: Path) -> int:
    """Delete the empty dump files of processes that have exited; many short-lived children leave thousands. Also the
    FIFOs of their flight recorders: whoever copies the folder would wait at one."""
    for door in stacks_folder.glob("flight.*[0-9]"):
        with contextlib.suppress(OSError, ValueError):
            if door.is_fifo() and not _state(int(door.suffix[1:])):
                door.unlink()
    count = 0
    for path in stacks_folder.glob("fh.*"):
        with contextlib.suppress(OSError, ValueError):
            if not path.stat().st_size and not _state(int(path.suffix[1:])):
                path.unlink()
                count += 1
    return count
