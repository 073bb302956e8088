"""`jackline rescue`: ask a live run for its state, or show what was rescued of one that has ended.

Owns the options and what is printed. The process saves by itself (`checkpoint/rescue`); here it is only asked.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import click

from jackline.checkpoint.format import catalogue
from jackline.checkpoint.place import rescue_place
from jackline.cli.commands.stop import refuse_another_users
from jackline.cli.options import DURATION, find, json_option, pid_option, run_argument, runs_dir_option
from jackline.errors import EXIT_DONE, EXIT_FAILED, JacklineError, UsageError
from jackline.machine.proc import read_environ
from jackline.rundir.access.trust import judge
from jackline.rundir.layout import AttemptDir, RunDir
from jackline.rundir.records.rescue import (
    RescueRecord,
    loading_command,
    newest_rescue,
    read_rescue,
    read_rescues,
    rescue_lines,
    rescue_text,
)
from jackline.rundir.records.start import read_start
from jackline.rundir.run_file import read_run_file
from jackline.rundir.status import read_status
from jackline.supervisor.options import SuperviseOptions

SCHEMA = "jackline.rescue/1"
WRITING_S = 600.0
SIGN_EVERY_S = 2.0


@click.command(short_help="Save the state of a script that never saved.")
@run_argument
@pid_option
@click.option("--wait", "wait_s", type=DURATION, default="60s", show_default=True, help="Longest wait for a step.")
@click.option("--load", "is_load", is_flag=True, help="Print the lines that load it, as a patch of this script.")
@json_option
@runs_dir_option
def command(
    run: str | None, pid: int | None, wait_s: float, is_load: bool, as_json: bool, runs_dir: str | None
) -> None:
    """Save the weights, optimizers, schedulers and RNG states of RUN, a script that knows nothing of Jackline.

    A live run is asked and saves between two steps, without being stopped. Of a run that has ended, the last rescue
    is shown: Jackline rescues by itself at a crash, a hang and a stop. --load prints what to change in the script so
    that it resumes from there. --pid asks a process that was started without Jackline, from Python 3.14 on; it
    becomes a run that is watched.
    """
    found = find(run, runs_dir) if pid is None else _run_of(pid, run, runs_dir)
    status = read_status(found)
    if is_load:
        from jackline.cli.rescue.patch import loading_text

        record = _newest(found)
        ours = judge(found).is_ours
        text = loading_text(record, _folder(found, record), is_ours=ours, command=loading_command(found.name))
        click.echo(text)
        return
    if status.state in ("alive", "unwatched"):
        sys.exit(_ask(found, wait_s, as_json=as_json))
    record = _newest(found)
    _print(found, [record], as_json=as_json)


def _run_of(pid: int, run: str | None, runs_dir: str | None) -> RunDir:
    """Refuses a process that cannot be asked before a run is made of it."""
    from jackline.cli.adopting import run_of_process
    from jackline.cli.rescue.joining import find_interpreter
    from jackline.cli.text.why_live import check_pid

    check_pid(pid)
    if not RunDir(Path(read_environ(pid).get("JACKLINE_RUN_DIR") or "/nonexistent")).has_run_file:
        find_interpreter(pid)
    return run_of_process(pid, run, runs_dir)


def _join_adopted(run: RunDir, attempt: AttemptDir, wait_s: float) -> None:
    """Let the rescue into a process that was started without Jackline, unless it is there already."""
    from jackline.cli.rescue.joining import find_interpreter, join

    start = read_start(attempt)
    if not start.is_adopted or start.child is None or attempt.rescue_door(start.child.pid).exists():
        return
    _say(f"process {start.child.pid} was started without Jackline; asking its Python to let the rescue in ...")
    join(attempt, start.child.pid, find_interpreter(start.child.pid), wait_s)


def _ask(run: RunDir, wait_s: float, *, as_json: bool) -> int:
    from jackline.supervisor.attempt.rescuing import ask_rescue, list_doors

    attempt = run.last_attempt()
    if attempt is None:
        raise UsageError(f"run '{run.name}' has not started yet", hint=f"jackline status {run.name}")
    if run.session_files():
        raise UsageError(
            f"run '{run.name}' is attached: it saves its own checkpoints",
            hint=f"`jackline checkpoints {run.name}` lists them; `jackline stop {run.name}` saves and ends",
        )
    refuse_another_users(run)
    _join_adopted(run, attempt, wait_s)
    asked = {pid: ask_rescue(attempt, pid, "asked", wait_s) for pid in list_doors(attempt)}
    asked = {pid: question for pid, question in asked.items() if question is not None}
    if not asked:
        raise JacklineError(
            f"no process of run '{run.name}' can be asked for its state",
            detail="A process can be asked after its first backward pass in torch, if it was started by\n"
            "`jackline run` without --no-rescue, --no-inject and --checkpoints, on Python 3.11 or newer.",
            hint=f"`jackline why {run.name}` tells what it is doing",
        )
    records = _wait(attempt, {pid: question or "" for pid, question in asked.items()}, wait_s)
    _print(run, records, as_json=as_json)
    return EXIT_DONE if any(record.is_saved for record in records) else EXIT_FAILED


def _wait(attempt: AttemptDir, asked: dict[int, str], wait_s: float) -> list[RescueRecord]:
    from jackline.supervisor.attempt.rescuing import is_answer

    _say(f"asked {_processes(asked)}; waiting for the end of a step ...")
    began_s = told_s = time.monotonic()
    while True:
        records = {pid: read_rescue(attempt, pid) for pid in asked}
        answered = [record for pid, record in records.items() if is_answer(record, asked[pid])]
        now_s = time.monotonic()
        if len(answered) == len(asked) or now_s - began_s > wait_s + WRITING_S:
            return answered
        if now_s - told_s >= SIGN_EVERY_S:
            told_s = now_s
            _say(f"still waiting after {now_s - began_s:.0f} s")
        gone = [pid for pid in asked if not Path(f"/proc/{pid}").exists()]
        if len(gone) == len(asked):
            return answered
        time.sleep(0.05)


def _processes(asked: dict[int, str]) -> str:
    pids = ", ".join(map(str, asked))
    return f"process {pids}" if len(asked) == 1 else f"processes {pids}"


def _newest(run: RunDir) -> RescueRecord:
    """The newest rescue of any attempt that is on the disk; raises when there is none, and says why."""
    attempts = list(reversed(run.list_attempts()))
    found = newest_rescue(attempts)
    if found is not None:
        return found
    refused = next((record for attempt in attempts for record in read_rescues(attempt)), None)
    hint = (
        f"`jackline why {run.name}` tells how it ended; SIGKILL and a segmentation fault leave no time to save: "
        "start it with --rescue-every 10m"
    )
    if not SuperviseOptions.from_json(read_run_file(run).options).rescue:
        hint = "a script is rescued only if it was started with it: jackline run --rescue -- python train.py"
    elif read_status(run).state in ("alive", "unwatched"):
        hint = f"it is alive: `jackline rescue {run.name}` asks it for its state"
    raise UsageError(
        f"nothing was rescued of run '{run.name}'", detail=rescue_text(refused) if refused else "", hint=hint
    )


def _folder(run: RunDir, record: RescueRecord) -> Path:
    """Where it is now: the run may have been copied or moved since."""
    place = rescue_place(run).folder
    names = [str(name) for name in catalogue.list_names(place)]
    if record.name in names:
        return place / record.name
    known = f"there are: {', '.join(names)}" if names else f"{place} is empty"
    raise JacklineError(f"the rescued state {record.name} is not in {place}", hint=known)


def _print(run: RunDir, records: list[RescueRecord], *, as_json: bool) -> None:
    if as_json:
        value: dict[str, Any] = {"schema": SCHEMA, "run": run.name, "rescues": [one.to_json() for one in records]}
        click.echo(json.dumps(value, indent=1))
        return
    if not records:
        raise JacklineError(f"run '{run.name}' did not answer", hint=f"jackline why {run.name}")
    for record in records:
        click.echo("\n".join(rescue_lines(record)))
    if any(record.is_saved for record in records):
        click.echo(f"load it: {loading_command(run.name)}")


def _say(text: str) -> None:
    print(f"[jackline] {text}", file=sys.stderr, flush=True)
