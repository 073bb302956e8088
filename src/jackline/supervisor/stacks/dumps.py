"""What py-spy and faulthandler print, as stacks, and the text of a source line.

Owns the two formats, reading source files of another process without ever blocking on a dead file system, and whose
code a line is. Waits are filled in by others.
"""

from __future__ import annotations

import functools
import json
import os
import re
import stat
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from jackline.diagnosis.frames import Frame, ThreadStack
from jackline.diagnosis.user_code import is_user_file
from jackline.machine.procfs import read_bytes, read_link

_LARGEST_BYTES = 4 << 20
_LONGEST_LINE = 160
# Written by a compiler while the program runs: nobody's own code.
_GENERATED = re.compile(r"/torchinductor_|/torch_extensions/|/tmp/tmp\w+/.*triton")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]+")


def is_own_code(file: str) -> bool:
    """The person's own code: not Python's, not a package's, not Jackline's, not generated."""
    return bool(file) and is_user_file(file) and not _GENERATED.search(file)


class SourceReader:
    """Fills in source texts within a time limit.

    A script often lies on the very network disk that hangs, and a read there cannot be interrupted: it is done in
    a thread that may be lost, and none is started while one is lost.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None

    def fill(self, pid: int, threads: Sequence[ThreadStack], *, limit_s: float) -> tuple[ThreadStack, ...]:
        """The same threads with `source` texts; without them when the disk does not answer."""
        if self._thread is not None and self._thread.is_alive():
            return tuple(threads)
        filled: list[tuple[ThreadStack, ...]] = []
        self._thread = threading.Thread(target=lambda: filled.append(_with_sources(pid, threads)), daemon=True)
        self._thread.start()
        self._thread.join(limit_s)
        return filled[0] if filled else tuple(threads)


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
        status = os.stat(path)  # noqa: PTH116 - 2 us, not 10, for every frame
    except (OSError, ValueError):
        return frame
    is_plain = stat.S_ISREG(status.st_mode) and status.st_size <= _LARGEST_BYTES
    # A script edited while it runs no longer says what runs: better no text than a wrong one.
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
    text = lines[line - 1].decode("utf-8", "replace").strip() if line <= len(lines) else ""
    return _CONTROL.sub(" ", text)[:_LONGEST_LINE]


def _start_time_s(pid: int) -> float | None:
    """When the process started, as time.time(); None when it is gone."""
    data = read_bytes(f"/proc/{pid}/stat") or b""
    fields = data[data.rfind(b")") + 2 :].split()
    booted = re.search(rb"^btime (\d+)", read_bytes("/proc/stat") or b"", re.MULTILINE)
    if len(fields) < 20 or booted is None:
        return None
    return int(booted[1]) + int(fields[19]) / os.sysconf("SC_CLK_TCK")


FATAL = "Fatal Python error:"
_HEADER = re.compile(r"^(Current thread|Thread) (0x[0-9a-f]+)(?: \[(.*)\])? \(most recent call first\):")
_ALONE = "Stack (most recent call first):"  # a dump of one thread, the one that got the signal
_FRAME = re.compile(r'^  File "(.*)", line (\d+|\?\?\?) in (.*)$')
_UNNAMED = re.compile(r"0x[0-9a-f]+")


def parse_py_spy(text: str, pid: int) -> tuple[ThreadStack, ...]:
    """The threads of `py-spy dump --json`, the main one first. Raises ValueError when it is no such text."""
    value = json.loads(text)
    if not isinstance(value, list):
        raise ValueError("not a list of threads")
    threads = [_thread(entry, pid) for entry in value if isinstance(entry, dict) and entry.get("pid", pid) == pid]
    return tuple(sorted(threads, key=lambda thread: not thread.is_main))


def _thread(entry: dict[str, Any], pid: int) -> ThreadStack:
    name = str(entry.get("thread_name") or "")
    # Missing for interpreters py-spy knows half; then the name is all there is.
    tid = entry.get("os_thread_id")
    is_main = tid == pid if tid else name == "MainThread"
    frames = tuple(_frame(frame) for frame in entry.get("frames") or () if not _is_unnamed(frame))
    return ThreadStack(int(tid or entry.get("thread_id") or 0), name, frames, is_main)


def _frame(entry: dict[str, Any]) -> Frame:
    file = str(entry.get("filename") or "")
    is_native = bool(entry.get("module")) and not file.endswith(".py")
    return Frame(
        str(entry.get("name") or "?"), file, int(entry.get("line") or 0), "", not is_native and is_own_code(file)
    )


def _is_unnamed(entry: dict[str, Any]) -> bool:
    """A native address without a name tells nobody anything."""
    return _UNNAMED.fullmatch(str(entry.get("name") or "")) is not None


def parse_faulthandler(text: str, pid: int) -> tuple[ThreadStack, ...]:
    """The threads of the last whole dump in `text`, the main one first.

    faulthandler walks from the newest thread to the oldest, so the main thread is the last; a dump cut off at 100
    threads ends in '...' and has no main thread. A dump of one thread is the main one's, to whom the kernel gives a
    signal sent to the process.
    """
    blocks: list[tuple[str, str, list[Frame]]] = []
    seen: set[str] = set()
    is_cut = False
    for line in text.splitlines():
        if line.startswith(_ALONE):
            blocks, seen, is_cut = [("0x0", "", [])], set(), False
        elif header := _HEADER.match(line):
            if header[2] in seen:  # the same thread again: the next dump has begun
                blocks, seen = [], set()
            seen.add(header[2])
            blocks.append((header[2], header[3] or "", []))
        elif blocks and (frame := _FRAME.match(line)):
            number = int(frame[2]) if frame[2].isdigit() else 0
            blocks[-1][2].append(Frame(frame[3], frame[1], number, "", is_own_code(frame[1])))
        elif line == "...":
            is_cut = True
    threads = [ThreadStack(int(ident, 16), name, tuple(frames)) for ident, name, frames in blocks]
    if threads and not is_cut:
        last = threads.pop()
        threads.insert(0, ThreadStack(pid, last.name or "MainThread", last.frames, is_main=True))
    return tuple(threads)


def fatal_part(text: str) -> str:
    """What was written at a fatal signal, without the dumps that were asked for; '' when there was none."""
    start = text.find(FATAL)
    return text[start:] if start >= 0 else ""
