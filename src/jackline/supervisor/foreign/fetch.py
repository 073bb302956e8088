"""Downloads a run of a user's own script from its mirror, onto a machine that has no files of that run.

The run's record goes into the runs folder. The newest finished checkpoint goes to where the script expects it, below
the current folder. Existing files are never overwritten. Owns the download; mirror.py owns the upload.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from jackline.checkpoint.mirror.bundle import unpack_run
from jackline.checkpoint.mirror.store import Store, open_store
from jackline.errors import CannotResume, UsageError
from jackline.rundir.layout import RunDir
from jackline.rundir.process_id import boot_id, host_name
from jackline.rundir.run_file import check_name, read_run_file, write_run_file
from jackline.supervisor.foreign.mirror import WHERE, whole_checkpoints

_RUN_WORD = 3  # index of RUN_DIR in `python -m jackline.trainer RUN_DIR RECIPE ...`


@dataclass(frozen=True)
class Fetched:
    """What was downloaded."""

    run: RunDir
    checkpoint: Path | None
    said: tuple[str, ...]


def is_mirror(word: str) -> bool:
    """Whether `word` is a URL, or a folder that holds one or more mirrored runs."""
    if "://" in word:
        return True
    path = Path(word).expanduser()
    return not (path / "run.json").exists() and (any(path.glob("run-*.tar.gz")) or any(path.glob("*/run-*.tar.gz")))


def fetch_stranger(word: str, runs: Path, cwd: Path) -> Fetched:
    """`word` names a mirror with one run, or one run in a mirror. Raises when it is ambiguous or incomplete."""
    place, name = find_in_mirror(word)
    store = open_store(place)
    run = RunDir(runs / check_name(name))
    if run.path.exists():
        raise UsageError(f"there is a run '{name}' in {runs} already", hint=f"jackline resume {name}")
    draft = RunDir(runs / f".{name}.{os.getpid()}.draft")
    draft.path.mkdir(parents=True)
    try:
        _fetch_story(store, name, draft)
        said: list[str] = []
        checkpoint = _fetch_checkpoint(store, name, cwd, said)
        contents = read_run_file(draft)
        argv = argv_here(contents.argv, run.path.absolute(), place)
        moved = replace(contents, argv=argv, cwd=str(cwd), host=host_name(), boot_id=boot_id())
        if contents.cwd != str(cwd):
            said.append(f"it ran in {contents.cwd} on '{contents.host}'; now it runs in {cwd}")
        write_run_file(draft, moved)
        draft.path.rename(run.path)
    except BaseException:
        _forget(draft.path)
        raise
    return Fetched(run, checkpoint, tuple(said))


def argv_here(argv: Sequence[str], run: Path, place: str) -> tuple[str, ...]:
    """The command for this machine. In a user's own command only a Python path that does not exist here is replaced.
    The command of our own trainer names its run's folder and its mirror, so both are replaced as well. Pure, except
    that it checks whether that Python exists."""
    words = list(argv)
    is_python = bool(words) and Path(words[0]).name.startswith("python")
    if is_python and Path(words[0]).is_absolute() and not Path(words[0]).exists():
        words[0] = sys.executable
    if words[1:3] == ["-m", "jackline.trainer"] and len(words) > _RUN_WORD:
        words[_RUN_WORD] = str(run)
        mirror = place if "://" in place else str(Path(place).expanduser().absolute())
        words = [f"mirror={mirror}" if word.startswith("mirror=") else word for word in words]
    return tuple(words)


def find_in_mirror(word: str) -> tuple[str, str]:
    """The location of the mirror and the name of the run."""
    parent, _, last = word.rstrip("/").rpartition("/")
    if parent and _has_story(open_store(parent), last):
        return parent, last
    store = open_store(word)
    names = [name for name in store.names("") if _has_story(store, name)]
    if len(names) == 1:
        return word, names[0]
    if not names:
        raise CannotResume(f"{word} holds no mirrored run", hint="name the folder or URL that was given as --mirror")
    raise UsageError(f"{word} holds {len(names)} runs: {', '.join(names)}", hint=f"name one: {word}/{names[0]}")


def _has_story(store: Store, name: str) -> bool:
    return any(entry.startswith("run-") and entry.endswith(".tar.gz") for entry in store.names(name))


def _fetch_story(store: Store, name: str, run: RunDir) -> None:
    stories = [entry for entry in store.names(name) if entry.startswith("run-") and entry.endswith(".tar.gz")]
    for story in sorted(stories, reverse=True):
        with contextlib.suppress(Exception):  # an incomplete archive: try the one before it
            unpack_run(store.read(f"{name}/{story}"), run)
        if run.run_file.exists():
            return
    raise CannotResume(f"no record of run '{name}' in the mirror is whole")


def _fetch_checkpoint(store: Store, name: str, cwd: Path, said: list[str]) -> Path | None:
    for folder in whole_checkpoints(store, name):
        place = f"{name}/foreign/{folder}"
        try:
            return _put_back(store, place, cwd, said)
        except (OSError, ValueError, KeyError) as problem:
            said.append(f"{folder} in the mirror is not whole: {problem}")
    return None


def _put_back(store: Store, place: str, cwd: Path, said: list[str]) -> Path:
    where = json.loads(store.read(f"{place}/{WHERE}"))
    target = (cwd / str(where["relative"])).resolve()
    if not target.is_relative_to(cwd.resolve()):
        raise ValueError(f"it belongs outside {cwd}: {where['relative']}")
    if target.exists():
        said.append(f"{target} is here already and was left as it is")
        return target
    draft = target.parent / f".{target.name}.{time.monotonic_ns()}.draft"
    try:
        for file, size in where["files"]:
            local = (draft / str(file)).resolve()
            if not local.is_relative_to(draft.resolve()):
                raise ValueError(f"a file would land outside: {file}")
            local.parent.mkdir(parents=True, exist_ok=True)
            store.get(f"{place}/{file}", local)
            if local.stat().st_size != int(size):
                raise ValueError(f"{file} has {local.stat().st_size} bytes, {size} were uploaded")
        (draft / target.name).rename(target)
        os.utime(target, None)  # with a new mtime it counts as written by this run, so the supervisor may choose it
        said.append(f"brought back {where['relative']} from the mirror")
    finally:
        _forget(draft)
    return target


def _forget(path: Path) -> None:
    import shutil

    shutil.rmtree(path, ignore_errors=True)
