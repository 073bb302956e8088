"""The shards of a store in a second place, and back: copied one by one, so that either can be continued.

Owns the copying; whoever mirrors a run decides when. A shard is never changed after it is written, so a file that is
there with the same header is the same file. Nothing in the mirror is trusted on the way back: a shard whose checksums
do not hold is left there and said so.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from jackline.recipes.agab.data.embeddings import store_folder
from jackline.recipes.agab.data.shards import DamagedShard, check_vectors, list_shards, read_hashes, read_head
from jackline.rundir.atomic import sync_directory

Say = Callable[[str], None]
_LEFT_AFTER_S = 3600.0
_TELL_EVERY_S = 2.0


def files_of(cache_key: str, root: Path | None = None) -> tuple[Path, ...]:
    """The files that are worth mirroring: what the store is, and its shards. Matrices are made from them."""
    folder = store_folder(cache_key, root)
    told = folder / "store.json"
    return ((told,) if told.is_file() else ()) + tuple(list_shards(folder))


def copy_out(cache_key: str, mirror: Path, root: Path | None = None, say: Say = print) -> int:
    """Copy what the mirror folder does not have; returns how many files. Can be killed and called again."""
    folder = mirror / "embeddings" / cache_key
    folder.mkdir(parents=True, exist_ok=True)
    paths = _told(files_of(cache_key, root), f"to {folder}", say)
    # One that is gone meanwhile was found damaged by whoever encodes.
    return sum(_copy(path, folder / path.name) for path in paths if path.exists())


def copy_in(mirror: Path, cache_key: str, root: Path | None = None, say: Say = print) -> int:
    """Copy back what this machine does not have; a shard that is damaged there is left out and told."""
    source, folder = mirror / "embeddings" / cache_key, store_folder(cache_key, root)
    if not source.is_dir():
        return 0
    folder.mkdir(parents=True, exist_ok=True)
    names = [path for path in (source / "store.json", *list_shards(source)) if path.is_file()]
    copied = 0
    for path in _told([path for path in names if not (folder / path.name).exists()], f"from {source}", say):
        try:
            if path.suffix == ".emb":
                read_hashes(path, read_head(path).width)
                check_vectors(path)
            copied += _copy(path, folder / path.name)
        except DamagedShard as damage:
            say(f"warning: in the mirror {source}, {damage}; its sequences are encoded again")
    return copied


def _told(paths: Sequence[Path], where: str, say: Say) -> Iterator[Path]:
    """The paths, with a line between two of them when two seconds have gone by."""
    told_at = time.monotonic()
    for number, path in enumerate(paths):
        if time.monotonic() - told_at >= _TELL_EVERY_S:
            told_at = time.monotonic()
            say(f"copied {number:,} of {len(paths):,} files {where}")
        yield path


def _copy(source: Path, target: Path) -> bool:
    """Whole or absent, also when killed; False when it is there."""
    if _is_same(source, target):
        return False
    _clear_leavings(target.parent)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.copy")
    try:
        shutil.copyfile(source, temporary)
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, target)
    finally:
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()
    with contextlib.suppress(OSError):
        sync_directory(target.parent)  # not every mounted drive can
    return True


def _clear_leavings(folder: Path) -> None:
    """Halves left by a copy that was killed, perhaps on another machine; a living one writes every few seconds."""
    for path in folder.glob(".*.copy"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > _LEFT_AFTER_S:
                path.unlink()


def _is_same(source: Path, target: Path) -> bool:
    """Same length, and for a shard the same header, which holds the checksums of the rest."""
    if not target.is_file() or target.stat().st_size != source.stat().st_size:
        return False
    if source.suffix != ".emb":
        return source.read_bytes() == target.read_bytes()
    try:
        return read_head(source) == read_head(target)
    except DamagedShard:
        return False
