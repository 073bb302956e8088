"""Who reads a cache, and where: one small file for each reader.

Owns the files under `readers/`. The builder keeps the eras a living reader needs and may recycle the others; a dead
reader's file is taken away by whoever sees it.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
from dataclasses import asdict, dataclass
from pathlib import Path

from jackline.rundir.atomic import read_json, write_json
from jackline.rundir.process_id import ProcessId, identify, liveness

_NUMBERS = itertools.count()


@dataclass(frozen=True)
class Reading:
    """A reader's place: the era it reads now, and whether it begins again after the last one."""

    era: int
    repeats: bool
    waits_for: int | None = None  # an era it cannot go on without, beside the one it is in


class Registration:
    """This process's own file; moved on when the reader enters another era."""

    def __init__(self, folder: Path) -> None:
        self._process = identify(os.getpid())
        self._path = folder / "readers" / f"{os.getpid()}-{next(_NUMBERS)}.json"
        # A finished cache may lie where nothing can be written; then nothing is recycled either.
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(exist_ok=True)
        self._lock = threading.Lock()
        self._now: Reading | None = None

    def move_to(self, reading: Reading) -> None:
        """Called by the reading thread and by one that waits for an era."""
        with self._lock:
            if reading == self._now or self._process is None:
                return
            self._now = reading
            # Not written on a full disk, it costs at most an era that is recycled too early and built again.
            with contextlib.suppress(OSError):
                write_json(self._path, {"process": self._process.to_json(), **asdict(reading)})

    def remove(self) -> None:
        with contextlib.suppress(OSError):
            self._path.unlink()


def living_readers(folder: Path) -> list[Reading]:
    """Readers that are alive, or on another host and so unknown from here."""
    found = []
    for path in sorted((folder / "readers").glob("*.json")):
        value = read_json(path) or {}
        process = ProcessId.from_json(value.get("process"))
        if process is None or liveness(process) == "gone":
            with contextlib.suppress(OSError):
                path.unlink()
            continue
        found.append(Reading(value["era"], value["repeats"], value["waits_for"]))
    return found
