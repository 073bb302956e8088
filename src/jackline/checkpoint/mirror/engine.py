"""The upload engine of both mirrors: what is due, the upload itself, retries, progress, and repair.

A mirror process copies the newest complete checkpoint of its source, and the run's records, to a store:

    NAME/.../FOLDER/        the checkpoint's files; its last file, the mark, makes the folder count
    NAME/run-000012.tar.gz  settings, events, metrics, findings, end of the log

Sources: Jackline's own checkpoints (upload.py) and those of a user's script (supervisor/foreign/mirror.py).
Repair: a process that starts, or is asked for the last upload, looks whether the store still has what was recorded as
uploaded, and uploads it again if not. Owns mirror.json. process.py owns starting and restarting the process.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import select
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Protocol

from jackline.checkpoint.format.manifest import Damage
from jackline.checkpoint.mirror.bundle import find_landmarks, pack_run
from jackline.checkpoint.mirror.store import Store, open_store
from jackline.checkpoint.writer.lock import AnotherWriter, WriterLock
from jackline.immutable import immutable
from jackline.machine.priority import step_back
from jackline.rundir.layout import RunDir
from jackline.rundir.process_id import ProcessId, identify, is_alive
from jackline.rundir.records.mirror import (
    MirrorRecord,
    TroubleRecord,
    UploadingRecord,
    UploadRecord,
    read_mirror,
    write_mirror,
)

LOCK = "mirror.lock"
NICENESS = 10
POLL_S = 0.5
PROGRESS_EVERY_S = 0.5
STORIES_KEPT = 3
STORY_NUMBERS_TRIED = 5
FIRST_RETRY_S, LAST_RETRY_S = 2.0, 300.0
ASKED_RETRY_S = 15.0  # the longest pause while somebody waits for the upload
LAST_TRIES = 4  # after SIGTERM, when another mirror waits for the lock


@immutable
class File:
    """A file of a checkpoint: here, and its name in the checkpoint's folder in the store.

    `identity`: inode, size and time, from before anything was read of it.
    """

    path: Path
    name: str
    size_bytes: int
    identity: tuple[int, int, int]


@immutable
class Item:
    """A checkpoint to upload. `folder`: where in the store. `mark`: name and contents of the file that goes last."""

    name: str
    path: Path
    folder: str
    files: tuple[File, ...]
    mark: tuple[str, bytes]
    saved_at_s: float

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files) + len(self.mark[1])


class Source(Protocol):
    """The checkpoints that one mirror copies."""

    look_every_s: float

    def newest(self) -> Item | None:
        """The newest complete checkpoint, uploaded or not."""

    def tell_first(self, store: Store) -> None:
        """Upload what must be there before any checkpoint."""

    def is_confirmed(self, store: Store, item: Item, place: str) -> bool:
        """Whether the store vouches for the bytes at `place`. Raises Damage when they are certainly wrong."""

    def forget_old(self, store: Store, uploads: Mapping[str, UploadRecord]) -> None:
        """Delete older uploads."""


@dataclass
class Mirror:
    """One run's mirror. `file` is its mirror.json."""

    run: RunDir
    source: Source
    store: Store
    every_s: float
    file: Path
    place: str = ""
    record: MirrorRecord = field(default_factory=MirrorRecord)
    uploaded_at_s: float | None = None  # monotonic, as are the next two
    story_at_s: float | None = None
    looked_at_s: float | None = None
    story_digest: str = ""
    furthest_bytes: int = 0  # how far any try of an upload has come since the last one that was complete
    _is_checked: bool = False  # the newest upload was compared with the store since the start
    _wrote_at_s: float = 0.0
    _landmarks: frozenset[str] = frozenset()

    def load(self) -> None:
        """Continue with the notes of an earlier mirror process."""
        self.record = replace(read_mirror(self.file), uploading=UploadingRecord(), answered=0)
        self._write()

    def next_item(self, now_s: float, *, is_last: bool = False) -> Item | None:
        """The checkpoint to upload now: the newest, if the store does not have it yet and an upload is due."""
        is_due = self.uploaded_at_s is None or now_s - self.uploaded_at_s >= self.every_s
        is_seen = self.looked_at_s is not None and now_s - self.looked_at_s < self.source.look_every_s
        if not is_last and (is_seen or not is_due):
            return None
        self.looked_at_s = now_s
        item = self.source.newest()
        if item is None or not self.record.has(item.name):
            return item
        if self._is_checked and not is_last:
            return None
        self._is_checked = True
        return None if self._is_still_there(item) else item

    def upload(self, item: Item) -> None:
        """Upload one checkpoint, its mark last. After an OSError or any error of the store: try again."""
        done_bytes = 0
        self._note_progress(item, 0, is_forced=True)

        def moved(count: int) -> None:
            nonlocal done_bytes
            done_bytes += count
            self.furthest_bytes = max(self.furthest_bytes, done_bytes)
            self._note_progress(item, done_bytes)

        is_begun = bool(self.store.names(item.folder))
        is_there = is_begun and self._holds(item, item.folder)
        if is_begun and not is_there:
            self.store.delete(item.folder)  # an upload that was interrupted
        if not is_there:
            for file in item.files:
                self.store.put(file.path, f"{item.folder}/{file.name}", moved)
            if any(file.identity != identity_of(file.path) for file in item.files):
                self.store.delete(item.folder)
                raise OSError(f"{item.name} changed while it was uploaded")
            self.store.put_bytes(item.mark[1], f"{item.folder}/{item.mark[0]}")
        upload = UploadRecord("uploaded", time.time(), item.saved_at_s, item.folder, item.size_bytes)
        try:
            if self.source.is_confirmed(self.store, item, item.folder):
                upload = replace(upload, state="confirmed", confirmed_at_s=time.time())
        except Damage:
            self.store.delete(item.folder)
            raise
        self._is_checked, self.furthest_bytes = True, 0
        uploads = {**self.record.checkpoints, item.name: upload}
        self.record = replace(self.record, checkpoints=uploads, uploading=UploadingRecord())
        self._write()
        self.source.forget_old(self.store, uploads)

    def upload_story(self) -> None:
        """Upload the run's small files when they have changed."""
        self._landmarks |= find_landmarks(self.run)
        data = pack_run(self.run)
        if not self._landmarks <= find_landmarks(self.run):
            return  # the folder is being deleted: what the store has is more than is left here
        digest = hashlib.blake2b(data, digest_size=16).hexdigest()
        if digest == self.story_digest:
            return
        known = [name for name in self.store.names(self.run.name) if name.startswith("run-")]
        newest = max((int(name[4:10]) for name in known if name[4:10].isdigit()), default=0)
        for number in range(newest + 1, newest + 1 + STORY_NUMBERS_TRIED):
            # The two mirrors of a run may choose the same number at once.
            with contextlib.suppress(FileExistsError):
                self.store.put_bytes(data, f"{self.run.name}/run-{number:06d}.tar.gz")
                break
        else:
            raise OSError("another mirror uploads the records of this run")
        self.story_digest = digest
        for name in sorted(known)[: -(STORIES_KEPT - 1)]:
            self.store.delete(f"{self.run.name}/{name}")
        self.record = replace(self.record, story_at_s=time.time())

    def work(self, now_s: float, *, is_last: bool = False) -> bool:
        """Upload what is due; False when it failed and should be tried again."""
        item = None
        try:
            item = self.next_item(now_s, is_last=is_last)
            self.source.tell_first(self.store)
            if item is not None:
                self.uploaded_at_s = now_s
                if self.run.skipped_file.exists():
                    self.upload_story()  # without which batches it was trained has to be known where it is resumed
                self.upload(item)
            is_story_due = self.story_at_s is None or now_s - self.story_at_s >= self.every_s
            if item is not None or is_last or is_story_due:
                self.upload_story()
                self.story_at_s = now_s
        except Exception as problem:  # a store may raise any exception
            self.uploaded_at_s = self.looked_at_s = None
            if item is None or item.path.exists():  # else it was pruned: a newer one exists
                self._note_trouble(problem)
            return False
        if self.record.trouble != TroubleRecord() or item is not None or is_last:
            self.record = replace(self.record, trouble=TroubleRecord())
            self._write()
        return True

    def answer(self, number: int) -> None:
        """The store has everything that the run had when request `number` was made."""
        self.record = replace(self.record, answered=number)
        self._write()

    def _is_still_there(self, item: Item) -> bool:
        place = self.record.checkpoints[item.name].place
        return bool(place) and self._holds(item, str(place))

    def _holds(self, item: Item, place: str) -> bool:
        """Whether the store has every byte of `item`, as far as it lets us know."""
        sizes = [(file.name, file.size_bytes) for file in item.files] + [(item.mark[0], len(item.mark[1]))]
        if any(self.store.size(f"{place}/{name}") != size for name, size in sizes):
            return False
        try:
            self.source.is_confirmed(self.store, item, place)
        except (Damage, FileNotFoundError):
            return False
        return True

    def _note_progress(self, item: Item, done_bytes: int, *, is_forced: bool = False) -> None:
        now_s = time.monotonic()
        if not is_forced and now_s - self._wrote_at_s < PROGRESS_EVERY_S:
            return
        self._wrote_at_s = now_s
        self.record = replace(self.record, uploading=UploadingRecord(item.name, done_bytes, item.size_bytes))
        self._write()

    def _note_trouble(self, problem: BaseException) -> None:
        why = str(problem)[:300] or type(problem).__name__
        self.record = replace(
            self.record, trouble=TroubleRecord(why, time.time()), uploading=UploadingRecord(), answered=0
        )
        self._write()

    def _write(self) -> None:
        self.record = replace(self.record, store=self.place, process=identify(os.getpid()), at_s=time.time())
        with contextlib.suppress(OSError):
            write_mirror(self.file, self.record)


