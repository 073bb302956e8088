"""Reads the files in which a process has its code: the text of a Python line, and where a bash script is.

Owns reading them without ever blocking on a dead file system. bash keeps its script open as descriptor 255 and,
before it starts a program, puts the position of that descriptor behind the command it has read. For a loop or a
function that is the end of all of it, so the line that names the program which bash has started is looked for in the
text. Other shells read ahead: nothing is said about them.
"""

from __future__ import annotations

import functools
import os
import re
import stat
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import PurePath
from typing import TypeVar

from jackline.diagnosis.frames import Frame, ThreadStack
from jackline.diagnosis.user_code import came_with_pip
from jackline.machine.proc import list_tree, read_command
from jackline.machine.procfs import read_bytes, read_link, read_text

T = TypeVar("T")
_LARGEST_BYTES = 4 << 20
_LONGEST_LINE = 160
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]+")
_SCRIPT_FD = 255
_MOST_CHILDREN = 8
_NO_CALL = re.compile(rb"#|[\w.+]+=\S*$")  # a comment, or a variable that is set
# Where a command begins: a line, what follows a separator or a keyword, and what other programs start.
_CALLED = (
    rb"(?:^|[;&|({!`])\s*(?:(?:then|do|else|exec|time|if|elif|while|until|sudo|nohup|env|nice|timeout|command|xargs)\s+"
    rb"(?:[^;&|\"']*\s)?)?(?:[\w./~-]*/)?"
)
_END_OF_BLOCK = re.compile(rb"(done|fi|esac|[)}])(?![\w-])")


class SourceReader:
    """Fills in source texts within a time limit.

    A script is often on the same network disk that hangs, and a read there cannot be interrupted. So it is done in a
    thread that may block forever, and no other is started while one is blocked.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None

    def fill(self, pid: int, threads: Sequence[ThreadStack], *, limit_s: float) -> tuple[ThreadStack, ...]:
        """The same threads with `source` texts; without them when the disk does not respond."""
        return self.read(lambda: _with_sources(pid, threads), tuple(threads), limit_s=limit_s)

    def read(self, work: Callable[[], T], otherwise: T, *, limit_s: float) -> T:
        """The result of `work`, which reads files of the user's; `otherwise` when the disk does not respond."""
        if self._thread is not None and self._thread.is_alive():
            return otherwise
        found: list[T] = []
        self._thread = threading.Thread(target=lambda: found.append(work()), daemon=True)
        self._thread.start()
        self._thread.join(limit_s)
        return found[0] if found else otherwise


def _with_sources(pid: int, threads: Sequence[ThreadStack]) -> tuple[ThreadStack, ...]:
    started_s = _start_time_s(pid)
    folder = read_link(f"/proc/{pid}/cwd")
    return tuple(
        replace(thread, frames=tuple(_with_source(frame, folder, started_s) for frame in thread.frames))
        for thread in threads
    )


def _with_source(frame: Frame, folder: str | None, started_s: float | None) -> Frame:
    if frame.line <= 0 or frame.file.startswith("<") or not frame.file.endswith((".py", ".pyw", ".ipy")):
        return frame
    path = frame.file if os.path.isabs(frame.file) else os.path.join(folder or "", frame.file)
    try:
        status = os.stat(path)  # noqa: PTH116 - costs 2 us per frame, Path.stat 10
    except (OSError, ValueError):
        return frame
    if frame.is_user and came_with_pip(os.path.dirname(path)):
        frame = replace(frame, is_user=False)
    is_plain = stat.S_ISREG(status.st_mode) and status.st_size <= _LARGEST_BYTES
    # A script edited while it runs no longer shows the code that runs: better no text than a wrong one.
    is_edited = frame.is_user and started_s is not None and status.st_mtime > started_s + 2
    if not is_plain or is_edited:
        return frame
    return replace(frame, file=path, source=read_line(path, status.st_mtime_ns, frame.line))


