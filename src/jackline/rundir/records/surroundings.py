"""attempts/NNN/surroundings.json: the code and the packages that an attempt ran with. Written by the supervisor."""

from __future__ import annotations

from dataclasses import field
from typing import Any

from jackline.immutable import immutable
from jackline.rundir import atomic
from jackline.rundir.layout import AttemptDir
from jackline.rundir.records.fields import decode, encode


@immutable
class SurroundingsRecord:
    """`packages`: name to version, of the folders that its processes had mapped. `git` as in run.json."""

    at_s: float | None = None
    packages: dict[str, Any] = field(default_factory=dict)
    folders: tuple[str, ...] = ()
    git: dict[str, Any] = field(default_factory=dict)

    @staticmethod
    def from_json(raw: object) -> SurroundingsRecord:
        return decode(SurroundingsRecord, raw)

    def to_json(self) -> dict[str, Any]:
        return encode(self)


def read_surroundings(attempt: AttemptDir) -> SurroundingsRecord:
    return SurroundingsRecord.from_json(atomic.read_json(attempt.surroundings_file))


def write_surroundings(attempt: AttemptDir, record: SurroundingsRecord) -> None:
    atomic.write_json(attempt.surroundings_file, record.to_json())
