"""Makes the outputs of a few operators on the meta device directly. PyTorch's own meta operators take ten times as
long, because they run the operator's whole decomposition in Python. This halves the time of a prediction.

Also stands in for a few that it cannot run there.

Owns shapes and dtypes only, and those of CUDA where they differ from the CPU's (the float32 statistics of a norm).
Each function returns None for an unusual case; then PyTorch's own operator runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from jackline.memory.predict.shapes import run_with_values
from jackline.memory.predict.values import Values


def _like(value: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """`empty_like` of a contiguous tensor; PyTorch's own is one of the slow operators on the meta device."""
    return torch.empty(value.shape, dtype=dtype or value.dtype, device=value.device)


def _layer_norm(value: Tensor, shape: list[int], *_: Any) -> Any:
    if not value.is_contiguous():
        return None
    rows = [*value.shape[: value.dim() - len(shape)], *(1 for _ in shape)]
    statistics = [value.new_empty(rows, dtype=torch.float32) for _ in range(2)]
    return _like(value), *statistics


def _layer_norm_backward(grad: Tensor, value: Tensor, *rest: Any) -> Any:
    weight, bias, wanted = rest[-3:]
    if not value.is_contiguous() or not isinstance(wanted, list | tuple):
        return None
    tensors = (value, weight, bias)
    return tuple(_like(t) if want and t is not None else None for t, want in zip(tensors, wanted, strict=True))


def _addmm(bias: Tensor, left: Tensor, right: Tensor, **options: Any) -> Any:
    if options or bias.dim() != 1 or left.shape[1] != right.shape[0]:
        return None
    return left.new_empty((left.shape[0], right.shape[1]))


def _mm(left: Tensor, right: Tensor) -> Any:
    if left.shape[1] != right.shape[0]:
        return None  # which PyTorch itself says better
    return left.new_empty((left.shape[0], right.shape[1]))


def _same_layout(value: Tensor, dtype: torch.dtype | None = None) -> Tensor | None:
    """The result of an operator on each element: in the order of its operand's dimensions, without gaps. None where
    that order is not obvious."""
    if value.is_contiguous() or _is_in_order(value):
        return _like(value, dtype)
    if not _is_permuted(value):
        return None
    return torch.empty_strided(value.shape, value.stride(), dtype=dtype or value.dtype, device=value.device)


def _is_in_order(value: Tensor) -> bool:
    """Whether no dimension has a larger stride than one before it; a stride of 0, of a repeated value, does not
    count. The result of an operator on such tensors is contiguous."""
    last = 0
    for stride in value.stride():
        if stride and last and stride > last:
            return False
        last = stride or last
    return True


def _is_permuted(value: Tensor) -> bool:
    """Whether the elements fill their memory without gap or overlap. False where a dimension has one element: its
    stride means nothing, and PyTorch's rules for the result are not worth copying."""
    filled = 1
    for stride, size in sorted(zip(value.stride(), value.shape, strict=True)):
        if stride != filled or size == 1:
            return False
        filled *= size
    return True


def _like_first(value: Tensor, **_: Any) -> Any:
    return _same_layout(value)


def _float_like(value: Tensor, *_: Any, **options: Any) -> Any:
    """An operator on each element that keeps the dtype of fractions and may change that of whole numbers."""
    return _same_layout(value) if value.is_floating_point() and not options else None


def _like_second(_: Tensor, value: Tensor, *__: Any, **___: Any) -> Any:
    return _like(value) if value.is_contiguous() else None


def _scaled(value: Tensor, factor: Any, *_: Any, **__: Any) -> Any:
    is_plain = isinstance(factor, int | float) and value.is_floating_point()
    return _same_layout(value) if is_plain else None


def _elementwise(left: Tensor, right: Any, **_: Any) -> Any:
    if not isinstance(right, Tensor):
        return _scaled(left, right)
    shape = left.shape if left.shape == right.shape else _broadcast(left.shape, right.shape)
    if shape is None:
        return None
    dtype = left.dtype if left.dtype == right.dtype else torch.result_type(left, right)
    if _is_in_order(left) and _is_in_order(right):
        return torch.empty(shape, dtype=dtype, device=left.device)
    # The first operand decides the layout of the result where it has all of its elements.
    return _same_layout(left, dtype) if shape == left.shape and _is_permuted(left) else None


