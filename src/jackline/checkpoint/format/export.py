"""A checkpoint's weights as one file that plain PyTorch loads; needs no torch and never loads the tensors.

In a checkpoint tied tensors are stored once. In the exported file every name has its own copy again, so that a strict
`load_state_dict` works for people who have never heard of Jackline. Owns the copy; the source is verified first.
The checkpoint of a Lightning run becomes a `.ckpt` file, and any a folder of torch.distributed.checkpoint, in a
process that has torch (state/ckpt.py).
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jackline.checkpoint.format.header import Header, StoredTensor, build_header, lay_out
from jackline.checkpoint.format.manifest import (
    MAX_SHOWN_STATE_BYTES,
    MAX_STATE_BYTES,
    STATE,
    TENSORS,
    Damage,
    Manifest,
    is_cheap_to_parse,
    parse_json,
)
from jackline.checkpoint.format.regions import SHARDED, Region, parse_parts, runs_of
from jackline.checkpoint.format.tree import KIND
from jackline.checkpoint.format.verify import open_to_read, read_header, verify_checkpoint
from jackline.errors import JacklineError, UsageError
from jackline.extras import require
from jackline.immutable import immutable
from jackline.rundir.access.reading import read_whole
from jackline.rundir.access.trust import judge
from jackline.rundir.layout import RunDir

_BLOCK_BYTES = 8 << 20
_CKPT, _LIGHTNING = "checkpoint", "pytorch-lightning_version"


@immutable
class Exported:
    """One exported file and its contents."""

    key: str
    path: Path
    size_bytes: int
    num_tensors: int
    left_out: tuple[str, ...]
    is_ckpt: bool = False  # Lightning's own file
    is_dcp: bool = False  # a folder of torch.distributed.checkpoint

    @property
    def lines(self) -> tuple[str, ...]:
        """The lines of plain PyTorch, or of Lightning, that load it."""
        if self.is_ckpt:
            return (
                f"module = YourModule.load_from_checkpoint({str(self.path)!r})  # the weights",
                f"trainer.fit(module, loader, ckpt_path={str(self.path)!r})  # or resume with Lightning alone",
            )
        strict = ", strict=False" if self.left_out else ""
        if self.is_dcp:
            key = self.key.partition("+")[0]
            word = key if key.isidentifier() else "model"
            return (
                "import torch.distributed.checkpoint as dcp",
                f"state = {{{safe_file_name(key)!r}: {word}.state_dict()}}  # on every rank",
                f"dcp.load(state, checkpoint_id={str(self.path)!r})",
                f"{word}.load_state_dict(state[{safe_file_name(key)!r}]{strict})",
            )
        return (
            "from safetensors.torch import load_file",
            f"state = load_file({str(self.path)!r})",
            f"{self.key if self.key.isidentifier() else 'model'}.load_state_dict(state{strict})",
        )


def export_weights(folder: Path, out: Path, keys: tuple[str, ...] = ()) -> list[Exported]:
    """Write `KEY.safetensors` for each module of the checkpoint (or the given keys) into `out`."""
    try:
        manifest = verify_checkpoint(folder)
        state = read_state(folder, manifest)
    except Damage as damage:
        raise JacklineError(
            f"{folder.name} is not whole and was not exported: {damage}",
            hint="`jackline checkpoints verify` tells which ones are; choose one with --step",
        ) from None
    theirs = state.get(_CKPT)
    if isinstance(theirs, dict) and _LIGHTNING in theirs and not keys:
        return [_export_ckpt(folder, out, manifest)]
    modules = {key: node for key, node in state.items() if _is_module(node)}
    unknown = [key for key in keys if key not in modules]
    if unknown or not modules:
        known = ", ".join(modules) or "none"
        raise UsageError(
            f"{folder.name} holds no model called '{', '.join(unknown) or 'model'}'", hint=f"it has: {known}"
        )
    out.mkdir(parents=True, exist_ok=True)
    wanted = {key: safe_file_name(key) for key in keys or modules}
    if len(set(wanted.values())) < len(wanted):  # two keys that only differ in signs a file name must not have
        wanted = {key: f"{name}-{number}" for number, (key, name) in enumerate(wanted.items(), 1)}
    try:
        return [_export(folder, out / (wanted[key] + TENSORS), key, modules[key], manifest) for key in wanted]
    except (Damage, KeyError, TypeError, ValueError, AttributeError) as problem:
        raise JacklineError(
            f"{folder.name} cannot be exported: {STATE} makes no sense ({problem})",
            hint="its bytes are as they were saved, but not by Jackline; choose another checkpoint with --step",
        ) from None


def read_state(folder: Path, manifest: Manifest) -> dict[str, Any]:
    """state.json as it is stored, for people and programs that want to look at it.

    A large one is parsed only in a run that this user has made: parsed values take several times their bytes.
    """
    entry = manifest.file(STATE)
    if entry is None or entry.size_bytes > MAX_STATE_BYTES:
        raise Damage(f"{STATE} is missing or too large")
    is_ours = judge(RunDir(folder.absolute().parent.parent)).is_ours
    limit = MAX_STATE_BYTES if is_ours else MAX_SHOWN_STATE_BYTES
    try:
        data = read_whole(folder / STATE, min(limit, entry.size_bytes))
    except OSError as problem:
        raise Damage(f"{STATE} cannot be read: {problem.strerror}") from None
    if not is_ours and not is_cheap_to_parse(data):
        raise Damage(f"{STATE} has too many parts to be looked at in a run that was not made here by you")
    state = parse_json(data, STATE)
    if not isinstance(state, dict):
        raise Damage(f"{STATE} is not an object")
    return state


def _export(folder: Path, target: Path, key: str, node: dict[str, Any], manifest: Manifest) -> Exported:
    headers: dict[str, tuple[Path, Header]] = {}

    def find(file: str, wanted: str, name: str) -> tuple[Path, int, StoredTensor]:
        entry = manifest.file(file)
        if entry is None:
            raise Damage(f"{STATE}: {key}.{name} refers to a tensor that is in no file")
        if file not in headers:
            headers[file] = (folder / file, read_header(folder / file, entry.size_bytes))
        path, header = headers[file]
        stored = next((tensor for tensor in header.tensors if tensor.name == wanted), None)
        if stored is None:
            raise Damage(f"{STATE}: {key}.{name} refers to a tensor that is in no file")
        return path, header.data_offset, stored

    shapes: dict[str, tuple[str, tuple[int, ...]]] = {}
    pieces: dict[str, list[Piece]] = {}
    for name, part in node["tensors"].items():
        if part.get(KIND) == SHARDED:
            shape, parts = parse_parts(part)
            found = [(*find(file + TENSORS, stored_name, name), region) for file, stored_name, region in parts]
            shapes[name] = (found[0][2].dtype, (*shape, *found[0][2].shape[len(shape) :]))
            pieces[name] = [piece for one in found for piece in _pieces_of(*one, shape)]
        else:
            path, data_offset, stored = find(str(part["file"]) + TENSORS, str(part["name"]), name)
            shapes[name] = (stored.dtype, stored.shape)
            pieces[name] = [Piece(path, data_offset + stored.begin, 0, stored.end - stored.begin)]
    size = write_tensors(target, [(name, *described) for name, described in shapes.items()], pieces)
    return Exported(key, target, size, len(shapes), tuple(node.get("left_out", ())))


class Piece(NamedTuple):
    """Bytes of a file that belong at `to` inside a tensor."""

    path: Path
    start: int
    to: int
    size: int


def _pieces_of(
    path: Path, data_offset: int, stored: StoredTensor, region: Region, shape: tuple[int, ...]
) -> Iterator[Piece]:
    """One part of a tensor of `shape`; an element may take more bytes than its dtype (complex numbers are pairs)."""
    if stored.shape[: len(shape)] != region.shape:
        raise Damage(f"{path.name}: {stored.name!r} has another shape than {STATE} says")
    item = (stored.end - stored.begin) // max(1, region.numel)
    start = data_offset + stored.begin
    for first, count in runs_of(region, shape):
        yield Piece(path, start, first * item, count * item)
        start += count * item


def safe_file_name(key: str) -> str:
    """A file name for a key of the state, which anybody may have chosen: inside the folder, and visible."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "_", key).lstrip(".-")[:100]
    return name or "model"


