"""Where the parts of a checkpoint are: on this machine, as copies of a neighbour's, and in the mirror.

    checkpoints/step-00001200/                    what this machine has saved
    checkpoints/copies/NAME-B/step-00001200/      a copy of what machine B has saved (copies.py)
    checkpoints/.tmp-joined-4f2a91/step-00001200/ put together for one resume: links, and files that were fetched

Owns the listing, and the folder in which a checkpoint is put together. holding.py decides what belongs there.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

from jackline.checkpoint.format.catalogue import list_checkpoints
from jackline.checkpoint.format.manifest import (
    MANIFEST,
    MAX_MANIFEST_BYTES,
    TEMPORARY,
    Damage,
    FileEntry,
    Manifest,
    Name,
    parse_manifest,
)
from jackline.checkpoint.format.verify import verify_file
from jackline.checkpoint.machines.holding import MACHINES, STORE, Holding
from jackline.checkpoint.mirror.apart import opened
from jackline.checkpoint.mirror.fetch import LIST_TIMEOUT_S, Generation, look_into, within
from jackline.checkpoint.mirror.store import Store, read_small

COPIES = "copies"
_MOST_GENERATIONS = 4  # of each machine: the mirror keeps three


def copies_of(folder: Path, machine: str) -> Path:
    """Where the copies of another machine's checkpoints are."""
    return folder / COPIES / machine


def holdings_here(folder: Path, place: int) -> list[Holding]:
    """Everything that looks whole in this machine's folder, its own and copies of others'."""
    folders = [folder, *(path for path in sorted((folder / COPIES).glob("*")) if path.is_dir())]
    return [
        Holding(place, str(listed.path), listed.manifest)
        for one in folders
        for listed in list_checkpoints(one)
        if listed.is_plausible and listed.manifest is not None
    ]


def holdings_in_store(store: Store, names: Iterable[str]) -> list[Holding]:
    """Of the runs `names`, and of those that their checkpoints name: a machine may have been replaced."""
    known, waiting, found = set[str](), sorted(set(names)), list[Holding]()
    while waiting:
        name = waiting.pop()
        known.add(name)
        for holding in _of_run(store, name):
            found.append(holding)
            told = holding.manifest.facts.get(MACHINES)
            waiting += [str(one) for one in told if one not in known | set(waiting)] if isinstance(told, dict) else []
    return found


def _of_run(store: Store, name: str) -> Iterator[Holding]:
    if "/" in name or name.startswith("."):
        return
    for generation in look_into(store, name).live()[:_MOST_GENERATIONS]:
        with contextlib.suppress(Damage, OSError):  # never uploaded whole
            yield Holding(
                STORE, place := f"{name}/checkpoints/{generation.folder}", _manifest(store, place, generation)
            )


def _manifest(store: Store, place: str, generation: Generation) -> Manifest:
    return parse_manifest(read_small(store, f"{place}/{MANIFEST}", MAX_MANIFEST_BYTES), name=generation.name)


def has_parts(folder: Path, name: str, mirror: str | None) -> bool:
    """Whether a checkpoint here has the parts of some ranks alone; where there is none, in the mirror."""
    here = holdings_here(folder, 0)
    if here or mirror is None:
        return any(one.is_part for one in here)
    try:
        with opened(mirror) as store:
            return any(one.is_part for one in within(LIST_TIMEOUT_S, lambda: list(_of_run(store, name))))
    except Exception:  # whoever fetches from it says what is wrong
        return False


def joined_folder(folder: Path, token: str) -> Path:
    """Where a checkpoint is put together. A writer that starts deletes what is left of it."""
    return folder / f"{TEMPORARY}joined-{token}"


class Joining:
    """A checkpoint that is put together here, file by file."""

    def __init__(self, folder: Path, token: str, step: int) -> None:
        self._parent = joined_folder(folder, token)
        self._path = self._parent / str(Name(step))
        self._incoming = self._parent / "incoming" / str(Name(step))
        self._fetched: dict[str, FileEntry] = {}
        self._incoming.mkdir(parents=True)
        self._path.mkdir()

    def link(self, folder: Path, entry: FileEntry) -> None:
        """A file that is here already, and was verified."""
        try:
            os.link(folder / entry.name, self._path / entry.name)
        except OSError:  # a file system without hard links
            shutil.copyfile(folder / entry.name, self._path / entry.name)

    def place_for(self, entry: FileEntry) -> Path:
        """Where to write a file that comes from elsewhere."""
        self._fetched[entry.name] = entry
        return self._incoming / entry.name

    def take_fetched(self, manifest: Manifest) -> dict[str, str]:
        """Verify each file that came from elsewhere. Returns what is wrong with which."""
        wrong = {}
        for name, entry in self._fetched.items():
            try:
                verify_file(self._incoming / name, entry, manifest.algorithm)
                os.rename(self._incoming / name, self._path / name)
            except (Damage, OSError) as problem:
                wrong[name] = str(problem)
        (self._path / MANIFEST).write_bytes(manifest.to_bytes())
        return wrong

    def clear(self) -> None:
        shutil.rmtree(self._parent, ignore_errors=True)
