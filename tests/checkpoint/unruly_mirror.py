"""A mirror process whose store is as bad as the file `mood` beside it says; run by mirror_torture.py.

    fine | down | full | read-only | slow | garbling

It is the real process (engine, lock, requests) with another store. `full` leaves half a file, as a full disk does.
"""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path

from jackline.checkpoint.mirror import engine
from jackline.checkpoint.mirror.store import FolderStore, Moved, Store
from jackline.checkpoint.mirror.upload import open_source

MOODS = ("fine", "down", "full", "read-only", "slow", "garbling")
SLOW_S = 0.05


class UnrulyStore(FolderStore):
    """A folder. It reads its mood before every call."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self._folder = root
        self._mood_file = root.with_name("mood")

    def put(self, local: Path, name: str, moved: Moved | None = None) -> None:
        self.put_bytes(local.read_bytes(), name)
        if moved is not None:
            moved(local.stat().st_size)

    def put_bytes(self, data: bytes, name: str) -> None:
        mood = self._mind(is_write=True)
        if mood == "full":
            super().put_bytes(data[: len(data) // 2], name)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().put_bytes(data[:-1] + bytes([data[-1] ^ 1]) if mood == "garbling" else data, name)

    def names(self, folder: str) -> list[str]:
        self._mind()
        return super().names(folder)

    def size(self, name: str) -> int | None:
        self._mind()
        return super().size(name)

    def delete(self, name: str) -> None:
        self._mind(is_write=True)
        super().delete(name)

    def _mind(self, *, is_write: bool = False) -> str:
        mood = self._mood_file.read_text() if self._mood_file.exists() else "fine"
        if mood == "down":
            raise OSError(errno.ENETUNREACH, os.strerror(errno.ENETUNREACH))
        if mood == "read-only" and is_write:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        if mood == "slow":
            time.sleep(SLOW_S)
        return mood


def open_unruly(place: str) -> Store:
    return UnrulyStore(Path(place))


if __name__ == "__main__":
    engine.open_store = open_unruly
    engine.FIRST_RETRY_S, engine.ASKED_RETRY_S, engine.POLL_S = 0.05, 0.2, 0.05
    engine.serve(open_source)
