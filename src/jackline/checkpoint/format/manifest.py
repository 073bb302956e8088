"""The checkpoint format, number 1: names, manifest, and what is refused.

    checkpoints/step-00001200/
        model.safetensors  optim.safetensors ...   one file for every top-level key that holds tensors
        model.rank-1.safetensors ...               one rank's parts of tensors that are divided over ranks
        state.json                                 everything that is not a tensor
        manifest.json                              length and checksums of all the others, and of itself

Owns the names and the manifest. Does not own the tensor files' headers (header.py), the bytes (verify.py) or the
order of writing (commit.py). Nothing here opens a file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import field
from typing import Any, NamedTuple

from jackline.checkpoint.format.hashing import CHUNK_BYTES, UnknownHash, chunk_offsets, digest, join_digests
from jackline.immutable import immutable

FORMAT = 1
KIND = "jackline checkpoint"
MANIFEST = "manifest.json"
STATE = "state.json"
TENSORS = ".safetensors"
TEMPORARY = ".tmp-"  # being written
DELETED = ".del-"  # being deleted
DAMAGED = "damaged-"  # set aside, kept as evidence until two newer good ones exist
MAX_MANIFEST_BYTES = 16 << 20  # 7 TB of chunks; it is read by everyone who lists checkpoints
MAX_MANIFEST_PARTS = 500_000
MAX_STATE_BYTES = 1 << 30  # what a training saves, and loads again
MAX_SHOWN_STATE_BYTES = 64 << 20  # what a command parses: parsed values take several times their bytes
MAX_SHOWN_STATE_PARTS = 1_000_000

_RANK_FILE = re.compile(r"(.+)\.rank-(\d{1,7})")
_NAME = re.compile(r"step-(\d{8,19})(?:-r([1-9]\d{0,5}))?")
_REWIND = re.compile(r"rewind-(\d{8,19})-r([1-9]\d{0,5})\.json")
_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,150}")
_DIGEST = re.compile(r"[0-9a-f]{32}")


class Damage(Exception):
    """A checkpoint, or a part of it, that must not be used; the text says which part and why."""


class Unreadable(Damage):
    """The disk did not return the bytes. They may be intact and readable another time."""


class Name(NamedTuple):
    """The name of a checkpoint. `retry` counts up when a step is saved again while its first folder still exists.

    A folder is never replaced: during a replacement there is a moment with neither the old nor the new one on disk.
    """

    step: int
    retry: int = 0

    def __str__(self) -> str:
        return f"step-{self.step:08d}" + (f"-r{self.retry}" if self.retry else "")


def parse_name(text: str) -> Name | None:
    """The checkpoint that a folder's name refers to; None for any other name."""
    match = _NAME.fullmatch(text)
    return Name(int(match[1]), int(match[2] or 0)) if match else None


def rank_file(key: str, rank: int) -> str:
    """The file, without its ending, that holds one rank's parts of the tensors of `key`."""
    return f"{key}.rank-{rank}"


def is_of_rank(file: str) -> bool:
    """Whether it holds parts of tensors: nobody should take it for the whole."""
    return bool(_RANK_FILE.fullmatch(file.removesuffix(TENSORS)))


class Rewind(NamedTuple):
    """A user went back to `step`: later steps that were saved with a retry number below `retry` are left behind.

    The whole rule is in the file's name. So it exists or it does not, and no damage to the file's contents can change
    it.
    """

    step: int
    retry: int

    def __str__(self) -> str:
        return f"rewind-{self.step:08d}-r{self.retry}.json"


def parse_rewind(text: str) -> Rewind | None:
    match = _REWIND.fullmatch(text)
    return Rewind(int(match[1]), int(match[2])) if match else None


def is_left_behind(name: Name, rewinds: Iterable[Rewind]) -> bool:
    """Whether an attempt must not resume from this checkpoint unless a user asks for it."""
    return any(name.step > rewind.step and name.retry < rewind.retry for rewind in rewinds)


@immutable
class FileEntry:
    """One file in the manifest: its exact length and the checksum of each 16 MiB."""

    name: str
    size_bytes: int
    chunks: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return {"size_bytes": self.size_bytes, "chunks": list(self.chunks)}


@immutable
class Manifest:
    """The description a checkpoint carries.

    `facts` is free text for people: run, host, versions, why it was saved.
    """

    step: int
    created_at_s: float
    algorithm: str
    files: tuple[FileEntry, ...]
    parent_step: int | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def size_bytes(self) -> int:
        return sum(entry.size_bytes for entry in self.files)

    @property
    def content(self) -> str:
        """A digest that is equal for two checkpoints with the same bytes, whenever and wherever they were written."""
        lines = (f"{entry.name} {entry.size_bytes} {' '.join(entry.chunks)}" for entry in self.files)
        return join_digests(self.algorithm, sorted(lines))

    def file(self, name: str) -> FileEntry | None:
        return next((entry for entry in self.files if entry.name == name), None)

    def to_bytes(self) -> bytes:
        body = {
            "kind": KIND,
            "format": FORMAT,
            "step": self.step,
            "created_at_s": self.created_at_s,
            "parent_step": self.parent_step,
            "metrics": self.metrics,
            "facts": self.facts,
            "algorithm": self.algorithm,
            "chunk_bytes": CHUNK_BYTES,
            "files": {entry.name: entry.to_json() for entry in self.files},
        }
        body["manifest_hash"] = digest(self.algorithm, _canonical(body))
        return json.dumps(body, indent=1, ensure_ascii=False, allow_nan=False).encode() + b"\n"


