"""What whoever waits for tokens is told: what the builder does, or that it does nothing any more.

Owns the reading of `builder.json` and of the builder's state in /proc. Ages are measured by this process's own steady
clock from the moment the file last changed, so a clock that is set forward or back alarms nobody.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from jackline.data.progress import Progress
from jackline.rundir.atomic import read_json
from jackline.rundir.process_id import ProcessId, is_alive
from jackline.units import format_duration

_SILENT_AFTER_S = 10.0  # it writes once a second


class BuilderWatch:
    """One waiting reader's view of the builder."""

    def __init__(self, folder: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = folder / "builder.json"
        self._clock = clock
        self._stamp: int | None = None
        self._changed_at_s = clock()

    def describe(self, what: str) -> Progress:
        """A report for somebody who waits for `what`."""
        silent_s = self._silent_s()
        value = read_json(self._path)
        process = ProcessId.from_json(value.get("process")) if isinstance(value, dict) else None
        if not isinstance(value, dict) or "progress" not in value or process is None or not is_alive(process):
            return Progress("wait", unit="B", detail=f"{what}: the tokeniser is starting")
        found = replace(Progress.from_json(value["progress"]), phase="wait")
        if _is_stopped(process.pid):
            trouble = f"is stopped by a signal: `kill -CONT {process.pid}` lets it go on"
            return replace(found, rate_per_s=None, detail=f"{what}: the tokeniser {trouble}")
        if silent_s >= _SILENT_AFTER_S:
            trouble = f"no sign of life from the tokeniser (process {process.pid}) for {format_duration(silent_s)}"
            return replace(found, rate_per_s=None, detail=f"{what}: {trouble}")
        doing = f"{value['progress']['phase']} {found.detail}".rstrip()
        return replace(found, detail=f"{what}: {doing}")

    def _silent_s(self) -> float:
        try:
            stamp: int | None = self._path.stat().st_mtime_ns
        except OSError:
            stamp = None
        if stamp != self._stamp:
            self._stamp, self._changed_at_s = stamp, self._clock()
        return self._clock() - self._changed_at_s


def _is_stopped(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return False
    return stat[stat.rfind(b")") + 2 :][:1] in (b"T", b"t")
