"""Steps with a planted fault, redone by `replay`: a flipped bit in one gradient, a bad batch, or nothing.

    python -m tests.memory.replay_cases --cases 200 --healthy 1000 --seed 7

Each case is a small training of one of five models; the plant, its step and its place follow from the seed. Exits 1
when a verdict is wrong. The suite runs a part of it (test_replay.py).
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from jackline.memory.guard.replay import Replay, Replayed
from jackline.memory.guard.safe_step import SafeStep

STEPS, PLANTED_FROM = 40, 24
WIDTH, SAMPLES = 8, 8


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells, self.head = nn.GRU(WIDTH, WIDTH, batch_first=True), nn.Linear(WIDTH, 1)

    def forward(self, given: Tensor) -> Tensor:
        out: Tensor = self.head(self.cells(given[:, None].expand(-1, 3, -1))[0][:, -1])
        return out


def attention() -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.1, batch_first=True)
    return nn.Sequential(nn.Unflatten(1, (1, WIDTH)), layer, nn.Flatten(), nn.Linear(WIDTH, 1))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "plain": lambda: nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, 1)),
    "dropout": lambda: nn.Sequential(nn.Linear(WIDTH, 16), nn.Dropout(0.2), nn.ReLU(), nn.Linear(16, 1)),
    "norms": lambda: nn.Sequential(nn.Linear(WIDTH, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1)),
    "recurrent": Recurrent,
    "attention": attention,
}
BAD = ("huge", "nan", "inf")


@dataclass
class Came:
    """What one training was told, and how its weights ended."""

    told: list[Replayed] = field(default_factory=list)
    num_agreed: int = 0
    planted_at: int = -1
    weights: tuple[Tensor, ...] = ()


class Flip:
    """Flips one bit of one gradient, once: when step `at` is computed for the first time, after its last slice (a sum
    with further slices may round it away)."""

    def __init__(self, weight: Tensor, at: int, rng: random.Random, bits: tuple[int, int]) -> None:
        self.step, self._at, self.has_flipped, self.num_slices = 0, at, False, 1
        self._num_seen = 0
        self._place, self._bit = rng.randrange(weight.numel()), rng.randrange(*bits)
        weight.register_post_accumulate_grad_hook(self._flip)

    def _flip(self, weight: Tensor) -> None:
        if self.has_flipped or self.step != self._at:
            return
        self._num_seen += 1
        if self._num_seen < self.num_slices:
            return
        self.has_flipped = True
        assert weight.grad is not None
        bits = weight.grad.view(-1).view(torch.int32)
        bits[self._place] ^= -(1 << 31) if self._bit == 31 else 1 << self._bit


def train(seed: int, plant: str, *, every: int = 1, steps: int = STEPS, is_on: bool = True) -> Came:
    """`plant`: '', 'flip' (any bit), 'exponent' (a high bit), or one of BAD."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    name = sorted(MODELS)[seed % len(MODELS)]
    model, came = MODELS[name](), Came()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    safe = SafeStep(model, micro_batch=SAMPLES if name == "norms" else rng.choice((3, SAMPLES)))
    safe.replay = Replay(every, came.told.append) if is_on else None
    at = rng.randrange(PLANTED_FROM, steps) if plant else -1
    came.planted_at = at
    flip = None
    if plant in ("flip", "exponent"):
        weight = rng.choice([one for one in model.parameters() if one.numel() > 1])
        flip = Flip(weight, at, rng, (0, 32) if plant == "flip" else (29, 31))
        flip.num_slices = -(-SAMPLES // int(safe.micro_batch or SAMPLES))

    def loss(part: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
        given, wanted = part
        return (model(given) - wanted).square().sum(), len(given)

    for step in range(steps):
        given = torch.randn(SAMPLES, WIDTH)
        batch = spoil((given, given.sum(1, keepdim=True) * 0.3), plant if step == at else "")
        if flip is not None:
            flip.step = step
        safe.step = step
        optimizer.zero_grad()
        safe(loss, batch)
        optimizer.step()
    assert flip is None or flip.has_flipped
    came.num_agreed = safe.replay.num_agreed if safe.replay is not None else 0
    came.weights = tuple(weight.detach().clone() for weight in model.parameters())
    return came


def spoil(batch: tuple[Tensor, Tensor], plant: str) -> tuple[Tensor, Tensor]:
    given, wanted = batch
    if plant == "huge":
        return given, wanted + 1e4
    if plant in ("nan", "inf"):
        wanted[0] = float(plant)
    return given, wanted


def wrong(seed: int, plant: str, came: Came) -> str:
    """What is wrong with the verdict on the planted step, '' when nothing is."""
    before = [one for one in came.told if one.step < came.planted_at or not plant]
    if before:
        return f"seed {seed} {plant}: a healthy step was accused: {before[0].text}"
    at = [one for one in came.told if one.step == came.planted_at]
    expected = {"flip": "hardware or race", "": None}.get(plant, "data or mathematics")
    if plant and (not at or at[0].verdict != expected):
        return f"seed {seed} {plant} at step {came.planted_at}: {at[0].text if at else 'nothing was told'}"
    return ""


def wrong_late(seed: int, came: Came) -> str:
    """A flip that no replay met must never be blamed on the data of a later batch."""
    blamed = [one for one in came.told if one.verdict == "data or mathematics"]
    return f"seed {seed} exponent at step {came.planted_at}: {blamed[0].text}" if blamed else ""


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--healthy", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args(words)
    torch.set_num_threads(1)
    counts: Counter[str] = Counter()
    faults: list[str] = []
    for number in range(asked.cases):
        seed = asked.seed * 1_000_003 + number
        bad = BAD[number % len(BAD)]
        for plant in ("flip", bad):
            faults.append(wrong(seed, plant, train(seed, plant)))
            counts[plant if plant == "flip" else "bad batch"] += 1
        faults.append(wrong_late(seed, train(seed, "exponent", every=1000)))
        counts["flip in a step that is not redone"] += 1
    seed = asked.seed * 1_000_003
    while counts["healthy steps redone"] < asked.healthy:
        came = train(seed, "", steps=100)
        faults.append(wrong(seed, "", came))
        counts["healthy steps redone"] += came.num_agreed
        seed += 1
    found: list[Any] = [fault for fault in faults if fault]
    print("; ".join(f"{name}: {count:,}" for name, count in counts.items()), f"; wrong: {len(found)}", sep="")
    for fault in found[:20]:
        print(f"  {fault}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
