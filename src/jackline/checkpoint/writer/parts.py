"""One checkpoint written by several ranks: each writes its part, rank 0's writer joins them and commits.

    checkpoints/.parts-TOKEN/rank-2/step-00001200/    a part: the same files and manifest as a checkpoint, committed

A part is durable and has checksums before rank 0 looks at it. Rank 0's writer moves the files into its own draft,
adds their checksums to its manifest and commits, so there is a whole checkpoint or none, whoever is killed meanwhile.
The writers find each other by files: they continue when their trainers are gone. TOKEN is new in every attempt, and
NUMBER counts its saves, so that parts of another attempt or save are never joined.
Owns the folder of the parts. Does not own how a part is written (intake.py, commit.py).
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jackline.checkpoint.format.catalogue import LOCK, list_names
from jackline.checkpoint.format.manifest import STATE, Damage, FileEntry, Manifest, is_of_rank
from jackline.checkpoint.format.verify import check_sizes, read_manifest
from jackline.checkpoint.writer.commit import Draft, delete_checkpoint
from jackline.checkpoint.writer.disk import Disk
from jackline.checkpoint.writer.lock import read_holder
from jackline.immutable import immutable
from jackline.rundir.access.reading import read_text
from jackline.rundir.process_id import liveness

PARTS = ".parts-"
PATIENCE_S = 600.0  # for a part of a rank on another machine, of which nobody here knows whether it is alive
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.01, 0.2
_FAILED = "failed-"


class PartLost(ValueError):
    """A rank's part will not come; the text says which and why."""


@immutable
class Team:
    """The ranks that write one checkpoint together, and this writer's place among them.

    `members`: the ranks of this machine, where the machines of a job share no folder. Each machine then has a
    checkpoint with the parts of its own ranks. Empty: all ranks write one checkpoint.
    """

    token: str
    rank: int
    size: int
    members: tuple[int, ...] = ()

    @property
    def is_first(self) -> bool:
        return self.rank == self.ranks[0]

    @property
    def ranks(self) -> tuple[int, ...]:
        """Those whose parts are joined here, in order; the first of them commits."""
        return tuple(self.members) or tuple(range(self.size))

    def folder(self, checkpoints: Path) -> Path:
        """Where this rank's writer works: the first one's in the run's own folder for checkpoints."""
        return checkpoints if self.is_first else part_folder(checkpoints, self.token, self.rank)


def read_team(told: dict[str, Any]) -> Team:
    """From JSON; other entries belong to the message that it came in."""
    members = tuple(int(rank) for rank in told.get("members") or ())
    return Team(str(told["token"]), int(told["rank"]), int(told["size"]), members)


def part_folder(checkpoints: Path, token: str, rank: int) -> Path:
    return checkpoints / f"{PARTS}{token}" / f"rank-{rank}"


def join_parts(draft: Draft, told: dict[str, Any], disk: Disk, clock: Callable[[], float]) -> list[FileEntry]:
    """Move the parts of all other ranks into the draft; returns their entries for the manifest.

    Waits for parts that are still being written. Raises PartLost when one will not come.
    """
    team, number = read_team(told), int(told["number"])
    until_s = clock() + PATIENCE_S
    folders = {rank: part_folder(draft.folder, team.token, rank) for rank in team.ranks[1:]}
    parts = {rank: _wait_for(folder, rank, number, until_s, clock) for rank, folder in folders.items()}
    entries: list[FileEntry] = []
    for rank, (path, manifest) in parts.items():
        if manifest.algorithm != draft.algorithm:
            first = f"rank {team.rank} uses {draft.algorithm}"
            raise PartLost(f"rank {rank} uses the checksum {manifest.algorithm}, {first}")
        for entry in manifest.files:
            if entry.name == STATE or not is_of_rank(entry.name):
                continue
            disk.rename(path / entry.name, draft.path / entry.name)
            entries.append(entry)
        delete_checkpoint(path, disk)
    return entries


def note_failed(folder: Path, team: dict[str, Any] | None, why: str) -> None:
    """Tell rank 0's writer that this part will not come. A disk that is full may still take a small file."""
    if team is not None:
        (folder / f"{_FAILED}{int(team['number'])}").write_text(why)


def clear_parts(checkpoints: Path, keep: str) -> None:
    """Delete the parts of attempts that are over. Only the holder of the checkpoints' lock may call it."""
    for path in checkpoints.glob(f"{PARTS}*"):
        if path.name != f"{PARTS}{keep}" and path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)


def _wait_for(
    folder: Path, rank: int, number: int, until_s: float, clock: Callable[[], float]
) -> tuple[Path, Manifest]:
    pause_s = _FIRST_PAUSE_S
    while True:
        is_lost = _is_lost(folder)  # asked first: its last act may have been the part
        if (found := _find(folder, number)) is not None:
            return found
        if (failed := folder / f"{_FAILED}{number}").exists():
            raise PartLost(f"rank {rank} could not save its part: {read_text(failed, 500)}")
        if is_lost:
            raise PartLost(f"rank {rank} ended before its part was written")
        if clock() > until_s:
            raise PartLost(f"the part of rank {rank} did not come within {PATIENCE_S:.0f} s")
        time.sleep(pause_s)
        pause_s = min(_LONGEST_PAUSE_S, pause_s * 1.5)


def _find(folder: Path, number: int) -> tuple[Path, Manifest] | None:
    for name in list_names(folder):
        path = folder / str(name)
        try:
            manifest = read_manifest(path)
            if manifest.facts.get("save") == number:
                check_sizes(path, manifest)
                return path, manifest
        except Damage:
            continue
    return None


def _is_lost(folder: Path) -> bool:
    """Whether both the rank and its writer have ended. Elsewhere nobody can tell."""
    holder = read_holder(folder / LOCK)
    if holder.writer is None or holder.trainer is None:
        return False
    return liveness(holder.writer) == "gone" and liveness(holder.trainer) == "gone"
