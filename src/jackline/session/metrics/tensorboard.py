"""TensorBoard event files beside our metrics, with every step in them once.

Owns run/tb. metrics-RANK.jsonl stays the source; this is a copy for people who like TensorBoard, and it fails open:
without the package, or on a full disk, it says so once and training continues.

After a resume the steps since the checkpoint are done again. `rewind` cuts what earlier attempts wrote about them off
the files (steps only grow in a file, so it is a tail), and every attempt's own file begins with a session start at
its first step: a TensorBoard that was open all the while and has read the old points throws them away at that mark.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, BinaryIO

from jackline.rundir.layout import RunDir

# A record is a length, a checksum of the length, the event, a checksum of the event.
_HEADER = struct.Struct("<QI")
_FOOTER_BYTES = 4
A_SECOND = 20  # lines of an attached loop
_MAX_RECORD_BYTES = 1 << 26  # more is not a length but damage


class Board:
    """The event files of one run. `complain(text)` is called at most once, when it has to give up.

    The first `add` opens a file of its own; files of earlier attempts are only ever shortened.
    """

    def __init__(self, folder: Path, complain: Callable[[str], object] = lambda text: None) -> None:
        self.folder = folder
        self._complain = complain
        self._writer: Any = None
        self.is_on = True
        with self._failing_open():
            import tensorboard.compat.proto.event_pb2  # noqa: F401  # now, not in the middle of the first steps

    def rewind(self, step: int) -> None:
        """Before the first `add` of an attempt that continues after `step`: drop every point later than that."""
        if not self.is_on:
            return
        with self._failing_open():
            for path in event_files(self.folder):
                _cut_after(path, step)

    def add(self, step: int, values: Mapping[str, float], at_s: float | None = None) -> None:
        """The numbers of one step, in the file when this returns: 0.1 ms for ten of them."""
        if not self.is_on or not values:
            return
        with self._failing_open():
            from tensorboard.compat.proto.event_pb2 import Event
            from tensorboard.compat.proto.summary_pb2 import Summary

            if self._writer is None:
                self._writer = self._open(step)
            shown = [Summary.Value(tag=name, simple_value=float(value)) for name, value in values.items()]
            event = Event(wall_time=time.time() if at_s is None else at_s, step=step, summary=Summary(value=shown))
            self._writer.write(event.SerializeToString())
            self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            with contextlib.suppress(OSError):
                self._writer.close()
        self._writer = None

    def _open(self, step: int) -> Any:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.record_writer import RecordWriter

        self.folder.mkdir(parents=True, exist_ok=True)
        # TensorBoard reads files in the order of their names; a clock set back must not put this one before the last.
        number = max([int(time.time()), *(_number_of(path) + 1 for path in event_files(self.folder))])
        path = self.folder / f"events.out.tfevents.{number:010d}.{socket.gethostname()}.{os.getpid()}.0"
        writer = RecordWriter(open(path, "xb"))  # noqa: SIM115  # open as long as the run is
        start = SessionLog(status=SessionLog.START)
        for event in (
            Event(wall_time=time.time(), file_version="brain.Event:2"),
            Event(wall_time=time.time(), step=step, session_log=start),
        ):
            writer.write(event.SerializeToString())
        return writer

    @contextlib.contextmanager
    def _failing_open(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # a missing package, a full disk, a folder of somebody else: curves are optional
            self.is_on = False
            self.close()
            what = "tensorboard is not installed" if isinstance(error, ImportError) else f"{error}"
            self._complain(f"no TensorBoard files are written ({what}); the numbers are in metrics-0.jsonl")


class Curves:
    """What an attached loop logs, as event files. Called by the reporting thread, once a second.

    A loop may log a thousand times a second, and each line costs 0.1 ms: of lines with the same names a few a second
    are written. Our own trainer writes its curves itself; its run has a config.yaml.
    """

    def __init__(self, run: RunDir, complain: Callable[[str], object], *, is_on: bool = True) -> None:
        self._run = run
        self._complain = complain
        self._board: Board | None = None
        self._is_off = not is_on or find_spec("tensorboard") is None

    def take(self, lines: Sequence[tuple[int, float, Mapping[str, float]]]) -> None:
        if not lines or self._is_off:
            return
        if self._board is None:
            if self._run.config_file.exists():
                self._is_off = True
                return
            self._board = Board(self._run.tensorboard, self._complain)
            self._board.rewind(lines[0][0] - 1)
        for step, at_s, values in few_of_each(lines, A_SECOND):
            self._board.add(step, values, at_s)

    def close(self) -> None:
        if self._board is not None:
            self._board.close()


def few_of_each(
    lines: Sequence[tuple[int, float, Mapping[str, float]]], most: int
) -> list[tuple[int, float, Mapping[str, float]]]:
    """At most `most` lines with the same names, evenly chosen, the last of them always; in their order."""
    places: dict[tuple[str, ...], list[int]] = {}
    for at, (_, _, values) in enumerate(lines):
        places.setdefault(tuple(values), []).append(at)
    chosen = {
        found[len(found) - 1 - k * len(found) // most] if len(found) > most else found[k]
        for found in places.values()
        for k in range(min(most, len(found)))
    }
    return [lines[at] for at in sorted(chosen)]


def event_files(folder: Path) -> list[Path]:
    """Oldest first."""
    return sorted(folder.glob("*tfevents*")) if folder.is_dir() else []


def _number_of(path: Path) -> int:
    found = path.name.partition("tfevents.")[2].partition(".")[0]
    return int(found) if found.isdigit() else 0


def _cut_after(path: Path, step: int) -> None:
    """Cut the file at the first record later than `step`, or at the first that is not whole: a kill in the middle of
    a write leaves half of one, and TensorBoard would read no further."""
    with open(path, "r+b") as file:
        end = _end_of_good(file, step)
        if end < os.fstat(file.fileno()).st_size:
            file.truncate(end)
            file.flush()
            os.fsync(file.fileno())


def _end_of_good(file: BinaryIO, step: int) -> int:
    from tensorboard.compat.proto.event_pb2 import Event

    size = os.fstat(file.fileno()).st_size
    at = 0
    while True:
        header = file.read(_HEADER.size)
        if len(header) < _HEADER.size:
            return at
        length = _HEADER.unpack(header)[0]
        after = at + _HEADER.size + length + _FOOTER_BYTES
        if length > _MAX_RECORD_BYTES or after > size:
            return at
        event = Event.FromString(file.read(length))
        if event.step > step:
            return at
        file.seek(_FOOTER_BYTES, os.SEEK_CUR)
        at = after
