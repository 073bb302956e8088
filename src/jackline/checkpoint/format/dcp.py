"""A folder of torch.distributed.checkpoint (DCP), read without torch and without unpickling.

    .metadata                a pickle: which tensors there are, their shapes, and where each part of them is
    __0_0.distcp ...         the parts, each written by torch.save: a zip archive with a pickle and raw bytes

A pickle is a program, and loading one runs it. Here its instructions are read (`read_plain`) and only build plain
containers: a class or function that it names stays a name. The bytes of the tensors are copied as they are.
Owns both formats and the copy into one safetensors file for each top-level key. Other values are left out.
"""

from __future__ import annotations

import math
import pickletools
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, cast

from jackline.checkpoint.format.export import Exported, Piece, safe_file_name, write_tensors
from jackline.checkpoint.format.header import ITEM_BYTES
from jackline.checkpoint.format.manifest import TENSORS, Damage, is_safe_file_name
from jackline.checkpoint.format.regions import Region, parse_parts, runs_of
from jackline.checkpoint.format.verify import open_to_read
from jackline.errors import JacklineError, UsageError
from jackline.immutable import immutable
from jackline.rundir.access.reading import read_whole

METADATA = ".metadata"
_MAX_METADATA_BYTES = 256 << 20
_MAX_PICKLE_BYTES = 1 << 20  # of one part
_MAX_INSTRUCTIONS = 50_000_000
_CLASSES = "torch.distributed.checkpoint.metadata."
_DTYPES = {
    "torch.float64": "F64", "torch.float32": "F32", "torch.float16": "F16", "torch.bfloat16": "BF16",
    "torch.int64": "I64", "torch.int32": "I32", "torch.int16": "I16", "torch.int8": "I8", "torch.uint8": "U8",
    "torch.uint16": "U16", "torch.uint32": "U32", "torch.uint64": "U64", "torch.bool": "BOOL",
    "torch.float8_e4m3fn": "F8_E4M3", "torch.float8_e5m2": "F8_E5M2",
}  # fmt: skip


@immutable
class Named:
    """A class or function that a pickle names. It is never looked up."""

    name: str


@dataclass(eq=False)
class Built:
    """What a pickle wants to have made by a call: the name, the arguments, and the state given afterwards."""

    name: str
    arguments: tuple[Any, ...]
    state: Any = None


_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_EMPTY: dict[str, type[Any]] = {"EMPTY_DICT": dict, "EMPTY_LIST": list, "EMPTY_TUPLE": tuple, "EMPTY_SET": set}
_VALUES = (
    *("BININT", "BININT1", "BININT2", "LONG1", "LONG4", "INT", "LONG", "BINFLOAT", "FLOAT", "SHORT_BINUNICODE"),
    *("BINUNICODE", "BINUNICODE8", "SHORT_BINBYTES", "BINBYTES", "BINBYTES8", "UNICODE"),
)
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


@dataclass
class _Machine:
    """The stack and the memory of a pickle's instructions."""

    stack: list[Any] = field(default_factory=list)
    marks: list[int] = field(default_factory=list)
    memory: dict[int, Any] = field(default_factory=dict)

    def since_mark(self) -> list[Any]:
        begin = self.marks.pop()
        found, self.stack[begin:] = self.stack[begin:], []
        return found

    def step(self, name: str, argument: Any) -> None:
        stack = self.stack
        if name in _VALUES or name in _CONSTANTS:
            stack.append(_CONSTANTS.get(name, argument))
        elif name in _EMPTY:
            stack.append(_EMPTY[name]())
        elif name == "MARK":
            self.marks.append(len(stack))
        elif name in ("MEMOIZE", "PUT", "BINPUT", "LONG_BINPUT"):
            self.memory[len(self.memory) if name == "MEMOIZE" else int(argument)] = stack[-1]
        elif name in ("GET", "BINGET", "LONG_BINGET"):
            stack.append(self.memory[int(argument)])
        elif not self._collect(name) and not self._call(name, argument):
            raise ValueError(f"the instruction {name} is not allowed")

    def _collect(self, name: str) -> bool:
        """Instructions that put values into containers."""
        stack = self.stack
        if name in _TUPLES:
            count = _TUPLES[name]
            stack[-count:] = [tuple(stack[-count:])]
        elif name == "TUPLE":
            stack.append(tuple(self.since_mark()))
        elif name in ("APPEND", "APPENDS", "ADDITEMS"):
            values = [stack.pop()] if name == "APPEND" else self.since_mark()
            stack[-1].extend(values) if isinstance(stack[-1], list) else stack[-1].update(values)
        elif name in ("SETITEM", "SETITEMS"):
            values = [stack.pop(-2), stack.pop()] if name == "SETITEM" else self.since_mark()
            cast("dict[Any, Any]", stack[-1]).update(zip(values[::2], values[1::2], strict=True))
        else:
            return False
        return True

    def _call(self, name: str, argument: Any) -> bool:
        """Instructions that would call something: the call is noted, and nothing runs."""
        stack = self.stack
        if name == "GLOBAL":
            stack.append(Named(str(argument).replace(" ", ".")))
        elif name == "STACK_GLOBAL":
            word = stack.pop()
            stack[-1] = Named(f"{stack[-1]}.{word}")
        elif name in ("REDUCE", "NEWOBJ"):
            arguments = stack.pop()
            stack[-1] = _made(stack[-1], arguments)
        elif name == "BUILD":
            state = stack.pop()
            if isinstance(stack[-1], Built):
                stack[-1].state = state
        elif name == "BINPERSID":
            stack[-1] = Built("persistent", (stack[-1],))
        else:
            return False
        return True


