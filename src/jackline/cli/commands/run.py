"""`jackline run -- CMD`: decide which run is meant, start a supervisor, show the run.

Owns the options, the run's identity on disk and what is printed. The supervisor does the work.
"""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from jackline.cli.options import DURATION, SOME_TIME, detach_options, quiet_after, quiet_option, stuck_after
from jackline.cli.programs.started import is_detached_as_json, print_started
from jackline.cli.trusting import refuse_links
from jackline.diagnosis.preflight.target import spelling_hint
from jackline.errors import EXIT_DONE, EXIT_USAGE, UsageError
from jackline.extras import require
from jackline.rundir.access.trust import judge
from jackline.rundir.command import plain_command, plain_settings, script_of
from jackline.rundir.create import claim_run, find_existing
from jackline.rundir.find import runs_folder
from jackline.rundir.identity import (
    AlreadyFinished,
    Clash,
    Create,
    Elsewhere,
    Resume,
    Watch,
    compare_settings,
    decide_start,
    default_name,
    numbered_name,
)
from jackline.rundir.kin import Same, find_same, kin_lines, relocate
from jackline.rundir.layout import RunDir
from jackline.rundir.run_file import RunFile, check_name, describe_run, read_run_file, with_gpus, write_run_file
from jackline.rundir.status import read_status
from jackline.supervisor.foreign.find import check_resume_arg, preset
from jackline.supervisor.options import SuperviseOptions
from jackline.units import parse_bytes

RESTARTS_WITH_CHECKPOINTS = 3
RESTARTS_ATTACHED = 10  # while checkpoints advance: an attached script resumes exactly where it was


@click.command(
    context_settings={"allow_interspersed_args": False},
    short_help="Supervise any command.",
)
@click.option("--name", help="Name of the run; default: the script's name and a hash of the command.")
@click.option("--new", "is_new", is_flag=True, help="A new run, even if this command has one already.")
@click.option(
    "--continue-with-changes", "accepts_changes", is_flag=True, help="Continue although the command changed."
)
@click.option("--runs-dir", type=click.Path(), help="Where runs are kept; default: $JACKLINE_RUNS or ./runs.")
@detach_options
@quiet_option
@click.option(
    "--restart",
    type=click.IntRange(min=0),
    help="Maximum automatic restarts; default: 0, 3 with --checkpoints, 10 with attach.",
)
@click.option(
    "--on-stuck",
    type=click.Choice(["report", "restart", "stop"]),
    help="What to do when nothing moves any more; default: report, restart with attach.",
)
@click.option("--checkpoints", metavar="GLOB", help="Your script's own checkpoints, files or folders.")
@click.option("--resume-arg", metavar="WORDS", help='Added when it resumes: "--resume {checkpoint}".')
@click.option("--resume-from", metavar="hf|lightning", help="Both of the above for a known trainer.")
@click.option("--mirror", metavar="PATH|URL", help="Copy the run's records (and checkpoints) there as it goes.")
@click.option("--disk-budget", metavar="SIZE", help="Most disk space for the run's own folder: 20G.")
@click.option(
    "--mirror-patience",
    type=DURATION,
    default="10m",
    show_default=True,
    help="Wait this long for the last upload while no byte moves; then end, to be resumed.",
)
@click.option("--time-limit", type=SOME_TIME, help="End it politely after this long: 90m, 11h30m.")
@click.option("--grace", type=DURATION, default="30s", show_default=True, help="How long a polite end may take.")
@click.option("--on-event", metavar="CMD", help="Run at stuck, crashed, done, memory; $JACKLINE_EVENT says which.")
@click.option("--when-done", metavar="CMD", help="Run when it is over, however it ended.")
@click.option("--tty", is_flag=True, help="Give it a terminal: for prompts, debuggers, C programs that buffer.")
@click.option("--split-streams", is_flag=True, help="Keep stderr apart from stdout; their order is lost.")
@click.option("--all-ranks", is_flag=True, help="Show the output of every rank, not only of the first.")
@quiet_after
@stuck_after
@click.option(
    "--rescue/--no-rescue", default=None, help="Save the state of a script that does not, at its end; on by default."
)
@click.option("--rescue-every", type=SOME_TIME, help="Also this often in between: 10m.")
@click.option("--no-inject", is_flag=True, help="Leave the Python interpreter alone.")
@click.argument("argv", nargs=-1, type=click.UNPROCESSED, metavar="-- COMMAND [ARGS]...")
def command(argv: tuple[str, ...], **given: Any) -> None:
    """Supervise any command, without changing it.

    \b
    jackline run -- python train.py --lr 3e-4
    jackline run --detach -- bash launch.sh
    jackline run --resume-from hf -- python run_clm.py --output_dir out

    Running the same command again watches it if it is alive, and continues it if it was stopped or crashed.
    """
    argv = argv[1:] if argv[:1] == ("--",) else argv
    options = read_options(given)
    sys.exit(run_command(list(argv), options, given))


