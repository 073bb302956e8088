"""What a command does when the reader of its output has gone away (`| head -1`): it ends quietly."""

from __future__ import annotations

import os


def drop_output() -> None:
    """Discard what is still buffered for stdout: the last flush would meet the closed pipe again."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)