def _made(what: Any, arguments: Any) -> Any:
    if not isinstance(what, Named) or not isinstance(arguments, tuple):
        raise ValueError("a call of something without a name")
    if what.name == "torch.Size":
        return tuple(arguments[0]) if arguments else ()
    if what.name == "collections.OrderedDict" and not arguments:
        return {}
    return Built(what.name, arguments)


def read_plain(data: bytes, what: str) -> Any:
    """The value that a pickle describes, of plain containers, names and calls that are not made. Raises Damage."""
    machine = _Machine()
    try:
        for number, (instruction, argument, _) in enumerate(pickletools.genops(data)):
            if number > _MAX_INSTRUCTIONS:
                raise ValueError("too many instructions")
            if instruction.name == "STOP":
                return machine.stack.pop()
            if instruction.name not in ("PROTO", "FRAME"):
                machine.step(instruction.name, argument)
    except (ValueError, TypeError, IndexError, KeyError, AttributeError, OverflowError, MemoryError) as problem:
        raise Damage(f"{what} makes no sense: {str(problem)[:120]}") from None
    raise Damage(f"{what} ends early")


# -- the folder -----------------------------------------------------------------------------------------------------


@immutable
class Tensor:
    """One tensor of the folder: where it belongs, and where the bytes of its parts are."""

    key: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    parts: tuple[tuple[Region, str, int, int], ...]  # region, file, where it begins, length


def read_tensors(folder: Path) -> tuple[list[Tensor], list[str]]:
    """All tensors of a DCP folder, and the names of values that are none."""
    try:
        data = read_whole(folder / METADATA, _MAX_METADATA_BYTES)
    except OSError as problem:
        raise Damage(f"{METADATA} cannot be read: {problem.strerror or problem}") from None
    metadata = read_plain(data, METADATA)
    try:
        state = metadata.state
        stored = {_place(index): info.state for index, info in state["storage_data"].items()}
        paths = state.get("planner_data") or {}
        tensors, others = [], []
        for fqn, entry in state["state_dict_metadata"].items():
            if entry.name == f"{_CLASSES}TensorStorageMetadata":
                tensors.append(_tensor(str(fqn), entry.state, stored, paths.get(fqn)))
            else:
                others.append(str(fqn))
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as problem:
        raise Damage(f"{METADATA} is not one of torch.distributed.checkpoint ({str(problem)[:120]})") from None
    return tensors, others


def _place(index: Any) -> tuple[str, tuple[int, ...]]:
    return str(index.state["fqn"]), tuple(index.state.get("offset") or ())


def _tensor(fqn: str, state: dict[str, Any], stored: dict[Any, Any], path: Any) -> Tensor:
    dtype = state["properties"].state[0].name
    if dtype not in _DTYPES:
        raise ValueError(f"{fqn[:80]} has the dtype {str(dtype)[:40]}")
    shape = tuple(int(size) for size in state["size"])
    parts = []
    for chunk in state["chunks"] if math.prod(shape) else ():
        region = Region(tuple(map(int, chunk.state["offsets"])), tuple(map(int, chunk.state["sizes"])))
        info = stored.get((fqn, region.offsets)) or stored[fqn, ()]
        if info.get("transform_descriptors"):
            raise ValueError(f"{fqn[:80]} is compressed")
        parts.append((region, str(info["relative_path"]), int(info["offset"]), int(info["length"])))
    node = {
        "shape": shape,
        "parts": [{"file": "", "name": "", "offsets": r.offsets, "shape": r.shape} for r, *_ in parts],
    }
    if math.prod(shape):
        parse_parts(node)  # every element once
    words = [str(word) for word in path] if isinstance(path, tuple | list) and path else fqn.split(".", 1)
    key, name = (words[0], ".".join(words[1:])) if len(words) > 1 else ("model", words[0])
    return Tensor(key, name, _DTYPES[dtype], shape, tuple(parts))