def _threshold_backward(grad: Tensor, value: Tensor, *_: Any) -> Any:
    """Of a gradient and something of the same shape, both contiguous."""
    is_plain = grad.is_contiguous() and value.is_contiguous() and grad.shape == value.shape
    return _like(grad) if is_plain and grad.dtype in (value.dtype, torch.float32) else None


def _divided(left: Tensor, right: Any, **options: Any) -> Any:
    """Whole numbers divided are fractions."""
    is_plain = left.is_floating_point() and not options
    return _elementwise(left, right) if is_plain else None


def _broadcast(left: Sequence[int], right: Sequence[int]) -> Sequence[int] | None:
    """The shape of the result; None where the shapes do not go together, which PyTorch itself says better."""
    if len(left) < len(right):
        left, right = right, left
    shape = list(left)
    for at, size in enumerate(right, start=len(left) - len(right)):
        if shape[at] == 1:
            shape[at] = size
        elif size not in (1, shape[at]):
            return None
    return torch.Size(shape)


def _in_place(left: Tensor, right: Any, **_: Any) -> Any:
    return left if not isinstance(right, Tensor) or right.shape == left.shape else None


def _embedding(weight: Tensor, indices: Tensor, *_: Any) -> Any:
    return weight.new_empty((*indices.shape, weight.shape[1]))


