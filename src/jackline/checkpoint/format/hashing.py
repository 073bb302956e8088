"""Checksums of chunks: which algorithm, and how a file of any size becomes a list of checksums.

A file is hashed in chunks of 16 MiB and not as a whole: several threads can hash chunks in any order while they are
written or read, and a wrong checksum shows where the file is damaged.
Owns nothing else; in particular not where the checksums are kept (manifest.py).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

try:
    import xxhash
except ImportError:  # a machine without the package: hashing is slower, but complete
    xxhash = None  # type: ignore[assignment]

CHUNK_BYTES = 16 << 20
XXH3 = "xxh3_128"
BLAKE2B = "blake2b_128"


class UnknownHash(Exception):
    """A checksum algorithm this machine cannot compute."""


def best_algorithm() -> str:
    """xxh3 is free compared with a disk (10 to 18 GB/s here); blake2b does 0.8 GB/s and needs no package."""
    return XXH3 if xxhash is not None else BLAKE2B


def new_hash(algorithm: str) -> Any:
    """An object with update() and hexdigest(). Both algorithms release the GIL while they work."""
    if algorithm == XXH3 and xxhash is not None:
        return xxhash.xxh3_128()
    if algorithm == BLAKE2B:
        return hashlib.blake2b(digest_size=16)
    missing = " (the package xxhash is not installed)" if algorithm == XXH3 else ""
    raise UnknownHash(f"checksums of kind '{algorithm}' cannot be computed here{missing}")


def digest(algorithm: str, *pieces: bytes | bytearray | memoryview) -> str:
    """The checksum of the concatenated pieces."""
    running = new_hash(algorithm)
    for piece in pieces:
        running.update(piece)
    return str(running.hexdigest())


def chunk_offsets(size_bytes: int) -> range:
    """The offsets where a file's chunks begin; an empty file has one empty chunk, so that it has a checksum too."""
    return range(0, max(size_bytes, 1), CHUNK_BYTES)


def digest_chunks(algorithm: str, data: memoryview) -> tuple[str, ...]:
    """All chunk checksums of bytes that are in memory."""
    return tuple(digest(algorithm, data[start : start + CHUNK_BYTES]) for start in chunk_offsets(len(data)))


def join_digests(algorithm: str, digests: Iterable[str]) -> str:
    """One short digest of many checksums."""
    return digest(algorithm, "\n".join(digests).encode())
