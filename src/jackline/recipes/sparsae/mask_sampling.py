"""Drawing positions at random, exactly so many, without ever listing all of them.

A Python loop over the elements of one embedding needs 16 GB of objects; these draws need memory for what is drawn.
Owns the draws: how many of each tensor (hypergeometric, so that the whole is a uniform choice), and which. All chance
comes from a seed, so a draw can be repeated instead of being stored.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

CHUNK = 2**22  # positions shuffled at a time: 32 MB
_DENSE_SHARE = 0.25  # drawing more than this of what there is: list it and shuffle


def split_count(populations: Sequence[int], count: int, seed: int) -> list[int]:
    """How many of `count` positions, chosen uniformly among all, fall into each population."""
    if count > sum(populations):
        raise ValueError(f"{count} of {sum(populations)} positions cannot be drawn")
    dice = np.random.default_rng(seed)
    drawn = dice.multivariate_hypergeometric(list(populations), count, method="marginals")
    return [int(number) for number in drawn]


def random_mask(size: int, count: int, seed: int, device: torch.device) -> Tensor:
    """A flat mask with exactly `count` ones, every such mask equally likely."""
    mask = torch.zeros(size, dtype=torch.bool, device=device)
    begins = list(range(0, size, CHUNK))
    lengths = [min(CHUNK, size - begin) for begin in begins]
    generator = torch.Generator(device).manual_seed(seed)
    for begin, length, ones in zip(begins, lengths, split_count(lengths, count, seed), strict=True):
        if ones:
            order = torch.randperm(length, generator=generator, device=device)
            mask[begin : begin + length][order[:ones]] = True
    return mask


def draw_where(mask: Tensor, is_on: bool, count: int, generator: torch.Generator) -> Tensor:
    """`count` different positions where the flat `mask` is `is_on`, uniformly; O(count) unless that is many."""
    if not count:
        return torch.empty(0, dtype=torch.int64, device=mask.device)
    ones = count_ones(mask)
    population = ones if is_on else mask.numel() - ones
    if count > population:
        raise ValueError(f"{count} of {population} positions cannot be drawn")
    if count > _DENSE_SHARE * population:
        places = torch.nonzero(mask if is_on else ~mask).flatten()
        order = torch.randperm(population, generator=generator, device=mask.device)
        return places[order[:count]]
    found = torch.empty(0, dtype=torch.int64, device=mask.device)
    for tries in _tries(count, population / mask.numel()):
        drawn = torch.randint(mask.numel(), (tries,), generator=generator, device=mask.device)
        found = _different(torch.cat([found, drawn[mask[drawn] == is_on]]))
        if found.numel() >= count:
            break
    return found[:count]


def count_ones(mask: Tensor) -> int:
    """Not by sum(), which makes eight bytes of every position first."""
    return int(torch.count_nonzero(mask))


def seed_of(*numbers: int) -> int:
    """One seed out of several numbers, 63 bits; alike on every machine."""
    words = np.random.SeedSequence([number % 2**64 for number in numbers]).generate_state(1, np.uint64)
    return int(words[0]) >> 1


def _tries(count: int, share: float) -> Iterator[int]:
    """Enough for `count` hits and their doubles, most times; then as many again."""
    tries = math.ceil(1.5 * count / share) + 64
    while True:
        yield tries


def _different(drawn: Tensor) -> Tensor:
    """Each position once, in the order in which it came first: cutting that list is as good as drawing fewer."""
    values, order = torch.sort(drawn, stable=True)
    is_first = torch.ones_like(values, dtype=torch.bool)
    torch.ne(values[1:], values[:-1], out=is_first[1:])
    return drawn[torch.sort(order[is_first]).values]


def pack(mask: Tensor) -> Tensor:
    """Eight positions to a byte, on the CPU: what a checkpoint holds. In parts, because a byte for every position of
    a large matrix, taken and given back at each save, is memory that the C library keeps."""
    flat = mask.flatten()
    parts = [np.packbits(flat[begin : begin + CHUNK].cpu().numpy()) for begin in range(0, flat.numel(), CHUNK)]
    return torch.from_numpy(np.concatenate(parts) if parts else np.empty(0, np.uint8))


def unpack(packed: Tensor, shape: Sequence[int]) -> Tensor:
    size = math.prod(shape)
    if packed.numel() != (size + 7) // 8:
        raise ValueError(f"a mask of {size} positions has {(size + 7) // 8} bytes, not {packed.numel()}")
    return torch.from_numpy(np.unpackbits(packed.cpu().numpy(), count=size)).bool().view(*shape)
