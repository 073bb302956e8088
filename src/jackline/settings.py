"""Settings: each is declared once, with name, type, unit, default, meaning, allowed values and group.

A settings class is a plain dataclass. `setting(...)` in the place of a default adds what a type cannot express.
`validate`, `--help-settings`, `--show` and docs/reference/settings.md are derived from it. A field with a plain
default works too; its meaning is empty. A subclass that gives a field another default keeps the rest of the
declaration.

Does not own: reading values from the command line and files (trainer/overrides.py), and rules between two fields,
which are beside their config.
"""

from __future__ import annotations

import math
import numbers
import os
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from difflib import get_close_matches
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from jackline.errors import UsageError

T = TypeVar("T")
Read = Callable[[str], Any]
OWN_GROUP = "own settings"  # the group of a class that names none
_KEY = "jackline"


@dataclass(frozen=True)
class Range:
    """A range of allowed numbers. None means no limit on that side."""

    low: float | None = None
    high: float | None = None
    has_low: bool = True  # the limit itself is allowed
    has_high: bool = True

    def is_too_small(self, value: float) -> bool:
        return self.low is not None and not (value >= self.low if self.has_low else value > self.low)

    def is_too_large(self, value: float) -> bool:
        return self.high is not None and not (value <= self.high if self.has_high else value < self.high)

    def __str__(self) -> str:
        """'1 or more', 'above 0', 'from 0 to 1', 'from 0 to below 1', 'above 0 and below 1'."""
        low, high = (None if limit is None else f"{limit:g}" for limit in (self.low, self.high))
        if high is None:
            return "" if low is None else f"{low} or more" if self.has_low else f"above {low}"
        ending = high if self.has_high else f"below {high}"
        if low is None:
            return f"{high} or less" if self.has_high else ending
        return f"from {low} to {ending}" if self.has_low else f"above {low} and {'at most ' * self.has_high}{ending}"


FRACTION = Range(0, 1, has_high=False)


def at_least(low: float) -> Range:
    return Range(low)


def above(low: float) -> Range:
    return Range(low, has_low=False)


def between(low: float, high: float) -> Range:
    return Range(low, high)


@dataclass(frozen=True)
class Declared:
    """What `setting` adds to a field. An empty part is inherited from the parent class, if that declared it."""

    meaning: str = ""
    unit: str = ""
    allowed: Range | None = None
    group: str = ""
    read: Read | None = None


def setting(
    default: T,
    meaning: str = "",
    *,
    unit: str = "",
    allowed: Range | None = None,
    group: str = "",
    read: Read | None = None,
) -> T:
    """A dataclass field: `lr: float = setting(3e-4, "Learning rate.", allowed=above(0))`.

    With `unit` 'seconds' or 'bytes' a value is read as a duration (1h30m) or a size (20G). A fixed set of words is
    given by the field's type: `Literal["a", "b"]`. The group is that of the class (`GROUP: ClassVar[str]`) unless
    given here. `read` converts a text to a value where the type does not say how.
    """
    return field(default=default, metadata=declare(meaning, unit=unit, allowed=allowed, group=group, read=read))


def declare(
    meaning: str, *, unit: str = "", allowed: Range | None = None, group: str = "", read: Read | None = None
) -> Mapping[str, Declared]:
    """The same for a field that must be written as `field(default_factory=..., metadata=declare(...))`."""
    return {_KEY: Declared(meaning, unit, allowed, group, read)}


@dataclass(frozen=True)
class Setting:
    """One field of a settings class with its complete declaration."""

    name: str
    type: Any  # as annotated, without None
    default: Any
    is_optional: bool  # None is allowed
    declared: Declared

    @property
    def choices(self) -> tuple[Any, ...]:
        return get_args(self.type) if get_origin(self.type) is Literal else ()

    @property
    def values_text(self) -> str:
        """The allowed values as text: 'whole number of steps, 1 or more'."""
        if self.choices:
            return one_of(self.choices)
        unit = self.declared.unit
        kind = _WRITTEN.get(unit) or _type_name(self.type) + (f" of {unit}" if unit else "")
        limits = str(self.declared.allowed or "")
        return f"{kind}, {limits}" if limits else kind


TYPE_NAMES: Mapping[Any, str] = {int: "whole number", float: "number", bool: "true or false", str: "text"}
_WRITTEN = {"seconds": "duration", "bytes": "size"}


