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
from jackline.data.sources.bytefile import ByteFile, LocalFile, Patience, SourceUnavailable
from jackline.data.sources.damage import UNKNOWN_ENCODING, DamagedBytes, Lost, check_damage
from jackline.data.sources.decompress import START
from jackline.data.sources.encoding import UNKNOWN, HeadFile, Recognised, recognise
from jackline.data.sources.formats import Layout, choose_text_column, layout_of, read_records, string_columns
from jackline.data.sources.listing import list_files, open_file
from jackline.data.sources.records import EMPTY_FILE, Records
from jackline.data.sources.runs import RUN_BYTES
from jackline.data.sources.sections import is_validation_section, section_bytes
from jackline.data.sources.walk import Found
from jackline.data.spec import DataSpec, Source
from jackline.errors import JacklineError, UsageError

_KEY_BYTES = 1 << 16
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
    readers = [_runs(spec, index, item, around) for index, item in enumerate(state.sources)]
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
            _check(state.counts, spec, is_end=False)
            if around.is_live or (num_kept and len(spec.sources) > 1):
                break  # the next block may come from another source
        _check(state.counts, spec, is_end=state.is_ended)
        block.after = state
        block.file_bytes = sum(in_file) + sum(source.file_bytes for source in state.sources)
        yield block


def find_text_columns(spec: DataSpec, around: Surroundings) -> DataSpec:
    """The spec with the text column of every source filled in, from its first file that has records."""
    return spec.with_columns([_find_text_column(source, around) for source in spec.sources])


def _check(counts: Counts, spec: DataSpec, *, is_end: bool) -> None:
    check_damage(counts.lost, counts.damaged, counts.records, spec.max_damaged_fraction, is_end=is_end)


def _whose_turn(spec: DataSpec, state: ReadState) -> int:
    """The source that is furthest behind its share of the text, unless one is in the middle of a document."""
    for index, source in enumerate(state.sources):
        if source.inside:
            return index
    waiting = [index for index, source in enumerate(state.sources) if not source.is_ended]
    return min(waiting, key=lambda index: (state.sources[index].text_bytes / spec.sources[index].weight, index))


@dataclass(slots=True)
class _Taken:
    """What became of the texts of one run."""

    documents: int = 0
    empty: int = 0
    short: int = 0
    other_split: int = 0
    num_bytes: int = 0
    inside: Inside = ""
    is_full: bool = False

    def judge(self, verdict: int) -> None:
        self.count([1 if number == verdict else 0 for number in range(4)])
        self.inside = "dropped" if verdict else "kept"

    def count(self, verdicts: list[int]) -> None:
        """How many texts had each verdict."""
        self.documents += verdicts[0]
        self.empty += verdicts[1]
        self.short += verdicts[2]
        self.other_split += verdicts[3]


def _take_run(
    spec: DataSpec, state: ReadState, index: int, records: Records, place: SourceState, block: Block
) -> tuple[ReadState, int]:
    """Filter one run into `block`; returns the state after it and how many bytes of text were kept."""
    counts, before = state.counts, state.sources[index]
    place = replace(place, num_lines=before.num_lines, num_sections=before.num_sections)
    taken = _Taken(inside=before.inside)
    if records.is_section:
        _take_section(spec, counts, place, records, taken, block)
    else:
        _take_texts(spec, counts, records, taken, block)
    begun = len(records.texts) - (1 if records.starts_inside else 0)
    lost = _located(records, counts, place)
    damaged = dict(counts.damaged)
    for reason, count in records.damaged.items():
        damaged[reason] = damaged.get(reason, 0) + count
    new_counts = replace(
        counts,
        records=counts.records + begun + lost.records,
        documents=counts.documents + taken.documents,
        empty=counts.empty + taken.empty,
        short=counts.short + taken.short,
        other_split=counts.other_split + taken.other_split,
        damaged=damaged,
        lost=counts.lost.plus(lost),
        encodings=_with_encoding(counts.encodings, records.encoding),
    )
    carried: Inside = taken.inside if records.ends_inside and not taken.is_full else ""
    text_bytes = before.text_bytes + taken.num_bytes
    state = state.with_source(index, _after(place, records, carried, text_bytes), new_counts)
    return (state.ended() if taken.is_full else state), taken.num_bytes


