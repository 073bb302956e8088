"""Imitates CUDA on the meta device: autocast, fused attention, norms and dropout.

Owns the rules that decide which tensors exist. On the meta device PyTorch ignores autocast and uses the unfused
attention, so a plain trace is wrong both ways. The rules apply to the innermost functions that PyTorch calls; the
Python wrappers of torch.nn.functional are bypassed (`leaf_functions`).

Not covered: kernels of other packages, and operators that hide a matrix product inside C++ (cdist), which are then
traced in the precision of their inputs.

RMSNorm is one CUDA kernel that keeps its input and one number per row. On the meta device PyTorch decomposes it into
squares, means and products in float32: a third of the memory of a bf16 model, which no GPU would use.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from jackline.memory.predict.attention import Fused, OnWork, attend, attend_flexibly
from jackline.memory.predict.recurrent import RECURRENT, recur

# PyTorch's documented lists of CUDA autocast, by the name of the function that does the work.
_LOW_NAMES = """
    linear matmul __matmul__ __rmatmul__ mm bmm addmm addbmm baddbmm addmv addr mv chain_matmul multi_dot einsum
    conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d conv_tbc convolution prelu bilinear
    scaled_dot_product_attention linalg_multi_dot lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell
"""
_FLOAT32_NAMES = """
    layer_norm native_layer_norm group_norm norm cosine_similarity cosine_embedding_loss poisson_nll_loss nll_loss
    nll_loss_nd nll_loss2d hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss mse_loss
    margin_ranking_loss multilabel_margin_loss soft_margin_loss triplet_margin_loss multi_margin_loss
    binary_cross_entropy_with_logits ctc_loss dist pdist cdist renorm logsumexp
    acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow __pow__ __rpow__ softplus
    __rdiv__ __rtruediv__ square float_power frobenius_norm nuclear_norm linalg_vector_norm linalg_matrix_norm
    linalg_norm pairwise_distance
"""
_UPSAMPLING_NAMES = """
    upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_linear1d upsample_bilinear2d
    upsample_trilinear3d upsample_bicubic2d _upsample_nearest_exact1d _upsample_nearest_exact2d
    _upsample_nearest_exact3d _upsample_bilinear2d_aa _upsample_bicubic2d_aa
"""
# Two dtypes become the wider one.
_WIDEST_NAMES = """
    addcdiv addcmul atan2 cross dot vdot linalg_vecdot grid_sampler index_put scatter_add
"""
_WIDEST = frozenset(_WIDEST_NAMES.split())
_LOW = frozenset(_LOW_NAMES.split())


def _is_cast(name: str) -> bool:
    """Whether this version of PyTorch has the operator in its list; the lists grow."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "AutocastCUDA"))


_SOME_VERSIONS = ("rms_norm", *_UPSAMPLING_NAMES.split())
_FLOAT32 = frozenset((*_FLOAT32_NAMES.split(), *(name for name in _SOME_VERSIONS if _is_cast(name))))
# Autocast asks these for a float32 result unless the caller named a dtype.
_FLOAT32_RESULT = frozenset({"sum", "prod", "cumsum", "cumprod"})
_CROSS_ENTROPY_OPTIONS = ("weight", "reduction", "ignore_index", "label_smoothing")
_LOSSES = frozenset({"cross_entropy_loss", "nll_loss", "nll_loss_nd"})
_ATTENTION = frozenset({"scaled_dot_product_attention", "flex_attention"})
_SOFTMAX = frozenset({"softmax", "log_softmax"})
# The modules whose Python wrappers check for a `__torch_function__` override.
_WRAPPERS = (functional, torch.functional, torch._tensor, torch.autograd)
_IMITATED = ("cuda", "meta")  # the devices whose autocast is imitated
_CHECKS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")


