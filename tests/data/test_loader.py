"""Batches: every window once an epoch, the same with any number of threads and ranks, resumed anywhere exactly."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jackline.data.build.supply import Data, open_cache, open_data
from jackline.data.cache.eras import WindowShape
from jackline.data.loader.loader import Batch, Loader, LoaderSettings
from jackline.data.spec import CacheSettings, DataSpec, Rows
from jackline.errors import CannotResume, JacklineError, UsageError
from tests.data.corpora import all_tokens, build_cache, make_texts, spec_of, write_jsonl

SETTINGS = LoaderSettings(seq_len=32, batch_size=6, seed=5, epochs=2)


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> DataSpec:
    """About 50,000 tokens in 15 eras."""
    return spec_of(write_jsonl(tmp_path_factory.mktemp("in") / "a.jsonl", make_texts(150)))


@pytest.fixture(scope="module")
def root(spec: DataSpec, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("cache")
    build_cache(spec, root)
    return root


def opened(spec: DataSpec, root: Path, state: dict[str, Any] | None = None) -> Data:
    return open_data(spec, CacheSettings(root=root), inline=True, state=state)


def batches_of(spec: DataSpec, root: Path, **settings: Any) -> list[Batch]:
    with Loader(opened(spec, root), replace(SETTINGS, **settings)) as loader:
        return list(loader)


def test_an_epoch_holds_every_window_once_but_the_rest_of_a_batch(spec: DataSpec, root: Path) -> None:
    found = [batch for batch in batches_of(spec, root) if batch.epoch == 0]
    windows = np.concatenate([batch.windows for batch in found]).tolist()
    cache = opened(spec, root).cache
    shape = WindowShape(33, 32)
    expected = [
        cache.plan.start(era) + 32 * number
        for era, record in cache.ledger.records.items()
        for number in range(shape.count_in(record.tokens))
    ]
    assert len(set(windows)) == len(windows)
    assert set(windows) <= set(expected)
    assert len(expected) - len(windows) == len(expected) % 6
    assert windows != sorted(windows)


def test_a_batch_holds_the_tokens_it_names(spec: DataSpec, root: Path) -> None:
    tokens = all_tokens(opened(spec, root).cache)
    for batch in batches_of(spec, root)[::7]:
        for row, start in zip(batch.tokens, batch.windows.tolist(), strict=True):
            assert np.array_equal(row, tokens[start : start + 33])


def test_the_last_ragged_batch_is_given_when_asked_for(spec: DataSpec, root: Path) -> None:
    found = batches_of(spec, root, drop_last=False, epochs=1, batch_size=7)
    with Loader(opened(spec, root), SETTINGS) as loader:
        total = loader.num_windows()
    assert sum(len(batch.tokens) for batch in found) == total
    assert len(found[-1].tokens) == total % 7


def test_epochs_and_seeds_differ_and_no_shuffle_is_in_order(spec: DataSpec, root: Path) -> None:
    found = batches_of(spec, root)
    half = len(found) // 2
    assert not np.array_equal(found[0].windows, found[half].windows)
    assert not np.array_equal(found[0].windows, batches_of(spec, root, seed=6)[0].windows)
    ordered = np.concatenate([batch.windows for batch in batches_of(spec, root, shuffle="none", epochs=1)])
    assert ordered.tolist() == sorted(ordered.tolist())


@pytest.mark.parametrize("num_threads", [0, 1, 4])
def test_the_same_batches_with_any_number_of_threads(num_threads: int, spec: DataSpec, root: Path) -> None:
    one, other = batches_of(spec, root, num_threads=2), batches_of(spec, root, num_threads=num_threads)
    assert len(one) == len(other)
    for a, b in zip(one, other, strict=True):
        assert np.array_equal(a.tokens, b.tokens)
        assert (a.epoch, a.position) == (b.epoch, b.position)


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_share_a_batch_and_their_number_changes_nothing(world_size: int, spec: DataSpec, root: Path) -> None:
    whole = batches_of(spec, root)
    shares = [batches_of(spec, root, rank=rank, world_size=world_size) for rank in range(world_size)]
    for number, batch in enumerate(whole):
        joined = np.concatenate([share[number].tokens for share in shares])
        assert np.array_equal(joined, batch.tokens)


@pytest.mark.parametrize("stride", [1, 16, 33, 50])
def test_windows_with_overlap_or_gaps(stride: int, spec: DataSpec, root: Path) -> None:
    cache = opened(spec, root).cache
    found = batches_of(spec, root, stride=stride, epochs=1, drop_last=False)
    counts = Counter(np.concatenate([batch.windows for batch in found]).tolist())
    shape = WindowShape(33, stride)
    expected = {
        cache.plan.start(era) + stride * number
        for era, record in cache.ledger.records.items()
        for number in range(shape.count_in(record.tokens))
    }
    assert set(counts) == expected
    assert set(counts.values()) == {1}


def test_resume_in_the_middle_of_every_era_and_at_every_border(spec: DataSpec, root: Path) -> None:
    whole = batches_of(spec, root)
    states = []
    with Loader(opened(spec, root), SETTINGS) as loader:
        states.append(loader.state())
        states.extend(loader.state() for _ in loader)
    eras = {state["era"] for state in states}
    assert len(eras) >= 10
    for number in range(0, len(states), 5):
        state = json.loads(json.dumps(states[number]))
        with Loader(opened(spec, root, state), replace(SETTINGS, num_threads=number % 3), state) as loader:
            again = [next(loader) for _ in range(min(6, len(whole) - number))]
        for a, b in zip(again, whole[number : number + 6], strict=True):
            assert np.array_equal(a.tokens, b.tokens)
            assert (a.epoch, a.position) == (b.epoch, b.position)


def test_a_state_is_what_was_consumed_not_what_was_fetched(spec: DataSpec, root: Path) -> None:
    with Loader(opened(spec, root), replace(SETTINGS, num_threads=4, num_prefetched=8)) as loader:
        for number in range(1, 20):
            next(loader)
            assert loader.state()["position"] == 6 * number


def test_the_end_of_an_epoch_is_the_start_of_the_next(spec: DataSpec, root: Path) -> None:
    with Loader(opened(spec, root), SETTINGS) as loader:
        total = loader.num_windows()
        assert total is not None
        for _ in range(total // 6):
            next(loader)
        state = loader.state()
    assert (state["epoch"], state["position"], state["era"], state["era_cursor"]["skip_tokens"]) == (1, 0, 0, 0)


def test_seeking_back_and_forth_gives_the_same_batches(spec: DataSpec, root: Path) -> None:
    whole = batches_of(spec, root)
    with Loader(opened(spec, root), SETTINGS) as loader:
        first = loader.state()
        for number in (30, 3, 60, 0):
            loader.seek({**first, "position": 6 * number, "era": 0, "hash_before": None})
            assert np.array_equal(next(loader).tokens, whole[number].tokens)


def test_a_state_of_other_data_is_refused_with_the_difference(spec: DataSpec, root: Path) -> None:
    with Loader(opened(spec, root), SETTINGS) as loader:
        state = loader.state()
    for changed, text in [
        ({"seed": 6}, "seed was 6, is 5"),
        ({"window": [17, 16]}, "window was [17, 16], is [33, 32]"),
        ({"fingerprint": "x"}, f"fingerprint was x, is {state['fingerprint']}"),
    ]:
        with pytest.raises(CannotResume) as caught:
            Loader(opened(spec, root), SETTINGS, {**state, **changed})
        assert str(caught.value) == (
            f"error: the data of this checkpoint is not the data of this run: {text}\n"
            "hint: give the same source, tokenizer, seq_len and seed, or start a new run"
        )


def test_a_cache_that_is_not_what_was_trained_on_is_refused(spec: DataSpec, root: Path) -> None:
    with Loader(opened(spec, root), SETTINGS) as loader:
        for _ in range(40):
            next(loader)
        state = loader.state()
    assert state["era"] > 0
    with pytest.raises(CannotResume, match="is not what this run was trained on: its hash is"):
        Loader(opened(spec, root), SETTINGS, {**state, "hash_before": "0" * 32})


def test_rows_are_batches_of_whole_rows(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", make_texts(60))
    spec = spec_of(path, rows=Rows(33, 16))
    cache = build_cache(spec, tmp_path / "cache")
    rows = {row.tobytes() for row in all_tokens(cache).reshape(-1, 33)}
    found = batches_of(spec, tmp_path / "cache", epochs=1, drop_last=False)
    assert {row.tobytes() for batch in found for row in batch.tokens} == rows
    with pytest.raises(UsageError) as caught:
        batches_of(spec, tmp_path / "cache", seq_len=64)
    assert str(caught.value) == (
        "error: the cache holds rows of 33 tokens, seq_len 64 needs 65\nhint: seq_len=32, or build rows of 65"
    )


def test_too_little_data_for_one_batch_is_said(tmp_path: Path) -> None:
    spec = spec_of(write_jsonl(tmp_path / "a.jsonl", make_texts(1, 10)))
    total = build_cache(spec, tmp_path / "cache").total_tokens()
    with Loader(opened(spec, tmp_path / "cache"), SETTINGS) as loader, pytest.raises(JacklineError) as caught:
        next(loader)
    assert str(caught.value) == (
        f"error: the data has {total} tokens: not enough for one batch of 6 windows of 33 tokens\n"
        "hint: give more data, a smaller batch or a shorter sequence"
    )


def test_data_of_which_nothing_was_kept_says_why(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ["", "short", "short too"])
    spec = spec_of(path, min_chars=50)
    build_cache(spec, tmp_path / "cache")
    with Loader(opened(spec, tmp_path / "cache"), SETTINGS) as loader, pytest.raises(JacklineError) as caught:
        next(loader)
    assert str(caught.value) == (
        "error: no document was kept: of 3 records 1 are empty, 2 too short, 0 of the other split, 0 damaged\n"
        "hint: check the split, min_chars and the source; documents=line or block makes more of a txt file"
    )


def test_the_time_spent_waiting_is_counted(spec: DataSpec, root: Path) -> None:
    with Loader(opened(spec, root), SETTINGS) as loader:
        assert loader.waited_s == 0
        next(loader)
        assert loader.waited_s > 0


def test_a_moved_cache_is_read_by_its_path(spec: DataSpec, root: Path, tmp_path: Path) -> None:
    import shutil

    cache = opened(spec, root).cache
    moved = tmp_path / "moved"
    shutil.copytree(cache.folder, moved)
    with Loader(open_cache(moved, CacheSettings(root=tmp_path)), SETTINGS) as loader:
        assert np.array_equal(next(loader).tokens, batches_of(spec, root)[0].tokens)


@pytest.mark.parametrize("text", ["batches of 0 x 32", "a batch of 6 cannot be shared by 4 ranks", "rank 2 of 2"])
def test_settings_that_cannot_be_meant(text: str) -> None:
    changes: dict[str, dict[str, int]] = {
        "batches of 0 x 32": {"batch_size": 0},
        "a batch of 6 cannot be shared by 4 ranks": {"world_size": 4},
        "rank 2 of 2": {"rank": 2, "world_size": 2},
    }
    with pytest.raises(UsageError, match=text):
        replace(SETTINGS, **changes[text])


def test_tokens_become_torch_tensors() -> None:
    torch = pytest.importorskip("torch")
    from jackline.data.loader.batches import ToDevice, inputs_and_targets

    to_device = ToDevice("cpu")
    assert to_device(np.array([[0, 1, 65535, 40000]], np.uint16)).tolist() == [[0, 1, 65535, 40000]]
    wide = to_device(np.array([[70000, 4_000_000_000]], np.uint32))
    assert wide.dtype == torch.int64
    assert wide.tolist() == [[70000, 4_000_000_000]]
    inputs, targets = inputs_and_targets(torch.tensor([[5, 6, 256, 256, 256]]), pad_id=256)
    assert inputs.tolist() == [[5, 6, 256, 256]]
    assert targets.tolist() == [[6, 256, -100, -100]]


def test_without_a_gpu_pinning_is_left_out(spec: DataSpec, root: Path) -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    assert np.array_equal(batches_of(spec, root, pin_memory=True)[0].tokens, batches_of(spec, root)[0].tokens)


def test_pinned_batches_arrive_on_the_gpu_unharmed(spec: DataSpec, root: Path) -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("no GPU here")
    from jackline.data.loader.batches import ToDevice

    to_device = ToDevice("cuda")
    plain = batches_of(spec, root)
    with Loader(opened(spec, root), replace(SETTINGS, pin_memory=True)) as loader:
        moved = [to_device(batch.tokens) for batch in loader]
    for tensor, batch in zip(moved, plain, strict=True):
        assert tensor.cpu().tolist() == batch.tokens.tolist()


def test_a_short_read_is_read_on(spec: DataSpec, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    whole = batches_of(spec, root, num_threads=0)[0]
    real = os.preadv

    def stingy(fd: int, buffers: Any, offset: int) -> int:
        return real(fd, [buffers[0][:7]], offset)

    monkeypatch.setattr(os, "preadv", stingy)
    assert np.array_equal(batches_of(spec, root, num_threads=0, epochs=1)[0].tokens, whole.tokens)
