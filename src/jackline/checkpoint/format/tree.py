"""Nested plain Python values as JSON and back, exactly, without pickle.

JSON's own values are written as they are. Everything else is an object whose "$" names one of the types below. An
unknown type is refused, so loading a checkpoint can create values and nothing else.
Owns plain values. Types that only torch or numpy know are passed in as a leaf (capture.py, restore.py).
"""

from __future__ import annotations

import base64
import binascii
import math
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable
from typing import Any

from jackline.checkpoint.format.manifest import Damage
from jackline.errors import JacklineError

KIND = "$"
_WORDS = (type(None), bool, int, str)
_PLAIN = frozenset((*_WORDS, float))


class CannotSave(JacklineError):
    """A value that cannot be written down without guessing."""


NOT_A_LEAF = object()
Encode = Callable[[Any, str], Any]  # (value, where) -> node, or NOT_A_LEAF
Decode = Callable[[dict[str, Any], str], Any]  # (node, where) -> value, or NOT_A_LEAF


def encode(value: Any, where: str, leaf: Encode) -> Any:
    """`where` is the value's path, for messages and names.

    Containers are copied, so later changes to them do not show.
    """
    kind = type(value)
    if kind in _WORDS:
        return value
    if kind is float:
        return value if math.isfinite(value) else {KIND: "float", "value": repr(value)}
    node = leaf(value, where)
    if node is not NOT_A_LEAF:
        return node
    if isinstance(value, dict):
        return _encode_mapping(value, where, leaf)
    if isinstance(value, list | tuple | deque | set | frozenset):
        return _encode_sequence(value, where, leaf)
    return _encode_rare(value, where)


def decode(node: Any, where: str, leaf: Decode) -> Any:
    """The value that was encoded. Raises Damage for anything this version does not know."""
    if isinstance(node, list):
        return [decode(item, f"{where}.{index}", leaf) for index, item in enumerate(node)]
    if not isinstance(node, dict):
        return node
    if KIND not in node:
        return {key: decode(item, f"{where}.{key}", leaf) for key, item in node.items()}
    value = leaf(node, where)
    if value is not NOT_A_LEAF:
        return value
    try:
        return _decode_kind(node, where, leaf)
    except (KeyError, TypeError, ValueError, AttributeError, binascii.Error):
        raise Damage(f"state.json: {where or 'the top'} cannot be read as a {str(node.get(KIND))[:40]!r}") from None


def encode_bytes(value: bytes) -> dict[str, Any]:
    return {KIND: "bytes", "base64": base64.b64encode(value).decode()}


def decode_bytes(node: dict[str, Any]) -> bytes:
    return base64.b64decode(node["base64"], validate=True)


def _encode_mapping(value: dict[Any, Any], where: str, leaf: Encode) -> Any:
    is_plain = type(value) is dict and all(type(key) is str and key != KIND for key in value)
    if is_plain:
        return {key: encode(item, f"{where}.{key}", leaf) for key, item in value.items()}
    items = [[encode(key, where, leaf), encode(item, f"{where}.{key}", leaf)] for key, item in value.items()]
    kinds = {OrderedDict: "ordered", Counter: "counter"}
    return {KIND: kinds.get(type(value), "dict"), "items": items}


def _encode_sequence(value: Iterable[Any], where: str, leaf: Encode) -> Any:
    # A list of a million plain numbers is common (a shuffled order); its elements need not be encoded one by one.
    if type(value) is list and set(map(type, value)) <= _PLAIN and _all_finite(value):
        return list(value)
    items = [encode(item, f"{where}.{index}", leaf) for index, item in enumerate(value)]
    if isinstance(value, list):
        return items
    node: dict[str, Any] = {KIND: "tuple", "items": items}
    if isinstance(value, deque):
        node = {KIND: "deque", "items": items, "maxlen": value.maxlen}
    elif isinstance(value, set | frozenset):
        node[KIND] = "set" if isinstance(value, set) else "frozenset"
    return node


def _encode_rare(value: Any, where: str) -> Any:
    if isinstance(value, bytes | bytearray):
        node = encode_bytes(bytes(value))
        return node if isinstance(value, bytes) else {**node, KIND: "bytearray"}
    if isinstance(value, complex):
        return {KIND: "complex", "real": repr(value.real), "imag": repr(value.imag)}
    # Subclasses of numbers and str (numpy's float64 among them) are stored as their plain value.
    for plain in (bool, int, float, str):
        if isinstance(value, plain):
            return encode(plain(value), where, lambda *_: NOT_A_LEAF)
    raise CannotSave(
        f"{where} cannot be saved: a '{type(value).__name__}' has no state_dict()",
        hint="give it state_dict() and load_state_dict(), or save numbers, text, lists, dicts and tensors instead",
    )


def _decode_kind(node: dict[str, Any], where: str, leaf: Decode) -> Any:
    kind = node[KIND]
    if kind == "float":
        return float(node["value"])
    if kind == "complex":
        return complex(float(node["real"]), float(node["imag"]))
    if kind in ("bytes", "bytearray"):
        return decode_bytes(node) if kind == "bytes" else bytearray(decode_bytes(node))
    makers: dict[str, Callable[[Any], Any]] = {
        "dict": dict,
        "ordered": OrderedDict,
        "counter": lambda pairs: Counter(dict(pairs)),
    }
    if kind in makers:
        return makers[kind]([(decode(k, where, leaf), decode(v, f"{where}.{k}", leaf)) for k, v in node["items"]])
    items = [decode(item, f"{where}.{index}", leaf) for index, item in enumerate(node["items"])]
    if kind == "deque":
        return deque(items, node["maxlen"])
    return {"tuple": tuple, "set": set, "frozenset": frozenset}[kind](items)


def _all_finite(value: list[Any]) -> bool:
    return all(type(item) is not float or math.isfinite(item) for item in value)
