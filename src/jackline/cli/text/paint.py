"""What our own text may look like here: how wide, and in which colours.

A colour says one thing everywhere: green moves, yellow is suspect, red is stuck or dead. Owns the width of characters
and of the output. Does not own: what is printed.
"""

from __future__ import annotations

import os
import re
import sys
import unicodedata
from collections.abc import Mapping
from typing import Literal

from jackline.units import fold

Tone = Literal["", "good", "warn", "bad", "dim", "note", "strong"]
_CODES = {"good": "32", "warn": "33", "bad": "31", "dim": "2", "note": "36", "strong": "1"}
CUT = "..."
_LABEL = re.compile(r"\s*(hint: |error: |[a-z][a-z0-9 ]{0,12}:\s+)")


def paint(text: str, tone: Tone, *, use_color: bool) -> str:
    return f"\x1b[{_CODES[tone]}m{text}\x1b[0m" if use_color and tone and text else text


def wants_color(env: Mapping[str, str], *, is_terminal: bool) -> bool:
    """NO_COLOR wins, then FORCE_COLOR; otherwise only a terminal gets colours."""
    if env.get("NO_COLOR"):
        return False
    if env.get("FORCE_COLOR") or env.get("CLICOLOR_FORCE"):
        return True
    return is_terminal and env.get("TERM") != "dumb"


def stdout_has_color() -> bool:
    return wants_color(os.environ, is_terminal=_is_terminal())


def stdout_columns() -> int | None:
    """The width of the terminal; None for a pipe or a file, where nothing is cut, whatever $COLUMNS says."""
    if not _is_terminal():
        return None
    wanted = os.environ.get("COLUMNS", "")
    try:
        columns = int(wanted) if wanted.isdigit() else os.get_terminal_size(1).columns
    except OSError:
        columns = 0
    return max(40, columns or 80)


def stdout_takes(sample: str) -> bool:
    """Whether these characters can be written to stdout in its encoding."""
    try:
        sample.encode(getattr(sys.stdout, "encoding", None) or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def page(text: str, first: Tone = "") -> str:
    """Lines for stdout: folded between words and painted where it is a terminal, unchanged in a pipe. `first` is the
    tone of the first line; an error is red, a hint is cyan."""
    columns, use_color = stdout_columns(), stdout_has_color()
    shown = []
    for number, line in enumerate(text.split("\n")):
        tone: Tone = first if number == 0 else _tone_of(line)
        label = _LABEL.match(line)
        indent = len(label[0]) if label else len(line) - len(line.lstrip(" "))
        shown += [paint(part, tone, use_color=use_color) for part in fold(line, columns, indent).split("\n")]
    return "\n".join(shown)


def print_note(text: str) -> None:
    """Print a line of our own to stderr, so that stdout has only data and the command's output."""
    try:
        columns = os.get_terminal_size(2).columns or None
    except OSError:
        columns = None
    print(fold(f"[jackline] {text}", columns, len("[jackline] ")), file=sys.stderr, flush=True)


def print_out(text: str) -> None:
    """Print to stdout. Click would take the colours out of a pipe, also where FORCE_COLOR asks for them."""
    import click

    click.echo(text, color=True if stdout_has_color() else None)


def _tone_of(line: str) -> Tone:
    word = line.lstrip()
    return "bad" if word.startswith("error: ") else "note" if word.startswith("hint: ") else ""


def _is_terminal() -> bool:
    try:
        return bool(sys.stdout) and sys.stdout.isatty()
    except ValueError:  # closed
        return False


def num_cells(text: str) -> int:
    """The width in cells: East Asian characters take two, combining marks none."""
    if text.isascii():
        return len(text)
    return sum(_cells_of(sign) for sign in text)


def cut_to_cells(text: str, limit: int) -> str:
    """As much of `text` as fits; a status line that wraps cannot be erased again."""
    if len(text) * 2 <= limit or (text.isascii() and len(text) <= limit):
        return text
    used = 0
    for index, sign in enumerate(text):
        used += _cells_of(sign)
        if used > limit:
            return text[:index]
    return text


def shorten(text: str, limit: int) -> str:
    """The text, or its beginning and '...', in at most `limit` cells."""
    if num_cells(text) <= limit:
        return text
    return cut_to_cells(text, max(0, limit - len(CUT))) + CUT[: max(0, limit)]


def _cells_of(sign: str) -> int:
    if unicodedata.combining(sign):
        return 0
    return 2 if unicodedata.east_asian_width(sign) in "WF" else 1
