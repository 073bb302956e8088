"""`jackline watch`: the live view of a run started elsewhere; starts a new supervisor if the run has lost its own."""

from __future__ import annotations

import sys
import time

import click

from jackline.cli.adopting import run_of_process
from jackline.cli.mirrored import find_to_follow
from jackline.cli.options import pid_option, quiet_option, run_argument, runs_dir_option
from jackline.cli.text.paint import print_note
from jackline.cli.trusting import trust_option
from jackline.errors import UsageError
from jackline.rundir.access.trust import judge
from jackline.rundir.layout import RunDir
from jackline.rundir.records.start import read_start
from jackline.rundir.registry import is_copy
from jackline.rundir.status import RunStatus, read_status

# A longer log would only scroll past.
SHOW_ALL_BELOW_BYTES = 1 << 20


@click.command(short_help="The live view; takes over a run whose supervisor is gone.")
@run_argument
@pid_option
@trust_option
@quiet_option
@runs_dir_option
def command(run: str | None, pid: int | None, trust: bool, quiet: bool, runs_dir: str | None) -> None:
    """Follow a run: its output, what it is doing while it is silent, what happens to it.

    Ctrl-C leaves the view and the run continues. A run whose supervisor is gone gets a new one; nothing of its output
    is lost. Exits with the run's own exit code when it ends. With --pid a process that was started without Jackline
    becomes a run; it is only read, never signalled.
    """
    renewing = None
    if pid is None:
        found, renewing = find_to_follow(run, runs_dir, is_told=False)
    else:
        found = run_of_process(pid, run, runs_dir)
    if is_far(found):
        from jackline.cli.view.afar import follow_from_afar

        sys.exit(follow_from_afar(found, renewing, is_quiet=quiet))
    sys.exit(watch(found, is_trusted=trust, is_quiet=quiet))


def is_far(run: RunDir) -> bool:
    """Whether it runs on another machine that shares the folder, or only copies of its records are here."""
    return is_copy(run) or read_status(run).state == "elsewhere"


def watch(run: RunDir, *, is_trusted: bool = False, is_quiet: bool = False) -> int:
    from jackline.cli.view.viewer import follow, open_screen

    tell = (lambda text: None) if is_quiet else say
    status = read_status(run)
    refuse_what_cannot_be_watched(run, status)
    if needs_supervisor(status) and (status.state != "dead" or is_trusted or judge(run).is_ours):
        take_over_gently(run, is_trusted=is_trusted)
    elif status.state == "alive":
        tell(f"watching run '{run.name}', attempt {status.attempt}: {run.path}")
        is_adopted = read_start(run.attempt(status.attempt)).is_adopted
        end = "" if is_adopted else f"; `jackline stop {run.name}` ends it"
        tell(f"Ctrl-C leaves the view and the run continues{end}")
        for line in lines_of_whole_job(run, status):
            tell(line)
    else:
        tell(f"run '{run.name}' is not running: it {status.end_words}; this is what it printed last")
    attempt = run.attempt(status.attempt)
    size = sum(path.stat().st_size for path in (attempt.raw_out, attempt.raw_err) if path.exists())
    is_short = size <= SHOW_ALL_BELOW_BYTES
    if not is_short:
        tell(f"earlier output is in {run.out_log}; `jackline logs {run.name}` prints it")
    return follow(run, attempt=status.attempt, from_start=is_short, screen=open_screen(is_quiet=is_quiet))


def refuse_what_cannot_be_watched(run: RunDir, status: RunStatus) -> None:
    if status.state == "elsewhere":
        known = status.child or status.supervisor
        raise UsageError(
            f"run '{run.name}' runs on '{known.host if known else '?'}', not here",
            hint=f"watch it there, or read what is here: jackline logs {run.name}",
        )
    if status.is_bare:
        from jackline.cli.view.showing import refuse_bare

        refuse_bare(run, status)
        raise UsageError(
            f"run '{run.name}' was started without a supervisor: its output went to the terminal it was started in",
            hint=f"`jackline status {run.name}` says how far it got; `jackline resume {run.name}` continues it",
        )
    if status.attempt == 0:
        raise UsageError(f"run '{run.name}' was never started", hint=f"start it: jackline resume {run.name}")


def needs_supervisor(status: RunStatus) -> bool:
    """Whether it is alive without a supervisor, or ended without a record of how."""
    if status.is_bare:
        return False  # nobody kept its output or its exit status
    return status.state == "unwatched" or (
        status.state == "dead" and status.child is not None and not status.exit.is_there
    )


def take_over_gently(run: RunDir, *, is_trusted: bool = False) -> None:
    """Take over the run. If another process is faster, the run has a supervisor, which is enough."""
    from jackline.cli.trusting import confirm
    from jackline.supervisor.start import take_over_unless_watched

    confirm(run, is_trusted=is_trusted)
    if not take_over_unless_watched(run):
        say(f"watching run '{run.name}': {run.path}")
        return
    say(f"run '{run.name}' had lost its supervisor: a new one has taken over; nothing of its output is lost")


def lines_of_whole_job(run: RunDir, status: RunStatus) -> list[str]:
    """The ranks of all machines; empty for a job of one machine."""
    ranks = status.supervisor_state.ranks
    if not ranks and not run.job_file.is_file():
        return []
    from jackline.cli.text.ranks import is_of_several_machines, job_lines

    return job_lines(str(run.path), ranks, time.time()) if is_of_several_machines(run, ranks) else []


def say(text: str) -> None:
    print_note(text)
