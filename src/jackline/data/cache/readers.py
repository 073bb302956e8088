"""Which processes read a cache, and where: one small file for each reader.

Owns the files under `readers/`. The builder keeps the eras that a running reader needs and may recycle the others.
The file of a reader that has ended is deleted by the next process that finds it.
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
    """A reader's place: the era it reads now, and whether it starts again from the first after the last one."""

    era: int
    repeats: bool
    waits_for: int | None = None  # an era it cannot continue without, beside the one it is in


class Registration:
    """This process's own file; updated when the reader enters another era."""

    def __init__(self, folder: Path) -> None:
        self._process = identify(os.getpid())
        self._path = folder / "readers" / f"{os.getpid()}-{next(_NUMBERS)}.json"
        # A finished cache may be on a read-only disk; then nothing is recycled either.
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(exist_ok=True)
        self._lock = threading.Lock()
        self._now: Reading | None = None

    def move_to(self, reading: Reading) -> None:
        """Called by the reading thread and by a thread that waits for an era."""
        with self._lock:
            if reading == self._now or self._process is None:
                return
            self._now = reading
            # If a full disk prevents the write, at most one era is recycled too early and built again.
            with contextlib.suppress(OSError):
                write_json(self._path, {"process": self._process.to_json(), **asdict(reading)})

    def remove(self) -> None:
        with contextlib.suppress(OSError):
            self._path.unlink()


def living_readers(folder: Path) -> list[Reading]:
    """Readers that are running, and readers on another host, whose state is not visible from here."""
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
