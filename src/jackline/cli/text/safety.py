"""Makes text from a run safe to print.

A name, a log line or an error message is written by an untrusted program: it may move the cursor, rename the window,
hide text or reverse its direction. All text from a run passes through here before it reaches a terminal.
"""

from __future__ import annotations

import re
import unicodedata
from typing import Any

from jackline.rundir.access.secrets import without_secrets

_ESCAPES = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]?"  # cursor, colour
    r"|(?:\x1b\]|\x9d)[^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c)?"  # window title, links
    r"|\x1b[PX^_][^\x1b]*(?:\x1b\\)?"  # device control strings
    r"|\x1b[ -/]*[0-~]?"
)
_SPACE = re.compile(r"[\t\r\n\x0b\x0c\x85\u2028\u2029]+")
# Control, format (bidirectional marks, zero width), private use; lone surrogates become '?' below.
_HIDDEN = frozenset({"Cc", "Cf", "Co"})
# The same as one expression, without line ends, tabs, and the joiners that emoji and many scripts are spelled with.
# Kept as text: compiling it takes a while, and most output is plain.
_INVISIBLE = (
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\ud800-\udfff\ue000-\uf8ff\U000e0000-\U000e0fff\U000f0000-\U0010ffff]"
)
# Text without these, all ASCII and without URLs is passed on as it is.
_CONTROLS = bytes([*range(9), *range(11, 32), 127])
# Colours and weight, without blinking, hiding (8) and fonts.
_PLAIN = r"(?:0|1|2|3|4|7|2[1-7]|[349][0-7]|[34]9|10[0-7]|[34]8;5;\d{1,3}|[34]8;2(?:;\d{1,3}){3}|)"
_COLOR = rf"(\x1b\[{_PLAIN}(?:;{_PLAIN})*m)"


def safe_text(text: Any, max_chars: int = 300) -> str:
    """One line of visible characters, without passwords of URLs; a longer text is cut and ends with '...'. They are
    hidden first: half a password would not be recognised as one."""
    whole = without_secrets(_SPACE.sub(" ", _ESCAPES.sub("", str(text))))
    if not whole.isascii() or not whole.isprintable():
        whole = "".join(_visible(char) for char in whole)
    return whole if len(whole) <= max_chars else whole[: max(0, max_chars - 3)] + "..."


def safe_output(data: bytes, encoding: str = "utf-8", *, with_colors: bool = False) -> bytes:
    """Bytes for a terminal: several lines and tabs, but nothing that controls the terminal, hides text or reverses
    it, and no password of a URL. `with_colors`: plain colours stay, for a program's own output."""
    if data.isascii() and b"://" not in data and len(data.translate(None, _CONTROLS)) == len(data):
        return data
    text = data.decode(encoding, "backslashreplace")
    if with_colors:
        parts = re.split(_COLOR, text)  # every second part is a colour
        kept = "".join(part if number % 2 else _without_controls(part) for number, part in enumerate(parts))
    else:
        kept = _without_controls(text)
    return without_secrets(kept).encode(encoding, "backslashreplace")


def _without_controls(text: str) -> str:
    return re.sub(_INVISIBLE, "", _ESCAPES.sub("", text))


def safe_lines(text: Any, max_lines: int = 40) -> list[str]:
    """Several lines, each safe to print."""
    return [safe_text(line) for line in str(text).split("\n")[:max_lines]]


def _visible(char: str) -> str:
    kind = unicodedata.category(char)
    if kind == "Cs":
        return "?"
    return "" if kind in _HIDDEN else char
