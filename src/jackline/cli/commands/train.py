"""`jackline train RECIPE`: a recipe under the same supervision as a user's own command.

Owns the options that are about the run and not about the training. The trainer itself reads the settings, in a
process of its own, because recipes may import torch and a user's own file may import anything.
"""

from __future__ import annotations

import json
import re
import shlex
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from jackline.cli.commands.plan import run_child
from jackline.cli.commands.run import check_mirror, full_place, read_options, start_run, working_folder
from jackline.cli.options import DURATION, detach_options, quiet_after, quiet_option, stuck_after
from jackline.errors import EXIT_DONE, EXIT_USAGE, JacklineError, UsageError
from jackline.extras import TRAINING, require
from jackline.rundir.access.secrets import has_secrets, without_secrets
from jackline.rundir.find import runs_folder
from jackline.rundir.identity import default_name
from jackline.rundir.layout import RunDir
from jackline.rundir.run_file import read_run_file
from jackline.trainer.recipe import RECIPES, find_recipe, is_own_file

RESTARTS = 10  # while checkpoints advance
_TYPED = "jackline.typed"
_LENGTH = ("max_steps", "epochs", "warmup_steps", "decay_steps")
_SETTINGS = {
    "ignore_unknown_options": True,
    "allow_extra_args": True,
}
_NOT_ASKED: dict[str, Any] = {
    "checkpoints": None,
    "resume_arg": None,
    "resume_from": None,
    "mirror": None,
    "disk_budget": None,
    "mirror_patience": 600.0,
    "time_limit": None,
    "tty": False,
    "split_streams": False,
    "all_ranks": False,
    "rescue_every": None,
    "rescue": False,  # a recipe saves by itself
}


