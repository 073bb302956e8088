"""Fills a cache: reads sources and writes finished eras, until there is enough.

Owns: the pass over the sources, commits about once a second, the files' identities, and the loop around
`choose_action`. Runs in one process at a time (`builder.lock`) and may be killed at any instant. Does not own
processes (builder.py) or the bytes of the cache (writer.py).
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from jackline.data.build.choose import Enough, Full, Recycle, View, choose_action
from jackline.data.cache.directory import Cache, EraRecord, era_path, present_eras
from jackline.data.cache.readers import Reading, living_readers
from jackline.data.cache.state import Cursor, ReadState
from jackline.data.cache.writer import EraWriter, clear_commits, finish_interrupted_seals
from jackline.data.progress import Board, Phase
from jackline.data.sources.bytefile import ByteFile, Patience, SourceChanged
from jackline.data.sources.documents import Surroundings, read_blocks
from jackline.data.sources.identities import FileBook
from jackline.data.sources.walk import Found
from jackline.data.spec import CacheSettings
from jackline.data.tokenise.encode import PackedBlock, Packing, packed_blocks
from jackline.data.tokenise.tokenizer import Tokenizer, engine_and_version
from jackline.errors import JacklineError
from jackline.units import format_bytes

COMMIT_EVERY_S = 1.0
FREE_DISK_SHARE = 0.2


@dataclass(frozen=True)
class Workshop:
    """Everything one building process works with."""

    cache: Cache
    tokenizer: Tokenizer
    settings: CacheSettings
    board: Board
    files: FileBook
    should_stop: Callable[[], bool] = field(default=lambda: False)


class Pass:
    """One pass through the sources from the start of an era, era after era."""

    def __init__(self, shop: Workshop, era: int, cursor: Cursor) -> None:
        self.next_era = era
        self._shop = shop
        self._ends_at = cursor
        self._state: ReadState = cursor.state
        self._skip = cursor.skip_tokens
        self._block: PackedBlock | None = None
        self._phase: Phase = "tokenise"
        self.documents = max(cursor.documents, cursor.state.counts.documents)
        meta = shop.cache.meta
        around = Surroundings(Patience(shop.settings.give_up_after_s, on_wait=self._on_wait), self._on_open)
        blocks = read_blocks(meta.spec, cursor.state, around)
        packing = Packing(shop.tokenizer, meta.spec.rows)
        self._blocks = packed_blocks(blocks, packing, _num_threads(shop.settings, shop.tokenizer.engine.name))

    def fill(self, writer: EraWriter, on_progress: Callable[[Cursor], None]) -> tuple[Cursor, bool]:
        """Fill the era. Returns the position in the source after it, and whether the source is at its end."""
        while writer.room:
            block = self._block or next(self._blocks, None)
            if block is None:
                return self._ends_at, True
            self._block = block
            part = block.tokens[self._skip : self._skip + writer.room]
            writer.append(part)
            self._skip += len(part)
            if self._skip >= len(block.tokens):
                # A cursor must never point past a block's end: it counts tokens to skip of the block it names.
                self._skip -= len(block.tokens)
                self._block, self._state = None, block.after
                self._ends_at = Cursor(block.after, self._skip)
            else:
                self._ends_at = Cursor(block.before, self._skip)
            self.documents = block.after.counts.documents
            self._shop.board.set(self._phase, done=block.file_bytes, unit="B")
            on_progress(replace(self._ends_at, documents=self.documents))
        return self._ends_at, self._block is None and self._state.is_ended

    def close(self) -> None:
        self._blocks.close()

    def _on_wait(self, text: str) -> None:
        self._shop.board.set("wait", detail=text)

    def _on_open(self, index: int, found: Found, file: ByteFile) -> None:
        is_first_time = self.next_era not in self._shop.cache.ledger.records
        self._shop.files.note(index, found.name, file, is_first_time=is_first_time)
        self._phase = "download" if "://" in found.name else "tokenise"
        self._shop.board.set(self._phase, unit="B", detail=found.name.rsplit("/", 1)[-1])


class Interrupted(Exception):
    """The process that wanted the data has ended; what was committed is safe."""


def build(shop: Workshop, *, for_readers: bool) -> Enough | Full:
    """Build what the living readers need next, or everything that fits."""
    cache, walk = shop.cache, None
    finish_interrupted_seals(cache.folder, cache.ledger.records)
    budget_bytes = budget(cache, shop.settings)
    try:
        while True:
            cache.ledger.refresh()
            readers = tuple(living_readers(cache.folder)) if for_readers else ()
            if for_readers and not readers:
                return Enough()
            action = choose_action(_view(cache, shop.settings, readers, budget_bytes))
            if isinstance(action, Enough | Full):
                _check_full(action, cache, budget_bytes)
                return action
            if isinstance(action, Recycle):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(era_path(cache.folder, action.era))
                continue
            if walk is None or walk.next_era != action.era:
                if walk is not None:
                    walk.close()
                walk = None
            walk = _build_era(shop, action.era, walk)
    finally:
        if walk is not None:
            walk.close()


def budget(cache: Cache, settings: CacheSettings) -> int:
    if settings.max_cache_bytes is not None:
        return settings.max_cache_bytes
    stat = os.statvfs(cache.folder)
    return int(FREE_DISK_SHARE * (stat.f_bavail * stat.f_frsize + cache.bytes_on_disk()))


def _view(cache: Cache, settings: CacheSettings, readers: tuple[Reading, ...], budget_bytes: int) -> View:
    ledger = cache.ledger
    itemsize = cache.meta.dtype.itemsize

    def era_bytes(era: int) -> int:
        record = ledger.records.get(era)
        return (record.tokens if record else cache.plan.size(era)) * itemsize

    last = ledger.last_era
    return View(
        present_eras(cache.folder),
        last,
        readers,
        settings.eras_ahead,
        budget_bytes,
        era_bytes,
        ledger.first_unknown_up_to,
        is_empty_end=last is not None and ledger.records[last].tokens == 0,
    )


def _build_era(shop: Workshop, era: int, walk: Pass | None) -> Pass:
    """Build one era. Continues `walk` if it is at the start of this era, else begins at the era's own cursor."""
    cache = shop.cache
    spec = cache.meta.spec
    expected = cache.ledger.records.get(era)
    capacity = cache.plan.size(era)
    if spec.max_tokens is not None:
        unit = cache.plan.unit_tokens
        capacity = min(capacity, max(0, spec.max_tokens // unit * unit - cache.plan.start(era)))
    writer = EraWriter(cache.folder, era, capacity, cache.meta.dtype)
    is_done = False
    try:
        recovered = writer.recover() if expected is None else None
        if expected is not None:
            os.truncate(writer.path, 0)
        if walk is None or recovered is not None:
            if walk is not None:
                walk.close()
            cursor = recovered or cache.ledger.cursor_at(era, len(spec.sources))
            assert cursor is not None, f"era {era} has no cursor"
            walk = Pass(shop, era, cursor)
        ends_at, is_end = walk.fill(writer, _committing(shop, writer, is_first_time=expected is None))
        is_last = is_end or (spec.max_tokens is not None and capacity < cache.plan.size(era))
        _seal(shop, writer, replace(ends_at, documents=walk.documents), is_last, expected)
        is_done = True
    finally:
        if not is_done:
            if walk is not None:
                walk.close()  # ends its threads now, not when the exception is garbage-collected
            writer.close()
    walk.next_era = era + 1
    cache.ledger.refresh()
    return walk


def _seal(shop: Workshop, writer: EraWriter, ends_at: Cursor, is_last: bool, expected: EraRecord | None) -> None:
    shop.board.set("pack")
    try:
        writer.seal(ends_at, is_last=is_last, expected=expected)
    except SourceChanged as error:
        raise _explained(shop, error) from error
    if expected is None:
        clear_commits(shop.cache.folder)


def _committing(shop: Workshop, writer: EraWriter, *, is_first_time: bool) -> Callable[[Cursor], None]:
    last_s = time.monotonic()

    def on_progress(cursor: Cursor) -> None:
        nonlocal last_s
        if shop.should_stop():
            raise Interrupted
        now_s = time.monotonic()
        if is_first_time and now_s - last_s >= COMMIT_EVERY_S and writer.commit(cursor):
            last_s = now_s

    return on_progress


def _explained(shop: Workshop, error: SourceChanged) -> SourceChanged:
    changes = shop.files.changes()
    if not changes:
        engines = f"{shop.cache.meta.engine}, now by {engine_and_version(shop.tokenizer)}"
        changes = [f"the source files look the same; the tokens were made by {engines}"]
    return SourceChanged(
        error.message,
        detail=tuple(changes[:5]),
        hint="put the source back as it was, or start a new run on a new cache: `jackline data prepare --rebuild`",
    )


def _check_full(action: Enough | Full, cache: Cache, budget_bytes: int) -> None:
    if isinstance(action, Full) and action.is_needed_now:
        size = format_bytes(cache.plan.size(action.era) * cache.meta.dtype.itemsize)
        raise JacklineError(
            f"max_cache_bytes is {format_bytes(budget_bytes)}: too small for era {action.era} of {size}",
            hint=f"raise max_cache_bytes, or lower era_tokens (now {cache.plan.full_tokens:,})",
        )


def _num_threads(settings: CacheSettings, engine: str) -> int:
    """gigatoken works in the thread that calls it, and the reading thread needs a core too. `tokenizers` has its own
    threads, and a second call fills the gap while the ids of the first are copied out."""
    num_cores = len(os.sched_getaffinity(0))
    return settings.num_threads or max(1, min(4, num_cores - 1 if engine == "gigatoken" else num_cores))
