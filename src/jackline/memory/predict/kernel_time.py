"""How long one operator's kernels take on a GPU, from shapes and the manufacturer's rates.

Owns the rules. Each names what the kernel waits for: matrix units (in tiles, as many at a time as there are
processors), memory, address arithmetic where the operands lie differently, or the few processors that share the work.
The shares of the manufacturer's rates were fitted to the kernels of two thirds of 153 recorded steps on an H200; the
others judged them (docs/guides/memory.md). Unknown operators count as memory traffic.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

Unit = Literal["half", "tf32", "single", "none"]  # which of the GPU's rates counts; none: only memory is moved
Product = tuple[int, int, int, int]  # batch, rows, columns, summed

_HALF = (torch.float16, torch.bfloat16)
# Of the manufacturer's rate. A product of halves whose rows are not a multiple of 16 bytes reaches far less.
_REACHED: dict[Unit, float] = {"half": 0.80, "tf32": 0.75, "single": 0.78, "none": 1.0}
_CONVOLVED = 0.6  # of the rate of a product: the inputs of a convolution are gathered
_MISALIGNED = {1: 0.16, 2: 0.31, 4: 0.6}
_TILES = {
    True: ((128, 256, 1.0), (128, 128, 0.92), (64, 128, 0.8), (64, 64, 0.45)),
    False: ((128, 128, 1.0), (128, 64, 0.9), (64, 64, 0.8), (32, 64, 0.55), (32, 32, 0.4)),
}
_LEAST_SUMMED = {True: 512, False: 256}  # of a part, where parts of a sum are computed apart
_BEGIN = {True: 192, False: 16}  # of a tile, in elements of its sum
_PRODUCT_S, _CONVOLUTION_S, _PART_S, _RECURRENT_S = 2.2e-6, 5e-6, 2e-6, 9e-6
# Elements a second that one processor reaches where it computes the address of each, and gathers or scatters.
_ADDRESSED, _CROSSED, _MANY_DIMS, _FEW_DIMS = 3.0e9, 0.42, 0.65, 3
# Products a second of one processor where there is one filter a channel: (forward, backward).
_CHANNELWISE = {True: (25e9, 14e9), False: (8.3e9, 3.4e9)}
_NORMED = {False: 2.2e9, True: 0.72e9}  # elements a second: one processor a channel

# name: (seconds of its own, share of the bandwidth)
_KINDS: dict[str, tuple[float, float]] = {
    "elementwise": (1.3e-6, 0.72),
    "copy": (1.6e-6, 0.65),
    "sum": (4.0e-6, 0.52),
    "softmax": (1.7e-6, 0.58),
    "norm": (5.0e-6, 0.48),
    "norm_backward": (8.0e-6, 0.34),
    "fill": (1.2e-6, 0.90),
    "index": (10.0e-6, 0.40),
    "sorted": (5.0e-5, 0.40),
    "dropout": (1.3e-6, 0.90),
    "cat": (3.0e-6, 0.42),
    "pool": (6.0e-6, 0.15),
    "random": (1.5e-6, 0.40),
    "sort": (6.0e-5, 0.10),
}
_NAMES = {
    "sum": "sum mean var std amax max norm linalg_vector_norm prod var_mean logsumexp argmax any all cumsum",
    "softmax": "_softmax _softmax_backward_data _log_softmax _log_softmax_backward_data _safe_softmax",
    "norm": "native_layer_norm native_group_norm _fused_rms_norm",
    "norm_backward": "native_layer_norm_backward native_group_norm_backward _fused_rms_norm_backward",
    "fill": "fill_ zero_ zeros ones full zeros_like ones_like new_zeros full_like new_full arange",
    "index": """
        index gather scatter scatter_ scatter_add scatter_add_ index_select index_add index_add_ embedding
        _embedding_bag
    """,
    # By sorted indices, which takes some twenty small kernels.
    "sorted": """
        _index_put_impl_ index_put index_put_ embedding_dense_backward _embedding_bag_dense_backward
        _embedding_bag_backward
    """,
    "dropout": "native_dropout native_dropout_backward bernoulli_",
    "cat": "cat stack",
    "pool": """
        max_pool2d_with_indices max_pool2d_with_indices_backward avg_pool2d avg_pool2d_backward upsample_bilinear2d
        upsample_bilinear2d_backward upsample_nearest2d upsample_nearest2d_backward max_pool3d_with_indices
        max_pool3d_with_indices_backward _adaptive_avg_pool2d _adaptive_avg_pool2d_backward upsample_bicubic2d
    """,
    "random": "randn randint rand normal_ random_ uniform_ randn_like rand_like",
    "sort": "sort topk _unique2 bincount",
}
_KIND_OF = {name: kind for kind, names in _NAMES.items() for name in names.split()}
_PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm", "addbmm"})
_COPIES = frozenset({"_to_copy", "copy_", "clone"})


@dataclass(frozen=True)
class Kernel:
    """What the kernels of one operator have to do, for any GPU. `addressed` and `shared` are what is left to
    processors: elements over the rate of one of them, and the number of those that can take part (0: all)."""

    fixed_s: float = 1e-6
    num_bytes: int = 0
    share: float = 0.8
    unit: Unit = "none"
    products: tuple[Product, ...] = ()
    reached: float = 1.0  # of what such products usually reach
    operations: int = 0  # that are no product of matrices as above
    processor_s: float = 0.0
    most_processors: int = 0
    apart_bytes: int = 0  # moved by kernels before or after


class Rates(Protocol):
    @property
    def half(self) -> float: ...
    @property
    def tf32(self) -> float: ...
    @property
    def single(self) -> float: ...
    @property
    def bandwidth(self) -> float: ...


def seconds(kernel: Kernel, rates: Rates, num_processors: int) -> float:
    moving = kernel.num_bytes / (rates.bandwidth * 1e9 * kernel.share)
    speed = speed_of(kernel.unit, rates) * kernel.reached
    computing = kernel.operations / speed
    for product in kernel.products:
        computing += _product_s(product, speed, kernel.unit == "half", rates.bandwidth * 1e9, num_processors)
    waiting = 0.0
    if kernel.processor_s:
        most = kernel.most_processors or num_processors
        # A whole number of rounds, until there are so many that the last one hardly counts.
        rounds = math.ceil(most / num_processors) if most < 4 * num_processors else most / num_processors
        waiting = kernel.processor_s / (num_processors if not kernel.most_processors else most / rounds)
    apart = kernel.apart_bytes / (rates.bandwidth * 1e9 * kernel.share)
    return kernel.fixed_s + apart + max(moving, computing, waiting)


def speed_of(unit: Unit, rates: Rates) -> float:
    """Operations a second that such kernels reach."""
    if unit == "none":
        return math.inf
    if unit == "tf32" and not rates.tf32:
        unit = "single"
    return {"half": rates.half, "tf32": rates.tf32, "single": rates.single}[unit] * _REACHED[unit] * 1e12


def _product_s(product: Product, speed: float, is_half: bool, bandwidth: float, num_processors: int) -> float:
    """In the tiles that take the least time; where these are too few, parts of the sum are computed apart."""
    batch, rows, columns, summed = product
    best = math.inf
    for height, width, reached in _TILES[is_half]:
        tiles = batch * math.ceil(rows / height) * math.ceil(columns / width)
        parts = 1
        while tiles * parts < num_processors and summed / (2 * parts) >= _LEAST_SUMMED[is_half]:
            parts *= 2
        count = tiles * parts
        rounds = math.ceil(count / num_processors) if count < 4 * num_processors else count / num_processors
        depth = summed / parts + min(summed, _BEGIN[is_half])
        a_tile = 2 * height * width * depth * num_processors / (speed * reached)
        more = _PART_S + 4 * batch * rows * columns * parts / bandwidth if parts > 1 else 0.0
        best = min(best, rounds * a_tile + more)
    return best


def kernel_of(name: str, args: tuple[Any, ...], result: Any) -> Kernel:
    """The kernel of an operator of the trace, from its arguments and result."""
    if name in _PRODUCTS:
        return _of_product(args[1:] if name in ("addmm", "baddbmm", "addbmm") else args, result)
    if name == "_grouped_mm":
        return _of_groups(args, result)
    if name.startswith("convolution"):
        return _of_convolution(name, args, result)
    if "batch_norm" in name:
        return _of_batch_norm(name, args[0], num_bytes_of((args, result)))
    kind = _KIND_OF.get(name, "copy" if name in _COPIES else "elementwise")
    fixed_s, share = _KINDS[kind]
    tensors = [*tensors_of(args), *tensors_of(result)]
    if name in _COPIES:
        tensors = tensors[:2] if name == "copy_" else [tensors[0], tensors[-1]]
    if name.startswith("nll_loss"):  # of each row one number is read; the gradient is filled with zeros
        tensors = list(tensors_of(result))
    num_bytes = sum(_num_bytes(tensor) for tensor in tensors)
    waiting = _address_s(tensors) if kind in ("elementwise", "copy", "dropout") else 0.0
    return Kernel(fixed_s, num_bytes, share, processor_s=waiting)


def _of_product(pair: tuple[Any, ...], result: Tensor) -> Kernel:
    left, right = pair[0], pair[1]
    num_bytes = num_bytes_of((left, right, result))
    batch = left.shape[0] if left.dim() == 3 else 1
    rows, summed, columns = left.shape[-2], left.shape[-1], right.shape[-1]
    if min(rows, summed, columns) == 1:  # a sum of rows, or an outer product
        return Kernel(1.5e-6, num_bytes, 0.65)
    if left.dtype not in _HALF:
        return Kernel(_PRODUCT_S, num_bytes, 0.65, "single", ((batch, rows, columns, summed),))
    row_length = math.gcd(_row_length(left), _row_length(right), columns, 8)
    reached = _MISALIGNED.get(row_length, 1.0)
    return Kernel(_PRODUCT_S, num_bytes, 0.65, "half", ((batch, rows, columns, summed),), reached)


def _row_length(matrix: Tensor) -> int:
    """The distance of its rows, or of its columns where those lie in one piece."""
    return max((stride for stride in matrix.stride()[-2:]), default=8)


def _of_groups(args: tuple[Any, ...], result: Tensor) -> Kernel:
    """A product for each expert; in float32 one after the other."""
    left, right = args[0], args[1]
    operations = 2 * result.numel() * left.shape[-1]
    count = right.shape[0] if right.dim() == 3 else 1
    if left.dim() == 2 and right.dim() == 2 and result.dim() == 3:
        count = result.shape[0]
        operations //= count
    is_half = left.dtype in _HALF
    fixed_s = 1e-5 if is_half else 1e-5 * count
    share_of_rate = 0.6 if is_half else 0.8
    unit: Unit = "half" if is_half else "single"
    num_bytes = num_bytes_of((left, right, result))
    return Kernel(fixed_s, num_bytes, 0.6, unit, reached=share_of_rate, operations=operations)


def _of_convolution(name: str, args: tuple[Any, ...], result: Any) -> Kernel:
    is_backward = name == "convolution_backward"
    value, weight = (args[1], args[2]) if is_backward else (args[0], args[1])
    out = args[0] if is_backward else result
    stride_at = 4 if is_backward else 3
    dilation, is_transposed, groups = args[stride_at + 2], args[stride_at + 3], args[stride_at + 5]
    wanted = [bool(one) for one in args[-1][:2]] if is_backward else [True]
    num_bytes = sum(wanted) * (_num_bytes(value) + _num_bytes(out))
    taps = math.prod(weight.shape[2:])
    if groups > 1 and groups == value.shape[1]:
        rate = _CHANNELWISE[value.dtype in _HALF][is_backward]
        waiting = sum(wanted) * out.numel() * taps / rate
        return Kernel(_CONVOLUTION_S * sum(wanted), num_bytes, 0.5, processor_s=waiting)
    wide, narrow = (value, out) if is_transposed else (out, value)  # of the convolution that is or is undone
    points = wide.numel() // wide.shape[1]
    outputs, inputs = wide.shape[1] // groups, narrow.shape[1] // groups
    forward = (groups, points, outputs, inputs * taps)
    to_input = (groups, narrow.numel() // narrow.shape[1], inputs, outputs * taps)
    to_weight = (groups, outputs, inputs * taps, points)
    first, second = (to_input, forward) if is_transposed else (forward, to_input)
    products = [first]
    if is_backward:
        products = [one for one, is_wanted in zip((second, to_weight), wanted, strict=True) if is_wanted]
    is_half = value.dtype in _HALF
    unit: Unit = "half" if is_half else "tf32"
    reached = _CONVOLVED
    if is_half and not is_backward and weight.dim() == 3 and any(step > 1 for step in dilation):
        unit, reached = "single", 0.55  # no kernel for tensor cores with gaps
    # Input and result are brought into another order before and after; the gradient of a bias is a sum.
    is_plain = taps == 1 and math.prod(value.shape[2:]) * value.element_size() % 16 == 0
    apart_bytes = 0 if is_plain else 2 * num_bytes
    if is_backward and args[-1][2]:
        apart_bytes += _num_bytes(out)
    fixed_s = _CONVOLUTION_S * len(products)
    return Kernel(fixed_s, num_bytes, 0.55, unit, tuple(products), reached, apart_bytes=apart_bytes)


def _of_batch_norm(name: str, value: Tensor, num_bytes: int) -> Kernel:
    """One processor sums up a channel."""
    is_backward = "backward" in name
    channels = value.shape[1] if value.dim() > 1 else 1
    return Kernel(4e-6, num_bytes, 0.5, processor_s=value.numel() / _NORMED[is_backward], most_processors=channels)


def attention_kernel(operations: int, tensors: Iterable[Tensor]) -> Kernel:
    held = list(tensors)
    is_half, is_backward = held[0].dtype in _HALF, len(held) > 4
    unit: Unit = "half" if is_half else "single"
    reached = (0.50 if is_backward else 0.19) if is_half else (0.64 if is_backward else 0.32)
    fixed_s = 2.4e-5 if is_backward else 1.2e-5
    return Kernel(fixed_s, num_bytes_of(held), 0.6, unit, reached=reached, operations=operations)


def recurrent_kernel(operations: int, tensors: Iterable[Tensor], num_steps: int) -> Kernel:
    """The steps of all layers follow each other, and each starts kernels of its own."""
    held = list(tensors)
    unit: Unit = "half" if held[0].dtype in _HALF else "single"
    waiting_s = num_steps * _RECURRENT_S
    return Kernel(
        num_bytes=num_bytes_of(held),
        share=0.6,
        unit=unit,
        reached=0.6,
        operations=operations,
        processor_s=waiting_s,
        most_processors=1,
    )


def _address_s(tensors: list[Tensor]) -> float:
    """Seconds of one processor for the addresses of operands that do not lie alike."""
    largest = max(tensors, key=_size, default=None)
    if largest is None or largest.numel() < 2**14 or _lie_alike(tensors):
        return 0.0
    fastest = {_fastest(one) for one in tensors if one.numel() == largest.numel()}
    slower = _CROSSED if len(fastest) > 1 else 1.0
    if _num_joined(tensors, largest.shape) > _FEW_DIMS:
        slower = min(slower, _MANY_DIMS)
    return largest.numel() / (_ADDRESSED * slower)


def _size(tensor: Tensor) -> int:
    return tensor.numel()


def _lie_alike(tensors: list[Tensor]) -> bool:
    first, *others = [one for one in tensors if one.numel() > 1] or tensors
    layout = _layout(first)
    return all(one.shape == first.shape and _layout(one) == layout for one in others) and _is_dense(first)


def _layout(tensor: Tensor) -> list[int]:
    return [stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]


def _is_dense(tensor: Tensor) -> bool:
    filled = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride != filled:
                return False
            filled *= size
    return True


def _fastest(tensor: Tensor) -> int:
    """The dimension whose neighbours are neighbours in memory."""
    found = [
        (stride, dim)
        for dim, (stride, size) in enumerate(zip(tensor.stride(), tensor.shape, strict=True))
        if size > 1 and stride > 0
    ]
    return min(found)[1] if found else -1


def _num_joined(tensors: list[Tensor], shape: torch.Size) -> int:
    """The number of dimensions after those were joined that lie in one piece in every operand."""
    count = 0
    before: list[int] | None = None
    for dim in range(len(shape) - 1, -1, -1):
        if shape[dim] == 1:
            continue
        strides = [_stride_at(one, dim - len(shape)) for one in tensors if one.dim() <= len(shape)]
        if before is None or strides != before:
            count += 1
        before = [stride * shape[dim] for stride in strides]
    return count


def _stride_at(tensor: Tensor, dim: int) -> int:
    return 0 if -dim > tensor.dim() or tensor.shape[dim] == 1 else tensor.stride(dim)


def num_bytes_of(value: Any) -> int:
    return sum(_num_bytes(tensor) for tensor in tensors_of(value))


def _num_bytes(tensor: Tensor) -> int:
    """What is read or written: a repeated value counts once."""
    count = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        count *= size if stride else 1
    return count * tensor.element_size()


def tensors_of(value: Any) -> Iterable[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_of(item)