class RepeatedCommand(click.Command):
    """Keeps the words as typed, in order and with the run's options: the training's first line repeats them."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta[_TYPED] = shlex.join(["train", *args])
        return super().parse_args(ctx, args)


@click.command(
    cls=RepeatedCommand, context_settings=_SETTINGS, short_help="Train a recipe, supervised and resumable."
)
@click.argument("recipe", required=False)
@click.argument("settings", nargs=-1, type=click.UNPROCESSED)
@click.option(
    "--show", "is_shown", is_flag=True, help="Print each setting's value, origin and meaning; start nothing."
)
@click.option(
    "--help-settings", "is_help", is_flag=True, help="List the recipe's settings: defaults, what is allowed."
)
@click.option("--name", help="Name of the run; default: the recipe's name and a hash of its settings.")
@click.option("--new", "is_new", is_flag=True, help="A new run, even if these settings have one already.")
@click.option("--continue-with-changes", "accepts_changes", is_flag=True, help="Continue although settings changed.")
@click.option(
    "--runs-dir",
    "--checkpoint-dir",
    "--output-dir",
    "runs_dir",
    type=click.Path(),
    help="Where runs are kept, checkpoints in them; default: $JACKLINE_RUNS or ./runs.",
)
@detach_options
@quiet_option
@click.option(
    "--restart",
    type=click.IntRange(min=0),
    default=RESTARTS,
    show_default=True,
    help="Maximum automatic restarts, while checkpoints advance.",
)
@click.option(
    "--on-stuck",
    type=click.Choice(["report", "restart", "stop"]),
    default="restart",
    show_default=True,
    help="What to do when nothing moves any more.",
)
@click.option("--grace", type=DURATION, default="30s", show_default=True, help="How long a polite end may take.")
@click.option("--on-event", metavar="CMD", help="Run at stuck, crashed, done, memory; $JACKLINE_EVENT says which.")
@click.option("--when-done", metavar="CMD", help="Run when it is over, however it ended.")
@quiet_after
@stuck_after
@click.option("--no-inject", is_flag=True, help="Leave the Python interpreter alone.")
@click.option(
    "--nproc", type=click.IntRange(min=1), help="Ranks on this machine, started by torchrun: one for each GPU."
)
@click.option("--nnodes", help="Machines of the job: 2, or 1:4 for as many as are there; needs --rdzv.")
@click.option("--rdzv", metavar="HOST:PORT", help="Where the machines of one training meet.")
@click.option("--node", help="Name of this machine in the job; default: its host name.")
def command(recipe: str | None, settings: tuple[str, ...], is_shown: bool, is_help: bool, **given: Any) -> None:
    """Train RECIPE, or one of your own: a file with a class of jackline.Recipe.

    \b
    jackline train demo --quick                       everything once, in under a minute
    jackline train demo --lr 3e-4 batch_size=32       settings: --key value or key=value
    jackline train demo --config mine.yaml --mirror /mnt/drive/runs
    jackline train my_recipe.py --quick               your own; `jackline init recipe` writes one
    jackline train demo --nproc 2 --parallel fsdp     two ranks; ddp: all weights on each
    jackline train demo --show                        all settings, with origin and meaning
    jackline train demo --help-settings               what may be set: default, type, range, meaning

    Running the same command again watches it if it is alive, and continues it if it was stopped or crashed.
    """
    if recipe is None:
        for name, (_, text) in RECIPES.items():
            click.echo(f"{name:<12}{text}")
        raise UsageError("missing recipe", hint="jackline train demo --quick; recipes are listed above")
    if not is_own_file(recipe):
        find_recipe(recipe)
    trainer = [sys.executable, "-m", "jackline.trainer"]
    if is_help:
        sys.exit(run_child([*trainer, "--help-settings", recipe, *settings]))
    if is_shown:
        sys.exit(run_child([*trainer, "--show", recipe, *settings]))
    node = given.pop("node") or ""
    is_job = given["rdzv"] is not None
    launcher = with_ranks(trainer, given)
    found = resolve(trainer, recipe, settings)
    require(f"recipe '{recipe}'", "train", TRAINING)
    config = found["config"]
    check_device(config["device"])
    check_mirror(config["mirror"] or None)
    options = replace(
        read_options({**_NOT_ASKED, **given}),
        time_limit_s=config["time_limit_s"] or None,
        disk_budget=config["disk_budget"] or None,
        typed=without_secrets(click.get_current_context().meta[_TYPED]),
    )
    if is_job:
        base = given["name"] or default_name([recipe], found["identity"])
        given["name"] = f"{base}-{node or node_name()}"
        options = replace(options, job=str(runs_folder(given["runs_dir"]).absolute() / f"{base}.job"))
    words = with_full_mirror(settings, config["mirror"])
    if has_secrets(config["mirror"] or ""):
        # A command line can be read by every user, and run.json is copied: the trainer gets it in its environment.
        options = replace(options, mirror=config["mirror"])
        words = [word.replace(config["mirror"], without_secrets(config["mirror"])) for word in words]
    if not given["name"] and not given["is_new"]:
        for line in runs_of_other_length(recipe, found["identity"], runs_folder(given["runs_dir"])):
            click.echo(line, err=True)
    sys.exit(
        start_run(
            default_name([recipe], found["identity"]),
            {**found["identity"], **folder_settings(config)},
            lambda run: [*launcher, str(run.absolute()), recipe, *words],
            options,
            given,
        )
    )


def with_ranks(trainer: list[str], given: dict[str, Any]) -> list[str]:
    """The trainer's command, or torchrun's around it. Takes its options out of `given`."""
    nproc, nnodes, rdzv = (given.pop(word) for word in ("nproc", "nnodes", "rdzv"))
    if nproc is None and nnodes is None:
        return trainer
    if nnodes not in (None, "1") and rdzv is None:
        raise UsageError("--nnodes needs a place to meet", hint="--rdzv HOST:PORT, the same on every machine")
    python, *module = trainer
    how = (
        ["--standalone"] if rdzv is None else ["--rdzv-backend=c10d", f"--rdzv-endpoint={rdzv}", "--rdzv-id=jackline"]
    )
    if rdzv is not None:
        # torchrun asks how its host name resolves, which is wrong in many containers.
        there, mine = addresses(rdzv)
        how += [f"--nnodes={nnodes or 1}", f"--rdzv-conf=is_host={int(bool(mine) and mine == there)}"]
        how += [f"--local-addr={mine}"] if mine else []
    if ":" in (nnodes or ""):
        # A machine that is lost takes the ranks of the others down with it; torchrun starts those again.
        how.append(f"--max-restarts={RESTARTS}")
    return [python, "-m", "torch.distributed.run", *how, f"--nproc-per-node={nproc or 1}", *module]


def addresses(rdzv: str) -> tuple[str, str]:
    """The address of HOST:PORT, and this machine's own on the way there: the same where that is this machine. Sends
    nothing. '' where there is no way."""
    host = rdzv.rpartition(":")[0].strip("[]") or rdzv
    try:
        family, kind, number, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, number) as one:
            one.connect(address)
            return str(address[0]), str(one.getsockname()[0])
    except OSError:
        return "", ""


def node_name() -> str:
    """This machine's name as a part of a run's name."""
    return re.sub(r"[^A-Za-z0-9-]+", "-", socket.gethostname().partition(".")[0]).strip("-")[:40] or "node"


def folder_settings(config: dict[str, Any]) -> dict[str, str]:
    """The folder the run works in. It is part of the run's identity (`files_in`) only where a setting is a path from
    there: in another folder that would be other data."""
    here = str(working_folder())
    values = [text for value in config.values() for text in (value if isinstance(value, list) else [value])]
    is_bound = any(isinstance(text, str) and names_file_here(text) for text in values)
    return {"cwd": here, **({"files_in": here} if is_bound else {})}


def names_file_here(text: str) -> bool:
    """Whether a setting is a relative path, glob or file.py:function of something in this folder."""
    path = text.rsplit(":", 1)[0] if is_own_file(text) else text
    if not path or "://" in path or Path(path).is_absolute() or "\0" in path:
        return False
    try:
        return next(Path().glob(path), None) is not None
    except (OSError, ValueError, NotImplementedError):
        return False


def check_device(device: str) -> None:
    """Fail before a run is created where a GPU is asked for and no driver answers; torch decides about the rest."""
    if not device.startswith("cuda"):
        return
    from jackline.machine.gpu.watch import gpu_names

    if not gpu_names():
        raise UsageError(
            f"device={device}, but there is no NVIDIA GPU here, or its driver does not answer",
            hint="device=auto takes what is there; `jackline doctor` shows the GPUs of this machine",
        )


def runs_of_other_length(recipe: str, identity: dict[str, Any], folder: Path) -> list[str]:
    """Text for a command without a run of its own, where a run differs from it in its length alone: the name comes
    from all settings, so more steps make another run."""
    name = default_name([recipe], identity)
    if (folder / name).exists():
        return []
    wanted = {key: value for key, value in json.loads(json.dumps(identity)).items() if key not in _LENGTH}
    for run in list_local_runs(folder):
        before = run_settings(run)
        others = {key: value for key, value in before.items() if key not in (*_LENGTH, "cwd", "files_in")}
        if others == wanted:
            steps = f"max_steps={before.get('max_steps')}, now {identity.get('max_steps')}"
            return [
                f"run '{run.name}' has these settings with another length ({steps}); this starts a new run '{name}'",
                f"hint: the same command with --name {run.name} --continue-with-changes continues that run instead",
            ]
    return []


def run_settings(run: RunDir) -> dict[str, Any]:
    """Of run.json; empty where it cannot be read."""
    try:
        return dict(read_run_file(run).settings)
    except JacklineError:
        return {}


def list_local_runs(folder: Path) -> list[RunDir]:
    try:
        return sorted((run for run in map(RunDir, folder.iterdir()) if run.has_run_file), key=lambda run: run.name)
    except OSError:
        return []


def resolve(trainer: list[str], recipe: str, settings: tuple[str, ...]) -> dict[str, Any]:
    """The resolved settings as plain values. The trainer, which reads them, prints what is wrong with them."""
    done = subprocess.run(
        [*trainer, "--resolve", recipe, *settings], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE
    )
    if done.returncode != EXIT_DONE:
        sys.exit(done.returncode if done.returncode > 0 else EXIT_USAGE)
    # A user's own file may print while it is imported, so the answer is the last line.
    found: dict[str, Any] = json.loads(done.stdout.decode().splitlines()[-1])
    return found


def with_full_mirror(settings: tuple[str, ...], mirror: str) -> list[str]:
    """Append the mirror's absolute path as the last setting, so that it means the same in every process."""
    if not mirror or "://" in mirror:
        return list(settings)
    last = f"mirror={full_place(mirror)}"
    return [*(word for word in settings if word != last), last]
