"""Documents of a mixture of sources, in one fixed order, in blocks of about a MiB.

Owns: going from file to file, filters, the train/validation split by the document's own hash, which source of a
mixture comes next, and counting what was left out. The order depends on bytes alone: a record that cannot be read is
skipped only if the cause is in the file; for any other cause bytefile.py waits or stops.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import xxhash

from jackline.data.cache.state import FILE_IS_DONE, Counts, Inside, ReadState, SourceState
from jackline.data.sources.bytefile import ByteFile, Patience, SourceUnavailable
from jackline.data.sources.decompress import START
from jackline.data.sources.formats import Layout, choose_text_column, layout_of, read_records, string_columns
from jackline.data.sources.frames import DamagedBytes
from jackline.data.sources.listing import list_files, open_file
from jackline.data.sources.records import EMPTY_FILE, RUN_BYTES, Records
from jackline.data.sources.walk import Found
from jackline.data.spec import DataSpec, Source
from jackline.errors import JacklineError, UsageError

_KEY_BYTES = 1 << 16
_ENOUGH_RECORDS = 200
# A block also ends after this many bytes read: where filters drop most documents, progress and cursors must advance.
_SEEN_BYTES = 4 * RUN_BYTES
_BLOCK_BYTES = RUN_BYTES // 2  # most runs are a block of their own; only small files are combined


@dataclass(frozen=True)
class Surroundings:
    """What reading needs from its caller: how long to wait for the network, and a callback for every opened file."""

    patience: Patience = field(default_factory=Patience)
    on_open: Callable[[int, Found, ByteFile], None] = field(default=lambda index, found, file: None)
    is_live: bool = False  # each block is a single run (for jsonl a single document): nothing is combined


@dataclass(slots=True)
class Block:
    """Texts of documents, and the states before and after them. Texts in `left_open` continue in the next block."""

    texts: list[bytes]
    left_open: set[int]
    before: ReadState
    after: ReadState
    file_bytes: int = 0  # how many bytes of all files were read up to its end, for progress


def read_blocks(spec: DataSpec, state: ReadState, around: Surroundings) -> Iterator[Block]:
    """Blocks from `state` to the end of the sources or of `max_examples`."""
    readers = [_runs(index, spec.sources[index], item, around) for index, item in enumerate(state.sources)]
    in_file = [0] * len(readers)
    while not state.is_ended:
        block = Block([], set(), state, state)
        num_kept = num_seen = 0
        while num_kept < _BLOCK_BYTES and num_seen < _SEEN_BYTES and not state.is_ended:
            index = _whose_turn(spec, state)
            records, place = next(readers[index], (None, state.sources[index]))
            if records is None:
                state = state.with_source(index, replace(place, is_ended=True), state.counts)
                continue
            state, added = _take_run(spec, state, index, records, place, block)
            num_kept += added
            num_seen += sum(map(len, records.texts))
            in_file[index] = records.file_offset
            check_damage(state.counts, spec.max_damaged_fraction, is_end=False)
            if around.is_live or (num_kept and len(spec.sources) > 1):
                break  # the next block may come from another source
        check_damage(state.counts, spec.max_damaged_fraction, is_end=state.is_ended)
        block.after = state
        block.file_bytes = sum(in_file) + sum(source.file_bytes for source in state.sources)
        yield block


def find_text_columns(spec: DataSpec, around: Surroundings) -> DataSpec:
    """The spec with the text column of every source filled in, from its first file that has records."""
    return spec.with_columns([_find_text_column(source, around) for source in spec.sources])


def check_damage(counts: Counts, max_fraction: float, *, is_end: bool) -> None:
    """Raise if more than the allowed share of the records could not be read."""
    if counts.num_damaged <= max_fraction * counts.records or (counts.records < _ENOUGH_RECORDS and not is_end):
        return
    reasons = [f"{count:,} x {reason}" for reason, count in sorted(counts.damaged.items())]
    share = 100 * counts.num_damaged / counts.records
    raise JacklineError(
        f"{counts.num_damaged:,} of the first {counts.records:,} records cannot be read ({share:.1f} %, "
        f"allowed {100 * max_fraction:g} %)",
        detail=tuple(reasons),
        hint="repair the source, or allow it: max_damaged_fraction=0.1 (on the command line --max-damaged 0.1)",
    )


def _whose_turn(spec: DataSpec, state: ReadState) -> int:
    """The source that is furthest behind its share of the text, unless one is in the middle of a document."""
    for index, source in enumerate(state.sources):
        if source.inside:
            return index
    waiting = [index for index, source in enumerate(state.sources) if not source.is_ended]
    return min(waiting, key=lambda index: (state.sources[index].text_bytes / spec.sources[index].weight, index))


def _take_run(
    spec: DataSpec, state: ReadState, index: int, records: Records, place: SourceState, block: Block
) -> tuple[ReadState, int]:
    """Filter one run into `block`; returns the state after it and how many bytes of text were kept."""
    counts, inside = state.counts, state.sources[index].inside
    empty, short, other, documents, num_bytes = 0, 0, 0, 0, 0
    is_full = False
    last = len(records.texts) - 1
    for number, raw in enumerate(records.texts):
        is_going_on = number == 0 and records.starts_inside
        is_whole = not is_going_on and not (number == last and records.ends_inside)
        text = raw.strip() if spec.strip and is_whole else raw
        if not is_going_on:
            if spec.max_examples is not None and counts.documents + documents >= spec.max_examples:
                is_full = True
                break
            verdict = _verdict(text, spec)
            empty, short, other = empty + (verdict == 1), short + (verdict == 2), other + (verdict == 3)
            documents += verdict == 0
            inside = "dropped" if verdict else "kept"
        if inside == "kept":
            block.texts.append(text)
            num_bytes += len(text)
            if number == last and records.ends_inside:
                block.left_open.add(len(block.texts) - 1)
    begun = len(records.texts) - (1 if records.starts_inside else 0)
    damaged = dict(counts.damaged)
    for reason, count in records.damaged.items():
        damaged[reason] = damaged.get(reason, 0) + count
    new_counts = Counts(
        counts.records + begun + sum(records.damaged.values()),
        counts.documents + documents,
        counts.empty + empty,
        counts.short + short,
        counts.other_split + other,
        damaged,
    )
    carried: Inside = inside if records.ends_inside and not is_full else ""
    place = replace(place, inside=carried, text_bytes=state.sources[index].text_bytes + num_bytes)
    state = state.with_source(index, place, new_counts)
    return (state.ended() if is_full else state), num_bytes


def _verdict(text: bytes, spec: DataSpec) -> int:
    """0 keep, 1 empty, 2 too short, 3 belongs to the other split."""
    if not text or text.isspace():
        return 1
    if spec.min_chars and _is_shorter(text, spec.min_chars):
        return 2
    if spec.split != "all" and spec.validation_fraction:
        is_validation = is_in_validation(text, spec.validation_fraction)
        return 3 if is_validation != (spec.split == "validation") else 0
    return 0


def is_in_validation(text: bytes, fraction: float) -> bool:
    """Decided by the document's first 64 KiB alone: the same text is in the same split wherever it occurs."""
    key: int = xxhash.xxh3_64_intdigest(text[:_KEY_BYTES].strip())
    return key < fraction * 2.0**64


