"""What the trainer says, and that it is never silent: a line, and a thread that speaks up when no line has come.

Owns stdout of the trainer process: tags, flushing, and the sign of life inside every phase (an import, a compile, a
long step). Where a live view draws the signs of life in place, they go to its supervisor, and a line is printed once
a minute. Does not own what a step line says (step_line.py). Standard library only: it is imported before torch.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator

from jackline.rundir.layout import LIVE_VARIABLE
from jackline.session.phase import Phase, terminal_width
from jackline.units import fold, format_duration

SILENT_AT_MOST_S = 1.7  # under the promised 2 s, with room for a busy machine
MINUTE_S = 60.0


class Console:
    """Lines by tag. `what` says what it is doing, for the sign of life."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._width = terminal_width(os.environ)
        self.is_live = bool(os.environ.get(LIVE_VARIABLE) and os.environ.get("JACKLINE_RUN_DIR"))
        self._lock = threading.Lock()
        self._said_s = self._began_s = clock()
        self._tag = "start"
        self._detail: str | Callable[[], str] = "starting"
        self._is_over = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Console:
        self._thread = threading.Thread(target=self._watch, daemon=True, name="jackline-console")
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_over.set()
        if self._thread is not None:
            self._thread.join(timeout=5.0)

    @property
    def detail(self) -> str:
        """What the next sign of life would tell."""
        return self._detail if isinstance(self._detail, str) else self._detail()

    @property
    def silent_s(self) -> float:
        return self._clock() - self._said_s

    def say(self, text: str, tag: str | None = None) -> None:
        """Now, whole, and never an error: a closed pipe must not end a training."""
        with self._lock:
            self._said_s = self._clock()
            with contextlib.suppress(OSError, ValueError):
                mark = f"[{tag or self._tag}] "
                sys.stdout.write(fold(mark + text, self._width, len(mark)) + "\n")
                sys.stdout.flush()

    @contextlib.contextmanager
    def phase(self, tag: str, text: str) -> Iterator[None]:
        """Says `text`, and while the block runs that it still does. Phases may lie in one another."""
        before = self._tag, self._detail, self._began_s
        self._tag, self._detail, self._began_s = tag, text, self._clock()
        self.say(text)
        try:
            yield
        finally:
            self._tag, self._detail, self._began_s = before

    @contextlib.contextmanager
    def during(self, text: str) -> Iterator[None]:
        """While the block runs the sign of life tells `text`; no line of its own, unlike a phase."""
        before = self._detail, self._began_s
        self._detail, self._began_s = text, self._clock()
        try:
            yield
        finally:
            self._detail, self._began_s = before

    def now(self, detail: str | Callable[[], str]) -> None:
        """What the sign of life tells from here on: how far the phase is. A function is asked when it is said."""
        self._detail = detail

    def begin(self) -> None:
        """The seconds of the sign of life count from here: a step, say, and not all of the training."""
        self._began_s = self._clock()

    @property
    def columns(self) -> int | None:
        """The width of a line beside its tag, on the terminal of a live view; None where lines may be long."""
        return None if self._width is None else self._width - len("[train] ")

    def _watch(self) -> None:
        shown_s = self._clock()
        while not self._is_over.wait(max(0.05, SILENT_AT_MOST_S - min(self.silent_s, self._clock() - shown_s))):
            if self.is_live and self.silent_s < MINUTE_S:
                shown_s = self._clock()
                self._show(self.detail)
            elif self.silent_s >= SILENT_AT_MOST_S:
                shown_s = self._clock()
                self.say(f"... {self.detail}, {format_duration(self._clock() - self._began_s)} so far")

    def _show(self, detail: str) -> None:
        """Draw it in place: the supervisor reads it, and viewers do not print it."""
        with self._lock, contextlib.suppress(OSError, ValueError):
            sys.stdout.write(Phase(detail, None, total=None, unit="").protocol_line() + "\n")
            sys.stdout.flush()
