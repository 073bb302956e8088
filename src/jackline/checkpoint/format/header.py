"""The header of a safetensors file, written and parsed without the safetensors package.

The writer process has neither torch nor numpy nor the safetensors package. The header is padded with blanks until the
tensors begin at a multiple of 4096, so that the same memory can be written with O_DIRECT.
The safetensors library reads what this writes (its rules: no holes between tensors, header below 100 MB), and this
module refuses whatever the library would refuse. Owns no I/O.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from typing import Any

from jackline.checkpoint.format.manifest import Damage, parse_json
from jackline.immutable import immutable

ALIGNMENT = 4096
LINE_BYTES = 64
MAX_HEADER_BYTES = 100_000_000
_LENGTH_BYTES = 8

# Bytes per element in the file. Other dtypes (complex, exotic floats) are stored as one of these; state.json keeps
# the true dtype.
ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F16": 2, "BF16": 2, "I16": 2, "U16": 2,
    "F32": 4, "I32": 4, "U32": 4, "F64": 8, "I64": 8, "U64": 8,
}  # fmt: skip


@immutable
class StoredTensor:
    """One tensor in a file. `begin` and `end` count from the first tensor byte, as the format defines it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@immutable
class Header:
    """What a tensor file holds, and where its tensors begin in the file."""

    tensors: tuple[StoredTensor, ...]
    data_offset: int

    @property
    def size_bytes(self) -> int:
        return self.data_offset + max((tensor.end for tensor in self.tensors), default=0)


def lay_out(tensors: Iterable[tuple[str, str, Sequence[int]]]) -> tuple[StoredTensor, ...]:
    """Place tensors given as (name, dtype, shape) without holes.

    Tensors that fill whole cache lines come first, so that each begins on a cache line and can be copied 16 bytes at
    a time. The rest is sorted by element size, widest first, so that every tensor begins at a multiple of its own
    element size. The format does not allow padding.
    """
    sized = [(name, dtype, shape, ITEM_BYTES[dtype] * math.prod(shape)) for name, dtype, shape in tensors]
    placed, position = [], 0
    for name, dtype, shape, size in sorted(sized, key=lambda one: (one[3] % LINE_BYTES != 0, -ITEM_BYTES[one[1]])):
        end = position + size
        placed.append(StoredTensor(name, dtype, tuple(shape), position, end))
        position = end
    return tuple(placed)


def build_header(tensors: Iterable[StoredTensor]) -> bytes:
    """The bytes from the beginning of the file to the first tensor; their count is a multiple of 4096."""
    body: dict[str, Any] = {"__metadata__": {"format": "pt", "writer": "jackline"}}
    for tensor in tensors:
        if tensor.name == "__metadata__":
            raise ValueError("a tensor cannot be called '__metadata__'")
        offsets = [tensor.begin, tensor.end]
        body[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": offsets}
    text = json.dumps(body, separators=(",", ":"), ensure_ascii=False).encode()
    total = -(-(_LENGTH_BYTES + len(text)) // ALIGNMENT) * ALIGNMENT
    if total > MAX_HEADER_BYTES:
        raise ValueError(f"{len(body) - 1} tensors do not fit into one file's header")
    text = text.ljust(total - _LENGTH_BYTES, b" ")
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def header_length(first_bytes: bytes, file_size: int, what: str) -> int:
    """The header's length, length field included; raises Damage when the file states an impossible one."""
    if len(first_bytes) < _LENGTH_BYTES:
        raise Damage(f"{what} is too short for a header")
    length = int.from_bytes(first_bytes[:_LENGTH_BYTES], "little")
    if length > MAX_HEADER_BYTES or _LENGTH_BYTES + length > file_size:
        raise Damage(f"{what} says its header has {length} bytes; the file has {file_size}")
    return _LENGTH_BYTES + length


def parse_header(data: bytes, file_size: int, what: str) -> Header:
    """The header in `data` (the file's beginning), with every number checked against the file's size."""
    length = header_length(data, file_size, what)
    body = parse_json(data[_LENGTH_BYTES:length], f"the header of {what}")
    if not isinstance(body, dict):
        raise Damage(f"the header of {what} is not an object")
    tensors = [_tensor(name, value, what) for name, value in body.items() if name != "__metadata__"]
    tensors.sort(key=lambda tensor: (tensor.begin, tensor.end))
    position = 0
    for tensor in tensors:
        if tensor.begin != position:
            raise Damage(f"{what}: {tensor.name[:80]!r} begins at {tensor.begin}, not at {position}")
        position = tensor.end
    if length + position != file_size:
        raise Damage(f"{what} has {file_size} bytes; its header speaks of {length + position}")
    return Header(tuple(tensors), length)


def _tensor(name: str, value: Any, what: str) -> StoredTensor:
    try:
        dtype, shape, (begin, end) = value["dtype"], value["shape"], value["data_offsets"]
        item = ITEM_BYTES[dtype]
        numbers = [*shape, begin, end]
    except (TypeError, KeyError, ValueError):
        raise Damage(f"{what}: the header's entry {name[:80]!r} cannot be read") from None
    if not all(type(number) is int and 0 <= number < 2**62 for number in numbers):
        raise Damage(f"{what}: the header's entry {name[:80]!r} has impossible numbers")
    if end - begin != item * math.prod(shape):
        raise Damage(f"{what}: {name[:80]!r} has {end - begin} bytes; its shape needs {item * math.prod(shape)}")
    return StoredTensor(name, dtype, tuple(shape), begin, end)
