"""foreign.json: what is known about the checkpoints that the user's own command writes.

Owns the file's format: which checkpoints were seen, which attempt wrote each one, which attempts loaded it and how
they ended, and where a copy is kept. Only the supervisor writes it. A checkpoint is identified by its content and
time, never by its path: many scripts rewrite the same path. Does not own the choice (supervisor/foreign/choice.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from jackline.immutable import immutable
from jackline.rundir import atomic
from jackline.rundir.layout import FORMAT, RunDir

MAX_KNOWN = 200
WHOLE = "whole:"  # the digest covers every byte; without this mark only the ends and samples

# How an attempt that loaded a checkpoint ended, as far as that checkpoint is concerned.
OPEN = "open"  # it runs, or its end was not seen
ADVANCED = "advanced"  # it made progress after loading
FAILED = "failed"  # it failed while or right after loading
OTHER = "other"  # stopped, killed, or ended for a reason unrelated to the checkpoint
_OUTCOMES = (OPEN, ADVANCED, FAILED, OTHER)


@immutable
class Fingerprint:
    """Content and time of a file, or of a folder over all its files."""

    inode: int
    mtime_ns: int
    size_bytes: int
    digest: str

    def has_content_of(self, other: Fingerprint) -> bool:
        """Whether the content is equal. Samples of a large file may miss a change, so its time must be equal too."""
        if (self.size_bytes, self.digest) != (other.size_bytes, other.digest):
            return False
        return self.digest.startswith(WHOLE) or self.mtime_ns == other.mtime_ns

    def is_same(self, other: Fingerprint) -> bool:
        """Whether it is the same checkpoint. The inode does not count: a copy that was put back is the same."""
        return self.mtime_ns == other.mtime_ns and self.has_content_of(other)


@immutable
class Load:
    """One attempt that was started from this checkpoint."""

    attempt: int
    outcome: str = OPEN
    cause: str = ""


@immutable
class Known:
    """One checkpoint. `written_by` is the attempt during which it appeared; None when none ran. `order_ns` is when it
    was written, because a copy may have lost its mtime."""

    path: str
    fingerprint: Fingerprint
    order_ns: int
    written_by: int | None = None
    loads: tuple[Load, ...] = ()
    is_left_behind: bool = False  # the user went back to an older one
    kept: str = ""  # the copy, relative to the run directory


@immutable
class ForeignRecord:
    """The contents of foreign.json, oldest checkpoint first."""

    known: tuple[Known, ...] = ()
    num_kept: int = 0  # number of copies ever made; used to name them

    def find(self, fingerprint: Fingerprint) -> Known | None:
        return next((known for known in reversed(self.known) if known.fingerprint.is_same(fingerprint)), None)

    def find_content(self, fingerprint: Fingerprint) -> Known | None:
        return next((known for known in reversed(self.known) if known.fingerprint.has_content_of(fingerprint)), None)

    def with_known(self, entry: Known) -> ForeignRecord:
        """The record with `entry` added, or replacing the entry of the same checkpoint."""
        others = [known for known in self.known if not known.fingerprint.is_same(entry.fingerprint)]
        ordered = sorted([*others, entry], key=lambda known: known.order_ns)
        return replace(self, known=_bounded(ordered))

    def loaded_by(self, attempt: int) -> Known | None:
        return next((known for known in self.known if any(load.attempt == attempt for load in known.loads)), None)

    def failed_in(self, fingerprint: Fingerprint) -> int | None:
        """The attempt that failed to load this content, unless a later one succeeded. Compares content, because
        writing the same bytes again does not make them loadable."""
        alike = [known for known in self.known if known.fingerprint.has_content_of(fingerprint)]
        failed = None
        for load in sorted((load for known in alike for load in known.loads), key=lambda load: load.attempt):
            if load.outcome in (FAILED, ADVANCED):
                failed = load.attempt if load.outcome == FAILED else None
        return failed

    def to_json(self) -> dict[str, Any]:
        return {"format": FORMAT, **asdict(self)}

    @staticmethod
    def from_json(value: Any) -> ForeignRecord:
        """Entries that cannot be read are left out; the others are used."""
        found = value if isinstance(value, Mapping) else {}
        entries = found.get("known")
        known = [_known(entry) for entry in (entries if isinstance(entries, list | tuple) else [])]
        number = found.get("num_kept")
        return ForeignRecord(
            tuple(entry for entry in known if entry is not None),
            int(number or 0) if _is_count(number) else len(known),
        )


def read_foreign_record(run: RunDir) -> ForeignRecord:
    """The record; an empty one when the file is absent or cannot be read."""
    return ForeignRecord.from_json(atomic.read_json(run.foreign_file))


def write_foreign_record(run: RunDir, record: ForeignRecord) -> None:
    atomic.write_json(run.foreign_file, record.to_json(), durable=True)


def _bounded(known: list[Known]) -> tuple[Known, ...]:
    surplus = len(known) - MAX_KNOWN
    if surplus <= 0:
        return tuple(known)
    old = [entry for entry in known[:-10] if not entry.kept][:surplus]
    return tuple(entry for entry in known if entry not in old)


def _known(value: Any) -> Known | None:
    try:
        mark = value["fingerprint"]
        fingerprint = Fingerprint(
            int(mark["inode"]), int(mark["mtime_ns"]), int(mark["size_bytes"]), str(mark["digest"])
        )
        path, order_ns = value["path"], int(value["order_ns"])
    except (TypeError, ValueError, KeyError, OverflowError):
        return None
    if not isinstance(path, str) or not path:
        return None
    author, kept = value.get("written_by"), value.get("kept")
    loads = value.get("loads")
    return Known(
        path,
        fingerprint,
        order_ns,
        author if _is_count(author) else None,
        tuple(
            load for entry in (loads if isinstance(loads, list | tuple) else []) if (load := _load(entry)) is not None
        ),
        value.get("is_left_behind") is True,
        kept if isinstance(kept, str) and _is_inside(kept) else "",
    )


def _load(value: Any) -> Load | None:
    if not isinstance(value, dict) or not _is_count(value.get("attempt")):
        return None
    outcome, cause = value.get("outcome"), value.get("cause")
    return Load(value["attempt"], outcome if outcome in _OUTCOMES else OPEN, cause if isinstance(cause, str) else "")


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_inside(path: str) -> bool:
    """Whether it has the form kept/0001/last.pt: a forged record must not name a file elsewhere."""
    words = path.split("/")
    return len(words) == 3 and words[0] == "kept" and words[1].isdigit() and words[2] not in ("", ".", "..")
