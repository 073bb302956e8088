"""Which weights of a network are switched on: a mask over all its matrices with an exact share of zeros.

Owns the masks and every way to change them: swaps, reshuffles, bounds of a layer, drop-and-grow by magnitude and by
gradient (SET, RigL). A change is a list of positions (`Flips`), tried and taken back exactly; it never multiplies
weights that it cannot give back. Choosing among changes is the trainer's (mask_search).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from jackline.errors import CannotResume, UsageError
from jackline.recipes.sparsae.mask_sampling import (
    count_ones,
    draw_where,
    pack,
    random_mask,
    seed_of,
    split_count,
    unpack,
)


@dataclass(frozen=True)
class Bounds:
    """Least and largest share of zeros in one matrix."""

    lowest: float = 0.50
    highest: float = 0.95


@dataclass(frozen=True)
class Flips:
    """Positions to switch off and on in one matrix, flat; and what newly switched-on weights start with."""

    off: Tensor
    on: Tensor
    values: Tensor

    @property
    def count(self) -> int:
        return int(self.off.numel() + self.on.numel())


Change = Mapping[str, Flips]


def maskable(model: nn.Module) -> dict[str, nn.Parameter]:
    """Every weight of two or more dimensions, a shared one once."""
    return {name: weight for name, weight in model.named_parameters() if weight.dim() >= 2}


class Masks:
    """`on[name]` is a bool tensor of the weight's shape. The number of ones over all is fixed."""

    def __init__(
        self, weights: Mapping[str, nn.Parameter], sparsity: float, *, seed: int, bounds: Bounds | None = None
    ) -> None:
        if not 0 <= sparsity < 1:
            raise UsageError(f"sparsity={sparsity} is not at least 0 and under 1")
        self.weights = dict(weights)
        self.bounds = bounds or Bounds()
        self.sizes = {name: weight.numel() for name, weight in self.weights.items()}
        self.num_active = round((1 - sparsity) * sum(self.sizes.values()))
        self.seed = seed
        self.on: dict[str, Tensor] = {}
        counts = self._within_bounds(self._split(self.sizes, self.num_active, seed_of(seed, 0)))
        for number, (name, weight) in enumerate(self.weights.items()):
            flat = random_mask(self.sizes[name], counts[name], seed_of(seed, 1, number), weight.device)
            self.on[name] = flat.view(weight.shape)

    # -- what it is ----------------------------------------------------------------------------------------------

    def counts(self) -> dict[str, int]:
        return {name: count_ones(mask) for name, mask in self.on.items()}

    def sparsity(self) -> float:
        return 1 - sum(self.counts().values()) / sum(self.sizes.values())

    def layer_sparsity(self) -> dict[str, float]:
        return {name: 1 - count / self.sizes[name] for name, count in self.counts().items()}

    @torch.no_grad()
    def zero(self, tensors: Mapping[str, Tensor]) -> None:
        """Zeros in `tensors` (weights, gradients, moments, masters) wherever the mask is off."""
        for name, tensor in tensors.items():
            # Not masked_fill_(~on): on a GPU its code and that of ~ take 90 MB of the host's memory, for this alone.
            torch.where(self.on[name], tensor, tensor.new_zeros(()), out=tensor)

    # -- changes -------------------------------------------------------------------------------------------------

    def swap(self, share: float, seed: int) -> dict[str, Flips]:
        """`share` of the active positions off, as many inactive ones on, drawn over all matrices at once; layers
        are then brought back within their bounds. The number of ones does not change."""
        counts = self.counts()
        wanted = max(1, round(share * self.num_active))
        off = self._split(counts, wanted, seed_of(seed, 2))
        idle = {name: self.sizes[name] - counts[name] for name in counts}
        on = self._split(idle, wanted, seed_of(seed, 3))
        after = self._within_bounds({name: counts[name] - off[name] + on[name] for name in counts})
        for name in counts:  # more of the smaller one would swap for nothing
            surplus = after[name] - (counts[name] - off[name] + on[name])
            on[name] += max(0, surplus)
            off[name] += max(0, -surplus)
        return {
            name: self._draw(name, off[name], on[name], seed_of(seed, 4, index)) for index, name in enumerate(counts)
        }

    def reshuffle(self, seed: int) -> dict[str, Flips]:
        """A new random mask with as many ones, as the flips that lead there."""
        counts = self._within_bounds(self._split(self.sizes, self.num_active, seed_of(seed, 5)))
        found = {}
        for number, (name, mask) in enumerate(self.on.items()):
            flat = mask.flatten()
            fresh = random_mask(self.sizes[name], counts[name], seed_of(seed, 6, number), mask.device)
            on = torch.nonzero(fresh & ~flat).flatten()
            generator = torch.Generator(mask.device).manual_seed(seed_of(seed, 7, number))
            found[name] = Flips(torch.nonzero(flat & ~fresh).flatten(), on, self._fresh_values(name, on, generator))
        return found

    @torch.no_grad()
    def drop_and_grow(
        self, share: float, seed: int, gradients: Mapping[str, Tensor] | None = None
    ) -> dict[str, Flips]:
        """SET: the smallest `share` of each matrix's active weights off, as many at random on. With `gradients`
        RigL: on where the gradient is largest. New ones start at zero, as in both papers."""
        found = {}
        for number, (name, weight) in enumerate(self.weights.items()):
            flat = self.on[name].flatten()
            active = count_ones(flat)
            count = min(round(share * active), self.sizes[name] - active)
            size = weight.detach().flatten().abs().float().masked_fill(~flat, math.inf)
            off = torch.topk(size, count, largest=False, sorted=False).indices
            if gradients is None:
                generator = torch.Generator(flat.device).manual_seed(seed_of(seed, 8, number))
                on = draw_where(flat, False, count, generator)
            else:
                gradient = gradients[name].flatten().abs().float().masked_fill(flat, -1.0)
                on = torch.topk(gradient, count, sorted=False).indices
            found[name] = Flips(off, on, torch.zeros(count, dtype=weight.dtype, device=weight.device))
        return found

    @torch.no_grad()
    def take(self, change: Change, tensors: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Make the change: in the masks, and in `tensors` by kind: "weights" and their "master" get new values, every
        other kind (moments) zeros; what is switched off becomes zero in all."""
        for name, flips in change.items():
            mask = self.on[name].view(-1)
            mask[flips.off], mask[flips.on] = False, True
            for kind, of_name in tensors.items():
                flat = of_name[name].view(-1)
                flat[flips.off] = 0
                flat[flips.on] = flips.values.to(flat.dtype) if kind in ("weights", "master") else 0

    @contextmanager
    def tried(self, change: Change) -> Iterator[None]:
        """The network as it would be, inside the block; afterwards every bit is as before, whatever happened."""
        kept = []
        with torch.no_grad():
            for name, flips in change.items():
                flat = self.weights[name].view(-1)
                kept.append((flat, flips, flat[flips.off].clone(), flat[flips.on].clone()))
                flat[flips.off] = 0
                flat[flips.on] = flips.values.to(flat.dtype)
        try:
            yield
        finally:
            with torch.no_grad():
                for flat, flips, off, on in kept:
                    flat[flips.off], flat[flips.on] = off, on

    # -- checkpoints ---------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {"num_active": self.num_active, "on": {name: pack(mask) for name, mask in self.on.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if set(state["on"]) != set(self.on):
            raise CannotResume("the masks of this checkpoint belong to another model")
        for name, mask in self.on.items():
            mask.copy_(unpack(state["on"][name], mask.shape))
        self.num_active = int(state["num_active"])

    # -- inside --------------------------------------------------------------------------------------------------

    def _split(self, populations: Mapping[str, int], count: int, seed: int) -> dict[str, int]:
        return dict(zip(populations, split_count(list(populations.values()), count, seed), strict=True))

    def _draw(self, name: str, off: int, on: int, seed: int) -> Flips:
        flat = self.on[name].flatten()
        generator = torch.Generator(flat.device).manual_seed(seed)
        positions = draw_where(flat, False, on, generator)
        return Flips(
            draw_where(flat, True, off, generator), positions, self._fresh_values(name, positions, generator)
        )

    def _fresh_values(self, name: str, positions: Tensor, generator: torch.Generator) -> Tensor:
        """He's: a new weight at zero could only ever make a candidate a pruned version of what there is."""
        weight = self.weights[name]
        std = math.sqrt(2 / weight.shape[1:].numel())
        drawn = torch.randn(positions.numel(), generator=generator, device=weight.device)
        return (drawn * std).to(weight.dtype)

    def _within_bounds(self, counts: Mapping[str, int]) -> dict[str, int]:
        """Clamped to each layer's bounds; what that adds or takes is spread over the layers that have room, so that
        the sum stays exact. Bounds that the sum itself breaks do not hold."""
        total = sum(self.sizes.values())
        overall = 1 - self.num_active / total
        if not self.bounds.lowest <= overall <= self.bounds.highest:
            return dict(counts)
        least = {name: math.ceil((1 - self.bounds.highest) * size) for name, size in self.sizes.items()}
        most = {name: math.floor((1 - self.bounds.lowest) * size) for name, size in self.sizes.items()}
        found = {name: min(max(count, least[name]), most[name]) for name, count in counts.items()}
        missing = sum(counts.values()) - sum(found.values())
        edge, sign = (most, 1) if missing > 0 else (least, -1)
        for name in sorted(found, key=lambda one: -abs(edge[one] - found[one])):
            step = min(abs(missing), sign * (edge[name] - found[name]))
            found[name] += sign * step
            missing -= sign * step
        return found if missing == 0 else dict(counts)
