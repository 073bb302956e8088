"""`jackline wait`: one blocking call until something happens to a run; one JSON verdict, fixed exit codes."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from typing import Any

import click

from jackline.cli.mirrored import Renewing, find_to_follow
from jackline.cli.options import DURATION, run_argument, runs_dir_option
from jackline.cli.programs.conditions import Condition, find_met, parse_conditions
from jackline.cli.programs.numbers import MetricsTail
from jackline.cli.programs.verdict import exit_code, look, verdict_json
from jackline.rundir.layout import RunDir

POLL_S = 0.25
SLOW_POLL_S = 1.0
SLOW_AFTER_S = 30.0
LEAST_FOR_A_MIRROR_S = 20.0


@click.command(short_help="Wait until a run ends, hangs or gets far enough; one JSON verdict.")
@run_argument
@click.option(
    "--until",
    "until",
    multiple=True,
    metavar="CONDITIONS",
    default=("ended,stuck",),
    show_default=True,
    help="Return when one holds: ended, finished, stopped, dead, stuck, suspect, paused, restarted, nan, step=N, "
    "epoch=N, 'loss<2.5'.",
)
@click.option("--timeout", type=DURATION, help="Return after this long at the latest; 0s: at once. Default: none.")
@runs_dir_option
def command(run: str | None, until: tuple[str, ...], timeout: float | None, runs_dir: str | None) -> None:
    """Wait for RUN; without RUN the only live one, else the newest. Prints one JSON object, at most 1.5 KB.

    \b
    jackline wait NAME                                        until it ends or hangs
    jackline wait NAME --until 'step=1000,loss<2.5' --timeout 30m
    jackline wait NAME --timeout 0s                           how it is now, in one short object

    It always returns when the run is over. Exit code: 0 a condition holds; 1 it crashed or was killed; 2 no such run
    or condition; 3 stuck, suspect or paused; 4 it finished before the condition held; 5 never started, or not heard
    of on another machine; 75 stopped, can be resumed; 124 timeout, and it continues. The run is never changed by this
    command.
    """
    conditions = parse_conditions(until)
    began_s = time.monotonic()
    patience_s = None if timeout is None else max(timeout, LEAST_FOR_A_MIRROR_S)
    found, renewing = find_to_follow(run, runs_dir, within_s=patience_s)
    left_s = None if timeout is None else max(0.0, timeout - (time.monotonic() - began_s))
    verdict, code = wait_for(found, conditions, left_s, renewing)
    click.echo(json.dumps(verdict, ensure_ascii=False, separators=(",", ":")))
    sys.exit(code)


def wait_for(
    run: RunDir, conditions: Sequence[Condition], timeout_s: float | None, renewing: Renewing | None = None
) -> tuple[dict[str, Any], int]:
    """The verdict and the exit code, once a condition holds, the run is over, or the time is."""
    began_s = time.monotonic()
    tail = MetricsTail(run)
    metrics = {name: [value] for name, value in tail.latest.items()}
    first_attempt = look(run).status.attempt
    while True:
        found = look(run)
        for name, values in tail.read().items():
            metrics.setdefault(name, []).extend(values)
        met = find_met(conditions, found.facts(metrics), first_attempt=first_attempt)
        waited_s = time.monotonic() - began_s
        is_late = timeout_s is not None and waited_s >= timeout_s
        is_cut_off = renewing is not None and bool(renewing.trouble)  # nothing is known about the run itself
        is_silent = found.status.state in ("elsewhere", "empty") and not found.is_reporting and not is_cut_off
        if met is not None or found.is_over or is_late or is_silent:
            verdict = verdict_json(found, tail.latest, met, is_timeout=is_late, waited_s=waited_s)
            return verdict, exit_code(found, met, is_timeout=is_late)
        metrics = {}
        pause_s = POLL_S if waited_s < SLOW_AFTER_S else SLOW_POLL_S
        time.sleep(pause_s if timeout_s is None else min(pause_s, max(0.0, timeout_s - waited_s)))
