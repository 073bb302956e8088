"""Frozen weights, low-rank adapters and quantised weights, put into a model on the meta device.

Owns modules that allocate what `peft` and `bitsandbytes` allocate. They compute nothing, and a plan needs neither.
Adapters are float32 beside a base in bf16, and what is not quantised is float32, as both packages leave it.
"""

from __future__ import annotations

import fnmatch
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from jackline.errors import UsageError
from jackline.memory.plan.model_settings import Lora, ModelSettings, Quantized

_BLOCK = 64  # quantised weights that share a scale
_SCALES = 256  # scales that share a scale of their own
_KEPT_WHOLE = ("lm_head", "embed_out", "score", "classifier")


def adapt(model: nn.Module, settings: ModelSettings, low: torch.dtype) -> None:
    """Change `model` in place. `low` is the dtype of a frozen base and of dequantised weights."""
    if settings.lora is not None or settings.quantize is not None:
        for weight in model.parameters():
            weight.requires_grad_(False)
    if settings.lora is not None and settings.quantize is None:
        model.to(low)
    if settings.quantize is not None:
        _quantize(model, settings.quantize, low)
    if settings.lora is not None:
        _add_adapters(model, settings.lora)
    if settings.freeze:
        _freeze(model, settings.freeze)
    if not any(weight.requires_grad for weight in model.parameters()):
        raise UsageError(
            "no weight is left to train",
            hint="quantised weights are trained with adapters: --lora r=16,targets=q_proj,v_proj"
            if settings.quantize
            else "--freeze froze all of them",
        )


def _freeze(model: nn.Module, patterns: tuple[str, ...]) -> None:
    for pattern in patterns:
        hit = [weight for name, weight in model.named_parameters() if fnmatch.fnmatch(name, f"*{pattern}*")]
        if not hit:
            names = ", ".join(list(dict(model.named_parameters()))[:3])
            raise UsageError(f"--freeze {pattern} matches no weight", hint=f"weights are called {names} ...")
        for weight in hit:
            weight.requires_grad_(False)


# Adapters.


def _add_adapters(model: nn.Module, lora: Lora) -> None:
    linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear | _Quantized)}
    chosen = {name: module for name, module in linears.items() if _is_target(name, lora.targets)}
    if not chosen:
        ends = sorted({name.rsplit(".", 1)[-1] for name in linears})
        raise UsageError(
            f"--lora targets {', '.join(lora.targets)} match no linear layer",
            hint=f"targets={','.join(ends[:8])} or targets=all-linear",
        )
    for name, module in chosen.items():
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, _Adapted(module, lora))


def _is_target(name: str, targets: tuple[str, ...]) -> bool:
    if targets == ("all-linear",):
        return not any(part in name for part in _KEPT_WHOLE)
    return any(name == target or name.endswith(f".{target}") for target in targets)


class _Adapted(nn.Module):
    """A linear layer with a low-rank adapter. The input is widened to the adapter's float32 before autocast narrows
    it again: a copy of the input is kept for backward."""

    def __init__(self, base: nn.Linear | _Quantized, lora: Lora) -> None:
        super().__init__()
        self.base = base
        self.lora_A = nn.Linear(base.in_features, lora.rank, bias=False, dtype=torch.float32)
        self.lora_B = nn.Linear(lora.rank, base.out_features, bias=False, dtype=torch.float32)
        self.dropout = nn.Dropout(lora.dropout) if lora.dropout else nn.Identity()

    def forward(self, value: Tensor) -> Tensor:
        out: Tensor = self.base(value)
        wide = value.to(torch.float32)
        added: Tensor = self.lora_B(self.lora_A(self.dropout(wide))) * 2.0
        return (out + added).to(out.dtype)


# Quantised weights.


def _quantize(model: nn.Module, kind: Quantized, low: torch.dtype) -> None:
    """Every linear layer but the head; everything else becomes float32, as when a model is prepared for training."""
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and not any(part in name for part in _KEPT_WHOLE):
            parent, _, last = name.rpartition(".")
            setattr(model.get_submodule(parent), last, _Quantized(module, kind, low))
    for weight in model.parameters():
        if weight.dtype in (torch.float16, torch.bfloat16):
            weight.data = weight.data.to(torch.float32)


class _Quantized(nn.Module):
    def __init__(self, linear: nn.Linear, kind: Quantized, low: torch.dtype) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        count = linear.weight.numel()
        blocks = -(-count // _BLOCK)
        if kind == "int8":
            self.register_buffer("packed", torch.empty(count, dtype=torch.int8))
            self.register_buffer("scales", torch.empty(linear.out_features, dtype=torch.float32))
        else:
            self.register_buffer("packed", torch.empty(-(-count // 2), dtype=torch.uint8))
            self.register_buffer("scales", torch.empty(blocks, dtype=torch.uint8))
            self.register_buffer("scales_of_scales", torch.empty(-(-blocks // _SCALES), dtype=torch.float32))
        self.bias = linear.bias
        self._low = low

    def forward(self, value: Tensor) -> Tensor:
        out: Tensor = _Multiply.apply(value.to(self._low), self.out_features)  # type: ignore[no-untyped-call]
        if self.bias is not None:
            out = out + self.bias.to(out.dtype)
        return out.to(value.dtype)


class _Multiply(torch.autograd.Function):
    """The weight exists in half precision only during the product, forward and backward. The input is not kept: a
    frozen weight has no gradient."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, num_outputs: int) -> Tensor:
        ctx.num_outputs, ctx.num_inputs = num_outputs, value.shape[-1]
        weight = value.new_empty((num_outputs, value.shape[-1]))
        return functional.linear(value, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        weight = grad.new_empty((ctx.num_outputs, ctx.num_inputs))
        return torch.matmul(grad, weight), None
