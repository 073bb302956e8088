"""Small real files of every format the data engine reads, broken ones included, and short ways to use them."""

from __future__ import annotations

import csv
import gzip
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import zstandard

from jackline.data.build.builder import cache_folder, run_builder
from jackline.data.cache.directory import Cache, era_path, read_meta
from jackline.data.cache.state import ReadState, begin
from jackline.data.progress import silent
from jackline.data.sources.documents import Surroundings, read_blocks
from jackline.data.spec import CacheSettings, DataSpec, Source

SENTENCE = "the of and to in a is that it was for on are as with his they at be this from or by one had not"
WORDS = SENTENCE.split(" ")
SOURCE_SETTINGS = ("format", "documents", "text_column", "encoding", "split_by")


def make_text(number: int, num_words: int = 60) -> str:
    """A document of its own: words, punctuation, a few characters outside ASCII."""
    chosen = random.Random(number)
    words = chosen.choices(WORDS, k=num_words)
    words[0] = f"Document {number}:"
    words[len(words) // 2] = chosen.choice(["naïve", "日本語", "1,234.5", "don't", "👩‍👧", "x=1;"])
    return " ".join(words)


def make_texts(count: int, num_words: int = 60) -> list[str]:
    return [make_text(number, num_words) for number in range(count)]


def jsonl_bytes(texts: list[str]) -> bytes:
    return b"".join(json.dumps({"text": text, "meta": {"n": i}}).encode() + b"\n" for i, text in enumerate(texts))


def write_jsonl(path: Path, texts: list[str]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(jsonl_bytes(texts))
    return path


def write_zst(path: Path, texts: list[str], *, num_frames: int = 1) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    step = -(-len(texts) // num_frames)
    frames = [zstandard.compress(jsonl_bytes(texts[at : at + step])) for at in range(0, len(texts), step)]
    path.write_bytes(b"".join(frames))
    return path


def write_gz(path: Path, texts: list[str], *, num_members: int = 1) -> Path:
    step = -(-len(texts) // num_members)
    parts = [gzip.compress(jsonl_bytes(texts[at : at + step]), mtime=0) for at in range(0, len(texts), step)]
    path.write_bytes(b"".join(parts))
    return path


def write_parquet(path: Path, texts: list[str | None], *, rows_per_group: int = 50, **extra: list[Any]) -> Path:
    table = pyarrow.table({"text": pyarrow.array(texts, pyarrow.string()), **extra})
    pyarrow.parquet.write_table(table, path, row_group_size=rows_per_group)
    return path


def write_csv(path: Path, texts: list[str], *, delimiter: str = ",") -> Path:
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, delimiter=delimiter)
        writer.writerow(["id", "text", "score"])
        for number, text in enumerate(texts):
            writer.writerow([number, text, 0.5])
    return path


def spec_of(*urls: str | Path, **settings: Any) -> DataSpec:
    source = {key: settings.pop(key) for key in SOURCE_SETTINGS if key in settings}
    sources = tuple(Source(str(url), **source) for url in urls)
    small = {"tokenizer": "bytes", "first_era_tokens": 1 << 10, "era_tokens": 1 << 12}
    return DataSpec(sources=sources, **{**small, **settings})


def read_texts(spec: DataSpec, state: ReadState | None = None, around: Surroundings | None = None) -> list[str]:
    """Every document of a spec, whole."""
    texts, is_open = [], False
    for block in read_blocks(spec, state or begin(len(spec.sources)), around or Surroundings()):
        for number, text in enumerate(block.texts):
            if is_open:
                texts[-1] += text.decode()
            else:
                texts.append(text.decode())
            is_open = number in block.left_open
    return texts


def build_cache(spec: DataSpec, root: Path, **settings: Any) -> Cache:
    made = CacheSettings(root=root, **settings)
    folder = cache_folder(spec, made)
    run_builder(folder, made, silent, for_readers=False)
    return open_cache_folder(folder)


def open_cache_folder(folder: Path) -> Cache:
    meta = read_meta(folder)
    assert meta is not None
    return Cache(folder, meta)


def all_tokens(cache: Cache) -> np.ndarray[Any, Any]:
    eras = sorted(cache.ledger.records)
    parts = [
        np.fromfile(era_path(cache.folder, era), cache.meta.dtype) for era in eras if cache.ledger.records[era].tokens
    ]
    return np.concatenate(parts)


def expected_bytes(texts: list[str]) -> np.ndarray[Any, Any]:
    """Tokens of the `bytes` tokenizer for these documents."""
    parts: list[Any] = []
    for text in texts:
        parts += [np.frombuffer(text.encode(), np.uint8).astype(np.uint16), np.array([256], np.uint16)]
    return np.concatenate(parts)
