"""What py-spy and faulthandler print, as stacks. Pure: text in, threads out.

Owns the two formats. Source texts and waits are filled in by others.
"""

from __future__ import annotations

import json
import re
from typing import Any

from jackline.diagnosis.frames import Frame, ThreadStack
from jackline.supervisor.stacks.sources import is_own_code

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
