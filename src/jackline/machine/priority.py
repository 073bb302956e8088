"""Helpers step back: where they and the training want the same core, the training gets it.

`nice` alone does nothing for a process that has a session of its own: the kernel then weighs whole sessions against
each other (autogroups, on by default in most distributions) and niceness only inside one. So the session's own weight
is lowered too. Owns that; knows nothing of what a helper does.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

_AUTOGROUP = Path("/proc/self/autogroup")
_TRIES = 8


def step_back(niceness: int) -> None:
    """Lowers this process against all others, by `niceness` (0 to 19). Never an error: slower, not wrong."""
    with contextlib.suppress(OSError):
        now = os.nice(niceness)
        if os.getsid(0) == os.getpid():  # else others, perhaps the training itself, share this session's weight
            _weigh_session(now)


def _weigh_session(niceness: int) -> None:
    """The kernel takes one such word in a tenth of a second from all who are not root together."""
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
