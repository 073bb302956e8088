"""`python -m jackline.trainer RUN_DIR RECIPE [settings]`: what `jackline train` supervises.

Owns the first words, before anything heavy is imported, and the exit codes. Three more forms, for the command line,
which may import neither torch nor a person's file: `--resolve RECIPE [settings]`, `--show RECIPE [settings]` and
`--help-settings RECIPE`.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import NoReturn

from jackline.errors import EXIT_DONE, CannotResume, JacklineError, UsageError
from jackline.extras import explained
from jackline.machine.host import find_notebook
from jackline.pipes import drop_output
from jackline.rundir.intent import write_intent
from jackline.rundir.layout import RunDir
from jackline.rundir.run_file import read_run_file
from jackline.trainer.config import A_TENTH, Resolved, TrainConfig, identity, resolve_words
from jackline.trainer.recipe import load_recipe
from jackline.trainer.report.console import Console
from jackline.trainer.startup.process import (
    compile_ahead,
    delay_compiler,
    drop_unready_workers,
    keep_bytecode,
    leave,
    without_collecting,
)

_SHORT_LIVED = ("colab", "kaggle")


def main(argv: Sequence[str]) -> int:
    try:
        if argv[0] in _ANSWERS:
            return _answer(argv[0], argv[1], argv[2:])
        with explained("this training"):
            return _train(RunDir(Path(argv[0])), argv[1], argv[2:])
    except JacklineError as error:
        print(error, file=sys.stderr, flush=True)
        if isinstance(error, UsageError) and not error.hint:
            target = argv[1] if len(argv) > 1 else "RECIPE"
            print(
                f"hint: `jackline train {target} --help-settings` lists what may be set", file=sys.stderr, flush=True
            )
        return error.exit_code


def _train(run: RunDir, target: str, words: Sequence[str]) -> int:
    with Console() as console:
        typed = os.environ.get("JACKLINE_TYPED") or shlex.join(["train", target, *words])
        console.say(f"$ jackline {typed}")
        console.say(f"process {os.getpid()}, Python {platform.python_version()}, run {run.path}")
        console.now("reading the settings")
        resolved = resolve_words(target, words)
        _check_unchanged(run, resolved.config)
        for line in first_screen(resolved.config, os.environ):
            console.say(line)
        if resolved.origins.get("warmup_steps") == A_TENTH:
            num_steps = resolved.config.warmup_steps
            console.say(f"warm-up of {num_steps:,} steps, {A_TENTH}: the recipe's own is longer than the training")
        # Threads that spin while they wait take the cores from the writer, the tokeniser and each other: on two busy
        # cores a step of the nano model took 1.55 s with spinning and 0.34 s without. Read when torch is loaded.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        if folder := keep_bytecode():
            console.say(f"torch came without bytecode, and none may be written beside it: kept in {folder}")
            compile_ahead()
        console.now("getting ready")
        try:
            _train_resolved(resolved, run, console)
        except JacklineError as error:
            _forbid_restart(run, error.message)
            raise
    return EXIT_DONE


def _train_resolved(resolved: Resolved, run: RunDir, console: Console) -> None:
    from jackline.data.build.supply import end_begun
    from jackline.trainer.corpus import begin_corpus, settle_split

    resolved = settle_split(resolved, run)
    try:
        begin_corpus(resolved.config)
        with console.phase("start", "importing torch, usually 2 to 20 s"), without_collecting():
            from jackline.trainer.loop import train
            from jackline.trainer.startup.device import usable_device
            from jackline.trainer.startup.parallel import join_ranks
            from jackline.trainer.startup.shared_code import give
            from jackline.trainer.startup.sizing import settle_size
        delay_compiler()
        device = usable_device(resolved.config)
        if words := join_ranks(resolved.config, device):
            console.say(words)
        resolved = settle_size(resolved, run, device, console)
        try:
            train(resolved, run, console)
        finally:
            give()  # what was compiled since the rehearsal, for the validation say
    finally:
        end_begun()


def _forbid_restart(run: RunDir, why: str) -> None:
    """What is wrong before the first checkpoint (data that cannot be loaded, say) is for a person to put right."""
    number = os.environ.get("JACKLINE_ATTEMPT", "")
    if number.isdigit() and not any(run.checkpoints.glob("step-*")):
        write_intent(run.attempt(int(number)), restart=False, why=why)


def _check_unchanged(run: RunDir, config: TrainConfig) -> None:
    """A restart must not continue with other settings because a file was edited meanwhile."""
    if not run.has_run_file:
        return
    before = read_run_file(run).settings
    now = json.loads(json.dumps(identity(config)))
    if before.get("recipe") != now["recipe"] or "seq_len" not in before:
        return  # started by hand, not by `jackline train`
    changed = [
        f"{name}: {before[name]} -> {now[name]}" for name in now if name in before and before[name] != now[name]
    ]
    if changed:
        raise CannotResume(
            f"the settings of run '{run.name}' have changed since it was started",
            detail=tuple(changed),
            hint="`jackline train` with --continue-with-changes continues with them, with --new starts another run",
        )


def first_screen(config: TrainConfig, environ: Mapping[str, str]) -> list[str]:
    """What a person must know before it starts."""
    lines = list(config.unread_environment(environ))
    if config.quick:
        data = f"; data: {config.data}" if config.data else ""
        lines.append(f"quick: tiny settings, to see that everything works{data}")
    place = find_notebook(environ)
    if place in _SHORT_LIVED and not config.mirror:
        lines.append(
            f"this is {place.capitalize()}: without --mirror everything here is lost when the machine is taken away; "
            "--mirror PATH|URL keeps checkpoints elsewhere (a mounted Drive, say)"
        )
    return lines


def _answer(form: str, target: str, words: Sequence[str]) -> int:
    """One of the forms that print and start nothing."""
    try:
        print(_ANSWERS[form](target, words), flush=True)
    except BrokenPipeError:
        drop_output()
    return EXIT_DONE


def _resolved_json(target: str, words: Sequence[str]) -> str:
    resolved = resolve_words(target, words)
    config = resolved.config
    found = {"config": asdict(config), "identity": identity(config), "is_high_good": config.IS_HIGH_GOOD}
    return json.dumps(found)


def _shown(target: str, words: Sequence[str]) -> str:
    resolved = resolve_words(target, words)
    from jackline.trainer.report.settings_text import settings_text

    return settings_text(resolved)


def _explained(target: str, words: Sequence[str]) -> str:
    if words:
        raise UsageError(
            "--help-settings lists the recipe's own settings and takes none",
            hint=f"jackline train {target} --show {shlex.join(words)} prints the values that follow from these",
        )
    from jackline.trainer.report.settings_text import help_text

    return help_text(target, load_recipe(target, TrainConfig))


_ANSWERS = {"--resolve": _resolved_json, "--show": _shown, "--help-settings": _explained}


def run_and_leave(argv: Sequence[str]) -> NoReturn:
    """An uncaught error takes Python's own way out, with everything that hooks into that."""
    try:
        code = main(argv)
    except SystemExit as end:
        if not isinstance(end.code, int):
            raise
        code = end.code
    finally:
        drop_unready_workers()
    if argv[0] in _ANSWERS:
        with contextlib.suppress(OSError):
            os.dup2(2, 1)  # the answer is the last line: what a person's recipe prints at the exit is none of it
    leave(code)


if __name__ == "__main__":
    run_and_leave(sys.argv[1:])
