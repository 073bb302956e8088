"""`jackline stop`: asks a run to save and exit."""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import click

from jackline.cli.options import DURATION, json_option
from jackline.cli.text.safety import safe_text
from jackline.errors import EXIT_DONE, EXIT_FAILED, UsageError
from jackline.rundir.access.trust import judge, user_name
from jackline.rundir.find import find_only_live, find_run, runs_folder
from jackline.rundir.layout import RunDir
from jackline.rundir.process_id import is_alive
from jackline.rundir.records.exit import read_exit
from jackline.rundir.records.mirror import read_mirror
from jackline.rundir.records.rescue import loading_command, newest_rescue
from jackline.rundir.records.start import read_start
from jackline.rundir.run_file import DamagedRun, read_run_file
from jackline.rundir.status import RunStatus, read_status
from jackline.units import format_duration

SCHEMA = "jackline.stop/1"
MAX_TEXT = 300
_LAST_RECORDS = "the records of its end are still on their way to the mirror; that continues in the background"
GROUP_PATIENCE_S = 5.0  # after the grace SIGTERM goes to all its processes, and this later SIGKILL


@click.command(short_help="Save and end.")
@click.argument("run", required=False)
@click.option(
    "--grace",
    type=DURATION,
    help="How long saving may take; all its processes then get SIGTERM, and SIGKILL 5 s later. Default: as started.",
)
@click.option(
    "--signal",
    "signal_name",
    type=click.Choice(["TERM", "INT"], case_sensitive=False),
    help="What to send first; default: TERM, and INT (as Ctrl-C) to a script that handles only that.",
)
@json_option
@click.option("--runs-dir", type=click.Path(), help="Where runs are kept; default: $JACKLINE_RUNS or ./runs.")
def command(
    run: str | None, grace: float | None, signal_name: str | None, as_json: bool, runs_dir: str | None
) -> None:
    """Ask a run to save and end, and wait until it has.

    Says first what will happen: an attached script saves; another one saves only if it handles the signal itself. A
    run that has not ended when the grace is over is killed.

    Without RUN it must be clear which one is meant: with several alive this is an error.
    """
    from jackline.supervisor.start import request_stop

    folder = runs_folder(runs_dir)
    found = find_run(run, folder) if run else find_only_live(folder)
    status = read_status(found)
    if status.state == "elsewhere":
        process = status.child or status.supervisor
        where = f" on '{process.host}'" if process else " on another machine"
        raise UsageError(
            f"run '{found.name}' was last seen{where}; from here it cannot be stopped",
            hint=f"stop it there: jackline stop {found.name}",
        )
    if status.state not in ("alive", "unwatched"):
        raise UsageError(
            f"run '{found.name}' is not running: it {status.end_words}", hint=f"jackline why {found.name}"
        )
    refuse_another_users(found)
    refuse_adopted(found)
    number, words = _foresee(found, status, signal_name)
    asked = request_stop(found, by="jackline stop", grace_s=grace, number=number)
    if asked is None and read_status(found).state in ("alive", "unwatched"):
        process = status.supervisor or status.child
        raise UsageError(
            f"run '{found.name}' names process {process.pid if process else '?'}, but nothing shows that it belongs "
            "to the run: nothing was signalled",
            hint=f"see what it is: ps -fp {process.pid if process else '?'}; the folder may be a copy, or forged",
        )
    if asked is None:
        raise UsageError(f"run '{found.name}' ended just now", hint=f"jackline why {found.name}")
    say = _say if not as_json else lambda text: None
    say(f"asked run '{found.name}' to end{words}")
    say("waiting (Ctrl-C leaves it to end by itself)")
    code = _wait(found.name, lambda: _is_over(found), _grace_s(status, grace), say)
    left = not_uploaded(found) if code == EXIT_DONE else []
    if code == EXIT_DONE:
        say(_ended_words(found))
    for text in left or ([_LAST_RECORDS] if code == EXIT_DONE and _owes_records(found) else []):
        say(text)
    if as_json:
        click.echo(json.dumps(_answer(found, words, left, has_ended=code == EXIT_DONE), separators=(",", ":")))
    sys.exit(code)


def _ended_words(run: RunDir) -> str:
    attempt = run.last_attempt()
    if attempt is None or newest_rescue([attempt]) is None:
        return f"run '{run.name}' has ended; `jackline resume {run.name}` continues it"
    return f"run '{run.name}' has ended; `{loading_command(run.name)}` prints the lines that load its rescued state"


