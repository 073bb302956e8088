"""The environment a supervised command starts with.

Owns which variables are set and when a person's own value wins. Pure but for `attempt_environment`, which looks at
this machine. Does not own what the injected file does with them (inject/sitecustomize.py).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from jackline.machine.protections import find_libstdbuf
from jackline.memory.guard.allocator_settings import allocator_environment
from jackline.rundir.layout import AttemptDir, RunDir
from jackline.supervisor.options import SuperviseOptions

INJECT_FOLDER = Path(__file__).parent / "inject"
# A real-time signal: SIGUSR1 and SIGUSR2 belong to Slurm and Lightning. The one after it asks for all threads.
STACK_SIGNAL = 61


def child_environment(
    environ: Mapping[str, str],
    *,
    stacks: Path,
    inject: bool,
    stdbuf: str | None,
    surface_is_terminal: bool,
    columns: int,
) -> dict[str, str]:
    """What the child sees. `stdbuf` is the path of libstdbuf.so, None to leave C programs alone."""
    child = dict(environ)
    if child.get("JACKLINE", "").lower() == "off":
        return child
    is_unbuffered_by_person = bool(child.get("PYTHONUNBUFFERED"))
    child.setdefault("PYTHONUNBUFFERED", "1")
    if stdbuf is not None and "_STDBUF_O" not in child:
        child["LD_PRELOAD"] = _joined(child.get("LD_PRELOAD", ""), stdbuf)
        child["_STDBUF_O"] = "L"
    if surface_is_terminal:
        # rich draws nothing at all off a terminal until the end; these two make it draw without a PTY.
        child.setdefault("TTY_COMPATIBLE", "1")
        child.setdefault("TTY_INTERACTIVE", "1")
        child.setdefault("COLUMNS", str(columns))
    if inject:
        child["PYTHONPATH"] = _with_first(child.get("PYTHONPATH", ""), str(INJECT_FOLDER))
        child["JACKLINE_STACKS"] = str(stacks.absolute())
        child.setdefault("JACKLINE_STACK_SIGNAL", str(STACK_SIGNAL))
        if not is_unbuffered_by_person:
            # One write a line instead of two, as on a terminal: lines of several processes do not mix.
            child["JACKLINE_LINE_BUFFERING"] = "1"
        # Less of the card lost between blocks; what a person set is kept.
        child.update(allocator_environment(child))
    return child


def stack_signal(environ: Mapping[str, str]) -> int:
    """The signal armed in the child; a value that is no real-time signal is ours again."""
    word = environ.get("JACKLINE_STACK_SIGNAL", "")
    return int(word) if word.isdigit() and 34 <= int(word) < 64 else STACK_SIGNAL


def _joined(before: str, library: str) -> str:
    # ld.so takes both colons and spaces; an existing list keeps its order, ours comes last.
    return before if library in before.replace(" ", ":").split(":") else ":".join(filter(None, (before, library)))


def _with_first(path: str, folder: str) -> str:
    """`folder` first, everything else as it was. An empty part means the current directory, so none is invented."""
    rest = [part for part in path.split(":") if part != folder] if path else []
    return ":".join([folder, *rest])


def attempt_environment(run: RunDir, attempt: AttemptDir, options: SuperviseOptions) -> dict[str, str]:
    """What the command of `attempt` gets: the person's own, our injections, and which run it belongs to."""
    env = child_environment(
        os.environ,
        stacks=attempt.stacks,
        inject=options.inject,
        stdbuf=find_libstdbuf(),
        surface_is_terminal=options.is_terminal,
        columns=options.columns,
    )
    env["JACKLINE_RUN_DIR"] = str(run.path)
    env["JACKLINE_ATTEMPT"] = str(attempt.number)
    env["JACKLINE_TYPED"] = options.typed  # always: one from outside would be another run's
    return env
