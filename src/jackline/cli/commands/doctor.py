"""`jackline doctor`: what this machine can do, and whether a recipe or a command would start on it.

Owns the report and its wording, as text and as JSON. `machine` makes the readings, `preflight` checks a command, and
`doctor_recipe` checks a recipe. Changes nothing on the machine, except that a recipe's data is cached, as its
training would do.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
import textwrap
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import click

from jackline.cli.commands.doctor_recipe import RecipeRequest, check_recipe, read_recipe, start_recipe_line
from jackline.diagnosis.preflight.check import (
    Check,
    OtherPython,
    State,
    ask_python,
    check_command,
    compare_environments,
)
from jackline.diagnosis.preflight.target import read_command_line
from jackline.errors import EXIT_DONE, EXIT_FAILED
from jackline.extras import TRAINING, require
from jackline.immutable import immutable
from jackline.machine.disk import DiskReading, read_disk
from jackline.machine.gpu.watch import read_gpus
from jackline.machine.host import describe_host
from jackline.machine.memory import read_memory, shm_free_bytes
from jackline.machine.net import find_listener
from jackline.machine.proc import read_command
from jackline.machine.protections import read_protections
from jackline.machine.readings import GpuProcess, GpuReading, MemoryReading, Protection
from jackline.rundir.find import runs_folder
from jackline.units import format_bytes, format_limit

GPU_DEADLINE_S = 5.0
LABEL_WIDTH = 14
LITTLE_DISK_BYTES = 5 * 2**30
NO_DISK_BYTES = 200 * 2**20
NEARLY_FULL = 0.85
# The default rendezvous port of torch's launcher; a process left over from an earlier run may hold it.
MEETING_PORT = 29500


@immutable
class Machine:
    """All readings, taken once; the report is made only from these."""

    host: dict[str, Any]
    memory: MemoryReading
    shm_free_bytes: int | None
    runs_folder: str
    disk: DiskReading | None
    gpus: tuple[GpuReading, ...]
    gpu_commands: dict[int, str]  # command of every pid on a GPU; '' for one that is not visible from here
    protections: tuple[Protection, ...]
    port_holder: int | None
    python: OtherPython | None = None  # what `python` means in this shell


class _SeesDashes(click.Command):
    """Remembers whether there was a `--`: click removes it, and everything after it is a command."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.obj = "--" in args
        return super().parse_args(ctx, args)


@click.command(
    cls=_SeesDashes,
    context_settings={"allow_interspersed_args": False},
    short_help="Check this machine, a recipe or a command, before it starts.",
)
@click.option("--json", "as_json", is_flag=True, help="The report as JSON.")
@click.option("--runs-dir", type=click.Path(), help="Where runs are kept; default: $JACKLINE_RUNS or ./runs.")
@click.option("--no-help-run", is_flag=True, help="Do not start the script with --help.")
@click.argument("argv", nargs=-1, type=click.UNPROCESSED, metavar="[RECIPE [SETTINGS]... | -- COMMAND]")
@click.pass_obj
def command(has_dashes: bool, argv: tuple[str, ...], as_json: bool, runs_dir: str | None, no_help_run: bool) -> None:
    """Check this machine, or a recipe or command on it, before hours are spent.

    \b
    jackline doctor
    jackline doctor demo --lr 3e-4
    jackline doctor -- python train.py --lr 3e-4

    A recipe's data is opened, its model built, one real step taken, saved and loaded; nothing of it stays but the
    data cache. Of a command's code nothing is run, except that a script which parses its arguments is started with
    --help. Exit code 0: ready; 1: a problem; 2: wrong settings.
    """
    argv = argv[1:] if argv[:1] == ("--",) else argv
    recipe = read_recipe(argv, is_command=has_dashes)
    if recipe is not None:
        require(f"recipe '{recipe.target}'", "train", TRAINING)
        place = recipe.runs_dir or runs_dir
        _doctor_recipe(replace(recipe, runs_dir=place, as_json=as_json or recipe.as_json), runs_folder(place))
        return
    target = read_command_line(argv) if argv else None
    machine = read_machine(runs_folder(runs_dir))
    if target is not None and target.interpreter is not None:
        machine = replace(machine, python=ask_python(target.interpreter))
    checks = check_machine(machine)
    if target is not None:
        cpus = float(machine.host["effective_cpus"])
        checks = [
            *check_command(target, cpus=cpus, has_gpu=bool(machine.gpus), tries_help=not no_help_run),
            *checks,
        ]
    if as_json:
        click.echo(json.dumps(to_json(machine, checks, argv), indent=2))
    else:
        click.echo("\n".join(report_lines(machine, checks, argv)))
    sys.exit(EXIT_FAILED if problems(checks) else EXIT_DONE)


