"""Dense attention in the place of sparse attention, and how long each takes on a device.

The module has the same heads, groups and rotary positions with one branch, in which a token reads every token before
it. It is another model than the sparse one, with weights of its own: neither can take the other's. Owns the module
and the measurement. The trainer chooses between the two.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from jackline import accelerator
from jackline.models.nsa import reference
from jackline.models.nsa.attention import rotary_turns, rotate
from jackline.models.nsa.reference import Memory
from jackline.models.nsa.shape import NSAShape

_TOKENS = 32_768  # in a measured call; a longer sequence is one call
_WARM, _REPEATS = 3, 5


class DenseAttention(nn.Module):
    """(batch, length, width) to the same shape, as `SparseAttention`."""

    def __init__(self, shape: NSAShape) -> None:
        super().__init__()
        self.shape = shape
        heads = shape.num_heads * shape.head_width
        self.query = nn.Linear(shape.width, heads, bias=False)
        self.memory = nn.Linear(shape.width, 2 * shape.num_groups * shape.head_width, bias=False)
        self.projection = nn.Linear(heads, shape.width, bias=False)

    def forward(self, normed: Tensor) -> Tensor:
        batch, length, _ = normed.shape
        groups, width = self.shape.num_groups, self.shape.head_width
        query = self.query(normed).view(batch, length, self.shape.num_heads, width)
        keys, values = self.memory(normed).view(batch, length, 2, groups, width).unbind(dim=2)
        turns = rotary_turns(length, width, self.shape.rotary_base, normed.device)
        mixed = attend_densely(rotate(query, turns), rotate(keys, turns), values)
        output: Tensor = self.projection(mixed.to(normed.dtype).flatten(2))
        return output


def attend_densely(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """(batch, length, heads, width) and the same with groups for heads. The heads of a group are adjacent."""
    each = query.shape[2] // keys.shape[2]
    # Spread by hand: not every kernel of torch takes groups, and one that does not would fall back to a slow one.
    wide = (part.to(query.dtype).repeat_interleave(each, dim=2) for part in (keys, values))
    heads, keys, values = (part.transpose(1, 2) for part in (query, *wide))
    return functional.scaled_dot_product_attention(heads, keys, values, is_causal=True).transpose(1, 2)


class Timing(NamedTuple):
    """Milliseconds of attention in one layer, forward and backward; infinite: it cannot be computed here."""

    sparse_ms: float
    dense_ms: float


def time_both(
    shape: NSAShape, length: int, dtype: torch.dtype, device: torch.device, *, has_kernels: bool = True
) -> Timing:
    """Both on the same numbers. Takes a few seconds on a GPU, most of them for compiling the kernels.

    Without kernels, where they are not used on this device, the sparse branches are computed by plain torch.
    """
    rows = max(1, _TOKENS // length)
    rng_state = torch.Generator(device).manual_seed(1)

    def draw(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=rng_state, device=device).to(dtype).requires_grad_()

    query = draw(rows, length, shape.num_heads, shape.head_width)
    parts = draw(6, rows, length, shape.num_groups, shape.head_width)

    def sparse() -> Tensor:
        if has_kernels:
            from jackline.models.nsa import fast

            found = fast.attend(query, Memory(*parts), shape)
        else:
            found = reference.attend(query, Memory(*parts), shape)
        return found.compressed + found.selected + found.window

    def dense() -> Tensor:
        return attend_densely(query, parts[0], parts[1])

    return Timing(_time_ms(sparse, (query, parts), device), _time_ms(dense, (query, parts), device))


def _time_ms(call: Callable[[], Tensor], inputs: tuple[Tensor, ...], device: torch.device) -> float:
    found: list[float] = []
    try:
        for _ in range(_WARM + _REPEATS):
            _wait(device)
            began_s = time.perf_counter()
            with torch.enable_grad():
                mixed = call()
                torch.autograd.grad(mixed, inputs, torch.ones_like(mixed), allow_unused=True)
            _wait(device)
            found.append(1e3 * (time.perf_counter() - began_s))
    except Exception:  # no room for the square of the sequence, no kernel
        return math.inf
    return statistics.median(found[_WARM:])


def _wait(device: torch.device) -> None:
    if accelerator.is_gpu(device):
        accelerator.synchronize(device)