@functools.lru_cache(maxsize=4096)
def read_line(path: str, mtime_ns: int, line: int) -> str:
    """Line `line` of a file, stripped and safe to print; '' when there is none."""
    try:
        with open(path, "rb") as file:
            lines = file.read(_LARGEST_BYTES).split(b"\n")
    except OSError:
        return ""
    return shown_line(lines[line - 1]) if line <= len(lines) else ""


def shown_line(line: bytes) -> str:
    return _CONTROL.sub(" ", line.decode("utf-8", "replace").strip())[:_LONGEST_LINE]


def _start_time_s(pid: int) -> float | None:
    """When the process started, as time.time(); None when it no longer exists."""
    data = read_bytes(f"/proc/{pid}/stat") or b""
    fields = data[data.rfind(b")") + 2 :].split()
    booted = re.search(rb"^btime (\d+)", read_bytes("/proc/stat") or b"", re.MULTILINE)
    if len(fields) < 20 or booted is None:
        return None
    return int(booted[1]) + int(fields[19]) / os.sysconf("SC_CLK_TCK")


# -- bash -----------------------------------------------------------------------------------------------------------


def script_frames(pid: int) -> tuple[Frame, ...]:
    """The line of the program that bash has started, then that of the command it is in; () for everything else."""
    path, size = _position(pid)
    data = _read(f"/proc/{pid}/fd/{_SCRIPT_FD}", size, _start_time_s(pid)) if path else b""
    lines = data.rstrip().split(b"\n")
    if not data.strip():
        return ()
    command = _frame(path, lines, len(lines))
    inner = _line_of_program(pid, lines)
    if inner in (None, len(lines)):
        return (command,)
    found = _frame(path, lines, inner or 0)
    # The end of a block says nothing; the line that calls a function does.
    return (found,) if _END_OF_BLOCK.match(lines[-1].strip()) else (found, command)


def _position(pid: int) -> tuple[str, int]:
    """The script of a bash and how far it has read it; '' for any other process."""
    if PurePath(read_link(f"/proc/{pid}/exe") or "").name != "bash":
        return "", 0
    path = (read_link(f"/proc/{pid}/fd/{_SCRIPT_FD}") or "").removesuffix(" (deleted)")
    found = re.match(r"pos:\s*(\d+)", read_text(f"/proc/{pid}/fdinfo/{_SCRIPT_FD}") or "")
    is_file = path.startswith("/") and not path.startswith("/dev/")
    return (path, int(found[1])) if found and is_file and int(found[1]) <= _LARGEST_BYTES else ("", 0)


def _read(path: str, size: int, started_s: float | None) -> bytes:
    """The beginning of a script; b'' of one that was edited since its process has started: its lines have moved."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return b""
    try:
        status = os.fstat(fd)
        is_edited = started_s is None or status.st_mtime > started_s + 2
        return b"" if is_edited or not stat.S_ISREG(status.st_mode) else os.pread(fd, size, 0)
    except OSError:
        return b""
    finally:
        os.close(fd)


def _line_of_program(pid: int, lines: list[bytes]) -> int | None:
    """The last line that calls a program which bash has started, else the last that names it; None when none does."""
    for child in list_tree(pid)[1 : 1 + _MOST_CHILDREN]:
        name = re.escape(PurePath(read_command(child).partition(" ")[0]).name.encode())
        for before in (_CALLED, rb"(?<![\w.-])") if name else ():
            named = re.compile(before + name + rb"(?![\w-])")
            found = [number for number, line in enumerate(lines, 1) if named.search(line.strip())]
            found = [number for number in found if not _NO_CALL.match(lines[number - 1].strip())]
            if found:
                return found[-1]
    return None


def _frame(path: str, lines: list[bytes], number: int) -> Frame:
    return Frame("bash", path, number, shown_line(lines[number - 1]), is_user=True)
