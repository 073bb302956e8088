"""The process that uploads checkpoints to the mirror: `python -m jackline.checkpoint.mirror.upload`.

It is a separate process with its own cadence, so a slow, hanging or broken mirror delays nothing. Layout in the
store:

    NAME/checkpoints/step-00001200-4f2a...-9c1e/   unique, never overwritten; manifest.json goes last
    NAME/checkpoints/rewind-00000800-r1.json       a user went back to step 800 (rewind.py)
    NAME/run-000012.tar.gz                         settings, events, metrics, findings, end of the log

A copy is in one of three states: local (not in the store), uploaded (the store accepted every byte) and confirmed
(the store itself returned the right checksum, or the bytes were read back from a disk of this machine, or by another
machine later).
Owns mirror.json. fetch.py owns the download.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import secrets
import signal
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from jackline.checkpoint.format import catalogue
from jackline.checkpoint.format.manifest import MANIFEST, Damage, Manifest, Name, Rewind, is_left_behind
from jackline.checkpoint.format.verify import read_manifest, verify_checkpoint
from jackline.checkpoint.mirror.bundle import pack_run
from jackline.checkpoint.mirror.fetch import parse_generation
from jackline.checkpoint.mirror.store import Store, open_store
from jackline.checkpoint.rewind import deleted_since, tell_rewinds
from jackline.checkpoint.writer.lock import AnotherWriter, WriterLock
from jackline.checkpoint.writer.retention import left_behind_to_delete
from jackline.machine.priority import step_back
from jackline.rundir import atomic
from jackline.rundir.layout import RunDir
from jackline.rundir.process_id import ProcessId, identify, is_alive

LOCK = "mirror.lock"
GENERATIONS_KEPT = 3
NICENESS = 10
POLL_S = 0.5
FIRST_RETRY_S, LAST_RETRY_S = 2.0, 300.0
LAST_TRIES = 4  # attempts at the end, when no process is left to try again later


@dataclass(frozen=True)
class MirrorOptions:
    """`run`: the folder of run.json and the logs. `folder`: the checkpoints. `owner_pid`: the writer's process ID."""

    run: str
    folder: str
    place: str
    every_s: float
    owner_pid: int


@dataclass
class Mirror:
    """One run's mirror."""

    run: RunDir
    folder: Path
    store: Store
    every_s: float
    place: str = ""
    told: set[Rewind] = field(default_factory=set)
    notes: dict[Name, dict[str, Any]] = field(default_factory=dict)
    uploaded_at_s: float | None = None  # monotonic
    bundle: str = ""
    trouble: dict[str, Any] = field(default_factory=dict)

    def load(self) -> None:
        self.notes = catalogue.read_notes(self.folder, catalogue.MIRROR)

    def next_name(self, now_s: float, *, is_last: bool = False) -> Name | None:
        """The checkpoint to upload now: the newest that looks whole, if it is not there yet and an upload is due."""
        if not (is_last or self.uploaded_at_s is None or now_s - self.uploaded_at_s >= self.every_s):
            return None
        for listed in catalogue.list_checkpoints(self.folder):
            if listed.is_plausible:
                return listed.name if "state" not in self.notes.get(listed.name, {}) else None
        return None

    def upload(self, name: Name) -> None:
        """Upload one checkpoint, manifest last, and the run's records.

        After an OSError or any error of the store: try again.
        """
        path = self.folder / str(name)
        manifest = read_manifest(path)
        place = f"{self.run.name}/checkpoints/{name}-{manifest.content[:12]}-{secrets.token_hex(2)}"
        for entry in manifest.files:
            self.store.put(path / entry.name, f"{place}/{entry.name}")
        self.store.put(path / MANIFEST, f"{place}/{MANIFEST}")
        note = {"state": "uploaded", "at_s": time.time(), "saved_at_s": manifest.created_at_s, "place": place}
        self.notes[name] = note
        self._write_notes()
        if self._is_confirmed(path, manifest, place):
            self.notes[name] = {**note, "state": "confirmed", "confirmed_at_s": time.time()}
        self._forget_old()
        self._write_notes()

    def upload_story(self) -> None:
        """Upload the run's small files when they have changed."""
        data = pack_run(self.run)
        digest = hashlib.blake2b(data, digest_size=16).hexdigest()
        if digest == self.bundle:
            return
        known = [name for name in self.store.names(self.run.name) if name.startswith("run-")]
        numbers = [int(name[4:10]) for name in known if name[4:10].isdigit()]
        self.store.put_bytes(data, f"{self.run.name}/run-{max(numbers, default=0) + 1:06d}.tar.gz")
        self.bundle = digest
        for name in sorted(known)[: -(GENERATIONS_KEPT - 1)]:
            self.store.delete(f"{self.run.name}/{name}")

    def note_trouble(self, problem: BaseException) -> None:
        self.trouble = {"why": str(problem)[:300] or type(problem).__name__, "at_s": time.time()}
        self._write_notes()

    def _is_confirmed(self, path: Path, manifest: Manifest, place: str) -> bool:
        local = self.store.local_path(place)
        if local is not None:
            try:
                return verify_checkpoint(local).content == manifest.content
            except Damage:
                return False
        for name in (*(entry.name for entry in manifest.files), MANIFEST):
            said = self.store.checksum(f"{place}/{name}")
            if said is None or said[1] != _file_digest(path / name, said[0]):
                return False
        return True

    def _forget_old(self) -> None:
        """Keep the newest generations, and those left behind that no user deleted here.

        Unfinished uploads are deleted together with the old ones.
        """
        folder = f"{self.run.name}/checkpoints"
        rewinds = catalogue.list_rewinds(self.folder)
        live = {name: note for name, note in self.notes.items() if not is_left_behind(name, rewinds)}
        kept = sorted((note["place"] for note in live.values() if "place" in note), reverse=True)
        kept = kept[:GENERATIONS_KEPT]
        there = [generation for generation in map(parse_generation, self.store.names(folder)) if generation]
        newest = max(live, default=None)
        behind = left_behind_to_delete(
            (generation.name for generation in there),
            rewinds=rewinds,
            deleted_here=deleted_since(self.folder) if rewinds else (),
            confirmed=newest if newest is not None and live[newest].get("state") == "confirmed" else None,
        )
        for generation in there:
            is_live = not is_left_behind(generation.name, rewinds)
            is_old = is_live and len(kept) >= 2 and f"{folder}/{generation.folder}" < min(kept)
            if is_old or generation.name in behind:
                with contextlib.suppress(OSError):
                    self.store.delete(f"{folder}/{generation.folder}")

    def _write_notes(self) -> None:
        with contextlib.suppress(OSError):
            catalogue.write_notes(self.folder, catalogue.MIRROR, self.notes, store=self.place, trouble=self.trouble)


