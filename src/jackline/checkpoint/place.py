"""Where checkpoints are written when the run is on a network or FUSE mount: on a local disk instead.

On such a mount a rename need not be atomic and an fsync guarantees nothing (a mounted Drive uploads later, or never).
So commits go to a local disk, and the run's own folder becomes the mirror.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

from jackline.machine.disk import read_disk
from jackline.rundir.layout import RunDir
from jackline.rundir.registry import state_folder


@dataclass(frozen=True)
class Place:
    """The folder to commit to, and the mirror that this requires (None: none needed)."""

    folder: Path
    mirror: str | None
    why: str = ""


def choose_place(run: RunDir) -> Place:
    """The run's own `checkpoints`, unless its file system cannot be trusted."""
    disk = read_disk(run.path)
    if disk is None or not disk.is_remote:
        return Place(run.checkpoints, None)
    return away_from(run, disk.filesystem)


def away_from(run: RunDir, filesystem: str) -> Place:
    """A local folder that the same run finds again, with the run's own folder as the mirror."""
    short = hashlib.sha256(os.fsencode(run.path.absolute())).hexdigest()[:16]
    folder = state_folder() / "checkpoints" / f"{run.name}-{short}"
    why = f"{run.path} is on {filesystem}, so checkpoints are committed to {folder} and copied there"
    return Place(folder, str(run.path.parent), why)


def rescue_place(run: RunDir) -> Place:
    """Where rescued states of this run are committed: `rescue`, or beside its checkpoints on the local disk."""
    place = choose_place(run)
    if place.folder == run.checkpoints:
        return Place(run.rescued, None)
    return Place(place.folder.with_name(f"{place.folder.name}-rescue"), None, place.why)
