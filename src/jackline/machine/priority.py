"""Helpers step back: where they and the training want the same core, the training gets it.

`nice` alone does nothing for a process that has a session of its own: the kernel then weighs whole sessions against
each other (autogroups, on by default in most distributions) and niceness only inside one. So the session's own weight
is lowered too. Owns that; knows nothing of what a helper does.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

_AUTOGROUP = Path("/proc/self/autogroup")


def step_back(niceness: int) -> None:
    """Lowers this process against all others, by `niceness` (0 to 19). Never an error: slower, not wrong."""
    with contextlib.suppress(OSError):
        now = os.nice(niceness)
        if os.getsid(0) == os.getpid():  # else others, perhaps the training itself, share this session's weight
            _AUTOGROUP.write_text(str(now))
