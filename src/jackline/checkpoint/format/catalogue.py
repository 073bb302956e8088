"""The contents of a run's `checkpoints` folder.

Owns the listing, newest first, and the files beside the checkpoints:

    writer.lock   held by the one process that may write here; names that process
    status.json   the writer's notes: what was acknowledged, read back, which is best (a hint, never trusted)
    mirror.json   the mirror's notes: what was uploaded and confirmed
    verified.json notes of `jackline checkpoints verify`: what it read, and the damage it found
    latest, best  names of checkpoints, for people and scripts (hints too)
    rewind-N-rR.json   a user went back to step N: later steps with a retry below R are left behind (rewind.py)

Does not judge bytes (verify.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jackline.checkpoint.format.manifest import (
    DAMAGED,
    Damage,
    Manifest,
    Name,
    Rewind,
    is_left_behind,
    parse_name,
    parse_rewind,
)
from jackline.checkpoint.format.verify import check_sizes, read_manifest
from jackline.errors import UsageError
from jackline.immutable import immutable
from jackline.rundir import atomic
from jackline.rundir.access.reading import read_text
from jackline.rundir.records.mirror import UploadRecord, read_mirror

LOCK = "writer.lock"
STATUS = "status.json"
MIRROR = "mirror.json"
VERIFIED = "verified.json"
LATEST = "latest"
BEST = "best"
_MAX_NAME_BYTES = 200


@immutable
class Listed:
    """One checkpoint after a quick look: the manifest is verified, file lengths are right, data is not read."""

    name: Name
    path: Path
    manifest: Manifest | None
    problem: str | None

    @property
    def is_plausible(self) -> bool:
        return self.manifest is not None and self.problem is None


def list_names(folder: Path) -> list[Name]:
    """Newest first, without those left behind by a rewind. A folder with any other name is not a checkpoint."""
    names, rewinds = _names_and_rewinds(folder)
    return [name for name in names if not is_left_behind(name, rewinds)]


def list_left_behind(folder: Path) -> list[Name]:
    """Newest first: checkpoints left behind when a user went back to an earlier step.

    They stay until a person deletes them.
    """
    names, rewinds = _names_and_rewinds(folder)
    return [name for name in names if is_left_behind(name, rewinds)]


def list_rewinds(folder: Path) -> list[Rewind]:
    return _names_and_rewinds(folder)[1]


def write_rewind(folder: Path, rewind: Rewind, body: dict[str, Any]) -> None:
    """Write the rewind durably before any attempt resumes from it.

    `body` is for people; only the file's name counts.
    """
    atomic.write_json(folder / str(rewind), body, durable=True)


def _names_and_rewinds(folder: Path) -> tuple[list[Name], list[Rewind]]:
    try:
        entries = [path.name for path in folder.iterdir()]
    except OSError:
        return [], []
    names = sorted((name for name in map(parse_name, entries) if name is not None), reverse=True)
    return names, sorted(rewind for rewind in map(parse_rewind, entries) if rewind is not None)


def list_checkpoints(folder: Path) -> list[Listed]:
    """Newest first. Each one gets a quick look; its data is not read."""
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
    """Damaged checkpoints that were renamed out of the way."""
    try:
        return sorted(path for path in folder.iterdir() if path.name.startswith(DAMAGED) and path.is_dir())
    except OSError:
        return []


def read_uploads(folder: Path) -> dict[Name, UploadRecord]:
    """What the mirror has of these checkpoints; empty when mirror.json is absent or damaged."""
    found = ((parse_name(text), upload) for text, upload in read_mirror(folder / MIRROR).checkpoints.items())
    return {name: upload for name, upload in found if name is not None and upload.state is not None}


def read_notes(folder: Path, file: str) -> dict[Name, dict[str, Any]]:
    """The writer's notes for each checkpoint; empty when they are absent or damaged."""
    body = atomic.read_json(folder / file)
    steps = body.get("checkpoints") if isinstance(body, dict) else None
    if not isinstance(steps, dict):
        return {}
    named = ((parse_name(text), note) for text, note in steps.items())
    return {name: note for name, note in named if name is not None and isinstance(note, dict)}


def write_notes(folder: Path, file: str, notes: dict[Name, dict[str, Any]], **more: Any) -> None:
    """Only the writer writes status.json, only `checkpoints verify` writes verified.json."""
    body = {**more, "checkpoints": {str(name): note for name, note in sorted(notes.items())}}
    atomic.write_json(folder / file, body)


def point_at(folder: Path, pointer: str, name: Name | None) -> None:
    """Move `latest` or `best`; None removes it. It is a hint for people: nothing that must be right reads it."""
    if name is None:
        (folder / pointer).unlink(missing_ok=True)
    else:
        atomic.write_whole(folder / pointer, f"{name}\n".encode())


def choose_name(folder: Path, checkpoint: str | int, run_name: str) -> Name:
    """The checkpoint that a person means: 'best' (the newest where none is best), 'latest', or a step."""
    names = list_names(folder)
    if not names:
        raise UsageError(f"run '{run_name}' has no checkpoint", hint=f"how far it is: jackline status {run_name}")
    if checkpoint in ("best", "latest"):
        return (_read_best(folder, names) if checkpoint == "best" else None) or names[0]
    wanted = int(checkpoint) if str(checkpoint).isdigit() else None
    found = next((name for name in names if name.step == wanted), None)
    if found is None:
        known = ", ".join(str(name.step) for name in names[:8])
        raise UsageError(
            f"run '{run_name}' has no checkpoint '{checkpoint}'", hint=f"best, latest, or a step: {known}"
        )
    return found


def _read_best(folder: Path, names: list[Name]) -> Name | None:
    try:
        pointed = parse_name(read_text(folder / BEST, _MAX_NAME_BYTES).strip())
    except OSError:
        return None
    return pointed if pointed in names else None
