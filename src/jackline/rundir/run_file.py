"""run.json: what was started, where, from which code. Written once by the process that creates the run."""

from __future__ import annotations

import os
import re
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, field, replace
from pathlib import Path
from typing import Any

from jackline.errors import UsageError
from jackline.immutable import immutable
from jackline.rundir import atomic
from jackline.rundir.atomic import sha256_hex
from jackline.rundir.layout import FORMAT, RunDir
from jackline.rundir.process_id import boot_id, host_name
from jackline.rundir.records import fields

MAX_NAME = 80


class DamagedRun(UsageError):
    """A folder that should be a run but cannot be read as one."""


@immutable
class RunFile:
    """The contents of run.json. `options` are for the supervisor; `settings` decide whether two runs are the same."""

    name: str
    kind: str
    argv: tuple[str, ...]
    cwd: str
    settings: dict[str, Any]
    options: dict[str, Any]
    created_at_s: float
    host: str
    boot_id: str
    git: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    machine: dict[str, Any] = field(default_factory=dict)
    user: str = ""
    former: list[dict[str, Any]] = field(default_factory=list)  # its earlier commands, before --continue-with-changes
    format: int = FORMAT

    @property
    def command(self) -> str:
        return shlex.join(self.argv)

    def to_json(self) -> dict[str, Any]:
        return {"format": self.format, "name": self.name, "command": self.command, **asdict(self)}


def describe_run(
    name: str,
    *,
    kind: str,
    argv: Sequence[str],
    settings: Mapping[str, Any],
    options: Mapping[str, Any],
    cwd: Path,
) -> RunFile:
    """Everything known about a run when it is created. Reads git and the versions; writes nothing."""
    import platform  # these imports cost 15 ms; only code that creates runs needs them

    from jackline import __version__

    return RunFile(
        name=name,
        kind=kind,
        argv=tuple(argv),
        cwd=str(cwd),
        settings=dict(settings),
        options=dict(options),
        created_at_s=time.time(),
        host=host_name(),
        boot_id=boot_id(),
        git=read_git(cwd),
        versions={"jackline": __version__, "python": platform.python_version()},
        machine={"system": platform.platform(), "num_cpus": os.cpu_count() or 1},
        user=_user(),
    )


def with_gpus(contents: RunFile, names: Sequence[str], sizes_bytes: Sequence[int] = ()) -> RunFile:
    """The same with the machine's GPUs. The creator of a run queries them, because a driver may be slow."""
    gpus = {"cards": list(names), "card_bytes": list(sizes_bytes)}
    return replace(contents, machine={**contents.machine, **gpus})


def write_run_file(run: RunDir, contents: RunFile) -> None:
    atomic.write_json(run.run_file, contents.to_json(), durable=True)


def read_run_file(run: RunDir) -> RunFile:
    """Raises DamagedRun with the reason and a next action."""
    if not run.run_file.exists():
        raise DamagedRun(
            f"{run.path} is not a run: it has no run.json",
            hint="`jackline runs` lists the runs that can be read",
        )
    value = atomic.read_json(run.run_file)
    if not isinstance(value, dict):
        raise DamagedRun(
            f"{run.run_file} is damaged: it is not JSON",
            detail="the log is still readable: " + str(run.out_log),
            hint="restore run.json from a copy, or start again with --new",
        )
    number = value.get("format")
    if not isinstance(number, int) or number > FORMAT:
        raise DamagedRun(
            f"{run.run_file} has format {number!r}; this Jackline reads format {FORMAT}",
            hint="upgrade Jackline: pip install -U jackline",
        )
    try:
        return _from_json(value)
    except KeyError as error:
        problem = f"it has no {error}"
    except (TypeError, ValueError) as error:
        problem = str(error)
    raise DamagedRun(
        f"{run.run_file} is damaged: {problem}",
        detail="the log is still readable: " + str(run.out_log),
        hint="restore run.json from a copy, or start again with --new",
    )


def _from_json(value: dict[str, Any]) -> RunFile:
    return RunFile(
        name=str(value["name"]),
        kind=str(value["kind"]),
        argv=_words(value["argv"]),
        cwd=str(value["cwd"]),
        settings=dict(value["settings"]),
        options=dict(value["options"]),
        created_at_s=_moment(value["created_at_s"]),
        host=str(value["host"]),
        boot_id=str(value["boot_id"]),
        git=fields.mapping(value.get("git")) or {},
        versions=fields.mapping(value.get("versions")) or {},
        machine=fields.mapping(value.get("machine")) or {},
        user=fields.text(value.get("user")) or "",
        former=list(fields.mappings(value.get("former")) or ()),
        format=int(value["format"]),
    )


def _moment(value: Any) -> float:
    found = fields.moment(value)
    if found is None:
        raise TypeError(f"'created_at_s' should be a time and is {value!r:.40}")
    return found


def _words(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise TypeError(f"'argv' should be a list and is {value!r}")
    return tuple(str(part) for part in value)


def check_name(name: str) -> str:
    """Return `name` if it is a valid folder name directly under the runs folder; raise otherwise."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name) or ".." in name or len(name) > MAX_NAME:
        raise UsageError(
            f"'{name}' cannot be a run name",
            hint=f"use letters, digits, '.', '_' and '-', beginning with a letter or digit, at most {MAX_NAME}",
        )
    return name


def read_git(folder: Path) -> dict[str, Any]:
    """Commit, branch and a hash of the uncommitted difference; empty outside a repository or without git."""
    names = _git(folder, "rev-parse", "HEAD", "--abbrev-ref", "HEAD")
    if names is None:
        return {}
    commit, branch = names.split("\n")[:2]
    diff = read_diff(folder)
    found: dict[str, Any] = {"commit": commit, "is_dirty": bool(diff)}
    if branch != "HEAD":  # "HEAD" means that no branch is checked out
        found["branch"] = branch
    if diff:
        found["diff_sha256"] = sha256_hex(diff.encode("utf-8", "surrogateescape"))
    return found


def read_diff(folder: Path) -> str:
    """The uncommitted changes of the repository; empty outside one or without git."""
    return _git(folder, "diff", "HEAD") or ""


def _git(folder: Path, *words: str) -> str | None:
    import subprocess

    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *words], capture_output=True, timeout=5, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.decode("utf-8", "surrogateescape") if done.returncode == 0 else None


def _user() -> str:
    import getpass

    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())
