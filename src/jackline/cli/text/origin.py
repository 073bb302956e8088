"""The text on where a run comes from: branch and commit of the code, GPUs of the machine, the run that it was forked
from. Pure, from run.json."""

from __future__ import annotations

from collections import Counter
from typing import Any

from jackline.cli.text.safety import safe_text
from jackline.rundir.kin import fork_of
from jackline.rundir.records.fields import number
from jackline.rundir.run_file import RunFile
from jackline.units import format_bytes

_SHORT = 12


def origin_lines(contents: RunFile) -> list[tuple[str, str]]:
    """Label and text; an empty text where it is unknown."""
    fork = safe_text(fork_of(contents), 160)
    return [("fork of", fork), ("code", code_text(contents.git)), ("gpus", gpus_text(contents.machine))]


def code_text(git: dict[str, Any]) -> str:
    """'branch main, commit 0123456789ab, with uncommitted changes'; '' outside a repository."""
    if not git.get("commit"):
        return ""
    branch = f"branch {safe_text(git['branch'], 60)}, " if git.get("branch") else ""
    changes = ", with uncommitted changes" if git.get("is_dirty") is True else ""
    return f"{branch}commit {safe_text(git['commit'], 64)[:_SHORT]}{changes}"


def gpus_text(machine: dict[str, Any]) -> str:
    """'2 x NVIDIA H200 (140 GiB)', as found when the run was created; '' if there were none."""
    names, sizes = (_listing(machine.get(name)) for name in ("cards", "card_bytes"))
    sizes += [None] * (len(names) - len(sizes))
    counted = Counter(
        safe_text(name, 60) + (f" ({format_bytes(number(size) or 0)})" if number(size) else "")
        for name, size in zip(names, sizes, strict=False)
    )
    return ", ".join(f"{count} x {gpu}" if count > 1 else gpu for gpu, count in counted.items())


def _listing(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list) else []
