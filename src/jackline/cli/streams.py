"""Our stdout and stderr: nothing that could fool a terminal, and no password, leaves through them.

Names, notes and error texts come from run folders that anybody may have written. Every command prints through these
streams, so a text that was forgotten elsewhere is filtered here. Only two things go around them: what the viewer
draws itself (view/screen.py), and bytes that a user asked for as they are (`write_exact`).
"""

from __future__ import annotations

import io
import os
import sys
from typing import Any, TextIO

from jackline.cli.text.safety import safe_output


class SafeBytes:
    """The binary stream below a text stream. Everything passes `safe_output`."""

    def __init__(self, below: Any, encoding: str, *, has_colors: bool) -> None:
        self.below = below
        self._encoding = encoding
        self._has_colors = has_colors

    def write(self, data: bytes | memoryview) -> int:
        # TextIOWrapper hands over whole characters, so nothing is cut in the middle of one.
        self.below.write(safe_output(bytes(data), self._encoding, with_colors=self._has_colors))
        return len(data)

    def close(self) -> None:
        """The stream below is not ours to close."""
        self.below.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.below, name)


def guard_streams() -> None:
    """Put the filter between Python's standard streams and their descriptors. Called once, by the command line."""
    sys.stdout, sys.stderr = _guarded(sys.stdout), _guarded(sys.stderr)


def write_exact(data: bytes) -> None:
    """Write bytes to stdout around the filter."""
    sys.stdout.flush()
    stream = sys.stdout.buffer
    below = stream.below if isinstance(stream, SafeBytes) else stream
    below.write(data)
    below.flush()


def _guarded(stream: TextIO) -> TextIO:
    below = getattr(stream, "buffer", None)
    if below is None or isinstance(below, SafeBytes):
        return stream
    encoding = stream.encoding or "utf-8"
    # Our own colours pass where they are wanted; texts of a run have lost theirs before (text/safety.py).
    has_colors = (stream.isatty() or bool(os.environ.get("FORCE_COLOR"))) and not os.environ.get("NO_COLOR")
    buffer: Any = SafeBytes(below, encoding, has_colors=has_colors)
    return io.TextIOWrapper(
        buffer,
        encoding,
        errors="backslashreplace",
        line_buffering=bool(getattr(stream, "line_buffering", False)),
        write_through=bool(getattr(stream, "write_through", False)),
    )
