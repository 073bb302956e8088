"""Training while tokenising, in bounded disk: real builder processes, killed, outrun and restarted."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jackline.data.builder import cache_folder, run_builder
from jackline.data.cache import Cache, era_path
from jackline.data.loader import Batch, Loader, LoaderSettings
from jackline.data.progress import Progress, silent
from jackline.data.readers import Reading, Registration, living_readers
from jackline.data.spec import CacheSettings, DataSpec
from jackline.data.supply import BackgroundSupply, is_era_ready, open_cache, open_data
from jackline.data.waiting import BuilderWatch
from jackline.errors import JacklineError
from jackline.rundir.atomic import read_json, write_json
from jackline.rundir.process_id import identify
from tests.data.corpora import build_cache, make_texts, spec_of, write_jsonl

SETTINGS = LoaderSettings(seq_len=64, batch_size=8, seed=3, epochs=2)


def corpus(folder: Path, count: int = 1200) -> DataSpec:
    """Some 280,000 tokens in 10 eras, most of 32,768 tokens (64 KiB)."""
    return spec_of(write_jsonl(folder / "a.jsonl", make_texts(count)), first_era_tokens=1 << 13, era_tokens=1 << 15)


def read_all(spec: DataSpec, settings: CacheSettings, **changes: Any) -> list[Batch]:
    with open_data(spec, settings) as data, Loader(data, replace(SETTINGS, **changes)) as loader:
        return list(loader)


def same(one: list[Batch], other: list[Batch]) -> bool:
    return len(one) == len(other) and all(
        np.array_equal(a.tokens, b.tokens) and (a.epoch, a.position) == (b.epoch, b.position)
        for a, b in zip(one, other, strict=True)
    )


def whole_cache_batches(spec: DataSpec, root: Path) -> list[Batch]:
    build_cache(spec, root)
    return read_all(spec, CacheSettings(root=root))


def test_batches_do_not_depend_on_how_far_the_tokeniser_has_come(tmp_path: Path) -> None:
    spec = corpus(tmp_path)
    ready = whole_cache_batches(spec, tmp_path / "ready")
    growing = read_all(spec, CacheSettings(root=tmp_path / "growing", eras_ahead=2))
    assert same(ready, growing)


def test_a_corpus_ten_times_larger_than_the_disk_allowed_is_read_twice(tmp_path: Path) -> None:
    spec = replace(corpus(tmp_path, 2000), era_tokens=1 << 13)
    ready = whole_cache_batches(spec, tmp_path / "ready")
    total_bytes = 2 * (build_cache(spec, tmp_path / "ready").total_tokens() or 0)
    allowed = total_bytes // 10
    settings = CacheSettings(root=tmp_path / "small", max_cache_bytes=allowed)
    data = open_data(spec, settings, inline=True)
    found: list[Batch] = []
    most = 0
    with Loader(data, SETTINGS) as loader:
        for batch in loader:
            found.append(batch)
            files = [path for path in data.cache.folder.glob("era-*.tok")]
            most = max(most, sum(size_or_zero(path) for path in files))
    assert same(ready, found)
    assert most <= allowed
    assert most > allowed // 3


def size_or_zero(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def test_resume_on_an_empty_machine_tokenises_only_from_that_era_on(tmp_path: Path) -> None:
    spec = corpus(tmp_path)
    ready = whole_cache_batches(spec, tmp_path / "ready")
    with Loader(open_data(spec, CacheSettings(root=tmp_path / "ready")), SETTINGS) as loader:
        for _ in range(400):
            next(loader)
        state = loader.state()
    assert state["era"] > 4
    empty = CacheSettings(root=tmp_path / "empty", eras_ahead=1, max_cache_bytes=4 << 16)
    data = open_data(spec, empty, state=state)
    with Loader(data, SETTINGS, state) as loader:
        again = [next(loader) for _ in range(20)]
    assert same(again, ready[400:420])
    built = {int(path.name[4:9]) for path in data.cache.folder.glob("era-*.tok")}
    assert min(built) == state["era"]


def test_going_round_on_an_adopted_ledger_gives_the_next_epoch(tmp_path: Path) -> None:
    spec = corpus(tmp_path, 600)
    ready = whole_cache_batches(spec, tmp_path / "ready")
    with Loader(open_data(spec, CacheSettings(root=tmp_path / "ready")), SETTINGS) as loader:
        for _ in range(200):
            next(loader)
        state = loader.state()
    data = open_data(spec, CacheSettings(root=tmp_path / "empty"), state=state)
    with Loader(data, SETTINGS, state) as loader:
        assert same(list(loader), ready[200:])


def test_a_killed_builder_is_started_again_and_nothing_changes(tmp_path: Path) -> None:
    spec = corpus(tmp_path)
    ready = whole_cache_batches(spec, tmp_path / "ready")
    settings = CacheSettings(root=tmp_path / "killed", eras_ahead=2, max_cache_bytes=4 << 16)
    data = open_data(spec, settings)
    supply = data.supply
    assert isinstance(supply, BackgroundSupply)
    found: list[Batch] = []
    num_kills = 0
    with Loader(data, SETTINGS) as loader:
        for batch in loader:
            found.append(batch)
            process = supply._process
            if num_kills < 6 and len(found) % 10 == 0 and process is not None and process.poll() is None:
                process.send_signal(signal.SIGKILL)
                num_kills += 1
    assert num_kills >= 2
    assert same(ready, found)


def test_two_readers_at_different_places_share_one_small_cache(tmp_path: Path) -> None:
    spec = corpus(tmp_path)
    ready = whole_cache_batches(spec, tmp_path / "ready")
    settings = CacheSettings(root=tmp_path / "small", eras_ahead=1, max_cache_bytes=6 << 16)
    one = Loader(open_data(spec, settings), replace(SETTINGS, epochs=1))
    other = Loader(open_data(spec, settings), replace(SETTINGS, epochs=1))
    with one, other:
        far = [next(one) for _ in range(300)]
        near = [next(other) for _ in range(100)]
        far += [next(one) for _ in range(50)]
        near += [next(other) for _ in range(50)]
    assert same(far, ready[:350])
    assert same(near, ready[:150])


def test_the_tokeniser_stays_a_few_eras_ahead(tmp_path: Path) -> None:
    spec = corpus(tmp_path)
    settings = CacheSettings(root=tmp_path / "cache", eras_ahead=2)
    data = open_data(spec, settings)
    with Loader(data, SETTINGS) as loader:
        next(loader)
        wait_until(lambda: is_era_ready(data.cache, 2))
        assert isinstance(data.supply, BackgroundSupply)
        assert data.supply._process is not None
        assert data.supply._process.wait(60) == 0
        assert {int(path.name[4:9]) for path in data.cache.folder.glob("era-*.tok")} == {0, 1, 2}
        assert not data.cache.ledger.is_sealed


def wait_until(is_there: Any) -> None:
    deadline = time.monotonic() + 60
    while not is_there():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_failed_builder_passes_its_reason_on(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "fine"}\n' + b"{broken\n" * 500)
    with pytest.raises(JacklineError) as caught:
        read_all(spec_of(path), CacheSettings(root=tmp_path / "cache"))
    assert caught.value.message == "500 of the first 501 records cannot be read (99.8 %, allowed 1 %)"
    assert caught.value.hint is not None


def test_a_budget_too_small_for_one_era_is_an_error(tmp_path: Path) -> None:
    spec = corpus(tmp_path)
    with pytest.raises(JacklineError) as caught:
        read_all(spec, CacheSettings(root=tmp_path / "cache", max_cache_bytes=100_000))
    assert str(caught.value) == (
        "error: max_cache_bytes is 97.7 KiB: too small for era 4 of 64.0 KiB\n"
        "hint: raise max_cache_bytes, or lower era_tokens (now 32,768)"
    )


def test_whoever_waits_is_told_what_the_tokeniser_does(tmp_path: Path) -> None:
    reports: list[Progress] = []
    spec = corpus(tmp_path)
    data = open_data(spec, CacheSettings(root=tmp_path / "cache"), reports.append)
    with Loader(data, SETTINGS) as loader:
        next(loader)
    assert reports[0] == Progress("wait", unit="B", detail="the tokenizer: the tokeniser is starting")


def test_a_builder_that_dies_five_times_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    from jackline.data import supply

    def start_dying(folder: Path, settings: CacheSettings) -> Any:
        return subprocess.Popen([sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"])

    monkeypatch.setattr(supply, "start_builder", start_dying)
    with pytest.raises(JacklineError) as caught:
        read_all(corpus(tmp_path), CacheSettings(root=tmp_path / "cache"))
    assert caught.value.message == "the tokeniser process died 5 times in a row, the last time with code -9"


def test_an_orphaned_builder_ends(tmp_path: Path) -> None:
    spec = corpus(tmp_path, 40_000)
    settings = CacheSettings(root=tmp_path / "cache")
    child = os.fork()
    if child == 0:
        try:
            data = open_data(spec, settings)
            process = data.supply._process  # type: ignore[attr-defined]
            (tmp_path / "pid").write_text(str(process.pid))
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    pid = int((tmp_path / "pid").read_text())

    def is_gone() -> bool:
        try:
            return Path(f"/proc/{pid}/stat").read_text().split(")")[1].split()[0] == "Z"
        except FileNotFoundError:
            return True

    wait_until(is_gone)


def test_a_dead_readers_file_is_taken_away_and_a_living_one_counts(tmp_path: Path) -> None:
    mine = Registration(tmp_path)
    mine.move_to(Reading(4, repeats=True))
    value = read_json(next((tmp_path / "readers").glob("*.json")))
    assert value is not None
    write_json(tmp_path / "readers" / "1-0.json", {**value, "process": {**value["process"], "start_ticks": 1}})
    write_json(tmp_path / "readers" / "2-0.json", {**value, "process": {**value["process"], "host": "elsewhere"}})
    assert sorted(living_readers(tmp_path), key=str) == [Reading(4, repeats=True), Reading(4, repeats=True)]
    assert not (tmp_path / "readers" / "1-0.json").exists()
    mine.remove()
    assert len(living_readers(tmp_path)) == 1


def test_an_era_whose_file_is_gone_is_built_again_while_reading(tmp_path: Path) -> None:
    spec = corpus(tmp_path, 600)
    ready = whole_cache_batches(spec, tmp_path / "ready")
    folder = cache_folder(spec, CacheSettings(root=tmp_path / "ready"))
    data = open_data(spec, CacheSettings(root=tmp_path / "ready"))
    cache: Cache = data.cache
    with Loader(data, SETTINGS) as loader:
        found = [next(loader)]
        os.unlink(era_path(folder, 3))
        found += list(loader)
    assert same(ready, found)
    assert era_path(cache.folder, 3).exists()


def start_waiting(
    spec: DataSpec, settings: CacheSettings, reports: list[Progress]
) -> tuple[Loader, BackgroundSupply]:
    data = open_data(spec, settings, reports.append)
    assert isinstance(data.supply, BackgroundSupply)
    return Loader(data, SETTINGS), data.supply


def test_a_stopped_tokeniser_is_named_and_does_not_hold_the_end_up(tmp_path: Path) -> None:
    reports: list[Progress] = []
    spec = spec_of(write_jsonl(tmp_path / "a.jsonl", make_texts(4000)), era_tokens=1 << 22)
    data = open_data(spec, CacheSettings(root=tmp_path / "cache"), reports.append)
    loader = Loader(data, SETTINGS)
    assert isinstance(data.supply, BackgroundSupply)
    process = data.supply._process
    assert process is not None
    process.send_signal(signal.SIGSTOP)
    reading = threading.Thread(target=lambda: list(quietly(loader)), daemon=True)
    reading.start()
    words = f"is stopped by a signal: `kill -CONT {process.pid}` lets it go on"
    wait_until(lambda: any(report.detail.endswith(words) for report in reports))
    loader.close()
    reading.join(timeout=60)
    assert not reading.is_alive()
    assert process.poll() is not None


def quietly(loader: Loader) -> Iterator[Batch]:
    with contextlib.suppress(JacklineError):
        yield from loader


def test_a_tokeniser_without_a_sign_of_life_is_said(tmp_path: Path) -> None:
    folder = cache_folder(corpus(tmp_path), CacheSettings(root=tmp_path / "cache"))
    me = identify(os.getpid())
    assert me is not None
    progress = Progress("tokenise", 5, 10, "B", 1.0, "a.jsonl").to_json()
    write_json(folder / "builder.json", {"state": "working", "process": me.to_json(), "progress": progress})
    now_s = 0.0
    watch = BuilderWatch(folder, clock=lambda: now_s)
    found = watch.describe("era 3 of the data")
    assert (found.phase, found.detail) == ("wait", "era 3 of the data: tokenise a.jsonl")
    now_s = 3600.0
    late = watch.describe("era 3 of the data")
    assert late.detail == f"era 3 of the data: no sign of life from the tokeniser (process {me.pid}) for 1 h"
    assert late.rate_per_s is None
    # Written again, by a clock that was set back to 1970: what counts is that it changed.
    os.utime(folder / "builder.json", (1, 1))
    assert watch.describe("era 3 of the data").detail == "era 3 of the data: tokenise a.jsonl"


def test_a_cache_that_is_deleted_while_it_is_read_is_said(tmp_path: Path) -> None:
    data = open_data(corpus(tmp_path), CacheSettings(root=tmp_path / "cache", eras_ahead=1))
    with Loader(data, SETTINGS) as loader:
        next(loader)
        loader.cache.folder.rename(tmp_path / "away")
        with pytest.raises(JacklineError) as caught:
            list(loader)
    assert str(caught.value) == (
        f"error: the token cache {loader.cache.folder} is gone\n"
        "hint: somebody deleted it or its disk is away; run the same command again and it is built anew"
    )


def test_a_builder_whose_cache_is_deleted_stops_with_a_sentence(tmp_path: Path) -> None:
    spec = spec_of(write_jsonl(tmp_path / "a.jsonl", make_texts(4000)), era_tokens=1 << 22)
    settings = CacheSettings(root=tmp_path / "cache")
    folder = cache_folder(spec, settings)

    def delete() -> bool:
        shutil.rmtree(folder, ignore_errors=True)
        return False

    with pytest.raises(JacklineError) as caught:
        run_builder(folder, settings, silent, for_readers=False, should_stop=delete)
    assert caught.value.message == f"the token cache {folder} is gone"


def test_a_finished_cache_is_read_where_nothing_can_be_written(tmp_path: Path) -> None:
    spec = corpus(tmp_path, 300)
    ready = whole_cache_batches(spec, tmp_path / "ready")
    folder = cache_folder(spec, CacheSettings(root=tmp_path / "ready"))
    with Loader(open_cache(folder, CacheSettings(root=tmp_path)), SETTINGS) as loader:
        for _ in range(60):
            next(loader)
        state = loader.state()
    assert state["era"] > 1
    disk = tmp_path / "read-only"
    disk.mkdir()
    made = subprocess.run(["mount", "--bind", "-o", "ro", folder, disk], capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"cannot mount a folder read-only here: {made.stderr.strip()}")
    try:
        with pytest.raises(OSError, match="Read-only file system"):
            (disk / "x").touch()
        data = open_cache(disk, CacheSettings(root=tmp_path), state=state)
        with Loader(data, SETTINGS, state) as loader:
            assert same(list(loader), ready[60:])
    finally:
        subprocess.run(["umount", disk], check=True)


def test_a_cache_opened_by_its_folder_finds_its_source_from_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_jsonl(tmp_path / "here" / "a.jsonl", make_texts(600))
    monkeypatch.chdir(tmp_path / "here")
    spec = spec_of("a.jsonl", first_era_tokens=1 << 13, era_tokens=1 << 15)
    ready = whole_cache_batches(spec, tmp_path / "ready")
    settings = CacheSettings(root=tmp_path / "cache", max_cache_bytes=3 << 16)
    folder = cache_folder(spec, settings)
    run_builder(folder, settings, silent, for_readers=False)
    monkeypatch.chdir(tmp_path)
    with Loader(open_cache(folder, settings), SETTINGS) as loader:
        assert same(list(loader), ready)
