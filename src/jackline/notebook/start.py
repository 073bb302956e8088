"""`train` and `run`: a cell that starts a run, attaches to it if it is alive, and resumes it if it is not.

Owns what a cell adds to the commands of the same name: the mirror chosen in `setup`, and downloading a run from
there when this machine has no files of it. The rules of the commands decide which run is meant.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jackline.checkpoint.mirror.store import open_store
from jackline.cli.view.run_view import LIVE
from jackline.errors import CannotResume, JacklineError, UsageError
from jackline.notebook.command import Ended, as_words, call, read_error, say, without_traceback
from jackline.notebook.look import Run
from jackline.notebook.place import saved_place
from jackline.rundir.command import plain_settings
from jackline.rundir.find import runs_folder
from jackline.rundir.identity import default_name, numbered_name
from jackline.rundir.kin import find_same
from jackline.rundir.layout import RunDir
from jackline.rundir.run_file import check_name, read_run_file, write_run_file
from jackline.rundir.status import read_status

TRAINER = (sys.executable, "-m", "jackline.trainer")


@dataclass(frozen=True)
class Meant:
    """The requested run: its folder, its command, and the settings that identify it."""

    run: RunDir
    argv: tuple[str, ...]
    settings: dict[str, Any]
    place: str | None  # the mirror from which the run of a lost machine can be downloaded


@without_traceback
def train(recipe: str, *words: str, name: str | None = None, new: bool = False, **settings: Any) -> Run:
    """Start `jackline train RECIPE` in the background; the same call again attaches to it or resumes it.

    Settings are keywords (lr=3e-4, quick=True) or words as on the command line ("--restart", "3").
    """
    asked = [*words, *as_words(settings)]
    meant, asked = meant_by_recipe(recipe, asked, name=name, is_new=new)
    return start(meant, ["train", recipe, *asked], may_bring_back=not new)


@without_traceback
def run(command: str | Sequence[str], *, name: str | None = None, new: bool = False, **options: Any) -> Run:
    """Start `jackline run -- COMMAND` in the background; the same call again attaches to it or resumes it.

    Options are those of the command: checkpoints="out/*.pt", resume_arg="--resume {checkpoint}", restart=3 ...
    """
    argv = shlex.split(command) if isinstance(command, str) else list(command)
    folder = runs_folder()
    place = options.pop("mirror", None) or saved_place(folder)
    identity = plain_settings({"argv": argv, "cwd": str(Path.cwd())})
    known = find_same(folder, default_name(argv, identity), identity).run.name
    found = choose_folder(folder, name or known, place, is_new=new)
    meant = Meant(found, tuple(argv), identity, place)
    asked = as_words({key: value for key, value in {**options, "mirror": place}.items() if value is not False})
    return start(meant, ["run", *asked], may_bring_back=not new)


def meant_by_recipe(
    recipe: str, asked: Sequence[str], *, name: str | None = None, is_new: bool = False
) -> tuple[Meant, list[str]]:
    """Which run `jackline train RECIPE ASKED` is, and the words to pass, with the mirror added."""
    from jackline.cli.commands.train import with_full_mirror

    options = read_options(recipe, asked)
    found = resolve(recipe, options["settings"])
    folder = runs_folder(options["runs_dir"])
    mirror = found["config"]["mirror"] or saved_place(folder)
    added = [] if found["config"]["mirror"] or not mirror else [f"mirror={mirror}"]
    wanted = name or options["name"] or default_name([recipe], found["identity"])
    chosen = choose_folder(folder, wanted, mirror, is_new=is_new or options["is_new"])
    # Exactly the command that `jackline train` starts, so that a downloaded run does not appear to be changed.
    argv = (*TRAINER, str(chosen.path), recipe, *with_full_mirror((*options["settings"], *added), mirror or ""))
    settings = {**found["identity"], "cwd": str(Path.cwd())}
    return Meant(chosen, argv, settings, mirror), [*asked, *added]


def read_options(recipe: str, asked: Sequence[str]) -> dict[str, Any]:
    """Split the words into options of the run and settings of the training, as the command itself does."""
    import click

    from jackline.cli.commands.train import command
    from jackline.cli.main import cli

    try:
        with (
            cli.make_context("jackline", ["train"]) as above,
            command.make_context("train", [recipe, *asked], parent=above) as context,
        ):
            return context.params
    except click.ClickException as error:
        raise UsageError(error.format_message()) from None


def resolve(recipe: str, settings: Sequence[str]) -> dict[str, Any]:
    """Resolve the settings in a process of its own, because a user's recipe may import anything."""
    done = subprocess.run(
        [*TRAINER, "--resolve", recipe, *settings], stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    if done.returncode != 0:
        raise read_error(done.stderr.splitlines(), done.returncode, ["train"])
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def choose_folder(folder: Path, name: str, place: str | None, *, is_new: bool) -> RunDir:
    """With `is_new`, choose a name that no run has, here or in the mirror: an existing run would be resumed."""
    check_name(name)
    if not is_new:
        return RunDir(folder / name)
    here = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    return RunDir(folder / numbered_name(name, here + (names_in(place) if place else [])))


def names_in(place: str) -> list[str]:
    try:
        return open_store(place).names("")
    except OSError as problem:
        raise unreadable(place, problem) from None


def start(meant: Meant, words: list[str], *, may_bring_back: bool) -> Run:
    found = meant.run
    is_back = may_bring_back and meant.place is not None and not found.path.exists() and bring_back(meant)
    if is_back and read_status(found).state != "finished":
        call(["resume", str(found.path), "--here", "--copied", "--trust", "--detach"])
        return Run(found.path)
    behind = ["--", *meant.argv] if words[0] == "run" else []
    try:
        call([*words, "--name", found.name, "--runs-dir", str(found.path.parent), "--detach", *behind])
    except Ended:
        if read_status(found).state != "finished":
            raise
        say("in a cell --new is new=True")
    return Run(found.path)


def bring_back(meant: Meant) -> bool:
    """Download the records of a run that this machine does not have; False when the mirror has none. The newest
    checkpoint comes with them. Raises CannotResume when the records show progress and no checkpoint is there."""
    from jackline.checkpoint.mirror.stories import find_in_mirror
    from jackline.supervisor.foreign.fetch import fetch_stranger

    place, found = meant.place or "", meant.run
    try:
        find_in_mirror(f"{place}/{found.name}")
    except CannotResume:
        return False
    except OSError as problem:
        raise unreadable(place, problem) from None
    try:
        fetched = fetch_stranger(f"{place}/{found.name}", found.path.parent, Path.cwd())
    except OSError as problem:
        raise unreadable(place, problem) from None
    # Folders and interpreters may have other paths on this machine.
    contents = read_run_file(found)
    # The command is the one of this cell. Hooks have none here: those of the mirror may be anybody's.
    options = {**contents.options, "on_event": None, "when_done": None}
    write_run_file(found, replace(contents, argv=meant.argv, settings=meant.settings, options=options))
    say(f"this machine has nothing of run '{found.name}'; its records are back from {place}")
    for text in fetched.said:
        say(text)
    return True


def unreadable(place: str, problem: OSError) -> UsageError:
    """An error instead of a start from scratch, because the unreadable place may hold checkpoints of this run."""
    return UsageError(
        f"{place} cannot be read: {problem.strerror or problem}",
        hint="run the setup cell again; it mounts the place or says what is wrong with it",
    )


@without_traceback
def plan(target: str, *words: str, name: str | None = None, gpu: str | None = None, **settings: Any) -> None:
    """Check whether a run will fit and finish: `jackline doctor`, and with a GPU `jackline plan --explain`.

    gpu="T4" asks about another GPU, model_size="auto" asks which size suits this one; both only compute and run
    nothing. Raises when there is a problem, so that the cells below do not run. While the same run (`name`, if it was
    given one) is alive, nothing is run beside it.
    """
    from jackline.memory.plan.gpus import detect_gpu
    from jackline.trainer.recipe import is_own_file

    asked = [*words, *as_words(settings)]
    is_question = gpu is not None or not {"--table", "--explain", "--json"}.isdisjoint(words)
    is_question = is_question or "auto" in (settings.get("model_size"), settings.get("model"))
    if is_question or is_own_file(target) or ":" in target:
        call(["plan", target, *asked, *as_words({"gpu": gpu})])
        return
    if (alive := living(target, asked, name)) is not None:
        say(f"run '{alive}' is alive: nothing is tried beside it, run.watch() shows it")
        return
    try:
        call(["doctor", target, *asked])
    except Ended:
        raise JacklineError(
            "this would not go well: the problem is named above", hint="put it right here and in the cell that trains"
        ) from None
    if detect_gpu() is not None:
        call(["plan", target, *asked, "--explain"])


def living(recipe: str, asked: list[str], name: str | None) -> str | None:
    found = meant_by_recipe(recipe, asked, name=name)[0].run
    return found.name if read_status(found).state in LIVE else None
