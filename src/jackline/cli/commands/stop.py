"""`jackline stop`: asks a run to save and exit."""

from __future__ import annotations

import os
import sys
import time

import click

from jackline.cli.options import DURATION
from jackline.errors import EXIT_DONE, EXIT_FAILED, UsageError
from jackline.rundir.access.trust import judge, user_name
from jackline.rundir.find import find_only_live, find_run, runs_folder
from jackline.rundir.layout import RunDir
from jackline.rundir.process_id import is_alive
from jackline.rundir.run_file import DamagedRun, read_run_file
from jackline.rundir.status import read_status
from jackline.units import format_duration


@click.command(short_help="Save and end.")
@click.argument("run", required=False)
@click.option("--grace", type=DURATION, help="How long saving may take before it is killed; default: as started.")
@click.option("--runs-dir", type=click.Path(), help="Where runs are kept; default: $JACKLINE_RUNS or ./runs.")
def command(run: str | None, grace: float | None, runs_dir: str | None) -> None:
    """Ask a run to save and end (SIGTERM), and wait until it has.

    Without RUN it must be clear which one is meant: with several alive this is an error.
    """
    from jackline.supervisor.start import request_stop

    folder = runs_folder(runs_dir)
    found = find_run(run, folder) if run else find_only_live(folder)
    status = read_status(found)
    if status.state not in ("alive", "unwatched"):
        raise UsageError(
            f"run '{found.name}' is not running: it is {status.state}", hint=f"jackline why {found.name}"
        )
    refuse_another_users(found)
    asked = request_stop(found, by="jackline stop", grace_s=grace)
    if asked is None and read_status(found).state in ("alive", "unwatched"):
        process = status.supervisor or status.child
        raise UsageError(
            f"run '{found.name}' names process {process.pid if process else '?'}, but nothing shows that it belongs "
            "to the run: nothing was signalled",
            hint=f"see what it is: ps -fp {process.pid if process else '?'}; the folder may be a copy, or forged",
        )
    if asked is None:
        raise UsageError(f"run '{found.name}' ended just now", hint=f"jackline why {found.name}")
    _say(f"asked run '{found.name}' to save and end; waiting (Ctrl-C leaves it to end by itself)")
    code = _wait(found.name, lambda: _is_over(found))
    for text in not_uploaded(found) if code == EXIT_DONE else ():
        _say(text)
    sys.exit(code)


def refuse_another_users(run: RunDir) -> None:
    """Raise when only somebody else, and root, may stop it."""
    owner = run.path.stat().st_uid
    if os.geteuid() not in (0, owner) and not judge(run).is_ours:
        raise UsageError(
            f"run '{run.name}' belongs to user '{user_name(owner)}'; only they can stop it ({run.path})",
            hint="ask them; `jackline status` and `why` tell what it is doing",
        )


def not_uploaded(run: RunDir) -> list[str]:
    """What the run's mirror does not have yet; empty without a mirror."""
    from jackline.supervisor.mirroring import list_left

    try:
        pattern = read_run_file(run).options.get("checkpoints")
    except DamagedRun:
        return []
    left = list_left(run, pattern if isinstance(pattern, str) else None)
    return [f"{entry.text()}; its upload continues in the background" for entry in left]


def _is_over(run: RunDir) -> bool:
    """Also its supervisor is gone: until then a hook may run, and the lock is held."""
    status = read_status(run)
    return status.state not in ("alive", "unwatched") and not is_alive(status.supervisor)


def _wait(name: str, is_over: object) -> int:
    started_s = time.monotonic()
    told_s = started_s
    try:
        while not is_over():  # type: ignore[operator]
            now_s = time.monotonic()
            if now_s - told_s >= 2.0:
                told_s = now_s
                _say(f"still ending after {format_duration(now_s - started_s)}")
            time.sleep(0.1)
    except KeyboardInterrupt:
        _say(f"not waiting any longer; `jackline status {name}` tells when it is over")
        return EXIT_FAILED
    _say(f"run '{name}' has ended; `jackline resume {name}` continues it")
    return EXIT_DONE


def _say(text: str) -> None:
    print(f"[jackline] {text}", file=sys.stderr, flush=True)