def _answer(run: RunDir, words: str, left: list[str], *, has_ended: bool) -> dict[str, Any]:
    """Schema `jackline.stop/1` of docs/reference/json.md."""
    from jackline.cli.programs.verdict import look

    found = look(run)
    ending = found.status.exit
    name = shlex.quote(run.name)
    return {
        "schema": SCHEMA,
        "run": run.name,
        "path": str(run.path),
        "has_ended": has_ended,
        "state": found.status.state,
        "exit_code": ending.exit_code if has_ended else None,
        "cause": ending.cause if has_ended else None,
        "text": safe_text(words.strip(" :"), MAX_TEXT),
        "step": found.step,
        "checkpoint_step": found.session.last_checkpoint.step,
        "not_uploaded": [safe_text(text, MAX_TEXT) for text in left],
        "next": f"jackline resume {name} --detach --json" if has_ended else f"jackline wait {name} --until ended",
    }


def _foresee(run: RunDir, status: RunStatus, signal_name: str | None) -> tuple[int, str]:
    """The signal to send, and what it will do to this script."""
    from jackline.supervisor.attempt.reaction import choose_signal, reaction

    child = status.child
    if child is None or not is_alive(child):
        return int(signal.SIGTERM), ""
    chosen = choose_signal(run, status.attempt, child.pid)
    number = int(signal.Signals[f"SIG{signal_name.upper()}"]) if signal_name else chosen
    why = " because its script handles Ctrl-C and not SIGTERM" if not signal_name and number != signal.SIGTERM else ""
    return number, f" ({signal.Signals(number).name}{why}): {reaction(run, status.attempt, child.pid, number)}"


def _grace_s(status: RunStatus, grace_s: float | None) -> float | None:
    """How long until it is killed; None where nobody would kill it, because nobody watches it."""
    if not is_alive(status.supervisor):
        return None
    told = status.supervisor_state.options.get("grace_s") if grace_s is None else grace_s
    return float(told) + GROUP_PATIENCE_S if isinstance(told, int | float) else None


def refuse_another_users(run: RunDir) -> None:
    """Raise when only somebody else, and root, may stop it."""
    owner = run.path.stat().st_uid
    if os.geteuid() not in (0, owner) and not judge(run).is_ours:
        raise UsageError(
            f"run '{run.name}' belongs to user '{user_name(owner)}'; only they can stop it ({run.path})",
            hint="ask them; `jackline status` and `why` tell what it is doing",
        )


def refuse_adopted(run: RunDir) -> None:
    """Raise for a process that Jackline did not start: it is watched, and never signalled."""
    attempt = run.last_attempt()
    start = read_start(attempt) if attempt is not None else None
    if start is not None and start.is_adopted and start.child is not None:
        raise UsageError(
            f"process {start.child.pid} of run '{run.name}' was started without Jackline, which only watches it",
            hint=f"end it yourself: kill {start.child.pid}; the watching ends with it",
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


def _owes_records(run: RunDir) -> bool:
    """Whether its mirror does not have the records of its end yet, and somebody uploads them."""
    record, attempt = read_mirror(run.mirror_file), run.last_attempt()
    ended_at_s = read_exit(attempt).ended_at_s if attempt is not None else None
    is_behind = ended_at_s is not None and (record.story_at_s or 0.0) < ended_at_s
    return record.is_there and is_behind and is_alive(record.process)


def _is_over(run: RunDir) -> bool:
    """Also its supervisor is gone: until then a hook may run, and the lock is held."""
    status = read_status(run)
    return status.state not in ("alive", "unwatched") and not is_alive(status.supervisor)


def _wait(name: str, is_over: Callable[[], bool], killed_after_s: float | None, say: Callable[[str], None]) -> int:
    started_s = time.monotonic()
    told_s = started_s
    try:
        while not is_over():
            now_s = time.monotonic()
            if now_s - told_s >= 2.0:
                told_s = now_s
                waited_s = now_s - started_s
                left_s = max(0.0, killed_after_s - waited_s) if killed_after_s is not None else None
                left = (
                    f"; it is killed in {format_duration(left_s)} if it has not ended" if left_s is not None else ""
                )
                say(f"still ending after {format_duration(waited_s)}{left}")
            time.sleep(0.1)
    except KeyboardInterrupt:
        say(f"not waiting any longer; `jackline status {name}` tells when it is over")
        return EXIT_FAILED
    return EXIT_DONE


def _say(text: str) -> None:
    print(f"[jackline] {text}", file=sys.stderr, flush=True)
