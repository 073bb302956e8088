"""The environment a supervised command starts with.

Owns which variables are set and when the user's own value wins. Pure, except for `attempt_environment`, which
looks at this machine. Does not own what the injected file does with them (inject/sitecustomize.py).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from jackline.machine.proc import RANK_VARIABLES
from jackline.machine.protections import find_libstdbuf
from jackline.memory.guard.allocator_settings import allocator_environment
from jackline.rundir.layout import DISK_BUDGET_VARIABLE, LIVE_VARIABLE, AttemptDir, RunDir
from jackline.supervisor.options import SuperviseOptions

INJECT_FOLDER = Path(__file__).parent / "inject"
# A real-time signal, because Slurm and Lightning use SIGUSR1 and SIGUSR2. The next number asks for all threads.
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
    """The child's environment. `stdbuf` is the path of libstdbuf.so; None leaves C programs unchanged."""
    child = dict(environ)
    if child.get("JACKLINE", "").lower() == "off":
        return child
    is_unbuffered_by_person = bool(child.get("PYTHONUNBUFFERED"))
    child.setdefault("PYTHONUNBUFFERED", "1")
    if stdbuf is not None and "_STDBUF_O" not in child:
        child["LD_PRELOAD"] = _joined(child.get("LD_PRELOAD", ""), stdbuf)
        child["_STDBUF_O"] = "L"
    if surface_is_terminal:
        # Without a terminal, rich draws nothing until the end; these two variables make it draw without a PTY.
        child.setdefault("TTY_COMPATIBLE", "1")
        child.setdefault("TTY_INTERACTIVE", "1")
        child.setdefault("COLUMNS", str(columns))
    if inject:
        child["PYTHONPATH"] = _with_first(child.get("PYTHONPATH", ""), str(INJECT_FOLDER))
        child["JACKLINE_STACKS"] = str(stacks.absolute())
        child.setdefault("JACKLINE_STACK_SIGNAL", str(STACK_SIGNAL))
        if not is_unbuffered_by_person:
            # One write per line instead of two, as on a terminal, so that lines of several processes do not mix.
            child["JACKLINE_LINE_BUFFERING"] = "1"
        # Less GPU memory is lost to fragmentation. A value set by the user is kept.
        child.update(allocator_environment(child))
    return child


def stack_signal(environ: Mapping[str, str]) -> int:
    """The signal armed in the child. A value that is not a real-time signal is replaced by our default."""
    word = environ.get("JACKLINE_STACK_SIGNAL", "")
    return int(word) if word.isdigit() and 34 <= int(word) < 64 else STACK_SIGNAL


def _joined(before: str, library: str) -> str:
    # ld.so accepts both colons and spaces. An existing list keeps its order; our library comes last.
    return before if library in before.replace(" ", ":").split(":") else ":".join(filter(None, (before, library)))


def _with_first(path: str, folder: str) -> str:
    """Put `folder` first and keep the rest. An empty part would mean the current directory, so none is added."""
    rest = [part for part in path.split(":") if part != folder] if path else []
    return ":".join([folder, *rest])


def rank_environment(environ: Mapping[str, str], attempt: AttemptDir, *, is_divided: bool) -> dict[str, str]:
    """How the injected file finds out which rank a process is, and where the output of the other ranks goes. A
    terminal (--tty) shows all of them: a program that has one may draw on it."""
    names = [",".join(one) for one in RANK_VARIABLES if one[0] not in environ]
    folder = str(attempt.ranks.absolute()) if is_divided else ""
    return {"JACKLINE_RANKS": folder, "JACKLINE_RANK_NAMES": ";".join(names)}


def attempt_environment(run: RunDir, attempt: AttemptDir, options: SuperviseOptions) -> dict[str, str]:
    """The environment for the command of `attempt`: the user's own, our additions, and which run it belongs to."""
    env = child_environment(
        os.environ,
        stacks=attempt.stacks,
        inject=options.inject,
        stdbuf=find_libstdbuf(),
        surface_is_terminal=options.is_terminal,
        columns=options.columns,
    )
    if options.inject and env.get("JACKLINE", "").lower() != "off":
        env.update(rank_environment(os.environ, attempt, is_divided=not (options.tty or options.all_ranks)))
    env["JACKLINE_RUN_DIR"] = str(run.path)
    env["JACKLINE_RESCUE"] = "1" if options.rescue else ""
    env["JACKLINE_PYTHON"] = sys.executable
    env["JACKLINE_ATTEMPT"] = str(attempt.number)
    env[DISK_BUDGET_VARIABLE] = str(options.disk_budget or "")
    # Always set: an inherited value would belong to another run.
    env[LIVE_VARIABLE] = "1" if options.is_live else ""
    env["JACKLINE_TYPED"] = options.typed
    if options.job:
        # With its shared store torchrun tells the meeting place of the ranks only once: a machine that joins later
        # would wait for it until both give up.
        env.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    if "SLURM_JOB_ID" in env:
        # Slurm's warning reaches torchrun too, which would die of it and leave its ranks alone.
        env.setdefault("PET_SIGNALS_TO_HANDLE", "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1")
    env["JACKLINE_MIRROR"] = options.mirror or ""
    env["JACKLINE_MIRROR_PATIENCE"] = f"{options.mirror_patience_s:g}"
    env["JACKLINE_FROM_SCRATCH"] = "1" if options.from_scratch else ""
    return env
