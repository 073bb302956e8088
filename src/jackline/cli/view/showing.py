"""Shows a run to the user: start, detach, follow, interrupt.

Owns what Ctrl-C, a closed terminal and a notebook's interrupt mean for the viewer. viewer.py owns what is shown.
"""

from __future__ import annotations

import contextlib
import os
import stat
import time

from jackline.cli.programs.started import print_started
from jackline.cli.text.paint import print_note
from jackline.cli.trusting import confirm
from jackline.errors import EXIT_CANNOT_RESUME, EXIT_DONE, JacklineError, UsageError
from jackline.immutable import immutable
from jackline.rundir.access.reading import read_part
from jackline.rundir.create import Claim, remove_run
from jackline.rundir.layout import RunDir
from jackline.rundir.lock import RunLock
from jackline.rundir.process_id import is_alive
from jackline.rundir.records.exit import read_exit
from jackline.rundir.status import RunStatus, read_status
from jackline.supervisor.child.process import continue_paused
from jackline.supervisor.options import SuperviseOptions
from jackline.supervisor.start import request_stop, start_supervisor, take_over_unless_watched

BEGIN_PATIENCE_S = 30.0
_NOT_FOUND = ("command_not_found", "import_error")
_FEW_BYTES = 16 << 10


@immutable
class How:
    """How a run is shown. `as_json`: with `detach`, the answer goes to stdout as JSON. `is_quiet`: only errors of our
    own are printed."""

    detach: bool = False
    as_json: bool = False
    is_quiet: bool = False
    is_trusted: bool = False  # the person said that a run of somebody else may be taken over

    def tell(self, text: str) -> None:
        if not self.is_quiet:
            say(text)


def start_and_show(run: RunDir, options: SuperviseOptions, how: How, *, claim: Claim | None = None) -> int:
    """Start a supervisor for the next attempt, then follow it. `claim`: this process created the run."""
    former = run.last_attempt()
    try:
        lock = claim.lock if claim is not None else None
        start_supervisor(run, options, stdin=0 if passes_stdin() else None, lock=lock, say=say)
    except JacklineError as error:
        # A supervisor that refuses to resume stays alive for a moment; it must not be taken for another start.
        is_refused = error.exit_code == EXIT_CANNOT_RESUME
        if claim is None and not is_refused and is_started_by_another(run):
            return watch_live(run, how)  # another start was faster
        if claim is not None:
            claim.abandon()
        raise
    if claim is not None:
        claim.release()
    number = former.number + 1 if former else 1
    name = run.name
    if how.as_json:
        print_started(run, attempt=number, state="started")
        return EXIT_DONE
    if how.detach:
        how.tell(f"run '{name}' started (attempt {number}): {run.path}")
        how.tell(f"hint: jackline watch {name} | jackline status {name} | jackline stop {name}")
        return EXIT_DONE
    how.tell(f"run '{name}', attempt {number}: {run.path}")
    code = follow_run(run, attempt=number, is_quiet=how.is_quiet)
    if claim is not None and never_started(run):
        with contextlib.suppress(JacklineError, OSError):
            remove_run(run)
            how.tell(f"run '{name}' was removed: its command never started")
    return code


def never_started(run: RunDir) -> bool:
    """Whether the only attempt ended with an interpreter or a shell that did not find what it should run, as in
    `python -m missing`. What it printed is one line, which the viewer has shown."""
    exit_file = read_exit(run.attempt(1))
    if len(run.list_attempts()) != 1 or exit_file.cause not in _NOT_FOUND or run.session_files():
        return False
    try:
        lines = read_part(run.out_log, 0, _FEW_BYTES).splitlines()
    except OSError:
        return False
    return sum(b"Z [jackline] " not in line for line in lines) <= 1


def watch_live(run: RunDir, how: How) -> int:
    """Watch a run that is already alive; start nothing."""
    if how.as_json:
        print_started(run, attempt=read_status(run).attempt, state="alive")
        return EXIT_DONE
    if how.detach:
        how.tell(f"run '{run.name}' is alive already: {run.path}")
        return EXIT_DONE
    status = read_status(run)
    refuse_bare(run, status)
    how.tell(f"run '{run.name}' is alive already; watching it ({run.path})")
    if status.state == "unwatched":
        confirm(run, is_trusted=how.is_trusted)
    if status.state == "unwatched" and take_over_unless_watched(run):
        how.tell("its supervisor was gone: a new one has taken over")
    return follow_run(run, attempt=status.attempt, is_quiet=how.is_quiet)


def refuse_bare(run: RunDir, status: RunStatus) -> None:
    """Raise for a live run without a supervisor: its output goes to its own terminal, so there is nothing to show."""
    if status.state != "unwatched" or not status.is_bare or status.child is None:
        return
    raise UsageError(
        f"run '{run.name}' is alive in process {status.child.pid}, which was started without a supervisor",
        detail="its output goes to the terminal that it was started in",
        hint=f"`jackline status {run.name}` shows its progress; after `jackline stop {run.name}` it can be resumed",
    )


def is_started_by_another(run: RunDir) -> bool:
    """True once the run is alive. Waits for the process with its lock, which may not have started the command yet. A
    supervisor that was killed while it started the command leaves it unwatched."""
    until_s = time.monotonic() + BEGIN_PATIENCE_S
    lock = RunLock(run.lock)
    while read_status(run).state not in ("alive", "unwatched"):
        if lock.try_acquire():
            lock.release()
            return False
        if time.monotonic() > until_s:
            return False
        time.sleep(0.05)
    return True


def follow_run(run: RunDir, *, attempt: int, from_start: bool = True, is_quiet: bool = False) -> int:
    from jackline.cli.view.viewer import follow, open_screen

    # If we are a container's first process, our exit would end everything in it, unsaved. So pass the signal on. The
    # same holds for a task of Slurm.
    is_container = os.getpid() == 1 or "SLURM_JOB_ID" in os.environ
    return follow(
        run,
        attempt=attempt,
        from_start=from_start,
        pass_on=lambda number: pass_on(run, number),
        on_terminate=(lambda: request_stop(run, by="SIGTERM to the container")) if is_container else None,
        screen=open_screen(is_quiet=is_quiet),
    )


def pass_on(run: RunDir, number: int) -> bool:
    """Pass Ctrl-C or a warning to the supervisor, which knows how far a stop has got. False when there is none."""
    supervisor = read_status(run).supervisor
    if supervisor is None or not is_alive(supervisor):
        return False
    os.kill(supervisor.pid, number)
    continue_paused([supervisor.pid])
    return True


def say(text: str) -> None:
    """Print our own messages to stderr, so that stdout has only the command's output."""
    print_note(text)


def passes_stdin() -> bool:
    """A pipe or a file is passed to the command; a terminal is not, because two readers would compete for it."""
    try:
        mode = os.fstat(0).st_mode
    except OSError:
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode) or stat.S_ISSOCK(mode)
