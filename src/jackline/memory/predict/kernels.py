"""The scratch memory that CUDA kernels allocate and free themselves: no tracer at the dispatcher can see it.

Owns the rules, each taken from PyTorch's own launch code and checked against the allocator's history on an H200:
sums over many rows (the gradient of every bias) and the gradient of an embedding. Those of attention are in
`attention`. Scratch memory matters more for what is reserved than for what is allocated: a block split for it is no
longer whole for the next allocation.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from jackline.memory.plan.gpus import Processors

_WARP = 32
_MAX_THREADS = 512  # in a thread block that sums
_LEAST_A_THREAD, _MOST_A_THREAD = 16, 256  # values a thread adds up before blocks share the work
_VECTOR = 4
_SORT_FROM = 3072
_ROWS_A_PART = 10


@dataclass(frozen=True)
class Scratch:
    """`rule(processors, *numbers, *how)` gives the bytes. The numbers are linear in the micro-batch, the bytes are
    not; `how` is the same for every micro-batch."""

    rule: Callable[..., int]
    numbers: tuple[int, ...]
    how: tuple[int, ...] = ()

    def num_bytes(self, processors: Processors) -> int:
        return self.rule(processors, *self.numbers, *self.how)

    @property
    def is_chosen(self) -> bool:
        """Whether a library chooses how much it takes, so that the bytes are an estimate."""
        return self.rule is _reordered_bytes


def scratch_of(name: str, args: tuple[Any, ...]) -> list[Scratch]:
    """What the operator allocates beside its result, in order; it is freed in the reverse order. The list has the
    same length for every size (0 bytes where there is nothing), so that traces of two batch sizes have the same
    events."""
    if name in ("sum", "mean") and args[0].layout == torch.strided and args[0].numel():
        return _sum_scratch(args[0], args[1] if len(args) > 1 else None)
    if name == "embedding_dense_backward":
        grad, indices, num_weights = args[:3]
        count, width = indices.numel(), grad.shape[-1]
        indexed = Scratch(_sorted_indices_bytes, (count,))
        return [indexed, indexed, Scratch(_row_parts_bytes, (count,), (num_weights, width))]
    if name in ("convolution", "convolution_backward"):
        return _convolution_scratch(name, args)
    return []


# Convolutions. cuDNN's tensor-core kernels want the channels last; it reorders input and output in a workspace. Which
# kernel it takes is its own choice, so this is an estimate, and a plan prints the range.


def _convolution_scratch(name: str, args: tuple[Any, ...]) -> list[Scratch]:
    if name == "convolution":
        value, groups = args[0], args[8]
        result = args[0].shape[0] * _output_size(args)
    else:
        value, groups = args[1], args[9]
        result = args[0].numel()
    if _is_own_kernel(value, groups) or not value.is_contiguous():
        return []
    return [Scratch(_reordered_bytes, (value.numel(), result), (value.element_size(),))]


def copied_input(name: str, args: tuple[Any, ...]) -> Tensor | None:
    """The input of a convolution with groups, which wants it in one piece, where it is not. cuDNN also takes one with
    the channels last."""
    if name not in ("convolution", "convolution_backward"):
        return None
    value, groups = (args[0], args[8]) if name == "convolution" else (args[1], args[9])
    if groups == 1 or value.is_contiguous():
        return None
    is_last = value.dim() == 4 and value.is_contiguous(memory_format=torch.channels_last)
    return None if is_last and not _is_own_kernel(value, groups) else value


def _is_own_kernel(value: Tensor, groups: int) -> bool:
    """PyTorch's for one filter a channel, instead of cuDNN's."""
    return groups > 1 and value.dtype == torch.float32


def _output_size(args: tuple[Any, ...]) -> int:
    """The numbers in one sample of a convolution's result."""
    value, weight, _, stride, padding, dilation, is_transposed = args[:7]
    if is_transposed:
        return int(value.numel() // value.shape[0])
    dims = value.dim() - 2
    # One number may stand for all dimensions: so comes padding="valid".
    stride, padding, dilation = (one if len(one) == dims else [*one] * dims for one in (stride, padding, dilation))
    sizes = [
        (size + 2 * pad - gap * (kernel - 1) - 1) // step + 1
        for size, kernel, step, pad, gap in zip(
            value.shape[2:], weight.shape[2:], stride, padding, dilation, strict=True
        )
    ]
    return int(weight.shape[0] * math.prod(sizes))


def _reordered_bytes(_: Processors, num_inputs: int, num_outputs: int, element_bytes: int) -> int:
    return (num_inputs + num_outputs) * element_bytes


# The gradient of an embedding: from 3072 indices on they are sorted, and rows of equal index are summed in parts.


def _sorted_indices_bytes(_: Processors, count: int) -> int:
    return 8 * count if count > _SORT_FROM else 0


def _row_parts_bytes(_: Processors, count: int, num_weights: int, width: int) -> int:
    """Room for the largest possible number of parts, not the real one: reading that would wait for the GPU."""
    if count <= _SORT_FROM:
        return 0
    return 4 * (min(count, num_weights) + count // _ROWS_A_PART) * _up(width, _WARP)


# Sums. When few outputs are made of many inputs, thread blocks share an output and combine their parts in memory.


def _sum_scratch(value: Tensor, dims: Any) -> list[Scratch]:
    chosen = range(value.dim()) if dims is None or dims == [] else [dims] if isinstance(dims, int) else dims
    gone = {dim % value.dim() for dim in chosen} if value.dim() else set()
    summed = _joined(value, [dim for dim in range(value.dim()) if dim in gone])
    kept = _joined(value, [dim for dim in range(value.dim()) if dim not in gone])
    num_outputs = 1
    for size, _ in kept:
        num_outputs *= size
    is_along_rows = not kept or (bool(summed) and summed[0][1] < kept[0][1])
    vector = 1
    if not is_along_rows and kept[0][1] == 1:
        vector = _vector_of([kept[0][0], *(stride for _, stride in (*summed, *kept[1:]))])
    elif is_along_rows and len(summed) == 1 and summed[0] >= (128, 1) and summed[0][1] == 1:
        vector = _VECTOR
    numbers = (value.numel() // num_outputs, num_outputs)
    how = (int(is_along_rows), vector, max(4, value.element_size()))
    return [Scratch(_sum_bytes, numbers, how), Scratch(_semaphore_bytes, numbers, how)]


def _joined(value: Tensor, dims: list[int]) -> list[tuple[int, int]]:
    """(size, stride) of the dimensions, the fastest first; dimensions that are contiguous are joined into one."""
    joined: list[tuple[int, int]] = []
    for size, stride in sorted(((value.shape[d], value.stride(d)) for d in dims if value.shape[d] > 1), key=_stride):
        if joined and stride == joined[-1][0] * joined[-1][1]:
            joined[-1] = (joined[-1][0] * size, joined[-1][1])
        else:
            joined.append((size, stride))
    return joined


def _stride(pair: tuple[int, int]) -> int:
    return pair[1]


def _vector_of(numbers: list[int]) -> int:
    vector = _VECTOR
    for number in numbers:
        while number % vector:
            vector //= 2
    return vector


def _sum_bytes(processors: Processors, num_inputs: int, num_outputs: int, *how: int) -> int:
    is_along_rows, vector, element_bytes = how
    width, blocks, _ = _sum_grid(processors, num_inputs, num_outputs, is_along_rows, vector)
    if blocks < 2:
        return 0
    return element_bytes * num_outputs * blocks * (1 if is_along_rows else width * vector)


def _semaphore_bytes(processors: Processors, num_inputs: int, num_outputs: int, *how: int) -> int:
    _, blocks, columns = _sum_grid(processors, num_inputs, num_outputs, how[0], how[1])
    return 4 * columns if blocks > 1 else 0


def _sum_grid(
    processors: Processors, num_inputs: int, num_outputs: int, is_along_rows: int, vector: int
) -> tuple[int, int, int]:
    """(threads side by side, blocks that share an output, groups of outputs), as in PyTorch's launch code."""
    across, along = (num_inputs, num_outputs) if is_along_rows else (num_outputs, num_inputs)
    across //= vector
    out_vector = 1 if is_along_rows else vector
    most = _MAX_THREADS // out_vector
    across, along = min(_power_of_two(across), most), min(_power_of_two(along), most)
    height = min(along, most // min(across, _WARP))
    width = min(across, most // height)
    step_input, step_output = (width, 1) if is_along_rows else (1, width)
    is_shared_in_block = _ceil(num_inputs, step_input) >= min(height * _LEAST_A_THREAD, _MOST_A_THREAD)
    if is_shared_in_block:
        step_input *= height
    else:
        step_output *= height
    columns = _ceil(num_outputs // out_vector, step_output)
    most_blocks = processors.count * (processors.threads_each // (width * height))
    values = _ceil(num_inputs, step_input)
    if not is_shared_in_block or values < _MOST_A_THREAD or columns > most_blocks:
        return width, 1, columns
    enough = min(_ceil(most_blocks, columns), _ceil(values, _LEAST_A_THREAD))
    return width, max(enough, _ceil(values, _MOST_A_THREAD)), columns


def _power_of_two(number: int) -> int:
    """The largest power of two that is not above `number`."""
    return 1 << max(0, number.bit_length() - 1)


def _ceil(number: int, step: int) -> int:
    return -(-number // step)


def _up(number: int, step: int) -> int:
    return -(-number // step) * step
