"""Which runs exist on this machine, from any directory.

One small file per run in the user's state folder. It is only a hint: a run that was moved or deleted is skipped.
"""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jackline.rundir import atomic
from jackline.rundir.layout import RunDir
from jackline.rundir.records.fields import decode, encode

MAX_ENTRIES = 500


@dataclass(frozen=True)
class RegistryEntry:
    """Where a run was when it was registered."""

    path: str | None = None
    registered_at_s: float | None = None

    @staticmethod
    def from_json(raw: object) -> RegistryEntry:
        return decode(RegistryEntry, raw)

    def to_json(self) -> dict[str, Any]:
        return encode(self)


def state_folder() -> Path:
    """$XDG_STATE_HOME/jackline, else ~/.local/state/jackline, else a folder in /tmp for a user without a home."""
    state = os.environ.get("XDG_STATE_HOME")
    if state and os.path.isabs(state):
        return Path(state) / "jackline"
    try:
        return Path.home() / ".local" / "state" / "jackline"
    except RuntimeError:  # a container that runs under a uid without an entry in passwd
        return Path("/tmp") / f"jackline-state-{os.getuid()}"


def register(run: RunDir) -> bool:
    """Register a run. False when the state folder cannot be written; the run continues without."""
    import hashlib

    folder = state_folder() / "runs"
    path = run.path.resolve()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        entry = folder / (hashlib.sha256(os.fsencode(path)).hexdigest()[:16] + ".json")
        atomic.write_json(entry, RegistryEntry(str(path), time.time()).to_json())
        _forget_oldest(folder)
    except OSError:
        return False
    return True


def registered_runs() -> list[RunDir]:
    """Runs whose folder still exists, newest registration first."""
    found: list[tuple[float, RunDir]] = []
    try:
        entries = list((state_folder() / "runs").glob("*.json"))
    except OSError:
        return []
    for entry in entries:
        known = RegistryEntry.from_json(atomic.read_json(entry))
        if known.path is not None and (run := RunDir(Path(known.path))).has_run_file:
            found.append((known.registered_at_s or 0.0, run))
    return [run for _, run in sorted(found, key=lambda pair: pair[0], reverse=True)]


def _forget_oldest(folder: Path) -> None:
    entries = sorted(folder.glob("*.json"), key=lambda entry: entry.stat().st_mtime)
    for entry in entries[:-MAX_ENTRIES]:
        with contextlib.suppress(OSError):
            entry.unlink()
