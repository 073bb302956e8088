"""Runs `jackline ...` from a cell: prints lines as they come, and shows an error as our text without a traceback.

Owns the child process of one command and how our errors look in a cell. Does not own what a command does.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from jackline.errors import EXIT_DONE, EXIT_USAGE, JacklineError, UsageError

P = ParamSpec("P")
T = TypeVar("T")

JACKLINE = (sys.executable, "-m", "jackline")
_DETAIL, _HINT, _ERROR = "       ", "hint: ", "error: "
# A kernel sets these for its own cells. A run's output is a file, where colour codes are unreadable.
_CELL_COLOURS = ("FORCE_COLOR", "CLICOLOR_FORCE")


class Ended(JacklineError):
    """A command failed without one of our errors; its output is printed above."""


def say(text: str) -> None:
    """Print to stdout, because notebooks show stderr in red."""
    print(f"[jackline] {text}", flush=True)


def without_traceback(function: Callable[P, T]) -> Callable[P, T]:
    """In IPython, one of our errors raised by `function` is shown as its text; elsewhere it is raised as usual."""

    @wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except JacklineError as error:
            lines = str(error).splitlines()
            setattr(error, "_render_traceback_", lambda: lines)  # noqa: B010 - what IPython shows instead of frames
            raise

    return called


def call(words: Sequence[str]) -> None:
    """Run `jackline WORDS` to its end and print its output. Raises its error, or Ended when it printed none."""
    held: list[str] = []
    with start(words) as child:
        assert child.stdout is not None
        try:
            for line in child.stdout:
                text = line.rstrip("\n")
                if belongs_to_error(text, held):
                    held.append(text)
                else:
                    show([*held, text])
                    held.clear()
            code = child.wait()
        except KeyboardInterrupt:
            # A front end may interrupt only the kernel; the command must not continue after its cell was stopped.
            child.send_signal(signal.SIGINT)
            raise
    if code != EXIT_DONE:
        raise read_error(held, code, words)
    show(held)


def start(words: Sequence[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*JACKLINE, *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        encoding="utf-8",
        errors="replace",
        env=environment(os.environ),
    )


def environment(environ: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name not in _CELL_COLOURS}


def show(lines: Sequence[str]) -> None:
    for line in lines:
        print(line, flush=True)


def belongs_to_error(line: str, held: Sequence[str]) -> bool:
    """Whether it is the first line of an error, or one that follows it."""
    return line.startswith(_ERROR) or (bool(held) and line.startswith((_DETAIL, _HINT)))


def read_error(lines: Sequence[str], code: int, words: Sequence[str]) -> JacklineError:
    """The error with the text `lines`, so that it can be raised here as in the command."""
    kind = UsageError if code == EXIT_USAGE else JacklineError
    message = "\n".join(line.removeprefix(_ERROR) for line in lines if line.startswith(_ERROR))
    detail = tuple(line.removeprefix(_DETAIL) for line in lines if line.startswith(_DETAIL))
    hint = "\n".join(line.removeprefix(_HINT) for line in lines if line.startswith(_HINT))
    if not message:
        return Ended(f"`jackline {words[0]}` ended with code {code}; what it found is above")
    return kind(message, detail=detail, hint=hint or None)


def as_words(settings: Mapping[str, Any]) -> list[str]:
    """Keywords as command-line words: lr=3e-4 becomes --lr=0.0003, quick=True becomes --quick, None is left out."""
    words = []
    for name, value in settings.items():
        if value is True:
            words.append(f"--{name}")
        elif value is False:
            words.append(f"{name}=false")
        elif value is not None:
            words.append(f"--{name}={os.fspath(value) if isinstance(value, Path) else value}")
    return words
