"""Makes text from a run safe to print.

A name, a log line or an error message is written by an untrusted program: it may move the cursor, rename the window,
hide text or reverse its direction. All text from a run passes through here before it reaches a terminal.
"""

from __future__ import annotations

import re
import unicodedata
from typing import Any

_ESCAPES = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]?"  # cursor, colour
    r"|(?:\x1b\]|\x9d)[^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c)?"  # window title, links
    r"|\x1b[PX^_][^\x1b]*(?:\x1b\\)?"  # device control strings
    r"|\x1b[ -/]*[0-~]?"
)
_SPACE = re.compile(r"[\t\r\n\x0b\x0c\x85\u2028\u2029]+")
# Control, format (bidirectional marks, zero width), private use; lone surrogates become '?' below.
_HIDDEN = frozenset({"Cc", "Cf", "Co"})


def safe_text(text: Any, max_chars: int = 300) -> str:
    """One line of visible characters; a longer text is cut and ends with '...'."""
    whole = _SPACE.sub(" ", _ESCAPES.sub("", str(text)))
    if not whole.isascii() or not whole.isprintable():
        whole = "".join(_visible(char) for char in whole)
    return whole if len(whole) <= max_chars else whole[: max(0, max_chars - 3)] + "..."


def safe_lines(text: Any, max_lines: int = 40) -> list[str]:
    """Several lines, each safe to print."""
    return [safe_text(line) for line in str(text).split("\n")[:max_lines]]


def _visible(char: str) -> str:
    kind = unicodedata.category(char)
    if kind == "Cs":
        return "?"
    return "" if kind in _HIDDEN else char
