"""The vectors of one list of sequences as one memory-mapped array, in the order of the list.

Owns `matrix-HASH.npy` and the `.json` beside it that vouches for its bytes. Made from the shards in blocks, so that
memory does not grow with the list. Every opening reads the file once against its checksum (the training that follows
reads it anyway). Matrices of other lists are let go when there are many; the shards stay.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np
import xxhash

from jackline.data.progress import Board
from jackline.recipes.agab.data.embeddings import Found, Job, Say, Store, encode_missing
from jackline.recipes.agab.data.encoders import Encoder
from jackline.recipes.agab.data.shards import DTYPE, Vectors, read_vectors
from jackline.rundir.atomic import read_json, sync_directory, write_json

_BLOCK_ROWS = 4096
_KEPT = 4
_READ_BYTES = 4 << 20


class Matrix(NamedTuple):
    """A read-only map, and the checksum of its bytes."""

    vectors: Vectors
    checksum: str


def embed(store: Store, encoder: Encoder, job: Job, board: Board, say: Say) -> Matrix:
    """The vectors of all sequences of the job: of an earlier call, else from shards, else encoded now."""
    path = _path(store, job)
    board.set("read", done=0, total=len(job.hashes), unit=job.what, detail=f"vectors of {store.key}")
    ready = _open(path, say)
    if ready is not None:
        return ready
    with store.locked(board):
        ready = _open(path, say)  # the process that held the lock may have made it
        if ready is not None:
            return ready
        found = encode_missing(store, encoder, job, board, say)
        try:
            _gather(store, found, path, board, job.what)
            _let_go(store.folder, path)
        except OSError as error:
            raise store.trouble(error) from error
    made = _open(path, say)
    return made if made is not None else embed(store, encoder, job, board, say)


def _path(store: Store, job: Job) -> Path:
    return store.folder / f"matrix-{xxhash.xxh3_128_hexdigest(np.ascontiguousarray(job.hashes).data)}.npy"


def _open(path: Path, say: Say) -> Matrix | None:
    """None when it is not there or not what was written."""
    told = read_json(path.with_suffix(".json"))
    if not isinstance(told, dict) or not path.is_file():
        return None
    if _checksum(path) != told.get("checksum"):
        say(f"warning: {path.parent.name}/{path.name} is damaged; it is made again from the shards")
        return None
    with contextlib.suppress(OSError):
        os.utime(path)  # the least recently used one goes first
    return Matrix(np.load(path, mmap_mode="r"), told["checksum"])


def _gather(store: Store, found: Found, path: Path, board: Board, what: str) -> None:
    total = len(found.row)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            _write_rows(
                file,
                store.width,
                found,
                lambda done: board.set("pack", done=done, total=total, unit="vectors", detail=f"of {what}"),
            )
            file.flush()
            os.fsync(file.fileno())
        checksum = _checksum(temporary)
        with contextlib.suppress(FileNotFoundError):
            path.with_suffix(".json").unlink()  # it vouches for other bytes
        os.replace(temporary, path)
        write_json(
            path.with_suffix(".json"), {"rows": total, "width": store.width, "checksum": checksum}, durable=True
        )
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    sync_directory(path.parent)


def _write_rows(file: IO[bytes], width: int, found: Found, moved: Callable[[int], None]) -> None:
    """Plain writes: on a full disk a write says so, a map kills the process."""
    total = len(found.row)
    np.lib.format.write_array_header_1_0(file, {"descr": DTYPE.str, "fortran_order": False, "shape": (total, width)})
    for first in range(0, total, _BLOCK_ROWS):
        shard, row = found.shard[first : first + _BLOCK_ROWS], found.row[first : first + _BLOCK_ROWS]
        block = np.empty((len(shard), width), DTYPE)
        for number in np.unique(shard).tolist():
            here = shard == number
            block[here] = read_vectors(found.shards[number], row[here])
        file.write(block.data)
        moved(first + len(shard))


def _checksum(path: Path) -> str:
    made = xxhash.xxh3_128()
    with open(path, "rb") as file:
        while data := file.read(_READ_BYTES):
            made.update(data)
    return str(made.hexdigest())


def _let_go(folder: Path, newest: Path) -> None:
    """Maps of a file that is unlinked stay good, so nobody who reads one notices."""
    others = sorted((path for path in folder.glob("matrix-*.npy") if path != newest), key=_used_at, reverse=True)
    for path in others[_KEPT - 1 :]:
        for name in (path.with_suffix(".json"), path):
            with contextlib.suppress(OSError):
                name.unlink()


def _used_at(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
