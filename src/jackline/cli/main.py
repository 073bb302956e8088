"""The `jackline` command: imports a command's module on use, and turns errors into text and exit codes.

Each command is in its own module as `command`, or under its own name in one that holds several. Nothing is imported
for a command that was not called, so `--help` and `status` stay fast.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import Any

import click

from jackline.cli.streams import guard_streams
from jackline.errors import EXIT_FAILED, JacklineError, UsageError
from jackline.extras import explained
from jackline.pipes import drop_output

# name -> (module, one line of help). In the order in which a run's life uses them.
COMMANDS = {
    "run": ("jackline.cli.commands.run", "Supervise any command: jackline run -- python train.py"),
    "train": ("jackline.cli.commands.train", "Train a recipe, supervised and resumable: jackline train demo --quick"),
    "demo": ("jackline.cli.commands.demo", "One minute: a training is killed with SIGKILL, resumes, ends bit-equal."),
    "status": ("jackline.cli.commands.status", "Is it alive, how far, when done, what is at risk."),
    "watch": ("jackline.cli.commands.watch", "The live view; takes over a run whose supervisor is gone."),
    "why": ("jackline.cli.commands.why", "What it is doing, by file and line; why it ended, from evidence."),
    "wait": ("jackline.cli.programs.wait", "Wait until it ends, hangs or gets far enough; one JSON verdict."),
    "events": ("jackline.cli.programs.events", "What happened to it; with --since, what is new."),
    "mcp": ("jackline.cli.programs.server", "A read-only MCP server on stdio: runs, status, why, wait."),
    "logs": ("jackline.cli.commands.logs", "Its output, with times."),
    "runs": ("jackline.cli.commands.runs", "All runs that can be found from here; runs rm, runs prune."),
    "plot": ("jackline.cli.plot.command", "Curves in the terminal: loss, learning rate, throughput, memory."),
    "validate": (
        "jackline.cli.commands.model",
        "Validate a running training on all its validation data, now.",
    ),
    "dash": ("jackline.cli.pages.dash", "A page in the browser: all runs, curves, memory, logs. Reads only."),
    "goodput": ("jackline.cli.pages.goodput", "Where the time went: productive, redone, waiting, down; the cost."),
    "diff": ("jackline.cli.pages.diff", "What differs between two runs, and where their losses part."),
    "report": ("jackline.cli.pages.report", "One file that tells what a run did; for a failure, a post-mortem."),
    "send": ("jackline.cli.programs.send", "Metrics to Prometheus, W&B, MLflow; messages to ntfy, Slack, a webhook."),
    "stop": ("jackline.cli.commands.stop", "Save and end."),
    "rescue": ("jackline.cli.rescue.command", "Save the state of a running script that never saved."),
    "resume": ("jackline.cli.commands.resume", "Resume a run that stopped or crashed."),
    "sweep": ("jackline.cli.models.sweep", "Train every combination of some settings; a table at the end."),
    "fork": ("jackline.cli.models.fork", "A new run from a checkpoint of another, with other settings."),
    "init": ("jackline.cli.models.init", "Write a recipe of your own to begin with: jackline init recipe."),
    "sample": ("jackline.cli.commands.model", "Text from the model that a run has trained."),
    "eval": ("jackline.cli.commands.model", "The loss of a trained model on a text or other data."),
    "predict": ("jackline.cli.commands.model", "How strongly antibodies bind: a table of pairs by a run of agab."),
    "export": ("jackline.cli.commands.model", "The trained model for transformers, or as plain safetensors."),
    "launch": ("jackline.cli.launch.command", "A ready file that starts a script on Slurm, SkyPilot or Kubernetes."),
    "doctor": ("jackline.cli.commands.doctor", "Check this machine, a recipe or a command, before it starts."),
    "plan": ("jackline.cli.commands.plan", "Will it fit, with which micro-batch; where the memory goes."),
    "checkpoints": ("jackline.cli.commands.checkpoints", "List, verify, prune, show and export checkpoints."),
    "data": ("jackline.cli.commands.data", "The data engine by hand: prepare, show, bench."),
}


class LazyGroup(click.Group):
    """Commands are imported when called; the list of them costs nothing."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            # The reader of our output has exited (`| head`). That is normal, but click would exit with code 1.
            drop_output()
            raise click.exceptions.Exit(0) from None

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = import_module(COMMANDS[cmd_name][0])
        command: click.Command = getattr(module, "command", None) or getattr(module, cmd_name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, help_line) for name, (_, help_line) in COMMANDS.items()])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            from difflib import get_close_matches

            near = get_close_matches(args[0], COMMANDS, n=1)
            hint = f"did you mean 'jackline {near[0]}'?" if near else "`jackline --help` lists the commands"
            raise click.UsageError(f"there is no command '{args[0]}'\nhint: {hint}")
        return super().resolve_command(ctx, args)


