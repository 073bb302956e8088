"""Finding and ending processes that a test started, wherever they went, by a mark in their environment."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

from tests.deadline import HANGS_S

MARK = "ZOO_MARK"
GOES_AWAY_WITHIN_S = HANGS_S


def marked_pids(mark: str, name: str = MARK) -> list[int]:
    """Processes whose environment carries the mark; only ever ours."""
    needle = f"{name}={mark}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if needle in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
    return found


def wait_until_gone(mark: str, patience_s: float = GOES_AWAY_WITHIN_S, name: str = MARK) -> list[str]:
    """The command lines of marked processes that are still there after `patience_s`."""
    deadline_s = time.monotonic() + patience_s
    while (pids := marked_pids(mark, name)) and time.monotonic() < deadline_s:
        time.sleep(0.1)
    return [f"{pid} {command_line(pid)}" for pid in pids]


def end_marked(mark: str, name: str = MARK) -> None:
    """Kill by pid whatever still carries the mark."""
    for _ in range(3):
        for pid in marked_pids(mark, name):
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        if not wait_until_gone(mark, 2.0, name):
            return


def command_line(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")[:200]
    return "?"
