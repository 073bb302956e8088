"""The records of runs in a mirror: finding them, and keeping copies of them here for commands that only read.

A mirror has the records of a run as archives, run-000042.tar.gz; a running run uploads a new one every minute. Owns
where the copies are and when they are renewed; bundle.py packs and unpacks.
"""

from __future__ import annotations

import contextlib
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from jackline.checkpoint.mirror.bundle import MAX_BUNDLE_BYTES, unpack_run
from jackline.checkpoint.mirror.store import Store, open_store, read_small
from jackline.errors import CannotResume, JacklineError, UsageError
from jackline.rundir.access.secrets import without_secrets
from jackline.rundir.access.writing import private_folder
from jackline.rundir.atomic import read_json, sha256_hex, write_json
from jackline.rundir.layout import RunDir
from jackline.rundir.registry import copies_folder
from jackline.rundir.run_file import check_name

_AT_ONCE = 8
_MARK = ".story.json"  # in a copy: which archive it was made from


def list_stories(store: Store, name: str) -> list[str]:
    """The archives of one run, newest first."""
    found = [entry for entry in store.names(name) if entry.startswith("run-") and entry.endswith(".tar.gz")]
    return sorted(found, reverse=True)


def fetch_story(store: Store, name: str, run: RunDir) -> str:
    """Unpack the newest whole archive; return its name."""
    for story in list_stories(store, name):
        with contextlib.suppress(Exception):  # an incomplete archive: try the one before it
            unpack_run(read_small(store, f"{name}/{story}", MAX_BUNDLE_BYTES), run)
        if run.run_file.exists():
            return story
    raise CannotResume(f"no record of run '{name}' in the mirror is whole")


def find_in_mirror(word: str) -> tuple[str, str]:
    """The location of the mirror and the name of the run."""
    parent, _, last = word.rstrip("/").rpartition("/")
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


class Copies:
    """Copies of the records in one mirror. They are this user's own files, and nothing in them is executed."""

    def __init__(self, place: str) -> None:
        self.place = place.rstrip("/")
        self.folder = copies_folder() / sha256_hex(self.place.encode())[:16]
        self._store = open_store(place)

    def renew(self, name: str | None = None) -> None:
        """Bring what is newer there, of one run or of all. Raises JacklineError when the mirror cannot be read."""
        try:
            names = [name] if name else self._store.names("")
            with ThreadPoolExecutor(_AT_ONCE) as pool:
                list(pool.map(self._renew_one, names))
        except JacklineError:
            raise
        except Exception as problem:
            why = without_secrets(str(problem)[:200]) or type(problem).__name__
            raise JacklineError(f"the mirror {without_secrets(self.place)} cannot be read: {why}") from None

    def _renew_one(self, name: str) -> None:
        stories = list_stories(self._store, name)
        if not stories:
            return
        run = RunDir(self.folder / check_name(name))
        mark = run.path / _MARK
        if read_json(mark) == {"story": stories[0]}:
            return
        private_folder(self.folder)
        draft = RunDir(self.folder / f".{name}.draft")
        shutil.rmtree(draft.path, ignore_errors=True)
        try:
            story = fetch_story(self._store, name, draft)
            _replace_all(draft.path, run.path)
            write_json(mark, {"story": story})
        finally:
            shutil.rmtree(draft.path, ignore_errors=True)


def _replace_all(source: Path, target: Path) -> None:
    """Each file at once: a command may be reading the copy."""
    for path in sorted(source.rglob("*")):
        if path.is_file():
            place = target / path.relative_to(source)
            place.parent.mkdir(parents=True, exist_ok=True)
            path.replace(place)
