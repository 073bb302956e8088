"""Finds the run directory for the name or path that the user typed."""

from __future__ import annotations

import contextlib
import functools
import os
import re
from collections.abc import Sequence
from pathlib import Path

from jackline.errors import UsageError
from jackline.rundir.access.secrets import without_secrets
from jackline.rundir.layout import RunDir
from jackline.rundir.registry import copies_folder, is_copy, registered_places
from jackline.rundir.status import read_status

_NAMED = 5
_HASH = re.compile(r"-[0-9a-f]{6}(-\d+)?$")


def runs_folder(option: str | os.PathLike[str] | None = None) -> Path:
    """--runs-dir, else $JACKLINE_RUNS, else ./runs. Raises UsageError for a URL."""
    place = os.fspath(option or os.environ.get("JACKLINE_RUNS") or "runs")
    if is_url(place):
        raise UsageError(
            f"runs are kept in a folder of this machine, not at {without_secrets(place)}",
            hint="keep a copy there with --mirror; status, why, logs, watch, wait and dash read it",
        )
    return Path(place).absolute()


def is_url(word: str) -> bool:
    return "://" in word


def is_mirror(word: str) -> bool:
    """Whether `word` is a URL, or a folder that holds one or more mirrored runs."""
    if is_url(word):
        return True
    path = Path(word).expanduser()
    with contextlib.suppress(OSError):  # a name that is too long for a path, or a folder that cannot be read
        is_run = (path / "run.json").exists()
        return not is_run and (any(path.glob("run-*.tar.gz")) or any(path.glob("*/run-*.tar.gz")))
    return False


def list_runs(folder: Path, hung: list[RunDir] | None = None) -> list[RunDir]:
    """Runs in `folder`, then runs registered from elsewhere; each once, newest first. A run on a mount that does not
    answer is left out, and added to `hung`."""
    from jackline.rundir.access.patience import ask_each  # imports `queue`, which a named run does not need

    try:
        local = [RunDir(path) for path in folder.iterdir()]
    except OSError:  # no such folder, or no permission to read it
        local = []
    candidates = local + ([] if folder.parent == copies_folder() else registered_places())
    answers, silent = ask_each([functools.partial(_look, run) for run in candidates])
    if hung is not None:
        hung += [candidates[number] for number in silent]
    once: dict[Path, tuple[float, RunDir]] = {}
    for number, found in sorted(answers.items()):
        if found is not None:
            once.setdefault(found[0], (found[1], candidates[number]))
    return [run for _, run in sorted(once.values(), key=lambda pair: pair[0], reverse=True)]


def _look(run: RunDir) -> tuple[Path, float] | None:
    """Where the run really is, and when it last changed; None for what is no run."""
    return (run.path.resolve(), _last_change_s(run)) if run.has_run_file else None


def find_run(word: str | None, folder: Path, *, is_read_only: bool = False) -> RunDir:
    """`word` is a path or a name. Without it: the only live run, else the newest. A copy of a mirror's records is
    only found for a command that reads: what is written into it would be lost."""
    found = _find_named(word, folder) if word is not None else _find_likely(folder)
    if not is_read_only and is_copy(found):
        raise UsageError(
            f"{found.path} is a copy of records in a mirror, and is only read",
            hint="name the run where it is, or the mirror: jackline resume MIRROR/NAME",
        )
    return found


def _find_likely(folder: Path) -> RunDir:
    runs = list_runs(folder)
    if not runs:
        raise UsageError(f"there is no run in {folder}", hint="start one: jackline run -- python train.py")
    is_mirrored = folder.parent == copies_folder()
    found = [read_status(run) for run in runs]
    live = [
        run
        for run, status in zip(runs, found, strict=True)
        if status.state in ("alive", "unwatched") or (is_mirrored and status.is_heard_afar)
    ]
    return live[0] if len(live) == 1 else runs[0]


def find_only_live(folder: Path) -> RunDir:
    """For `stop`: with several live runs it raises instead of guessing, which could stop the wrong one."""
    live = [run for run in list_runs(folder) if read_status(run).state in ("alive", "unwatched")]
    if not live:
        raise UsageError("no run is alive", hint="`jackline runs` lists them all")
    if len(live) > 1:
        names = ", ".join(run.name for run in live)
        raise UsageError(f"{len(live)} runs are alive: {names}", hint=f"name one: jackline stop {live[0].name}")
    return live[0]


def _find_named(word: str, folder: Path) -> RunDir:
    for path in (folder / word, Path(word)):
        run = RunDir(path.absolute())
        if run.has_run_file or run.list_attempts():
            return run
    everywhere = list_runs(folder)
    exact = [run for run in everywhere if run.name == word]
    if exact:
        return exact[0]
    # The beginning of a name is enough where only one run has it; runs of this folder come first.
    beginnings = [run for run in everywhere if word and run.name.startswith(word)]
    here = [run for run in beginnings if run.path.parent == folder]
    for found in (here, beginnings):
        if len(found) == 1:
            return found[0]
    if beginnings:
        raise UsageError(
            f"{len(beginnings)} runs begin with '{word}'",
            detail=tuple(f"{run.name} ({read_status(run).state})" for run in beginnings[:_NAMED]),
            hint=f"write more of the name: the newest is {beginnings[0].name}",
        )
    if is_mirror(word):
        raise UsageError(
            f"{without_secrets(word)} is a mirror, and is only read here",
            hint="status, why, logs, watch, wait, events, plot and report read it; resume continues its run here",
        )
    near = nearest_name(word, [run.name for run in everywhere])
    hint = f"did you mean '{near}'?" if near else "`jackline runs` lists the runs that can be found"
    raise UsageError(f"there is no run '{word}' in {folder}", hint=hint)


def nearest_name(word: str, names: Sequence[str]) -> str | None:
    """The name that was probably meant, compared with and without the hash at its end; of equals the first."""
    from difflib import get_close_matches

    by_stem: dict[str, str] = {}
    for name in names:
        by_stem.setdefault(name, name)
        by_stem.setdefault(_HASH.sub("", name), name)
    near = get_close_matches(word, list(by_stem), n=1)
    if near:
        return by_stem[near[0]]
    return next((name for name in names if word and word.lower() in name.lower()), None)


def _last_change_s(run: RunDir) -> float:
    for path in (run.supervisor_file, run.run_file, run.path):
        try:
            return path.stat().st_mtime
        except OSError:
            continue
    return 0.0