def _doctor_recipe(request: RecipeRequest, folder: Path) -> None:
    """Print the machine first, then the recipe's findings as they come. If settings are wrong, print only that."""
    machine = read_machine(folder)
    checks = check_machine(machine)
    argv = (request.target, *request.words)
    lines = [*machine_lines(machine), *gpu_lines(machine), *protection_lines(machine.protections), ""]
    waiting = [*lines, _row("recipe", shlex.join(argv)), *_check_lines(checks)]

    def show(check: Check) -> None:
        if not request.as_json:
            click.echo("\n".join([*waiting, *_check_lines([check])]))
            waiting.clear()

    checks += check_recipe(request, folder.absolute(), show)
    words = verdict(checks, argv, f"recipe '{request.target}'")
    if request.as_json:
        report = to_json(machine, checks, argv)
        click.echo(json.dumps({**report, "verdict": words, "start": start_recipe_line(request)}, indent=2))
    else:
        click.echo(f"\nverdict: {words}\n{_when(checks)}{start_recipe_line(request)}")
    sys.exit(EXIT_FAILED if problems(checks) else EXIT_DONE)


def read_machine(folder: Path) -> Machine:
    gpus = read_gpus(GPU_DEADLINE_S)
    pids = {process.pid for gpu in gpus for process in gpu.processes}
    return Machine(
        host=describe_host(),
        memory=read_memory([os.getpid()]),
        shm_free_bytes=shm_free_bytes(),
        runs_folder=str(folder),
        disk=read_disk(folder),
        gpus=gpus,
        gpu_commands={pid: read_command(pid) for pid in sorted(pids)},
        protections=read_protections(),
        port_holder=find_listener(MEETING_PORT),
        python=ask_python(),
    )


def check_machine(machine: Machine) -> list[Check]:
    """Findings that matter before a start. Plain facts are in the report's first part."""
    checks = [*_check_disk(machine), *_check_memory(machine)]
    if (different := compare_environments(machine.python)) is not None:
        checks.append(Check("environment", "note", *different))
    for gpu in machine.gpus:
        if gpu.total_bytes and gpu.used_bytes > NEARLY_FULL * gpu.total_bytes:
            text = f"GPU {gpu.index} has only {format_bytes(gpu.total_bytes - gpu.used_bytes)} free"
            checks.append(Check("gpu", "note", text, "end what holds it, listed above"))
    if machine.port_holder is not None:
        pid = machine.port_holder
        whose = f"pid {pid}, {read_command(pid)[:60]}" if pid else "a process of somebody else"
        text = f"port {MEETING_PORT}, where torchrun's processes meet, is taken by {whose}"
        checks.append(Check("port", "note", text, f"kill {pid}" if pid else "--master_port 29501"))
    return checks


def _check_disk(machine: Machine) -> list[Check]:
    disk, folder = machine.disk, Path(machine.runs_folder)
    if disk is None:
        return [Check("disk", "problem", f"{folder} cannot be reached", "choose another place with --runs-dir PATH")]
    checks = []
    nearest = next(place for place in (folder, *folder.parents) if place.exists())
    if not os.access(nearest, os.W_OK):
        hint = "choose another place with --runs-dir PATH"
        checks.append(Check("disk", "problem", f"{nearest} may not be written to", hint))
    if disk.free_bytes < LITTLE_DISK_BYTES:
        state: State = "problem" if disk.free_bytes < NO_DISK_BYTES else "note"
        text = f"{format_bytes(disk.free_bytes)} free for runs in {folder}"
        checks.append(Check("disk", state, text, "checkpoints need room; choose another place with --runs-dir PATH"))
    if disk.is_remote:
        text = f"{folder} is on {disk.filesystem}: a kill there can lose what was already written"
        checks.append(Check("disk", "note", text, "keep runs on a local disk, and this path as --mirror"))
    return checks


def _check_memory(machine: Machine) -> list[Check]:
    reading = machine.memory
    if reading.used_bytes <= NEARLY_FULL * reading.limit.limit_bytes:
        return []
    free = format_bytes(reading.limit.limit_bytes - reading.used_bytes)
    return [
        Check(
            "memory",
            "note",
            f"only {free} of {format_limit(reading.limit.limit_bytes, reading.limit.source)} are free",
        )
    ]


def problems(checks: list[Check]) -> list[Check]:
    return [check for check in checks if check.state == "problem"]


def to_json(machine: Machine, checks: list[Check], argv: tuple[str, ...]) -> dict[str, Any]:
    return {
        "machine": machine.host,
        "memory": asdict(machine.memory),
        "shm_free_bytes": machine.shm_free_bytes,
        "runs_folder": machine.runs_folder,
        "disk": asdict(machine.disk) if machine.disk else None,
        "gpus": [_gpu_json(gpu, machine.gpu_commands) for gpu in machine.gpus],
        "protections": [asdict(protection) for protection in machine.protections],
        "command": list(argv) or None,
        "checks": [asdict(check) for check in checks],
        "is_ready": not problems(checks),
        "verdict": verdict(checks, argv),
        "start": start_line(argv),
    }


def _gpu_json(gpu: GpuReading, commands: dict[int, str]) -> dict[str, Any]:
    value = asdict(gpu)
    for process in value["processes"]:
        seen = commands.get(process["pid"], "")
        process.update(command=seen or None, end_with=f"kill {process['pid']}" if seen else None)
    return value


