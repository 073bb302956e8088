"""A verdict as a file that can be replayed: the samples it was given, and what it said. Pure.

Owns the format of `why --save-case FILE` and of tests/cases. Source texts and commands stay in it, because rules read
them; environment variables and output are not part of a sample.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, fields, is_dataclass
from typing import Any

from jackline.supervisor.hang.sample import Sample
from jackline.supervisor.hang.scene import Thresholds, Verdict

FORMAT = 1


def case_json(samples: Sequence[Sample], thresholds: Thresholds, verdict: Verdict) -> dict[str, Any]:
    said = {"kind": verdict.kind, "label": verdict.label, "rule": verdict.rule, "text": verdict.text}
    return {
        "format": FORMAT,
        "thresholds": asdict(thresholds),
        "said": said,
        "samples": [_plain(sample) for sample in samples],
    }


def read_case(raw: Mapping[str, Any]) -> tuple[list[Sample], Thresholds, dict[str, str]]:
    """(samples, thresholds, what was said). Raises ValueError when it is not a case of this format."""
    if raw.get("format") != FORMAT or not isinstance(raw.get("samples"), list):
        raise ValueError("this is not a saved case of format 1")
    try:
        samples = [_build(Sample, sample) for sample in raw["samples"]]
        return samples, _build(Thresholds, raw["thresholds"]), dict(raw["said"])
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"the saved case is damaged: {error}") from error


def _plain(value: Any) -> Any:
    """Dataclasses without fields that have their default value: a case is kept small."""
    if is_dataclass(value) and not isinstance(value, type):
        parts = {}
        for part in fields(value):
            found = getattr(value, part.name)
            default = part.default_factory() if part.default_factory is not MISSING else part.default
            if found != default or part.default is MISSING:
                parts[part.name] = _plain(found)
        return parts
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, tuple | list | frozenset | set):
        return [_plain(entry) for entry in (sorted(value) if isinstance(value, frozenset | set) else value)]
    return value


def _build(kind: Any, value: Any) -> Any:
    """The opposite of `_plain`, by the annotations of the dataclasses."""
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if is_dataclass(kind) and isinstance(kind, type):
        hints = typing.get_type_hints(kind)
        return kind(**{name: _build(hints[name], entry) for name, entry in value.items() if name in hints})
    if value is None or kind is Any:
        return value
    if origin in (typing.Union, types.UnionType):
        return _build(next(part for part in parts if part is not type(None)), value)
    if origin is tuple:
        inner = parts[:1] * len(value) if len(parts) == 2 and parts[1] is Ellipsis else parts
        return tuple(_build(part, entry) for part, entry in zip(inner, value, strict=True))
    if origin is frozenset:
        return frozenset(_build(parts[0], entry) for entry in value)
    if isinstance(value, dict):  # a mapping from numbers
        return {int(key): _build(parts[1], entry) for key, entry in value.items()}
    return value
