"""One mask update: the better candidate wins, nothing else changes, and a resumed search continues alike."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from jackline.recipes.sparsae.mask_search import (
    MaskSearch,
    SearchSettings,
    Spread,
    Stagnation,
    drop_share_at,
    fade,
)
from jackline.recipes.sparsae.masks import Masks, maskable


class World:
    """A linear teacher of which only some inputs matter, and a sparse student."""

    def __init__(self, method: Any = "es", **settings: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(40, 30, bias=False), nn.Tanh(), nn.Linear(30, 10))
        self.weights = maskable(self.model)
        self.inputs = torch.randn(64, 40)
        self.wanted = torch.randn(64, 10)
        masks = Masks(self.weights, 0.8, seed=1)
        masks.zero(dict(self.weights))
        self.moments = {name: torch.ones_like(weight) for name, weight in self.weights.items()}
        self.search = MaskSearch(masks, SearchSettings(method=method, **settings), seed=7, planned=10)
        self.seen: list[float] = []

    def evaluate(self, update: int) -> float:
        self.model.zero_grad(set_to_none=True)
        loss = nn.functional.mse_loss(self.model(self.inputs), self.wanted)
        loss.backward()
        self.seen.append(loss.item())
        return self.seen[-1]

    def gradients(self) -> dict[str, Tensor]:
        return {name: weight.grad for name, weight in self.weights.items() if weight.grad is not None}

    def update(self) -> tuple[Any, Any]:
        return self.search.update(self.evaluate, self.gradients, {"weights": self.weights, "exp_avg": self.moments})

    def bits(self) -> bytes:
        return b"".join(weight.detach().numpy().tobytes() for weight in self.model.parameters())


def test_the_candidate_with_the_lowest_loss_is_taken_and_is_what_was_tried() -> None:
    world = World(weight_diversity=0.0, weight_activity=0.0, swap_share=0.2)
    records, _ = world.update()
    assert [record.kind for record in records] == ["current", "swap", "swap", "swap"]
    losses = [record.ce for record in records]
    taken = [record for record in records if record.is_taken]
    assert len(taken) == 1 and taken[0].ce == min(losses)
    assert world.evaluate(0) == taken[0].ce  # the network is now exactly the one that was judged
    assert sum(world.search.masks.counts().values()) == world.search.masks.num_active


def test_a_rejected_candidate_leaves_no_trace_even_a_full_reshuffle() -> None:
    world = World(reset_probability=1.0, weight_diversity=0.0, weight_activity=0.0)
    for weight in world.weights.values():  # a good network, which every reshuffle makes worse
        weight.data.mul_(0.01)
    world.wanted.mul_(0.01)
    before = world.bits()
    records, change = world.update()
    assert [record.kind for record in records] == ["current", "reset", "reset", "reset"]
    assert records[0].is_taken and not change
    assert world.bits() == before


def test_a_candidate_with_a_loss_that_is_no_number_never_wins() -> None:
    world = World()
    plain = world.evaluate

    def evaluate(update: int) -> float:
        value = plain(update)
        return math.nan if len(world.seen) > 1 else value

    records, _ = world.search.update(evaluate, world.gradients, {"weights": world.weights})
    assert [record.is_taken for record in records] == [True, False, False, False]
    assert [record.score for record in records[1:]] == [None, None, None]
    json.dumps([asdict(record) for record in records], allow_nan=False)


def test_moments_of_changed_weights_start_anew_and_the_others_stay() -> None:
    world = World(swap_share=0.1, weight_diversity=0.0, weight_activity=0.0)
    _, change = world.update()
    while not change:
        _, change = world.update()
    for name, flips in change.items():
        flat = world.moments[name].flatten()
        assert not flat[flips.off].any() and not flat[flips.on].any()
    assert sum(float(moment.sum()) for moment in world.moments.values()) > 0


@pytest.mark.parametrize("method", ["es", "set", "rigl", "static"])
def test_a_search_that_is_saved_and_loaded_resumes_bit_for_bit(method: str) -> None:
    whole, first, second = World(method), World(method), World(method)
    for _ in range(6):
        whole.update()
    for _ in range(3):
        first.update()
    second.model.load_state_dict(first.model.state_dict())
    for name, moment in first.moments.items():
        second.moments[name].copy_(moment)
    second.search.load_state_dict(json_copy(first.search.state_dict()))
    for _ in range(3):
        second.update()
    assert second.bits() == whole.bits()
    assert second.search.num_updates == 6


def json_copy(state: dict[str, Any]) -> dict[str, Any]:
    """Everything but the tensors through JSON, as a checkpoint does it."""
    masks = state.pop("masks")
    copy: dict[str, Any] = json.loads(json.dumps(state))
    state["masks"] = masks
    return {**copy, "masks": masks}


def test_rigl_and_set_keep_every_layers_count_and_static_changes_nothing() -> None:
    for method in ("set", "rigl"):
        world = World(method)
        before = world.search.masks.counts()
        records, change = world.update()
        assert world.search.masks.counts() == before
        assert records[0].kind == method and records[0].flips == sum(part.count for part in change.values()) > 0
    world = World("static")
    before_bits = world.bits()
    assert world.update() == ([], {}) and world.bits() == before_bits


def test_running_statistics_begin_with_what_is_seen() -> None:
    spread = Spread()
    spread.begin([4.0, 6.0])
    assert (spread.mean, spread.deviation) == (5.0, 1.0)
    assert spread.z(6.0) == pytest.approx(1.0)
    spread.follow(7.0, 0.5)
    assert (spread.mean, spread.deviation) == (6.0, 1.5)


def test_stagnation_fires_within_a_run_of_ten_updates_and_not_while_it_goes_down() -> None:
    falling = Stagnation(patience=3)
    assert not any(falling.see(10.0 - update, 2) for update in range(10))
    flat = Stagnation(patience=3)
    assert [flat.see(5.0, 2) for _ in range(5)] == [False, False, False, True, False]
    assert flat.boosted_left == 2


def test_weights_of_the_score_fade_and_drops_become_fewer() -> None:
    assert [round(fade(update, 10, 0.7), 3) for update in (0, 3, 7, 9)] == [1.0, 0.327, 0.0, 0.0]
    assert [round(drop_share_at(update, 10, 0.3), 3) for update in (0, 5, 10)] == [0.3, 0.15, 0.0]
