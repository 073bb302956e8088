"""What the page shows about a run, as plain data, and who tells it.

The sentences are those of `jackline status`. They are made above this package, in `cli`, which hands a Teller to the
server. So a page and a terminal never say different things.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from jackline.immutable import immutable
from jackline.rundir.layout import RunDir


@immutable
class Card:
    """`share`: how full a meter is, between 0 and 1; None without a meter. `tone`: '', 'good', 'warn' or 'bad'."""

    title: str
    lines: tuple[str, ...]
    tone: str = ""
    share: float | None = None


@immutable
class Told:
    """`word` is the state in a word or two, `sentence` the verdict, `facts` more lines with their labels."""

    name: str
    path: str
    state: str
    word: str
    tone: str
    is_live: bool
    sentence: str
    details: tuple[str, ...] = ()
    cards: tuple[Card, ...] = ()
    facts: tuple[tuple[str, str], ...] = ()
    progress: str = ""
    share: float | None = None
    left: str = ""
    hint: str = ""
    attempt: int = 0
    created_at_s: float | None = None
    seen_at_s: float | None = None
    command: str = ""
    resume: str = ""


class Teller(Protocol):
    """How the server asks about a run. `short`: what a list shows, without a search for checkpoints."""

    def tell(self, run: RunDir, *, now_s: float, short: bool) -> Told: ...

    def stacks(self, run: RunDir) -> tuple[str, ...]: ...

    def checkpoints(self, run: RunDir) -> tuple[Mapping[str, Any], ...]: ...