def run_command(argv: list[str], options: SuperviseOptions, given: dict[str, Any]) -> int:
    check_command(argv)
    settings = plain_settings({"argv": list(argv), "cwd": str(working_folder())})
    return start_run(default_name(argv, settings), settings, lambda run: argv, options, given)


def start_run(
    name: str,
    settings: dict[str, Any],
    argv_of: Callable[[Path], list[str]],
    options: SuperviseOptions,
    given: dict[str, Any],
) -> int:
    """Apply the rules of identity and start, watch or resume. `settings` decide what counts as the same run,
    `argv_of(folder)` is the command for the run's folder, `name` is the default name."""
    from jackline.cli.view import showing

    how = showing.How(given["detach"], is_detached_as_json(given), given["quiet"])
    folder = runs_folder(given["runs_dir"])
    same = _meant(folder, name, settings, given)
    wanted, existing = same.run.name, find_existing(same.run)
    if same.moved_from is not None and existing is not None:
        existing = replace(existing, settings=settings)
    taken = [path.name for path in folder.iterdir()] if given["is_new"] and folder.is_dir() else []
    decision = decide_start(
        settings,
        existing,
        name=numbered_name(wanted, taken),
        is_new=given["is_new"],
        accepts_changes=given["accepts_changes"],
    )
    match decision:
        case Create(chosen):
            return _create(RunDir(folder / chosen), name, settings, argv_of, options, given)
        case Resume(chosen, differences):
            refuse_links(RunDir(folder / chosen))
            argv = argv_of(folder / chosen)
            if same.moved_from is not None:
                showing.say(f"run '{chosen}' ran in {same.moved_from}, which is gone: it continues here")
                relocate(same.run, argv, settings)
            change_run(RunDir(folder / chosen), argv, settings, options, differences)
            return showing.start_and_show(RunDir(folder / chosen), options, how)
        case Watch(name):
            return showing.watch_live(RunDir(folder / name), how)
        case AlreadyFinished(name) if how.as_json:
            print_started(RunDir(folder / name), attempt=read_status(RunDir(folder / name)).attempt, state="finished")
            return EXIT_USAGE
        case AlreadyFinished(name):
            showing.say(f"this command has finished already, as run '{name}' in {folder / name}")
            showing.say("hint: --new starts it again as a new run; `jackline logs` shows what it printed")
            return EXIT_USAGE
        case Clash() as clash:
            raise clash_error(clash)
        case Elsewhere(name):
            raise UsageError(
                f"run '{name}' was last seen on another machine; whether it lives cannot be told from here",
                hint=f"once you know that it ended there: jackline resume {name} --here, or start anew with --new",
            )
    return EXIT_DONE


