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
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from jackline.checkpoint.format.manifest import Name
from jackline.checkpoint.mirror.engine import digest_of
from jackline.checkpoint.mirror.fetch import fetch_newest
from jackline.checkpoint.mirror.store import Store, open_store, read_small
from jackline.checkpoint.mirror.stories import fetch_story, find_in_mirror, full_place
from jackline.checkpoint.place import choose_place
from jackline.errors import CannotResume
from jackline.immutable import immutable
from jackline.rundir.access.reading import read_whole
from jackline.rundir.access.secrets import without_secrets
from jackline.rundir.access.trust import is_known_text
from jackline.rundir.create import claim_filled
from jackline.rundir.layout import RunDir
from jackline.rundir.process_id import boot_id, host_name
from jackline.rundir.recorded import read_recorded
from jackline.rundir.records.supervisor import read_supervisor
from jackline.rundir.run_file import RunFile, check_name, read_run_file
from jackline.supervisor.foreign.find import belongs
from jackline.supervisor.foreign.mirror import DIGEST, WHERE, whole_checkpoints

MAX_WHERE_BYTES = 4 << 20
_RUN_WORD = 3  # index of RUN_DIR in `python -m jackline.trainer RUN_DIR RECIPE ...`


@immutable
class Fetched:
    """What was downloaded."""

    run: RunDir
    checkpoint: Path | None
    said: tuple[str, ...]


def fetch_stranger(
    word: str,
    runs: Path,
    cwd: Path,
    *,
    with_own: bool = True,
    from_scratch: bool = False,
    accept: Callable[[RunFile], None] = lambda contents: None,
) -> Fetched:
    """`word` names a mirror with one run, or one run in a mirror. Raises when it is ambiguous or incomplete.

    `accept` is called with the run.json of a run that this user did not make, and raises when it is not wanted; until
    then nothing but a draft of the records has been written.

    `with_own`: also download the newest of Jackline's own checkpoints. Without any checkpoint a run that has made
    progress is refused, unless `from_scratch`.
    """
    place, name = find_in_mirror(word)
    store = open_store(place)
    run = RunDir(runs / check_name(name))
    said: list[str] = []
    found: list[Path] = []

    def fill(draft: RunDir) -> RunFile:
        fetch_story(store, name, draft)
        contents = read_run_file(draft)
        if not is_known_text(read_whole(draft.run_file)):
            accept(contents)
        own = None
        if with_own:
            with contextlib.suppress(*((CannotResume,) if from_scratch else ())):
                own = _fetch_own(store, name, run, draft, said)
        checkpoint = _fetch_checkpoint(store, name, (cwd, contents), said)
        found.extend(path for path in (checkpoint,) if path is not None)
        if with_own and not from_scratch:
            _refuse_to_begin_anew(draft, place, name, own, checkpoint)
        argv = argv_here(contents.argv, run.path.absolute(), place)
        if contents.cwd != str(cwd):
            said.append(f"it ran in {contents.cwd} on '{contents.host}'; now it runs in {cwd}")
        options = dict(contents.options)
        if options.get("mirror"):
            options["mirror"] = without_secrets(
                full_place(place)
            )  # where it is now, whatever it was called on the other machine
        return replace(contents, argv=argv, cwd=str(cwd), options=options, host=host_name(), boot_id=boot_id())

    claim_filled(run, fill).release()
    return Fetched(run, found[0] if found else None, tuple(said))


def _fetch_own(store: Store, name: str, run: RunDir, draft: RunDir, said: list[str]) -> Name | None:
    """The newest whole of Jackline's own checkpoints. `run` is where the draft will be."""
    place = choose_place(run)
    folder = draft.checkpoints if place.folder == run.checkpoints else place.folder
    fetched = fetch_newest(store, name, folder)
    if fetched is None:
        return None
    said.extend(f"passed over in the mirror: {text}" for text in fetched.refused)
    recorded = read_recorded(draft).saved_step
    later = f"; step {recorded} was saved, but never uploaded" if recorded > fetched.name.step else ""
    said.append(f"brought back {fetched.name} from the mirror{later}")
    return fetched.name


def _refuse_to_begin_anew(draft: RunDir, place: str, name: str, own: Name | None, checkpoint: Path | None) -> None:
    """Raise when the run's records show progress and the mirror has no checkpoint of it."""
    step = read_recorded(draft).step
    if draft.session_files() and step > 0 and (own is None or own.step == 0) and checkpoint is None:
        has = "no checkpoint of it" if own is None else "only its checkpoint of step 0"
        reached = f"had reached step {step}"
    elif read_supervisor(draft).checkpoint.path is not None and own is None and checkpoint is None:
        has, reached = "no whole checkpoint of it", f"had written {read_supervisor(draft).checkpoint.path}"
    else:
        return
    raise CannotResume(
        f"run '{name}' {reached}, and the mirror {without_secrets(place)} has {has}",
        hint=f"resume it where it ran, or begin anew: jackline resume {place}/{name} --from-scratch",
    )


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
        words = [f"mirror={full_place(place)}" if word.startswith("mirror=") else word for word in words]
    return tuple(words)


def _fetch_checkpoint(store: Store, name: str, here: tuple[Path, RunFile], said: list[str]) -> Path | None:
    """`here`: the folder that the run will run in, and its run.json, whose pattern says where checkpoints belong."""
    for folder in whole_checkpoints(store, name):
        place = f"{name}/foreign/{folder}"
        try:
            return _put_back(store, place, here, said)
        except (OSError, ValueError, KeyError, TypeError) as problem:
            said.append(f"{folder} in the mirror is not whole: {problem}")
    return None


def _put_back(store: Store, place: str, here: tuple[Path, RunFile], said: list[str]) -> Path:
    cwd, contents = here
    where = json.loads(read_small(store, f"{place}/{WHERE}", MAX_WHERE_BYTES))
    target = (cwd / str(where["relative"])).resolve()
    if not target.is_relative_to(cwd.resolve()):
        raise ValueError(f"it belongs outside {cwd}: {where['relative']}")
    pattern = contents.options.get("checkpoints")
    if not isinstance(pattern, str) or not belongs(str(where["relative"]), pattern, contents.cwd):
        raise ValueError(f"{where['relative']} is not where this run keeps its checkpoints ({pattern})")
    if target.exists():
        said.append(f"{target} is here already and was left as it is")
        return target
    draft = target.parent / f".{target.name}.{time.monotonic_ns()}.draft"
    try:
        for file, size, *digest in where["files"]:
            local = (draft / str(file)).resolve()
            if not local.is_relative_to(draft.resolve()):
                raise ValueError(f"a file would land outside: {file}")
            local.parent.mkdir(parents=True, exist_ok=True)
            store.get(f"{place}/{file}", local)
            if local.stat().st_size != int(size):
                raise ValueError(f"{file} has {local.stat().st_size} bytes, {size} were uploaded")
            if digest and digest_of(local, DIGEST) != digest[0]:
                raise ValueError(f"{file} has other contents than were uploaded")
        (draft / target.name).rename(target)
        os.utime(target, None)  # with a new mtime it counts as written by this run, so the supervisor may choose it
        said.append(f"brought back {where['relative']} from the mirror")
    finally:
        _forget(draft)
    return target


def _forget(path: Path) -> None:
    import shutil

    shutil.rmtree(path, ignore_errors=True)
