"""What `--detach --json` prints about the run that was started: schema `jackline.start/1`."""

from __future__ import annotations

import json
import shlex
from typing import Any

import click

from jackline.errors import UsageError
from jackline.rundir.layout import RunDir

SCHEMA = "jackline.start/1"


def is_detached_as_json(given: dict[str, Any]) -> bool:
    """Whether the answer is to be JSON. Without --detach the command's own output goes to stdout."""
    if given["as_json"] and not given["detach"]:
        hint = "add --detach; for a run in the foreground: `jackline status --json` from another shell"
        raise UsageError("--json goes with --detach: else stdout holds what your command prints", hint=hint)
    return bool(given["as_json"])


def print_started(run: RunDir, *, attempt: int, state: str) -> None:
    """`state`: started, alive (it was already), or finished (it was already, and nothing was started)."""
    name = shlex.quote(run.name)
    answer = {
        "schema": SCHEMA,
        "run": run.name,
        "path": str(run.path),
        "state": state,
        "attempt": attempt,
        "log": str(run.out_log),
        "next": f"jackline wait {name} --until ended,stuck --timeout 1h",
    }
    click.echo(json.dumps(answer, ensure_ascii=False, separators=(",", ":")))
