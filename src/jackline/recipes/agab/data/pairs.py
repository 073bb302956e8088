"""The pairs of a table: checked row by row, with everything that was left out counted and shown.

Owns: what makes a row usable, the counts per reason with the first places, and the table of pairs that is kept in
memory: 44 bytes for each pair (two hashes, two lengths, the value), however long its sequences. These are read
again by `texts_of` when they are to be encoded. Does not own reading cells (rows.py).
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import xxhash
from numpy.typing import NDArray

from jackline.data.progress import Board
from jackline.data.sources.formats import layout_of
from jackline.errors import UsageError
from jackline.recipes.agab.data.residues import (
    EMPTY,
    ILLEGAL,
    TOO_LONG,
    TOO_MANY_CHAINS,
    Refused,
    canonical_antibody,
    canonical_chain,
    sequence_hash,
)
from jackline.recipes.agab.data.rows import BAD_ROW, BadRow, Row, TableFile, place_word, read_tables

NO_PKD = "pKd missing or not a number"
OUT_OF_RANGE = "pKd out of range"
OTHER_KIND = "other affinity type"
REASONS = (BAD_ROW, NO_PKD, OUT_OF_RANGE, EMPTY, ILLEGAL, TOO_LONG, TOO_MANY_CHAINS, OTHER_KIND)
_EXAMPLES = 3
_MAX_KINDS = 64

Side = Literal["antibody", "antigen"]
Hashes = NDArray[np.uint64]  # (n, 2): the 16 bytes of a sequence's hash


@dataclass(frozen=True)
class PairRules:
    """Which rows are wanted."""

    pkd_range: tuple[float, float] = (4.0, 14.0)
    kinds: tuple[str, ...] = ()  # empty: all

    def __post_init__(self) -> None:
        low, high = self.pkd_range
        if not low < high:
            raise UsageError(f"pkd_range must go from a lower to a higher value, not from {low} to {high}")


@dataclass
class Tally:
    """Rows read and used, and those left out by reason with the first places."""

    rows: int = 0
    used: int = 0
    rejected: dict[str, int] = field(default_factory=dict)
    examples: dict[str, list[str]] = field(default_factory=dict)
    kinds: dict[str, int] = field(default_factory=dict)  # of the used rows
    other_kinds: set[str] = field(default_factory=set)

    def reject(self, reason: str, place: str, shown: str) -> None:
        self.rejected[reason] = self.rejected.get(reason, 0) + 1
        seen = self.examples.setdefault(reason, [])
        if len(seen) < _EXAMPLES:
            seen.append(f"{place} ({shown})" if shown else place)

    def counts(self) -> dict[str, int]:
        return {"rows": self.rows, "used": self.used, **{name: self.rejected.get(name, 0) for name in REASONS}}


@dataclass(frozen=True)
class PairTable:
    """The usable pairs in the order of the file."""

    antibody: Hashes
    antigen: Hashes
    pkd: NDArray[np.float32]
    antibody_length: NDArray[np.int32]  # residues of both chains
    antigen_length: NDArray[np.int32]
    tally: Tally

    def content_hash(self) -> str:
        made = xxhash.xxh3_128()
        for part in (self.antibody, self.antigen, self.pkd):
            made.update(np.ascontiguousarray(part).data)
        return str(made.hexdigest())


def read_pairs(path: str, rules: PairRules, board: Board | None = None) -> PairTable:
    """Every usable pair; raises UsageError when there is none."""
    tally = Tally()
    hashes = bytearray(), bytearray()
    lengths, pkds = array("i"), array("f")
    for run in read_tables(path):
        for antibody, antigen, pkd in _usable(run, rules, tally):
            hashes[0].extend(sequence_hash(antibody))
            hashes[1].extend(sequence_hash(antigen))
            lengths.append(len(antibody) - antibody.count(b"|"))
            lengths.append(len(antigen))
            pkds.append(pkd)
        if board is not None:
            board.set("read", done=run.offset, total=run.size, unit="B", detail=f"{tally.rows:,} rows")
    if not tally.used:
        raise _nothing_usable(path, rules, tally)
    both = np.frombuffer(lengths, np.int32).reshape(-1, 2)
    values = np.frombuffer(pkds, np.float32)
    return PairTable(_as_hashes(hashes[0]), _as_hashes(hashes[1]), values, both[:, 0], both[:, 1], tally)


def texts_of(path: str, rules: PairRules, side: Side, wanted: NDArray[np.int64]) -> Iterator[bytes]:
    """The sequences of one side of the pairs numbered `wanted` (ascending), read again from the file."""
    tally = Tally()
    at, number = 0, -1
    for run in read_tables(path):
        for pair in _usable(run, rules, tally):
            number += 1
            if at < len(wanted) and wanted[at] == number:
                at += 1
                yield pair[0] if side == "antibody" else pair[1]
        if at >= len(wanted):
            return


def report(tally: Tally, rules: PairRules) -> list[str]:
    """What a person should know about the rows, line by line."""
    left_out = tally.rows - tally.used
    lines = [f"{tally.rows:,} rows read, {tally.used:,} pairs used, {left_out:,} left out"]
    for reason in REASONS:
        if count := tally.rejected.get(reason):
            where = ", ".join(tally.examples[reason])
            lines.append(f"left out {count:,}: {_told(reason, rules)}: {where}{', ...' if count > _EXAMPLES else ''}")
    if len(tally.kinds) > 1:
        shown = ", ".join(f"{name} {count:,}" for name, count in _by_count(tally.kinds)[:10])
        lines.append(
            f"warning: {len(tally.kinds)} affinity types are mixed, perhaps on different scales: {shown}; "
            "affinity_type=NAME takes one of them"
        )
    return lines


def _usable(run: TableFile, rules: PairRules, tally: Tally) -> Iterator[tuple[bytes, bytes, float]]:
    name, word = run.name.rsplit("/", 1)[-1], place_word(layout_of(run.name))
    for row in run.rows:
        tally.rows += 1
        found = Refused(BAD_ROW) if isinstance(row, BadRow) else _check(row, rules, tally)
        if isinstance(found, Refused):
            tally.reject(found.reason, f"{name} {word} {row.place}", found.shown)
        else:
            tally.used += 1
            yield found


def _check(row: Row, rules: PairRules, tally: Tally) -> tuple[bytes, bytes, float] | Refused:
    kind = str(row.kind).strip() if row.kind is not None else ""
    if rules.kinds and kind not in rules.kinds:
        if len(tally.other_kinds) < _MAX_KINDS:
            tally.other_kinds.add(kind)
        return Refused(OTHER_KIND, kind[:40] or "none")
    pkd = _number(row.pkd)
    if math.isnan(pkd):
        return Refused(NO_PKD, repr(row.pkd)[:24])
    low, high = rules.pkd_range
    if not low <= pkd <= high:
        return Refused(OUT_OF_RANGE, f"{pkd:g}")
    antibody = _sequence(row.antibody, canonical_antibody)
    if isinstance(antibody, Refused):
        return Refused(antibody.reason, f"antibody {antibody.shown}".strip())
    antigen = _sequence(row.antigen, canonical_chain)
    if isinstance(antigen, Refused):
        return Refused(antigen.reason, f"antigen {antigen.shown}".strip())
    if kind and (len(tally.kinds) < _MAX_KINDS or kind in tally.kinds):
        tally.kinds[kind] = tally.kinds.get(kind, 0) + 1
    return antibody, antigen, pkd


def _number(cell: Any) -> float:
    """NaN for everything that is no number. True is none, although Python counts with it."""
    if cell is None or isinstance(cell, bool):
        return math.nan
    try:
        return float(cell)
    except (TypeError, ValueError):
        return math.nan


def _sequence(cell: Any, spelled: Callable[[str], bytes | Refused]) -> bytes | Refused:
    if cell is None:
        return Refused(EMPTY)
    return spelled(cell) if isinstance(cell, str) else Refused(ILLEGAL, type(cell).__name__)


def _as_hashes(data: bytearray) -> Hashes:
    return np.frombuffer(data, np.uint64).reshape(-1, 2)


def _told(reason: str, rules: PairRules) -> str:
    if reason == OUT_OF_RANGE:
        return f"{reason} [{rules.pkd_range[0]:g}, {rules.pkd_range[1]:g}]"
    return reason


def _by_count(kinds: dict[str, int]) -> list[tuple[str, int]]:
    return sorted(kinds.items(), key=lambda item: (-item[1], item[0]))


def _nothing_usable(path: str, rules: PairRules, tally: Tally) -> UsageError:
    if not tally.rows:
        return UsageError(f"{path} has no row under its header", hint="check that the export was complete")
    lines = report(tally, rules)[1:]
    hint = "check the columns, pkd_range and the sequences' letters"
    if tally.other_kinds == {""}:
        hint = "the table has no affinity_type; leave that setting out"
    elif tally.rejected.get(OTHER_KIND):
        hint = f"the affinity types there are: {', '.join(sorted(name or 'none' for name in tally.other_kinds)[:10])}"
    return UsageError(f"none of the {tally.rows:,} rows of {path} can be used", detail=tuple(lines), hint=hint)
