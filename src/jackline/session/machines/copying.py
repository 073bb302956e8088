"""A neighbour's copy: every machine sends the parts that it saves to the next one, and keeps those of the one before.

So a machine that is lost with its disk takes nothing with it. The copies are made beside the training, by one thread
of each machine's first rank, over a process group of their own. One save is copied at a time, the same on all
machines; saves that come meanwhile are not. A copy is a whole checkpoint folder: verified, then renamed.
Fail open: an error ends the copying and is told once; training and saving continue.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import queue
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from jackline.checkpoint.format.catalogue import list_checkpoints, list_names
from jackline.checkpoint.format.manifest import (
    MANIFEST,
    MAX_MANIFEST_BYTES,
    TEMPORARY,
    Manifest,
    Name,
    parse_manifest,
)
from jackline.checkpoint.format.verify import verify_checkpoint
from jackline.checkpoint.machines.holding import KEY, Machine
from jackline.checkpoint.machines.places import copies_of

KEPT = 2  # of the machine before: the newest may not be whole on all machines
_BLOCK_BYTES = 4 << 20
_LOOK_EVERY_S = 0.1
_LEAVES_WITHIN_S = 60.0


class Copier:
    """Of the first rank of a machine. `tell` gets what went wrong."""

    def __init__(self, machine: Machine, folder: Path, group: Any, tell: Callable[[str], None]) -> None:
        count = len(machine.leaders)
        self._folder, self._group, self._tell = folder, group, tell
        self._next = machine.leaders[(machine.number + 1) % count]
        before = (machine.number - 1) % count
        self._before, self._place = machine.leaders[before], copies_of(folder, machine.ranks[before][0])
        self._asked: queue.SimpleQueue[tuple[str, Any] | None] = queue.SimpleQueue()
        self._is_over = False
        self._leaves_at_s: float | None = None
        self.is_busy = False
        self._thread = threading.Thread(target=self._work, daemon=True, name="jackline-copies")
        self._thread.start()
        atexit.register(self.close)

    def copy(self, key: str, ticket: Any) -> None:
        """All machines call it for the same save, which may not be written yet."""
        self.is_busy = True
        self._asked.put((key, ticket))

    def close(self) -> None:
        """Wait for the copy under way. Its group must not be destroyed under it. When the loop and then the process
        end, both wait, but only once for another machine that has gone."""
        if self._leaves_at_s is None:
            self._leaves_at_s = time.monotonic() + _LEAVES_WITHIN_S
            self._asked.put(None)
        self._thread.join(max(0.0, self._leaves_at_s - time.monotonic()))

    def _work(self) -> None:
        while (asked := self._asked.get()) is not None:
            try:
                if not self._is_over:
                    self._exchange(*asked)
            except Exception as problem:  # another machine has gone, or the disk is full
                self._is_over = True
                text = str(problem).splitlines()[0] if str(problem) else type(problem).__name__
                self._tell(f"no copies of saves are kept on other machines any more: {text}")
            self.is_busy = False

    def _exchange(self, key: str, ticket: Any) -> None:
        path = self._wait_for(key, ticket)
        data = (path / MANIFEST).read_bytes() if path is not None else b""
        theirs = self._swap_bytes(data)
        own, their = parse_manifest(data) if data else None, parse_manifest(theirs) if theirs else None
        draft = self._place / f"{TEMPORARY}{os.getpid()}"
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        outgoing, incoming = _Outgoing(path, own), _Incoming(draft, their)
        for _ in range(max(outgoing.num_blocks, incoming.num_blocks)):
            self._swap_blocks(outgoing, incoming)
        outgoing.close()
        if their is not None:
            if incoming.problem is not None:
                raise incoming.problem
            self._keep(draft, theirs, Name(their.step))

    def _wait_for(self, key: str, ticket: Any) -> Path | None:
        """The folder of the save, once it is committed; None when it was lost."""
        while True:
            is_over = ticket.is_over  # asked first: it may be committed and deleted again meanwhile
            for one in list_checkpoints(self._folder)[:KEPT]:
                if one.is_plausible and one.manifest is not None and one.manifest.facts.get(KEY) == key:
                    return one.path
            if is_over:
                return None
            time.sleep(_LOOK_EVERY_S)

    def _swap_bytes(self, data: bytes) -> bytes:
        size = torch.tensor([len(data)])
        other = torch.zeros(1, dtype=torch.int64)
        self._swap(size, other)
        if not 0 <= int(other) <= MAX_MANIFEST_BYTES:
            raise ValueError("another machine sent a manifest that is too large")
        mine = torch.frombuffer(bytearray(data or b" "), dtype=torch.uint8)
        theirs = torch.zeros(max(1, int(other)), dtype=torch.uint8)
        self._swap(mine, theirs)
        return theirs.numpy().tobytes()[: int(other)]

    def _swap(self, mine: torch.Tensor, theirs: torch.Tensor) -> None:
        sent = dist.isend(mine, dst=self._next, group=self._group)
        dist.recv(theirs, src=self._before, group=self._group)
        if sent is not None:
            sent.wait()

    def _swap_blocks(self, outgoing: _Outgoing, incoming: _Incoming) -> None:
        block = outgoing.take()
        sent = None if block is None else dist.isend(block, dst=self._next, group=self._group)
        room = incoming.room()
        if room is not None:
            dist.recv(room, src=self._before, group=self._group)
            incoming.write(room)
        if sent is not None:
            sent.wait()

    def _keep(self, draft: Path, manifest: bytes, name: Name) -> None:
        (draft / MANIFEST).write_bytes(manifest)
        final = self._place / str(name)
        os.rename(draft, named := draft.with_name(f"{TEMPORARY}{name}"))
        verify_checkpoint(named)
        if final.exists():  # of a save that was not whole on all machines
            shutil.rmtree(final)
        os.rename(named, final)
        for old in list_names(self._place)[KEPT:]:
            shutil.rmtree(self._place / str(old), ignore_errors=True)


class _Outgoing:
    """The bytes of all files of a checkpoint, block by block."""

    def __init__(self, path: Path | None, manifest: Manifest | None) -> None:
        files = manifest.files if manifest is not None and path is not None else ()
        folder = path or Path()
        self._left = [(folder / entry.name, start, entry.size_bytes) for entry in files for start in _starts(entry)]
        self.num_blocks = len(self._left)
        self._left.reverse()
        self._open: tuple[Path, int] | None = None

    def take(self) -> torch.Tensor | None:
        if not self._left:
            return None
        path, start, size = self._left.pop()
        if self._open is None or self._open[0] != path:
            self.close()
            with contextlib.suppress(OSError):  # deleted meanwhile: what is sent then does not verify
                self._open = (path, os.open(path, os.O_RDONLY | os.O_CLOEXEC))
        data = os.pread(self._open[1], _BLOCK_BYTES, start) if self._open is not None else b""
        return torch.frombuffer(bytearray(data.ljust(min(_BLOCK_BYTES, size - start), b"\0")), dtype=torch.uint8)

    def close(self) -> None:
        if self._open is not None:
            os.close(self._open[1])
            self._open = None


class _Incoming:
    """Writes what comes into the files of a draft."""

    def __init__(self, draft: Path, manifest: Manifest | None) -> None:
        files = manifest.files if manifest is not None else ()
        self._left = [(draft / entry.name, start, entry.size_bytes) for entry in files for start in _starts(entry)]
        self.num_blocks = len(self._left)
        self._left.reverse()
        self.problem: OSError | None = None
        for entry in files:
            (draft / entry.name).touch()

    def room(self) -> torch.Tensor | None:
        if not self._left:
            return None
        _, start, size = self._left[-1]
        return torch.empty(min(_BLOCK_BYTES, size - start), dtype=torch.uint8)

    def write(self, block: torch.Tensor) -> None:
        path, start, _ = self._left.pop()
        try:
            with open(path, "r+b") as file:
                file.seek(start)
                file.write(block.numpy().tobytes())
                if not self._left or self._left[-1][0] != path:
                    file.flush()
                    os.fsync(file.fileno())
        except OSError as problem:
            self.problem = self.problem or problem


def _starts(entry: Any) -> range:
    return range(0, entry.size_bytes, _BLOCK_BYTES)
