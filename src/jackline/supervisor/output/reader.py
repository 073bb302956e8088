"""Reads the child's output from its raw file, writes out.log, extracts progress, and frees the disk space again.

Owns: the read position, what is logged of bars and protocol lines, and freeing what was read. Never raises to the
supervisor: `problem` says what is wrong. Does not own: showing anything (the viewer reads the raw file itself).
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from jackline.immutable import immutable
from jackline.rundir.access.writing import open_own
from jackline.supervisor.output.bars import parse_bar
from jackline.supervisor.output.lines import parse_redrawn
from jackline.supervisor.output.log_writer import LogWriter
from jackline.supervisor.output.progress import PROTOCOL, Progress, parse_protocol
from jackline.supervisor.output.room import (
    AHEAD_BYTES,
    MIB,
    CutWatch,
    Space,
    begin_output,
    empty_files,
    first_data,
    is_roomy,
    make_reserve,
    punch,
    read_space,
    release_reserve,
    shortage,
    take_blocks_ahead,
)
from jackline.supervisor.output.splitter import BarFold, LineSplitter, Piece
from jackline.supervisor.output.told import Told
from jackline.units import format_bytes

__all__ = ["LogWriter", "OutputNews", "OutputTail", "begin_output", "make_reserve", "release_reserve"]

BLOCK_BYTES = MIB // 2  # a block of empty lines takes a hundred times its size in memory once split
BUDGET_S = 0.25
KEEP_BYTES = 64 * MIB  # kept after reading, so that a viewer may lag behind
KEEP_WHEN_LOW_BYTES = MIB
ROOM_EVERY_S = 1.0  # another program may fill the disk while the command prints nothing
MAX_LINES = 200
MAX_BARS_A_BLOCK = 5000  # older ones are skipped, since each costs about 10 us


@immutable
class OutputNews:
    """What one poll read. `lines` holds only the last lines; `num_lines` counts all."""

    num_bytes: int = 0
    lines: tuple[str, ...] = ()
    num_lines: int = 0
    progress: Progress | None = None
    last_text: str = ""


NOTHING_NEW = OutputNews()


class OutputTail:
    """The supervisor's reader of one raw file. `consumed_bytes` is where another reader would continue."""

    def __init__(
        self,
        raw: Path,
        log: LogWriter,
        *,
        consumed_bytes: int = 0,
        stream: str = "",
        told: Told | None = None,
        read_space_of: Callable[[int], Space | None] = read_space,
    ) -> None:
        self.path = self._raw = raw
        self._log = log
        self._prefix = f"{stream}| " if stream else ""
        self._read_space = read_space_of
        self._fd = -1
        self._offset = consumed_bytes
        self._hole_end = 0
        self._blocks_until = 0
        self._is_short = False
        self._room_at_s = float("-inf")
        self._splitter = LineSplitter()
        self._cut = CutWatch()
        self._bars = BarFold()
        self._is_after_bar = False  # if so, the next line may be that bar's last state
        self._told = told or Told()
        self._partial_seen = b""
        self._bar_text = ""
        self._lines: deque[str] = deque(maxlen=MAX_LINES)
        self._num_lines = 0
        self._last_text = ""
        self._own_problem = ""

    @property
    def consumed_bytes(self) -> int:
        """Everything before this is in out.log; an unfinished line is not."""
        return self._offset - self._splitter.num_pending_bytes

    @property
    def num_read_bytes(self) -> int:
        """All bytes of the child that we have read, including an unfinished line (dots, a prompt)."""
        return self._offset

    @property
    def problem(self) -> str:
        return self._own_problem or self._log.problem

    @property
    def is_short_of_space(self) -> bool:
        """The disk is nearly full and the child has only the blocks ahead of its file: poll as often as possible."""
        return self._is_short

    def poll(self, now_s: float) -> OutputNews:
        """Read until caught up or a quarter of a second has passed. `now_s` is wall time, for the stamps."""
        if self._is_quiet(now_s):
            return NOTHING_NEW
        self._lines.clear()
        self._num_lines, self._last_text = 0, ""
        before = self._offset
        fresh: Progress | None = None
        try:
            deadline = time.monotonic() + BUDGET_S
            while self._read_block(now_s) >= BLOCK_BYTES and time.monotonic() < deadline:
                pass
            self._write(self._bars.overdue(now_s), now_s)
            fresh = self._latest_progress(now_s)
            self._own_problem = ""
        except Exception as error:  # fail open: a log is not worth a run
            self._own_problem = f"the output cannot be read: {type(error).__name__}: {error}"
        num_bytes = max(0, self._offset - before)
        return OutputNews(num_bytes, tuple(self._lines), self._num_lines, fresh, self._last_text)

    def _is_quiet(self, now_s: float) -> bool:
        """Nothing was printed, and a moment ago the disk and bars that are not redrawn any more were looked at."""
        if self._fd < 0 or self._is_short or self.problem:
            return False
        try:
            size = os.fstat(self._fd).st_size
        except OSError:
            return False
        return size == self._offset and 0.0 <= now_s - self._room_at_s < ROOM_EVERY_S

    def close(self) -> None:
        """The child has ended: read to the end of the file and flush a last line without a newline."""
        now_s = time.time()
        self._lines.clear()
        try:
            end = self._raw.stat().st_size if self._raw.exists() else 0
            while self._offset < end and self._read_block(now_s) > 0:
                pass
            self._take(self._splitter.flush(), now_s)
            self._write(self._bars.flush(), now_s)
            self._latest_progress(now_s)
        except Exception as error:
            self._own_problem = f"the output cannot be read: {type(error).__name__}: {error}"
        self._close_file()

    def _close_file(self) -> None:
        if self._fd < 0:
            return
        with contextlib.suppress(OSError):
            # Truncating a file to its own length frees the blocks allocated beyond its end.
            os.ftruncate(self._fd, os.fstat(self._fd).st_size)
        os.close(self._fd)
        self._fd = -1

    # -- reading -----------------------------------------------------------------------------------------------------

    def _read_block(self, now_s: float) -> int:
        """Read one more block; returns its bytes, less than BLOCK_BYTES when there are no more."""
        if self._fd < 0 and not self._open(now_s):
            return 0
        self._make_room(now_s)
        block = os.pread(self._fd, BLOCK_BYTES, self._offset)
        if self._cut.is_cut(self._fd, self._offset):
            self._begin_again(now_s)
            return BLOCK_BYTES
        if block:
            self._offset += len(block)
            self._cut.note(block)
            self._take(self._splitter.feed(block), now_s)
        return len(block)

    def _open(self, now_s: float) -> bool:
        try:
            self._fd = open_own(self._raw, os.O_RDWR)
        except FileNotFoundError:
            return False
        data = first_data(self._fd, self._offset)
        size = os.fstat(self._fd).st_size
        start = size if data is None else data
        if start > self._offset and self._offset < size:
            self._log.note(f"{format_bytes(start - self._offset)} of output were given up on a full disk", now_s)
            self._offset = start
        return True

    def _begin_again(self, now_s: float) -> None:
        self._log.note(
            f"the command cut its own output file {self._raw.name} (as `> /dev/stderr` in a shell script does): "
            "lines of the last tenth of a second before this may be missing; --tty avoids it",
            now_s,
        )
        self._offset, self._hole_end, self._blocks_until = 0, 0, 0
        self._splitter = LineSplitter()
        self._cut = CutWatch()

    # -- room --------------------------------------------------------------------------------------------------------

    def _make_room(self, now_s: float) -> None:
        """Free our own bytes first. Calls statvfs for each block (about 2 us): once a second would be too seldom for
        a program that prints fast."""
        self._room_at_s = now_s
        space = self._read_space(self._fd)
        short = shortage(space)
        if short != "none" and not self._is_short:
            self._is_short = True
            empty_files([path for path in self._raw.parent.parent.glob("*/raw.*") if path.parent != self._raw.parent])
        elif self._is_short and is_roomy(space):
            self._is_short = False
            self._log.resume()
            make_reserve(self._raw.with_name("reserve"))
        if short == "critical":
            self._log.pause("the disk is nearly full; what is left is for the command's own output")
            release_reserve(self._raw.with_name("reserve"))
        self._punch(space)
        self._take_blocks(space)

    def _punch(self, space: Space | None) -> None:
        keep, step = KEEP_BYTES, 16 * MIB
        if self._is_short and space is not None:
            keep = min(KEEP_WHEN_LOW_BYTES, space.total_bytes // 16)
            step = min(keep, MIB // 4)
        end = self.consumed_bytes - keep
        if end - self._hole_end >= step:
            self._hole_end = punch(self._fd, self._hole_end, end)

    def _take_blocks(self, space: Space | None) -> None:
        """Keep blocks allocated ahead of the end of the file; allocate more when half of them are used."""
        size = os.fstat(self._fd).st_size
        ahead = AHEAD_BYTES if space is None else min(AHEAD_BYTES, space.total_bytes // 4)
        if self._blocks_until - size > ahead // 2:
            return
        while ahead >= MIB // 4:
            if take_blocks_ahead(self._fd, size, ahead):
                self._blocks_until = size + ahead
                return
            ahead //= 2

    # -- meaning -----------------------------------------------------------------------------------------------------

    def _take(self, pieces: list[Piece], now_s: float) -> None:
        if not pieces:
            return
        if not self._is_after_bar and {piece[1:] for piece in pieces} == {("line", False)}:
            texts = [piece[0] for piece in pieces]
            if PROTOCOL not in "\n".join(texts):
                self._num_lines += len(texts)
                self._last_text = texts[-1]
                self._lines.extend(texts[-MAX_LINES:])
                self._write(texts, now_s)
                return
        self._take_mixed(pieces, now_s)

    def _take_mixed(self, pieces: list[Piece], now_s: float) -> None:
        num_bars = sum(piece.kind == "bar" for piece in pieces)
        num_skipped = max(0, num_bars - MAX_BARS_A_BLOCK)
        texts: list[str] = []
        for piece in pieces:
            if piece.kind == "bar":
                if num_skipped:
                    num_skipped -= 1
                    continue
                texts += self._take_bar(piece.text, now_s)
            else:
                texts += self._take_line(piece, now_s)
        self._write(texts, now_s)

    def _take_bar(self, text: str, now_s: float) -> list[str]:
        progress = parse_redrawn(text)
        self._told.offer(progress, now_s)
        self._bar_text = text if progress is not None else self._bar_text
        self._last_text = text.strip() or self._last_text
        self._is_after_bar = True
        return self._bars.refresh(text, progress, now_s)

    def _take_line(self, piece: Piece, now_s: float) -> list[str]:
        text = piece.text
        said = parse_protocol(text) if text.startswith(PROTOCOL) else None
        if said is not None:
            self._told.offer(said, now_s)
            self._last_text = _describe(said)
            return self._bars.refresh(f"[jackline] {self._last_text}", said, now_s)
        self._num_lines += 1
        self._lines.append(text)
        self._told.take_heading(text)
        self._last_text = text or self._last_text
        if self._is_after_bar:
            self._is_after_bar = False
            progress = parse_bar(text)
            if progress is not None and "━" in text:
                # Keras ends its bar with the numbers of the epoch, and the next epoch's heading follows at once.
                self._told.offer(progress, now_s)
                self._told.take_bar(text, now_s)
                self._lines.pop()
            if self._bars.end(text, progress):
                return []
        return [f"{text} [the line continues below]" if piece.is_continued else text]

    def _write(self, texts: list[str], now_s: float) -> None:
        if texts:
            self._log.write([self._prefix + text for text in texts] if self._prefix else texts, now_s)

    # -- progress ----------------------------------------------------------------------------------------------------

    def _latest_progress(self, now_s: float) -> Progress | None:
        """The progress found in this poll, from protocol lines, bars and lines."""
        partial = self._splitter.partial
        if partial and partial != self._partial_seen:
            # tqdm begins a refresh with CR and never ends it, so the newest state is always the unfinished line.
            self._partial_seen = partial
            text = self._splitter.partial_text
            self._last_text = text.strip() or self._last_text
            # Without a CR it may be the first half of a line, so that only a bar is certain.
            progress = parse_redrawn(text) if self._is_after_bar else parse_bar(text)
            self._told.offer(progress, now_s)
            self._bar_text = text if progress is not None else self._bar_text
        if self._bar_text:
            self._told.take_bar(self._bar_text, now_s)
            self._bar_text = ""
        if not self._is_short:  # making room comes first
            self._told.take_lines(list(self._lines), now_s)
        return self._told.progress if self._told.progress_s == now_s else None


def _describe(progress: Progress) -> str:
    total = f"/{_number(progress.total)}" if progress.total is not None else ""
    if progress.phase and not (progress.done or total or progress.unit):
        return progress.phase  # it has begun and has no count: "0" would have no meaning
    return f"{progress.phase} {_number(progress.done)}{total} {progress.unit}".strip()


def _number(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) else f"{value:g}"
