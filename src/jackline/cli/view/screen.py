"""The viewer's screen: the child's bytes unchanged, our own lines between them, one status line below.

Owns: which type of surface this is, colours, and drawing and removing the status line without damaging a progress
bar. If the surface goes away, it stops writing and tells the viewer. Also what comes from there: signals, whose
Ctrl-C is whose, and typed lines (--tty). Does not own: what is printed, or what a signal means for the run
(showing.py).

It tracks where the child has left the cursor well enough for progress bars; it is not a terminal emulator.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import select
import signal
import stat
import threading
from collections.abc import Mapping
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Literal

from jackline.cli.text.paint import Tone, cut_to_cells, num_cells, paint, wants_color
from jackline.cli.text.safety import safe_output
from jackline.rundir.access.writing import open_own_fifo
from jackline.rundir.layout import AttemptDir
from jackline.units import fold

MAX_ROW_BYTES = 4096
_MAX_ROWS_UP = 100
_CSI = re.compile(rb"\x1b\[[0-?]*[ -/]*[@-~]|[\x00-\x1f]")
_MOVE = re.compile(rb"\x1b\[(\d{0,3})([ABEF])|\n")


class ChildRow:
    """The row that the child is writing now, and how many of its rows are below."""

    def __init__(self) -> None:
        self.text = b""
        self.ends_with_cr = False
        self.rows_below = 0
        self.is_one_of_several = False  # the cursor moved down to a row that was written before

    @property
    def is_open(self) -> bool:
        """Whether the row has text, or rows below belong to the child: a progress bar, a prompt."""
        return bool(self.text) or self.rows_below > 0 or self.is_one_of_several

    def feed(self, data: bytes) -> None:
        if not data:
            return
        newline = data.rfind(b"\n")
        if self.rows_below or b"\x1b[" in data:
            self._follow(data)
        elif newline >= 0:
            self.is_one_of_several = False
        if newline >= 0:
            self.text, self.ends_with_cr = b"", False
            data = data[newline + 1 :]
        for number, part in enumerate(data[-MAX_ROW_BYTES:].split(b"\r")):
            if part:
                overwrites = number > 0 or self.ends_with_cr
                self.text = (part if overwrites else self.text + part)[-MAX_ROW_BYTES:]
                self.ends_with_cr = False
            if number > 0 and not part:
                self.ends_with_cr = True
        if not self.text:
            self.ends_with_cr = False

    @property
    def column(self) -> int:
        """How many cells the cursor is from the left, as if the row had no end."""
        return 0 if self.ends_with_cr else num_cells(_CSI.sub(b"", self.text).decode("utf-8", "replace"))

    def redraw(self) -> bytes:
        """The bytes that restore the row and the position of the cursor."""
        return self.text + (b"\r" if self.ends_with_cr else b"")

    def _follow(self, data: bytes) -> None:
        for move in _MOVE.finditer(data):
            count = int(move[1] or 1) if move[2] else 1
            if move[2] in (b"A", b"F"):
                self.rows_below = min(self.rows_below + count, _MAX_ROWS_UP)
                continue
            self.is_one_of_several = self.rows_below >= count
            self.rows_below = max(self.rows_below - count, 0)


Surface = Literal["terminal", "notebook", "plain"]
MARK = "[jackline] "
_ERASE = b"\r\x1b[2K"
_NOTEBOOK_PREFIXES = ("COLAB_", "KAGGLE_")
# These errors mean that the reader has exited, so nobody will see what we write there.
_GONE = (errno.EPIPE, errno.EIO, errno.ECONNRESET, errno.ENXIO)


def choose_surface(env: Mapping[str, str], *, is_terminal: bool, is_cell_pipe: bool) -> Surface:
    """`is_terminal` and `is_cell_pipe` are facts about stderr, where our own lines go."""
    is_notebook = "JPY_PARENT_PID" in env or any(name.startswith(_NOTEBOOK_PREFIXES) for name in env)
    if is_notebook and (is_terminal or is_cell_pipe):
        return "notebook"
    return "terminal" if is_terminal and env.get("TERM") != "dumb" else "plain"


def choose_color(env: Mapping[str, str], surface: Surface) -> bool:
    return wants_color(env, is_terminal=surface != "plain")


def detect_surface(env: Mapping[str, str], err_fd: int = 2) -> Surface:
    is_terminal = is_tty(err_fd)
    return choose_surface(env, is_terminal=is_terminal, is_cell_pipe=not is_terminal and leads_to_a_cell(err_fd))


def leads_to_a_cell(fd: int) -> bool:
    """Whether this is the pipe through which a notebook kernel shows its own output (`subprocess.run` in a cell).

    Any other pipe in a notebook is a user's `| tee log`, and a log must not be full of CRs.
    """
    try:
        ours = os.fstat(fd)
        if not stat.S_ISFIFO(ours.st_mode) and not stat.S_ISSOCK(ours.st_mode):
            return False
        parent = Path(f"/proc/{os.getppid()}")
        if b"kernel" not in (parent / "cmdline").read_bytes():
            return False
        theirs = [(parent / "fd" / name).stat() for name in ("1", "2")]
    except OSError:
        return False
    return any((ours.st_dev, ours.st_ino) == (one.st_dev, one.st_ino) for one in theirs)


def is_tty(fd: int) -> bool:
    try:
        return os.isatty(fd)
    except OSError:
        return False


class Screen:
    """The two descriptors of a viewer."""

    def __init__(
        self, surface: Surface, *, out_fd: int = 1, err_fd: int = 2, use_color: bool = False, is_quiet: bool = False
    ) -> None:
        self.surface = surface
        self._is_quiet = is_quiet
        self._out, self._err = out_fd, err_fd
        self._use_color = use_color
        self._dead: set[int] = set()
        self.is_reader_gone = False
        self.problem = ""
        self._row = ChildRow()
        # The child and the status line share a terminal only if stdout goes there too; with `> out.txt` it is ours.
        self._is_shared = _same_place(out_fd, err_fd) or (is_tty(out_fd) and is_tty(err_fd))
        self._has_cell_out = surface == "notebook" and (is_tty(out_fd) or leads_to_a_cell(out_fd))
        self._status = b""
        self._is_below = False

    # -- called by the viewer ----------------------------------------------------------------------------------------

    @property
    def is_row_open(self) -> bool:
        """Whether the child has left an unfinished row: a bar, a prompt."""
        return self._row.is_open and (self._is_shared or self._has_cell_out)

    @property
    def columns(self) -> int:
        try:
            columns = os.get_terminal_size(self._err).columns
        except OSError:
            columns = 0
        return max(20, columns or 80)  # a terminal without a set size reports 0

    def show(self, data: bytes, *, is_err: bool = False) -> None:
        """Write the child's bytes, unchanged."""
        self.clear_status()
        self._write(self._err if is_err else self._out, data)
        self._row.feed(data)

    def say(self, text: str, tone: Tone = "note") -> None:
        """Print permanent lines of our own, on a terminal broken between words. With --quiet only errors."""
        if self._is_quiet and tone != "bad":
            return
        self.clear_status()
        lines = "".join(f"{self._painted(line, tone)}\n" for line in _safe(text).splitlines() or [""])
        self._write(self._err, self._between_rows(lines.encode("utf-8", "replace")))

    def _painted(self, line: str, tone: Tone) -> str:
        columns = self.columns if self.surface == "terminal" else None
        indent = len(MARK) + len(line) - len(line.lstrip(" ")) + (len("hint: ") if line.startswith("hint: ") else 0)
        shown = fold(MARK + line, columns, indent)
        tone = "note" if line.startswith("hint: ") else tone
        return "\n".join(paint(part, tone, use_color=self._use_color) for part in shown.split("\n"))

    def set_status(self, text: str, tone: Tone = "dim") -> None:
        """Show a temporary status line. A plain surface has none."""
        if self.surface == "plain" or self._is_quiet:
            return
        if self.surface == "notebook":
            self._draw_in_cell(_safe(text))
        else:
            self._draw_on_terminal(_safe(text), tone)

    def clear_status(self) -> None:
        if not self._status:
            return
        if self.surface == "notebook":
            blank = b"\r" + b" " * len(self._status) + b"\r"
            self._write(self._status_fd, blank + (self._row.redraw() if self._has_bar_on_row else b""))
        elif self._is_below:
            self._write(self._status_fd, _ERASE + self._way_back())
        else:
            self._write(self._status_fd, _ERASE)
        self._status, self._is_below = b"", False

    # -- drawing -----------------------------------------------------------------------------------------------------

    @property
    def _status_fd(self) -> int:
        """Stdout in a cell, where stdout and stderr are separate and CR works only within one; else stderr."""
        return self._out if self._has_cell_out else self._err

    def _draw_on_terminal(self, text: str, tone: Tone) -> None:
        shown = cut_to_cells(MARK + text, self.columns - 1)
        line = paint(shown, tone, use_color=self._use_color).encode("utf-8", "replace")
        if line == self._status:
            return
        if not self._status and self.is_row_open:
            # Draw below the bar, so that it is not changed; clear_status moves back up.
            self._is_below = True
            self._write(self._status_fd, b"\n" * (self._row.rows_below + 1) + line)
        else:
            self._write(self._status_fd, _ERASE + line)
        self._status = line

    def _draw_in_cell(self, text: str) -> None:
        """Cells support CR but no cursor moves, so the status is drawn after the bar on the same row."""
        row = self._row.text + b"  " if self._has_bar_on_row else b""
        line = row + (MARK + text).encode("utf-8", "replace")
        padding = b" " * max(0, len(self._status) - len(line))
        self._write(self._status_fd, b"\r" + line + padding)
        self._status = line

    @property
    def _has_bar_on_row(self) -> bool:
        return self.is_row_open and not self._row.is_one_of_several and self._row.rows_below == 0

    def _way_back(self) -> bytes:
        """The bytes that move from the status line to where the child left the cursor; its rows were not changed."""
        column = self._row.column % self.columns
        right = b"\x1b[%dC" % column if column else b""
        return b"\x1b[%dA\r" % (self._row.rows_below + 1) + right

    def _between_rows(self, lines: bytes) -> bytes:
        """Our lines, separated from an unfinished row of the child."""
        if not self._row.is_open or not self._is_shared:
            return lines
        if self.surface == "plain":
            return b"\n" + lines
        if self._row.rows_below or self._row.is_one_of_several:
            return b"\n" * (self._row.rows_below + 1) + lines
        erase = _ERASE if self.surface == "terminal" else b"\r" + b" " * len(self._row.text) + b"\r"
        return erase + lines + self._row.redraw()

    # -- writing -----------------------------------------------------------------------------------------------------

    def _write(self, fd: int, data: bytes) -> None:
        """Write every byte. After a failure write nothing more; never raise."""
        view = memoryview(data)
        while view and fd not in self._dead:
            try:
                view = view[os.write(fd, view) :]
            except BlockingIOError:
                select.select([], [fd], [], 1.0)
            except OSError as error:
                self._lose(fd, error)
                return

    def _lose(self, fd: int, error: OSError) -> None:
        if error.errno in _GONE or error.errno == errno.EBADF:
            self._dead.add(fd)
            self.is_reader_gone = self.is_reader_gone or (fd == self._out and error.errno in _GONE)
        elif not self.problem:
            name = "stdout" if fd == self._out else "stderr"
            self.problem = f"our {name} cannot be written: {error.strerror}"


