"""Fetching a run from its mirror onto a machine that has none of its files.

Tries the newest first and skips what does not verify, as on a local disk. A fetched checkpoint is committed like any
save.
"""

from __future__ import annotations

import contextlib
import queue
import re
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from jackline.checkpoint.format.catalogue import list_checkpoints, list_rewinds, write_rewind
from jackline.checkpoint.format.manifest import (
    MANIFEST,
    MAX_MANIFEST_BYTES,
    TEMPORARY,
    Damage,
    Name,
    Rewind,
    is_left_behind,
    parse_manifest,
    parse_name,
    parse_rewind,
)
from jackline.checkpoint.format.verify import verify_checkpoint
from jackline.checkpoint.mirror.apart import opened
from jackline.checkpoint.mirror.bundle import MAX_BUNDLE_BYTES, unpack_run
from jackline.checkpoint.mirror.store import Store, open_store, read_small
from jackline.checkpoint.writer.commit import free_place
from jackline.checkpoint.writer.disk import Disk
from jackline.errors import CannotResume
from jackline.immutable import immutable
from jackline.rundir.access.secrets import without_secrets
from jackline.rundir.layout import RunDir
from jackline.rundir.process_id import host_name

LIST_TIMEOUT_S = 20.0
Result = TypeVar("Result")
_GENERATION = re.compile(r"(step-\d{8,19}(?:-r\d+)?)-[0-9a-f]{12}-[0-9a-f]{4}")


@immutable
class Generation:
    """One uploaded checkpoint: its name, and the name of its folder in the store."""

    name: Name
    folder: str


@immutable
class There:
    """What the mirror has of one run: uploads, newest first, finished or not, and the rewinds."""

    generations: tuple[Generation, ...]
    rewinds: tuple[Rewind, ...]

    def live(self, known: tuple[Rewind, ...] = ()) -> list[Generation]:
        """The uploads that were not left behind, by the mirror's own rewinds or by this machine's (`known`)."""
        rules = (*self.rewinds, *known)
        return [generation for generation in self.generations if not is_left_behind(generation.name, rules)]


@immutable
class Fetched:
    name: Name
    path: Path
    refused: tuple[str, ...]


def look_into(store: Store, run: str) -> There:
    """List the run's folder in the store, with a single call."""
    entries = store.names(f"{run}/checkpoints")
    found = [generation for generation in map(parse_generation, entries) if generation is not None]
    found.sort(key=lambda generation: (generation.name, generation.folder), reverse=True)
    rewinds = (parse_rewind(entry) for entry in entries)
    return There(tuple(found), tuple(rewind for rewind in rewinds if rewind is not None))


def parse_generation(folder: str) -> Generation | None:
    """The upload that a folder's name in the store refers to; None for any other name."""
    match = _GENERATION.fullmatch(folder)
    name = parse_name(match[1]) if match else None
    return None if name is None else Generation(name, folder)


def list_generations(store: Store, run: str) -> list[Generation]:
    """Newest first, finished or not, without those left behind by a rewind."""
    return look_into(store, run).live()


def learn_rewinds(there: There, folder: Path) -> None:
    """Apply rewinds made on another machine here too.

    Otherwise new checkpoints could get names that count as left behind.
    """
    for rewind in sorted(set(there.rewinds) - set(list_rewinds(folder))):
        folder.mkdir(parents=True, exist_ok=True)
        write_rewind(folder, rewind, {"to_step": rewind.step, "learned_from": "the mirror"})


def list_runs(place: str) -> list[str]:
    """The runs in a mirror."""
    store = open_store(place)
    return [name for name in store.names("") if store.names(f"{name}/checkpoints")]


def fetch_run(place: str, name: str, run: RunDir) -> Fetched:
    """Put the records and the newest whole checkpoint of run `name` into `run`.

    Raises CannotResume when there is none.
    """
    store = open_store(place)
    run.path.mkdir(parents=True, exist_ok=True)
    bundles = [file for file in store.names(name) if file.startswith("run-") and file.endswith(".tar.gz")]
    for bundle in sorted(bundles, reverse=True):
        with contextlib.suppress(Exception):  # this archive is damaged: try the one before it
            unpack_run(read_small(store, f"{name}/{bundle}", MAX_BUNDLE_BYTES), run)
            break
    fetched = fetch_newest(store, name, run.checkpoints)
    if fetched is None:
        raise CannotResume(f"the mirror {without_secrets(place)} holds no checkpoint of '{name}'")
    return fetched