def report_lines(machine: Machine, checks: list[Check], argv: tuple[str, ...]) -> list[str]:
    lines = [*machine_lines(machine), *gpu_lines(machine), *protection_lines(machine.protections)]
    if argv:
        lines += ["", _row("command", shlex.join(argv))]
    elif checks:
        lines.append("")
    return [*lines, *_check_lines(checks), "", f"verdict: {verdict(checks, argv)}", _when(checks) + start_line(argv)]


def _check_lines(checks: list[Check]) -> list[str]:
    lines = []
    for check in checks:
        first, *rest = check.text.splitlines() or [""]
        lines.append(_row(f"{check.state:<8}{check.name}", first, width=8 + LABEL_WIDTH))
        more = [*rest, *([f"hint: {check.hint}"] if check.hint else [])]
        lines += [_row("", line, width=8 + LABEL_WIDTH) for line in more]
    return lines


def machine_lines(machine: Machine) -> list[str]:
    host, memory, disk = machine.host, machine.memory, machine.disk
    where = [f"in {host[name]}" for name in ("container", "notebook", "job") if host[name]]
    system = ", ".join([host["distribution"], f"kernel {host['kernel']}", host["architecture"], *where])
    used, limit = format_bytes(memory.used_bytes), memory.limit
    shm = machine.shm_free_bytes
    lines = [
        _row("machine", system),
        _row("cpus", f"{host['effective_cpus']:g} usable of {host['cpu_count']}"),
        _row("memory", f"{used} used of {format_limit(limit.limit_bytes, limit.source)}"),
        _row("/dev/shm", "not there" if shm is None else f"{format_bytes(shm)} free"),
    ]
    if disk is not None:
        free, total = format_bytes(disk.free_bytes), format_bytes(disk.total_bytes)
        lines.append(_row("disk", f"{free} free of {total}, {disk.filesystem}, for runs in {machine.runs_folder}"))
    return lines


def gpu_lines(machine: Machine) -> list[str]:
    """Every GPU, with every process on it and the command that would end that process."""
    if not machine.gpus:
        return [_row("gpu", "none")]
    lines = []
    for gpu in machine.gpus:
        free = format_bytes(gpu.total_bytes - gpu.used_bytes)
        text = f"{gpu.name}: {format_bytes(gpu.used_bytes)} used, {free} free of {format_bytes(gpu.total_bytes)}"
        lines.append(_row(f"gpu {gpu.index}", text))
        lines += [_row("", _gpu_process_text(process, machine.gpu_commands)) for process in gpu.processes]
    return lines


def _gpu_process_text(process: GpuProcess, commands: dict[int, str]) -> str:
    size = "unknown size" if process.used_bytes is None else format_bytes(process.used_bytes)
    pid, seen = process.pid, commands.get(process.pid, "")
    if not seen:
        return f"  pid {pid} ({size}) is not visible from here: outside this container, or just ended"
    return f"  pid {pid} ({size}): {textwrap.shorten(seen, 70, placeholder=' ...')}; end it with: kill {pid}"


def protection_lines(protections: tuple[Protection, ...]) -> list[str]:
    on = ", ".join(protection.name for protection in protections if protection.is_on)
    lines = [_row("on", on or "nothing")]
    for protection in protections:
        if not protection.is_on:
            lines.append(_row("off", f"{protection.name}: {protection.why}"))
            lines += [_row("", f"hint: {protection.hint}")] if protection.hint else []
    return lines


def verdict(checks: list[Check], argv: tuple[str, ...], what: str = "") -> str:
    what = what or ("this command" if argv else "this machine")
    found, notes = problems(checks), [check for check in checks if check.state == "note"]
    if found:
        names = ", ".join(dict.fromkeys(check.name for check in found))
        return f"{what} is not ready: {_count(len(found), 'problem')} ({names})"
    return f"{what} is ready" + (f"; {_count(len(notes), 'note')} above" if notes else "")


def _count(number: int, word: str) -> str:
    return f"{number} {word}" if number == 1 else f"{number} {word}s"


def _when(checks: list[Check]) -> str:
    return "once that is fixed, " if problems(checks) else ""


def start_line(argv: tuple[str, ...]) -> str:
    program = shlex.join(argv) if argv else "python train.py"
    return f"start it with: jackline run -- {program}"


def _row(label: str, text: str, width: int = LABEL_WIDTH) -> str:
    """Label and text in two columns; a long text is wrapped if the terminal's width is known."""
    columns = shutil.get_terminal_size((0, 0)).columns if sys.stdout.isatty() else 0
    line = f"{label:<{width}}{text}".rstrip()
    if columns < width + 30 or len(line) <= columns:
        return line
    parts = textwrap.wrap(text, columns - width, break_long_words=False, break_on_hyphens=False)
    return f"{label:<{width}}" + f"\n{'':<{width}}".join(parts)
