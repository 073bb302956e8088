"""Other runs of the same script: the run a command means although its name differs, those to mention on screen, and
the tree of forks.

A run keeps its name when it was created under another spelling of its command, or when its folder was moved.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from jackline.immutable import immutable
from jackline.rundir.command import plain_settings, script_of
from jackline.rundir.find import list_runs
from jackline.rundir.identity import compare_settings
from jackline.rundir.layout import RunDir
from jackline.rundir.run_file import DamagedRun, RunFile, read_run_file, write_run_file
from jackline.rundir.status import read_status

_SHOWN = 3
FORKED = "forked_from"  # of run.json's settings: 'NAME at step N', a run in the same folder
_Item = TypeVar("_Item")


@immutable
class Same:
    """A run of the same command. `moved_from` is the folder it ran in, if that is gone."""

    run: RunDir
    moved_from: str | None = None


def find_same(folder: Path, name: str, wanted: Mapping[str, Any]) -> Same:
    """The run in `folder` that `wanted` (in plain spelling) means: the one with that name, else one that was created
    under another spelling or in a folder that was moved; else the name for a new run."""
    if (folder / name).exists():
        return Same(RunDir(folder / name), _moved_from(RunDir(folder / name), wanted))
    found: list[tuple[bool, float, Same]] = []
    for run in _local_runs(folder):
        contents = _read(run)
        if contents is None:
            continue
        settings = plain_settings(contents.settings)
        moved_from = _moved_from(run, wanted, settings)
        if not compare_settings(settings, wanted) or moved_from is not None:
            found.append((moved_from is not None, contents.created_at_s, Same(run, moved_from)))
    return min(found, key=lambda one: one[:2])[2] if found else Same(RunDir(folder / name))


def _moved_from(run: RunDir, wanted: Mapping[str, Any], settings: Mapping[str, Any] | None = None) -> str | None:
    """The folder that the run ran in, if only that differs and it does not exist any more."""
    if settings is None:
        contents = _read(run)
        if contents is None:
            return None
        settings = plain_settings(contents.settings)
    before, now = settings.get("cwd"), wanted.get("cwd")
    here = {key: wanted[key] for key in ("cwd", "files_in") if key in wanted and key in settings}
    is_same = not compare_settings({**settings, **here}, wanted)
    is_moved = isinstance(before, str) and before != now and not os.path.isdir(before)  # noqa: PTH112
    return str(before) if is_same and is_moved else None


def relocate(run: RunDir, argv: list[str], settings: Mapping[str, Any]) -> None:
    """Record that the run's folder was moved; run.json keeps the command as it was."""
    contents = read_run_file(run)
    former = [*contents.former, {"argv": list(contents.argv), "settings": contents.settings}]
    moved = replace(contents, argv=tuple(argv), settings=dict(settings), cwd=str(settings["cwd"]), former=former)
    write_run_file(run, moved)


def kin_lines(folder: Path, name: str, wanted: Mapping[str, Any], with_changes: Callable[[str], str]) -> list[str]:
    """Lines for the start of a new run whose script or recipe has other runs; empty when there are none.
    `with_changes(name)` is the command that continues one of them with the settings of this start."""
    found = []
    for run in list_runs(folder):
        contents = _read(run)
        if contents is not None and run.path != folder / name and _is_kin(run, contents, folder, wanted):
            found.append((run, contents))
    if not found:
        return []
    what = os.path.basename(script_of(wanted)) or wanted.get("recipe") or "this command"
    lines = [f"'{name}' is a new run. Other runs of {what}:"]
    lines += [f"  {_line(run, contents, folder, wanted)}" for run, contents in found[:_SHOWN]]
    if len(found) > _SHOWN:
        lines.append(f"  and {len(found) - _SHOWN} more: jackline runs")
    first = next((run for run, _ in found if read_status(run).state in ("stopped", "dead", "finished")), None)
    if first is not None:
        lines.append(f"to continue one with the settings of this start: {with_changes(first.name)}")
    return lines


def _is_kin(run: RunDir, contents: RunFile, folder: Path, wanted: Mapping[str, Any]) -> bool:
    settings = plain_settings(contents.settings)
    script, ours = script_of(settings), script_of(wanted)
    if ours:
        is_here = run.path.parent == folder
        return _full(script, settings) == _full(ours, wanted) or (is_here and script == ours)
    return bool(wanted.get("recipe")) and settings.get("recipe") == wanted.get("recipe")


def _full(script: str, settings: Mapping[str, Any]) -> str:
    return os.path.join(str(settings.get("cwd")), script) if script else "?"


def _line(run: RunDir, contents: RunFile, folder: Path, wanted: Mapping[str, Any]) -> str:
    state = read_status(run).state
    word = run.name if run.path.parent == folder else shlex.quote(str(run.path))
    todo = {"alive": f": jackline watch {word}", "unwatched": f": jackline status {word}", "finished": ""}
    return f"'{run.name}' ({_difference(contents, wanted)}), {state}{todo.get(state, f': jackline resume {word}')}"


def _difference(contents: RunFile, wanted: Mapping[str, Any]) -> str:
    settings = plain_settings(contents.settings)
    if "argv" in wanted:
        argv = [str(word) for word in settings.get("argv", ())]
        arguments = argv[3:] if argv[1:2] == ["-m"] else argv[2:]
        same_folder = settings.get("cwd") == wanted.get("cwd")
        where = "" if same_folder else f" in {settings.get('cwd')}"
        return (shlex.join(arguments)[:80] or "no arguments") + where
    changed = [key for key in sorted({*settings, *wanted} - {"cwd"}) if settings.get(key) != wanted.get(key)]
    shown = [f"{key} {settings.get(key)}, now {wanted.get(key)}" for key in changed[:3]]
    return "; ".join(shown) + ("; ..." if len(changed) > 3 else "") or "the same settings"


def _local_runs(folder: Path) -> list[RunDir]:
    try:
        return [run for run in map(RunDir, sorted(folder.iterdir())) if run.has_run_file]
    except OSError:
        return []


def _read(run: RunDir) -> RunFile | None:
    try:
        return read_run_file(run)
    except (DamagedRun, OSError):
        return None


# -- forks -----------------------------------------------------------------------------------------------------------


def fork_of(contents: RunFile | None) -> str:
    """'NAME at step N' for a run that `jackline fork` made; else ''."""
    return str(contents.settings.get(FORKED, "")) if contents is not None else ""


def read_fork(run: RunDir) -> str:
    return fork_of(_read(run))


def parent_of(path: Path, fork: str) -> Path | None:
    """The folder of the run that the one at `path` was forked from; whether it still exists is not looked up."""
    name, is_fork, _step = fork.rpartition(" at step ")
    return path.parent / name if is_fork and name else None


def as_tree(runs: Sequence[tuple[Path, str, _Item]]) -> list[tuple[int, _Item]]:
    """Each item with its depth: a fork follows the run that it comes from, if that is among them too. `runs` are
    folders, what `fork_of` said, and the items."""
    known = {path for path, _, _ in runs}
    children: dict[Path | None, list[tuple[Path, _Item]]] = {}
    for path, fork, item in runs:
        parent = parent_of(path, fork)
        children.setdefault(parent if parent in known and parent != path else None, []).append((path, item))
    found: list[tuple[int, _Item]] = []
    waiting = [(0, *pair) for pair in reversed(children.pop(None, []))]
    while waiting:
        depth, path, item = waiting.pop()
        found.append((depth, item))
        waiting += [(depth + 1, *pair) for pair in reversed(children.pop(path, []))]
    return found + [(0, item) for rest in children.values() for _, item in rest]  # forged: forks of each other
