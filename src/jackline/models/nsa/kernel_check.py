"""Whether the kernels may be used: they must give the same results as plain torch, on this GPU, for this shape.

Nothing is raised: the objection is returned as a sentence, and the plain torch implementation is used instead.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from jackline import accelerator
from jackline.models.nsa import reference
from jackline.models.nsa.reference import Branches, Memory
from jackline.models.nsa.shape import NSAShape

_LIMIT = 0.03  # bf16 has 8 bits of precision; a wrong kernel is off by far more
_SAME_CHOICE = 0.97  # the remaining differences come from scores that rounding made equal


def why_no_kernels(shape: NSAShape, device: torch.device, dtype: torch.dtype) -> str:
    """Why the kernels cannot be used. Empty when they can: they were run and gave the right output, gradients and
    choice of blocks."""
    if not accelerator.is_gpu(device) or dtype not in (torch.bfloat16, torch.float32):
        return "they need bf16 or float32 on a GPU"
    widths = {"head_width": shape.head_width, "block_length": shape.block_length}
    for name, width in widths.items():
        if width not in (16, 32, 64, 128):
            return f"their tiles are made for a {name} of 16, 32, 64 or 128, not {width}"
    try:
        off, same = compare(shape, device, dtype)
    except Exception as problem:  # no Triton, no compiler, an unknown GPU
        words = str(problem).strip().splitlines()
        return f"{type(problem).__name__}: {words[0][:100] if words else ''}"
    if not off <= _LIMIT:
        return f"they are off by {off:.1%} from plain torch"
    return "" if same >= _SAME_CHOICE else f"they choose the same block in {same:.1%} of all cases only"


def compare(shape: NSAShape, device: torch.device, dtype: torch.dtype) -> tuple[float, float]:
    """Compare the kernels with plain torch on a sequence where some blocks must be left out. Returns the largest
    relative difference of outputs and gradients, and the share of blocks that both chose."""
    from jackline.models.nsa import fast

    small = replace(shape, num_blocks=shape.num_local + 2, window=min(shape.window, 3 * shape.block_length))
    length = small.reads_everything_up_to + 3 * shape.block_length
    rng_state = torch.Generator(device).manual_seed(1)

    def draw(*sizes: int) -> Tensor:
        drawn = torch.randn(*sizes, generator=rng_state, device=device, dtype=torch.float32)
        return drawn.to(dtype).requires_grad_()

    query = draw(1, length, shape.num_heads, shape.head_width)
    parts = draw(6, 1, length, shape.num_groups, shape.head_width)
    gradients = draw(3, *query.shape).detach()
    with torch.enable_grad():
        found = fast.attend(query, Memory(*parts), small)
        expected = reference.attend(query, Memory(*parts), small, found.selection)
        pairs = [*zip(found[:3], expected[:3], strict=True)]
        sums = [_sum_of(branches, gradients) for branches in (found, expected)]
        pairs += zip(*(torch.autograd.grad(total, [query, parts]) for total in sums), strict=True)
        chosen = reference.attend(query, Memory(*parts), small).selection
    is_same = found.selection.sort(dim=-1).values == chosen.sort(dim=-1).values
    # Not Python's max(): it would ignore a NaN.
    off = torch.stack([(left.float() - right.float()).norm() / right.float().norm() for left, right in pairs])
    return float(off.detach().max()), float(is_same.float().mean())


def _sum_of(branches: Branches, gradients: Tensor) -> Tensor:
    outputs = torch.stack([branches.compressed, branches.selected, branches.window])
    return (outputs.float() * gradients.float()).sum()
