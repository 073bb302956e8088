"""The cache directory, format 1, as its readers see it.

Owns the names of the files, the ledger's records and reading them. A token exists only if the ledger records it.

    meta.json        what the tokens are: resolved spec, tokenizer, dtype, fingerprint
    tokenizer.json   the tokenizer itself, so that a moved cache still decodes
    era-00007.tok    the tokens of an era, little-endian uint16 or uint32, nothing else
    era-00008.part   the era being filled
    ledger.jsonl     one line for every finished era: tokens, hash, and the source's cursor at its end
    open.jsonl       commits inside the era being filled
    files.jsonl      identity of every source file that was opened
    builder.json     what the builder is doing; builder.lock is held while it runs
    readers/         which reader is where, so that nothing needed is recycled

Does not own writing tokens (writer.py) or deciding what to build (fill.py).
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jackline.data.cache.eras import EraPlan
from jackline.data.cache.state import Cursor, begin
from jackline.data.spec import FORMAT, DataSpec
from jackline.errors import CannotResume, JacklineError
from jackline.rundir.atomic import read_json
from jackline.rundir.jsonl import read_lines
from jackline.units import format_bytes


@dataclass(frozen=True)
class EraRecord:
    """One finished era. `is_last` closes the corpus; such a record may have no tokens (and then no file).

    The cursor is stored unparsed: of ten thousand records a reader needs only a handful of cursors.
    """

    era: int
    tokens: int
    hash: str
    cursor_json: dict[str, Any]
    is_last: bool = False

    @property
    def ends_at(self) -> Cursor:
        return Cursor.from_json(self.cursor_json)

    def to_json(self) -> dict[str, Any]:
        return {
            "era": self.era,
            "tokens": self.tokens,
            "hash": self.hash,
            "ends_at": self.cursor_json,
            "is_last": self.is_last,
        }

    @staticmethod
    def from_json(value: dict[str, Any]) -> EraRecord:
        return EraRecord(value["era"], value["tokens"], value["hash"], value["ends_at"], value["is_last"])


@dataclass(frozen=True)
class Meta:
    """What every process that opens the cache must agree on."""

    fingerprint: str
    spec: DataSpec
    vocab_size: int
    eos_id: int | None
    tokenizer_hash: str
    engine: str
    note: str = ""

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype("<u2") if self.vocab_size <= 1 << 16 else np.dtype("<u4")

    def to_json(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "fingerprint": self.fingerprint,
            "vocab_size": self.vocab_size,
            "eos_id": self.eos_id,
            "dtype": self.dtype.name,
            "tokenizer_hash": self.tokenizer_hash,
            "engine": self.engine,
            "note": self.note,
            "spec": self.spec.to_json(),
        }


def read_meta(folder: Path) -> Meta | None:
    """None when there is no cache (yet) in this folder."""
    value = read_json(folder / "meta.json")
    if not isinstance(value, dict):
        return None
    if value.get("format") != FORMAT:
        raise CannotResume(
            f"{folder} is a cache of format {value.get('format')}, this Jackline reads format {FORMAT}",
            hint="build it again: `jackline data prepare --rebuild`",
        )
    return Meta(
        value["fingerprint"],
        DataSpec.from_json(value["spec"]),
        value["vocab_size"],
        value["eos_id"],
        value["tokenizer_hash"],
        value["engine"],
        value["note"],
    )


def is_gone(folder: Path) -> bool:
    """Whether the folder was deleted. Its spec and metadata are checked, because a builder may leave another file
    behind while the folder is deleted."""
    return not (folder / "meta.json").exists() and not (folder / "spec.json").exists()


def folder_trouble(folder: Path, error: OSError) -> JacklineError:
    """An error of the operating system about the cache folder, explained to the user."""
    if is_gone(folder):
        return JacklineError(
            f"the token cache {folder} is gone",
            hint="somebody deleted it or its disk is away; run the same command again and it is built anew",
        )
    stat = os.statvfs(folder)
    free = format_bytes(stat.f_bavail * stat.f_frsize)
    return JacklineError(
        f"cannot write the token cache: {error.strerror} ({free} free in {folder})",
        hint="free some space or lower max_cache_bytes, then run the same command again: nothing is lost",
    )


def era_path(folder: Path, era: int) -> Path:
    return folder / f"era-{era:05d}.tok"


def part_path(folder: Path, era: int) -> Path:
    return folder / f"era-{era:05d}.part"


def present_eras(folder: Path) -> frozenset[int]:
    """Eras whose file exists (finished ones only)."""
    names = (entry.name for entry in os.scandir(folder))
    return frozenset(int(name[4:-4]) for name in names if name.startswith("era-") and name.endswith(".tok"))


class Ledger:
    """The finished eras, re-read as the file grows. Records may be in any order."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "ledger.jsonl"
        self._offset = 0
        self.records: dict[int, EraRecord] = {}
        self.last_era: int | None = None

    def refresh(self) -> None:
        lines = read_lines(self._path, self._offset)
        self._offset = lines.next_offset
        for value in lines.records:
            record = EraRecord.from_json(value)
            self.records[record.era] = record
            if record.is_last:
                self.last_era = record.era

    @property
    def is_sealed(self) -> bool:
        return self.last_era is not None

    def cursor_at(self, era: int, num_sources: int) -> Cursor | None:
        """The position in the source at the start of `era`; None until a builder has reached it."""
        if era == 0:
            return Cursor(begin(num_sources))
        record = self.records.get(era - 1)
        return record.ends_at if record is not None else None

    def first_unknown_up_to(self, era: int) -> int:
        """The era that must be built first so that `era` can be built: the first one after the nearest known record
        before it."""
        at = era
        while at > 0 and (at - 1) not in self.records:
            at -= 1
        return at


class Cache:
    """A cache as its readers see it."""

    def __init__(self, folder: Path, meta: Meta) -> None:
        self.folder = folder
        self.meta = meta
        self.plan: EraPlan = meta.spec.era_plan()
        self.ledger = Ledger(folder)
        self.ledger.refresh()

    def num_tokens(self, era: int) -> int | None:
        """Tokens of an era: known for finished ones; 0 after the last one; None while it is not finished."""
        record = self.ledger.records.get(era)
        if record is not None:
            return record.tokens
        last = self.ledger.last_era
        return 0 if last is not None and era > last else None

    def total_tokens(self) -> int | None:
        """Tokens of the whole corpus, once it is sealed."""
        last = self.ledger.last_era
        return None if last is None else self.plan.start(last) + self.ledger.records[last].tokens

    def bytes_on_disk(self) -> int:
        return sum(entry.stat().st_size for entry in os.scandir(self.folder) if entry.name.startswith("era-"))
