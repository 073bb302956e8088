"""The records of runs in a mirror: finding them, and keeping copies of them here for commands that only read.

A mirror has the records of a run as archives, run-000042.tar.gz; a running run uploads a new one every minute. Owns
where the copies are and when they are renewed; bundle.py packs and unpacks.
"""

from __future__ import annotations

import collections
import contextlib
import fcntl
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from jackline.checkpoint.mirror.bundle import MAX_BUNDLE_BYTES, check_whole, unpack_run
from jackline.checkpoint.mirror.store import Store, StoreTrouble, open_store, read_small
from jackline.errors import CannotResume, JacklineError, UsageError
from jackline.rundir.access.secrets import without_secrets
from jackline.rundir.access.writing import open_own, private_folder
from jackline.rundir.atomic import read_json, sha256_hex, write_json
from jackline.rundir.find import is_url
from jackline.rundir.layout import RunDir
from jackline.rundir.registry import copies_folder
from jackline.rundir.run_file import check_name

_AT_ONCE = 8
_MARK = ".story.json"  # in a copy: which archive it was made from
_DRAFTS = ".drafts"  # beside the copies of all mirrors: a draft must not be taken for a run
_DRAFT_IS_LEFT_AFTER_S = 3600.0


def list_stories(store: Store, name: str) -> list[str]:
    """The archives of one run, newest first."""
    found = [entry for entry in store.names(name) if entry.startswith("run-") and entry.endswith(".tar.gz")]
    return sorted(found, reverse=True)


def fetch_story(store: Store, name: str, run: RunDir) -> str:
    """Unpack the newest whole archive; return its name."""
    for story in list_stories(store, name):
        with contextlib.suppress(Exception):  # an incomplete archive: try the one before it
            data = read_small(store, f"{name}/{story}", MAX_BUNDLE_BYTES)
            check_whole(data)
            unpack_run(data, run)
        if run.run_file.exists():
            return story
    raise CannotResume(f"no record of run '{name}' in the mirror is whole")


def find_in_mirror(word: str) -> tuple[str, str]:
    """The location of the mirror and the name of the run."""
    parent, _, last = full_place(word).rpartition("/")
    if parent and not parent.endswith(":/") and list_stories(open_store(parent), last):
        return parent, last
    names = list_mirrored(open_store(word))
    if len(names) == 1:
        return word, names[0]
    if not names:
        raise CannotResume(
            f"{without_secrets(word)} holds no mirrored run", hint="name the folder or URL that was given as --mirror"
        )
    shown = without_secrets(word)
    raise UsageError(f"{shown} holds {len(names)} runs: {', '.join(names)}", hint=f"name one: {shown}/{names[0]}")


def list_mirrored(store: Store) -> list[str]:
    return [name for name in store.names("") if list_stories(store, name)]


def full_place(place: str) -> str:
    """The same from every working directory."""
    return place.rstrip("/") if is_url(place) else str(Path(place).expanduser().absolute())


class Copies:
    """Copies of the records in one mirror. They are this user's own files, and nothing in them is executed."""

    def __init__(self, place: str) -> None:
        self.place = full_place(place)
        self.folder = copies_folder() / sha256_hex(self.place.encode("utf-8", "surrogateescape"))[:16]
        self._store = open_store(place)

    def renew(self, name: str | None = None) -> list[str]:
        """Bring what is newer there, of one run or of all. Returns which runs of all cannot be read, and why. Raises
        JacklineError when nothing can be read."""
        try:
            names = [name] if name else self._store.names("")
        except Exception as problem:
            raise self._explain(problem) from None
        self._prepare()
        done: list[str] = []
        failed: list[tuple[str, Exception]] = []
        self._renew_each(names, done, failed)
        if failed and not done:
            raise self._explain(failed[0][1])
        return [
            f"run {one!r} of the mirror was left out: {self._explain(problem).message}" for one, problem in failed
        ]

    def _renew_each(self, names: list[str], done: list[str], failed: list[tuple[str, Exception]]) -> None:
        """In threads that are left behind when this one is interrupted: a store may never answer."""
        left = collections.deque(names)

        def work() -> None:
            with contextlib.suppress(IndexError):  # none is left
                while True:
                    name = left.popleft()
                    try:
                        done.extend([name] if self._renew_one(name) else [])
                    except Exception as problem:  # a store may raise any exception
                        failed.append((name, problem))

        threads = [threading.Thread(target=work, daemon=True) for _ in range(min(_AT_ONCE, len(names)))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _renew_one(self, name: str) -> bool:
        """False for what is no run."""
        stories = list_stories(self._store, name)
        if not stories:
            return False
        run = RunDir(self.folder / check_name(name))
        mark = {"story": stories[0], "identity": self._identity(f"{name}/{stories[0]}")}
        if read_json(run.path / _MARK) == mark:
            return True
        with self._draft() as draft:
            story = fetch_story(self._store, name, draft)
            with self._lock():
                _replace_all(draft.path, run.path)
                write_json(run.path / _MARK, mark if story == stories[0] else {"story": story})
        return True

    def _identity(self, name: str) -> list[str]:
        """Another run may have begun there anew under the same name, and counts its archives from 1 again."""
        local = self._store.local_path(name)
        told = local.stat().st_mtime_ns if local is not None else self._store.checksum(name)
        return [str(self._store.size(name)), str(told)]

    def _prepare(self) -> None:
        drafts = self.folder.parent / _DRAFTS
        try:
            for folder in (self.folder.parent, self.folder, drafts):
                private_folder(folder)
        except OSError as problem:
            raise JacklineError(
                f"no copy of the mirror's records can be kept in {self.folder}: {problem.strerror}",
                hint="set XDG_STATE_HOME to a folder of yours that can be written to",
            ) from None
        for old in drafts.iterdir():  # of a command that was killed
            with contextlib.suppress(OSError):
                if time.time() - old.stat().st_mtime > _DRAFT_IS_LEFT_AFTER_S:
                    shutil.rmtree(old, ignore_errors=True)

    @contextlib.contextmanager
    def _draft(self) -> Iterator[RunDir]:
        path = Path(tempfile.mkdtemp(dir=self.folder.parent / _DRAFTS))
        try:
            yield RunDir(path)
        finally:
            shutil.rmtree(path, ignore_errors=True)

    @contextlib.contextmanager
    def _lock(self) -> Iterator[None]:
        """Two commands must not mix their files in one copy."""
        fd = open_own(self.folder.parent / _DRAFTS / f"{self.folder.name}.lock", os.O_RDWR | os.O_CREAT)
        try:
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)

    def _explain(self, problem: Exception) -> JacklineError:
        if isinstance(problem, JacklineError):
            return problem
        why = without_secrets(str(problem)[:200]) or type(problem).__name__
        hint = problem.hint if isinstance(problem, StoreTrouble) else None
        return JacklineError(f"the mirror {without_secrets(self.place)} cannot be read: {why}", hint=hint)


def _replace_all(source: Path, target: Path) -> None:
    """Each file at once: a command may be reading the copy. What is not in the source is of an earlier run."""
    paths = [path for path in sorted(source.rglob("*")) if path.is_file()]
    for path in paths:
        place = target / path.relative_to(source)
        place.parent.mkdir(parents=True, exist_ok=True)
        path.replace(place)
    kept = {target / path.relative_to(source) for path in paths} | {target / _MARK}
    for path in sorted(target.rglob("*"), reverse=True):
        if path.is_file() and path not in kept:
            path.unlink()
        elif path.is_dir() and not any(path.iterdir()):
            path.rmdir()