def _take_texts(spec: DataSpec, counts: Counts, records: Records, taken: _Taken, block: Block) -> None:
    last = len(records.texts) - 1
    # Local names: a short document costs little more than this pass.
    verdicts, inside, num_bytes = [0, 0, 0, 0], taken.inside, 0
    most = spec.max_examples - counts.documents if spec.max_examples is not None else None
    for number, raw in enumerate(records.texts):
        is_going_on = number == 0 and records.starts_inside
        is_whole = not is_going_on and not (number == last and records.ends_inside)
        text = raw.strip() if spec.strip and is_whole else raw
        if not is_going_on:
            if most is not None and verdicts[0] >= most:
                taken.is_full = True
                break
            verdict = _verdict(text, spec)
            verdicts[verdict] += 1
            inside = "dropped" if verdict else "kept"
        if inside == "kept":
            block.texts.append(text)
            num_bytes += len(text)
            if number == last and records.ends_inside:
                block.left_open.add(len(block.texts) - 1)
    taken.count(verdicts)
    taken.inside, taken.num_bytes = inside, taken.num_bytes + num_bytes


def _take_section(
    spec: DataSpec, counts: Counts, place: SourceState, records: Records, taken: _Taken, block: Block
) -> None:
    """A section of a file. Neighbours of the same split are one document: it ends where the split changes."""
    is_mine, is_next_mine = (
        is_validation_section(place.num_files, place.num_sections + step, spec.validation_fraction)
        == (spec.split == "validation")
        for step in (0, 1)
    )
    if not is_mine:
        taken.other_split += taken.inside != "dropped"
        taken.inside = "" if is_next_mine else "dropped"
        return
    is_open = records.ends_inside and is_next_mine
    if taken.inside != "kept":
        if _is_enough(spec, counts, taken):
            return
        is_short = not is_open and spec.min_chars > 0 and _is_shorter(records.texts[0], spec.min_chars)
        taken.judge(2 if is_short else 0)
    if taken.inside == "kept":
        block.texts.append(records.texts[0])
        taken.num_bytes += len(records.texts[0])
        if is_open:
            block.left_open.add(len(block.texts) - 1)
    if not is_open:
        taken.inside = ""


def _is_enough(spec: DataSpec, counts: Counts, taken: _Taken) -> bool:
    taken.is_full = spec.max_examples is not None and counts.documents + taken.documents >= spec.max_examples
    return taken.is_full


def _located(records: Records, counts: Counts, place: SourceState) -> Lost:
    """The run's losses with their places in the file, and the documents among text that cannot be decompressed."""
    lost = records.lost.located(place.file or "", place.num_lines)
    if not records.gap_bytes:
        return lost
    known = counts.records - counts.lost.records
    mean_bytes = (counts.lost.seen_bytes - counts.lost.text_bytes) / known if known > 0 else RUN_BYTES
    return replace(lost, records=lost.records + max(1, round(records.gap_bytes / max(1.0, mean_bytes))))


def _after(place: SourceState, records: Records, inside: Inside, text_bytes: int) -> SourceState:
    """The state after a run; `place` has the numbers before it."""
    num_lines = -1 if records.has_gap or place.num_lines < 0 else place.num_lines + records.num_lines
    num_sections = place.num_sections + records.is_section
    if records.after == FILE_IS_DONE:
        num_lines = num_sections = 0
    return replace(place, inside=inside, text_bytes=text_bytes, num_lines=num_lines, num_sections=num_sections)


def _with_encoding(encodings: dict[str, int], name: str) -> dict[str, int]:
    return {**encodings, name: encodings.get(name, 0) + 1} if name else encodings


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
    spec: DataSpec, index: int, state: SourceState, around: Surroundings
) -> Iterator[tuple[Records, SourceState]]:
    """Runs of one source, each with the state after it (its `inside` and `text_bytes` are the caller's to fill)."""
    source, start = spec.sources[index], state.file
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
            state = replace(state, file=found.name, num_files=state.num_files + (at == START))
            encoding = ""
            if at == START:
                file, found_encoding = _recognised(source, file, is_live=around.is_live)
                encoding = found_encoding.name if found_encoding.name != "UTF-8" else ""
                state = replace(state, encoding=found_encoding.codec)
            layout = _with_sections(_layout(source, found.name, state), spec, index, file.size())
            for records in _until_damage(file, layout, at, around):
                state = replace(state, at=records.after)
                records.encoding, encoding = encoding, ""
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


