"""`jackline checkpoints`: list, verify, prune, show, export, import. Needs no torch and loads no tensor."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from jackline.checkpoint.format import catalogue
from jackline.checkpoint.format.catalogue import Listed
from jackline.checkpoint.format.manifest import Damage, Name
from jackline.checkpoint.place import choose_place
from jackline.cli.options import ListByDefault, find, json_option, run_argument, runs_dir_option
from jackline.cli.text import checkpoints as text
from jackline.cli.text.paint import print_out
from jackline.cli.trusting import refuse_links
from jackline.errors import EXIT_FAILED, JacklineError, UsageError
from jackline.machine.disk import explain_refusal
from jackline.rundir.access.trust import judge

if TYPE_CHECKING:
    from jackline.checkpoint.format.export import Exported
    from jackline.checkpoint.writer.retention import Keep

_DELETED_WITHIN_S = 0.5
_STEP = click.option("--step", type=click.IntRange(min=0), help="Which checkpoint; default: the newest.")


@click.group(cls=ListByDefault, short_help="List, verify, prune, show and export checkpoints.")
def command() -> None:
    """The checkpoints of a run.

    \b
    jackline checkpoints [RUN]           list them
    jackline checkpoints verify [RUN]    read every byte and check it
    jackline checkpoints show [RUN]      what is in one
    jackline checkpoints export [RUN]    the weights, for plain PyTorch
    jackline checkpoints import FOLDER   a folder of torch.distributed.checkpoint as plain files
    jackline checkpoints prune [RUN]     delete old ones
    """


@command.command("list", short_help="Step, age, size, verified, mirrored, best.")
@run_argument
@json_option
@runs_dir_option
def list_command(run: str | None, as_json: bool, runs_dir: str | None) -> None:
    """List the checkpoints of RUN, newest first."""
    folder = _folder(run, runs_dir)
    rows = text.read_rows(folder)
    if as_json:
        click.echo(json.dumps([row.to_json() for row in rows], indent=1))
        return
    print_out("\n".join(text.list_lines(folder, rows)))


@command.command(short_help="Read every byte and check it.")
@run_argument
@click.option("--step", type=click.IntRange(min=0), help="Only this one; default: all.")
@json_option
@runs_dir_option
def verify(run: str | None, step: int | None, as_json: bool, runs_dir: str | None) -> None:
    """Read the checkpoints of RUN from the disk and compare every checksum. Exit code 1 when one is damaged."""
    from jackline.checkpoint.format.verify import verify_checkpoint

    folder = _folder(run, runs_dir)
    is_noted = not folder.is_symlink() or judge(find(run, runs_dir)).is_ours
    found: list[dict[str, Any]] = []
    for name in _names(folder, step):
        result: dict[str, Any] = {"name": str(name), "step": name.step, "is_whole": True}
        try:
            result["size_bytes"] = verify_checkpoint(folder / str(name)).size_bytes
        except Damage as damage:
            if _is_deleted(folder / str(name)):  # a live run deleted this old one while we read it
                click.echo(f"{name} was deleted meanwhile", err=True)
                continue
            result |= {"is_whole": False, "why": str(damage)}
        found.append(result)
        if is_noted:
            _note_result(folder, name, result.get("why"))
        if not as_json:
            click.echo(text.verify_line(result))
    if as_json:
        click.echo(json.dumps(found, indent=1))
    if not all(result["is_whole"] for result in found):
        sys.exit(EXIT_FAILED)


def _note_result(folder: Path, name: Name, why: str | None) -> None:
    """Keep the result for `list`, which reads no data. A folder that cannot be written is no reason to fail."""
    notes = catalogue.read_notes(folder, catalogue.VERIFIED)
    at_s = time.time()
    notes[name] = {"verified_at_s": at_s} if why is None else {"damaged_at_s": at_s, "why": why}
    known = {*catalogue.list_names(folder), *catalogue.list_left_behind(folder)}
    with contextlib.suppress(OSError):
        catalogue.write_notes(
            folder, catalogue.VERIFIED, {kept: note for kept, note in notes.items() if kept in known}
        )


def _is_deleted(path: Path) -> bool:
    """Whether it is being deleted: that takes a moment, and the manifest is deleted first."""
    deadline_s = time.monotonic() + _DELETED_WITHIN_S
    while path.exists() and time.monotonic() < deadline_s:
        time.sleep(0.05)
    return not path.exists()


@command.command(short_help="Delete old ones; the last two good ones stay.")
@run_argument
@click.option("--keep", type=click.IntRange(min=1), default=3, show_default=True, help="How many of the newest stay.")
@click.option("--keep-every", type=click.IntRange(min=1), help="Steps that are multiples of this stay as well.")
@click.option("--best", metavar="METRIC", help="The best by this metric stays; '+METRIC' when high is good.")
@click.option("--left-behind", is_flag=True, help="Instead those that `resume --step` went back behind: all of them.")
@click.option("--dry-run", is_flag=True, help="Only say what would be deleted.")
@runs_dir_option
def prune(run: str | None, left_behind: bool, dry_run: bool, runs_dir: str | None, **given: Any) -> None:
    """Delete old checkpoints of RUN. Those that stay are read first: nothing is deleted before two are verified."""
    from jackline.checkpoint.writer.retention import Keep

    if not dry_run:
        refuse_links(find(run, runs_dir))
    folder = _folder(run, runs_dir)
    wanted = Keep(last=given["keep"], every=given["keep_every"], best=given["best"])
    listed = catalogue.list_checkpoints(folder)
    # With --left-behind one good checkpoint is enough, the one that the run resumes from: there may be no second yet.
    num_asked = 1 if left_behind else max(wanted.last, 2)
    good = _verify_newest(listed, num_asked)
    if not left_behind:
        victims = _old_ones(listed, good, wanted)
    else:
        victims = [catalogue.look_at(folder, name) for name in catalogue.list_left_behind(folder)] if good else []
    freed = sum(_delete(entry, dry_run=dry_run) for entry in victims)
    must = min(num_asked, 2)
    click.echo(text.prune_summary(len(victims), freed, num_good=len(good), num_asked=must, dry_run=dry_run))


def _old_ones(listed: list[Listed], good: list[Name], keep: Keep) -> list[Listed]:
    from jackline.checkpoint.writer.retention import best_checkpoint, checkpoints_to_delete

    metrics = {entry.name: entry.manifest.metrics for entry in listed if entry.manifest is not None}
    by_name = {entry.name: entry for entry in listed}
    best: list[Name] = []  # the best ones, up to and including the first complete one
    while (name := best_checkpoint(metrics, keep.best)) is not None:
        best.append(name)
        del metrics[name]
        if name in good or _verify_newest([by_name[name]], 1):
            break
    victims = checkpoints_to_delete(list(by_name), good=good, keep=keep, best=best)
    return [entry for entry in listed if entry.name in victims]


@command.command(short_help="What is in one, without loading it.")
@run_argument
@_STEP
@click.option("--tensors", is_flag=True, help="Every tensor by name.")
@json_option
@runs_dir_option
def show(run: str | None, step: int | None, tensors: bool, as_json: bool, runs_dir: str | None) -> None:
    """Show one checkpoint of RUN: where it comes from, its files, its values, its tensors."""
    folder = _folder(run, runs_dir)
    name = _names(folder, step)[0]
    try:
        contents = text.read_contents(folder / str(name), with_tensors=tensors)
    except Damage as damage:
        raise JacklineError(
            f"{name} is not whole: {damage}", hint="`jackline checkpoints verify` tells which ones are"
        ) from None
    click.echo(json.dumps(contents, indent=1) if as_json else "\n".join(text.show_lines(contents)))


@command.command(short_help="The weights as a file for plain PyTorch.")
@run_argument
@_STEP
@click.option("--out", type=click.Path(path_type=Path), default=Path("export"), show_default=True, help="A folder.")
@click.option("--key", "keys", multiple=True, help="Which model, when there are several; default: all.")
@click.option(
    "--to",
    "target",
    type=click.Choice(["safetensors", "dcp"]),
    default="safetensors",
    show_default=True,
    help="dcp: a folder of torch.distributed.checkpoint, for any number of ranks.",
)
@json_option
@runs_dir_option
def export(run: str | None, step: int | None, out: Path, keys: tuple[str, ...], **given: Any) -> None:
    """Write the weights of RUN into a folder, and print the lines of plain PyTorch that load them.

    The checkpoint of a Lightning run becomes a .ckpt file, which Lightning alone can load and resume from.
    """
    from jackline.checkpoint.format.export import export_dcp, export_weights

    folder = _folder(run, given["runs_dir"])
    name = _names(folder, step)[0]
    path, place = folder / str(name), out.absolute()
    written = [export_dcp(path, place, keys)] if given["target"] == "dcp" else export_weights(path, place, keys)
    _echo_files(written, {"name": str(name), "step": name.step}, as_json=given["as_json"])


@command.command("import", short_help="A folder of torch.distributed.checkpoint as plain files.")
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--out", type=click.Path(path_type=Path), default=Path("import"), show_default=True, help="A folder.")
@json_option
def import_(folder: Path, out: Path, as_json: bool) -> None:
    """Write the tensors of FOLDER (.metadata and .distcp files) as safetensors files, one for each top-level key.

    Needs no torch, and runs nothing of the pickles in FOLDER. `init_from=out/model.safetensors` begins a training
    with such a file.
    """
    from jackline.checkpoint.format.dcp import import_folder

    written, left_out = import_folder(folder.absolute(), out.absolute())
    _echo_files(written, {"name": folder.name, "left_out": left_out}, as_json=as_json)
    if left_out and not as_json:
        shown = ", ".join(left_out[:4]) + (", ..." if len(left_out) > 4 else "")
        click.echo(f"# left out, because they are no tensors: {len(left_out)} values ({shown})")


def _echo_files(written: Sequence[Exported], about: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        files = [{"key": part.key, "path": str(part.path), "size_bytes": part.size_bytes} for part in written]
        click.echo(json.dumps({**about, "files": files}, indent=1))
        return
    for part in written:
        click.echo("\n".join(text.export_lines(about["name"], part)))


def _folder(run: str | None, runs_dir: str | None) -> Path:
    return choose_place(find(run, runs_dir)).folder


def _names(folder: Path, step: int | None) -> list[Name]:
    names = [*catalogue.list_names(folder), *catalogue.list_left_behind(folder)]
    if not names:
        aside = text.set_aside_lines(folder)
        hint = "`jackline status` tells when the next one is due"
        raise UsageError(f"there is no {'whole ' if aside else ''}checkpoint in {folder}", detail=aside, hint=hint)
    chosen = [name for name in names if step is None or name.step == step]
    if not chosen:
        known = ", ".join(str(name.step) for name in names[:5])
        raise UsageError(f"there is no checkpoint of step {step} in {folder}", hint=f"the newest are: {known}")
    return chosen


def _verify_newest(listed: list[Listed], count: int) -> list[Name]:
    """Read the newest checkpoints until `count` of them are verified."""
    from jackline.checkpoint.format.verify import verify_checkpoint

    good: list[Name] = []
    for entry in listed:
        if len(good) == count:
            break
        try:
            verify_checkpoint(entry.path)
            good.append(entry.name)
        except Damage as damage:
            click.echo(f"{entry.name} is damaged: {damage}", err=True)
    return good


def _delete(entry: Listed, *, dry_run: bool) -> int:
    from jackline.checkpoint.writer.commit import delete_checkpoint
    from jackline.checkpoint.writer.disk import Disk

    size = entry.manifest.size_bytes if entry.manifest else 0
    if not dry_run:
        try:
            delete_checkpoint(entry.path, Disk())
        except OSError as error:
            why = explain_refusal(error, entry.path.parent)
            raise JacklineError(
                f"{entry.name} cannot be deleted: {why}", hint="make the disk writable, then prune again"
            ) from None
    click.echo(f"{'would delete' if dry_run else 'deleted'} {entry.name} ({text.size_text(size)})")
    return size
