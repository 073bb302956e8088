"""The door of stage 1: from a table of pairs to arrays a head can be trained on.

Owns the settings, the order of the steps and the fingerprint. Does not own any of the steps: reading is pairs.py,
the parts are split.py, the vectors are embeddings.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray

from jackline.data.progress import Board, Progress, Reporter, describe, ticking
from jackline.recipes.agab.data.embeddings import Job, Store
from jackline.recipes.agab.data.encoders import Encoder, open_encoder
from jackline.recipes.agab.data.matrix import embed
from jackline.recipes.agab.data.pairs import Hashes, PairRules, PairTable, Side, read_pairs, report, texts_of
from jackline.recipes.agab.data.split import split_pairs

FORMAT = 1
TICK_S = 1.5
SIDES: tuple[Side, Side] = ("antibody", "antigen")
PLURAL: dict[Side, str] = {"antibody": "antibodies", "antigen": "antigens"}
Say = Callable[[str], None]


@dataclass(frozen=True)
class AffinitySettings:
    """What is wanted; everything but `cache_dir` and `device` changes the arrays."""

    path: str
    antibody_encoder: str = "embedded"
    antigen_encoder: str = "embedded"
    cache_dir: Path | None = None  # None: where all data caches are
    split: str = "antigen"
    seed: int = 42
    pkd_range: tuple[float, float] = (4.0, 14.0)
    affinity_type: str | None = None  # one type or several with commas; None: all
    device: str = "cpu"

    def rules(self) -> PairRules:
        kinds = tuple(word.strip() for word in (self.affinity_type or "").split(",") if word.strip())
        return PairRules(self.pkd_range, kinds)


@dataclass(frozen=True)
class AffinityData:
    """The pairs as arrays. Vectors are float16, one row for each different sequence, in the order of the file."""

    antibody: NDArray[np.float16]  # memory-mapped, read-only
    antigen: NDArray[np.float16]
    antibody_row: NDArray[np.int32]  # of every pair
    antigen_row: NDArray[np.int32]
    pkd: NDArray[np.float32]
    parts: dict[str, NDArray[np.int64]]  # train, validation, test: ascending pair numbers
    counts: dict[str, int]  # rows, used, and rows left out by reason (pairs.REASONS)
    fingerprint: str  # equal: the same arrays, bit for bit
    identity: str  # equal: the same pairs, encoders and split; another device may have rounded otherwise
    cache_keys: tuple[str, str]  # of the two stores, for `mirrored`
    hashes: tuple[Hashes, Hashes]  # of the sequences behind the vectors: a table read again must have the same


@dataclass(frozen=True)
class Unique:
    """The different sequences of one side, in the order of their first pair."""

    hashes: Hashes
    first_pair: NDArray[np.int64]
    row: NDArray[np.int32]  # of every pair


def prepare_affinity(settings: AffinitySettings, say: Say) -> AffinityData:
    """Read, check, split and embed. The second call finds every vector in the cache.

    `say` gets lines for people, progress among them at most 2 s apart, and those from a thread of their own.
    """
    board = Board(_progress_lines(say))
    rules = settings.rules()
    with ticking(board, TICK_S):
        encoders = _encoders(settings)  # what is wrong with them is told before gigabytes are read
        table = read_pairs(settings.path, rules, board)
        board.set("done")
        for line in report(table.tally, rules):
            say(line)
        if np.ptp(table.pkd) == 0:
            say(f"warning: every pKd is {table.pkd[0]:g}: there is nothing to rank, and no head can be the best")
        sides = unique_rows(table.antibody), unique_rows(table.antigen)
        parts = split_pairs(sides[1].row, sides[1].hashes, settings.split, settings.seed)
        for line in parts.lines:
            say(line)
        for name, encoder, unique, length in zip(
            SIDES, encoders, sides, (table.antibody_length, table.antigen_length), strict=True
        ):
            _tell_cut(name, encoder, length[unique.first_pair], say)
        stores = Store(encoders[0], settings.cache_dir), Store(encoders[1], settings.cache_dir)
        jobs = _job(settings, "antibody", sides[0]), _job(settings, "antigen", sides[1])
        antibody = embed(stores[0], encoders[0], jobs[0], board, say)
        antigen = embed(stores[1], encoders[1], jobs[1], board, say)
        board.set("done")
    identity = _identity(settings, table, stores)
    return AffinityData(
        antibody.vectors,
        antigen.vectors,
        sides[0].row,
        sides[1].row,
        table.pkd,
        parts.indices,
        table.tally.counts(),
        str(xxhash.xxh3_128_hexdigest(f"{identity} {antibody.checksum} {antigen.checksum}".encode())),
        identity,
        (stores[0].key, stores[1].key),
        (sides[0].hashes, sides[1].hashes),
    )


def cache_keys(settings: AffinitySettings) -> tuple[str, str]:
    """Names of the two stores, before anything is encoded: what to fetch from a mirror."""
    encoders = _encoders(settings)
    return Store(encoders[0], settings.cache_dir).key, Store(encoders[1], settings.cache_dir).key


def unique_rows(hashes: Hashes) -> Unique:
    """Which sequence of the distinct ones each pair has; about 60 bytes a pair while it works."""
    order = np.lexsort((hashes[:, 1], hashes[:, 0]))  # stable: of equal ones the first pair comes first
    in_order = hashes[order]
    is_new = np.ones(len(order), bool)
    is_new[1:] = (in_order[1:] != in_order[:-1]).any(axis=1)
    first = order[is_new]
    by_first = np.argsort(first)
    rank = np.empty(len(first), np.int32)
    rank[by_first] = np.arange(len(first), dtype=np.int32)
    row = np.empty(len(order), np.int32)
    row[order] = rank[np.cumsum(is_new) - 1]
    return Unique(hashes[first[by_first]], first[by_first], row)


def _encoders(settings: AffinitySettings) -> tuple[Encoder, Encoder]:
    root, device = settings.cache_dir, settings.device
    return (
        open_encoder(settings.antibody_encoder, "antibody", root, device),
        open_encoder(settings.antigen_encoder, "antigen", root, device),
    )


def _job(settings: AffinitySettings, side: Side, unique: Unique) -> Job:
    def texts(places: NDArray[np.int64]) -> Iterator[bytes]:
        return texts_of(settings.path, settings.rules(), side, unique.first_pair[places])

    return Job(unique.hashes, texts, PLURAL[side])


def _tell_cut(side: Side, encoder: Encoder, lengths: NDArray[np.int32], say: Say) -> None:
    if encoder.max_residues is None:
        return
    too_long = lengths[lengths > encoder.max_residues]
    if len(too_long):
        say(
            f"warning: {len(too_long):,} of {len(lengths):,} {PLURAL[side]} are longer than {encoder.max_residues:,} "
            f"residues (up to {too_long.max():,}): {encoder.name} reads their beginning only"
        )


def _progress_lines(say: Say) -> Reporter:
    def show(progress: Progress) -> None:
        if progress.phase not in ("list", "done"):  # nothing has begun, all is over
            say(describe(progress))

    return show


def _identity(settings: AffinitySettings, table: PairTable, stores: tuple[Store, Store]) -> str:
    identity = {
        "format": FORMAT,
        "pairs": table.content_hash(),
        "encoders": [store.identity for store in stores],
        "split": settings.split,
        "seed": settings.seed,
    }
    return str(xxhash.xxh3_128_hexdigest(json.dumps(identity, sort_keys=True).encode()))
