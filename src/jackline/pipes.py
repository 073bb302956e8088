"""Lets a command exit quietly when the reader of its output has exited (`| head -1`)."""

from __future__ import annotations

import os


def drop_output() -> None:
    """Discard what is still buffered for stdout, because the last flush would hit the closed pipe again."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)
