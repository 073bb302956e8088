"""The text of a source line, and whose line it is.

Owns reading source files of another process without ever blocking on a dead file system, and the rule of what is
the person's own code. Knows nothing of how a stack was read.
"""

from __future__ import annotations

import functools
import os
import re
import stat
import threading
from collections.abc import Sequence
from dataclasses import replace

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
