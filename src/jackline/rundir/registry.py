"""Which runs exist on this machine, from any directory, and which of them this user has made or accepted.

One small file per run in the user's own state folder, which nobody else may write to. The path is only a hint: a run
that was moved or deleted is skipped. The digest of run.json and the options are more: they show what this user asked
for, whatever the run's folder says (access/trust.py). Options are kept here with their passwords, and only here.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import Any

from jackline.immutable import immutable
from jackline.rundir import atomic
from jackline.rundir.access.reading import read_whole
from jackline.rundir.access.writing import NotOurs, private_folder
from jackline.rundir.atomic import sha256_hex
from jackline.rundir.layout import RunDir
from jackline.rundir.records.fields import decode, encode, left_out

MAX_ENTRIES = 500
NOT_VOUCHED = "-"  # registered, but this user has not seen what it would execute


@immutable
class RegistryEntry:
    """Where a run was when it was registered. `digest`: of the run.json that this user has made or accepted; absent
    in older files. `owner`: who the run's folder belonged to, since some file systems show another user. `inode`: of
    the folder; it stays when the folder is moved, and a copy has another one. `is_made`: this user's own program has
    made the run, so that nothing in it came from somebody else."""

    path: str | None = None
    registered_at_s: float | None = None
    digest: str | None = left_out()
    owner: int | None = left_out()
    inode: int | None = left_out()
    is_made: bool | None = left_out()
    options: dict[str, Any] | None = field(default=None, metadata={"is_left_out": True})

    @staticmethod
    def from_json(raw: object) -> RegistryEntry:
        return decode(RegistryEntry, raw)

    def to_json(self) -> dict[str, Any]:
        return encode(self)


def copies_folder() -> Path:
    """Where records that were brought from mirrors are, for commands that only read."""
    return state_folder() / "copies"


def is_copy(run: RunDir) -> bool:
    """However its path is spelled."""
    folder = os.path.realpath(copies_folder())
    return os.path.dirname(os.path.dirname(os.path.realpath(run.path))) == folder


def state_folder() -> Path:
    """$XDG_STATE_HOME/jackline, else ~/.local/state/jackline, else a folder in the temporary directory for a user
    without a home."""
    state = os.environ.get("XDG_STATE_HOME")
    if state and os.path.isabs(state):
        return Path(state) / "jackline"
    try:
        return Path.home() / ".local" / "state" / "jackline"
    except RuntimeError:  # a container that runs under a uid without an entry in passwd
        return Path("/tmp") / f"jackline-state-{os.getuid()}"


def own_state_folder() -> Path:
    """The state folder, made if it is absent. Raises OSError when it belongs to somebody else, or when others may
    write to it: what it says would then be theirs."""
    return private_folder(state_folder())


def register(run: RunDir, *, vouched: bool, is_made: bool = False, options: Mapping[str, Any] | None = None) -> bool:
    """Register a run. `vouched`: this user has made its run.json, or accepted it; else an earlier entry's word
    stays. `is_made`: made, not accepted. False when the state folder cannot be used; the run continues without."""
    path = run.path.resolve()
    try:
        folder = own_state_folder() / "runs"
        folder.mkdir(0o700, exist_ok=True)
        place = folder / _name_of(path)
        known = RegistryEntry.from_json(atomic.read_json(place))
        digest = digest_of(run) if vouched else known.digest if known.path else NOT_VOUCHED
        told = dict(options) if options is not None else known.options
        found = run.path.stat()
        was_made = known.is_made and known.inode == found.st_ino
        entry = RegistryEntry(
            str(path), time.time(), digest, found.st_uid, found.st_ino, True if is_made or was_made else None, told
        )
        atomic.write_json(place, entry.to_json())
        place.chmod(0o600)
        _forget_oldest(folder)
    except OSError:
        return False
    return True


def digest_of(run: RunDir) -> str:
    """The digest of run.json. Raises OSError."""
    return sha256_hex(read_whole(run.run_file))


def registered_runs() -> list[RunDir]:
    """Runs whose folder still exists, newest registration first."""
    return [run for run in registered_places() if run.has_run_file]


def registered_places() -> list[RunDir]:
    """Where runs were, newest registration first. Nobody has looked whether they still are."""
    newest = sorted(entries(), key=lambda known: known.registered_at_s or 0.0, reverse=True)
    return [RunDir(Path(known.path)) for known in newest if known.path is not None]


def entry_of(run: RunDir) -> RegistryEntry:
    """The entry for this folder; an empty one when there is none, or the state folder is not this user's own."""
    if not _is_own():
        return RegistryEntry()
    return RegistryEntry.from_json(atomic.read_json(state_folder() / "runs" / _name_of(run.path.resolve())))


def entries() -> list[RegistryEntry]:
    """All entries; none when the state folder is not this user's own."""
    if not _is_own():
        return []
    try:
        places = list((state_folder() / "runs").glob("*.json"))
    except OSError:
        return []
    return [RegistryEntry.from_json(atomic.read_json(place)) for place in places]


def _is_own() -> bool:
    folder = state_folder()
    try:
        return folder.is_dir() and private_folder(folder) == folder
    except (OSError, NotOurs):
        return False


def _name_of(path: Path) -> str:
    return sha256_hex(os.fsencode(path))[:16] + ".json"


def _forget_oldest(folder: Path) -> None:
    places = sorted(folder.glob("*.json"), key=lambda place: place.stat().st_mtime)
    for place in places[:-MAX_ENTRIES]:
        with contextlib.suppress(OSError):
            place.unlink()
