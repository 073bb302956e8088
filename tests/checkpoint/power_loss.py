"""Every state a disk may be in after a power cut, from the recorded calls of our own writer.

The model is harsher than any real file system: until a file is synced, each of its writes may have reached the disk
or not, or half of it, in any combination; until a folder is synced, each change of its names may have or not, in any
combination. What was synced before the cut is there. Each such state is laid out as real files and the real loader
is run on it.
"""

from __future__ import annotations

import itertools
import random
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jackline.checkpoint.writer.disk import Disk

MAX_EXHAUSTIVE = 9  # pending calls: 512 combinations
NUM_SAMPLES = 300


@dataclass(frozen=True)
class Call:
    """One recorded call. `place` is what a sync of it covers: a file's number, or a folder's number."""

    kind: str  # 'write', 'truncate', 'link', 'move', 'unlink', 'sync', 'ack'
    place: int
    name: str = ""
    target: int = 0
    old_name: str = ""
    offset: int = 0
    data: bytes = b""


@dataclass
class Tree:
    """Files and folders by number; names live in folders."""

    names: dict[int, dict[str, int]] = field(default_factory=lambda: {0: {}})
    contents: dict[int, bytearray] = field(default_factory=dict)

    def apply(self, call: Call) -> None:
        if call.kind == "link":
            self.names.setdefault(call.place, {})[call.name] = call.target
        elif call.kind == "move":
            entries = self.names.setdefault(call.place, {})
            entries.pop(call.old_name, None)
            entries[call.name] = call.target
        elif call.kind == "unlink":
            self.names.setdefault(call.place, {}).pop(call.name, None)
        elif call.kind == "write":
            body = self.contents.setdefault(call.place, bytearray())
            if len(body) < call.offset + len(call.data):
                body.extend(bytes(call.offset + len(call.data) - len(body)))
            body[call.offset : call.offset + len(call.data)] = call.data
        elif call.kind == "truncate":
            body = self.contents.setdefault(call.place, bytearray())
            del body[call.offset :]
            body.extend(bytes(call.offset - len(body)))

    def lay_out(self, place: Path, folders: set[int], number: int = 0) -> None:
        place.mkdir(parents=True, exist_ok=True)
        for name, target in self.names.get(number, {}).items():
            if target in folders:
                self.lay_out(place / name, folders, target)
            else:
                (place / name).write_bytes(bytes(self.contents.get(target, b"")))

    def identity(self, folders: set[int], number: int = 0) -> Any:
        found = []
        for name, target in sorted(self.names.get(number, {}).items()):
            if target in folders:
                found.append((name, self.identity(folders, target)))
            else:
                found.append((name, bytes(self.contents.get(target, b""))))
        return tuple(found)


class RecordingDisk(Disk):
    """Does everything for real, and remembers it. Folder 0 is the checkpoints folder."""

    def __init__(self, root: Path) -> None:
        self.calls: list[Call] = []
        self.folders = {0}
        self._numbers: dict[Path, int] = {root: 0}
        self._open: dict[int, int] = {}
        self._next = 1

    def acknowledge(self, step: int) -> None:
        self.calls.append(Call("ack", step))

    def make_folder(self, path: Path) -> None:
        super().make_folder(path)
        self.folders.add(self._link(path))

    def create(self, path: Path, *, is_direct: bool = False) -> int:
        fd = super().create(path, is_direct=is_direct)
        self._open[fd] = self._link(path)
        return fd

    def reserve(self, fd: int, size_bytes: int) -> None:
        super().reserve(fd, size_bytes)
        self.calls.append(Call("truncate", self._open[fd], offset=size_bytes))

    def write(self, fd: int, data: memoryview, offset: int) -> int:
        written = super().write(fd, data, offset)
        half = written // 2  # a write may tear
        for start, end in ((0, half), (half, written)):
            self.calls.append(Call("write", self._open[fd], offset=offset + start, data=bytes(data[start:end])))
        return written

    def truncate(self, fd: int, size_bytes: int) -> None:
        super().truncate(fd, size_bytes)
        self.calls.append(Call("truncate", self._open[fd], offset=size_bytes))

    def sync(self, fd: int) -> None:
        super().sync(fd)
        self.calls.append(Call("sync", self._open[fd]))

    def sync_folder(self, path: Path) -> None:
        super().sync_folder(path)
        self.calls.append(Call("sync", self._numbers[path]))

    def rename(self, old: Path, new: Path) -> None:
        super().rename(old, new)
        number = self._numbers.pop(old)
        self._numbers[new] = number
        self.calls.append(Call("move", self._numbers[new.parent], new.name, number, old.name))

    def delete_folder(self, path: Path) -> None:
        number = self._numbers[path]
        for entry in sorted(path.iterdir()):
            self.calls.append(Call("unlink", number, entry.name))
        super().delete_folder(path)
        self.calls.append(Call("unlink", self._numbers[path.parent], path.name))

    def _link(self, path: Path) -> int:
        number, self._next = self._next, self._next + 1
        self._numbers[path] = number
        self.calls.append(Call("link", self._numbers[path.parent], path.name, number))
        return number


@dataclass(frozen=True)
class Crash:
    """One possible disk after a power cut: what is on it, and which saves had been acknowledged."""

    tree: Tree
    acknowledged: tuple[int, ...]
    after: int


def crashes(calls: list[Call], folders: set[int], seed: int = 0) -> Iterator[Crash]:
    """Every legal state for a cut after every call; each state with the same acknowledgements once."""
    rng_state = random.Random(seed)
    seen: set[Any] = set()
    for cut in range(len(calls) + 1):
        before = calls[:cut]
        certain, pending = _split(before)
        acknowledged = tuple(call.place for call in before if call.kind == "ack")
        for chosen in _subsets(pending, rng_state):
            tree = Tree()
            for number in sorted(certain | set(chosen)):
                tree.apply(before[number])
            key = (tree.identity(folders), acknowledged)
            if key not in seen:
                seen.add(key)
                yield Crash(tree, acknowledged, cut)


def lay_out(crash: Crash, folders: set[int], place: Path) -> Path:
    shutil.rmtree(place, ignore_errors=True)
    crash.tree.lay_out(place, folders)
    return place


def _split(before: list[Call]) -> tuple[set[int], list[int]]:
    """Calls that a later sync of their file or folder has made certain, and the others."""
    synced: set[int] = set()
    certain: set[int] = set()
    pending: list[int] = []
    for number in range(len(before) - 1, -1, -1):
        call = before[number]
        if call.kind == "sync":
            synced.add(call.place)
        elif call.kind != "ack":
            (certain.add if call.place in synced else pending.append)(number)
    return certain, pending[::-1]


def _subsets(pending: list[int], rng_state: random.Random) -> Iterator[tuple[int, ...]]:
    if len(pending) <= MAX_EXHAUSTIVE:
        for size in range(len(pending) + 1):
            yield from itertools.combinations(pending, size)
        return
    yield ()
    yield tuple(pending)
    for number in range(len(pending)):
        yield (pending[number],)
        yield tuple(pending[:number])
        yield tuple(pending[:number] + pending[number + 1 :])
    for _ in range(NUM_SAMPLES):
        yield tuple(number for number in pending if rng_state.random() < 0.5)