def _safe(text: str) -> str:
    """Our own lines quote what a run's files and processes say."""
    return safe_output(text.encode("utf-8", "replace")).decode("utf-8", "replace")


def _same_place(first: int, second: int) -> bool:
    try:
        one, two = os.fstat(first), os.fstat(second)
    except OSError:
        return False
    return (one.st_dev, one.st_ino) == (two.st_dev, two.st_ino)


_WATCHED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


class Signals:
    """Counts signals while the context is entered. Outside of the main thread the counts stay zero."""

    def __init__(self) -> None:
        self.interrupts = 0
        self.terminate = False
        self.hangup = self.warning = False
        self._former: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            for number in _WATCHED:
                # Under nohup SIGHUP is ignored on purpose.
                if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                    self._former[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, former in self._former.items():
            signal.signal(number, former)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            self.interrupts += 1
        elif number == signal.SIGTERM:
            self.terminate = True
        elif number == signal.SIGUSR1:
            self.warning = True
        else:
            self.hangup = True


def may_interrupt(surface: Surface) -> bool:
    """Ctrl-C at a terminal is for the run. A notebook's interrupt button or a script's signal is for the viewer."""
    return surface != "notebook" and any(is_tty(fd) for fd in (0, 1, 2))


class Keyboard:
    """With --tty: what the user types goes to the run's terminal, one line at a time."""

    def __init__(self, attempt: AttemptDir) -> None:
        self._path = attempt.keyboard
        self._fd = -1

    def pass_on(self) -> None:
        with contextlib.suppress(OSError):
            if self._fd < 0:
                self._fd = open_own_fifo(self._path)
            # In the background a read from the terminal would suspend us (SIGTTIN).
            if os.tcgetpgrp(0) == os.getpgrp() and select.select([0], [], [], 0)[0]:
                os.write(self._fd, os.read(0, 4096) or b"\x04")


def keyboard_of(attempt: AttemptDir) -> Keyboard | None:
    return Keyboard(attempt) if is_tty(0) else None
