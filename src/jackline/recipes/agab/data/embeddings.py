"""Vectors of sequences, computed once: a store for each encoder, in shards, safe to kill at any instant.

    ROOT/embeddings/NAME-HASH/       one folder for each (encoder, revision, width); its name is the cache key
        store.json                   what the vectors are
        shard-00007-SUM.emb          some thousand vectors (shards.py); written whole, durable, never changed
        matrix-HASH.npy, .json       the vectors of one list of sequences in its order (matrix.py)
        lock                         held by the one process that writes

Owns: which sequences are known, encoding the others in the order they are asked for, waiting for another process that
does so already, and what happens to a damaged shard (its sequences are encoded anew). A death loses at most one shard
of work, and what is encoded after it is byte for byte what would have been encoded without it.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from jackline.data.progress import Board
from jackline.data.spec import default_cache_root
from jackline.errors import JacklineError
from jackline.recipes.agab.data.encoders import Encoder
from jackline.recipes.agab.data.pairs import Hashes
from jackline.recipes.agab.data.residues import sequence_hash
from jackline.recipes.agab.data.shards import (
    DTYPE,
    DamagedShard,
    Vectors,
    check_vectors,
    list_shards,
    read_hashes,
    shard_number,
    write_shard,
)
from jackline.rundir.atomic import read_json, write_json
from jackline.rundir.lock import RunLock
from jackline.units import format_bytes

FORMAT = 1
_WAIT_S = 0.25
_MAX_REPAIRS = 3
_MAX_CHUNK_BYTES = 16 << 20  # of texts in memory

Say = Callable[[str], None]


@dataclass(frozen=True)
class Found:
    """Where each asked sequence is: a shard (-1: nowhere) and a row of it."""

    shards: list[Path]
    shard: NDArray[np.int64]
    row: NDArray[np.int64]

    @property
    def missing(self) -> NDArray[np.int64]:
        return np.flatnonzero(self.shard < 0)


class Store:
    """The vectors of one encoder."""

    def __init__(self, encoder: Encoder, root: Path | None = None) -> None:
        self.identity = {
            "format": FORMAT,
            "encoder": encoder.name,
            "revision": encoder.revision,
            "width": encoder.dim,
            "dtype": DTYPE.name,
        }
        self.key = _key(self.identity)
        self.width = encoder.dim
        self.folder = store_folder(self.key, root)
        self.damaged: dict[Path, str] = {}
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if read_json(self.folder / "store.json") != self.identity:
                write_json(self.folder / "store.json", self.identity, durable=True)
        except OSError as error:
            raise JacklineError(
                f"cannot make the embedding cache {self.folder}: {error.strerror}",
                hint="cache_dir=PATH or JACKLINE_DATA names another place for it",
            ) from error

    def find(self, hashes: Hashes) -> Found:
        """Look all up at once: 16 bytes a known sequence are read, and sorted in memory."""
        self.damaged.clear()
        shards, parts = [], []
        for path in list_shards(self.folder):
            try:
                parts.append(read_hashes(path, self.width))
                shards.append(path)
            except FileNotFoundError:
                continue  # another process found it damaged
            except (DamagedShard, OSError) as damage:  # a sector that cannot be read is damage too
                self.damaged[path] = str(damage)
        return _find(shards, parts, hashes)

    @contextlib.contextmanager
    def locked(self, board: Board) -> Iterator[None]:
        """The one writer; waits while there is another."""
        lock = RunLock(self.folder / "lock")
        try:
            while not lock.try_acquire():
                board.set("wait", done=0, total=None, unit="s", detail=f"{self._holder()}, which writes {self.key}")
                time.sleep(_WAIT_S)
        except OSError as error:
            raise self.trouble(error) from error
        try:
            with contextlib.suppress(OSError):  # for those who wait; on a full disk they do without
                (self.folder / "lock").write_text(str(os.getpid()))
            self._clear_leavings()
            yield
        finally:
            lock.release()

    def remove(self, path: Path, why: str, say: Say) -> None:
        """A damaged shard goes; whoever holds the lock encodes its sequences anew."""
        say(f"warning: {path.parent.name}/{why}; its sequences are encoded again")
        with contextlib.suppress(FileNotFoundError):
            path.unlink()

    def free_number(self) -> int:
        """The lowest number without a shard: what replaces a damaged one takes its place."""
        taken = {shard_number(path) for path in list_shards(self.folder)}
        return next(number for number in range(len(taken) + 1) if number not in taken)

    def trouble(self, error: OSError) -> JacklineError:
        with contextlib.suppress(OSError):
            stat = os.statvfs(self.folder)
            return JacklineError(
                f"cannot write the embedding cache: {error.strerror} "
                f"({format_bytes(stat.f_bavail * stat.f_frsize)} free in {self.folder})",
                hint="free some space or name another place (cache_dir=PATH), then run the same command again: "
                "what is encoded already is kept",
            )
        return JacklineError(
            f"the embedding cache {self.folder} is gone", hint="run the same command again and it is made anew"
        )

    def _holder(self) -> str:
        try:
            return f"process {int((self.folder / 'lock').read_text())}"
        except (OSError, ValueError):
            return "another process"

    def _clear_leavings(self) -> None:
        """Temporary files of a process that was killed. Only the holder of the lock writes, so they are nobody's."""
        for path in self.folder.glob(".*.tmp"):
            with contextlib.suppress(OSError):
                path.unlink()


@dataclass(frozen=True)
class Job:
    """What to encode: the hashes of all sequences in order, and how to get the texts of some of them."""

    hashes: Hashes
    texts: Callable[[NDArray[np.int64]], Iterable[bytes]]  # of places in `hashes`, ascending
    what: str  # "antibodies", for people


