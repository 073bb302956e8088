"""`jackline resume`: the next attempt of a run that was stopped, crashed or was killed."""

from __future__ import annotations

import os
import shutil
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from jackline.cli.options import detach_options, quiet_option
from jackline.cli.programs.started import is_detached_as_json
from jackline.cli.trusting import accept, confirm, trust_option
from jackline.errors import CannotResume, UsageError
from jackline.rundir.command import plain_settings, script_of
from jackline.rundir.find import find_run, is_mirror, runs_folder
from jackline.rundir.kin import relocate
from jackline.rundir.layout import RunDir
from jackline.rundir.records.seen import Skip, add_skip, batches_in, parse_skip
from jackline.rundir.registry import entry_of, register
from jackline.rundir.run_file import RunFile, read_run_file
from jackline.rundir.status import last_beat_s, read_status
from jackline.units import format_duration

BEAT_IS_FRESH_S = 30.0
BEAT_IS_OLD_S = 3600.0
BEATS_WITHIN_S = 4.0  # supervisor and session write theirs each second

if TYPE_CHECKING:
    from jackline.supervisor.options import SuperviseOptions


@click.command(short_help="Resume a run that stopped or crashed.")
@click.argument("run", required=False, metavar="[RUN|MIRROR]")
@click.argument("settings", nargs=-1, metavar="[KEY=VALUE...]")
@click.option(
    "--step", metavar="N", help="From this earlier checkpoint; later ones are left behind, none is deleted."
)
@click.option(
    "--skip-batches", metavar="A:B", help="Leave out batches A to B-1 of the run from now on; the first is 0."
)
@click.option(
    "--from", "path", metavar="PATH", help="From this one of your script's own checkpoints (--checkpoints)."
)
@click.option(
    "--from-scratch", is_flag=True, help="From the beginning, although this run has checkpoints of its own."
)
@click.option(
    "--restart-schedule", is_flag=True, help="Begin the learning rate's schedule anew here, with its warm-up."
)
@detach_options
@quiet_option
@click.option("--here", is_flag=True, help="It was last seen on another machine and has ended there: resume here.")
@trust_option
@click.option("--copied", is_flag=True, hidden=True, help="Its records were brought from its mirror just now.")
@click.option("--runs-dir", type=click.Path(), help="Where runs are kept; default: $JACKLINE_RUNS or ./runs.")
def command(run: str | None, settings: tuple[str, ...], runs_dir: str | None, **given: Any) -> None:
    """Start the next attempt with the same command, from the newest whole checkpoint Jackline knows of.

    RUN is a name, a run's folder, or the place that was given as --mirror: then its records and newest checkpoint are
    brought here first. --step N goes back: also in a run that has finished. --skip-batches A:B takes batches out of
    an attached loop or a recipe, for good and on the same order: a bad batch after which the loss went up.
    --from and --from-scratch are for a script's own checkpoints: which one was loaded last, and whether it can be
    trusted, is told by `jackline status`.

    KEY=VALUE changes settings of a recipe from here on, also of a run that has finished: `jackline resume RUN
    max_steps=2000 lr=1e-4`. What that means for the learning rate is said before it starts.
    """
    from jackline.cli.view import showing

    run, settings = split_words(run, settings)

    skip = parse_skip(given["skip_batches"]) if given["skip_batches"] else None
    how = showing.How(given["detach"], is_detached_as_json(given), given["quiet"], is_trusted=given["trust"])
    is_new_start = given["from_scratch"]
    with_own = given["step"] is None
    folder, trusts = runs_folder(runs_dir), given["trust"]
    brought = (
        bring_here(run, folder, with_own=with_own, from_scratch=is_new_start, is_trusted=trusts) if run else None
    )
    found, mirror = brought or (find_run(run, folder), None)
    contents = read_run_file(found)
    step, is_back = given["step"], any(given[name] for name in ("step", "path", "from_scratch", "skip_batches"))
    state = read_status(found).state  # once: another resume may start it at any moment, and is watched then
    if not is_back and state in ("alive", "unwatched"):
        sys.exit(showing.watch_live(found, how))  # several may resume it at once: one starts it
    changes = bool(settings) or given["restart_schedule"]
    is_here = given["here"] or brought is not None
    check_resumable(found, contents, state, here=is_here, is_back=is_back or changes)
    if given["here"] and not given["copied"]:  # a copy's heartbeat is as old as the copy
        refuse_beating(found)
    confirm(found, is_trusted=trusts)
    contents = settle(found, contents)
    options = options_of(found, contents, mirror)
    refuse_skip(found, skip, step)
    if step is not None:
        go_back(found, options, step, mirror)
    take_out(found, skip, step)
    options = with_origin(found, options, given["path"], from_scratch=given["from_scratch"])
    if changes:
        change_settings(found, contents, options, settings, restarts=given["restart_schedule"])
    os.chdir(contents.cwd)
    sys.exit(showing.start_and_show(found, options, how))


