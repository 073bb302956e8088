"""Settings of a recipe from words (key=value, --key value, --key=value, --flag) and from YAML files.

Owns the reading; which settings exist is declared in each recipe's own dataclass (jackline/settings.py), and so are
other names for them (`ALIASES`). Unknown ones and wrong values are errors: a setting that is accepted and ignored
has cost people days.

Settings files that came with the package are found by name: `--config m7c_125m` works where there is no clone. They
are in `configs` of each recipe's package; a test holds them equal to those in the repository's `configs`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar

from jackline.errors import UsageError
from jackline.settings import Read, Setting, check_choice, settings_of, wrong_type
from jackline.units import parse_bytes, parse_duration

Settings = TypeVar("Settings")
_YES = {"true": True, "yes": True, "1": True, "on": True, "false": False, "no": False, "0": False, "off": False}


def parse_settings(kind: type[Settings], words: Sequence[str], recipe: str) -> Settings:
    """An instance of the dataclass `kind`, its defaults changed by `words`."""
    return kind(**read_words(kind, words, recipe))


def read_words(kind: type, words: Sequence[str], recipe: str) -> dict[str, Any]:
    """What the words set, by field. The last one wins."""
    known = _known(kind)
    replaced: Mapping[str, str] = getattr(kind, "REPLACED", {})
    flags = {name for name, one in known.items() if one.type is bool}
    values: dict[str, Any] = {}
    gone: list[str] = []
    for given, text in _pairs(words, flags, set(replaced) - set(known), recipe):
        if given in replaced and given not in known:
            gone.append(given)
            continue
        name = _field(kind, given, known, f"recipe '{recipe}'")
        values[name] = _value(known[name], text)
    if gone:
        raise _refusal(gone, replaced)
    return values


def _refusal(gone: Sequence[str], replaced: Mapping[str, str]) -> UsageError:
    """All of them at once: an old command line may have ten."""
    if len(set(gone)) == 1:
        return UsageError(f"'{gone[0]}' is not a setting here", hint=replaced[gone[0]])
    detail = tuple(f"{name}: {replaced[name]}" for name in dict.fromkeys(gone))
    return UsageError(f"{len(detail)} of these are not settings here", detail=detail, hint="leave them out")


def read_yaml(kind: type, path: Path, recipe: str) -> dict[str, Any]:
    """What a file sets, by field. Read as text and then as each field's kind, so that 3e-4 is a number (YAML 1.1
    has it as a word) and `compile: off` is no boolean."""
    import yaml

    try:
        text = path.read_text(encoding="utf-8")
        written = yaml.compose(text, Loader=yaml.BaseLoader)
        found = yaml.load(text, Loader=yaml.BaseLoader)  # text only: no objects
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not YAML: {_first_line(error)}", hint="write one `key: value` a line") from None
    if written is None or found in (None, ""):
        return {}
    if not isinstance(found, dict):
        raise UsageError(f"{path} is not a list of settings", hint="write one `key: value` a line")
    assert isinstance(written, yaml.MappingNode)
    known = _known(kind)
    values: dict[str, Any] = {}
    for given, text in found.items():
        name = _field(kind, str(given).replace("-", "_"), known, f"recipe '{recipe}', in {path}")
        if not isinstance(text, str):
            raise UsageError(f"{name} in {path} is a {type(text).__name__}", hint=f"write `{name}: value`")
        if name in values or [key.value for key, _ in written.value].count(given) > 1:
            raise UsageError(f"{name} is set twice in {path}", hint="keep one of the two lines")
        values[name] = _value(known[name], text)
    return values


def _known(kind: type) -> dict[str, Setting]:
    unused = getattr(kind, "UNUSED", ())
    return {name: one for name, one in settings_of(kind).items() if name not in unused}


def _pairs(words: Sequence[str], flags: set[str], gone: set[str], recipe: str) -> Iterator[tuple[str, str]]:
    """`gone` flags may have had a value or none: what looks like one goes with them."""
    rest = list(words)
    while rest:
        word = rest.pop(0)
        key, equals, text = word.partition("=")
        name = key.lstrip("-").replace("-", "_")
        if equals:
            yield name, text
        elif not word.startswith("--"):
            raise UsageError(f"'{word}' is not a setting of recipe '{recipe}'", hint="write key=value or --key value")
        elif name in gone:
            yield name, rest.pop(0) if rest and not rest[0].startswith("--") and "=" not in rest[0] else ""
        elif name in flags and not (rest and rest[0].lower() in _YES):
            yield name, "true"
        elif rest:
            yield name, rest.pop(0)
        else:
            raise UsageError(f"{word} needs a value")


def _field(kind: type, given: str, known: Mapping[str, Setting], where: str) -> str:
    aliases: Mapping[str, str] = getattr(kind, "ALIASES", {})
    name = aliases.get(given, given)
    if name in known:
        return name
    replaced: Mapping[str, str] = getattr(kind, "REPLACED", {})
    if given in replaced:
        raise _refusal([given], replaced)
    if name in getattr(kind, "UNUSED", ()):
        raise UsageError(f"'{given}' means nothing to {where}", hint="known settings: " + ", ".join(known))
    near = get_close_matches(given, [*known, *aliases], n=1)
    hint = f"did you mean '{near[0]}'?" if near else "known settings: " + ", ".join(known)
    raise UsageError(f"unknown setting '{given}' for {where}", hint=hint)


def _value(one: Setting, text: str) -> Any:
    if one.is_optional and text.lower() == "none":
        return None
    read = one.declared.read or _UNITS.get(one.declared.unit) or _READ.get(one.type)
    if one.choices:
        found = read(text) if read else text
        by_text = {str(choice): choice for choice in one.choices}
        check_choice(one, by_text.get(found, found))
        return by_text.get(found, found)
    if read is None:
        raise UsageError(
            f"{one.name} cannot be set by a word: nobody knows how to read a {one.values_text}",
            hint="int, float, bool, str and Literal can be read; for others give setting(..., read=function)",
        )
    try:
        return read(text)
    except (ValueError, KeyError, OverflowError):
        raise wrong_type(one, text) from None


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        number = float(text)  # 1e6 is a whole number
        if not number.is_integer():
            raise ValueError(text) from None
        return int(number)


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(text)
    return number


def _first_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]


_READ: dict[Any, Read] = {int: _whole, float: _finite, bool: lambda text: _YES[text.lower()], str: str}
_UNITS: dict[str, Read] = {"seconds": parse_duration, "bytes": parse_bytes}


RECIPES = Path(__file__).parents[1] / "recipes"


def find_settings_file(word: str) -> Path:
    """A file of that path, else the one that came with the package under that name."""
    path = Path(word)
    shipped = {found.stem: found for found in RECIPES.glob("*/configs/*.yaml")}
    if word in shipped and (path.is_dir() or not path.exists()):  # runs of before lie in folders of these names
        return shipped[word]
    near = get_close_matches(path.stem, shipped, n=1, cutoff=0.8)
    if path.exists() or not near:
        return path  # whoever reads it says what is wrong
    raise UsageError(
        f"cannot read {word}: No such file or directory",
        hint=f"--config {near[0]} is one that came with the package",
    )