@immutable
class MirrorOptions:
    """What the owner decides. `folder`: the checkpoints. `pattern`: where a user's script writes its own.

    `owner_pid`: the process that started the mirror and restarts it.
    """

    run: str
    place: str
    every_s: float
    owner_pid: int
    folder: str = ""
    pattern: str = ""
    patience_s: float = 600.0

    def to_line(self) -> bytes:
        return json.dumps(asdict(self)).encode() + b"\n"


class Requests:
    """What the owner writes to our standard input: the options, then numbers.

    Each number asks for everything to be uploaded now.
    """

    def __init__(self, fd: int | None) -> None:
        self._fd = fd
        self._rest = b""
        self.number = 0

    def read_options(self) -> MirrorOptions:
        """The first line. Raises ValueError when the owner exited before it was written."""
        assert self._fd is not None
        while b"\n" not in self._rest:
            data = os.read(self._fd, 65536)
            if not data:
                raise ValueError("the owner has exited")
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        self._take(b"")  # a request may have come with the options
        return MirrorOptions(**json.loads(line))

    def wait(self, timeout_s: float) -> None:
        if self._fd is None:
            time.sleep(timeout_s)
        elif select.select([self._fd], [], [], timeout_s)[0]:
            data = os.read(self._fd, 4096)
            if not data:
                self._fd = None  # the owner has exited
            self._take(data)

    def _take(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        self.number = max([self.number, *(int(line) for line in lines if line.isdigit())])


def keep_mirrored(
    mirror: Mirror, owner: ProcessId | None, requests: Requests, patience_s: float, told: list[int]
) -> None:
    """Upload until the owner has exited or a signal was received (`told`), then until the store has everything.

    Gives up when nothing was uploaded for `patience_s`.
    """
    retry_s, not_before_s, asked = FIRST_RETRY_S, 0.0, 0
    while is_alive(owner) and not told:
        now_s, number = time.monotonic(), requests.number
        is_asked = number > mirror.record.answered
        if number > asked:
            asked, not_before_s = number, now_s
        if now_s >= not_before_s:
            if mirror.work(now_s, is_last=is_asked):
                retry_s = FIRST_RETRY_S
                if is_asked:
                    mirror.answer(number)
            else:
                pause_s = min(retry_s, ASKED_RETRY_S) if is_asked else retry_s
                not_before_s, retry_s = time.monotonic() + pause_s, min(2 * retry_s, LAST_RETRY_S)
        requests.wait(POLL_S)
    _finish(mirror, patience_s, told)


def _finish(mirror: Mirror, patience_s: float, told: list[int]) -> None:
    moved_at_s, tries, retry_s = time.monotonic(), 0, FIRST_RETRY_S
    before = (mirror.record.done, mirror.furthest_bytes)
    while not mirror.work(time.monotonic(), is_last=True):
        tries += 1
        now_s, now = time.monotonic(), (mirror.record.done, mirror.furthest_bytes)
        if now != before:
            before, moved_at_s = now, now_s
        if now_s - moved_at_s >= patience_s or (told and tries >= LAST_TRIES):
            return
        time.sleep(min(retry_s, ASKED_RETRY_S))
        retry_s *= 2


def serve(open_source: Callable[[MirrorOptions], tuple[Source, Path]]) -> None:
    """The life of a mirror process. `open_source` returns the checkpoints and the path of mirror.json."""
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGPIPE, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    requests = Requests(0)
    options = requests.read_options()
    source, file = open_source(options)
    told: list[int] = []
    step_back(NICENESS)
    owner = identify(options.owner_pid)
    lock = WriterLock(file.with_name(LOCK), owner)
    try:
        lock.acquire(lambda holder: None)
    except AnotherWriter:
        return
    signal.signal(signal.SIGTERM, lambda number, _: told.append(number))  # exits after one last upload
    try:
        store = open_store(options.place)
        mirror = Mirror(RunDir(Path(options.run)), source, store, options.every_s, file, options.place)
        mirror.load()
        keep_mirrored(mirror, owner, requests, options.patience_s, told)
    except Exception as problem:
        trouble = TroubleRecord(str(problem)[:300] or type(problem).__name__, time.time())
        write_mirror(file, replace(read_mirror(file), trouble=trouble, uploading=UploadingRecord()))
        raise
    finally:
        lock.release()


def identity_of(path: Path) -> tuple[int, int, int]:
    found = path.stat()
    return found.st_ino, found.st_size, found.st_mtime_ns


def digest_of(path: Path, algorithm: str) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, algorithm).hexdigest()