def split_words(run: str | None, settings: tuple[str, ...]) -> tuple[str | None, tuple[str, ...]]:
    """RUN may be left out before settings: `jackline resume max_steps=2000`."""
    from jackline.cli.models.again import is_setting

    is_left_out = run is not None and is_setting(run) and not Path(run).exists()
    return (None, (str(run), *settings)) if is_left_out else (run, settings)


def change_settings(
    run: RunDir, contents: RunFile, options: SuperviseOptions, words: tuple[str, ...], *, restarts: bool
) -> None:
    """Record the settings of the next attempt, and say what they mean."""
    from jackline.cli.commands.run import change_run
    from jackline.cli.models import again
    from jackline.cli.view.showing import say

    step = again.newest_step(run)
    more = (f"schedule_start={step}",) if restarts else ()
    changed = again.change(run, contents, (*words, *more))
    again.refuse_done(run, changed, step)
    lines = again.receipt(contents.settings, changed.settings, step)
    change_run(run, changed.argv, changed.settings, options, changed.differences)
    for line in lines:
        say(line)


def take_out(run: RunDir, skip: Skip | None, step: str | None) -> None:
    """Write down which batches leave the run, if any."""
    from jackline.cli.view.showing import say

    if skip is not None:
        add_skip(run, skip, step)
        say(f"the batches {skip} are left out of run '{run.name}' from now on ({run.skipped_file.name})")


def refuse_skip(run: RunDir, skip: Skip | None, step: str | None) -> None:
    """Raise unless the batches of this run come through `run.steps()`, where they can be left out, and the weights it
    resumes from have not seen them."""
    if skip is not None:
        _refuse_seen(run, skip, step)
    if skip is not None and not run.session_files():
        raise UsageError(
            f"run '{run.name}' is not attached: only the batches of an attached loop or a recipe can be left out",
            hint="docs/guides/own-loop.md shows the four lines",
        )


def _refuse_seen(run: RunDir, skip: Skip, step: str | None) -> None:
    """A checkpoint that only the mirror has is not looked into."""
    from jackline.checkpoint.format.catalogue import list_left_behind, list_names
    from jackline.checkpoint.place import choose_place
    from jackline.checkpoint.rewind import parse_choice

    folder = choose_place(run).folder
    names = list_names(folder)
    choice = parse_choice(step) if step is not None else None
    known = [name for name in (*names, *list_left_behind(folder)) if choice is None or choice.means(name)]
    first, end = skip.first or 0, skip.end or 0
    seen = batches_in(folder / str(known[0])) if known else None
    if seen is None or first >= seen:
        return
    counts = ((name, batches_in(folder / str(name))) for name in names)
    earlier = next((name for name, count in counts if count is not None and count <= first), None)
    hints = [f"`--step {earlier.step}` goes back to before them"] if earlier is not None else []
    hints += [f"`--skip-batches {seen}:{end}` leaves out the rest"] if end > seen else []
    raise UsageError(
        f"{known[0]} was trained on the batches 0 to {seen - 1}: {skip} cannot be taken out of its weights",
        hint=", ".join(hints) or f"no checkpoint of run '{run.name}' is from before batch {first}",
    )


