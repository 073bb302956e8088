"""What stands in a run's `checkpoints` folder.

Owns the listing, newest first, and the files beside the checkpoints:

    writer.lock   held by the one process that may write here; says who
    status.json   the writer's notes: what was acknowledged, read back, which is best (a hint, never trusted)
    mirror.json   the mirror's notes: what was uploaded and confirmed
    latest, best  names of checkpoints, for people and scripts (hints too)

Does not judge bytes (verify.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jackline.checkpoint.format import DAMAGED, Damage, Manifest, Name, parse_name
from jackline.checkpoint.verify import check_sizes, read_manifest
from jackline.rundir import atomic

LOCK = "writer.lock"
STATUS = "status.json"
MIRROR = "mirror.json"
LATEST = "latest"
BEST = "best"


@dataclass(frozen=True)
class Listed:
    """One checkpoint as a glance shows it: the manifest is proved, lengths are right, contents are not read."""

    name: Name
    path: Path
    manifest: Manifest | None
    problem: str | None

    @property
    def is_plausible(self) -> bool:
        return self.manifest is not None and self.problem is None


def list_names(folder: Path) -> list[Name]:
    """Newest first. What has another name is not a checkpoint."""
    try:
        found = [parse_name(path.name) for path in folder.iterdir()]
    except OSError:
        return []
    return sorted((name for name in found if name is not None), reverse=True)


def list_checkpoints(folder: Path) -> list[Listed]:
    """Newest first, each looked at but not read."""
    return [look_at(folder, name) for name in list_names(folder)]


def look_at(folder: Path, name: Name) -> Listed:
    path = folder / str(name)
    manifest = None
    try:
        manifest = read_manifest(path)
        check_sizes(path, manifest)
    except Damage as damage:
        return Listed(name, path, manifest, str(damage))
    return Listed(name, path, manifest, None)


def list_set_aside(folder: Path) -> list[Path]:
    """Damaged checkpoints that were taken out of the way."""
    try:
        return sorted(path for path in folder.iterdir() if path.name.startswith(DAMAGED) and path.is_dir())
    except OSError:
        return []


def read_notes(folder: Path, file: str) -> dict[Name, dict[str, Any]]:
    """The writer's or the mirror's notes for each checkpoint; nothing when they are absent or damaged."""
    body = atomic.read_json(folder / file)
    steps = body.get("checkpoints") if isinstance(body, dict) else None
    if not isinstance(steps, dict):
        return {}
    named = ((parse_name(text), note) for text, note in steps.items())
    return {name: note for name, note in named if name is not None and isinstance(note, dict)}


def write_notes(folder: Path, file: str, notes: dict[Name, dict[str, Any]], **more: Any) -> None:
    """Only the writer writes status.json, only the mirror mirror.json."""
    body = {**more, "checkpoints": {str(name): note for name, note in sorted(notes.items())}}
    atomic.write_json(folder / file, body)


def point_at(folder: Path, pointer: str, name: Name | None) -> None:
    """Moves `latest` or `best`. A hint for people: nothing that must be right reads it."""
    if name is not None:
        atomic.write_whole(folder / pointer, f"{name}\n".encode())
