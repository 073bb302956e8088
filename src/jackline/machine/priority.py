"""Lowers the CPU priority of helper processes: if they and the training need the same core, the training gets it.

`nice` alone has no effect for a process in a session of its own: the kernel then weighs whole sessions against each
other (autogroups, on by default in most distributions) and uses niceness only inside one. So the weight of the
session is lowered too. Knows nothing about what a helper does.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

_AUTOGROUP = Path("/proc/self/autogroup")
_TRIES = 8


def step_back(niceness: int) -> None:
    """Lower the priority of this process by `niceness` (0 to 19). Never raises: a failure costs speed only."""
    with contextlib.suppress(OSError):
        now = os.nice(niceness)
        if os.getsid(0) == os.getpid():  # otherwise others, perhaps the training itself, share this session's weight
            _weigh_session(now)


def _weigh_session(niceness: int) -> None:
    """Retries, because the kernel accepts only one such write per 0.1 s from all non-root processes together."""
    fd = os.open(_AUTOGROUP, os.O_WRONLY | os.O_CLOEXEC)
    try:
        for _ in range(_TRIES):
            try:
                os.write(fd, str(niceness).encode())
                return
            except BlockingIOError:
                time.sleep(0.11)
    finally:
        os.close(fd)
