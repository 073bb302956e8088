"""How the tokens are divided into eras, and windows inside them: arithmetic only.

An era is one file of the cache and one unit of shuffling. Its size depends on its index alone: the first is small so
that training starts at once, and each following era doubles the total before it until eras have their full size.
Windows never straddle eras, so a position in the order is turned into a place by arithmetic, whatever the tokeniser
has done so far.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from jackline.errors import UsageError


@dataclass(frozen=True)
class EraPlan:
    """Sizes in tokens. `unit_tokens` is the row length when rows are stored (an era never cuts a row), else 1."""

    first_tokens: int = 1 << 20
    full_tokens: int = 1 << 26
    unit_tokens: int = 1

    def __post_init__(self) -> None:
        if not 0 < self.unit_tokens <= self.first_tokens <= self.full_tokens:
            raise UsageError(
                f"eras of {self.first_tokens} to {self.full_tokens} tokens do not hold rows of {self.unit_tokens}",
                hint="first_era_tokens must be at least one row and at most era_tokens",
            )

    @cached_property
    def _growing(self) -> tuple[int, ...]:
        """Sizes before every era is full: F, F, 2F, 4F ..., so that starts are powers of two of F."""
        sizes, size = [self.first_tokens], self.first_tokens
        while size < self.full_tokens:
            sizes.append(size)
            size *= 2
        return tuple(size // self.unit_tokens * self.unit_tokens for size in sizes)

    @property
    def growing_sizes(self) -> tuple[int, ...]:
        return self._growing

    @property
    def full_size(self) -> int:
        return self.full_tokens // self.unit_tokens * self.unit_tokens

    def size(self, era: int) -> int:
        return self._growing[era] if era < len(self._growing) else self.full_size

    def start(self, era: int) -> int:
        num_growing = len(self._growing)
        return sum(self._growing[:era]) + max(0, era - num_growing) * self.full_size


@dataclass(frozen=True)
class WindowShape:
    """Windows of `tokens` tokens, the next one starting `stride` tokens after the one before."""

    tokens: int
    stride: int

    def __post_init__(self) -> None:
        if self.tokens < 2 or self.stride < 1:
            raise UsageError(f"a window of {self.tokens} tokens every {self.stride} tokens cannot be read")

    def count_in(self, era_tokens: int) -> int:
        return 0 if era_tokens < self.tokens else (era_tokens - self.tokens) // self.stride + 1


@dataclass(frozen=True)
class Place:
    """The place of a position in the order: its era, and the index of the window in that era's shuffled order."""

    era: int
    index: int


def locate(position: int, plan: EraPlan, shape: WindowShape) -> Place:
    """The place of a position if every era were full; O(1) except for the handful of growing eras."""
    rest = position
    for era, size in enumerate(plan.growing_sizes):
        count = shape.count_in(size)
        if rest < count:
            return Place(era, rest)
        rest -= count
    per_era = shape.count_in(plan.full_size)
    if per_era == 0:
        raise UsageError(
            f"a window of {shape.tokens} tokens is longer than an era of {plan.full_size} tokens",
            hint="raise era_tokens or shorten the window",
        )
    return Place(len(plan.growing_sizes) + rest // per_era, rest % per_era)


def windows_before(era: int, plan: EraPlan, shape: WindowShape) -> int:
    """How many positions come before the first one of `era`, if every earlier era is full."""
    growing = plan.growing_sizes
    total = sum(shape.count_in(size) for size in growing[:era])
    return total + max(0, era - len(growing)) * shape.count_in(plan.full_size)