# --flag_name and --flag-name are the same; click passes the name without its leading dashes.
_CONTEXT = {"help_option_names": ["-h", "--help"], "token_normalize_func": lambda name: name.replace("_", "-")}


@click.group(cls=LazyGroup, context_settings=_CONTEXT, invoke_without_command=True)
@click.version_option(package_name="jackline", prog_name="jackline")
@click.pass_context
def cli(ctx: click.Context) -> None:
    """Keeps a training run visible, within memory, alive and resumable.

    \b
    jackline run -- python train.py     your command, watched
    jackline status                     is it alive, how far, when done
    jackline why                        what is it doing, or why did it end
    """
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


def main() -> None:
    """The entry point: our errors and those of click become text on stderr and an exit code."""
    _open_closed_streams()
    guard_streams()
    if not sys.platform.startswith("linux"):
        print(
            "error: Jackline reads /proc and needs Linux; on this system only copied runs can be read",
            file=sys.stderr,
        )
    try:
        with explained("this command"):
            code = cli.main(prog_name="jackline", standalone_mode=False)
    except click.exceptions.Exit as error:
        code = error.exit_code
    except click.Abort:
        code = 130
    except click.ClickException as error:
        _say(_describe(error))
        code = error.exit_code
    except JacklineError as error:
        _say(f"{error}{_where_to_look(error)}")
        code = error.exit_code
    except OSError as error:
        if (text := _refusal(error)) is None:
            raise
        _say(text)
        code = EXIT_FAILED
    sys.exit(code if isinstance(code, int) else 0)


def _refusal(error: OSError) -> str | None:
    """The text for a file that cannot be read or written; None for an error without a file, a bug of ours."""
    from jackline.machine.disk import REFUSALS, explain_refusal

    if place := getattr(error, "place", ""):  # a store of a mirror
        return f"error: the mirror {place} cannot be used: {error}\nhint: {getattr(error, 'hint', '')}"
    if error.errno not in REFUSALS:
        name = error.filename
        if not isinstance(name, str | bytes):
            return None
        return f"error: cannot use {os.fsdecode(name)}: {error.strerror}\nhint: see what it is: ls -l"
    path = error.filename if isinstance(error.filename, str) else os.curdir
    why = explain_refusal(error, os.path.dirname(path) or os.curdir)
    where = f"cannot write {path}: " if error.filename else ""
    return f"error: {where}{why}\nhint: make room there (df -h, df -i), or mount it for writing, then try again"


def _where_to_look(error: JacklineError) -> str:
    """A hint for a wrong use whose error has none: the help of the command."""
    words = [word for word in sys.argv[1:2] if word in COMMANDS]
    if error.hint or not isinstance(error, UsageError) or not words:
        return ""
    return f"\nhint: `jackline {words[0]} --help` shows its options"


def _describe(error: click.ClickException) -> str:
    """The help, if no command was given (click raises it). Otherwise the error, and which help lists the options."""
    text, context = error.format_message(), getattr(error, "ctx", None)
    if text.startswith("Usage: "):
        return text
    if "Choose from:" in text:  # click puts each choice on a line of its own
        text = " ".join(text.split())
    near = "" if context is None or "hint:" in text else f"\nhint: `{context.command_path} --help` shows its options"
    return f"error: {text}{near}"


def _open_closed_streams() -> None:
    """If we were started with descriptor 0, 1 or 2 closed, the next file we open would get that number, and our
    messages or the command's output would be written into it."""
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, which is this one


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
