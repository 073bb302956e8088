"""Converts untrusted JSON to the fields of a record, and back.

Files may be damaged, written by another version, or forged. So a value of the wrong type counts as absent, and the
field keeps its default. Owns the rules for each type; the records say which type a field has.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from jackline.rundir.process_id import ProcessId

T = TypeVar("T")
Reader = Callable[[Any], Any]

MAX_NUMBER = 2**63  # a larger number means damage: no size, time or count of a run comes near it
MAX_AT_S = 253402300799.0  # the last second of the year 9999: Python has no later dates


def number(value: Any) -> float | None:
    """The number as written: an int stays an int. NaN, infinity and booleans do not count as numbers."""
    kind = type(value)
    is_number = kind is float or kind is int or (isinstance(value, int | float) and kind is not bool)
    return value if is_number and -MAX_NUMBER < value < MAX_NUMBER else None


def integer(value: Any) -> int | None:
    found = number(value)
    return int(found) if found is not None and found == math.floor(found) else None


def moment(value: Any) -> float | None:
    """Seconds since 1970; None where no date exists for them."""
    found = number(value)
    return found if found is not None and 0 <= found <= MAX_AT_S else None


def text(value: Any) -> str | None:
    """None for a lone surrogate, which cannot be printed; path bytes that are not UTF-8 (surrogateescape) pass."""
    if not isinstance(value, str):
        return None
    try:
        value.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return None
    return value


def flag(value: Any) -> bool | None:
    return value if isinstance(value, bool) else None


def mapping(value: Any) -> dict[str, Any] | None:
    return value if isinstance(value, dict) else None


def numbers(value: Any) -> dict[str, float] | None:
    """A mapping from names to numbers; values that are not numbers are left out."""
    if not isinstance(value, dict):
        return None
    return {str(name): entry for name, entry in value.items() if number(entry) is not None}


def words(value: Any) -> tuple[str, ...] | None:
    return tuple(entry for entry in value if text(entry) is not None) if isinstance(value, list) else None


def mappings(value: Any) -> tuple[dict[str, Any], ...] | None:
    return tuple(entry for entry in value if isinstance(entry, dict)) if isinstance(value, list) else None


def each(reader: Callable[[Any], T]) -> Callable[[Any], tuple[T, ...] | None]:
    """A reader for a list of records; entries that are not records are left out."""
    return lambda value: (
        tuple(reader(entry) for entry in value if isinstance(entry, dict)) if isinstance(value, list) else None
    )


# The reader for each annotation, as records spell it; a record brings the readers for its own types.
READERS: dict[str, Reader] = {
    "float | None": number,
    "float": number,
    "int | None": integer,
    "int": integer,
    "str | None": text,
    "str": text,
    "bool | None": flag,
    "bool": flag,
    "dict[str, Any]": mapping,
    "dict[str, Any] | None": mapping,
    "dict[str, float]": numbers,
    "tuple[str, ...]": words,
    "tuple[dict[str, Any], ...]": mappings,
    "ProcessId | None": ProcessId.from_json,
}


def decode(record: type[T], raw: object, own: Mapping[str, Reader] | None = None) -> T:
    """Convert `raw` to a `record`, whose fields all have defaults. `own`: readers for the record's own types."""
    found = raw if isinstance(raw, dict) else {}
    known: dict[str, Any] = {}
    for entry in dataclasses.fields(record):  # type: ignore[arg-type]
        if entry.name not in found:
            continue
        annotation = str(entry.type)
        reader = moment if entry.name.endswith("at_s") else (own or {}).get(annotation) or READERS[annotation]
        value = reader(found[entry.name])
        if value is not None:
            known[entry.name] = value
    return record(**known)


def encode(record: Any) -> dict[str, Any]:
    """The JSON of a record. A nested record without any known field becomes null."""
    found: dict[str, Any] = {}
    for name, is_left_out in _layout(record.__class__):
        value = getattr(record, name)
        if value is None:
            if not is_left_out:
                found[name] = None
        else:
            found[name] = value if type(value) in _AS_THEY_ARE else _plain(value)
    return found


def left_out() -> Any:
    """A field that is left out of the file while it is unknown."""
    return dataclasses.field(default=None, metadata={"is_left_out": True})


_AS_THEY_ARE = (str, int, float, bool, dict)


@functools.cache
def _layout(kind: Any) -> tuple[tuple[str, bool], ...]:
    return tuple((entry.name, bool(entry.metadata.get("is_left_out"))) for entry in dataclasses.fields(kind))


@functools.cache
def _empty(kind: Callable[[], T]) -> T:
    return kind()


def _plain(value: Any) -> Any:
    if isinstance(value, ProcessId):
        return value.to_json()
    if isinstance(value, tuple | list):
        return [_plain(entry) for entry in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return None if value == _empty(type(value)) else encode(value)
    return value
