"""What data is wanted: sources, filters, split, tokenizer, packing; and which of these settings identify a cache.

Owns the settings, their checks and the fingerprint. Everything that changes a single token is part of the
fingerprint. What only changes how the work is done (disk budget, threads, patience) is in `CacheSettings` and is not
part of it.
"""

from __future__ import annotations

import difflib
import json
import os
import re
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args

import xxhash

from jackline.data.cache.eras import EraPlan
from jackline.data.sources.encoding import check_encoding
from jackline.data.sources.formats import CONTAINERS, Documents
from jackline.data.sources.listing import PYTHON_STDLIB, is_one_text_file, local_path
from jackline.errors import UsageError

FORMAT = 1
Split = Literal["all", "train", "validation"]
SplitBy = Literal["auto", "document", "lines"]
_SCHEMES = ("http", "https", "hf")
_WEIGHED = re.compile(r"(.+)@(\d+\.?\d*|\.\d+)")
_MAX_SOURCES = 128  # a mixture keeps a file of each open, and its cursor names them all


@dataclass(frozen=True)
class Source:
    """Where documents come from: a path, folder, glob, http(s)://, hf://datasets/... or python-stdlib."""

    url: str
    weight: float = 1.0
    format: str = "auto"
    documents: Documents = "file"
    text_column: str | None = None
    encoding: str = "auto"  # recognised for each file, or as Python calls it
    split_by: SplitBy = "auto"  # lines: a text file is divided between the splits; auto: where it is the only one

    def __post_init__(self) -> None:
        if not self.url:
            raise UsageError("an empty data source was given")
        scheme, colon, _ = self.url.partition("://")
        if colon and scheme not in _SCHEMES:
            raise UsageError(
                f"'{self.url}' cannot be read: nobody here knows {scheme}://",
                hint="a source is a path, http(s)://, hf://datasets/... or python-stdlib",
            )
        if not self.weight > 0:
            raise UsageError(f"the weight of {self.url} must be above 0, not {self.weight}")
        check_choice("format", self.format, ("auto", *CONTAINERS))
        check_choice("documents", self.documents, get_args(Documents))
        check_choice("split_by", self.split_by, get_args(SplitBy))
        check_encoding(self.encoding)

    @property
    def is_local(self) -> bool:
        return "://" not in self.url and self.url != PYTHON_STDLIB


def full_address(url: str) -> str:
    """'hf:OWNER/NAME/path' is short for hf://datasets/OWNER/NAME/path, as `jackline plan` calls models of the hub."""
    return f"hf://datasets/{url[3:]}" if url.startswith("hf:") and not url.startswith("hf://") else url


def sources_in(text: str) -> tuple[tuple[str, float], ...]:
    """Several sources in one text, each with its weight: 'wiki/*.txt@0.7,code/*.py@0.3'. A weight is how often a
    source's documents are taken, in proportion; without one it is 1. A path with a comma in it is one source."""
    if "," not in text or os.path.lexists(text):
        parts = [text]
    else:
        parts = [part.strip() for part in text.split(",")]
    found = []
    for part in parts:
        weighed = _WEIGHED.fullmatch(part) if len(parts) > 1 else None
        found.append((full_address(weighed[1]), float(weighed[2])) if weighed else (full_address(part), 1.0))
    return tuple(found)


def is_remote(text: str) -> bool:
    """Whether one of its sources is on another machine."""
    return any("://" in url for url, _ in sources_in(text))


@dataclass(frozen=True)
class Rows:
    """Per-document mode: each document is cut into its own rows, and nothing is packed across documents."""

    tokens: int
    stride: int
    short: Literal["pad", "drop"] = "pad"

    def __post_init__(self) -> None:
        if self.tokens < 2 or not 0 < self.stride <= self.tokens:
            raise UsageError(f"rows of {self.tokens} tokens every {self.stride} tokens would lose text or never end")
        check_choice("short", self.short, ("pad", "drop"))