def _export_ckpt(folder: Path, out: Path, manifest: Manifest) -> Exported:
    require("a .ckpt file", "train", ("torch",))
    target = out / f"{folder.name}.ckpt"
    out.mkdir(parents=True, exist_ok=True)
    _run_with_torch(folder, str(folder), str(target))
    count = sum(len(read_header(folder / file.name, file.size_bytes).tensors) for file in _tensor_files(manifest))
    return Exported(_CKPT, target, target.stat().st_size, count, (), is_ckpt=True)


def export_dcp(folder: Path, out: Path, keys: tuple[str, ...] = ()) -> Exported:
    """The weights as a folder of torch.distributed.checkpoint, in a process that has torch."""
    require("a folder of torch.distributed.checkpoint", "train", ("torch",))
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"{out} exists already", hint="--out with a folder that does not exist yet")
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as place:
        parts = export_weights(folder, Path(place), keys)
        if any(part.is_ckpt for part in parts):
            raise UsageError(f"{folder.name} is of a Lightning run", hint="export it without --to: a .ckpt file")
        if out.exists():
            out.rmdir()
        _run_with_torch(folder, "--dcp", str(out), *(str(part.path) for part in parts))
    size = sum(path.stat().st_size for path in out.iterdir())
    names, left_out = "+".join(part.key for part in parts), tuple(name for part in parts for name in part.left_out)
    return Exported(names, out, size, sum(part.num_tensors for part in parts), left_out, is_dcp=True)