def encode_missing(store: Store, encoder: Encoder, job: Job, board: Board, say: Say) -> Found:
    """Every sequence of the job is in an undamaged shard afterwards. The lock must be held."""
    for _ in range(_MAX_REPAIRS):
        found = store.find(job.hashes)
        for path, why in list(store.damaged.items()):
            store.remove(path, why, say)
        if len(found.missing):
            try:
                _encode(store, encoder, job, found.missing, board)
            except OSError as error:
                raise store.trouble(error) from error
            finally:
                encoder.release()
            found = store.find(job.hashes)
        if not _remove_damaged(store, found, say) and not len(found.missing):
            return found
    raise JacklineError(
        f"shards in {store.folder} are damaged again right after they were written",
        hint="the disk or memory of this machine fails; name another place: cache_dir=PATH",
    )


def _encode(store: Store, encoder: Encoder, job: Job, missing: NDArray[np.int64], board: Board) -> None:
    _check_room(store, len(missing), len(job.hashes))
    board.set("wait", done=0, total=None, unit="weights", detail=f"the weights of {encoder.name}")
    encoder.load()
    texts = iter(job.texts(missing))
    done, total = 0, len(missing)

    def moved(count: int) -> None:
        board.set("encode", done=done + count, total=total, unit=job.what, detail=f"with {encoder.name}")

    moved(0)
    while chunk := _take(texts, encoder.shard_rows):
        hashes = job.hashes[missing[done : done + len(chunk)]]
        _check_texts(chunk, hashes)
        vectors = encoder.encode(chunk, moved)
        if not np.isfinite(vectors).all():
            raise JacklineError(
                f"{encoder.name} gave vectors with numbers that are not finite in float16",
                hint="the weights may be damaged; fetch them again",
            )
        write_shard(store.folder, store.free_number(), hashes, vectors)
        done += len(chunk)
        moved(0)
    if done != total:
        raise _changed()


def _take(texts: Iterator[bytes], num_rows: int) -> list[bytes]:
    """The next shard's texts. Its border follows from its texts alone, so it is the same after a death."""
    taken: list[bytes] = []
    num_bytes = 0
    while len(taken) < num_rows and num_bytes < _MAX_CHUNK_BYTES:
        text = next(texts, None)
        if text is None:
            break
        taken.append(text)
        num_bytes += len(text)
    return taken


def _check_texts(chunk: list[bytes], hashes: Hashes) -> None:
    """The file is read a second time for the texts; they must be the ones of the first time."""
    if b"".join(map(sequence_hash, chunk)) != hashes.tobytes():
        raise _changed()


def _changed() -> JacklineError:
    return JacklineError(
        "the table of pairs changed while it was being read", hint="let whatever writes it finish, then run it again"
    )


def _check_room(store: Store, num_missing: int, num_sequences: int) -> None:
    """For the shards to come, and for the matrix of all."""
    stat = os.statvfs(store.folder)
    free = stat.f_bavail * stat.f_frsize
    needed = (num_missing + num_sequences) * (store.width * DTYPE.itemsize + 16)
    if needed > free:
        raise JacklineError(
            f"{num_missing:,} sequences need {format_bytes(needed)} of disk for their vectors, and "
            f"{format_bytes(free)} are free in {store.folder}",
            hint="free some space or name another place: cache_dir=PATH",
        )


def _remove_damaged(store: Store, found: Found, say: Say) -> bool:
    """Read every shard that is to be used; True when one had to go."""
    is_any = False
    for number in np.unique(found.shard[found.shard >= 0]).tolist():
        try:
            check_vectors(found.shards[number])
        except (DamagedShard, OSError) as damage:
            store.remove(found.shards[number], str(damage), say)
            is_any = True
    return is_any


def _find(shards: list[Path], parts: list[Hashes], hashes: Hashes) -> Found:
    shard = np.full(len(hashes), -1, np.int64)
    row = np.zeros(len(hashes), np.int64)
    if not parts:
        return Found(shards, shard, row)
    known = np.concatenate(parts)
    of_shard = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
    of_row = np.concatenate([np.arange(len(part)) for part in parts])
    order = np.lexsort((known[:, 1], known[:, 0]))  # stable: of two copies the lower shard's comes first
    known = known[order]
    at = np.searchsorted(known[:, 0], hashes[:, 0])
    open_places = np.arange(len(hashes))
    while len(open_places):
        here = at[open_places]
        inside = here < len(known)
        open_places, here = open_places[inside], here[inside]
        same_half = known[here, 0] == hashes[open_places, 0]
        same = same_half & (known[here, 1] == hashes[open_places, 1])
        shard[open_places[same]], row[open_places[same]] = of_shard[order[here[same]]], of_row[order[here[same]]]
        open_places = open_places[same_half & ~same]  # another sequence with the same first half: look behind it
        at[open_places] += 1
    return Found(shards, shard, row)


def store_folder(key: str, root: Path | None = None) -> Path:
    return (root or default_cache_root()) / "embeddings" / key


def _key(identity: dict[str, Any]) -> str:
    text = "\n".join(f"{name}={identity[name]}" for name in sorted(identity))
    words = re.sub(r"[^A-Za-z0-9]+", "-", str(identity["encoder"])).strip("-")
    return f"{words[-40:].strip('-')}-{identity['width']}-{xxhash.xxh3_128_hexdigest(text.encode())[:12]}"


__all__ = ["Found", "Job", "Store", "Vectors", "encode_missing", "store_folder"]