@dataclass(frozen=True)
class DataSpec:
    """The data of one run and split."""

    sources: tuple[Source, ...]
    tokenizer: str = "gpt2"
    vocab_size: int = 8192  # for a tokenizer that is trained on the corpus
    eos: str = "auto"  # the token between documents: a token of the tokenizer, or "none"
    split: Split = "all"
    validation_fraction: float = 0.0
    min_chars: int = 0
    strip: bool = False
    max_examples: int | None = None
    max_tokens: int | None = None
    rows: Rows | None = None
    first_era_tokens: int = 1 << 20
    era_tokens: int = 1 << 26
    max_damaged_fraction: float = 0.01

    def __post_init__(self) -> None:
        if not self.sources:
            raise UsageError("no data source given", hint="for example: jackline data prepare 'data/*.txt'")
        if len(self.sources) > _MAX_SOURCES:
            raise UsageError(
                f"{len(self.sources):,} sources are too many for a mixture: at most {_MAX_SOURCES}",
                hint="quote a pattern ('data/*.txt') or give the folder; its files are then one source",
            )
        check_choice("split", self.split, get_args(Split))
        if not 0 <= self.validation_fraction < 1:
            raise UsageError(f"validation_fraction must be from 0 to below 1, not {self.validation_fraction}")
        if self.split == "validation" and self.validation_fraction == 0:
            raise UsageError("split=validation needs validation_fraction above 0", hint="validation_fraction=0.01")
        if not 0 <= self.min_chars <= 65536:
            raise UsageError(f"min_chars must be from 0 to 65536, not {self.min_chars}")
        if not 0 <= self.max_damaged_fraction <= 1:
            raise UsageError(f"max_damaged_fraction must be from 0 to 1, not {self.max_damaged_fraction}")
        for name in ("max_examples", "max_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"{name} must be at least 1, not {value}")
        self.era_plan()

    def era_plan(self) -> EraPlan:
        return EraPlan(self.first_era_tokens, self.era_tokens, self.rows.tokens if self.rows else 1)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(value: dict[str, Any]) -> DataSpec:
        """Raises UsageError for an unknown setting."""
        values = dict(value)
        raw_sources = values.pop("sources", ())
        raw_rows = values.pop("rows", None)
        sources = tuple(
            Source(**_known(Source, item if isinstance(item, dict) else {"url": full_address(item)}))
            for item in raw_sources
        )
        rows = Rows(**_known(Rows, raw_rows)) if raw_rows else None
        return DataSpec(sources=sources, rows=rows, **_known(DataSpec, values))

    def fingerprint(self, tokenizer_hash: str) -> str:
        """32 hex digits that identify all tokens and their order."""
        identity = self.to_json()
        identity.pop("max_damaged_fraction")  # decides whether to stop, never which tokens are produced
        for source, shown in zip(self.sources, identity["sources"], strict=True):
            shown["url"] = _identity_url(source)
            # Without these settings tokens are those of caches that were made before there were such settings.
            if source.encoding == "auto":
                shown.pop("encoding")
            if source.split_by != "lines":
                shown.pop("split_by")
        text = json.dumps({"format": FORMAT, "tokenizer_hash": tokenizer_hash, **identity}, sort_keys=True)
        return str(xxhash.xxh3_128_hexdigest(text.encode()))

    def located(self) -> DataSpec:
        """The same spec with absolute paths, so that it means the same from every folder, and with a decision whether
        a text file is divided between the splits."""
        sources = (replace(item, url=local_path(item.url)) if item.is_local else item for item in self.sources)
        return replace(self, sources=tuple(replace(item, split_by=self._split_by(item)) for item in sources))

    def _split_by(self, source: Source) -> SplitBy:
        if source.split_by != "auto":
            return source.split_by
        has_splits = self.split != "all" and self.validation_fraction > 0
        is_divided = has_splits and source.documents == "file" and is_one_text_file(source.url, source.format)
        return "lines" if is_divided else "document"

    def with_columns(self, columns: list[str | None]) -> DataSpec:
        pairs = zip(self.sources, columns, strict=True)
        return replace(self, sources=tuple(replace(source, text_column=name) for source, name in pairs))


def default_cache_root() -> Path:
    named = os.environ.get("JACKLINE_DATA")
    if named:
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jackline" / "data"


@dataclass(frozen=True)
class CacheSettings:
    """How the work is done; none of it changes a token. The limit of damage is that of the present call: a cache was
    perhaps built under another one."""

    root: Path = field(default_factory=default_cache_root)
    max_cache_bytes: int | None = None  # None: a fifth of the free disk
    eras_ahead: int = 4
    give_up_after_s: float = 900.0
    num_threads: int | None = None
    max_damaged_fraction: float | None = None  # None: the spec's own

    def __post_init__(self) -> None:
        if self.eras_ahead < 1:
            raise UsageError(f"eras_ahead must be at least 1, not {self.eras_ahead}")

    def limited_by(self, spec: DataSpec) -> CacheSettings:
        """The same with the spec's limit of damage, unless another one is set."""
        is_set = self.max_damaged_fraction is not None
        return self if is_set else replace(self, max_damaged_fraction=spec.max_damaged_fraction)

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "root": str(self.root)}

    @staticmethod
    def from_json(value: dict[str, Any]) -> CacheSettings:
        return CacheSettings(**{**_known(CacheSettings, value), "root": Path(value["root"])})


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise UsageError(f"{name} is '{value}'", hint=f"it must be one of: {', '.join(choices)}")


def _identity_url(source: Source) -> str:
    if source.url == PYTHON_STDLIB:
        import platform

        return f"{PYTHON_STDLIB} {platform.python_version()}"
    return local_path(source.url) if source.is_local else source.url


def _known(kind: type, values: dict[str, Any]) -> dict[str, Any]:
    names = [item.name for item in fields(kind)]
    for name in values:
        if name not in names:
            near = difflib.get_close_matches(name, names, 1)
            hint = f"did you mean '{near[0]}'?" if near else f"known are: {', '.join(names)}"
            raise UsageError(f"unknown data setting '{name}'", hint=hint)
    return values
