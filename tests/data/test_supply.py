"""Training while tokenising, in bounded disk: real builder processes, killed, outrun and restarted."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jackline.data.build.builder import cache_folder
from jackline.data.build.supply import BackgroundSupply, begin_data, end_begun, is_era_ready, open_data
from jackline.data.cache.directory import Cache, era_path
from jackline.data.cache.readers import Reading, Registration, living_readers
from jackline.data.loader.loader import Batch, Loader, LoaderSettings
from jackline.data.progress import Progress
from jackline.data.spec import CacheSettings, DataSpec
from jackline.errors import JacklineError
from jackline.rundir.atomic import read_json, write_json
from jackline.rundir.lock import RunLock
from tests.data.corpora import build_cache, make_texts, spec_of, write_jsonl
from tests.deadline import HANGS_S

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


def test_what_was_begun_before_it_is_opened_is_built_by_one_process(tmp_path: Path) -> None:
    spec, settings = corpus(tmp_path), CacheSettings(root=tmp_path / "begun")
    ready = whole_cache_batches(spec, tmp_path / "ready")
    begin_data(spec, settings)
    begun = [reading.era for reading in living_readers(cache_folder(spec, settings))]
    assert begun == [0]
    assert same(ready, read_all(spec, settings))
    assert living_readers(cache_folder(spec, settings)) == []
    end_begun()


def test_what_was_begun_and_never_opened_leaves_nothing_behind(tmp_path: Path) -> None:
    spec, settings = corpus(tmp_path), CacheSettings(root=tmp_path / "begun")
    begin_data(spec, settings)
    end_begun()
    assert living_readers(cache_folder(spec, settings)) == []
    lock = RunLock(cache_folder(spec, settings) / "builder.lock")
    assert lock.try_acquire()
    lock.release()


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


def test_threads_that_miss_different_eras_wait_one_after_another(tmp_path: Path) -> None:
    """Each registers the era that it waits for in the same place, and the builder works for what stands there."""
    spec = replace(corpus(tmp_path), era_tokens=1 << 13)
    ready = whole_cache_batches(spec, tmp_path / "ready")
    with open_data(spec, CacheSettings(root=tmp_path / "ready"), inline=True) as data:
        supply, waiting, found = data.supply, [], []

        class Slow:
            start, stop = supply.start, supply.stop

            def wait_until(self, is_there: Callable[[], bool], what: str) -> None:
                waiting.append(what)
                time.sleep(0.05)  # long enough for other threads to come
                found.append((what, [reading.waits_for for reading in living_readers(data.cache.folder)]))
                supply.wait_until(is_there, what)

        with Loader(replace(data, supply=Slow()), replace(SETTINGS, num_threads=4)) as loader:
            for path in data.cache.folder.glob("era-0000[2-9].tok"):
                path.unlink()  # recycled
            assert same(ready, list(loader))
    assert len(waiting) >= 2
    assert all(what == f"era {eras[0]} of the data" for what, eras in found)


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
        assert data.supply._process.wait(HANGS_S) == 0
        assert {int(path.name[4:9]) for path in data.cache.folder.glob("era-*.tok")} == {0, 1, 2}
        assert not data.cache.ledger.is_sealed


def wait_until(is_there: Any) -> None:
    deadline = time.monotonic() + HANGS_S
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
    assert reports[0] == Progress("wait", unit="B", detail="the tokenizer: starting the tokenizer")


def test_a_builder_that_dies_five_times_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from jackline.data.build import supply

    def start_dying(folder: Path, settings: CacheSettings) -> Any:
        return subprocess.Popen([sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"])

    monkeypatch.setattr(supply, "start_builder", start_dying)
    with pytest.raises(JacklineError) as caught:
        read_all(corpus(tmp_path), CacheSettings(root=tmp_path / "cache"))
    assert caught.value.message == "the tokeniser process was lost 5 times in a row, the last time with code -9"


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
