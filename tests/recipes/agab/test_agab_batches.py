"""The order of pairs and their features: every pair once an epoch, any place found again, the same on a GPU."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch

from jackline.errors import CannotResume
from jackline.recipes.agab.batches import PairLoader, Pairs, PairSettings
from jackline.recipes.agab.data.prepared import AffinityData

CPU = torch.device("cpu")


def make_data(num_pairs: int = 103, num_train: int = 70) -> AffinityData:
    draw = np.random.default_rng(1)
    order = np.sort(draw.permutation(num_pairs)[:num_train]).astype(np.int64)
    rest = np.setdiff1d(np.arange(num_pairs), order)
    return AffinityData(
        antibody=draw.normal(size=(40, 6)).astype(np.float16),
        antigen=draw.normal(size=(5, 3)).astype(np.float16),
        antibody_row=draw.integers(0, 40, num_pairs).astype(np.int32),
        antigen_row=draw.integers(0, 5, num_pairs).astype(np.int32),
        pkd=np.clip(draw.normal(8, 1.5, num_pairs), 4, 13).astype(np.float32),
        parts={"train": order, "validation": rest[:15], "test": rest[15:]},
        counts={},
        fingerprint="bits",
        identity="pairs",
        cache_keys=("a", "b"),
        hashes=(np.zeros((40, 2), np.uint64), np.zeros((5, 2), np.uint64)),
    )


def take(loader: PairLoader, count: int) -> list[list[int]]:
    return [next(loader).windows.tolist() for _ in range(count)]


@pytest.mark.parametrize("is_stratified", [False, True])
@pytest.mark.parametrize("batch_size", [1, 8, 70, 1000])
def test_every_training_pair_comes_once_in_an_epoch_and_each_epoch_has_its_own_order(
    batch_size: int, is_stratified: bool
) -> None:
    data = make_data()
    loader = PairLoader(data, PairSettings(batch_size, 42, is_stratified), CPU)
    first, second = (list(chain(*take(loader, loader.steps_per_epoch))) for _ in range(2))
    assert sorted(first) == sorted(second) == data.parts["train"].tolist()
    assert first != second


@pytest.mark.parametrize("is_stratified", [False, True])
def test_any_place_is_found_again_by_another_loader(is_stratified: bool) -> None:
    data, settings = make_data(), PairSettings(8, 42, is_stratified)
    plain = PairLoader(data, settings, CPU)
    states, batches = [], []
    for _ in range(2 * plain.steps_per_epoch + 3):
        states.append(plain.state())
        batches.append(next(plain).windows.tolist())
    for number in (0, 1, 8, 9, 10, 17, 18, 20):
        again = PairLoader(data, settings, CPU)
        again.seek(states[number])
        assert take(again, len(batches) - number) == batches[number:]


def test_a_stratified_epoch_has_the_rare_bins_spread_and_not_in_clumps() -> None:
    pkd = np.full(1000, 7.5, np.float32)
    pkd[:10] = 10.5
    data = replace(make_data(1000, 1000), pkd=pkd)
    loader = PairLoader(data, PairSettings(100, 1, is_stratified=True), CPU)
    for _ in range(3 * loader.steps_per_epoch):
        assert int((pkd[next(loader).windows] > 10).sum()) == 1


@pytest.mark.parametrize(
    ("data", "settings", "words"),
    [
        ({"identity": "others"}, {}, "the pairs are others"),
        ({}, {"batch_size": 9}, "batch_size was 8, is 9"),
        ({}, {"seed": 1}, "seed was 42, is 1"),
        ({}, {"is_stratified": True}, "is_stratified was False, is True"),
    ],
)
def test_a_state_of_other_data_or_another_order_is_refused(
    data: dict[str, Any], settings: dict[str, Any], words: str
) -> None:
    plain = PairSettings(8, 42)
    state = PairLoader(make_data(), plain, CPU).state()
    other = PairLoader(replace(make_data(), **data), replace(plain, **settings), CPU)
    with pytest.raises(CannotResume) as caught:
        other.seek(state)
    assert caught.value.message == f"the data of this checkpoint is not the data of this run: {words}"


def test_embeddings_that_were_rounded_otherwise_are_told_and_no_reason_to_stop() -> None:
    state = PairLoader(make_data(), PairSettings(8, 42), CPU).state()
    told: list[str] = []
    other = PairLoader(replace(make_data(), fingerprint="other bits"), PairSettings(8, 42), CPU, told.append)
    other.seek(state)
    assert told == [
        "warning: the embeddings were computed anew and differ in some bits; it continues, not bit-exactly"
    ]


def test_pairs_are_counted_as_they_were_given_out() -> None:
    loader = PairLoader(make_data(), PairSettings(32, 42), CPU)  # 70 pairs: 32, 32 and 6
    found = [0]
    for _ in range(8):
        found.append(found[-1] + len(next(loader).windows))
    assert [loader.pairs_until(step) for step in range(9)] == found
    assert found[6] == 140


def test_the_place_is_told_in_epochs_and_batches_from_one() -> None:
    loader = PairLoader(make_data(), PairSettings(32, 42, epochs=5), CPU)  # 70 pairs: 3 batches
    found = [tuple(loader.place().values())]
    for _ in range(4):
        next(loader)
        found.append(tuple(loader.place().values()))
    assert found == [(1, 0, 3, 5), (1, 1, 3, 5), (1, 2, 3, 5), (1, 3, 3, 5), (2, 1, 3, 5)]


def test_after_the_end_no_batch_comes_also_after_a_resume() -> None:
    loader = PairLoader(make_data(), PairSettings(8, 42), CPU)
    next(loader)
    loader.end_here()
    assert list(loader) == []
    other = PairLoader(make_data(), PairSettings(8, 42), CPU)
    other.seek(loader.state())
    assert list(other) == []


def test_features_are_the_same_from_a_map_and_from_the_devices_memory() -> None:
    data = make_data()
    rows = torch.tensor([3, 0, 102, 3])
    mapped, resident = Pairs(data, CPU), Pairs(data, CPU, is_resident=True)
    assert (mapped.is_resident, mapped.num_inputs) == (False, 9)
    one, other = mapped.gather(rows), resident.gather(rows)
    assert torch.equal(one[0], other[0]) and torch.equal(one[1], other[1])
    assert one[0].dtype == torch.float32
    expected = np.concatenate([data.antibody[data.antibody_row[0]], data.antigen[data.antigen_row[0]]])
    assert one[0][1].tolist() == expected.astype(np.float32).tolist()
    assert one[1].tolist() == data.pkd[rows.numpy()].tolist()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_on_a_gpu_embeddings_that_fit_are_kept_there_and_give_the_same_features() -> None:
    data, gpu = make_data(), torch.device("cuda")
    rows = next(PairLoader(data, PairSettings(8, 42), gpu)).rows
    resident, mapped = Pairs(data, gpu), Pairs(data, gpu, is_resident=False)
    assert resident.is_resident and rows.device.type == "cuda"
    for one, other in zip(resident.gather(rows), mapped.gather(rows), strict=True):
        assert one.device.type == other.device.type == "cuda" and torch.equal(one, other)
