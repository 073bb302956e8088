"""Settings that are declared once: what is read from a declaration, and every wrong value named in full."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest

from jackline.errors import UsageError
from jackline.settings import (
    FRACTION,
    OWN_GROUP,
    Range,
    above,
    at_least,
    between,
    declare,
    groups_of,
    setting,
    settings_of,
    validate,
)


@dataclass(frozen=True)
class Boat:
    GROUP: ClassVar[str] = "hull"

    length: float = setting(9.5, "From bow to stern.", unit="metres", allowed=above(0))
    crew: int | None = setting(None, "People on board.", allowed=between(1, 12))
    rig: Literal["sloop", "ketch"] = setting("sloop", "Masts and sails.", group="sails")
    reef: float = setting(0.0, "Share of the sail that is taken in.", group="sails", allowed=FRACTION)
    is_heeling: bool = False
    name: str = "Nelly"
    log: list[int] = field(default_factory=list, metadata=declare("Miles of each day.", unit="miles"))

    def __post_init__(self) -> None:
        validate(self)


@dataclass(frozen=True)
class Racer(Boat):
    length: float = 12.0
    reef: float = setting(0.1, allowed=between(0, 0.5))
    sponsor: str = ""


def test_a_declaration_tells_type_unit_default_meaning_range_and_group() -> None:
    length, crew, rig = (settings_of(Boat)[name] for name in ("length", "crew", "rig"))
    assert (length.type, length.default, length.is_optional) == (float, 9.5, False)
    assert (length.declared.unit, length.declared.meaning, length.declared.group) == (
        "metres",
        "From bow to stern.",
        "hull",
    )
    assert (crew.type, crew.default, crew.is_optional) == (int, None, True)
    assert (rig.choices, rig.declared.group) == (("sloop", "ketch"), "sails")
    assert {name: one.values_text for name, one in settings_of(Boat).items()} == {
        "length": "number of metres, above 0",
        "crew": "whole number, from 1 to 12",
        "rig": "sloop or ketch",
        "reef": "number, from 0 to below 1",
        "is_heeling": "true or false",
        "name": "text",
        "log": "list of miles",
    }


def test_a_plain_field_is_a_setting_without_a_meaning() -> None:
    assert settings_of(Boat)["name"].declared.meaning == ""
    assert [one.name for one in groups_of(Boat)["hull"]] == ["length", "crew", "is_heeling", "name", "log"]


def test_another_default_keeps_the_rest_of_the_declaration() -> None:
    found = settings_of(Racer)
    assert (found["length"].default, found["length"].declared) == (12.0, settings_of(Boat)["length"].declared)
    reef = found["reef"].declared
    assert (reef.meaning, reef.group, reef.allowed) == (
        "Share of the sail that is taken in.",
        "sails",
        between(0, 0.5),
    )
    assert found["sponsor"].declared.group == OWN_GROUP


@pytest.mark.parametrize(
    ("limits", "text"),
    [
        (at_least(1), "1 or more"),
        (above(0), "above 0"),
        (between(0, 1), "from 0 to 1"),
        (between(0, 65536), "from 0 to 65536"),
        (FRACTION, "from 0 to below 1"),
        (Range(0, 1, has_low=False, has_high=False), "above 0 and below 1"),
        (Range(0, 1, has_low=False), "above 0 and at most 1"),
        (Range(high=5), "5 or less"),
        (Range(high=5, has_high=False), "below 5"),
    ],
)
def test_a_range_is_said_in_words(limits: Range, text: str) -> None:
    assert str(limits) == text


def test_limits_belong_to_a_range_only_where_they_are_said_to() -> None:
    Boat(crew=1, reef=0)
    Boat(crew=12, reef=math.nextafter(1, 0))
    Boat(length=math.nextafter(0, 1))


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "below the limit": (
        {"crew": 0},
        "error: crew=0 is too small\n       crew: People on board.\nhint: it must be from 1 to 12",
    ),
    "above the limit": (
        {"crew": 13},
        "error: crew=13 is too large\n       crew: People on board.\nhint: it must be from 1 to 12",
    ),
    "at an open limit": (
        {"length": 0.0},
        "error: length=0.0 is too small\n       length: From bow to stern.\nhint: it must be above 0",
    ),
    "another word": ({"rig": "slop"}, "error: rig is one of sloop, ketch, not 'slop'\nhint: did you mean 'sloop'?"),
    "far from any word": ({"rig": 7}, "error: rig is one of sloop, ketch, not '7'"),
    "text for a number": ({"length": "long"}, "error: length=long is not a number"),
    "not finite": ({"length": math.nan}, "error: length=nan is not a number"),
    "part of a whole number": ({"crew": 2.5}, "error: crew=2.5 is not a whole number"),
    "true for a whole number": ({"crew": True}, "error: crew=True is not a whole number"),
    "text for a flag": ({"is_heeling": "yes"}, "error: is_heeling=yes is not true or false"),
    "a number for a text": ({"name": 3}, "error: name=3 is not a text"),
    "None where it is not allowed": ({"length": None}, "error: length=None is not a number"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_value_is_named_with_its_meaning_and_what_is_allowed(case: str) -> None:
    given, text = WRONG[case]
    with pytest.raises(UsageError) as caught:
        Boat(**given)
    assert str(caught.value) == text


def test_values_of_python_that_mean_the_same_are_accepted(tmp_path: Path) -> None:
    Boat(length=10, is_heeling=1, name=tmp_path, crew=None)  # type: ignore[arg-type]
