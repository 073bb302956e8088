"""`jackline.phase`: report the progress of a piece of work, from any script, without torch.

Under `jackline run` it writes protocol lines for the supervisor; without a supervisor it draws a simple bar on a
terminal; otherwise it is silent. Owns: when a line is written and where. Never raises and never slows the work: a
report that cannot be written is dropped. Does not own: reading those lines (supervisor/output/progress.py).
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from pathlib import Path
from types import TracebackType
from typing import Any

from jackline.rundir.layout import LIVE_VARIABLE, RunDir
from jackline.units import format_duration

EVERY_S = 0.2
_BARE = re.compile(r"[^\s\"'\\=]+")


def phase(name: str, items: Iterable[Any] | None = None, *, total: float | None = None, unit: str = "") -> Phase:
    """Report on one piece of work.

        with jackline.phase("tokenise", total=len(docs), unit="docs") as p:
            for doc in docs:
                ...
                p.advance(1)         # or p.update(done)

        for doc in jackline.phase("tokenise", docs, unit="docs"):
            ...

    Without `total` the time left is not known, the rate still is. `JACKLINE=off` makes it silent.
    """
    if total is None and isinstance(items, Sized):
        total = len(items)
    return Phase(name, items, total=total, unit=unit)


class Phase:
    """One piece of work under way. Created by `phase`; thread-safe, and silent in forked children."""

    def __init__(self, name: str, items: Iterable[Any] | None, *, total: float | None, unit: str) -> None:
        self._name = name
        self._items = items
        self._total = total
        self._unit = unit
        self._done = 0.0
        self._said_done: float | None = None
        self._said_s = 0.0
        self._started_s = time.monotonic()
        self._lock = threading.Lock()
        # A forked worker counts only its own work: its numbers would contradict ours.
        self._pid = os.getpid()
        self.on_end: Callable[[], None] | None = None

    @property
    def done(self) -> float:
        return self._done

    def advance(self, count: float = 1) -> None:
        """Report that `count` more are done."""
        if os.getpid() != self._pid:
            return  # checked before taking the lock, which may be held for ever in a forked child
        with self._lock:
            self._done += float(count)
        self._say()

    def update(self, done: float) -> None:
        """Report that `done` are done in total."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            self._done = float(done)
        self._say()

    def __enter__(self) -> Phase:
        self._started_s = time.monotonic()
        self._say()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._say(is_last=True)
        if self.on_end is not None and os.getpid() == self._pid:
            self.on_end()

    def progress(self) -> dict[str, Any]:
        """The progress, for a state file."""
        return {"phase": self._name, "done": self._done, "total": self._total, "unit": self._unit}

    def __iter__(self) -> Iterator[Any]:
        with self:
            for item in self._items or ():
                yield item
                self.advance()

    def _say(self, *, is_last: bool = False) -> None:
        if os.getpid() != self._pid:
            return
        # Another thread may be reporting now: only the last report is worth waiting for.
        if not self._lock.acquire(blocking=is_last, timeout=1.0 if is_last else -1):
            return
        try:
            now_s = time.monotonic()
            is_due = self._said_done is None or is_last or now_s - self._said_s >= EVERY_S
            if is_due and (self._done != self._said_done or is_last):
                is_repeated = self._done == self._said_done
                self._said_s, self._said_done = now_s, self._done
                self._write(now_s, is_last=is_last, is_repeated=is_repeated)
        except Exception:
            pass  # closed descriptors, a full disk, interpreter shutdown: the work matters more
        finally:
            self._lock.release()

    def _write(self, now_s: float, *, is_last: bool, is_repeated: bool) -> None:
        if os.environ.get("JACKLINE", "").lower() == "off" or os.environ.get("RANK", "0") != "0":
            return
        run_dir = os.environ.get("JACKLINE_RUN_DIR")
        if run_dir:
            fd = None if is_repeated else find_output(Path(run_dir), os.environ.get("JACKLINE_ATTEMPT", ""))
            if fd is not None:
                # CR first: it ends a tqdm bar in progress, so that our line is on its own.
                os.write(fd, b"\r" + self.protocol_line().encode("utf-8", "replace") + b"\n")
        elif os.isatty(2):
            end = "\n" if is_last else ""
            os.write(2, f"\r{self._bar(now_s)}\x1b[K{end}".encode("utf-8", "replace"))

    def protocol_line(self) -> str:
        words = [f"phase={_quoted(self._name)}", f"done={_number(self._done)}"]
        if self._total is not None:
            words.append(f"total={_number(self._total)}")
        if self._unit:
            words.append(f"unit={_quoted(self._unit)}")
        return "::jackline " + " ".join(words)

    def _bar(self, now_s: float) -> str:
        rate = self._done / max(1e-9, now_s - self._started_s)
        if self._total:
            share = min(1.0, self._done / self._total)
            left = f", {format_duration((self._total - self._done) / rate)} left" if rate > 0 and share < 1 else ""
            bar = "#" * int(20 * share)
            return f"{self._name} [{bar:20}] {_number(self._done)}/{_number(self._total)} {self._unit}{left}"
        return f"{self._name} {_number(self._done)} {self._unit}, {rate:.1f}/s"


def find_output(run_dir: Path, attempt: str) -> int | None:
    """The descriptor that leads to the supervisor; None when the user redirected both elsewhere.

    A script's stdout may be a file or a pipe of its own (`prepare.py > data.txt`); a protocol line would damage it.
    """
    run = RunDir(run_dir)
    home = run.attempt(int(attempt)) if attempt.isdigit() else run.last_attempt()
    if home is None:
        return None
    ours = {_identity(path) for path in (home.raw_out, home.raw_err)} - {None}
    for fd in (1, 2):
        try:
            status = os.fstat(fd)
        except OSError:
            continue
        if (status.st_dev, status.st_ino) in ours or os.isatty(fd):
            return fd
    return None


def terminal_width(environ: Mapping[str, str]) -> int | None:
    """The width of the terminal in which a supervised command is shown; None without one."""
    width = environ.get("COLUMNS", "")
    is_shown = environ.get(LIVE_VARIABLE) and environ.get("TTY_COMPATIBLE") and environ.get("JACKLINE_RUN_DIR")
    return max(40, int(width)) if is_shown and width.isdigit() else None


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _quoted(text: str) -> str:
    if _BARE.fullmatch(text):
        return text
    cleaned = re.sub(r"[\x00-\x1f\x7f]+", " ", text)
    return '"' + cleaned.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _number(value: float) -> str:
    return str(int(value)) if float(value).is_integer() else f"{value:.6f}"
