"""The token that opens the page's data: 256 random bits in a file that only its owner can read.

It is kept, so that a page that is open goes on when the server is started again.
"""

from __future__ import annotations

import os
import re
import secrets
import stat
from pathlib import Path

from jackline.rundir.access.reading import open_plain
from jackline.rundir.access.writing import FOLDER_MODE

NAME = "dash-token"
_SHAPE = re.compile(r"[A-Za-z0-9_-]{43}")


def read_token(folder: Path, *, is_new: bool = False) -> str:
    """The token in `folder`, made when it is absent, damaged or readable by others. Raises OSError."""
    path = folder / NAME
    known = None if is_new else _read(path)
    if known is not None:
        return known
    folder.mkdir(parents=True, exist_ok=True, mode=FOLDER_MODE)
    token = secrets.token_urlsafe(32)
    temporary = folder / f".{NAME}.{os.getpid()}.{secrets.token_hex(4)}"
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        os.write(fd, token.encode() + b"\n")
    finally:
        os.close(fd)
    os.replace(temporary, path)
    return token


def _read(path: Path) -> str | None:
    try:
        fd = open_plain(path)
    except OSError:
        return None
    try:
        found = os.fstat(fd)
        is_private = found.st_uid == os.geteuid() and not stat.S_IMODE(found.st_mode) & 0o077
        text = os.read(fd, 200).decode("ascii", "replace").strip() if is_private else ""
    finally:
        os.close(fd)
    return text if _SHAPE.fullmatch(text) else None
