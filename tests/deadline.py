"""How long a test waits for a state before it says what it waited for in vain.

Not a guess at how fast a machine is: only a hang meets it. (On a virtual machine at a third of its speed, with five
workers on two cores, one healthy test took 194 s.) It is shorter than pytest's own limit of 1,200 s, which ends
a test without telling what was missing.
"""

from __future__ import annotations

import fcntl
from pathlib import Path

HANGS_S = 600.0


def read_best_name(checkpoints: Path) -> str:
    """Where `best` points once the writer is done: it may outlive the training, to read back what it wrote."""
    with (checkpoints / "writer.lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return (checkpoints / "best").read_text().strip()