def options_of(run: RunDir, contents: RunFile, mirror: str | None = None) -> SuperviseOptions:
    """The options it was started with; those of `jackline run` for a run that began without a supervisor. Passwords
    come from the user's state folder, or from the address of the `mirror` that was typed."""
    from jackline.cli.commands.run import RESTARTS_ATTACHED
    from jackline.supervisor.options import SuperviseOptions

    if contents.options:
        told = {**(entry_of(run).options or {}), **({"mirror": mirror} if mirror is not None else {})}
        return SuperviseOptions.from_json(contents.options).with_secrets(told)
    return SuperviseOptions(restart_attached=RESTARTS_ATTACHED, on_stuck_attached="restart")


def settle(run: RunDir, contents: RunFile) -> RunFile:
    """Where the command can run now: its folder may have been moved or copied to another machine, and its interpreter
    may be another one there. What changes is reported and recorded."""
    from jackline.cli.view.showing import say

    argv, cwd, settings = list(contents.argv), contents.cwd, dict(contents.settings)
    if argv == ["notebook"]:
        raise CannotResume(
            f"run '{run.name}' was started in a notebook, so there is no command to start again",
            hint="run its cell again: jackline.attach resumes it",
        )
    if not Path(cwd).is_dir():
        cwd, old = _new_folder(run, contents), contents.cwd
        argv = [cwd + word.removeprefix(old) if word.startswith(f"{old}/") else word for word in argv]
        if argv[1:3] == ["-m", "jackline.trainer"] and len(argv) > 3:
            argv[3] = str(run.path)
        say(f"run '{run.name}' ran in {old}, which is not here: it continues in {cwd}")
    if argv and shutil.which(argv[0]) is None and Path(argv[0]).name.startswith(("python", "pypy")):
        say(f"there is no {argv[0]} here: it continues with {sys.executable}")
        argv[0] = sys.executable
    if (argv, cwd) == (list(contents.argv), contents.cwd):
        return contents
    settings |= {"argv": argv, "cwd": cwd} if "argv" in settings else {"cwd": cwd}
    relocate(run, argv, plain_settings(settings))
    return read_run_file(run)


def _new_folder(run: RunDir, contents: RunFile) -> str:
    """The folder that has the run's script now: the current one, or the one that the run's folder is in."""
    script = script_of(plain_settings(contents.settings))
    places = [Path.cwd(), run.path.parent.parent]
    is_file = bool(script) and not script.startswith("-m ")
    found = [place for place in places if not is_file or (place / script).is_file()]
    if found and (is_file or run.path.is_relative_to(found[0])):
        return str(found[0])
    what = f"{script}" if is_file else "its files"
    raise CannotResume(
        f"run '{run.name}' ran in {contents.cwd}, which is not here",
        hint=f"cd to the folder that has {what} now, then: jackline resume {run.path}",
    )


def with_origin(run: RunDir, options: SuperviseOptions, path: str | None, *, from_scratch: bool) -> SuperviseOptions:
    """Add what the user chose for the next attempt.

    A session's own checkpoints are gone back to with --step, so --from-scratch is for a session without any.
    """
    if path is None and not from_scratch:
        return options
    if path is not None and from_scratch:
        raise UsageError("--from and --from-scratch exclude each other")
    if options.checkpoints is None and not (from_scratch and has_only_begun(run)):
        word = "--from-scratch" if from_scratch else "--from"
        raise UsageError(
            f"{word} is for a script's own checkpoints; run '{run.name}' was started without --checkpoints",
            hint="Jackline's own checkpoints: jackline resume --step N; from the beginning: jackline run --new",
        )
    full = str(Path(path).expanduser().absolute()) if path is not None else None
    return replace(options, start_from=full, from_scratch=from_scratch)


