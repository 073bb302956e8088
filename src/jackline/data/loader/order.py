"""The order in which windows are seen: a keyed permutation of range(n), index by index, in O(1) memory.

A Feistel network on Z_a x Z_b with a and b near sqrt(n) (mixed radix), so the domain exceeds n by less than one part
in sqrt(n) whatever n is; the few indices that land outside are permuted again (cycle walking). An order stored in a
list or drawn from an RNG would have to be kept or replayed; this one is seekable. The numbers are part of the format:
the same seed must give the same order forever, so nothing here uses a library's RNG.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.uint64]

BLOCK = 1 << 16
_STEP = 1 << 14  # 128 KiB per array: the four arrays of a round stay in the L2 cache
_MASK = (1 << 64) - 1
_MULTIPLY_A = np.array(0x9E3779B97F4A7C15, np.uint64)
_MULTIPLY_B = np.array(0xD6E8FEB86659FD93, np.uint64)
_HALF = np.array(32, np.uint64)


def mix(*words: int) -> int:
    """Splitmix64 over several words: the key of (seed, epoch, era)."""
    state = 0
    for word in words:
        state = (state ^ (word & _MASK)) + 0x9E3779B97F4A7C15 & _MASK
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & _MASK
        state = (state ^ state >> 27) * 0x94D049BB133111EB & _MASK
        state ^= state >> 31
    return state


class Permutation:
    """A bijection of range(n). 17 ns an index in blocks of 65,536; a scalar call costs 70 us, so ask for blocks."""

    def __init__(self, n: int, key: int) -> None:
        if not 0 < n < 1 << 62:
            raise ValueError(f"cannot permute {n} things")
        self.n = n
        left = math.isqrt(n - 1) + 1
        self._left = np.array(left, np.uint64)
        self._right = np.array(-(-n // left), np.uint64)
        # Small domains need more rounds to look uniform (measured for n = 2 to 64); there they cost next to nothing.
        rounds = 12 if n < 1 << 12 else 6 if n < 1 << 20 else 4
        self._keys = [np.array(mix(key, number), np.uint64) for number in range(rounds)]

    def take(self, start: int, count: int) -> Indices:
        """The values at places start .. start + count - 1 of the order."""
        if not 0 <= start <= start + count <= self.n:
            raise IndexError(f"places {start} to {start + count} of an order of {self.n}")
        return self.apply(np.arange(start, start + count, dtype=np.uint64))

    def apply(self, places: Indices) -> Indices:
        out = np.empty_like(places)
        # One allocation for all rounds: new arrays of this size would be mapped and page-faulted in each time.
        buffers = np.empty((4, min(_STEP, len(places))), np.uint64)
        for at in range(0, len(places), _STEP):
            self._walk(places[at : at + _STEP], out[at : at + _STEP], buffers)
        outside = np.flatnonzero(out >= self.n)
        while outside.size:
            walked = np.empty(outside.size, np.uint64)
            for at in range(0, outside.size, _STEP):
                self._walk(out[outside[at : at + _STEP]], walked[at : at + _STEP], buffers)
            out[outside] = walked
            outside = outside[walked >= self.n]
        return out

    def _walk(self, places: Indices, out: Indices, buffers: NDArray[np.uint64]) -> None:
        left, right, scratch, other = buffers[:, : len(places)]
        np.floor_divide(places, self._right, out=left)
        np.multiply(left, self._right, out=scratch)
        np.subtract(places, scratch, out=right)
        for number, key in enumerate(self._keys):
            if number % 2 == 0:
                source, target, modulus = right, left, self._left
            else:
                source, target, modulus = left, right, self._right
            np.add(source, key, out=scratch)
            np.multiply(scratch, _MULTIPLY_A, out=scratch)
            np.right_shift(scratch, _HALF, out=other)
            np.bitwise_xor(scratch, other, out=scratch)
            np.multiply(scratch, _MULTIPLY_B, out=scratch)
            # The upper half of the product, scaled to the modulus: no division in the loop.
            np.right_shift(scratch, _HALF, out=scratch)
            np.multiply(scratch, modulus, out=scratch)
            np.right_shift(scratch, _HALF, out=scratch)
            np.add(target, scratch, out=target)
            # One conditional subtraction: below the modulus the difference wraps to something huge.
            np.subtract(target, modulus, out=scratch)
            np.minimum(target, scratch, out=target)
        np.multiply(left, self._right, out=scratch)
        np.add(scratch, right, out=out)


class Blocks:
    """A permutation read in order, one block of it in memory (0.5 MB)."""

    def __init__(self, permutation: Permutation) -> None:
        self._permutation = permutation
        self._first = 0
        self._block: Indices = np.empty(0, np.uint64)

    def take(self, start: int, count: int) -> Indices:
        if not self._first <= start <= start + count <= self._first + len(self._block):
            first = start // BLOCK * BLOCK
            span = max(BLOCK, start + count - first)
            self._block = self._permutation.take(first, min(span, self._permutation.n - first))
            self._first = first
        return self._block[start - self._first : start - self._first + count]