def import_folder(folder: Path, out: Path) -> tuple[list[Exported], list[str]]:
    """Write `KEY.safetensors` for each top-level key of a DCP folder into `out`; also names that were left out."""
    if not (folder / METADATA).is_file():
        raise UsageError(
            f"{folder} is no folder of torch.distributed.checkpoint: it has no {METADATA}",
            hint="give the folder that holds the .distcp files",
        )
    try:
        tensors, others = read_tensors(folder)
        groups: dict[str, list[Tensor]] = {}
        for tensor in tensors:
            groups.setdefault(tensor.key, []).append(tensor)
        out.mkdir(parents=True, exist_ok=True)
        names = {key: safe_file_name(key) for key in groups}
        if len(set(names.values())) < len(names):
            names = {key: f"{name}-{number}" for number, (key, name) in enumerate(names.items(), 1)}
        return [_import_key(folder, out / (names[key] + TENSORS), key, groups[key]) for key in groups], others
    except Damage as damage:
        raise JacklineError(
            f"{folder} cannot be read: {damage}",
            hint="save it again with torch.distributed.checkpoint.save, without compression",
        ) from None


def _import_key(folder: Path, target: Path, key: str, tensors: list[Tensor]) -> Exported:
    pieces = {tensor.name: list(_pieces(folder, tensor)) for tensor in tensors}
    if len(pieces) < len(tensors):
        raise Damage(f"two tensors of {key[:80]!r} have the same name")
    size = write_tensors(target, [(tensor.name, tensor.dtype, tensor.shape) for tensor in tensors], pieces)
    return Exported(key, target, size, len(tensors), ())


def _pieces(folder: Path, tensor: Tensor) -> Iterator[Piece]:
    item = ITEM_BYTES[tensor.dtype]
    for region, file, offset, length in tensor.parts:
        if not is_safe_file_name(file):
            raise Damage(f"{METADATA} names a file outside its folder: {file[:80]!r}")
        path = folder / file
        start = _find_bytes(path, (offset, length), region, item)
        for first, count in runs_of(region, tensor.shape):
            yield Piece(path, start, first * item, count * item)
            start += count * item


def _find_bytes(path: Path, place: tuple[int, int], region: Region, item: int) -> int:
    """Where the raw bytes of a part begin in its file: in a zip archive of torch.save, which stores them as is."""
    offset, length = place
    try:
        with open(open_to_read(path), "rb") as file, zipfile.ZipFile(_Window(file, offset, length)) as archive:
            inside = {info.filename.partition("/")[2]: info for info in archive.infolist()}
            described = inside["data.pkl"]
            if described.file_size > _MAX_PICKLE_BYTES or described.compress_type != zipfile.ZIP_STORED:
                raise Damage(f"{path.name} is not as torch.save writes it")
            name = _storage_name(read_plain(archive.read(described), path.name), region, path.name)
            data = inside[f"data/{name}"]
            if data.file_size < region.numel * item or data.compress_type != zipfile.ZIP_STORED:
                raise Damage(f"{path.name}: a part has {data.file_size} bytes; {region.numel * item} expected")
            file.seek(offset + data.header_offset)
            head = file.read(30)
            skipped = int.from_bytes(head[26:28], "little") + int.from_bytes(head[28:30], "little")
            return offset + data.header_offset + 30 + skipped
    except (OSError, KeyError, zipfile.BadZipFile, NotImplementedError, RuntimeError, ValueError) as problem:
        raise Damage(f"{path.name} cannot be read: {str(problem)[:120]}") from None


def _storage_name(value: Any, region: Region, what: str) -> str:
    """The name of the storage behind one tensor, which must be all of it, in order."""
    while isinstance(value, Built) and value.name.endswith(("_rebuild_parameter", "_rebuild_parameter_with_state")):
        value = value.arguments[0]
    if not isinstance(value, Built) or value.name != "torch._utils._rebuild_tensor_v2":
        raise Damage(f"{what} holds a part that is no plain tensor")
    storage, start, sizes, strides = value.arguments[:4]
    dense, wanted = 1, list[int]()
    for size in reversed(region.shape):
        wanted.insert(0, dense)
        dense *= size
    is_dense = all(size == 1 or one == other for size, one, other in zip(sizes, strides, wanted, strict=True))
    if start or tuple(sizes) != region.shape or not is_dense:
        raise Damage(
            f"{what} holds a tensor of shape {list(sizes)} that is transposed or a view; save a .contiguous() one"
        )
    return str(storage.arguments[0][2])


class _Window:
    """A part of a file as a file of its own, for zipfile."""

    def __init__(self, file: BinaryIO, begin: int, length: int) -> None:
        self._file, self._begin, self._length, self._at = file, begin, length, 0

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = max(0, (0, self._at, self._length)[whence] + offset)
        return self._at

    def read(self, size: int = -1) -> bytes:
        left = max(0, self._length - self._at)
        self._file.seek(self._begin + self._at)
        found = self._file.read(left if size < 0 else min(size, left))
        self._at += len(found)
        return found
