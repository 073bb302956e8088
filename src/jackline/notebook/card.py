"""One block of text in a cell that is replaced while the run continues, however long it takes.

Owns drawing. It uses only text, through IPython's own display, because widgets are lost when a tab is reloaded, and a
new line for every step makes the page unusable after an hour. Shows `status` and the last lines of the run's log.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from jackline.cli.text.safety import safe_text
from jackline.cli.text.status import status_text
from jackline.cli.view.run_view import RunView

LAST_LINES = 10
LINE_CHARS = 200
_TAIL_BYTES = 16 << 10
_STAMP = re.compile(r"^\S+Z ")


class Card:
    """The block. It belongs to the cell in which it was first shown."""

    def __init__(self) -> None:
        self._handle: Any = None

    def show(self, text: str) -> None:
        from IPython.display import display

        if self._handle is None:
            self._handle = display({"text/plain": text}, raw=True, display_id=True)  # type: ignore[no-untyped-call]
        else:
            self._handle.update({"text/plain": text}, raw=True)


def card_text(view: RunView) -> str:
    lines = last_lines(Path(view.log.path))
    return "\n".join([status_text(view), *(["", *lines] if lines else [])])


def last_lines(log: Path) -> list[str]:
    """The last lines that the run printed, without the timestamps of out.log."""
    try:
        with open(log, "rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - _TAIL_BYTES))
            lines = file.read(_TAIL_BYTES).decode("utf-8", "replace").splitlines()
    except OSError:
        return []
    whole = lines if size <= _TAIL_BYTES else lines[1:]
    return [safe_text(_STAMP.sub("", line), LINE_CHARS) for line in whole[-LAST_LINES:]]
