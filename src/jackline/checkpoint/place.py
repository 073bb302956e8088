"""Where checkpoints are written: in the run's folder, in the folder of a job of several machines, or on a local disk
when the run is on a network or FUSE mount.

On such a mount a rename need not be atomic and an fsync guarantees nothing (a mounted Drive uploads later, or never).
So commits go to a local disk, and the run's own folder becomes the mirror.

A job of several machines has one folder that all of them see (job.json names it): whichever machine has rank 0 next
must find what another one has saved. There the file system is what the person has chosen: the ranks must share it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from jackline.machine.disk import read_disk
from jackline.rundir.access.reading import read_json
from jackline.rundir.access.trust import judge
from jackline.rundir.atomic import write_json
from jackline.rundir.layout import RunDir
from jackline.rundir.registry import state_folder


@dataclass(frozen=True)
class Place:
    """The folder to commit to, and the mirror that this requires (None: none needed)."""

    folder: Path
    mirror: str | None
    why: str = ""


def choose_place(run: RunDir) -> Place:
    """The run's own `checkpoints`, unless it is part of a job, or its file system cannot be trusted."""
    shared = _folder_of_job(run)
    if shared is not None:
        return Place(shared, None)
    disk = read_disk(run.path)
    if disk is None or not disk.is_remote:
        return Place(run.checkpoints, None)
    return away_from(run, disk.filesystem)


def join_job(run: RunDir, job: str) -> None:
    """From now on this run commits to the folder of `job`; '' for a run of one machine."""
    if not job:
        return
    folder = Path(job) / "checkpoints"
    folder.mkdir(parents=True, exist_ok=True)
    if read_json(run.job_file) != {"checkpoints": str(folder)}:
        write_json(run.job_file, {"checkpoints": str(folder)})


def _folder_of_job(run: RunDir) -> Path | None:
    """None for a run of one machine, and for one that somebody else has made. A rank of another machine is a guest in
    the run of rank 0, which was not made there: its own run is of the same job."""
    told = read_json(run.job_file)
    path = told.get("checkpoints") if isinstance(told, dict) else None
    if not isinstance(path, str) or not Path(path).is_absolute():
        return None
    mine = os.environ.get("JACKLINE_RUN_DIR")
    is_guest = bool(mine) and read_json(RunDir(Path(str(mine))).job_file) == told
    return Path(path) if is_guest or judge(run).is_ours else None


def away_from(run: RunDir, filesystem: str) -> Place:
    """A local folder that the same run finds again, with the run's own folder as the mirror."""
    import hashlib  # loads OpenSSL, 3.6 MB: a supervisor beside a local disk does not need it

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