class CudaRules(TorchFunctionMode):
    """Active while the model runs, backward pass included, because recomputation happens there."""

    def __init__(
        self,
        low: torch.dtype | None = None,
        *,
        has_flash: bool = True,
        has_cudnn: bool = False,
        on_weight_copy: Callable[[Tensor], None] | None = None,
        on_work: OnWork | None = None,
    ) -> None:
        super().__init__()
        self._base = low
        self._nested: list[torch.dtype | None] = []  # the autocast contexts that the program itself entered
        self._fused: Fused = "cudnn" if has_cudnn else "flash" if has_flash else "efficient"
        self._on_weight_copy = on_weight_copy
        self._on_work = on_work
        self._copies: dict[int, Tensor] | None = None
        self.class_sizes: set[int] = set()  # the numbers of classes of the losses seen so far

    @property
    def _low(self) -> torch.dtype | None:
        return self._nested[-1] if self._nested else self._base

    @contextlib.contextmanager
    def answers(self) -> Iterator[None]:
        """Answer a model that asks about autocast for CUDA or for its device, and obey one that switches it on or
        off. For the meta device torch would raise, and without a GPU it ignores autocast for CUDA."""
        is_enabled, dtype_of = torch.is_autocast_enabled, torch.get_autocast_dtype
        is_available = torch.amp.is_autocast_available
        answers: tuple[tuple[Any, str, Callable[..., Any]], ...] = (
            (
                torch,
                "is_autocast_enabled",
                lambda *asked: self._low is not None if not asked or asked[0] in _IMITATED else is_enabled(*asked),
            ),
            (
                torch,
                "get_autocast_dtype",
                lambda asked: (self._low or torch.bfloat16) if asked in _IMITATED else dtype_of(asked),
            ),
            # Asked before a recomputation, which then happens under the autocast of the forward pass.
            (torch.amp, "is_autocast_available", lambda asked: asked in _IMITATED or is_available(asked)),
            # Asked by recurrent layers, which otherwise want input and weights of one dtype.
            (torch._C, "_is_any_autocast_enabled", lambda: self._low is not None),
        )
        with contextlib.ExitStack() as kept:
            for module, name, answer in answers:
                kept.callback(setattr, module, name, getattr(module, name))
                setattr(module, name, answer)
            with self._own_autocast():
                yield

    @contextlib.contextmanager
    def _own_autocast(self) -> Iterator[None]:
        """Replace what `with torch.autocast(...)` does. The class stays, because programs have imported it."""
        changed: Any = torch.amp.autocast_mode.autocast
        kept = changed.__init__, changed.__enter__, changed.__exit__
        make, enter, leave = kept
        entered: list[tuple[Any, bool]] = []

        def begin(context: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
            is_imitated = device_type in _IMITATED
            make(
                context,
                "cpu" if is_imitated else device_type,
                *_of_cpu(args, is_imitated),
                **_of_cpu(kwargs, is_imitated),
            )
            given = dict(zip(("dtype", "enabled", "cache_enabled"), args, strict=False)) | kwargs
            wanted = given.get("dtype") or (self._low or torch.float16)
            context.jackline_low = (wanted if given.get("enabled", True) else None, is_imitated)

        def push(context: Any) -> Any:
            low, is_imitated = getattr(context, "jackline_low", _low_of(context))
            if not is_imitated:
                return enter(context)
            entered.append((context, self._copies is None))
            self._nested.append(low)
            self._copies = {} if self._copies is None else self._copies
            return context

        def pop(context: Any, *error: Any) -> Any:
            if not entered or entered[-1][0] is not context:
                return leave(context, *error)
            _, is_outermost = entered.pop()
            self._nested.pop()
            self._copies = None if is_outermost else self._copies
            return False

        changed.__init__, changed.__enter__, changed.__exit__ = begin, push, pop
        try:
            yield
        finally:
            changed.__init__, changed.__enter__, changed.__exit__ = kept

    @contextlib.contextmanager
    def autocast(self) -> Iterator[None]:
        """The `with torch.autocast(...)` of the training loop: weights are cast once and kept until its end."""
        self._copies = {}
        try:
            yield
        finally:
            self._copies = None

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if self._low is not None:
            if name == "cross_entropy_loss":
                return self._cross_entropy(func, args, kwargs)
            args, kwargs = self._cast(name, args, kwargs)
        if name in _ATTENTION:
            return self._attend(name, func, args, kwargs)
        if name == "rms_norm":
            return rms_norm(func, args, kwargs)
        if name in RECURRENT and isinstance(args[1], Tensor | tuple | list):
            return recur(
                name, func, args, lambda weight: self._to(weight, self._low) if self._low else weight, self._on_work
            )
        if name in ("dropout", "feature_dropout"):
            return _dropout(func, args, kwargs)
        if name == "linear":
            return _linear(func, args, kwargs)
        if name in _LOSSES:
            self._note_classes(args[0])
        if name in _SOFTMAX and _is_half_to_float(args, kwargs):
            return _fused_softmax(name, args, kwargs)
        return func(*args, **kwargs)

    def _attend(self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if name == "scaled_dot_product_attention":
            return attend(func, args, kwargs, fused=self._fused, on_work=self._on_work)
        # PyTorch's own function has the same name as the kernel inside it.
        is_kernel = isinstance(func, torch._ops.HigherOrderOperator)
        return attend_flexibly(args, self._on_work) if is_kernel else func(*args, **kwargs)

    def _cast(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if name in _LOW or name in _FLOAT32:
            dtype = self._low if name in _LOW else torch.float32
            # From the last argument to the first, as torch does it on x86 (seen in the allocator's history). The
            # order of the copies decides where the next block fits; in one case that was 3 of 16 GiB reserved.
            words = {key: self._to(kwargs[key], dtype) for key in reversed(kwargs)}
            low = [self._to(x, dtype) for x in reversed(args)]
            return tuple(reversed(low)), {key: words[key] for key in kwargs}
        if name in _WIDEST:
            is_wide = any(_is_castable(x) and x.dtype == torch.float32 for x in (*args, *kwargs.values()))
            dtype = torch.float32 if is_wide else self._low
            return tuple(self._to(x, dtype) for x in args), {key: self._to(x, dtype) for key, x in kwargs.items()}
        if name in _FLOAT32_RESULT or name in _SOFTMAX:
            has_dtype = kwargs.get("dtype") is not None or any(isinstance(x, torch.dtype) for x in args)
            if not has_dtype and args and _is_castable(args[0]):
                return args, {**kwargs, "dtype": torch.float32}
        return args, kwargs

    def _to(self, value: Any, dtype: torch.dtype | None) -> Any:
        if isinstance(value, list | tuple):
            return type(value)(self._to(item, dtype) for item in value)
        if not _is_castable(value) or value.dtype == dtype:
            return value
        is_weight = value.is_leaf and value.requires_grad and not value._is_view()
        if not is_weight or dtype == torch.float32:
            return value.to(dtype)
        if self._copies is not None and id(value) in self._copies:
            return self._copies[id(value)]
        copy = value.to(dtype)
        if self._on_weight_copy is not None:
            self._on_weight_copy(copy)
        if self._copies is not None:
            self._copies[id(value)] = copy
        return copy

    def _cross_entropy(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """PyTorch passes the dtype of the logits to its log-softmax, and autocast respects it: the log-probabilities
        stay in the low precision and are kept beside their float32 copy for nll_loss. That is 10 bytes an element at
        the peak, where float32 logits take 12."""
        logits, target = args[0], args[1]
        self._note_classes(logits)
        options = (
            dict(zip(("weight", "reduction", "ignore_index", "label_smoothing"), args[2:], strict=False)) | kwargs
        )
        if logits.shape == target.shape or options.get("label_smoothing"):
            return func(*args, **kwargs)
        class_dim = 1 if logits.dim() > 1 else 0
        log_probabilities = torch.log_softmax(logits, class_dim, dtype=logits.dtype)
        weight = options.get("weight")
        return torch.nn.functional.nll_loss(
            self._to(log_probabilities, torch.float32),
            target,
            weight=self._to(weight, torch.float32),
            ignore_index=options.get("ignore_index", -100),
            reduction=("none", "mean", "sum")[options.get("reduction", 1)],
        )

    def _note_classes(self, logits: Tensor) -> None:
        self.class_sizes.add(logits.shape[1 if logits.dim() > 1 else 0])


def _linear(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """To an input whose rows are not in one piece PyTorch adds the bias in place; not so where it is traced."""
    given = dict(zip(("input", "weight", "bias"), args, strict=False)) | kwargs
    value, bias = given["input"], given.get("bias")
    if bias is None or value.dim() < 3 or value.is_contiguous():
        return func(*args, **kwargs)
    return torch.matmul(value, given["weight"].t()).add_(bias)


def _of_cpu(given: Any, is_imitated: bool) -> Any:
    """The arguments of `torch.autocast` with which it can be made for the CPU: its dtype is checked there."""
    if not is_imitated:
        return given
    return {} if isinstance(given, dict) else ()


def _low_of(context: Any) -> tuple[torch.dtype | None, bool]:
    """Of a context that was made before, as by a decorator."""
    return (context.fast_dtype if context._enabled else None), context.device in _IMITATED


def _is_castable(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.dtype != torch.float64


def _dropout(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """CUDA keeps a mask of one byte an element; on other devices the mask has the dtype of the input."""
    if func is not torch.dropout or kwargs or len(args) != 3:
        return func(*args, **kwargs)
    value, probability, is_training = args
    if not is_training or not 0 < probability < 1:
        return func(*args)
    return torch.native_dropout(value, probability, True)[0]


def _is_half_to_float(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return (
        bool(args)
        and isinstance(args[0], Tensor)
        and args[0].dtype == torch.float16
        and (kwargs.get("dtype") == torch.float32 or torch.float32 in args[1:])
    )


def _fused_softmax(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """For float16 only, CUDA widens inside the kernel: there is no float32 copy of the input."""
    dim = args[1] if len(args) > 1 else kwargs["dim"]
    return getattr(torch.ops.aten, f"_{name}")(args[0], dim, True)


@contextlib.contextmanager
def leaf_functions() -> Iterator[None]:
    """Let the rules see `torch.layer_norm` where the model calls `F.layer_norm`. Otherwise the Python wrapper would
    be the last call they see, and everything inside it would run without them, including a recomputation inside
    `backward`."""
    kept = [
        (module, name, getattr(module, name)) for module in _WRAPPERS for name in _CHECKS if hasattr(module, name)
    ]
    for module, name, _ in kept:
        setattr(module, name, lambda *_: False)
    try:
        yield
    finally:
        for module, name, check in kept:
            setattr(module, name, check)


def has_fused_rms_norm() -> bool:
    """Whether CUDA has a kernel for RMSNorm: since PyTorch 2.9, whose operator also returns what backward needs."""
    found = getattr(torch.ops.aten, "_fused_rms_norm", None)
    return found is not None and len(found.default._schema.returns) == 2


def rms_norm(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`func` is called itself where CUDA would also decompose it: no kernel, or two dtypes for weight and input."""
    given = dict(zip(("input", "normalized_shape", "weight", "eps"), args, strict=False)) | kwargs
    value, weight = given["input"], given.get("weight")
    is_mixed = weight is not None and weight.dtype != value.dtype
    if is_mixed or not has_fused_rms_norm() or not value.is_floating_point():
        return func(*args, **kwargs)
    return _RmsNorm.apply(value, weight, math.prod(given["normalized_shape"]))  # type: ignore[no-untyped-call]


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, weight: Tensor | None, width: int) -> Tensor:
        value = value.contiguous()
        out = torch.empty(value.shape, dtype=value.dtype, device=value.device)
        scales = torch.empty(value.numel() // width, 1, dtype=torch.float32, device=value.device)
        ctx.save_for_backward(value, weight, scales)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        gradients = [
            torch.empty(part.shape, dtype=part.dtype, device=part.device) if part is not None else None
            for part in saved[:2]
        ]
        return *gradients, None