def has_only_begun(run: RunDir) -> bool:
    """Whether its script is attached and has no checkpoint later than step 0."""
    from jackline.checkpoint.format.manifest import parse_name
    from jackline.supervisor.foreign.seen import own_newest

    newest = own_newest(run)
    name = parse_name(Path(newest).name) if newest is not None else None
    return bool(run.session_files()) and (name is None or name.step == 0)


def go_back(run: RunDir, options: SuperviseOptions, step: str, mirror: str | None) -> None:
    """Go back before the attempt starts; raises when that checkpoint cannot be resumed from."""
    from jackline.checkpoint import rewind
    from jackline.cli.view.showing import say

    if options.checkpoints is not None:
        raise UsageError(
            f"--step is for Jackline's own checkpoints; run '{run.name}' writes its own ({options.checkpoints})",
            hint=f"name the file or folder: jackline resume {run.name} --from PATH",
        )
    rewind.go_back(run, step, mirror=mirror, say=say)


def bring_here(
    word: str, folder: Path, *, with_own: bool = True, from_scratch: bool = False, is_trusted: bool = False
) -> tuple[RunDir, str] | None:
    """Download a run from a mirror; return it with the mirror's location. None when `word` does not name a mirror.
    A run that this user did not make is shown first, and downloaded when it is accepted."""
    from jackline.checkpoint.mirror.stories import find_in_mirror
    from jackline.cli.view.showing import say
    from jackline.supervisor.foreign.fetch import fetch_stranger

    if (folder / word / "run.json").exists() or not is_mirror(word):
        return None

    def ask(contents: RunFile) -> None:
        accept(contents, contents.name, "it comes from a mirror and was not made here by you", is_trusted=is_trusted)

    fetched = fetch_stranger(word, folder, Path.cwd(), with_own=with_own, from_scratch=from_scratch, accept=ask)
    register(fetched.run, vouched=True)
    for text in fetched.said:
        say(text)
    return fetched.run, find_in_mirror(word)[0]


def refuse_beating(run: RunDir) -> None:
    """Raise if the run seems to be alive on its other machine. A lock does not tell: many shared file systems have
    none, or one for each machine."""
    status = read_status(run)
    known = status.child or status.supervisor
    if status.state != "elsewhere" or known is None:
        return
    before = last_beat_s(run)
    if before is None or time.time() - before > BEAT_IS_OLD_S:
        return
    until_s = time.monotonic() + BEATS_WITHIN_S
    is_fresh = abs(time.time() - before) < BEAT_IS_FRESH_S
    while not is_fresh and time.monotonic() < until_s:  # clocks of two machines may differ: does it still beat?
        time.sleep(0.2)
        is_fresh = last_beat_s(run) != before
    if is_fresh:
        age = format_duration(max(0.0, time.time() - (last_beat_s(run) or before)))
        raise UsageError(
            f"run '{run.name}' is alive on '{known.host}' (process {known.pid}): its last heartbeat is {age} old",
            hint=f"stop it there: jackline stop {run.name}; if it has just been killed, try again in "
            f"{format_duration(BEAT_IS_FRESH_S)}",
        )


def _after_the_end(run: RunDir, contents: RunFile) -> str:
    if list(contents.argv[1:3]) == ["-m", "jackline.trainer"]:
        return "more steps: jackline resume RUN max_steps=N; or go back: jackline resume --step N"
    back = "--from CHECKPOINT" if run.foreign_file.exists() else "--step N"
    return f"start it again: jackline run --new -- ...; or go back: jackline resume {back}"


def check_resumable(run: RunDir, contents: RunFile, state: str, *, here: bool, is_back: bool = False) -> None:
    if state in ("alive", "unwatched"):
        raise UsageError(f"run '{run.name}' is alive", hint=f"jackline watch {run.name}")
    if state == "finished" and not is_back:
        raise UsageError(f"run '{run.name}' has finished", hint=_after_the_end(run, contents))
    if state == "elsewhere" and not here:
        raise UsageError(
            f"run '{run.name}' was last seen on '{contents.host}'; whether it lives cannot be told from here",
            hint=f"once you know that it ended there: jackline resume {run.name} --here",
        )