def parse_manifest(data: bytes, *, name: Name | None = None) -> Manifest:
    """The manifest in `data`; raises Damage that names the first wrong field.

    Every field is checked before it is used, because these bytes may come from a broken disk or from an attacker.
    `name` is the folder's name: a manifest of another step means that folders were mixed up.
    """
    if data.count(b"{") + data.count(b"[") > MAX_MANIFEST_PARTS:
        raise Damage(f"{MANIFEST} has too many parts")
    body = parse_json(data, MANIFEST)
    if not isinstance(body, dict) or body.get("kind") != KIND:
        raise Damage(f"{MANIFEST} is not one of ours")
    if body.get("format") != FORMAT:
        raise Damage(f"{MANIFEST} has format {body.get('format')!r}; this version reads format {FORMAT}")
    said = body.pop("manifest_hash", None)
    algorithm = body.get("algorithm")
    if not isinstance(algorithm, str):
        raise Damage(f"{MANIFEST} names no checksum algorithm")
    try:
        found = digest(algorithm, _canonical(body))
    except UnknownHash as problem:
        raise Damage(str(problem)) from None
    if said != found:
        raise Damage(f"{MANIFEST} does not match its own checksum")
    if body.get("chunk_bytes") != CHUNK_BYTES:
        raise Damage(f"{MANIFEST} has chunks of {body.get('chunk_bytes')!r} bytes; this version reads {CHUNK_BYTES}")
    manifest = _from_body(body, algorithm)
    if name is not None and manifest.step != name.step:
        raise Damage(f"{MANIFEST} is of step {manifest.step}, the folder is {name}")
    return manifest


def parse_json(data: bytes, what: str) -> Any:
    """JSON from untrusted bytes: bounded depth, no NaN, no number that takes minutes to parse."""
    try:
        return json.loads(data, parse_constant=_no_constant)
    except RecursionError:
        raise Damage(f"{what} is nested too deeply") from None
    except ValueError as problem:
        raise Damage(f"{what} is not JSON ({str(problem)[:80]})") from None


def is_cheap_to_parse(data: bytes) -> bool:
    """Whether a state.json stays within a few hundred megabytes once it is parsed, whoever wrote it."""
    num_parts = data.count(b",") + data.count(b"{") + data.count(b"[")
    return len(data) <= MAX_SHOWN_STATE_BYTES and num_parts <= MAX_SHOWN_STATE_PARTS


def is_safe_file_name(name: str) -> bool:
    """Whether it names a plain file inside the checkpoint's own folder other than the manifest itself."""
    return bool(_FILE.fullmatch(name)) and ".." not in name and name != MANIFEST


def _from_body(body: dict[str, Any], algorithm: str) -> Manifest:
    files = body.get("files")
    if not isinstance(files, dict) or STATE not in files:
        raise Damage(f"{MANIFEST} does not list {STATE}")
    metrics, facts, parent = body.get("metrics"), body.get("facts"), body.get("parent_step")
    return Manifest(
        step=_count(body, "step"),
        created_at_s=_number(body, "created_at_s"),
        algorithm=algorithm,
        files=tuple(_entry(name, value) for name, value in files.items()),
        parent_step=parent if isinstance(parent, int) else None,
        metrics={k: float(v) for k, v in metrics.items() if _is_number(v)} if isinstance(metrics, dict) else {},
        facts=facts if isinstance(facts, dict) else {},
    )


def _entry(name: str, value: Any) -> FileEntry:
    if not is_safe_file_name(name):
        raise Damage(f"{MANIFEST} names a file outside its folder: {name[:80]!r}")
    if not isinstance(value, dict):
        raise Damage(f"{MANIFEST} says nothing of {name}")
    size, chunks = _count(value, "size_bytes"), value.get("chunks")
    right = isinstance(chunks, list) and all(isinstance(c, str) and _DIGEST.fullmatch(c) for c in chunks)
    if not isinstance(chunks, list) or not right or len(chunks) != len(chunk_offsets(size)):
        raise Damage(f"{MANIFEST} has wrong checksums for {name}")
    return FileEntry(name, size, tuple(chunks))


def _count(body: dict[str, Any], key: str) -> int:
    value = body.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**62:
        raise Damage(f"{MANIFEST} has {key} = {str(value)[:40]!r}")
    return value


def _number(body: dict[str, Any], key: str) -> float:
    value: Any = body.get(key)
    if not _is_number(value):
        raise Damage(f"{MANIFEST} has {key} = {str(value)[:40]!r}")
    return float(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300


def _canonical(body: dict[str, Any]) -> bytes:
    return json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def _no_constant(word: str) -> float:
    raise ValueError(f"{word} is not JSON")
