"""How far a corpus was read: plain values that are stored in the ledger and read back after a crash.

Owns the dataclasses and their JSON. A state is always at the beginning of a run of records (a bounded batch), so
resuming reads that run again and nothing before it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

from jackline.data.sources.damage import NOTHING, Lost
from jackline.data.sources.decompress import START, At

Inside = Literal["", "kept", "dropped"]
FILE_IS_DONE: At = ()


@dataclass(frozen=True)
class SourceState:
    """One source: the file, the place in it, and whether a document continues across that place."""

    file: str | None = None
    at: At = START
    inside: Inside = ""
    is_ended: bool = False
    text_bytes: int = 0  # text kept so far: the weights of a mixture are measured in these bytes
    file_bytes: int = 0  # size of the files that are done, for progress
    num_files: int = 0
    num_lines: int = 0  # of the file, before the place; -1: not known
    num_sections: int = 0  # of the file, before the place
    encoding: str = ""  # of the file, as Python calls it; "": UTF-8


@dataclass(frozen=True)
class Counts:
    """What became of the records read so far."""

    records: int = 0
    documents: int = 0
    empty: int = 0
    short: int = 0
    other_split: int = 0
    damaged: dict[str, int] = field(default_factory=dict)
    lost: Lost = field(default=NOTHING, compare=False)
    encodings: dict[str, int] = field(default_factory=dict, compare=False)  # files by encoding, other than UTF-8

    @property
    def num_damaged(self) -> int:
        return sum(self.damaged.values())


@dataclass(frozen=True)
class ReadState:
    """All sources of a mixture, and the counts."""

    sources: tuple[SourceState, ...]
    counts: Counts = field(default_factory=Counts)

    @property
    def is_ended(self) -> bool:
        return all(source.is_ended for source in self.sources)

    def with_source(self, index: int, source: SourceState, counts: Counts) -> ReadState:
        return ReadState((*self.sources[:index], source, *self.sources[index + 1 :]), counts)

    def ended(self) -> ReadState:
        return replace(self, sources=tuple(replace(source, is_ended=True) for source in self.sources))


def begin(num_sources: int) -> ReadState:
    return ReadState((SourceState(),) * num_sources)


@dataclass(frozen=True)
class Cursor:
    """A place between two tokens: the state before a block, and how many of the block's tokens are before it."""

    state: ReadState
    skip_tokens: int = 0
    documents: int = 0  # begun up to here, including those of the block

    def to_json(self) -> dict[str, Any]:
        counts = self.state.counts
        return {
            "sources": [_source_to_list(item) for item in self.state.sources],
            "counts": [counts.records, counts.documents, counts.empty, counts.short, counts.other_split],
            "damaged": counts.damaged,
            "lost": counts.lost.to_json(),
            "encodings": counts.encodings,
            "skip_tokens": self.skip_tokens,
            "documents": self.documents,
        }

    @staticmethod
    def from_json(value: dict[str, Any]) -> Cursor:
        records, documents, empty, short, other_split = value["counts"]
        damaged = dict(value["damaged"])
        # Caches of earlier versions counted damaged records alone.
        lost = Lost.from_json(value["lost"]) if "lost" in value else Lost(records=sum(damaged.values()))
        counts = Counts(
            records, documents, empty, short, other_split, damaged, lost, dict(value.get("encodings") or {})
        )
        sources = tuple(map(_source_from_list, value["sources"]))
        return Cursor(ReadState(sources, counts), value["skip_tokens"], value["documents"])


def _source_to_list(item: SourceState) -> list[Any]:
    place = [item.file, list(item.at), item.inside, item.is_ended]
    amounts = [item.text_bytes, item.file_bytes, item.num_files]
    return [*place, *amounts, item.num_lines, item.num_sections, item.encoding]


def _source_from_list(item: list[Any]) -> SourceState:
    is_old = len(item) == 7  # of an earlier version, which read everything as UTF-8 and did not count lines
    return SourceState(item[0], tuple(item[1]), *item[2:], *([-1] if is_old and item[0] is not None else []))
