"""How low the loss of honest predictions can possibly be on this data.

Owns that one number and its argument. The loss on tokens a model has not been trained on is the length of a lossless
code for them (nats a token), so it cannot go below what the data can be packed to. Nobody knows that limit, but:

- A general packer (xz) on a sample is an upper end of it. The best language models pack fresh prose about 4 times
  better than xz, and source code about 7 times (0.2 bits a byte against 1.5). Nothing known does 10 times. So
  floor = xz / 10: loose enough never to accuse an honest model, while a target that leaks falls through it soon,
  because copying costs nothing at all. It depends on no language and no tokenizer, and data that really is trivial
  (a file of zeros) has a floor of nearly 0.
- Where xz saves nothing at all against a fixed-width code of the vocabulary, the tokens are noise as far as anything
  here can learn: then the floor is the noise itself, ln(V), less a little for tokens that are used unevenly.
  A run in our seeds showed a loss of 1.04 on random bytes, whose floor is 5.545.

It holds for data that is seen for the first time, and for validation data always.
"""

from __future__ import annotations

import lzma
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

BETTER_THAN_XZ = 10.0
_NOISE_SHARE = 0.97  # of ln V: what xz needs for noise is over it, for the least regular text far below
_NOISE_FLOOR_SHARE = 0.95  # the little that could be learnt: tokens used a bit unevenly
_MIN_TOKENS = 4096  # fewer are mostly xz's own header
_MAX_TOKENS = 1 << 18  # half a second


@dataclass(frozen=True)
class Floor:
    """No honest mean loss is below `nats`."""

    nats: float
    why: str
    is_noise: bool = False


def entropy_floor(tokens: ArrayLike, vocab_size: int) -> Floor | None:
    """From a sample of the data, best a few of its windows; None when it is too small to say anything. 0.1-0.5 s."""
    ids = np.asarray(tokens).reshape(-1)[:_MAX_TOKENS]
    if ids.size < _MIN_TOKENS or vocab_size < 2:
        return None
    packed_nats = _xz_nats(ids)
    # Noise over a part of the vocabulary is noise all the same, and padding tokens are never seen.
    spread_nats = _order0_nats(ids)
    ceiling = math.log(vocab_size)
    # The empirical entropy of few samples over many symbols is too low by about (V - 1) / 2n.
    spread_nats = min(ceiling, spread_nats + (min(vocab_size, ids.size) - 1) / (2 * ids.size))
    if packed_nats >= _NOISE_SHARE * ceiling and spread_nats >= _NOISE_SHARE * ceiling:
        nats = _NOISE_FLOOR_SHARE * ceiling
        return Floor(nats, f"these tokens are noise, ln({vocab_size:,}) = {ceiling:.2f} nats each", is_noise=True)
    why = f"xz packs this data to {packed_nats:.2f} nats a token, and no model packs ten times better"
    return Floor(packed_nats / BETTER_THAN_XZ, why)


def _xz_nats(ids: np.ndarray) -> float:
    # Two byte planes pack better than interleaved bytes: the high bytes of neighbouring tokens are alike.
    width = 1 if int(ids.max()) < 1 << 8 else 2 if int(ids.max()) < 1 << 16 else 4
    raw = ids.astype(f"<u{width}").tobytes()
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 6, "lc": 3 if width == 1 else 0, "lp": 0 if width == 1 else 1}]
    size = len(lzma.compress(raw, format=lzma.FORMAT_RAW, filters=filters))
    return size * 8 * math.log(2) / ids.size


def _order0_nats(ids: np.ndarray) -> float:
    counts = np.unique(ids, return_counts=True)[1]
    shares = counts / ids.size
    return float(-(shares * np.log(shares)).sum())
