"""Building a cache: every token once, the same after any number of deaths, refused when the source changed."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from jackline.data.build.builder import cache_folder, remove_cache, run_builder
from jackline.data.build.fill import budget
from jackline.data.cache.directory import Cache, era_path, part_path
from jackline.data.cache.writer import hash_file
from jackline.data.progress import Progress, silent
from jackline.data.sources.bytefile import SourceChanged, SourceUnavailable
from jackline.data.spec import CacheSettings, DataSpec, Rows, Source
from jackline.errors import JacklineError, UsageError
from jackline.rundir.lock import RunLock
from tests.data.corpora import (
    all_tokens,
    build_cache,
    expected_bytes,
    jsonl_bytes,
    make_texts,
    open_cache_folder,
    spec_of,
    write_jsonl,
    write_zst,
)
from tests.data.far_end import FarEnd, serving
from tests.deadline import HANGS_S


def files_of(cache: Cache) -> dict[str, bytes]:
    """Everything that must be the same, bit by bit, however building went."""
    same = [*cache.folder.glob("era-*"), cache.folder / "ledger.jsonl", cache.folder / "files.jsonl"]
    return {path.name: path.read_bytes() for path in same}


def test_every_token_is_there_once_and_in_order(tmp_path: Path) -> None:
    texts = make_texts(200)
    spec = spec_of(write_jsonl(tmp_path / "a.jsonl", texts))
    cache = build_cache(spec, tmp_path / "cache")
    assert np.array_equal(all_tokens(cache), expected_bytes(texts))
    assert cache.ledger.is_sealed
    assert cache.total_tokens() == len(expected_bytes(texts))
    for era, record in cache.ledger.records.items():
        assert record.tokens == 0 or hash_file(era_path(cache.folder, era)) == record.hash
        assert record.is_last or record.tokens == cache.plan.size(era)
    assert not list(cache.folder.glob("*.part"))


@pytest.mark.parametrize("num_threads", [1, 4])
def test_the_cache_does_not_depend_on_the_number_of_threads(num_threads: int, tmp_path: Path) -> None:
    spec = spec_of(write_zst(tmp_path / "a.jsonl.zst", make_texts(2500, 200), num_frames=5), era_tokens=1 << 18)
    one = build_cache(spec, tmp_path / "one", num_threads=2)
    other = build_cache(spec, tmp_path / "other", num_threads=num_threads)
    assert files_of(one) == files_of(other)


@pytest.mark.parametrize("extra", [0, 1, -1])
def test_a_corpus_that_ends_at_or_beside_the_end_of_an_era(extra: int, tmp_path: Path) -> None:
    text = "x" * (2048 - 1 + extra)
    path = tmp_path / "a.txt"
    path.write_text(text)
    cache = build_cache(spec_of(path), tmp_path / "cache")
    assert np.array_equal(all_tokens(cache), expected_bytes([text]))
    assert cache.total_tokens() == 2048 + extra


@pytest.mark.parametrize("max_tokens", [1, 1023, 1024, 1025, 2048, 3000, 10**9])
def test_max_tokens_is_exact(max_tokens: int, tmp_path: Path) -> None:
    texts = make_texts(30)
    cache = build_cache(spec_of(write_jsonl(tmp_path / "a.jsonl", texts), max_tokens=max_tokens), tmp_path / "cache")
    assert np.array_equal(all_tokens(cache), expected_bytes(texts)[:max_tokens])
    assert cache.ledger.is_sealed


def test_rows_are_whole_in_every_era(tmp_path: Path) -> None:
    texts = make_texts(60)
    spec = spec_of(write_jsonl(tmp_path / "a.jsonl", texts), rows=Rows(100, 50))
    cache = build_cache(spec, tmp_path / "cache")
    rows = all_tokens(cache).reshape(-1, 100)
    assert all(record.tokens % 100 == 0 for record in cache.ledger.records.values())
    starts = [row for row in rows.tolist() if bytes(row[:9]) == b"Document "]
    assert len(starts) == 60


def test_the_first_texts_decide_nothing_else_than_the_tokenizer(tmp_path: Path) -> None:
    texts = make_texts(500)
    spec = spec_of(
        write_jsonl(tmp_path / "a.jsonl", texts), tokenizer="train", vocab_size=600, validation_fraction=0.2
    )
    train = build_cache(replace(spec, split="train"), tmp_path / "cache")
    validation = build_cache(replace(spec, split="validation"), tmp_path / "cache")
    assert train.meta.tokenizer_hash == validation.meta.tokenizer_hash
    assert (train.folder / "tokenizer.json").read_bytes() == (validation.folder / "tokenizer.json").read_bytes()
    assert train.meta.vocab_size == 600


# The real command, committing after every block instead of once a second: more instants worth dying in. With KILL_AT
# it dies by SIGKILL at its n-th write, sync, rename or cut, in the middle of it where it has one.
CHILD = """
import os, signal, sys
import jackline.data.build.fill as build
build.COMMIT_EVERY_S = 0.0
left = int(os.environ.get("KILL_AT", "0"))

