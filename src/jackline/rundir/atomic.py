"""Files that are whole or absent, also on a full disk when space was kept for them.

Owns: replacing a small file in one step, making that step survive a power cut when asked, and the spare copies that
let it work without free blocks or inodes.
Does not own: what is in the file, or files that grow (jsonl.py).
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jackline.rundir.access import reading
from jackline.rundir.access.writing import open_own

NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
_RENAME_EXCHANGE = 2
_AT_FDCWD = -100


def write_whole(path: Path, data: bytes, *, durable: bool = False) -> None:
    """Replace `path` by `data`; a reader sees the old bytes or the new ones, never a mixture.

    Costs about 1 ms; with `durable` about 6 ms, because the file and its folder are synced. On a full disk it uses
    a spare copy, if one was kept (`keep_spares`).
    """
    try:
        _write_new(path, data, durable=durable)
    except OSError as error:
        if error.errno not in NO_ROOM or not _write_spare(path, data, durable=durable):
            raise
    if durable:
        sync_directory(path.parent)


def _write_new(path: Path, data: bytes, *, durable: bool) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        fd = open_own(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            _write_all(fd, data)
            if durable:
                os.fsync(fd)
        finally:
            os.close(fd)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def keep_spares(path: Path, size_bytes: int, *, count: int = 1) -> bool:
    """Reserve space for later versions of `path` of at most `size_bytes`, so that they can be written to a full disk.

    One spare is enough for a file that is written once, two for one that is written again and again. False when
    there is no room for them even now.
    """
    try:
        for number in range(count):
            _fill_spare(_spare(path, number), size_bytes)
    except OSError:
        return False
    return True


def drop_spares(path: Path) -> None:
    """Free what `keep_spares` reserved."""
    for number in range(2):
        with contextlib.suppress(OSError):
            os.unlink(_spare(path, number))


def _fill_spare(spare: Path, size_bytes: int) -> None:
    """Write real bytes, because some file systems do not support preallocation."""
    fd = open_own(spare, os.O_WRONLY | os.O_CREAT, 0o644)
    try:
        missing = size_bytes - os.fstat(fd).st_size
        if missing > 0:
            os.lseek(fd, 0, os.SEEK_END)
            _write_all(fd, b" " * missing)
    except OSError:
        os.unlink(spare)
        raise
    finally:
        os.close(fd)


def _spare(path: Path, number: int) -> Path:
    return path.with_name(f".{path.name}.spare{number}")


def _write_spare(path: Path, data: bytes, *, durable: bool) -> bool:
    """Write into the blocks of a spare and move it into place. False when no spare is there or large enough.

    The last spare changes places with the file, so that it can be used again and again.
    """
    found = [spare for spare in (_spare(path, 0), _spare(path, 1)) if _fits(spare, data)]
    if not found:
        return False
    spare = found[0]
    fd = open_own(spare, os.O_WRONLY)
    try:
        # Padded instead of cut to length: blocks that are given back here may be gone at the next write.
        _write_all(fd, data.ljust(os.fstat(fd).st_size))
        if durable:
            os.fsync(fd)
    finally:
        os.close(fd)
    if len(found) > 1 or not _exchange(spare, path):
        os.replace(spare, path)
    return True


def _fits(spare: Path, data: bytes) -> bool:
    try:
        return spare.stat().st_size >= len(data)
    except OSError:
        return False


def _exchange(one: Path, other: Path) -> bool:
    """Let two existing files change names in one step. False where the system cannot."""
    import ctypes  # importing it costs 5 ms, and a disk is seldom full

    try:
        call = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False
    names = os.fsencode(one), os.fsencode(other)
    done: int = call(_AT_FDCWD, names[0], _AT_FDCWD, names[1], ctypes.c_uint(_RENAME_EXCHANGE))
    return done == 0


def write_json(path: Path, value: Any, *, durable: bool = False) -> None:
    """Replace `path` by `value` as JSON that `cat` and `jq` read well."""
    write_whole(path, _encode(value) + b"\n", durable=durable)


def write_often(path: Path, value: Mapping[str, Any], *, durable: bool = False) -> None:
    """The same with one line for each entry of `value`: ten times faster, for a file that is replaced each second."""
    try:
        lines = [f"{_line(name)}: {_line(entry)}" for name, entry in value.items()]
        data = ("{\n " + ",\n ".join(lines) + "\n}\n").encode("utf-8", "surrogateescape")
    except ValueError:
        data = _encode(value) + b"\n"
    write_whole(path, data, durable=durable)


# One for all: `json.dumps` makes a new one for every call, which takes as long as the encoding of a short value.
_line = json.JSONEncoder(ensure_ascii=False, allow_nan=False, default=str).encode


def _encode(value: Any) -> bytes:
    try:
        text = json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False, default=str)
        return text.encode("utf-8", "surrogateescape")
    except ValueError:
        # A NaN loss or an incomplete character in a log line must not prevent writing the whole file.
        return json.dumps(_without_nan(value), indent=1, default=str).encode("ascii")


def _without_nan(value: Any) -> Any:
    """Replace NaN and infinity by null: JSON has neither, and jq rejects Python's notation."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _without_nan(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(entry) for entry in value]
    return value


def read_json(path: Path) -> Any | None:
    """The value in `path`, or None when the file is absent, unreadable or not JSON."""
    return reading.read_json(path)


def sync_directory(path: Path) -> None:
    """A rename is stored in the folder's data, so the folder needs a sync of its own."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def remove_tree(folder: Path) -> None:
    """Delete a folder as far as possible. `shutil` loads compression libraries (0.7 MB), so it is imported here."""
    import shutil

    shutil.rmtree(folder, ignore_errors=True)


def sha256_hex(data: bytes) -> str:
    """Without `hashlib` where possible: it loads OpenSSL, 3.7 MB in a supervisor that lives as long as a run."""
    try:
        if sys.version_info >= (3, 12):
            from _sha2 import sha256  # type: ignore[import-not-found,unused-ignore]
        else:
            from _sha256 import sha256  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        from hashlib import sha256
    return str(sha256(data).hexdigest())
