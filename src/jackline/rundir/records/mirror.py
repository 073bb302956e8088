"""mirror.json: what a mirror has uploaded, what it uploads now, and why it cannot.

Two files have this format, each written by one mirror process: `mirror.json` of the run (the command's own
checkpoints and the run's records) and `checkpoints/mirror.json` (Jackline's checkpoints).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import Any

from jackline.immutable import immutable
from jackline.rundir import atomic
from jackline.rundir.access.secrets import hide_in
from jackline.rundir.process_id import ProcessId
from jackline.rundir.records.fields import decode, encode, left_out


@immutable
class UploadRecord:
    """One checkpoint in the store. `state`: 'uploaded', or 'confirmed' once the store vouched for its bytes.

    `place` is its folder in the store; `saved_at_s` is when the training saved it.
    """

    state: str | None = None
    at_s: float | None = None
    saved_at_s: float | None = None
    place: str | None = None
    size_bytes: int | None = None
    confirmed_at_s: float | None = left_out()


@immutable
class UploadingRecord:
    """The upload under way; no name when there is none."""

    name: str | None = None
    done_bytes: int | None = None
    total_bytes: int | None = None


@immutable
class TroubleRecord:
    """Why the last try failed; empty after a success."""

    why: str | None = None
    at_s: float | None = None


def _uploads(value: Any) -> dict[str, UploadRecord] | None:
    if not isinstance(value, dict):
        return None
    return {str(name): decode(UploadRecord, entry) for name, entry in value.items() if isinstance(entry, dict)}


_OWN = {
    "dict[str, UploadRecord]": _uploads,
    "UploadingRecord": lambda value: decode(UploadingRecord, value),
    "TroubleRecord": lambda value: decode(TroubleRecord, value),
}


@immutable
class MirrorRecord:
    """`store` is where it copies to. `answered`: the number of the last request (`MirrorProcess.ask`) after which the
    store had everything."""

    store: str | None = None
    process: ProcessId | None = None
    at_s: float | None = None
    checkpoints: dict[str, UploadRecord] = field(default_factory=dict)
    uploading: UploadingRecord = UploadingRecord()
    trouble: TroubleRecord = TroubleRecord()
    story_at_s: float | None = None
    answered: int = 0

    @property
    def is_there(self) -> bool:
        """False for a file that is absent or could not be read at all."""
        return self != MirrorRecord()

    def has(self, name: str) -> bool:
        return self.checkpoints.get(name, UploadRecord()).state is not None

    @property
    def done(self) -> tuple[object, ...]:
        """Changes whenever an upload is complete."""
        return (*((name, entry.at_s) for name, entry in self.checkpoints.items()), self.story_at_s)

    @staticmethod
    def from_json(raw: object) -> MirrorRecord:
        return decode(MirrorRecord, raw, _OWN)

    def to_json(self) -> dict[str, Any]:
        entries: Mapping[str, UploadRecord] = self.checkpoints
        return {**encode(self), "checkpoints": {name: encode(entries[name]) for name in sorted(entries)}}


def read_mirror(path: Path) -> MirrorRecord:
    return MirrorRecord.from_json(atomic.read_json(path))


def write_mirror(path: Path, record: MirrorRecord) -> None:
    """Only the mirror process that owns the file calls this, while it holds the mirror's lock."""
    atomic.write_json(path, hide_in(record.to_json()))
