"""Identifies a checkpoint file or folder by content and time.

Reads small files completely, and of large ones both ends and samples between them: a gigabyte costs about a
millisecond. The end of a torch file lists the checksum of every tensor, so no change in such a file is missed.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING

from jackline.rundir.records.foreign import WHOLE, Fingerprint

if TYPE_CHECKING:
    import hashlib

WHOLE_UP_TO_BYTES = 4 << 20
_END_BYTES = 512 << 10
_SAMPLE_BYTES = 16 << 10
_NUM_SAMPLES = 32
_PARTS = "parts:"


def fingerprint(path: Path) -> Fingerprint:
    """Raises OSError when it cannot be read."""
    found = path.stat()
    if stat.S_ISDIR(found.st_mode):
        return _of_folder(path, found)
    digest, is_whole = _of_file(path)
    return Fingerprint(found.st_ino, found.st_mtime_ns, found.st_size, (WHOLE if is_whole else _PARTS) + digest)


def _blake2b() -> hashlib.blake2b:
    import hashlib  # loads OpenSSL, 3.7 MB: only in a supervisor that has checkpoints to look at

    return hashlib.blake2b(digest_size=16)


def _of_folder(folder: Path, found: os.stat_result) -> Fingerprint:
    """Covers the names, sizes and contents of its files. Its time is that of the newest file, which a copy keeps."""
    total, newest_ns, is_all_whole = 0, 0, True
    over = _blake2b()
    files = sorted(Path(root) / name for root, _, names in os.walk(folder) for name in names)
    for file in files:
        seen = file.stat()
        if not stat.S_ISREG(seen.st_mode):
            continue
        digest, is_whole = _of_file(file)
        over.update(f"{file.relative_to(folder).as_posix()}\0{seen.st_size}\0{digest}\n".encode("utf-8", "replace"))
        total, newest_ns = total + seen.st_size, max(newest_ns, seen.st_mtime_ns)
        is_all_whole = is_all_whole and is_whole
    mark = (WHOLE if is_all_whole else _PARTS) + over.hexdigest()
    return Fingerprint(found.st_ino, newest_ns or found.st_mtime_ns, total, mark)


def _of_file(path: Path) -> tuple[str, bool]:
    over = _blake2b()
    with open(path, "rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        if size <= WHOLE_UP_TO_BYTES:
            while block := file.read(1 << 20):
                over.update(block)
            return over.hexdigest(), True
        step = (size - 2 * _END_BYTES) // _NUM_SAMPLES
        middle = [(_END_BYTES + number * step, _SAMPLE_BYTES) for number in range(_NUM_SAMPLES)]
        for start, length in [(0, _END_BYTES), *middle, (size - _END_BYTES, _END_BYTES)]:
            over.update(os.pread(file.fileno(), length, start))
    return over.hexdigest(), False
