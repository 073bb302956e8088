"""`jackline launch slurm|skypilot|k8s -- SCRIPT`: write a ready file for a scheduler, to be read and edited."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from jackline.cli.launch.files import Job, kubernetes_jobset, skypilot_task, slurm_script
from jackline.cli.options import SOME_TIME
from jackline.errors import UsageError
from jackline.rundir.access.secrets import has_secrets
from jackline.rundir.atomic import write_whole

_FORMS: dict[str, tuple[Callable[[Job], str], str, str]] = {
    "slurm": (slurm_script, ".sbatch", "sbatch {}"),
    "skypilot": (skypilot_task, ".sky.yaml", "sky jobs launch {}"),
    "k8s": (kubernetes_jobset, ".jobset.yaml", "kubectl apply -f {}"),
}
_NAME = re.compile(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?")


@click.command(short_help="A ready file for Slurm, SkyPilot or Kubernetes.")
@click.argument("scheduler", type=click.Choice(list(_FORMS)))
@click.option("--name", help="Name of the job and of its runs; default: the script's name.")
@click.option("--nodes", type=click.IntRange(min=1), default=1, show_default=True, help="Machines to ask for.")
@click.option("--gpus", type=click.IntRange(min=1), default=1, show_default=True, help="GPUs of each node.")
@click.option("--time-limit", type=SOME_TIME, default="24h", show_default=True, help="Of one job; it is requeued.")
@click.option(
    "--warning", type=SOME_TIME, default="5m", show_default=True, help="How long before it is told to save."
)
@click.option("--mirror", metavar="URL", help="Copy checkpoints there; SkyPilot needs it, its machines go away.")
@click.option("--image", default="YOUR-IMAGE", show_default=True, help="For k8s: a container image with your code.")
@click.option("--out", type=click.Path(path_type=Path), help="File to write; default: NAME with the fitting suffix.")
@click.option("--print", "is_printed", is_flag=True, help="Print it instead of writing a file.")
@click.argument("argv", nargs=-1, type=click.UNPROCESSED, metavar="-- SCRIPT [ARGS]...")
def command(scheduler: str, argv: tuple[str, ...], **given: Any) -> None:
    """Write a file that starts SCRIPT with torchrun under `jackline run` on a scheduler.

    \b
    jackline launch slurm --nodes 2 --gpus 8 --time-limit 12h -- train.py --lr 3e-4
    jackline launch skypilot --gpus 8 --mirror s3://bucket/runs -- train.py

    The job is told to save before its time limit and returns to the queue when it can be resumed (exit code 75).
    """
    argv = argv[1:] if argv[:1] == ("--",) else argv
    if not argv:
        raise UsageError("no script was named", hint=f"jackline launch {scheduler} -- train.py --lr 3e-4")
    if argv[0] in ("python", "python3", "torchrun"):
        raise UsageError(
            f"name the script without {argv[0]}: the file starts it with torchrun",
            hint=f"jackline launch {scheduler} -- train.py",
        )
    if scheduler == "skypilot" and given["mirror"] is None:
        raise UsageError(
            "without a mirror a lost machine takes its checkpoints along", hint="--mirror s3://bucket/runs"
        )
    if has_secrets(given["mirror"] or ""):
        raise UsageError(
            "the address of the mirror holds a password, which everybody could read in the job's file",
            hint="leave it out; the job takes it from its environment, an ssh key or a credentials file",
        )
    make, suffix, start = _FORMS[scheduler]
    text = make(_job(argv, given))
    if given["is_printed"]:
        click.echo(text, nl=False)
        return
    path: Path = given["out"] or Path(_name_of(argv, given) + suffix)
    if path.exists():
        raise UsageError(f"{path} exists already", hint="--out FILE chooses another, --print prints it")
    write_whole(path, text.encode())
    click.echo(f"wrote {path}; read it, then: {start.format(path)}")


def _job(argv: tuple[str, ...], given: dict[str, Any]) -> Job:
    return Job(
        name=_name_of(argv, given),
        command=argv,
        nodes=given["nodes"],
        gpus=given["gpus"],
        time_limit_s=int(given["time_limit"]),
        warning_s=int(given["warning"]),
        mirror=given["mirror"],
        image=given["image"],
    )


def _name_of(argv: tuple[str, ...], given: dict[str, Any]) -> str:
    """Kubernetes allows small letters, digits and dashes; one rule for all three is easier to remember."""
    name = given["name"] or re.sub(r"[^a-z0-9]+", "-", Path(argv[0]).stem.lower()).strip("-") or "job"
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"'{name}' cannot be the name of a job: small letters, digits and dashes, at most 40",
            hint="--name my-job",
        )
    return str(name)
