from __future__ import annotations

import json
import math
from collections import Counter, OrderedDict, deque
from enum import Enum, IntEnum
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jackline.checkpoint.format.manifest import Damage
from jackline.checkpoint.format.tree import NOT_A_LEAF, CannotSave, decode, encode


def through(value: Any) -> Any:
    """Encoded, written as strict JSON, read and decoded."""
    node = encode(value, "top", lambda *_: NOT_A_LEAF)
    return decode(json.loads(json.dumps(node, allow_nan=False)), "top", lambda *_: NOT_A_LEAF)


scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
keys = st.text() | st.integers() | st.tuples(st.integers(), st.text())
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(keys, inner) | st.lists(inner).map(deque)
    ),
    max_leaves=20,
)


@settings(deadline=None)
@given(values)
def test_any_nest_of_plain_values_comes_back_equal_and_of_the_same_kinds(value: Any) -> None:
    back = through(value)
    assert back == value
    assert repr(back) == repr(value)


def test_rare_values_come_back() -> None:
    for value in (
        {1, 2},
        frozenset({"ab"}),  # one word: the order of more depends on the hash seed of the process
        bytearray(b"\x00\xff"),
        1 + 2j,
        complex("-0-0j"),
        OrderedDict(b=1, a=2),
        Counter("aab"),
        deque([1, 2], maxlen=3),
        {"$": "a key of ours"},
        -0.0,
        2**200,
        math.inf,
        -math.inf,
    ):
        back = through(value)
        assert back == value and repr(back) == repr(value) and type(back) is type(value)
    assert math.isnan(through(math.nan))
    assert through(deque([1], maxlen=3)).maxlen == 3


def test_numbers_with_a_name_come_back_as_what_they_are_worth() -> None:
    class Colour(IntEnum):
        RED = 3

    assert through(Colour.RED) == 3


def test_a_list_that_changes_after_the_capture_is_not_changed_in_it() -> None:
    live = [1, 2, 3]
    node = encode({"a": live}, "", lambda *_: NOT_A_LEAF)
    live.append(4)
    assert node == {"a": [1, 2, 3]}


def test_a_thing_without_state_dict_is_refused_with_its_place() -> None:
    class Thing(Enum):
        A = 1

    with pytest.raises(CannotSave) as caught:
        through({"outer": [Thing.A]})
    assert str(caught.value) == (
        "error: top.outer.0 cannot be saved: a 'Thing' has no state_dict()\n"
        "hint: give it state_dict() and load_state_dict(), or save numbers, text, lists, dicts and tensors instead"
    )


@pytest.mark.parametrize(
    "node",
    [
        {"$": "pickle", "base64": "gASVAAAAAAAAAAAu"},
        {"$": "object", "class": "os.system"},
        {"$": "bytes", "base64": "not base64!"},
        {"$": "tuple"},
        {"$": "dict", "items": [[1]]},
        {"$": ["tuple"]},
        {"$": "deque", "items": [], "maxlen": "x"},
    ],
)
def test_an_unknown_or_broken_kind_makes_nothing(node: Any) -> None:
    with pytest.raises(Damage, match=r"^state\.json: here cannot be read as a "):
        decode(node, "here", lambda *_: NOT_A_LEAF)
