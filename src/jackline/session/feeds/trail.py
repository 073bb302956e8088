"""What was handed to the loop, as checksums: one for a batch, and a chain of them for an epoch, to compare at resume.

The chain has marks along the way, at most 8192, so that it stays small in a checkpoint and still says about where the
first difference is. Owns the checksums. Does not own what follows from a difference.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy
import torch
import xxhash

from jackline.checkpoint.state.dtypes import plain_bytes

_MAX_MARKS = 8192
_WHOLE_BYTES = 1 << 16  # of a tensor; of a larger one both ends and values between them
_SAMPLED = 4096
_MAX_ITEMS = 1024


class Trail:
    """The chain of one epoch. The batch added last can be left out: the loop may not have used it."""

    def __init__(self) -> None:
        self.count = 0
        self._value, self._stride = 0, 1
        self._marks: list[int] = []
        self._last: int | None = None

    def add(self, checksum: int) -> None:
        self._settle()
        self._last = checksum

    def state(self, *, takes_back: bool = False) -> dict[str, Any]:
        if not takes_back:
            self._settle()
        marks = b"".join(struct.pack("<I", mark) for mark in self._marks).hex()
        return {"count": self.count, "value": self._value, "stride": self._stride, "marks": marks}

    def _settle(self) -> None:
        if self._last is None:
            return
        self._value = zlib.crc32(struct.pack("<I", self._last & 0xFFFFFFFF), self._value)
        self.count, self._last = self.count + 1, None
        if self.count % self._stride == 0:
            self._marks.append(self._value)
        if len(self._marks) > _MAX_MARKS:
            self._marks, self._stride = self._marks[1::2], self._stride * 2


def first_difference(saved: Any, now: Trail) -> int | None:
    """The number of the batch, counted from 1, at or shortly before which `now` has left the saved chain.

    None when every batch that both have is the same. `saved` is from `Trail.state`.
    """
    if not isinstance(saved, Mapping) or "marks" not in saved:
        return None
    found = now.state()
    ours = dict(_marks(found))
    for count, value in _marks(saved):
        if count in ours and ours[count] != value:
            return count
    if saved["count"] == found["count"] and saved["value"] != found["value"]:
        return int(saved["count"])
    return None


def _marks(state: Mapping[str, Any]) -> list[tuple[int, int]]:
    data, stride = bytes.fromhex(state["marks"]), int(state["stride"])
    return [((number + 1) * stride, value) for number, (value,) in enumerate(struct.iter_unpack("<I", data))]


def checksum(value: Any) -> int:
    """32 bits of a batch, an attribute or indices. What is on a GPU counts by its shape: reading it would wait."""
    state = xxhash.xxh3_64()
    try:
        _walk(value, state.update, 8)
    except Exception:  # an object that cannot be looked into
        state.update(type(value).__name__.encode())
    return int(state.intdigest()) & 0xFFFFFFFF


def _walk(value: Any, add: Callable[[bytes], None], depth: int) -> None:
    if isinstance(value, torch.Tensor | numpy.ndarray):
        add(f"{value.dtype}{list(value.shape)}".encode())
        add(_read(value))
    elif value is None or isinstance(value, bool | int | float | str | complex | bytes):
        add(repr(value).encode())
    elif not depth:
        add(type(value).__name__.encode())
    elif isinstance(value, Mapping):
        for word, part in value.items():
            add(repr(word).encode())
            _walk(part, add, depth - 1)
    elif isinstance(value, list | tuple):
        add(f"{len(value)}".encode())
        for part in _few(value):
            _walk(part, add, depth - 1)
    elif isinstance(value, set | frozenset):
        add(repr(sorted(map(repr, value))).encode())
    else:
        add(type(value).__name__.encode())
        _walk(dict(getattr(value, "__dict__", {})), add, depth - 1)


def _read(value: Any) -> bytes:
    if isinstance(value, numpy.ndarray):
        if value.dtype.kind not in "biufc":
            return b""
        value = torch.from_numpy(numpy.ascontiguousarray(value).reshape(-1).view(numpy.uint8))
    is_readable = value.device.type == "cpu" and value.layout is torch.strided and not value.is_quantized
    return _sample(value.detach()) if is_readable and value.numel() else b""


def _few(value: Any) -> Any:
    """All of a short list; of a long one of numbers all as well, which is quick; else both ends and some between."""
    if len(value) <= _MAX_ITEMS:
        return value
    if all(type(part) is type(value[0]) for part in value) and isinstance(value[0], int | float):
        return [numpy.asarray(value)] if abs(max(value)) < 2**62 else [repr(value)]
    return [*value[: _MAX_ITEMS // 4], *value[:: len(value) // _MAX_ITEMS], *value[-_MAX_ITEMS // 4 :]]


def _sample(tensor: torch.Tensor) -> bytes:
    flat = tensor.reshape(-1)
    if flat.numel() * flat.element_size() > _WHOLE_BYTES:
        end = _WHOLE_BYTES // 4 // flat.element_size()
        flat = torch.cat([flat[:end], flat[:: max(1, flat.numel() // _SAMPLED)], flat[-end:]])
    if flat.is_complex() or flat.is_conj():
        flat = torch.view_as_real(flat.resolve_conj()).reshape(-1)
    return plain_bytes(flat)