def keep_mirrored(mirror: Mirror, owner: ProcessId | None) -> None:
    """Upload until the owner has exited, then once more."""
    retry_s, not_before_s = FIRST_RETRY_S, 0.0
    asked: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: asked.append(number))  # exits after one last upload
    while is_alive(owner) and not asked:
        now_s = time.monotonic()
        if now_s >= not_before_s:
            if try_upload(mirror, now_s):
                retry_s = FIRST_RETRY_S
            else:
                not_before_s, retry_s = now_s + retry_s, min(2 * retry_s, LAST_RETRY_S)
        time.sleep(POLL_S)
    for again in range(LAST_TRIES):
        if try_upload(mirror, time.monotonic(), is_last=True):
            break
        time.sleep(FIRST_RETRY_S * 2**again)


def try_upload(mirror: Mirror, now_s: float, *, is_last: bool = False) -> bool:
    """Upload what is due; False when it failed and should be tried again."""
    name = mirror.next_name(now_s, is_last=is_last)
    try:
        if name is not None:
            mirror.uploaded_at_s = now_s
            mirror.trouble = {}
        # Rewinds go first: a machine that has only the mirror must not resume from what was left behind.
        mirror.told |= tell_rewinds(mirror.store, mirror.run.name, mirror.folder, mirror.told)
        if name is not None:
            mirror.upload(name)
        if name is not None or is_last:
            mirror.upload_story()
    except Exception as problem:  # a store may raise any exception
        mirror.uploaded_at_s = None
        if name is None or (mirror.folder / str(name)).exists():  # else it was pruned: a newer one exists
            mirror.note_trouble(problem)
        return False
    return True


def main(arguments: list[str] | None = None) -> None:
    words = sys.argv[1:] if arguments is None else arguments
    options = MirrorOptions(**json.loads(words[0]))
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    step_back(NICENESS)
    folder = Path(options.folder)
    owner = identify(options.owner_pid)
    lock = WriterLock(folder / LOCK, owner)
    mirror = None
    try:
        lock.acquire(lambda holder: None)
        mirror = Mirror(RunDir(Path(options.run)), folder, open_store(options.place), options.every_s, options.place)
        mirror.load()
        keep_mirrored(mirror, owner)
    except AnotherWriter:
        return
    except Exception as problem:
        atomic.write_json(folder / catalogue.MIRROR, {"trouble": {"why": str(problem), "at_s": time.time()}})
        raise
    finally:
        lock.release()


def mirror_arguments(options: MirrorOptions) -> list[str]:
    return [sys.executable, "-P", "-m", "jackline.checkpoint.mirror.upload", json.dumps(asdict(options))]


def _file_digest(path: Path, algorithm: str) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, algorithm).hexdigest()


if __name__ == "__main__":
    main()