def settings_of(kind: type) -> Mapping[str, Setting]:
    """The settings of a dataclass by name, in the order of its fields."""
    return _read_class(kind)


@cache
def _read_class(kind: Any) -> Mapping[str, Setting]:
    hints = get_type_hints(kind)
    found = {}
    for entry in fields(kind):
        bare, is_optional = _without_none(hints[entry.name])
        default = entry.default if entry.default_factory is MISSING else entry.default_factory()
        found[entry.name] = Setting(entry.name, bare, default, is_optional, _declared(kind, entry.name))
    return found


def groups_of(kind: type) -> dict[str, list[Setting]]:
    """The settings that a user may set, by group; those that a class does not use (`UNUSED`) are left out."""
    groups: dict[str, list[Setting]] = {}
    for one in settings_of(kind).values():
        if one.name not in getattr(kind, "UNUSED", ()):
            groups.setdefault(one.declared.group, []).append(one)
    return groups


def _declared(kind: type, name: str) -> Declared:
    """The declaration, merged over the parent classes: each part comes from the nearest class that gives it."""
    owners = [above for above in kind.__mro__ if name in above.__dict__.get("__dataclass_fields__", {})]
    found = [owner.__dict__["__dataclass_fields__"][name].metadata.get(_KEY, Declared()) for owner in owners]
    return Declared(
        meaning=next((one.meaning for one in found if one.meaning), ""),
        unit=next((one.unit for one in found if one.unit), ""),
        allowed=next((one.allowed for one in found if one.allowed), None),
        group=next((one.group for one in found if one.group), "") or owners[-1].__dict__.get("GROUP", OWN_GROUP),
        read=next((one.read for one in found if one.read), None),
    )


def _without_none(hint: Any) -> tuple[Any, bool]:
    if get_origin(hint) not in (Union, UnionType) or NoneType not in get_args(hint):
        return hint, False
    rest = tuple(part for part in get_args(hint) if part is not NoneType)
    return Union[rest], True  # noqa: UP007 - made from a tuple


def validate(config: object) -> None:
    """Check each field on its own: type, allowed words, range. Raises UsageError for the first wrong one."""
    kind: type = type(config)
    unused = getattr(kind, "UNUSED", ())
    for one in settings_of(kind).values():
        value = getattr(config, one.name)
        if one.name not in unused and not (value is None and one.is_optional):
            check_value(one, value)


def check_value(one: Setting, value: Any) -> None:
    if one.choices:
        check_choice(one, value)
    elif not _is_of_type(one.type, value):
        raise wrong_type(one, value)
    limits = one.declared.allowed
    if limits is None:
        return
    is_small, is_large = limits.is_too_small(value), limits.is_too_large(value)
    if is_small or is_large:
        raise UsageError(
            f"{one.name}={value} is too {'small' if is_small else 'large'}",
            detail=_meaning_line(one),
            hint=f"it must be {limits}",
        )


def check_choice(one: Setting, value: Any) -> None:
    if value in one.choices:
        return
    near = get_close_matches(str(value), map(str, one.choices), n=1)
    raise UsageError(
        f"{one.name} is one of {', '.join(map(str, one.choices))}, not '{value}'",
        hint=f"did you mean '{near[0]}'?" if near else None,
    )


def wrong_type(one: Setting, value: Any) -> UsageError:
    return UsageError(f"{one.name}={value} is not {'' if one.type is bool else 'a '}{_type_name(one.type)}")


def one_of(words: tuple[Any, ...]) -> str:
    """'a, b or c'; an empty word is written as ''."""
    shown = [str(word) or "''" for word in words]
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} or {shown[-1]}"


def _type_name(kind: Any) -> str:
    if get_origin(kind) in (Union, UnionType):
        return " or ".join(map(_type_name, get_args(kind)))
    return TYPE_NAMES.get(kind) or str(getattr(kind, "__name__", kind))


def _meaning_line(one: Setting) -> tuple[str, ...]:
    return (f"{one.name}: {one.declared.meaning}",) if one.declared.meaning else ()


def _is_of_type(kind: Any, value: Any) -> bool:
    """Checks only bool, int, float and str; other types in a user's own settings class are not checked."""
    if kind is bool:
        return bool(value in (True, False))
    if kind is int:
        return isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if kind is float:
        return isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(value)
    return kind is not str or isinstance(value, str | os.PathLike)
