"""One shard file: some sequences' hashes and vectors, whole or absent, with checksums inside.

    header   64 bytes   "JLEMB001", rows (u64), width (u64), xxh3_128 of the hashes, xxh3_128 of the vectors,
                        xxh3_64 of these 56 bytes; little-endian
    hashes   rows x 16 bytes, sequence_hash of each
    vectors  rows x width float16

The name carries the number and the vectors' checksum, so that shards from two machines never claim one name.
Vectors are float16: 11 bits are more than a frozen encoder's own noise between devices, at half the disk and memory.
Does not own which shards there are (embeddings.py).
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from jackline.recipes.agab.data.pairs import Hashes
from jackline.rundir.atomic import write_whole

DTYPE = np.dtype("<f2")
Vectors = NDArray[np.float16]

_MAGIC = b"JLEMB001"
_HEAD = struct.Struct("<8sQQ16s16s")
_HEAD_BYTES = _HEAD.size + 8
_HASH_BYTES = 16


class DamagedShard(Exception):
    """The bytes are not those that were written."""


class ShardHead(NamedTuple):
    rows: int
    width: int
    hashes_sum: bytes
    vectors_sum: bytes

    @property
    def vectors_at(self) -> int:
        return _HEAD_BYTES + self.rows * _HASH_BYTES

    @property
    def num_bytes(self) -> int:
        return self.vectors_at + self.rows * self.width * DTYPE.itemsize


def shard_number(path: Path) -> int:
    return int(path.name.split("-")[1])


def list_shards(folder: Path) -> list[Path]:
    """In the order of their numbers."""
    return sorted(folder.glob("shard-*-*.emb"))


def write_shard(folder: Path, number: int, hashes: Hashes, vectors: Vectors) -> Path:
    """Durable when it returns. Needs about twice the shard's bytes for a moment."""
    names = np.ascontiguousarray(hashes).tobytes()
    values = np.ascontiguousarray(vectors, DTYPE).tobytes()
    values_sum = xxhash.xxh3_128_digest(values)
    head = _HEAD.pack(_MAGIC, len(vectors), vectors.shape[1], xxhash.xxh3_128_digest(names), values_sum)
    path = folder / f"shard-{number:05d}-{values_sum.hex()[:12]}.emb"
    write_whole(path, head + xxhash.xxh3_64_digest(head) + names + values, durable=True)
    return path


def read_head(path: Path) -> ShardHead:
    """Raises DamagedShard when the header or the length is wrong."""
    with open(path, "rb") as file:
        return _head(file.read(_HEAD_BYTES), path)


def _head(data: bytes, path: Path) -> ShardHead:
    if len(data) < _HEAD_BYTES or xxhash.xxh3_64_digest(data[: _HEAD.size]) != data[_HEAD.size :]:
        raise DamagedShard(f"{path.name}: the header is damaged")
    magic, rows, width, hashes_sum, vectors_sum = _HEAD.unpack(data[: _HEAD.size])
    head = ShardHead(rows, width, hashes_sum, vectors_sum)
    size = path.stat().st_size
    if magic != _MAGIC or size != head.num_bytes:
        raise DamagedShard(f"{path.name}: {size} bytes long, the header says {head.num_bytes}")
    return head


def read_hashes(path: Path, width: int) -> Hashes:
    with open(path, "rb") as file:
        head = _head(file.read(_HEAD_BYTES), path)
        names = file.read(head.rows * _HASH_BYTES)
    if head.width != width or xxhash.xxh3_128_digest(names) != head.hashes_sum:
        raise DamagedShard(f"{path.name}: the list of sequences is damaged")
    return np.frombuffer(names, np.uint64).reshape(-1, 2)


def check_vectors(path: Path) -> None:
    """Read every vector once; raises DamagedShard."""
    head = read_head(path)
    made = xxhash.xxh3_128()
    with open(path, "rb") as file:
        file.seek(head.vectors_at)
        while data := file.read(1 << 20):
            made.update(data)
    if made.digest() != head.vectors_sum:
        raise DamagedShard(f"{path.name}: the vectors are damaged")


def read_vectors(path: Path, rows: NDArray[np.int64]) -> Vectors:
    """Some rows; the map is let go at once, so that thousands of shards need no thousand open files."""
    head = read_head(path)
    mapped = np.memmap(path, DTYPE, "r", head.vectors_at, (head.rows, head.width))
    return np.asarray(mapped[rows])
