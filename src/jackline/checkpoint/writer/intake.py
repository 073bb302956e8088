"""The save that is coming in: several threads write it from shared memory into files.

The trainer may hand a state over whole ("save"). Or it begins, hands over chunk after chunk while it is still copying
the rest, and ends. Nothing is committed without the end. Owns the draft under way. Does not own the messages
(serve.py).
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from jackline.checkpoint.format.hashing import CHUNK_BYTES, best_algorithm, chunk_offsets
from jackline.checkpoint.format.manifest import STATE, Manifest, Name, parse_name
from jackline.checkpoint.format.parallel import WorkPool
from jackline.checkpoint.writer.commit import WRITE_THREADS, Draft, DraftFile
from jackline.checkpoint.writer.disk import Disk
from jackline.checkpoint.writer.parts import join_parts, read_team
from jackline.checkpoint.writer.wire import Message
from jackline.immutable import immutable

Report = Callable[[dict[str, Any]], None]


@immutable
class Done:
    """A save that was acknowledged."""

    name: Name
    size_bytes: int
    write_s: float


@dataclass
class OpenSave:
    number: int
    draft: Draft
    files: dict[str, DraftFile]
    began_s: float


class Intake:
    """At most one save under way."""

    def __init__(self, folder: Path, disk: Disk, make_room: Callable[[int], None]) -> None:
        self.is_direct = False
        self._folder = folder
        self._disk = disk
        self._make_room = make_room
        self._arena: memoryview | None = None
        self._open: OpenSave | None = None
        self._pool = WorkPool(WRITE_THREADS)

    @property
    def is_open(self) -> bool:
        return self._open is not None

    def take_arena(self, message: Message) -> None:
        assert message.fd is not None
        self._arena = memoryview(mmap.mmap(message.fd, message.body["size_bytes"], prot=mmap.PROT_READ))
        os.close(message.fd)

    def begin(self, message: Message) -> None:
        """Make room and open the files."""
        self.drop()
        files = message.body["files"]
        self._make_room(sum(file["size_bytes"] for file in files) + len(message.payload))
        draft = Draft(self._folder, Name(message.body["step"]), best_algorithm(), self._disk, self.is_direct)
        self._open = OpenSave(message.body["id"], draft, {}, time.monotonic())
        for file in files:
            self._open.files[file["name"]] = draft.open_file(file["name"], file["size_bytes"])

    def piece(self, message: Message, report: Report) -> None:
        """Write one chunk that is now in the arena. An error is reported at the end."""
        if self._open is None or self._open.number != message.body["id"]:
            return  # it failed earlier and that was reported
        body = message.body
        chunk = self._chunk(body["arena_offset"], body["size_bytes"])
        work = partial(self._write, self._open, body["name"], chunk, body["offset"])
        # The trainer waits for its memory whether or not the chunk could be written.
        said = {"event": "piece", "piece": body["piece"]}
        self._pool.submit(work, partial(report, said) if body.get("wants_report") else None)

    def end(self, message: Message) -> Done | None:
        """Wait for the chunks and commit. None when the save failed before and that was reported."""
        if message.body["op"] == "save":
            self._take_whole(message)
        if self._open is None:
            return None
        self._drain(message)
        save, body = self._open, message.body
        entries = [save.draft.finish_file(file) for file in save.files.values()]
        if (team := body.get("team")) and read_team(team).is_first:
            entries += join_parts(save.draft, team, self._disk, time.monotonic)
        entries.append(save.draft.add_small(STATE, message.payload))
        manifest = Manifest(
            step=body["step"],
            created_at_s=body["created_at_s"],
            algorithm=save.draft.algorithm,
            files=tuple(entries),
            parent_step=body.get("parent_step"),
            metrics=body.get("metrics", {}),
            facts=body.get("facts", {}),
        )
        place = save.draft.commit(manifest)
        self._open = None
        name = parse_name(place.name)
        assert name is not None
        return Done(name, manifest.size_bytes, time.monotonic() - save.began_s)

    def drop(self, *, has_moved: bool = False) -> None:
        """Drop the save under way. `has_moved`: its folder has its final name already."""
        with contextlib.suppress(BaseException):
            self._pool.drain()  # no thread may write into a folder that is being deleted
        if self._open is not None and not has_moved:
            self._open.draft.discard()
        self._open = None

    def _take_whole(self, message: Message) -> None:
        """Take a whole save: the arena holds everything as it will be on the disk."""
        self.begin(message)
        assert self._open is not None
        for file in message.body["files"]:
            for start in chunk_offsets(file["size_bytes"]):
                size = min(CHUNK_BYTES, file["size_bytes"] - start)
                chunk = self._chunk(file["arena_offset"] + start, size)
                self._pool.submit(partial(self._write, self._open, file["name"], chunk, start))

    def _drain(self, message: Message) -> None:
        """Wait until every chunk is on the disk."""
        try:
            self._pool.drain()
        except OSError as problem:
            if problem.errno != errno.EINVAL or not self.is_direct or message.body.get("is_in_pieces"):
                raise
            self.is_direct = False  # the O_DIRECT test passed wrongly: use the page cache from now on
            self._take_whole(message)
            self._pool.drain()

    def _chunk(self, start: int, size: int) -> memoryview:
        """The chunk, extended to the page's end: O_DIRECT writes whole pages; the file is cut to its length later."""
        assert self._arena is not None
        return self._arena[start : start + -(-size // mmap.PAGESIZE) * mmap.PAGESIZE]

    def _write(self, save: OpenSave, name: str, chunk: memoryview, offset: int) -> None:
        save.draft.write(save.files[name], chunk, offset)