def _run_with_torch(folder: Path, *words: str) -> None:
    program = [sys.executable, "-m", "jackline.checkpoint.state.ckpt", *words]
    ended = subprocess.run(program, capture_output=True, text=True)
    if ended.returncode:
        last = (ended.stderr.strip().splitlines() or ["no output"])[-1]
        raise JacklineError(f"{folder.name} could not be exported: {last}", hint="`jackline checkpoints verify`")


def _tensor_files(manifest: Manifest) -> list[Any]:
    return [file for file in manifest.files if file.name.endswith(TENSORS)]


def write_tensors(
    target: Path, tensors: Sequence[tuple[str, str, tuple[int, ...]]], pieces: dict[str, list[Piece]]
) -> int:
    """A safetensors file of (name, dtype, shape), its bytes copied from other files. Written under a temporary name
    first, so that a half-written export is never mistaken for a finished one."""
    placed = lay_out(tensors)
    header = build_header(placed)
    draft = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        with open(draft, "xb") as file:
            file.write(header)
            for tensor in placed:
                for piece in pieces[tensor.name]:
                    file.seek(len(header) + tensor.begin + piece.to)
                    _copy_range(piece.path, piece.start, piece.size, file)
            size = file.seek(0, os.SEEK_END)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, target)
    finally:
        draft.unlink(missing_ok=True)
    return size


def _copy_range(path: Path, start: int, size: int, file: Any) -> None:
    fd = open_to_read(path)
    try:
        while size > 0:
            block = os.pread(fd, min(size, _BLOCK_BYTES), start)
            if not block:
                raise Damage(f"{path.name} ends early")
            file.write(block)
            start, size = start + len(block), size - len(block)
    finally:
        os.close(fd)


def _is_module(node: Any) -> bool:
    return isinstance(node, dict) and node.get(KIND) == "module" and isinstance(node.get("tensors"), dict)