def bring_newer(place: str, run: str, folder: Path) -> list[str]:
    """Fetch the mirror's newest checkpoint when it is newer than any here. Returns the messages to report.

    When there are checkpoints here, a mirror that does not answer is skipped after a while. When there are none it is
    waited for, because there is nothing else to resume from.
    """
    newest = _newest_here(folder)
    try:
        with opened(place) as store:
            if newest is not None:
                there = within(LIST_TIMEOUT_S, lambda: look_into(store, run))
                learn_rewinds(there, folder)
                newest = _newest_here(folder)
                live = there.live(tuple(list_rewinds(folder)))
                if newest is not None and not any(generation.name > newest for generation in live):
                    return []
            fetched = fetch_newest(store, run, folder, newer_than=newest)
    except CannotResume:
        raise
    except Exception as problem:  # a store may raise any exception
        if newest is None and isinstance(problem, OSError):
            raise CannotResume(f"the mirror {without_secrets(place)} cannot be read: {problem}") from None
        return [f"the mirror cannot be read: {problem}; continuing with what is here"]
    return [] if fetched is None else [f"fetched {fetched.name} from the mirror {without_secrets(place)}"]


def is_fetched(place: str, run: str, folder: Path) -> bool:
    """Fetch the mirror's newest whole checkpoint, for a machine where none of its own is whole."""
    with opened(place) as store:
        return fetch_newest(store, run, folder) is not None


def _newest_here(folder: Path) -> Name | None:
    return next((listed.name for listed in list_checkpoints(folder) if listed.is_plausible), None)


def within(timeout_s: float, work: Callable[[], Result]) -> Result:
    """The result of `work`, or TimeoutError. A hanging store keeps its thread; the caller continues."""
    results: queue.SimpleQueue[Result | BaseException] = queue.SimpleQueue()

    def run() -> None:
        try:
            results.put(work())
        except BaseException as problem:
            results.put(problem)

    threading.Thread(target=run, daemon=True, name="jackline-mirror").start()
    try:
        found = results.get(timeout=timeout_s)
    except queue.Empty:
        raise TimeoutError(f"no answer within {timeout_s:.0f} s") from None
    if isinstance(found, BaseException):
        raise found
    return found


def fetch_newest(store: Store, run: str, folder: Path, *, newer_than: Name | None = None) -> Fetched | None:
    """The newest whole checkpoint of the mirror; None when there is none (or none newer than `newer_than`)."""
    folder.mkdir(parents=True, exist_ok=True)
    there = look_into(store, run)
    learn_rewinds(there, folder)
    live = there.live(tuple(list_rewinds(folder)))
    wanted = [generation for generation in live if newer_than is None or generation.name > newer_than]
    fetched, refused = fetch_first(store, run, folder, wanted)
    if fetched is None and refused and newer_than is None:
        raise CannotResume("no checkpoint in the mirror is whole", detail=refused)
    return fetched


def fetch_first(
    store: Store, run: str, folder: Path, wanted: Sequence[Generation]
) -> tuple[Fetched | None, tuple[str, ...]]:
    """The first of these that is whole, and why the ones before it are not."""
    refused: list[str] = []
    for generation in wanted:
        try:
            path = _fetch(store, f"{run}/checkpoints/{generation.folder}", generation.name, folder)
        except (Damage, OSError) as problem:
            refused.append(f"{generation.folder}: {problem}")
            continue
        return Fetched(generation.name, path, tuple(refused)), tuple(refused)
    return None, tuple(refused)


def _fetch(store: Store, place: str, name: Name, folder: Path) -> Path:
    """Download to a temporary folder beside the final one, verify every byte, then rename."""
    disk = Disk()
    draft = folder / f"{TEMPORARY}fetch-{name}-{time.monotonic_ns()}"
    draft.mkdir()
    try:
        try:
            data = read_small(store, f"{place}/{MANIFEST}", MAX_MANIFEST_BYTES)
        except OSError:
            raise Damage("it was never uploaded whole") from None
        for entry in parse_manifest(data, name=name).files:
            size = store.size(f"{place}/{entry.name}")
            if size is not None and size != entry.size_bytes:
                raise Damage(f"{entry.name} has {size} bytes, the manifest says {entry.size_bytes}")
            store.get(f"{place}/{entry.name}", draft / entry.name)
        (draft / MANIFEST).write_bytes(data)
        verify_checkpoint(draft)
        disk.sync_folder(draft)
        final = free_place(folder, name)
        disk.rename(draft, final)
        disk.sync_folder(folder)
    except BaseException:
        disk.delete_folder(draft)
        raise
    with contextlib.suppress(Exception):  # an upload is confirmed when another machine has read it
        store.put_bytes(b"read whole\n", f"{place}/confirmed-by-{host_name()}.txt")
    return final
