"""Reading windows and seeking, measured in this process: caches made of numbers, no tokenizer involved."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from jackline.data.build.supply import Data, open_cache
from jackline.data.cache.directory import EraRecord, Meta, era_path
from jackline.data.cache.state import Cursor, begin
from jackline.data.cache.writer import record_era
from jackline.data.loader.loader import Loader, LoaderSettings
from jackline.data.spec import CacheSettings, DataSpec, Source
from jackline.rundir.atomic import write_json

BATCH = 32
SEQ_LEN = 1024


def make_cache(folder: Path, num_eras: int, *, is_sparse: bool) -> CacheSettings:
    """A sealed cache of random tokens, or of holes: a hole reads as zeros and takes no disk."""
    folder.mkdir(parents=True)
    spec = DataSpec((Source("made-up.txt"),))
    write_json(folder / "meta.json", Meta("bench", spec, 50257, 50256, "bench", "none").to_json())
    plan, cursor, chosen = spec.era_plan(), Cursor(begin(1)), np.random.default_rng(0)
    lines = []
    for era in range(num_eras):
        path = era_path(folder, era)
        if is_sparse:
            path.touch()
            os.truncate(path, 2 * plan.size(era))
        else:
            chosen.integers(0, 50257, plan.size(era)).astype("<u2").tofile(path)
        record = EraRecord(era, plan.size(era), f"{era:032x}", cursor.to_json(), era == num_eras - 1)
        if num_eras < 100:
            record_era(folder, record)
        else:
            import json

            lines.append(json.dumps(record.to_json()))
    if lines:
        (folder / "ledger.jsonl").write_text("\n".join(lines) + "\n")
    return CacheSettings(root=folder.parent)


def compare_windows(folder: Path, repeats: int, seconds: float) -> dict[str, list[float]]:
    """Windows a second of each way, in turns. All read the same file of 128 MiB from the page cache."""
    cache_folder = folder / "windows"
    settings = make_cache(cache_folder, 9, is_sparse=False)
    path, num_tokens = era_path(cache_folder, 8), 1 << 26
    fd = os.open(path, os.O_RDONLY)
    ways: dict[str, Callable[[], float]] = {
        "bare preadv": lambda: _bare(fd, num_tokens, seconds),
        "ours": lambda: _ours(open_cache(cache_folder, settings), seconds),
        "nanoGPT's way": lambda: _nanogpt(path, seconds),
    }
    found: dict[str, list[float]] = {name: [] for name in ways}
    for way in ways.values():
        way()  # the page cache and the interpreter, warm for all
    for _ in range(repeats):
        for name, way in ways.items():
            found[name].append(way())
    os.close(fd)
    return found


def _bare(fd: int, num_tokens: int, seconds: float) -> float:
    chosen = np.random.default_rng(1)
    out = np.empty((BATCH, SEQ_LEN + 1), np.uint16)
    rows = [memoryview(row.view(np.uint8)) for row in out]
    count, began = 0, time.perf_counter()
    while time.perf_counter() - began < seconds:
        for row, offset in zip(rows, (chosen.integers(0, num_tokens - SEQ_LEN - 1, BATCH) * 2).tolist(), strict=True):
            os.preadv(fd, [row], offset)
        count += BATCH
    return count / (time.perf_counter() - began)


def _ours(data: Data, seconds: float) -> float:
    """The whole loader: order, planning, reading, batches. In line (num_threads=0), as the others are."""
    settings = LoaderSettings(seq_len=SEQ_LEN, batch_size=BATCH, seed=1, num_threads=0)
    with Loader(data, settings) as loader:
        loader.seek({**loader.state(), "position": 140_000})
        next(loader)
        count, began = 0, time.perf_counter()
        while time.perf_counter() - began < seconds:
            next(loader)
            count += BATCH
        return count / (time.perf_counter() - began)


def _nanogpt(path: Path, seconds: float) -> float:
    """A memory map opened anew for every batch, inputs and targets sliced and widened one by one."""
    chosen = np.random.default_rng(1)
    count, began = 0, time.perf_counter()
    while time.perf_counter() - began < seconds:
        data = np.memmap(path, dtype=np.uint16, mode="r")
        starts = chosen.integers(0, len(data) - SEQ_LEN - 1, BATCH)
        np.stack([data[at : at + SEQ_LEN].astype(np.int64) for at in starts])
        np.stack([data[at + 1 : at + 1 + SEQ_LEN].astype(np.int64) for at in starts])
        count += BATCH
    return count / (time.perf_counter() - began)


def seek_times_ms(folder: Path, num_windows: int) -> tuple[float, list[float]]:
    """Milliseconds to open a cache of that many windows, and from `seek` to the first batch at random places."""
    cache_folder = folder / "huge"
    num_eras = 8 + num_windows * SEQ_LEN // (1 << 26) + 1
    settings = make_cache(cache_folder, num_eras, is_sparse=True)
    began = time.perf_counter()
    with Loader(open_cache(cache_folder, settings), LoaderSettings(seq_len=SEQ_LEN, batch_size=BATCH)) as loader:
        next(loader)
        opened_ms = (time.perf_counter() - began) * 1000
        total = loader.num_windows()
        assert total is not None
        assert total >= num_windows
        chosen, state, times = random.Random(3), loader.state(), []
        for _ in range(50):
            place = {"epoch": chosen.randrange(1000), "position": chosen.randrange(total - BATCH)}
            began = time.perf_counter()
            loader.seek({**state, **place, "era": 0, "hash_before": None})
            next(loader)
            times.append((time.perf_counter() - began) * 1000)
    return opened_ms, times
