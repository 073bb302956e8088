"""What the writer does between saves: read back what was written, then delete old checkpoints.

Nothing is deleted because of a checkpoint that was not read back from the disk and found whole. Every checkpoint is
read again once a day, so that a disk that loses data is noticed while an older good checkpoint still exists.
Owns status.json and the pointers `latest` and `best`. Decides nothing itself: retention.py does.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from jackline.checkpoint.format import catalogue
from jackline.checkpoint.format.manifest import Damage, Name, Unreadable, parse_name
from jackline.checkpoint.format.verify import Interrupted, read_manifest, verify_checkpoint
from jackline.checkpoint.machines.holding import FOR_MIRROR
from jackline.checkpoint.writer.commit import delete_checkpoint, set_aside
from jackline.checkpoint.writer.disk import Disk
from jackline.checkpoint.writer.retention import (
    ALWAYS_KEPT,
    KEPT_IN_BUDGET,
    Keep,
    best_to_keep,
    checkpoints_to_delete,
)

REREAD_AFTER_S = 86_400.0
RETRY_AFTER_S = 600.0
Report = dict[str, Any]


@dataclass
class Upkeep:
    """The notes about one folder and the work that follows from them.

    Only the holder of the writer's lock uses it.
    """

    folder: Path
    keep: Keep
    disk: Disk
    should_stop: Callable[[], bool]
    notes: dict[Name, dict[str, Any]] = field(default_factory=dict)

    def load(self) -> None:
        """Read an earlier writer's notes. They count for retention only; loading always reads every byte again."""
        self.notes = catalogue.read_notes(self.folder, catalogue.STATUS)

    def acknowledge(self, name: Name, size_bytes: int, write_s: float) -> None:
        note = {"acknowledged_at_s": time.time(), "size_bytes": size_bytes, "write_s": round(write_s, 3)}
        self.notes[name] = note
        self._store()
        with contextlib.suppress(OSError):
            catalogue.point_at(self.folder, catalogue.LATEST, name)

    def work(self, most: int | None = None) -> Iterator[Report]:
        """Read back what needs it, newest first, and delete what may be deleted. Reports what it found and did.

        Deletes after each one that was read back, and when interrupted: a save that comes before all are read must
        not keep old ones from being deleted. `most`: read back that many.
        """
        is_pruned = False
        for name in list(self._unread(time.time()))[:most]:
            is_pruned = False
            try:
                verify_checkpoint(self.folder / str(name), should_stop=self.should_stop)
            except Interrupted:
                break
            except (Unreadable, OSError) as problem:
                self._note(name, unreadable_at_s=time.time())
                yield {"event": "unreadable", "step": name.step, "name": str(name), "why": str(problem)}
                continue
            except Damage as damage:
                if (self.folder / str(name)).exists():  # else it was pruned meanwhile
                    yield self._found_damaged(name, str(damage))
                continue
            self._note(name, verified_at_s=time.time())
            yield {"event": "verified", "step": name.step, "name": str(name)}
            yield from self.prune()
            is_pruned = True
        if not is_pruned:
            yield from self.prune()

    def prune(self, *, is_tight: bool = False) -> Iterator[Report]:
        """Delete what retention allows; never more, however full the disk is.

        `is_tight`: a disk budget leaves no room for the next save. Then only the newest good one, the best and the
        multiples of `keep.every` stay.
        """
        names = catalogue.list_names(self.folder)
        good = [name for name in names if "verified_at_s" in self.notes.get(name, {})]
        best = [*self._find_best(names, good), *self._awaited(names)]
        keep, least = (replace(self.keep, last=1), KEPT_IN_BUDGET) if is_tight else (self.keep, ALWAYS_KEPT)
        unread = [] if is_tight else list(self._unread(time.time()))
        for name in checkpoints_to_delete(names, good=good, keep=keep, best=best, unread=unread, least=least):
            with contextlib.suppress(OSError):
                delete_checkpoint(self.folder / str(name), self.disk)
                self.notes.pop(name, None)
                yield {"event": "deleted", "step": name.step, "name": str(name)}
        yield from self._prune_set_aside(good)
        self.notes = {name: note for name, note in self.notes.items() if name in names}
        self._store()

    def refuse(self, text: str, why: str) -> Iterator[Report]:
        """The trainer found a damaged one while loading; it must not count as good any longer."""
        name = parse_name(text)
        if name is not None and (self.folder / text).exists():
            yield self._found_damaged(name, why)

    def has_work(self) -> bool:
        return next(self._unread(time.time()), None) is not None

    def num_unread(self) -> int:
        """How many were never read back; those that are due again do not count."""
        names = catalogue.list_names(self.folder)
        return sum(not self.notes.get(name, {}).keys() & {"verified_at_s", "unreadable_at_s"} for name in names)

    def _unread(self, now_s: float) -> Iterator[Name]:
        for name in catalogue.list_names(self.folder):
            note = self.notes.get(name, {})
            is_verified = _is_within(note.get("verified_at_s"), REREAD_AFTER_S, now_s)
            if not is_verified and not _is_within(note.get("unreadable_at_s"), RETRY_AFTER_S, now_s):
                yield name

    def _found_damaged(self, name: Name, why: str) -> Report:
        self.notes.pop(name, None)
        with contextlib.suppress(OSError):
            set_aside(self.folder / str(name), self.disk)
        self._store()
        return {"event": "damaged", "step": name.step, "name": str(name), "why": why}

    def _prune_set_aside(self, good: list[Name]) -> Iterator[Report]:
        """Delete damaged checkpoints, kept as evidence, once two good ones exist beside them."""
        if len(good) < ALWAYS_KEPT:
            return
        for path in catalogue.list_set_aside(self.folder)[:-ALWAYS_KEPT]:
            with contextlib.suppress(OSError):
                delete_checkpoint(path, self.disk)
                yield {"event": "deleted", "step": None, "name": path.name}

    def _find_best(self, names: list[Name], good: list[Name]) -> list[Name]:
        if self.keep.best is None:
            return []
        metrics = {}
        for name in names:
            with contextlib.suppress(Damage):
                metrics[name] = read_manifest(self.folder / str(name)).metrics
        best = best_to_keep(metrics, self.keep.best, good)
        with contextlib.suppress(OSError):
            catalogue.point_at(self.folder, catalogue.BEST, best[-1] if best else None)
        return best

    def _awaited(self, names: list[Name]) -> list[Name]:
        """The parts that every machine of a job uploads now: the mirror still reads them."""
        uploads = catalogue.read_uploads(self.folder)
        for name in names:
            with contextlib.suppress(Damage):
                facts = read_manifest(self.folder / str(name)).facts
                if FOR_MIRROR not in facts:
                    return []
                if facts[FOR_MIRROR]:
                    return [] if name in uploads else [name]
        return []

    def _note(self, name: Name, **more: Any) -> None:
        self.notes[name] = {**self.notes.get(name, {}), **more}
        self._store()

    def _store(self) -> None:
        with contextlib.suppress(OSError):  # the disk may be full: the notes are only hints, the checkpoints are not
            catalogue.write_notes(self.folder, catalogue.STATUS, self.notes)


def _is_within(at_s: Any, span_s: float, now_s: float) -> bool:
    """Whether the note is recent. After the clock jumped back, a note from the future counts as old."""
    return isinstance(at_s, int | float) and now_s - span_s < at_s <= now_s
