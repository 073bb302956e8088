"""Compares what a command answers with the tables of docs/reference/json.md."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

REFERENCE = Path(__file__).parents[2] / "docs" / "reference" / "json.md"
_TYPES: dict[str, tuple[type, ...]] = {
    "text": (str,),
    "whole": (int,),
    "number": (int, float),
    "yes/no": (bool,),
    "object": (dict,),
    "list": (list,),
    "null": (type(None),),
}


@cache
def schemas() -> dict[str, dict[str, str]]:
    """schema -> field -> its type, as documented."""
    found: dict[str, dict[str, str]] = {}
    name = ""
    for line in REFERENCE.read_text(encoding="utf-8").splitlines():
        if match := re.match(r"## .*`(jackline\.\w+/\d+)`", line):
            name = match[1]
            found[name] = {}
        elif line.startswith("## "):
            name = ""
        elif name and (match := re.match(r"\| `(\w+)` \| ([^|]+) \|", line)):
            found[name][match[1]] = match[2].strip()
    return found


def check_answer(schema: str, answer: dict[str, Any]) -> None:
    """Every documented field is there with a documented type, and no other field."""
    fields = schemas()[schema]
    assert answer["schema"] == schema
    assert list(answer) == list(fields), f"{schema}: {set(answer) ^ set(fields)}"
    for name, words in fields.items():
        allowed = tuple(kind for word in words.split(" or ") for kind in _TYPES[word])
        value = answer[name]
        is_right = isinstance(value, allowed) and (not isinstance(value, bool) or bool in allowed)
        assert is_right, f"{schema}: {name} is {value!r}, documented as {words}"
