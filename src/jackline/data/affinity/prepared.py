"""The door of stage 1: from a table of pairs to arrays a head can be trained on.

Owns the settings, the order of the steps and the fingerprint. Does not own any of the steps: reading is pairs.py,
the parts are split.py, the vectors are embeddings.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray

from jackline.data.affinity.encoders import Encoder, open_encoder
from jackline.data.affinity.pairs import Hashes, PairRules, PairTable, Side, read_pairs, report, texts_of
from jackline.data.affinity.split import split_pairs

FORMAT = 1
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

    antibody: NDArray[np.float16]
    antigen: NDArray[np.float16]
    antibody_row: NDArray[np.int32]
    antigen_row: NDArray[np.int32]
    pkd: NDArray[np.float32]
    parts: dict[str, NDArray[np.int64]]
    counts: dict[str, int] = field(default_factory=dict)
    fingerprint: str = ""


@dataclass(frozen=True)
class Unique:
    """The different sequences of one side, in the order of their first pair."""

    hashes: Hashes
    first_pair: NDArray[np.int64]
    row: NDArray[np.int32]  # of every pair


def prepare_affinity(settings: AffinitySettings, say: Say) -> AffinityData:
    """Read, check, split and embed. The second call finds every vector in the cache."""
    rules = settings.rules()
    table = read_pairs(settings.path, rules)
    for line in report(table.tally, rules):
        say(line)
    antibody, antigen = unique_rows(table.antibody), unique_rows(table.antigen)
    parts = split_pairs(antigen.row, antigen.hashes, settings.split, settings.seed)
    for line in parts.lines:
        say(line)
    encoders = (
        open_encoder(settings.antibody_encoder, "antibody"),
        open_encoder(settings.antigen_encoder, "antigen"),
    )
    return AffinityData(
        _embed(settings, encoders[0], "antibody", antibody),
        _embed(settings, encoders[1], "antigen", antigen),
        antibody.row,
        antigen.row,
        table.pkd,
        parts.indices,
        table.tally.counts(),
        _fingerprint(settings, table, encoders),
    )


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


def _embed(settings: AffinitySettings, encoder: Encoder, side: Side, unique: Unique) -> NDArray[np.float16]:
    return encoder.encode(list(texts_of(settings.path, settings.rules(), side, unique.first_pair)))


def _fingerprint(settings: AffinitySettings, table: PairTable, encoders: tuple[Encoder, Encoder]) -> str:
    identity = {
        "format": FORMAT,
        "pairs": table.content_hash(),
        "encoders": [[encoder.name, encoder.revision, encoder.dim] for encoder in encoders],
        "split": settings.split,
        "seed": settings.seed,
    }
    return str(xxhash.xxh3_128_hexdigest(json.dumps(identity, sort_keys=True).encode()))