def _sum(value: Tensor, dims: Any, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Any:
    if not dims or not value.is_floating_point():
        return None
    gone = {dim % value.dim() for dim in dims}
    kept = [(1 if dim in gone else size) for dim, size in enumerate(value.shape) if keepdim or dim not in gone]
    return torch.empty(kept, dtype=dtype or value.dtype, device=value.device)


def _slice_backward(grad: Tensor, sizes: Sequence[int], *_: Any) -> Any:
    return torch.empty(sizes, dtype=grad.dtype, device=grad.device)


def _cat(tensors: Any, dim: int = 0) -> Any:
    """Contiguous, unless the parts are images with their channels last."""
    first = tensors[0]
    if len({(t.dtype, t.dim()) for t in tensors}) > 1:
        return None
    if first.dim() in (4, 5) and not all(t.is_contiguous() or not _is_channels_last(t) for t in tensors):
        return None
    shape = list(first.shape)
    shape[dim] = sum(t.shape[dim] for t in tensors)
    return torch.empty(shape, dtype=first.dtype, device=first.device)


def _is_channels_last(value: Tensor) -> bool:
    strides = value.stride()
    return strides[1] == min(strides)


def _filled(value: Tensor, *, dtype: torch.dtype | None = None, memory_format: Any = None, **_: Any) -> Any:
    is_plain = value.is_contiguous() and memory_format in (None, torch.preserve_format)
    return _like(value, dtype) if is_plain else None


def _softmax(value: Tensor, _: int, is_widening: bool) -> Any:
    if not value.is_contiguous():
        return None
    return _like(value, torch.float32 if is_widening else value.dtype)


def _softmax_backward(grad: Tensor, _: Tensor, __: int, dtype: torch.dtype) -> Any:
    return _like(grad, dtype) if grad.is_contiguous() else None


def _nll_loss(value: Tensor, target: Tensor, _: Any, reduction: int, *__: Any) -> Any:
    return value.new_empty(target.shape if reduction == 0 else ()), value.new_empty(())


def _arange(end: Any, *, dtype: torch.dtype | None = None, device: Any = None, **_: Any) -> Any:
    if not isinstance(end, int):
        return None
    return torch.empty(max(0, end), dtype=dtype or torch.int64, device=device)


def _dropout(value: Tensor, *_: Any) -> Any:
    return (_like(value), _like(value, torch.bool)) if value.is_contiguous() else None


# Operators that PyTorch cannot run on the meta device, or only for some dtypes: the shapes of their results on CUDA.


def _grouped_mm(left: Tensor, right: Tensor, offsets: Tensor | None = None, *_: Any, **options: Any) -> Any:
    """PyTorch's own rule for shapes accepts bf16 only; the kernel also multiplies float32 and float16."""
    if left.dim() == 2 and right.dim() == 2:
        shape = [0 if offsets is None else offsets.shape[0], left.shape[0], right.shape[1]]
    elif left.dim() == 3 and right.dim() == 3:
        shape = [*left.shape[:2], right.shape[2]]
    else:
        shape = [left.shape[-2], right.shape[-1]]
    return torch.empty(shape, dtype=options.get("out_dtype") or left.dtype, device=left.device)


def _ctc_loss(log_probabilities: Tensor, targets: Tensor, *_: Any, **__: Any) -> Any:
    """The loss of each sample, and the table of its alignments, as wide as the longest target can be."""
    steps, batch = log_probabilities.shape[:2]
    longest = targets.shape[1] if targets.dim() == 2 else -(-targets.numel() // max(1, batch))
    return log_probabilities.new_empty(batch), log_probabilities.new_empty((batch, steps, 2 * longest + 1))


def _ctc_loss_backward(_: Tensor, log_probabilities: Tensor, *__: Any, **___: Any) -> Any:
    return torch.empty_like(log_probabilities)


_aten = torch.ops.aten
STAND_INS: dict[Any, Callable[..., Any]] = {
    _aten._ctc_loss.default: _ctc_loss,
    _aten._ctc_loss.Tensor: _ctc_loss,
    _aten._ctc_loss_backward.default: _ctc_loss_backward,
    _aten._ctc_loss_backward.Tensor: _ctc_loss_backward,
    **({_aten._grouped_mm.default: _grouped_mm} if hasattr(_aten, "_grouped_mm") else {}),
}
SHORTCUTS: dict[Any, Callable[..., Any]] = {
    _aten.native_layer_norm.default: _layer_norm,
    _aten.native_layer_norm_backward.default: _layer_norm_backward,
    _aten.addmm.default: _addmm,
    _aten.mm.default: _mm,
    _aten.gelu.default: _like_first,
    _aten.gelu_backward.default: _like_second,
    _aten.add.Tensor: _elementwise,
    _aten.mul.Tensor: _elementwise,
    _aten.div.Tensor: _divided,
    _aten.sub.Tensor: _elementwise,
    _aten.mul.Scalar: _scaled,
    _aten.div.Scalar: _scaled,
    _aten.pow.Tensor_Scalar: _scaled,
    _aten.neg.default: _like_first,
    _aten.rsqrt.default: _float_like,
    _aten.sigmoid.default: _float_like,
    _aten.tanh.default: _float_like,
    _aten.silu.default: _like_first,
    _aten.relu.default: _like_first,
    _aten.threshold_backward.default: _threshold_backward,
    _aten.native_dropout_backward.default: _threshold_backward,
    _aten.silu_backward.default: _like_second,
    _aten.slice_backward.default: _slice_backward,
    _aten.mean.dim: _sum,
    _aten.add_.Tensor: _in_place,
    _aten.mul_.Tensor: _in_place,
    _aten.embedding.default: _embedding,
    _aten._softmax.default: _softmax,
    _aten._log_softmax.default: _softmax,
    _aten._softmax_backward_data.default: _softmax_backward,
    _aten._log_softmax_backward_data.default: _softmax_backward,
    _aten.nll_loss_forward.default: _nll_loss,
    _aten.nll_loss_backward.default: _like_second,
    _aten.arange.default: _arange,
    _aten.sum.dim_IntList: _sum,
    _aten.cat.default: _cat,
    _aten.empty_like.default: _filled,
    _aten.zeros_like.default: _filled,
    _aten.ones_like.default: _filled,
    _aten.native_dropout.default: _dropout,
}


def run_meta(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`func(*args, **kwargs)` for tensors of the meta device."""
    shortcut = SHORTCUTS.get(func) or STAND_INS.get(func)
    if shortcut is not None and _is_on_meta(args, kwargs):
        result = shortcut(*args, **kwargs)
        if result is not None:
            return result
    return func(*args, **kwargs)


def _is_on_meta(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """A program may also compute on the CPU, with real values."""
    first = args[0][0] if args and isinstance(args[0], list | tuple) and args[0] else args[0] if args else None
    if isinstance(first, Tensor):
        return first.is_meta
    return torch.device(kwargs.get("device") or "cpu").type == "meta"


class Unfilled(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Skips drawing initial values while a model is built on the meta device, where tensors have no values. PyTorch
    would import its compiler for the draw, a second of CPU."""

    def __init__(self, values: Values) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._values = values

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return run_with_values(self._values, _unfilled, func, args, kwargs or {})


def _unfilled(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    is_fill = func.overloadpacket.__name__ in _FILLS
    return args[0] if is_fill and args[0].is_meta else func(*args, **kwargs)


_FILLS = frozenset({"normal_", "uniform_", "fill_", "zero_", "random_", "bernoulli_", "exponential_", "log_normal_"})
