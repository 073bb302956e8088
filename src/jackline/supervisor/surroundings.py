"""Records the code and the packages of an attempt, so that two runs can be compared later.

Owns surroundings.json and code.diff of the attempt. Runs in a thread of its own, because git may be slow, and fails
open: what cannot be read is missing in the record.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from pathlib import Path

from jackline.machine.packages import list_packages, package_folders
from jackline.machine.proc import list_tree
from jackline.rundir.layout import AttemptDir
from jackline.rundir.records.surroundings import SurroundingsRecord, write_surroundings
from jackline.rundir.run_file import read_diff, read_git

LOOKS_S = (3.0, 15.0, 60.0)  # after the start: imports come one after another
MAX_DIFF_BYTES = 1 << 20


class Surroundings:
    """One attempt's. `look` is called each second and returns at once."""

    def __init__(self, attempt: AttemptDir, cwd: Path) -> None:
        self._attempt, self._cwd = attempt, cwd
        self._folders: dict[str, None] = {}
        self._git: dict[str, object] | None = None
        self._num_looks = 0
        self._thread: threading.Thread | None = None

    def look(self, pid: int | None, age_s: float) -> None:
        is_due = self._num_looks < len(LOOKS_S) and age_s >= LOOKS_S[self._num_looks]
        if pid is None or not is_due or (self._thread is not None and self._thread.is_alive()):
            return
        self._num_looks += 1
        self._thread = threading.Thread(target=self._record, args=(pid,), daemon=True, name="jackline-surroundings")
        self._thread.start()

    def _record(self, pid: int) -> None:
        with contextlib.suppress(Exception):
            before = len(self._folders)
            self._folders.update(dict.fromkeys(package_folders(list_tree(pid))))
            is_first = self._git is None
            if is_first:
                self._git = read_git(self._cwd)
                self._keep_diff()
            if is_first or len(self._folders) > before:
                folders = tuple(self._folders)
                record = SurroundingsRecord(time.time(), dict(list_packages(folders)), folders, dict(self._git or {}))
                write_surroundings(self._attempt, record)

    def _keep_diff(self) -> None:
        """The uncommitted changes themselves: their hash says only that there were some."""
        diff = read_diff(self._cwd) if (self._git or {}).get("is_dirty") else ""
        if diff:
            fd = os.open(self._attempt.code_diff, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
            with open(fd, "wb") as file:
                file.write(diff.encode("utf-8", "surrogateescape")[:MAX_DIFF_BYTES])