def deadly(name):
    real = getattr(os, name)
    def act(*words, **more):
        global left
        left -= 1
        if left == 0:
            if name in ("pwrite", "write"):
                real(words[0], words[1][: len(words[1]) // 2], *words[2:])
            elif name in ("replace", "truncate", "unlink"):
                real(*words, **more)
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*words, **more)
    return act

for name in ("pwrite", "write", "fsync", "replace", "truncate", "ftruncate", "unlink"):
    setattr(os, name, deadly(name))
from jackline.data.__main__ import main
sys.exit(main())
"""


START = "import sys; from jackline.data.__main__ import main; sys.exit(main())"


def start_preparing(spec: DataSpec, settings: CacheSettings, *, kill_at: int = 0) -> subprocess.Popen[bytes]:
    request = {"spec": spec.to_json(), "settings": settings.to_json(), "rebuild": False, "as_json": True}
    command = [sys.executable, "-c", CHILD, "prepare", json.dumps(request)]
    environment = {**os.environ, "KILL_AT": str(kill_at)}
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment)


def test_killed_at_random_instants_the_cache_comes_out_bit_by_bit_the_same(tmp_path: Path) -> None:
    texts = make_texts(6000, 250)
    for number in range(3):
        write_zst(tmp_path / "in" / f"{number}.jsonl.zst", texts[number * 2000 : number * 2000 + 2000], num_frames=3)
    spec = spec_of(tmp_path / "in", era_tokens=1 << 20, first_era_tokens=1 << 18)
    whole = build_cache(spec, tmp_path / "whole")
    settings = CacheSettings(root=tmp_path / "killed")
    folder = cache_folder(spec, settings)
    chosen, num_kills, num_commits_found = random.Random(11), 0, 0
    for _ in range(40):
        child = start_preparing(spec, settings, kill_at=chosen.randrange(5, 30))
        _, said = child.communicate(timeout=HANGS_S)
        if child.returncode == 0:
            break
        assert child.returncode == -signal.SIGKILL, said.decode()
        num_kills += 1
        num_commits_found += (folder / "open.jsonl").exists() and bool((folder / "open.jsonl").read_bytes())
    assert num_kills >= 4
    assert num_commits_found >= 1
    run_builder(folder, settings, silent, for_readers=False)
    killed = open_cache_folder(folder)
    eras = [name for name in files_of(whole) if name.startswith("era-")]
    assert len(eras) > 4
    assert {name: files_of(killed)[name] for name in eras} == {name: files_of(whole)[name] for name in eras}
    assert killed.ledger.records == whole.ledger.records
    assert not list(folder.glob("*.part"))


def test_a_death_between_the_last_commit_of_an_era_and_its_seal_miscounts_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = spec_of(write_jsonl(tmp_path / "a.jsonl", make_texts(2000)), era_tokens=1 << 18, first_era_tokens=1 << 17)
    whole = build_cache(spec, tmp_path / "whole")
    settings = CacheSettings(root=tmp_path / "killed")
    folder = cache_folder(spec, settings)

    def die(*words: object) -> None:
        raise KeyboardInterrupt

    before = set(threading.enumerate())
    with monkeypatch.context() as patched:
        patched.setattr("jackline.data.build.fill.COMMIT_EVERY_S", 0.0)
        patched.setattr("jackline.data.cache.writer.record_era", die)
        with pytest.raises(KeyboardInterrupt):
            run_builder(folder, settings, silent, for_readers=False)
    left = set(threading.enumerate()) - before
    assert not [thread.name for thread in left if thread.name.startswith("jackline-")]
    assert json.loads((folder / "open.jsonl").read_text())["tokens"] == 1 << 17
    run_builder(folder, settings, silent, for_readers=False)
    assert open_cache_folder(folder).ledger.records == whole.ledger.records


def test_two_processes_build_one_cache_together(tmp_path: Path) -> None:
    texts = make_texts(3000, 200)
    spec = spec_of(write_jsonl(tmp_path / "a.jsonl", texts), era_tokens=1 << 16)
    settings = CacheSettings(root=tmp_path / "cache")
    children = [start_preparing(spec, settings) for _ in range(3)]
    said = [child.communicate(timeout=HANGS_S)[1].decode() for child in children]
    assert [child.returncode for child in children] == [0, 0, 0], said
    cache = open_cache_folder(cache_folder(spec, settings))
    assert np.array_equal(all_tokens(cache), expected_bytes(texts))


def test_only_one_process_builds_at_a_time(tmp_path: Path) -> None:
    spec = spec_of(write_jsonl(tmp_path / "a.jsonl", make_texts(10)))
    settings = CacheSettings(root=tmp_path / "cache")
    folder = cache_folder(spec, settings)
    lock = RunLock(folder / "builder.lock")
    assert lock.try_acquire()
    assert run_builder(folder, settings, silent, for_readers=False) is None
    with pytest.raises(JacklineError) as caught:
        remove_cache(folder)
    assert str(caught.value) == (
        f"error: the cache in {folder} is being built by another process\nhint: stop that run first, then try again"
    )
    lock.release()


def test_a_finished_cache_moves_to_another_machine_without_its_source(tmp_path: Path) -> None:
    texts = make_texts(100)
    path = write_jsonl(tmp_path / "a.jsonl", texts)
    cache = build_cache(spec_of(path), tmp_path / "cache")
    moved = shutil.move(cache.folder, tmp_path / "elsewhere")
    path.unlink()
    assert np.array_equal(all_tokens(open_cache_folder(Path(moved))), expected_bytes(texts))


def interrupted(spec: DataSpec, root: Path) -> tuple[Path, CacheSettings]:
    """A cache of which the first eras are built; the newest commit is thrown away with the open era."""
    settings = CacheSettings(root=root, max_cache_bytes=20_000)
    folder = cache_folder(spec, settings)
    run_builder(folder, settings, silent, for_readers=False)
    assert not open_cache_folder(folder).ledger.is_sealed
    return folder, replace(settings, max_cache_bytes=None)


def test_a_source_that_changed_in_between_is_refused_by_name(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", make_texts(300))
    folder, settings = interrupted(spec_of(path), tmp_path / "cache")
    size = path.stat().st_size
    with open(path, "ab") as file:
        file.write(b'{"text": "one more"}\n')
    with pytest.raises(SourceChanged) as caught:
        run_builder(folder, settings, silent, for_readers=False)
    assert str(caught.value) == (
        f"error: the source changed since the cache in {folder} was built: {path} was {size} bytes long and is "
        f"{size + 21} bytes now\n"
        "hint: `jackline data prepare --rebuild` builds it anew; a run that used it cannot resume exactly"
    )


def test_an_era_that_comes_out_different_is_refused_with_what_changed(tmp_path: Path) -> None:
    # In the middle of a file, where neither its length nor its ends betray it: only the era's hash does.
    texts = make_texts(2000)
    path = write_jsonl(tmp_path / "a.jsonl", texts)
    cache = build_cache(spec_of(path), tmp_path / "cache")
    data = path.read_bytes()
    at = data.index(b"Document 900:")
    path.write_bytes(data[:at] + b"document" + data[at + 8 :])
    token = int(np.flatnonzero(all_tokens(cache) == 256)[899])
    era = max(era for era in cache.ledger.records if cache.plan.start(era) <= token)
    hash_before = cache.ledger.records[era].hash
    era_path(cache.folder, era).unlink()
    with pytest.raises(SourceChanged) as caught:
        run_builder(cache.folder, CacheSettings(root=tmp_path / "cache"), silent, for_readers=False)
    lines = str(caught.value).splitlines()
    assert lines[0].startswith(f"error: era {era} was built again and came out different: 4,096 tokens with hash ")
    assert lines[0].endswith(f"the ledger says 4,096 with {hash_before[:12]}")
    assert lines[1] == "       the source files look the same; the tokens were made by bytes, now by bytes"
    assert lines[2] == (
        "hint: put the source back as it was, or start a new run on a new cache: `jackline data prepare --rebuild`"
    )
    assert not part_path(cache.folder, era).exists()
    path.write_bytes(data)
    run_builder(cache.folder, CacheSettings(root=tmp_path / "cache"), silent, for_readers=False)
    assert np.array_equal(all_tokens(cache), expected_bytes(texts))


def test_a_source_that_is_gone_stops_and_continues_when_it_is_back(tmp_path: Path) -> None:
    texts = make_texts(300)
    path = write_jsonl(tmp_path / "a.jsonl", texts)
    folder, settings = interrupted(spec_of(path), tmp_path / "cache")
    path.rename(tmp_path / "away")
    with pytest.raises((SourceUnavailable, UsageError)):
        run_builder(folder, settings, silent, for_readers=False)
    (tmp_path / "away").rename(path)
    run_builder(folder, settings, silent, for_readers=False)
    assert np.array_equal(all_tokens(open_cache_folder(folder)), expected_bytes(texts))


def test_a_full_disk_is_said_and_nothing_is_lost(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", str(disk)], capture_output=True, text=True
    )
    if made.returncode:
        pytest.skip(f"cannot mount a small tmpfs here: {made.stderr.strip()}")
    try:
        texts = make_texts(2000)
        spec = spec_of(write_jsonl(tmp_path / "a.jsonl", texts), era_tokens=1 << 14)
        settings = CacheSettings(root=disk, max_cache_bytes=1 << 30)
        folder = cache_folder(spec, settings)
        with pytest.raises(JacklineError) as caught:
            run_builder(folder, settings, silent, for_readers=False)
        assert "cannot write the token cache: No space left on device" in caught.value.message
        assert caught.value.hint == (
            "free some space or lower max_cache_bytes, then run the same command again: nothing is lost"
        )
        subprocess.run(["mount", "-o", "remount,size=8m", str(disk)], check=True)
        run_builder(folder, settings, silent, for_readers=False)
        assert np.array_equal(all_tokens(open_cache_folder(folder)), expected_bytes(texts))
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_a_limit_on_the_size_of_files_is_said_and_nothing_is_lost(tmp_path: Path) -> None:
    texts = make_texts(3000)
    spec = spec_of(write_jsonl(tmp_path / "a.jsonl", texts), era_tokens=1 << 20, first_era_tokens=1 << 20)
    settings = CacheSettings(root=tmp_path / "cache")
    request = {"spec": spec.to_json(), "settings": settings.to_json(), "rebuild": False, "as_json": True}
    limited = f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, -1)); {START}"
    done = subprocess.run(
        [sys.executable, "-c", limited, "prepare", json.dumps(request)],
        capture_output=True,
        text=True,
        timeout=HANGS_S,
    )
    assert done.returncode == 1
    folder = cache_folder(spec, settings)
    said = done.stderr.splitlines()
    assert said[-2].startswith("error: cannot write the token cache: File too large (")
    assert (
        said[-1] == "hint: free some space or lower max_cache_bytes, then run the same command again: nothing is lost"
    )
    run_builder(folder, settings, silent, for_readers=False)
    assert np.array_equal(all_tokens(open_cache_folder(folder)), expected_bytes(texts))


def test_the_budget_is_a_fifth_of_the_free_disk_unless_said(tmp_path: Path) -> None:
    cache = build_cache(spec_of(write_jsonl(tmp_path / "a.jsonl", make_texts(5))), tmp_path / "cache")
    stat = os.statvfs(tmp_path)
    found = budget(cache, CacheSettings(root=tmp_path))
    assert 0.15 * stat.f_bavail * stat.f_frsize < found < 0.25 * stat.f_bavail * stat.f_frsize
    assert budget(cache, CacheSettings(root=tmp_path, max_cache_bytes=7)) == 7


def test_what_happens_is_reported_from_the_first_instant(tmp_path: Path) -> None:
    reports: list[Progress] = []
    path = write_jsonl(tmp_path / "a.jsonl", make_texts(2000))
    settings = CacheSettings(root=tmp_path / "cache")
    folder = cache_folder(spec_of(path), settings)
    run_builder(folder, settings, reports.append, for_readers=False)
    assert reports[0].phase == "list"
    assert reports[-1].phase == "done"
    assert reports[-1].done == path.stat().st_size
    assert (folder / "builder.json").exists()


def test_a_download_and_a_network_that_is_waited_for_are_phases_of_their_own(tmp_path: Path) -> None:
    reports: list[Progress] = []
    with serving(FarEnd({"a.jsonl": jsonl_bytes(make_texts(50))})) as far_end:
        spec = spec_of(far_end.address("a.jsonl"), text_column="text")
        settings = CacheSettings(root=tmp_path / "cache")
        far_end.faults = ["503", "503"]
        run_builder(cache_folder(spec, settings), settings, reports.append, for_readers=False)
        host = far_end.url.removeprefix("http://")
    waits = [report.detail for report in reports if report.phase == "wait"]
    assert waits
    assert all(wait.startswith(f"{host}: HTTP 503 Service Unavailable; trying again in ") for wait in waits)
    assert (reports[-1].phase, reports[-1].detail) == ("done", "a.jsonl")
    assert reports[-1].done == len(jsonl_bytes(make_texts(50)))


def test_weights_of_a_mixture_reach_the_cache(tmp_path: Path) -> None:
    a = write_jsonl(tmp_path / "a.jsonl", make_texts(30))
    b = write_jsonl(tmp_path / "b.jsonl", make_texts(20))
    sources = (Source(str(a), 2.0), Source(str(b), 1.0))
    cache = build_cache(replace(spec_of("x"), sources=sources), tmp_path / "cache")
    assert cache.total_tokens() == len(expected_bytes(make_texts(30))) + len(expected_bytes(make_texts(20)))
    assert [source.text_column for source in cache.meta.spec.sources] == ["text", "text"]


def test_padding_without_a_border_token_is_refused(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", make_texts(5))
    with pytest.raises(UsageError) as caught:
        build_cache(spec_of(path, rows=Rows(50, 50), eos="none"), tmp_path / "cache")
    assert str(caught.value) == "error: padded rows need a token to pad with\nhint: eos=TOKEN, or short=drop"


def test_no_part_is_left_of_an_era_in_the_ledger(tmp_path: Path) -> None:
    cache = build_cache(spec_of(write_jsonl(tmp_path / "a.jsonl", make_texts(100))), tmp_path / "cache")
    part_path(cache.folder, 0).write_bytes(b"left by a dead builder")
    run_builder(cache.folder, CacheSettings(root=tmp_path / "cache"), silent, for_readers=False)
    assert not list(cache.folder.glob("*.part"))
