"""Decides whether a command is a new run, a live one to watch, an ended one to resume, or a name clash.

Owns the default name and the pure decision. Does not touch the disk: the caller passes what it found.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any, Literal

from jackline.immutable import immutable
from jackline.rundir.atomic import sha256_hex

State = Literal["alive", "unwatched", "stopped", "dead", "finished", "elsewhere", "empty"]
_LAUNCHER = re.compile(
    r"(python|pypy)[\d.]*|bash|sh|env|nohup|nice|time|timeout|uv|poetry|run|torchrun|accelerate|launch|deepspeed|mpirun|srun"
)


@immutable
class Existing:
    """A run that already has the wanted name."""

    name: str
    state: State
    settings: Mapping[str, Any]


@immutable
class Create:
    name: str


@immutable
class Watch:
    """The run is alive: show it, start nothing."""

    name: str


@immutable
class Resume:
    """The run was stopped or crashed: start its next attempt. `differences` are the settings changed since."""

    name: str
    differences: tuple[str, ...] = ()


@immutable
class AlreadyFinished:
    name: str


@immutable
class Clash:
    """The same name with other settings. `differences` are 'key: before -> now' lines."""

    name: str
    is_alive: bool
    differences: tuple[str, ...]


@immutable
class Elsewhere:
    """The run was last seen on another machine; whether it is alive cannot be known from here."""

    name: str


Start = Create | Watch | Resume | AlreadyFinished | Clash | Elsewhere


def default_name(argv: Sequence[str], settings: Mapping[str, Any]) -> str:
    """Script stem and a short hash of the settings: the same command always has the same name."""
    return f"{_stem(argv)}-{settings_hash(settings)[:6]}"


def settings_hash(settings: Mapping[str, Any]) -> str:
    text = json.dumps(settings, sort_keys=True, default=str)
    return sha256_hex(text.encode("utf-8", "surrogateescape"))


def decide_start(
    wanted: Mapping[str, Any], existing: Existing | None, *, name: str, is_new: bool, accepts_changes: bool
) -> Start:
    """`name` is the name of the run to create if none exists (already numbered for --new)."""
    if existing is None or is_new or existing.state == "empty":
        return Create(name)
    differences = compare_settings(existing.settings, wanted)
    is_live = existing.state in ("alive", "unwatched")
    if differences and (is_live or not accepts_changes):
        return Clash(existing.name, is_live, differences)
    if is_live:
        return Watch(existing.name)
    if existing.state == "elsewhere":
        return Elsewhere(existing.name)
    if existing.state == "finished" and not differences:
        return AlreadyFinished(existing.name)
    return Resume(existing.name, differences)


def compare_settings(before: Mapping[str, Any], now: Mapping[str, Any]) -> tuple[str, ...]:
    lines = []
    if "argv" not in before and "argv" not in now:
        before, now = _recipe_settings(before, now), _recipe_settings(now, before)
    for key in sorted(set(before) | set(now)):
        old, new = before.get(key), now.get(key)
        if _plain(old) != _plain(new):
            lines.append(f"{key}: {_shown(old)} -> {_shown(new)}")
    return tuple(lines)


def _recipe_settings(settings: Mapping[str, Any], other: Mapping[str, Any]) -> Mapping[str, Any]:
    """A recipe is the same run in every folder, unless it reads files by a path from that folder (`files_in`). Runs
    made before that was recorded have only the folder."""
    kept = {key: value for key, value in settings.items() if key != "cwd"}
    return {"files_in": settings.get("cwd"), **kept} if "files_in" in other else kept


def numbered_name(name: str, taken: Sequence[str]) -> str:
    """The first of NAME, NAME-2, NAME-3 ... that is free."""
    used = set(taken)
    if name not in used:
        return name
    number = 2
    while f"{name}-{number}" in used:
        number += 1
    return f"{name}-{number}"


def _stem(argv: Sequence[str]) -> str:
    """The name a user would give the command: the script, the module, or the program itself."""
    first = ""
    for index, word in enumerate(argv):
        before = argv[index - 1] if index else ""
        if before == "-m":
            module = word.rsplit(".", 1)[-1]
            if not _LAUNCHER.fullmatch(module):
                return _clean(module)
        elif word in ("-c", "-"):
            break
        elif _is_script(word):
            return _clean(PurePath(word).stem)
        elif not _is_passed_over(word):
            # After a launcher, a word may be the value of an option (torchrun --rdzv-backend c10d train.py).
            if not before.startswith("-"):
                return _clean(PurePath(word).stem)
            first = first or word
    return _clean(PurePath(first).stem or (PurePath(argv[0]).name if argv else "run"))


def _is_script(word: str) -> bool:
    return not word.startswith("-") and PurePath(word).suffix in (".py", ".sh", ".ipynb")


def _is_passed_over(word: str) -> bool:
    """Whether it is an option, a setting (A=1), a number, or a program that only starts others."""
    is_number = word.replace(".", "", 1).replace(":", "").isdigit()
    return word.startswith("-") or "=" in word or is_number or bool(_LAUNCHER.fullmatch(PurePath(word).name))


def _clean(text: str) -> str:
    cleaned = re.sub(r"[^A-Za-z0-9_]+", "-", text).strip("-_")[:40]
    return cleaned or "run"


def _plain(value: Any) -> Any:
    return json.loads(json.dumps(value, default=str))


def _shown(value: Any) -> str:
    if value is None:
        return "(not set)"
    if isinstance(value, list | tuple):
        return " ".join(str(part) for part in value)
    return str(value)