def _create(
    run: RunDir,
    name: str,
    settings: dict[str, Any],
    argv_of: Callable[[Path], list[str]],
    options: SuperviseOptions,
    given: dict[str, Any],
) -> int:
    """Start a new run. `name` is the default name, for another try when another start was faster."""
    from jackline.cli.view import showing

    how = showing.How(given["detach"], is_detached_as_json(given), given["quiet"])
    argv = argv_of(run.path)
    if given["name"] is None and not given["is_new"]:
        for line in kin_lines(run.path.parent, run.name, settings, lambda other: _continuing(other, argv, options)):
            showing.say(line)
    contents = describe_here(run.name, argv, settings, options)
    claim = claim_run(run, contents, hint="choose another place with --runs-dir PATH")
    if claim is not None:
        return showing.start_and_show(run, options, how, claim=claim)
    # Another start was faster. It may be the same command, or another command with the same name.
    if given["is_new"] or is_another_command(run, settings):
        return start_run(name, settings, argv_of, options, given)
    return showing.watch_live(run, how)


def _meant(folder: Path, name: str, settings: dict[str, Any], given: dict[str, Any]) -> Same:
    """The named run; without a name, the run of this command, also in another spelling or in a moved folder."""
    if given["name"] is None:
        return Same(RunDir(folder / name)) if given["is_new"] else find_same(folder, name, settings)
    run = RunDir(folder / check_name(given["name"]))
    return find_same(folder, run.name, settings) if run.path.exists() else Same(run)


def _continuing(name: str, argv: list[str], options: SuperviseOptions) -> str:
    """The command that continues run `name` with the settings of this start."""
    if options.typed:
        return f"jackline {options.typed} --name {name} --continue-with-changes"
    return f"jackline run --name {name} --continue-with-changes -- {shlex.join(argv)}"


def working_folder() -> Path:
    try:
        return Path.cwd()
    except FileNotFoundError:
        raise UsageError("the folder you stand in is gone", hint="cd to one that exists") from None


def check_command(argv: list[str]) -> None:
    """Raise for a command that cannot start, before it has a run."""
    if not argv:
        raise UsageError(
            "there is no command to run", hint="write it after two dashes: jackline run -- python train.py"
        )
    program = argv[0]
    if shutil.which(program) is None:
        path = Path(program)
        if path.is_file():
            detail = f"'{program}' is a file that may not be executed"
            raise UsageError(
                f"cannot run '{program}'", detail=detail, hint=f"python {program}, or chmod +x {program}"
            )
        raise UsageError(f"there is no command '{program}'", hint=spelling_hint(program))
    check_script(argv, working_folder())


def check_script(argv: list[str], folder: Path) -> None:
    """`python missing.py` would leave a dead run behind."""
    script = script_of({"argv": plain_command(argv, str(folder))})
    if not script or script.startswith("-m ") or (folder / script).exists():
        return
    from difflib import get_close_matches

    place = (folder / script).parent
    names = [path.name for path in place.glob(f"*{Path(script).suffix}")] if place.is_dir() else []
    near = get_close_matches(Path(script).name, names, n=1)
    hint = f"did you mean '{Path(script).with_name(near[0])}'?" if near else f"the command would start in {folder}"
    raise UsageError(f"there is no file '{script}'", hint=hint)


def wants_rescue(given: dict[str, Any], *, saves_itself: bool) -> bool:
    """By default where it can work and the script is not known to save by itself."""
    is_asked = given["rescue"] or given["rescue_every"]
    if is_asked and given["no_inject"]:
        raise UsageError("a rescue works from inside the process", hint="leave out --no-inject, or --rescue")
    if given["rescue"] is False and given["rescue_every"]:
        raise UsageError("--rescue-every asks for what --no-rescue forbids", hint="leave one of them out")
    if given["rescue"] is None and not is_asked:
        return not given["no_inject"] and not saves_itself
    return bool(is_asked)


