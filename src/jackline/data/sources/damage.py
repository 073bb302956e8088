"""Damage in source files: what was lost, where it is, and whether it is too much.

Owns: the amounts (documents, bytes of text, bytes of compressed files), the first few places of damage, the share
that is compared with the limit, and the text about it. Does not own finding damage (frames.py, records.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from jackline.errors import JacklineError
from jackline.units import format_bytes

UNKNOWN_ENCODING = "text in an unknown encoding"
NOT_UNICODE = "text is not valid Unicode"

KEPT_PLACES = 8
_ENOUGH_RECORDS = 200
_ENOUGH_BYTES = 64 << 20


class DamagedBytes(Exception):
    """Bytes of a file that cannot be read; `str()` is the reason under which it is counted and shown.

    `at` is the offset in the file, `file_bytes` the length of the unreadable part, `text_bytes` the text that was in
    it: known where a frame states its size, otherwise estimated. `is_suspect`: the text was readable but fails its
    checksum.
    """

    def __init__(
        self, reason: str, *, at: int = 0, file_bytes: int = 0, text_bytes: int = 0, is_suspect: bool = False
    ) -> None:
        super().__init__(reason)
        self.at, self.file_bytes, self.text_bytes, self.is_suspect = at, file_bytes, text_bytes, is_suspect


@dataclass(frozen=True)
class Place:
    """Where damage is. `frame_offset` counts bytes of text from the frame at `offset`; `line` 0 means unknown."""

    reason: str
    file: str
    offset: int
    frame_offset: int
    line: int
    num_bytes: int

    @property
    def text(self) -> str:
        inside = f" + {self.frame_offset:,} bytes of text" if self.frame_offset else ""
        line = f", line {self.line:,}" if self.line else ""
        lost = f", {self.num_bytes:,} bytes" if self.num_bytes else ""
        return f"{self.file}: byte {self.offset:,}{inside}{line}: {self.reason}{lost}"


@dataclass(frozen=True)
class Lost:
    """Amounts so far. `seen_bytes` is all text, with lost parts; `records` are whole documents, some estimated."""

    seen_bytes: int = 0
    text_bytes: int = 0
    file_bytes: int = 0
    suspect_bytes: int = 0
    records: int = 0
    places: tuple[Place, ...] = ()

    @property
    def share(self) -> float:
        """Lost and suspect text as a share of all text."""
        return min(1.0, (self.text_bytes + self.suspect_bytes) / self.seen_bytes) if self.seen_bytes else 0.0

    def plus(self, other: Lost) -> Lost:
        return Lost(
            self.seen_bytes + other.seen_bytes,
            self.text_bytes + other.text_bytes,
            self.file_bytes + other.file_bytes,
            self.suspect_bytes + other.suspect_bytes,
            self.records + other.records,
            (self.places + other.places)[:KEPT_PLACES],
        )

    def located(self, file: str, lines_before: int) -> Lost:
        """The same, with the places of one run turned into places of a file; `lines_before` -1 means unknown."""
        if not self.places:
            return self
        places = (
            replace(place, file=file, line=lines_before + place.line if lines_before >= 0 and place.line else 0)
            for place in self.places
        )
        return replace(self, places=tuple(places))

    def to_json(self) -> dict[str, Any]:
        names = ("seen_bytes", "text_bytes", "file_bytes", "suspect_bytes", "records")
        places = [[p.reason, p.file, p.offset, p.frame_offset, p.line, p.num_bytes] for p in self.places]
        return {**{name: getattr(self, name) for name in names}, "places": places}

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> Lost:
        places = tuple(Place(*item) for item in value["places"])
        return Lost(**{**value, "places": places})


NOTHING = Lost()


def check_damage(
    lost: Lost, damaged: Mapping[str, int], num_records: int, max_fraction: float, *, is_end: bool
) -> None:
    """Raise if more than the allowed share of the documents or of the text could not be read.

    Before the end a share counts only if enough was read: one bad file of many would be too much at first.
    """
    share_of_records = lost.records / num_records if num_records else 0.0
    # Before the end, documents that are only estimated (a damaged frame, a cut file) do not count.
    num_damaged = lost.records if is_end else sum(damaged.values())
    too_many = num_damaged > max_fraction * num_records and (is_end or num_records >= _ENOUGH_RECORDS)
    too_much = lost.share > max_fraction and (is_end or lost.seen_bytes >= _ENOUGH_BYTES)
    if not too_many and not too_much:
        return
    if share_of_records >= lost.share:
        what, share = f"{lost.records:,} of the first {num_records:,} records cannot be read", share_of_records
    else:
        unreadable = format_bytes(lost.text_bytes + lost.suspect_bytes)
        what, share = f"{unreadable} of the first {format_bytes(lost.seen_bytes)} of text cannot be read", lost.share
    raise JacklineError(
        f"{what} ({100 * share:.1f} %, allowed {100 * max_fraction:g} %)",
        detail=tuple(damage_lines(lost, damaged)),
        hint=_hint(damaged, share),
    )


def _hint(damaged: Mapping[str, int], share: float) -> str:
    allow = f"--max-damaged {_rounded_up(share):g} (max_damaged in a recipe, max_damaged_fraction in Python)"
    if damaged and set(damaged) <= {UNKNOWN_ENCODING, NOT_UNICODE}:
        return f"name its encoding: --encoding cp1252, or latin-1, which reads any bytes; or leave it out: {allow}"
    return f"repair the source, or allow it: {allow}"


def _percent(share: float) -> str:
    """'0.02', '42', '100': two digits where there are more behind the point."""
    return f"{100 * share:.2g}" if share < 0.1 else f"{100 * share:.0f}"


def damage_lines(lost: Lost, damaged: Mapping[str, int]) -> list[str]:
    """What was lost by reason, how much in all, and where it begins."""
    lines = [f"{count:,} x {reason}" for reason, count in sorted(damaged.items())]
    if lost.text_bytes or lost.suspect_bytes:
        amount = f"{_amount(lost)} of {format_bytes(lost.seen_bytes)} of text ({_percent(lost.share)} %)"
        unread = f"; {format_bytes(lost.file_bytes)} of compressed files cannot be decompressed"
        lines.append(amount + (unread if lost.file_bytes else ""))
    if any(reason.startswith("truncated") for reason in damaged):
        lines.append("what is missing after the end of a truncated file is not known; assumed: as much again")
    return [*lines, *(place.text for place in lost.places)]


def _amount(lost: Lost) -> str:
    parts = [f"{format_bytes(lost.text_bytes)} lost"] if lost.text_bytes else []
    if lost.suspect_bytes:
        parts.append(f"{format_bytes(lost.suspect_bytes)} with a wrong checksum")
    return " and ".join(parts)


def _rounded_up(share: float) -> float:
    """A limit that allows this share, with two digits."""
    return next((limit for limit in (0.02, 0.05, 0.1, 0.2, 0.5) if share <= limit), 1.0)
