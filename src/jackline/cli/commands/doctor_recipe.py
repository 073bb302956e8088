"""The recipe part of `jackline doctor`: starts the child that may import torch, and passes its findings on.

Owns telling a recipe from a command, the child process, and what is printed when it crashes. The checks are in
trainer/doctor/examine.py; the report around them is in doctor.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from jackline.diagnosis.preflight.check import Check
from jackline.errors import EXIT_DONE, UsageError
from jackline.immutable import immutable
from jackline.trainer.recipe import RECIPES

EXIT_INTERRUPTED = 130
_OWN_FILE = re.compile(r".+\.py(:\w+)?")


@immutable
class RecipeRequest:
    """The request: the recipe, its settings, and our own options that were among them."""

    target: str
    words: tuple[str, ...]
    as_json: bool = False
    runs_dir: str | None = None


def read_recipe(argv: tuple[str, ...], *, is_command: bool) -> RecipeRequest | None:
    """None for a command. `is_command`: the words followed `--`, so they are a command whatever its name."""
    if is_command or not argv:
        return None
    first = argv[0]
    if first in RECIPES or _OWN_FILE.fullmatch(first):
        return _split(first, argv[1:])
    if shutil.which(first) is None:
        near = get_close_matches(first, RECIPES, n=1)
        raise UsageError(
            f"there is no recipe and no command '{first}'",
            detail=("known recipes: " + ", ".join(RECIPES),),
            hint=f"did you mean '{near[0]}'?" if near else "a command: jackline doctor -- python train.py",
        )
    return None


def _split(target: str, words: tuple[str, ...]) -> RecipeRequest:
    """Options may also follow the recipe, as people type them."""
    rest, as_json, runs_dir = list(words), False, None
    kept: list[str] = []
    while rest:
        word = rest.pop(0)
        name, equals, path = word.partition("=")
        if word == "--json":
            as_json = True
        elif name in ("--runs-dir", "--runs_dir"):
            if not equals and not rest:
                raise UsageError("--runs-dir needs a path")
            runs_dir = path if equals else rest.pop(0)
        else:
            kept.append(word)
    return RecipeRequest(target, tuple(kept), as_json, runs_dir)


def check_recipe(request: RecipeRequest, runs_folder: Path, show: Callable[[Check], None]) -> list[Check]:
    """All checks of the recipe, each shown as soon as it is made. Exits with 2 when the settings are wrong."""
    reading, writing = os.pipe()
    asked = {
        "target": request.target,
        "words": list(request.words),
        "runs_folder": str(runs_folder),
        "report_fd": writing,
    }
    argv = [sys.executable, "-m", "jackline.trainer.doctor.examine", json.dumps(asked)]
    checks: list[Check] = []
    # The child's messages go to stderr with ours, so that stdout holds only the report.
    with subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=_stderr_fd(), pass_fds=(writing,)) as child:
        os.close(writing)
        # Ctrl-C reaches the child too; what it had found before is still shown.
        with os.fdopen(reading) as report, contextlib.suppress(KeyboardInterrupt):
            for line in report:
                check = Check(**json.loads(line))
                checks.append(check)
                show(check)
        code = _wait(child)
    if code in (EXIT_INTERRUPTED, -signal.SIGINT):
        sys.exit(EXIT_INTERRUPTED)
    if code not in (EXIT_DONE, 1) and code > 0 and not checks:
        sys.exit(code)  # the settings are wrong, and the child has printed why
    if code != EXIT_DONE:
        check = Check("check", "problem", f"the check itself ended with {_ending(code)}", _ending_hint(code))
        checks.append(check)
        show(check)
    return checks


def _stderr_fd() -> int:
    try:
        return sys.stderr.fileno()
    except (OSError, AttributeError, ValueError):
        return 2


def _wait(child: subprocess.Popen[Any]) -> int:
    while True:
        try:
            return child.wait()
        except KeyboardInterrupt:
            continue


def _ending(code: int) -> str:
    if code >= 0:
        return f"exit code {code}; its last words are above"
    try:
        return f"signal {-code} ({signal.Signals(-code).name})"
    except ValueError:
        return f"signal {-code}"


def _ending_hint(code: int) -> str:
    if code == -signal.SIGKILL:
        return "very likely out of memory: a smaller batch_size or model"
    return ""


def start_recipe_line(request: RecipeRequest) -> str:
    place = ["--runs-dir", request.runs_dir] if request.runs_dir else []
    return f"start it with: jackline train {shlex.join([request.target, *request.words, *place])}"