def _recognised(source: Source, file: ByteFile, *, is_live: bool) -> tuple[ByteFile, Recognised]:
    """The file, of which no byte has to be asked for twice, and its encoding."""
    layout = layout_of(file.name, source.format)
    if layout is None or layout.container == "parquet" or not file.size():
        return file, Recognised("", "UTF-8")
    if isinstance(file, LocalFile) or is_live:
        return file, recognise(file, layout.compression, source.encoding, is_live=is_live)
    head = HeadFile(file)
    found = recognise(head, layout.compression, source.encoding)
    head.is_recording = False
    return head, found


def _until_damage(file: ByteFile, layout: Layout, at: tuple[int, ...], around: Surroundings) -> Iterator[Records]:
    """The file's runs. If nothing (more) of it can be read, one last run counts the damage."""
    if at == START and file.size() == 0:
        records = Records([b""] if layout.is_plain_text else [], FILE_IS_DONE)
        if not layout.is_plain_text:
            records.add_damage(EMPTY_FILE, place=START)
        yield records
        return
    if layout.encoding == UNKNOWN:
        yield _whole_file_lost(
            file, layout, DamagedBytes(UNKNOWN_ENCODING, at=recognise(file, layout.compression).bad_at)
        )
        return
    is_open = at != START and layout.container == "txt"
    try:
        if layout.has_columns and not layout.column:
            # A folder with several formats and no column given: the column is found for each file.
            names = string_columns(file, layout)
            if not names:
                return
            layout = replace(layout, column=choose_text_column(names, None, file.name))
        for records in read_records(file, layout, at, is_live=around.is_live):
            is_open = records.ends_inside
            yield _checked(file, records)
    except DamagedBytes as damage:
        yield _checked(file, _whole_file_lost(file, layout, damage, is_open=is_open))


def _checked(file: ByteFile, records: Records) -> Records:
    if records.has_gap:
        file.check_same()  # a file truncated while it was read is a changed source, not damage
    return records


def _whole_file_lost(file: ByteFile, layout: Layout, damage: DamagedBytes, *, is_open: bool = False) -> Records:
    records = Records([b""] if is_open else [], FILE_IS_DONE, starts_inside=is_open)
    damage.file_bytes = (file.size() or 1) if layout.is_packed else 0
    damage.text_bytes = damage.text_bytes or (file.size() or 1) * (3 if layout.is_packed else 1)
    records.add_gap(damage)
    records.gap_bytes = damage.text_bytes
    return records


def _layout(source: Source, name: str, state: SourceState) -> Layout:
    layout = layout_of(name, source.format, source.documents, source.text_column or "")
    if layout is None:
        raise UsageError(
            f"cannot tell the format of {name} from its name",
            hint="say it: format=txt, jsonl, csv, tsv or parquet (on the command line --format)",
        )
    return replace(layout, encoding=state.encoding)


def _with_sections(layout: Layout, spec: DataSpec, index: int, file_bytes: int | None) -> Layout:
    is_divided = spec.sources[index].split_by == "lines" and spec.split != "all" and spec.validation_fraction > 0
    if not is_divided or layout.container != "txt" or layout.documents != "file":
        return layout
    size = section_bytes(file_bytes, spec.validation_fraction, is_compressed=bool(layout.compression))
    return replace(layout, section_bytes=size)


def _find_text_column(source: Source, around: Surroundings) -> str | None:
    for found in list_files(source.url, needs_known_ending=source.format == "auto"):
        layout = _layout(source, found.name, SourceState())
        if not layout.has_columns:
            return source.text_column
        file = open_file(found.name, around.patience)
        try:
            file, encoding = _recognised(source, file, is_live=around.is_live)
            names = string_columns(file, replace(layout, encoding=encoding.codec))
            if names:
                return choose_text_column(names, source.text_column, found.name)
        except DamagedBytes:
            continue
        finally:
            file.close()
    raise JacklineError(f"no file of {source.url} holds a record with text", hint="check the path or the pattern")
