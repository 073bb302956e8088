"""Before instructions of a run from somebody else are followed: show them, and ask.

A run that this user made here, or accepted before, passes without a word. Owns the text and the question; whether a
run is this user's own is judged by rundir/access/trust.py.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

import click

from jackline.cli.text.clock import clock
from jackline.cli.text.safety import safe_text
from jackline.errors import UsageError
from jackline.rundir.access.trust import find_links, judge
from jackline.rundir.layout import RunDir
from jackline.rundir.registry import register
from jackline.rundir.run_file import RunFile, read_run_file

_LONGEST = 2000
_NAMED = {
    "on_event": "at events it would execute",
    "when_done": "at the end it would execute",
    "mirror": "it would upload to",
    "checkpoints": "its checkpoints would be looked for, and put back, at",
    "resume_arg": "when it resumes, its command would get",
}


def trust_option(command: Any) -> Any:
    return click.option(
        "--trust",
        is_flag=True,
        help="Follow the instructions of a run that was not made here by you; see them first.",
    )(command)


def confirm(run: RunDir, *, is_trusted: bool) -> None:
    """Return when the run is this user's own, or a person has accepted what it would execute; raise otherwise."""
    trust = judge(run)
    if trust.is_ours:
        return
    if "belongs to" in trust.why_not or "may write" in trust.why_not:
        raise UsageError(
            f"run '{run.name}' cannot be trusted: {trust.why_not} ({run.path})",
            hint="copy it to a folder of your own that only you can write to, and look at the copy",
        )
    refuse_links(run)
    accept(read_run_file(run), run.name, trust.why_not, is_trusted=is_trusted)
    register(run, vouched=True)


def refuse_links(run: RunDir) -> None:
    """Raise for a run with symbolic links inside that this user did not make here."""
    links = [] if judge(run).is_ours else find_links(run)
    if links:
        raise UsageError(
            f"run '{run.name}' was not made here by you, and holds symbolic links: {', '.join(links[:5])}",
            hint=f"nothing is written through them; see where they lead: find {run.path} -type l -ls",
        )


def accept(contents: RunFile, name: str, why: str, *, is_trusted: bool) -> None:
    """Show what would be executed. Return if it is accepted; raise UsageError otherwise."""
    lines = list(instructions(contents))
    say(f"run '{name}': {why}. What it would do here, with your rights:")
    for line in lines:
        say(f"  {safe_text(line, _LONGEST)}")
    if any(len(line) > _LONGEST for line in lines):
        raise UsageError(
            f"run '{name}' was not started: what it would execute is too long to be read here",
            hint="read its run.json; if you want that, start it yourself with `jackline run`",
        )
    if is_trusted:
        say("accepted with --trust")
        return
    if sys.stdin is not None and sys.stdin.isatty() and sys.stderr.isatty():
        if click.confirm("[jackline] execute this?", default=False, err=True):
            return
        raise UsageError(f"run '{name}' was not started", hint="reading it is safe: status, why, logs, report")
    raise UsageError(
        f"run '{name}' was not started: {why}",
        hint="read the lines above; if you want exactly that, add --trust. Reading it is safe: status, why, logs",
    )


def instructions(contents: RunFile) -> Iterator[str]:
    """Everything in run.json that would be executed, or that says where to write."""
    made = f"made by '{contents.user or '?'}' on '{contents.host}', {clock(contents.created_at_s)}"
    yield made
    yield f"in {contents.cwd} it would execute: {contents.command}"
    yield from _of_options(contents.options)


def _of_options(options: Mapping[str, Any]) -> Iterator[str]:
    for name, words in _NAMED.items():
        if options.get(name):
            yield f"{words}: {options[name]}"


def say(text: str) -> None:
    print(f"[jackline] {text}", file=sys.stderr, flush=True)
