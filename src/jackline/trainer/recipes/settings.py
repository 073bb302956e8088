"""Settings of a recipe from the words of a command line: key=value, --key value, --key=value, --flag.

Owns the reading; which settings exist stands in each recipe's own dataclass. Unknown ones and wrong values are
errors: a setting that is accepted and ignored has cost people days.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import Field, fields
from difflib import get_close_matches
from typing import Any, TypeVar, get_args, get_type_hints

from jackline.errors import UsageError

Settings = TypeVar("Settings")
_YES = {"true": True, "yes": True, "1": True, "on": True, "false": False, "no": False, "0": False, "off": False}


def parse_settings(kind: type[Settings], words: Sequence[str], recipe: str) -> Settings:
    """An instance of the dataclass `kind`, its defaults changed by `words`."""
    known = {field.name: field for field in fields(kind)}  # type: ignore[arg-type]
    types = get_type_hints(kind)
    values: dict[str, Any] = {}
    for name, text in _pairs(words, {key for key, kind_of in types.items() if kind_of is bool}, recipe):
        if name not in known:
            raise _unknown(name, known, recipe)
        values[name] = _value(name, text, types[name])
    return kind(**values)


def _pairs(words: Sequence[str], flags: set[str], recipe: str) -> Iterator[tuple[str, str]]:
    rest = list(words)
    while rest:
        word = rest.pop(0)
        key, equals, text = word.partition("=")
        name = key.lstrip("-").replace("-", "_")
        if equals:
            yield name, text
        elif not word.startswith("--"):
            raise UsageError(f"'{word}' is not a setting of recipe '{recipe}'", hint="write key=value or --key value")
        elif name in flags and not (rest and rest[0].lower() in _YES):
            yield name, "true"
        elif rest:
            yield name, rest.pop(0)
        else:
            raise UsageError(f"{word} needs a value")


def _unknown(name: str, known: dict[str, Field[Any]], recipe: str) -> UsageError:
    near = get_close_matches(name, known, n=1)
    hint = f"did you mean '{near[0]}'?" if near else "known settings: " + ", ".join(known)
    return UsageError(f"unknown setting '{name}' for recipe '{recipe}'", hint=hint)


def _value(name: str, text: str, kind: Any) -> Any:
    choices = get_args(kind)
    if choices:
        if text in choices:
            return text
        near = get_close_matches(text, choices, n=1)
        hint = f"did you mean '{near[0]}'?" if near else None
        raise UsageError(f"{name} is one of {', '.join(choices)}, not '{text}'", hint=hint)
    try:
        return _YES[text.lower()] if kind is bool else kind(text)
    except (ValueError, KeyError):
        raise UsageError(f"{name}={text} is not {_WORDS[kind]}") from None


_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
