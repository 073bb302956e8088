"""Where the command writes, for the explanation of its end: its log files, and the disks that may be full.

Owns how often its open files are looked at. At the end its processes are gone, so this must be known before. Does not
own: what a full disk or a log file means (diagnosis).
"""

from __future__ import annotations

import os
import re
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from jackline.diagnosis.deaths.collect import tail_lines
from jackline.diagnosis.deaths.disk import is_full
from jackline.diagnosis.deaths.evidence import DiskSpace
from jackline.diagnosis.logs.clues import is_log_name, newest_logs_under, within
from jackline.immutable import immutable
from jackline.machine.disk import read_disk, writable_disks
from jackline.machine.proc import open_files
from jackline.rundir.layout import RunDir
from jackline.rundir.run_file import DamagedRun, read_run_file

FIRST_S = (0.5, 1.5, 3.0)
EVERY_S = 5.0
_MAX_FILES = 64
_MAX_PROCESSES = 4
_PATIENCE_S = 1.0  # a network disk may hang
_FRAME = re.compile(r'\s*File "')  # of a traceback: code that ran, not a file that was written
_QUOTED_PATH = re.compile(r"""['"](/[^'"\n]{1,400})['"]""")


@immutable
class LastLog:
    """The last lines of the log file that was written last. `is_open`: the command itself had it open."""

    path: str = ""
    lines: tuple[str, ...] = ()
    is_open: bool = False


class WrittenFiles:
    """Files that the command's processes were seen writing, the newest last."""

    def __init__(self, run: RunDir) -> None:
        self._run_folder = f"{run.path}{os.sep}"
        try:
            contents = read_run_file(run)
            self.cwd, self.command = contents.cwd, contents.command
        except DamagedRun:
            self.cwd = self.command = ""
        self._paths: OrderedDict[str, None] = OrderedDict()
        self._next_s = float("-inf")
        self._began_s: float | None = None

    def poll(self, now_s: float, pids: Sequence[int]) -> None:
        """Costs about a millisecond. Short programs are looked at early, long ones seldom."""
        self._began_s = now_s if self._began_s is None else self._began_s
        if now_s < self._next_s:
            return
        later = next((after for after in FIRST_S if self._began_s + after > now_s), None)
        self._next_s = self._began_s + later if later is not None else now_s + EVERY_S
        for pid in pids[:_MAX_PROCESSES]:
            for file in open_files(pid):
                if file.is_writing and not file.path.startswith(self._run_folder):
                    self._paths[file.path] = None
                    self._paths.move_to_end(file.path)
        while len(self._paths) > _MAX_FILES:
            self._paths.popitem(last=False)

    def disks(self, lines: Iterable[str]) -> tuple[DiskSpace, ...]:
        """The disks that it wrote to, that its last lines name, of its working folder and of temporary files."""
        named = [match for line in _without_code(lines) for match in _QUOTED_PATH.findall(line)]
        places = [*named[-16:], *self._paths, self.cwd, os.environ.get("TMPDIR", "/tmp")]
        known = within(_PATIENCE_S, lambda: measure([place for place in places if place])) or ()
        if any(is_full(disk) for disk in known):
            return known
        # A file that was open too shortly to be seen, or only mapped: a disk that is full now is the likely one.
        return known + (within(_PATIENCE_S, _full_disks) or ())

    def last_log(self, *, since_s: float, count: int) -> LastLog:
        """Its own log file; else the newest in its working folder that was written since it started."""
        own = [path for path in reversed(self._paths) if is_log_name(path)]
        times = {path: _modified_s(path) for path in own}
        newest = max(times, key=lambda path: times[path], default="")
        if newest and times[newest] >= since_s:
            return LastLog(newest, tail_lines(Path(newest), count), True)
        found = within(_PATIENCE_S, lambda: newest_logs_under(Path(self.cwd), since_s)) if self.cwd else None
        return LastLog(found[0], tail_lines(Path(found[0]), count)) if found else LastLog()


def _without_code(lines: Iterable[str]) -> Iterator[str]:
    """The lines without the frames of tracebacks and their source text: `os.environ["OUT"] + "/model"` is no path."""
    is_code = False
    for line in lines:
        is_frame = _FRAME.match(line) is not None
        is_code = is_frame or (is_code and line.startswith("    "))
        if not is_code:
            yield line


def _full_disks() -> tuple[DiskSpace, ...]:
    spaces = (DiskSpace(disk.path, disk.free_bytes, disk.total_bytes) for disk in writable_disks())
    return tuple(space for space in spaces if is_full(space))[:4]


def measure(places: Sequence[str]) -> tuple[DiskSpace, ...]:
    """Each disk once, under the first of the places that is on it. Devices and /proc are no disks."""
    found: dict[int, DiskSpace] = {}
    for place in places:
        if place.startswith(("/dev/", "/proc/", "/sys/")):
            continue
        folder = place
        while folder != os.sep and not os.path.lexists(folder):
            folder = os.path.dirname(folder)
        try:
            device = os.stat(folder).st_dev  # noqa: PTH116
        except OSError:
            continue
        disk = read_disk(place) if device not in found else None
        if disk is not None:
            found[device] = DiskSpace(place, disk.free_bytes, disk.total_bytes)
    return tuple(found.values())[:8]


def _modified_s(path: str) -> float:
    try:
        return os.stat(path).st_mtime  # noqa: PTH116
    except OSError:
        return 0.0
