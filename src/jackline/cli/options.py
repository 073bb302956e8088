"""Options and arguments that several commands share, so that they are the same everywhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from jackline.errors import UsageError
from jackline.rundir.find import find_run, runs_folder
from jackline.rundir.layout import RunDir
from jackline.units import parse_duration, parse_price


class Duration(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.5
    """A length of time, in seconds: 90, 90s, 15m, 1h30m, 2d. `above`: what it must be more than."""

    name = "duration"

    def __init__(self, *, above: float | None = None) -> None:
        self._above = above

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        seconds = float(value) if isinstance(value, int | float) else parse_duration(value)
        if self._above is not None and seconds <= self._above:
            option = param.opts[0] if param else "it"
            raise UsageError(f"{option} must be more than {self._above:g}, not {value}")
        return seconds


class Price(click.ParamType):  # type: ignore[type-arg]
    """Money for an hour: 2.5/h, 2.5, $2.5/h, 60/d."""

    name = "price"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        return float(value) if isinstance(value, int | float) else parse_price(value)


DURATION = Duration()
SOME_TIME = Duration(above=0.0)
Command = TypeVar("Command", bound=Callable[..., Any])
quiet_after = click.option(
    "--quiet-after",
    type=SOME_TIME,
    default="2s",
    show_default=True,
    help="How long it may print nothing before we say what it is doing.",
)
stuck_after = click.option(
    "--stuck-after",
    type=SOME_TIME,
    default="60s",
    show_default=True,
    help="How long nothing must move before it is called stuck.",
)
pid_option = click.option("--pid", type=click.IntRange(min=1), help="Any process of yours, whoever started it.")


class ListByDefault(click.Group):
    """`jackline checkpoints [RUN]` means `jackline checkpoints list [RUN]`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not args or (args[0] not in self.commands and args[0] not in ("-h", "--help")):
            args = ["list", *args]
        return super().parse_args(ctx, args)


def run_argument(command: Command) -> Command:
    """RUN: a name, its beginning, or a path; without it the only live run, else the newest."""
    return click.argument("run", required=False)(command)


def runs_dir_option(command: Command) -> Command:
    return click.option(
        "--runs-dir", type=click.Path(), help="Where runs are kept; default: $JACKLINE_RUNS or ./runs."
    )(command)


def price_option(command: Command) -> Command:
    return click.option(
        "--price",
        type=Price(),
        envvar="JACKLINE_PRICE",
        metavar="PRICE",
        help="Price of the machine, such as 2.5/h (an hour without a unit); default: $JACKLINE_PRICE.",
    )(command)


def json_option(command: Command) -> Command:
    return click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")(command)


def detach_options(command: Command) -> Command:
    """--detach, and --json for its answer."""
    command = click.option("--json", "as_json", is_flag=True, help="With --detach: print name and folder as JSON.")(
        command
    )
    return click.option("--detach", is_flag=True, help="Start it and come back at once.")(command)


def quiet_option(command: Command) -> Command:
    return click.option("-q", "--quiet", is_flag=True, help="Print no lines of our own except errors.")(command)


def find(run: str | None, runs_dir: str | None) -> RunDir:
    """The requested run; raises UsageError with a hint when there is none."""
    return find_run(run, runs_folder(runs_dir))