def read_options(given: dict[str, Any]) -> SuperviseOptions:
    checkpoints, resume_arg = given["checkpoints"], given["resume_arg"]
    if given["resume_from"]:
        chosen = preset(given["resume_from"])
        checkpoints = checkpoints or chosen.checkpoints
        resume_arg = resume_arg or chosen.resume_arg
    if resume_arg:
        check_resume_arg(resume_arg)
    if resume_arg and not checkpoints:
        raise UsageError("--resume-arg needs --checkpoints", hint="--checkpoints 'out/checkpoint-*'")
    rescues = wants_rescue(given, saves_itself=bool(checkpoints))
    check_mirror(given["mirror"])
    restart = given["restart"]
    if restart is None:
        restart = RESTARTS_WITH_CHECKPOINTS if checkpoints else 0
    size = shutil.get_terminal_size()
    is_terminal = bool(sys.stdout and sys.stdout.isatty())
    return SuperviseOptions(
        restart=restart,
        on_stuck=given["on_stuck"] or "report",
        restart_attached=RESTARTS_ATTACHED if given["restart"] is None else None,
        on_stuck_attached="restart" if given["on_stuck"] is None else None,
        on_stuck_ranks="restart" if given["on_stuck"] is None else None,
        resume_arg=resume_arg,
        checkpoints=checkpoints,
        time_limit_s=given["time_limit"],
        grace_s=given["grace"],
        on_event=given["on_event"],
        when_done=given["when_done"],
        tty=given["tty"],
        split_streams=given["split_streams"],
        all_ranks=given["all_ranks"],
        quiet_after_s=given["quiet_after"],
        stuck_after_s=given["stuck_after"],
        inject=not given["no_inject"],
        rescue=rescues,
        rescue_every_s=given["rescue_every"],
        mirror=full_place(given["mirror"]),
        disk_budget=parse_bytes(given["disk_budget"]) if given["disk_budget"] else None,
        mirror_patience_s=given["mirror_patience"],
        is_terminal=is_terminal and not given["detach"],
        is_live=is_terminal or given["detach"],
        columns=max(20, size.columns),
        rows=max(5, size.lines),
    )


def check_mirror(place: str | None) -> None:
    """Fail now for a mirror that cannot work, not after hours."""
    if place is None:
        return
    if "://" in place:
        require(f"the mirror {place}", "train", ("fsspec",))
        return
    try:
        Path(place).expanduser().mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot use {place} as a mirror: {error.strerror}", hint="name a folder or a URL") from None


def full_place(place: str | None) -> str | None:
    """Make a path absolute, so that it means the same in every process, whatever its current folder."""
    return place if place is None or "://" in place else str(Path(place).expanduser().absolute())


def describe_here(name: str, argv: list[str], settings: dict[str, Any], options: SuperviseOptions) -> RunFile:
    from jackline.machine.gpu.watch import gpu_names, gpu_sizes

    contents = describe_run(
        name, kind="run", argv=argv, settings=settings, options=options.to_stored(), cwd=Path(settings["cwd"])
    )
    return with_gpus(contents, gpu_names(), gpu_sizes())


def is_another_command(run: RunDir, settings: dict[str, Any]) -> bool:
    existing = find_existing(run)
    return existing is None or bool(compare_settings(existing.settings, settings))


def change_run(
    run: RunDir,
    argv: list[str],
    settings: dict[str, Any],
    options: SuperviseOptions,
    differences: tuple[str, ...],
) -> None:
    """For --continue-with-changes: the run continues with another command, and run.json keeps the earlier one.
    Options that are not part of its identity (how it is watched) change without a message."""
    before = read_run_file(run)
    contents = replace(before, options=options.to_stored())
    # A run that began without a supervisor has none; those of somebody else are replaced by what was typed.
    is_old = before.options and judge(run).is_ours
    if not differences:
        if list(contents.argv) != argv or not is_old:
            write_run_file(run, replace(contents, argv=tuple(argv)))
        return
    former = [*contents.former, {"argv": list(contents.argv), "settings": contents.settings}]
    write_run_file(run, replace(contents, argv=tuple(argv), settings=settings, cwd=settings["cwd"], former=former))
    for line in differences:
        print(f"[jackline] continuing with a change: {line}", file=sys.stderr, flush=True)


def clash_error(clash: Clash) -> UsageError:
    if clash.is_alive:
        return UsageError(
            f"run '{clash.name}' is alive with another command",
            detail=clash.differences,
            hint=f"another --name, --new, or `jackline stop {clash.name}` first",
        )
    return UsageError(
        f"run '{clash.name}' was started with another command",
        detail=clash.differences,
        hint="--new starts another run, --continue-with-changes continues this one",
    )
