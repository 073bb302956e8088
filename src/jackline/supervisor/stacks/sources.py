"""Reads the files in which a process has its code: the text of a Python line, and where a bash script is.

Owns reading them without ever blocking on a dead file system. bash keeps its script open as descriptor 255 and,
before it starts a program, puts the position of that descriptor behind the command it has read. For a loop or a
function that is the end of all of it, so the line that names the program which bash has started is looked for in the
text. Other shells read ahead: nothing is said about them.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import stat
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import PurePath
from typing import TypeVar

from jackline.diagnosis.frames import SHELL, Frame, ThreadStack
from jackline.diagnosis.user_code import came_with_pip
from jackline.machine.proc import list_tree
from jackline.machine.procfs import read_bytes, read_link, read_text
from jackline.rundir.access.secrets import without_credentials

T = TypeVar("T")
_LARGEST_BYTES = 4 << 20
_LONGEST_LINE = 160
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]+")
_SCRIPT_FD = 255
_LARGEST_SCRIPT_BYTES, _LONGEST_SHELL_LINE = 256 << 10, 1000
_OPENERS = {
    b"done": rb"for|while|until|select",
    b"fi": rb"if",
    b"esac": rb"case",
    b"}": rb"\{|function|[\w:.-]+\s*\(\s*\)\s*\{",
    b")": rb"\(",
}
_BEFORE_COMMANDS = frozenset(
    b"then do else exec time if elif while until sudo nohup env nice timeout command xargs stdbuf".split()
)
_INTERPRETER = re.compile(rb"(python|pypy|perl|ruby|node|sh|bash|dash)[\d.]*")


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

        def run() -> None:
            with contextlib.suppress(OSError, ValueError):  # a name that no file can have is a ValueError
                found.append(work())

        self._thread = threading.Thread(target=run, daemon=True)
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
    """The line of the program that bash has started, then that of the command it is in; () for everything else.

    The line inside of a loop or a function is told only where a single one can be meant.
    """
    path, size = _position(pid)
    data = _read(f"/proc/{pid}/fd/{_SCRIPT_FD}", size, _start_time_s(pid)) if path else b""
    lines = data.rstrip().split(b"\n")
    if not data.strip():
        return ()
    block = _block_that_ends(lines)
    if block is not None:
        inner = _only_call(pid, lines, block)
        return (_frame(path, lines, block[0] if inner is None else inner),)
    number = _first_line(lines)
    command = _frame(path, lines, number)
    body = _body_of(lines, (_words(lines[number - 1]) or [b""])[0])
    inner = _only_call(pid, lines, body) if body else None
    return (command,) if inner is None else (_frame(path, lines, inner), command)


def _position(pid: int) -> tuple[str, int]:
    """The script of a bash and how far it has read it; '' for any other process."""
    if PurePath(read_link(f"/proc/{pid}/exe") or "").name != "bash":
        return "", 0
    path = (read_link(f"/proc/{pid}/fd/{_SCRIPT_FD}") or "").removesuffix(" (deleted)")
    found = re.match(r"pos:\s*(\d+)", read_text(f"/proc/{pid}/fdinfo/{_SCRIPT_FD}") or "")
    is_file = path.startswith("/") and not path.startswith("/dev/")
    return (path, int(found[1])) if found and is_file and int(found[1]) <= _LARGEST_SCRIPT_BYTES else ("", 0)


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


def _first_line(lines: list[bytes]) -> int:
    """Where the last command begins: before continued lines, and before its here-document."""
    number = len(lines)
    ends = re.compile(rb"<<-?\s*[\"'\\]?" + re.escape(lines[-1].strip()) + rb"[\"']?(?!\w)")
    begins = [at for at, line in enumerate(lines[:-1], 1) if ends.search(line[:_LONGEST_SHELL_LINE])]
    number = begins[-1] if begins else number
    while number > 1 and lines[number - 2].rstrip().endswith(b"\\"):
        number -= 1
    return number


def _block_that_ends(lines: list[bytes]) -> tuple[int, int] | None:
    """First and last line of the loop, condition or group whose end was read last; None when it was a command."""
    end = re.match(rb"(\s*)(done|fi|esac|\}|\))(?![\w-])", lines[-1])
    if end is None:
        return None
    opener = re.compile(rb"(\s*)(" + _OPENERS[end[2]] + rb")(?![\w-])")
    for number in range(len(lines), 0, -1):
        found = opener.match(lines[number - 1])
        if found and len(found[1].expandtabs()) <= len(end[1].expandtabs()):
            return number, len(lines)
    return len(lines), len(lines)


def _body_of(lines: list[bytes], name: bytes) -> tuple[int, int] | None:
    """First and last line of a function of this script."""
    if not re.fullmatch(rb"[\w:.-]+", name):
        return None
    head = re.compile(rb"\s*(?:function\s+" + re.escape(name) + rb"\b|" + re.escape(name) + rb"\s*\(\s*\))")
    begins = [number for number, line in enumerate(lines, 1) if head.match(line)]
    if not begins:
        return None
    if lines[begins[-1] - 1].rstrip().endswith(b"}"):
        return begins[-1], begins[-1]
    ends = [number for number, line in enumerate(lines, 1) if number > begins[-1] and line.startswith(b"}")]
    return begins[-1], ends[0] if ends else begins[-1]


def _only_call(pid: int, lines: list[bytes], block: tuple[int, int]) -> int | None:
    """The line of a block that calls the program which bash has started last; None when no line does, or several."""
    arguments = _arguments_of_last_child(pid)
    if not arguments:
        return None
    numbers = range(block[0], block[1] + 1)
    names = [os.path.basename(word) for word in arguments[:2]]
    # An interpreter is named by a script's first line, and the script by the command.
    names = names[::-1] if _INTERPRETER.fullmatch(names[0]) else names[:1]
    for name in filter(None, names):
        found = [number for number in numbers if _calls(lines[number - 1], name)]
        if len(found) > 1:
            exact = [number for number in found if all(word in lines[number - 1] for word in arguments[1:])]
            found = exact or found
        if found:
            return found[0] if len(found) == 1 else None
    return None


def _arguments_of_last_child(pid: int) -> list[bytes]:
    children = [one for one in list_tree(pid)[1:] if _parent(one) == pid]
    newest = max(children, key=lambda one: (_start_time_s(one) or 0.0, one), default=None)
    data = (read_bytes(f"/proc/{newest}/cmdline") or b"") if newest is not None else b""
    return [word for word in data.split(b"\0") if word]


def _parent(pid: int) -> int:
    data = read_bytes(f"/proc/{pid}/stat") or b""
    fields = data[data.rfind(b")") + 2 :].split()
    return int(fields[1]) if len(fields) > 1 else 0


def _calls(line: bytes, name: bytes) -> bool:
    """Whether a line calls this program in the foreground, as far as a line alone tells."""
    if len(line) > _LONGEST_SHELL_LINE or line.rstrip().endswith(b"&") or line.lstrip().startswith(b"#"):
        return False
    return any(_words(part)[:1] == [name] for part in re.split(rb"[;&|(){}!`]", line))


def _words(command: bytes) -> list[bytes]:
    """The words of a command from its program on, which has no folder: without keywords, variables that are set, and
    programs that start others, with their options."""
    words = command.split()
    is_wrapped = False
    while words:
        word = os.path.basename(words[0].strip(b"\"'"))
        is_option = is_wrapped and re.match(rb"[-+\d]", words[0]) is not None
        if not (word in _BEFORE_COMMANDS or is_option or re.match(rb"\w+\+?=", words[0])):
            return [word, *words[1:]]
        is_wrapped = is_wrapped or word in _BEFORE_COMMANDS
        words = words[1:]
    return []


def _frame(path: str, lines: list[bytes], number: int) -> Frame:
    return Frame(SHELL, path, number, without_credentials(shown_line(lines[number - 1])), is_user=True)