def _is_shorter(text: bytes, min_chars: int) -> bool:
    text = text.strip()
    if len(text) < min_chars:
        return True
    return len(text) < 4 * min_chars and len(text.decode("utf-8")) < min_chars


def _runs(
    index: int, source: Source, state: SourceState, around: Surroundings
) -> Iterator[tuple[Records, SourceState]]:
    """Runs of one source, each with the state after it (its `inside` and `text_bytes` are the caller's to fill)."""
    start = state.file
    for found in list_files(source.url, start_at=start, needs_known_ending=source.format == "auto"):
        at = START
        if start is not None:
            is_done = state.at == FILE_IS_DONE
            if found.name == start:
                at = state.at
            elif not is_done:
                break
            start = None
            if is_done and at == FILE_IS_DONE:
                continue
        file = open_file(found.name, around.patience)
        try:
            around.on_open(index, found, file)
            layout = _layout(source, found.name)
            state = replace(state, file=found.name, num_files=state.num_files + (at == START))
            for records in _until_damage(file, layout, at, inside=at != START, is_live=around.is_live):
                state = replace(state, at=records.after)
                yield records, state
            file.check_same()
            size = file.size() or 0
        finally:
            file.close()
        state = replace(state, at=FILE_IS_DONE, file_bytes=state.file_bytes + size)
        yield Records([], FILE_IS_DONE), state
    if start is not None and state.at != FILE_IS_DONE:
        raise SourceUnavailable(
            f"{start} is gone, and reading has to continue in it",
            hint="put it back; nothing was skipped, and the same command resumes from there",
        )


def _until_damage(
    file: ByteFile, layout: Layout, at: tuple[int, ...], *, inside: bool, is_live: bool
) -> Iterator[Records]:
    """The file's runs. If its bytes end too early, one last run counts the damage and closes an open document."""
    records = None
    if at == START and file.size() == 0:
        is_document = layout == Layout("txt", documents=layout.documents)
        yield Records([b""], FILE_IS_DONE) if is_document else Records([], FILE_IS_DONE, {EMPTY_FILE: 1})
        return
    try:
        if layout.has_columns and not layout.column:
            # A folder with several formats and no column given: the column is found for each file.
            names = string_columns(file, layout)
            if not names:
                return
            layout = replace(layout, column=choose_text_column(names, None, file.name))
        for records in read_records(file, layout, at, is_live=is_live):
            yield records
    except DamagedBytes as damage:
        file.check_same()  # a file truncated while it was read is a changed source, not damage
        is_open = records.ends_inside if records is not None else inside and layout.container == "txt"
        closing = Records([b""] if is_open else [], FILE_IS_DONE, {str(damage): 1}, starts_inside=is_open)
        yield closing


def _layout(source: Source, name: str) -> Layout:
    layout = layout_of(name, source.format, source.documents, source.text_column or "")
    if layout is None:
        raise UsageError(
            f"cannot tell the format of {name} from its name",
            hint="say it: format=txt, jsonl, csv, tsv or parquet (on the command line --format)",
        )
    return layout


def _find_text_column(source: Source, around: Surroundings) -> str | None:
    for found in list_files(source.url, needs_known_ending=source.format == "auto"):
        layout = _layout(source, found.name)
        if not layout.has_columns:
            return source.text_column
        file = open_file(found.name, around.patience)
        try:
            names = string_columns(file, layout)
            if names:
                return choose_text_column(names, source.text_column, found.name)
        except DamagedBytes:
            continue
        finally:
            file.close()
    raise JacklineError(f"no file of {source.url} holds a record with text", hint="check the path or the pattern")
