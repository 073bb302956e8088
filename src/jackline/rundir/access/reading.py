"""Reads a file of a run, whatever somebody put in its place: plain files only, at most so many bytes, never waiting.

Owns the open call, the limits of size, depth and number, and the parsing of untrusted JSON. A FIFO, a device, a
symbolic link or a file that another process holds raises OSError at once. Does not own what the contents mean
(records/).
"""

from __future__ import annotations

import errno
import json
import math
import os
import stat
from pathlib import Path
from typing import Any

MAX_JSON_BYTES = 4 << 20  # the largest record of a run, exit.json with its last lines of output, has 128 KiB
MAX_DEPTH = 40
MAX_NODES = 500_000  # lists and objects: 4 MiB of `{},` would be 1.4 million
MAX_NUMBER = 2**63  # a larger number means damage: no size, time or count of a run comes near it
_BLOCK = 1 << 20
# Only text that may hold NaN, infinity, an exponent or a very long number is examined value by value.
_DOUBTFUL = (
    b"NaN",
    b"nfinity",
    b"e+",
    b"E+",
    *(b"%c%d" % (letter, digit) for letter in b"eE" for digit in range(10)),
)
_DIGITS_ALONE = bytes([sign if 48 <= sign <= 57 else 32 for sign in range(256)])
_MANY_DIGITS = 19


class NotPlain(OSError):
    """Something else than a plain file is in its place."""


def open_plain(path: str | os.PathLike[str], more_flags: int = 0) -> int:
    """A descriptor for reading. Raises OSError for everything that is not a plain file; never waits for a writer."""
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | more_flags
    fd = os.open(path, flags)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise NotPlain(errno.EINVAL, "not a plain file", os.fspath(path))
        os.set_blocking(fd, True)
    except BaseException:
        os.close(fd)
        raise
    return fd


def read_whole(path: str | os.PathLike[str], max_bytes: int = MAX_JSON_BYTES) -> bytes:
    """All bytes of a file. Raises OSError (EFBIG) for one that is larger than `max_bytes`."""
    fd = open_plain(path)
    try:
        data = _read_at(fd, 0, max_bytes + 1)
    finally:
        os.close(fd)
    if len(data) > max_bytes:
        raise OSError(errno.EFBIG, f"larger than {max_bytes} bytes", os.fspath(path))
    return data


def read_part(path: str | os.PathLike[str], offset: int, max_bytes: int) -> bytes:
    """At most `max_bytes` bytes from `offset` on."""
    fd = open_plain(path)
    try:
        return _read_at(fd, offset, max_bytes)
    finally:
        os.close(fd)


def offset_after(path: str | os.PathLike[str], offset: int, last: bytes, max_bytes: int) -> int | None:
    """Where to read on in a file that a newer copy may have replaced, perhaps of its end alone. `last` is what was
    read up to `offset`; None when the first `max_bytes` do not hold it."""
    before = max(0, offset - len(last))
    if not last or read_part(path, before, len(last)) == last:
        return offset
    at = read_part(path, 0, max_bytes).rfind(last)
    return at + len(last) if at >= 0 else None


def read_end(path: str | os.PathLike[str], max_bytes: int) -> tuple[bytes, bool]:
    """The last `max_bytes` bytes, and whether there are more before them."""
    fd = open_plain(path)
    try:
        start = max(0, os.fstat(fd).st_size - max_bytes)
        return _read_at(fd, start, max_bytes), start > 0
    finally:
        os.close(fd)


def read_text(path: str | os.PathLike[str], max_bytes: int) -> str:
    """The beginning of a file as text; bytes that are no text are replaced."""
    return read_part(path, 0, max_bytes).decode("utf-8", "replace")


def read_json(path: Path, max_bytes: int = MAX_JSON_BYTES) -> Any | None:
    """The value in `path`; None when the file is absent, no plain file, too large or not JSON."""
    try:
        return parse_json(read_whole(path, max_bytes))
    except (OSError, ValueError):
        return None


def parse_json(data: bytes, *, with_all_numbers: bool = False) -> Any:
    """The value of untrusted JSON, without NaN, infinity and numbers beyond all sense: each becomes null.

    `with_all_numbers` keeps them: a loss can be NaN, a checksum large. Raises ValueError for what is not JSON, nested
    too deeply, or has too many parts.
    """
    num_openings = data.count(b"{") + data.count(b"[")
    if num_openings > MAX_NODES:
        raise ValueError("too many parts")
    try:
        value = json.loads(data.decode("utf-8", "surrogateescape"))
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if with_all_numbers:
        return _shallow(value, MAX_DEPTH) if num_openings > MAX_DEPTH else value
    return _sane(value, MAX_DEPTH) if num_openings > MAX_DEPTH or _is_doubtful(data) else value


def _is_doubtful(data: bytes) -> bool:
    for word in _DOUBTFUL:  # a loop, because `any` would call a generator for every word of every file
        if word in data:
            return True
    return max(map(len, data.translate(_DIGITS_ALONE).split()), default=0) >= _MANY_DIGITS


def _shallow(value: Any, depth: int) -> Any:
    """The same value; raises ValueError when it is nested too deeply."""
    entries = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    if depth == 0 and entries:
        raise ValueError("nested too deeply")
    for entry in entries:
        if isinstance(entry, dict | list):
            _shallow(entry, depth - 1)
    return value


def _sane(value: Any, depth: int) -> Any:
    if isinstance(value, dict):
        if depth == 0:
            raise ValueError("nested too deeply")
        return {key: _sane(entry, depth - 1) for key, entry in value.items()}
    if isinstance(value, list):
        if depth == 0:
            raise ValueError("nested too deeply")
        return [_sane(entry, depth - 1) for entry in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, int):
        return value if -MAX_NUMBER < value < MAX_NUMBER else None
    return value


def _read_at(fd: int, offset: int, max_bytes: int) -> bytes:
    """Read until the end or the limit; the file may grow or shrink meanwhile."""
    blocks: list[bytes] = []
    left = max_bytes
    while left > 0 and (block := os.pread(fd, min(left, _BLOCK), offset)):
        blocks.append(block)
        offset, left = offset + len(block), left - len(block)
    return b"".join(blocks)
