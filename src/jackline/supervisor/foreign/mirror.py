"""The mirror of a run of a user's own script: its newest complete checkpoint, and the run's records.

A process of its own, started and restarted by the supervisor. It uploads at its own interval, so a slow, hanging or
broken store delays nothing else. Layout in the store:

    NAME/foreign/step-0040.pt-17a4.../         the checkpoint's files; where.json is written last and makes it valid

Owns which checkpoint is uploaded and where it goes; checkpoint/mirror/engine.py uploads. Jackline's own checkpoints
have a mirror of their own (checkpoint/mirror/upload.py).
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from jackline.checkpoint.format.manifest import Damage
from jackline.checkpoint.mirror.engine import File, Item, Mirror, MirrorOptions, Source, digest_of, identity_of
from jackline.checkpoint.mirror.process import MirrorProcess
from jackline.checkpoint.mirror.progress import Left, left_of
from jackline.checkpoint.mirror.store import Store
from jackline.rundir.layout import RunDir
from jackline.rundir.records.mirror import UploadRecord, read_mirror
from jackline.rundir.run_file import read_run_file
from jackline.supervisor.foreign.find import ForeignCheckpoint, list_checkpoints
from jackline.supervisor.foreign.find import newest_whole as newest_whole_of
from jackline.supervisor.options import SuperviseOptions

EVERY_S = 60.0
LOOK_EVERY_S = 5.0
CHECKPOINTS_KEPT = 2
WHERE = "where.json"
DIGEST = "blake2b"
_PACKAGE_PARENT = Path(__file__).parents[3]
_BOOT = (
    "import sys; sys.path.append(sys.argv[1]); "
    "from jackline.checkpoint.mirror.engine import serve; "
    "from jackline.supervisor.foreign.mirror import open_source; serve(open_source)"
)


@dataclass
class ForeignCheckpoints:
    """What a script writes to `pattern`, as a source of the engine. An empty pattern means only the run's records."""

    run: RunDir
    pattern: str
    look_every_s: float = LOOK_EVERY_S
    _digests: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())  # of the newest, which is asked for again and again

    def newest(self) -> Item | None:
        checkpoint = newest_whole(self.run, self.pattern) if self.pattern else None
        if checkpoint is None:
            return None
        path = checkpoint.path
        name = f"{path.name}-{int(checkpoint.mtime_s * 1e6):x}"
        seen = [(file, identity_of(file)) for file in list_files(path)]
        files = tuple(File(file, file.relative_to(path.parent).as_posix(), mark[1], mark) for file, mark in seen)
        where = {
            "relative": os.path.relpath(path, Path(read_run_file(self.run).cwd)),
            "files": [
                [file.name, file.size_bytes, digest]
                for file, digest in zip(files, self._digests_of(name, files), strict=True)
            ],
            "mtime_s": checkpoint.mtime_s,
        }
        mark = (WHERE, json.dumps(where).encode())
        return Item(name, path, f"{self.run.name}/foreign/{name}", files, mark, checkpoint.mtime_s)

    def tell_first(self, store: Store) -> None:
        """Nothing."""

    def is_confirmed(self, store: Store, item: Item, place: str) -> bool:
        wanted = [str(entry[2]) for entry in json.loads(item.mark[1])["files"]]
        for file, digest in zip(item.files, wanted, strict=True):
            local = store.local_path(f"{place}/{file.name}")
            known = store.checksum(f"{place}/{file.name}") if local is None else None
            if local is None and (known is None or known[1] != digest_of(file.path, known[0])):
                return False
            if local is not None and digest_of(local, DIGEST) != digest:
                raise Damage(f"{file.name} was stored with other contents")
        return True

    def forget_old(self, store: Store, uploads: Mapping[str, UploadRecord]) -> None:
        for old in whole_checkpoints(store, self.run.name)[CHECKPOINTS_KEPT:]:
            store.delete(f"{self.run.name}/foreign/{old}")

    def _digests_of(self, name: str, files: tuple[File, ...]) -> tuple[str, ...]:
        key = (name, *(f"{file.name} {file.identity}" for file in files))
        if self._digests[0] != key:
            self._digests = (key, tuple(digest_of(file.path, DIGEST) for file in files))
        return self._digests[1]


def mirror_process(run: RunDir, options: SuperviseOptions, *, every_s: float = EVERY_S) -> MirrorProcess:
    """The mirror of a supervised run. It outlives this process and uploads once more after that."""
    wanted = MirrorOptions(
        run=str(run.path),
        place=options.mirror or "",
        every_s=every_s,
        owner_pid=os.getpid(),
        pattern=options.checkpoints or "",
        patience_s=options.mirror_patience_s,
    )
    return MirrorProcess([sys.executable, "-I", "-c", _BOOT, str(_PACKAGE_PARENT)], wanted)


def foreign_mirror(run: RunDir, store: Store, pattern: str, *, every_s: float = EVERY_S, place: str = "") -> Mirror:
    return Mirror(run, ForeignCheckpoints(run, pattern), store, every_s, run.mirror_file, place)


def open_source(options: MirrorOptions) -> tuple[Source, Path]:
    run = RunDir(Path(options.run))
    return ForeignCheckpoints(run, options.pattern), run.mirror_file


def read_left(run: RunDir, pattern: str | None) -> Left | None:
    """The script's newest checkpoint, if the mirror does not have it."""
    checkpoint = newest_whole(run, pattern) if pattern else None
    if checkpoint is None:
        return None
    record = read_mirror(run.mirror_file)
    name = f"{checkpoint.path.name}-{int(checkpoint.mtime_s * 1e6):x}"
    newest = max(record.checkpoints, key=lambda key: record.checkpoints[key].saved_at_s or 0.0, default="")
    return left_of(record, name, checkpoint.size_bytes, newest)


def newest_whole(run: RunDir, pattern: str) -> ForeignCheckpoint | None:
    contents = read_run_file(run)
    found = list_checkpoints(pattern, Path(contents.cwd))
    ours = [checkpoint for checkpoint in found if checkpoint.mtime_s >= contents.created_at_s - 1.0]
    return newest_whole_of(ours, set())


def whole_checkpoints(store: Store, name: str) -> list[str]:
    """Folders of finished uploads, newest first."""
    folder = f"{name}/foreign"
    found = [entry for entry in store.names(folder) if _is_ours(entry) and WHERE in store.names(f"{folder}/{entry}")]
    return sorted(found, key=lambda entry: int(entry.rpartition("-")[2], 16), reverse=True)


def list_files(path: Path) -> list[Path]:
    return sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]


def _is_ours(entry: str) -> bool:
    """Others may keep files in a mirror, too."""
    last = entry.rpartition("-")[2]
    return bool(last) and all(letter in "0123456789abcdef" for letter in last)
