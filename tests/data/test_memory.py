"""Constant memory and bounded disk while a corpus of any size goes through: measured in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import zstandard

from jackline.data.build.builder import cache_folder
from jackline.data.spec import CacheSettings
from tests.data.corpora import jsonl_bytes, make_texts, spec_of

# A reader that moves on as soon as an era is there, so that the builder recycles all the way through the corpus.
CHILD = """
import json, os, sys, threading, time
from pathlib import Path
from jackline.data.build.builder import run_builder
from jackline.data.cache.directory import Cache, read_meta
from jackline.data.cache.readers import Reading, Registration
from jackline.data.spec import CacheSettings
from jackline.data.build.supply import is_era_ready

folder, settings = Path(sys.argv[1]), CacheSettings.from_json(json.loads(sys.argv[2]))
early_bytes = int(sys.argv[3])
mine = Registration(folder)
mine.move_to(Reading(0, repeats=False))

def move_on():
    while not (folder / "meta.json").exists():
        time.sleep(0.01)
    cache, era = Cache(folder, read_meta(folder)), 0
    while cache.num_tokens(era) != 0:
        if is_era_ready(cache, era):
            era += 1
            mine.move_to(Reading(era, repeats=False))
        else:
            time.sleep(0.002)

threading.Thread(target=move_on, daemon=True).start()
seen = []

def report(progress):
    used = sum(path.stat().st_size for path in folder.glob("era-*") if path.exists())
    seen.append((progress.done, int(Path("/proc/self/statm").read_bytes().split()[1]) * 4096, used))

from jackline.data import progress
progress.TICK_S = 0.05
import jackline.data.build.builder as builder
real = builder.ticking
builder.ticking = lambda board: real(board, every_s=0.05)
while True:
    run_builder(folder, settings, report, for_readers=True)
    cache = Cache(folder, read_meta(folder))
    if cache.ledger.is_sealed:
        break
print(json.dumps({
    "early": max(resident for done, resident, _ in seen if done <= early_bytes),
    "late": max(resident for _, resident, _ in seen),
    "disk": max(used for *_, used in seen),
    "tokens": cache.total_tokens(),
}))
"""


def measure(tmp_path: Path, text_bytes: int, early_share: float, max_cache_bytes: int) -> dict[str, int]:
    """Pack `text_bytes` of text from one small file that unfolds: the corpus takes no disk, its tokens do."""
    frame_texts = make_texts(4000, 200)
    frame = zstandard.compress(jsonl_bytes(frame_texts))
    per_frame = sum(len(text.encode()) + 1 for text in frame_texts)
    num_frames = -(-text_bytes // per_frame)
    path = tmp_path / "a.jsonl.zst"
    with open(path, "wb") as file:
        for _ in range(num_frames):
            file.write(frame)
    spec = spec_of(path, first_era_tokens=1 << 20, era_tokens=1 << 23)
    settings = CacheSettings(root=tmp_path / "cache", max_cache_bytes=max_cache_bytes, eras_ahead=2)
    folder = cache_folder(spec, settings)
    early_bytes = int(path.stat().st_size * early_share)
    command = [sys.executable, "-c", CHILD, str(folder), json.dumps(settings.to_json()), str(early_bytes)]
    environment = {**os.environ, "MALLOC_ARENA_MAX": "2"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=1500)
    assert done.returncode == 0, done.stderr
    found: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    assert found["tokens"] == num_frames * per_frame
    return found


def check(found: dict[str, int], max_cache_bytes: int) -> None:
    assert found["late"] <= 350e6
    assert found["late"] - found["early"] < 32e6
    assert found["disk"] <= max_cache_bytes + (2 << 23)  # the era being filled is counted when it is finished


def test_memory_and_disk_stay_the_same_from_ten_to_two_hundred_megabytes(tmp_path: Path) -> None:
    check(measure(tmp_path, 200_000_000, 0.2, 64 << 20), 64 << 20)


@pytest.mark.slow
def test_memory_and_disk_stay_the_same_up_to_five_gigabytes(tmp_path: Path) -> None:
    check(measure(tmp_path, 5_000_000_000, 0.05, 256 << 20), 256 << 20)
