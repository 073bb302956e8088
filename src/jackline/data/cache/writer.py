"""Writes one era: appends tokens, commits about every second, seals the era into the ledger, recovers after a crash.

Owns every byte of era files, `open.jsonl` and `ledger.jsonl`. The order of writing is the guarantee: tokens reach the
disk before the line that names them, so whatever kills the process, the last whole line is true. Does not own where
tokens come from.
"""

from __future__ import annotations

import contextlib
import os
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from jackline.data.cache.directory import EraRecord, era_path, folder_trouble, part_path
from jackline.data.cache.state import Cursor
from jackline.data.sources.bytefile import SourceChanged
from jackline.data.tokenise.encode import Tokens
from jackline.rundir.atomic import sync_directory
from jackline.rundir.jsonl import JsonlWriter, read_lines

_READ_BYTES = 4 << 20


@dataclass(frozen=True)
class Commit:
    """Tokens of the open era that are safe on disk, the hash over them, and the position in the source after them."""

    era: int
    tokens: int
    hash: str
    cursor: Cursor

    def to_json(self) -> dict[str, Any]:
        return {"era": self.era, "tokens": self.tokens, "hash": self.hash, "cursor": self.cursor.to_json()}


class EraWriter:
    """One era being filled. `append` costs one write; `commit` syncs in a thread of its own."""

    def __init__(self, folder: Path, era: int, capacity: int, dtype: np.dtype[Any]) -> None:
        self._folder = folder
        self.era = era
        self.capacity = capacity
        self.num_tokens = 0
        self._dtype = dtype
        self._hash = xxhash.xxh3_128()
        self.path = part_path(folder, era)
        self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="jackline-commit")
        self._running: Future[None] | None = None

    @property
    def room(self) -> int:
        return self.capacity - self.num_tokens

    def recover(self) -> Cursor | None:
        """Keep the tokens of the newest commit whose hash matches, cut off the rest; None if the era starts empty."""
        good = self._last_good_commit()
        self.num_tokens = good.tokens if good else 0
        os.ftruncate(self._fd, self.num_tokens * self._dtype.itemsize)
        return good.cursor if good else None

    def append(self, tokens: Tokens) -> None:
        data = memoryview(np.ascontiguousarray(tokens).view(np.uint8).data)
        self._hash.update(data)
        offset = self.num_tokens * self._dtype.itemsize
        while data:
            try:
                written = os.pwrite(self._fd, data, offset)
            except OSError as error:
                # Remove the partial write again, so that there is room on the disk to write the reason.
                os.ftruncate(self._fd, self.num_tokens * self._dtype.itemsize)
                raise folder_trouble(self._folder, error) from error
            offset, data = offset + written, data[written:]
        self.num_tokens += len(tokens)

    def commit(self, cursor: Cursor) -> bool:
        """Sync what was appended, in the background; False while the previous commit is still running."""
        if self._running is not None:
            if not self._running.done():
                return False
            self._running.result()
        made = Commit(self.era, self.num_tokens, self._hash.hexdigest(), cursor)
        self._running = self._thread.submit(self._write_commit, made)
        return True

    def seal(self, ends_at: Cursor, *, is_last: bool, expected: EraRecord | None) -> EraRecord:
        """Finish the era. If it was finished before, it must have the same content again."""
        self._finish_thread()
        record = EraRecord(self.era, self.num_tokens, self._hash.hexdigest(), ends_at.to_json(), is_last)
        if expected is not None and (expected.hash, expected.tokens) != (record.hash, record.tokens):
            self.discard()
            raise SourceChanged(
                f"era {self.era} was built again and came out different: {record.tokens:,} tokens with hash "
                f"{record.hash[:12]}, the ledger says {expected.tokens:,} with {expected.hash[:12]}"
            )
        part, final = part_path(self._folder, self.era), era_path(self._folder, self.era)
        try:
            os.fsync(self._fd)
            self._close_file()
            if expected is None:
                record_era(self._folder, record)
            if self.num_tokens:
                os.replace(part, final)
            else:
                os.unlink(part)
            sync_directory(self._folder)
        except OSError as error:
            raise folder_trouble(self._folder, error) from error
        return record

    def close(self) -> None:
        """Leave the .part file as it is, for the next builder to recover."""
        self._finish_thread()
        self._close_file()

    def discard(self) -> None:
        self.close()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(part_path(self._folder, self.era))

    def _close_file(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _finish_thread(self) -> None:
        if self._running is not None:
            self._running.result()
            self._running = None
        self._thread.shutdown()

    def _write_commit(self, commit: Commit) -> None:
        try:
            os.fsync(self._fd)
            _append_line(self._folder / "open.jsonl", commit.to_json())
        except OSError as error:
            raise folder_trouble(self._folder, error) from error

    def _last_good_commit(self) -> Commit | None:
        """The newest commit whose hash matches the bytes; reads the .part file once."""
        commits = _read_commits(self._folder, self.era)
        size = os.fstat(self._fd).st_size // self._dtype.itemsize
        good: Commit | None = None
        at = 0
        for commit in commits:
            if not at <= commit.tokens <= min(size, self.capacity):
                break
            at = self._hash_range(at, commit.tokens)
            if self._hash.hexdigest() != commit.hash:
                break
            good = commit
        # If a later commit was wrong, the hash covers bytes after the last good one: compute it again up to there.
        self._hash = xxhash.xxh3_128()
        if good is not None:
            self._hash_range(0, good.tokens)
        return good

    def _hash_range(self, start: int, end: int) -> int:
        at, stop = start * self._dtype.itemsize, end * self._dtype.itemsize
        while at < stop:
            data = os.pread(self._fd, min(_READ_BYTES, stop - at), at)
            if not data:
                break
            self._hash.update(data)
            at += len(data)
        return end


def record_era(folder: Path, record: EraRecord) -> None:
    """Write the ledger line that makes an era exist."""
    _append_line(folder / "ledger.jsonl", record.to_json())


def clear_commits(folder: Path) -> None:
    """Delete the commits of an era that is now in the ledger: they have no further use."""
    with contextlib.suppress(FileNotFoundError):
        os.truncate(folder / "open.jsonl", 0)


def finish_interrupted_seals(folder: Path, records: dict[int, EraRecord]) -> None:
    """Rename or delete each .part file whose era is in the ledger. It is whole if the process was killed just before
    renaming it; otherwise it is left over from a rebuild."""
    for path in folder.glob("era-*.part"):
        record = records.get(int(path.name[4:-5]))
        if record is None:
            continue
        if hash_file(path) == record.hash:
            os.replace(path, era_path(folder, record.era))
        else:
            os.unlink(path)


def hash_file(path: Path) -> str:
    """The hash of an era's file as it is on the disk now."""
    made = xxhash.xxh3_128()
    with open(path, "rb") as file:
        while data := file.read(_READ_BYTES):
            made.update(data)
    return str(made.hexdigest())


def _read_commits(folder: Path, era: int) -> list[Commit]:
    lines = read_lines(folder / "open.jsonl")
    return [
        Commit(value["era"], value["tokens"], value["hash"], Cursor.from_json(value["cursor"]))
        for value in lines.records
        if value.get("era") == era
    ]


def _append_line(path: Path, record: dict[str, Any]) -> None:
    writer = JsonlWriter(path)
    try:
        if not writer.append(record):
            raise OSError(28, "No space left on device")
        writer.sync()
    finally:
        writer.close()
