"""The mirror of Jackline's own checkpoints: `python -m jackline.checkpoint.mirror.upload`.

A process of its own, started and restarted by the writer. It uploads at its own interval, so a slow, hanging or
broken mirror delays nothing. Layout in the store:

    NAME/checkpoints/step-00001200-4f2a...-9c1e/   unique, never overwritten; manifest.json goes last
    NAME/checkpoints/rewind-00000800-r1.json       a user went back to step 800 (rewind.py)

A copy is in one of three states: local (not in the store), uploaded (the store accepted every byte) and confirmed
(the store itself returned the right checksum, or the bytes were read back from a disk of this machine, or by another
machine later). Owns which checkpoint is uploaded and where it goes; engine.py uploads; fetch.py downloads.
"""

from __future__ import annotations

import contextlib
import secrets
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from jackline.checkpoint.format import catalogue
from jackline.checkpoint.format.manifest import MANIFEST, Damage, Name, Rewind, is_left_behind, parse_name
from jackline.checkpoint.format.verify import read_manifest, verify_checkpoint
from jackline.checkpoint.machines.holding import goes_to_mirror
from jackline.checkpoint.mirror.engine import (
    File,
    Item,
    Mirror,
    MirrorOptions,
    Source,
    digest_of,
    identity_of,
    serve,
)
from jackline.checkpoint.mirror.fetch import parse_generation
from jackline.checkpoint.mirror.store import Store
from jackline.checkpoint.rewind import deleted_since, tell_rewinds
from jackline.checkpoint.writer.retention import left_behind_to_delete
from jackline.rundir.layout import RunDir
from jackline.rundir.records.mirror import UploadRecord

GENERATIONS_KEPT = 3


@dataclass
class OwnCheckpoints:
    """The checkpoints in `folder` of run `name`, as a source of the engine."""

    name: str
    folder: Path
    look_every_s: float = 0.0
    told: set[Rewind] = field(default_factory=set)

    def newest(self) -> Item | None:
        """The newest that looks whole; of parts, the newest that every machine of the job uploads."""
        for listed in catalogue.list_checkpoints(self.folder):
            if listed.is_plausible and listed.manifest is not None and goes_to_mirror(listed.manifest):
                with contextlib.suppress(Damage, OSError):  # it was pruned this moment: a newer one exists
                    return self.item_of(listed.name)
        return None

    def item_of(self, name: Name) -> Item:
        path = self.folder / str(name)
        manifest = read_manifest(path)
        return Item(
            name=str(name),
            path=path,
            folder=f"{self._place}/{name}-{manifest.content[:12]}-{secrets.token_hex(2)}",
            files=tuple(
                File(path / entry.name, entry.name, entry.size_bytes, identity_of(path / entry.name))
                for entry in manifest.files
            ),
            mark=(MANIFEST, (path / MANIFEST).read_bytes()),
            saved_at_s=manifest.created_at_s,
        )

    def tell_first(self, store: Store) -> None:
        """Rewinds: a machine that has only the mirror must not resume from what was left behind."""
        self.told |= tell_rewinds(store, self.name, self.folder, self.told)

    def is_confirmed(self, store: Store, item: Item, place: str) -> bool:
        local = store.local_path(place)
        if local is not None:
            verify_checkpoint(local)
            return (local / MANIFEST).read_bytes() == item.mark[1]
        for name in (*(file.name for file in item.files), MANIFEST):
            known = store.checksum(f"{place}/{name}")
            if known is None or known[1] != digest_of(item.path / name, known[0]):
                return False
        return True

    def forget_old(self, store: Store, uploads: Mapping[str, UploadRecord]) -> None:
        """Keep the newest generations, and those left behind that no user deleted here.

        Unfinished uploads are deleted together with the old ones, and when their checkpoint has been uploaded.
        """
        rewinds = catalogue.list_rewinds(self.folder)
        named = {name: upload for text, upload in uploads.items() if (name := parse_name(text)) is not None}
        live = {name: upload for name, upload in named.items() if not is_left_behind(name, rewinds)}
        places = sorted((upload.place for upload in live.values() if upload.place), reverse=True)
        kept = places[:GENERATIONS_KEPT]
        there = [generation for generation in map(parse_generation, store.names(self._place)) if generation]
        newest = max(live, default=None)
        behind = left_behind_to_delete(
            (generation.name for generation in there),
            rewinds=rewinds,
            deleted_here=deleted_since(self.folder) if rewinds else (),
            confirmed=newest if newest is not None and live[newest].state == "confirmed" else None,
        )
        for generation in there:
            place = f"{self._place}/{generation.folder}"
            is_live = not is_left_behind(generation.name, rewinds)
            is_old = is_live and len(kept) >= 2 and place < min(kept)
            if is_old or generation.name in behind or self._is_unfinished(store, generation.name, place, live):
                with contextlib.suppress(OSError):
                    store.delete(place)

    def _is_unfinished(self, store: Store, name: Name, place: str, live: Mapping[Name, UploadRecord]) -> bool:
        """Whether another try has uploaded the same checkpoint whole."""
        return name in live and live[name].place != place and MANIFEST not in store.names(place)

    @property
    def _place(self) -> str:
        return f"{self.name}/checkpoints"


def own_mirror(run: RunDir, store: Store, every_s: float, *, folder: Path | None = None, place: str = "") -> Mirror:
    """The mirror of the run's own checkpoints."""
    folder = folder or run.checkpoints
    return Mirror(run, OwnCheckpoints(run.name, folder), store, every_s, folder / catalogue.MIRROR, place)


def open_source(options: MirrorOptions) -> tuple[Source, Path]:
    folder = Path(options.folder)
    return OwnCheckpoints(Path(options.run).name, folder), folder / catalogue.MIRROR


def mirror_command() -> list[str]:
    # -P keeps a json.py or random.py in the user's folder from being imported instead of Python's own.
    return [sys.executable, "-P", "-m", "jackline.checkpoint.mirror.upload"]


if __name__ == "__main__":
    serve(open_source)
