"""One rank of tensor parallelism: the layers that a model's own plan divides have their local size.

Owns which layers are divided (the plan that transformers keeps in each class, in the words of
torch.distributed.tensor.parallel), their local modules, and what they send. A rank takes the whole batch. The local
model is traced like any other, so memory is as exact as on one GPU; buffers inside the communication library are not
counted.
"""

from __future__ import annotations

import fnmatch
from typing import Any

import torch
from torch import Tensor, nn

from jackline.errors import UsageError

_COLUMNS = ("colwise", "packed_colwise")
_GATHERED = ("colwise_gather_output", "colwise_rep")
_HEADS = ("num_attention_heads", "num_key_value_heads")


class _Sent:
    """Bytes that one rank has sent since they were last taken."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks, self.num_bytes = num_ranks, 0

    def add(self, tensor: Tensor, times: int) -> None:
        self.num_bytes += times * tensor.nbytes * (self.num_ranks - 1) // self.num_ranks


def divide(model: nn.Module, num_ranks: int) -> None:
    """Change `model` in place into what one of `num_ranks` has."""
    styles: dict[str, str] = dict(getattr(model, "tp_plan", None) or getattr(model, "_tp_plan", None) or {})
    if not any(style in (*_COLUMNS, "rowwise") for style in styles.values()):
        raise UsageError(
            f"{type(model).__name__} has no plan for tensor parallelism", hint="--parallel fsdp or --parallel ddp"
        )
    _check_heads(model, num_ranks)
    sent = _Sent(num_ranks)
    model.__dict__["jackline_sent"] = sent
    for pattern, style in styles.items():
        for name in _matching(model, pattern):
            _divide_one(model, name, style, sent)


def _check_heads(model: nn.Module, num_ranks: int) -> None:
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    for name in _HEADS:
        count = getattr(text, name, None)
        if isinstance(count, int) and count % num_ranks:
            raise UsageError(
                f"{name}={count} cannot be divided by {num_ranks} GPUs",
                hint="a number of GPUs that divides it, or --parallel fsdp",
            )


def _matching(model: nn.Module, pattern: str) -> list[str]:
    names = [*(name for name, _ in model.named_modules()), *(name for name, _ in model.named_parameters())]
    return [name for name in names if fnmatch.fnmatch(name, pattern)]


def _divide_one(model: nn.Module, name: str, style: str, sent: _Sent) -> None:
    parent_name, _, last = name.rpartition(".")
    parent = model.get_submodule(parent_name)
    found = getattr(parent, last)
    if isinstance(found, nn.Linear):
        if style in _COLUMNS or style in _GATHERED:
            setattr(parent, last, _Columns(found, sent, is_gathered=style in _GATHERED))
        elif style == "rowwise":
            setattr(parent, last, _Rows(found, sent))
    elif isinstance(found, nn.Parameter) and found.dim() == 3 and style in (*_COLUMNS, "rowwise"):
        setattr(parent, last, _local(found, 2 if style == "rowwise" else 1, sent.num_ranks))
    elif style == "moe_tp_experts" and isinstance(found, nn.Module):
        found.register_forward_hook(lambda _, __, out: _Sum.apply(out, sent))  # type: ignore[no-untyped-call]


def _local(weight: Tensor, dim: int, num_ranks: int) -> nn.Parameter:
    shape = list(weight.shape)
    shape[dim] = _share(shape[dim], num_ranks)
    return nn.Parameter(weight.new_empty(shape), requires_grad=weight.requires_grad)


def _share(size: int, num_ranks: int) -> int:
    return -(-size // num_ranks)


def take_sent(model: nn.Module) -> int:
    """What the rank has sent since the last call; 0 where nothing is divided this way."""
    sent = model.__dict__.get("jackline_sent")
    if sent is None:
        return 0
    found, sent.num_bytes = sent.num_bytes, 0
    return int(found)


class _Columns(nn.Module):
    """Has a part of the outputs. Every rank needs the whole input, so its gradient is summed."""

    def __init__(self, linear: nn.Linear, sent: _Sent, *, is_gathered: bool) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, _share(linear.out_features, sent.num_ranks)
        self.weight = _local(linear.weight, 0, sent.num_ranks)
        self.bias = _local(linear.bias, 0, sent.num_ranks) if linear.bias is not None else None
        self._sent, self._is_gathered, self._whole = sent, is_gathered, linear.out_features

    def forward(self, value: Tensor) -> Tensor:
        whole: Tensor = _SumBack.apply(value, self._sent)  # type: ignore[no-untyped-call]
        out = nn.functional.linear(whole, self.weight, self.bias)
        if not self._is_gathered:
            return out
        gathered: Tensor = _Gather.apply(out, self._whole, self._sent)  # type: ignore[no-untyped-call]
        return gathered


class _Rows(nn.Module):
    """Has a part of the inputs; the outputs of all ranks are summed."""

    def __init__(self, linear: nn.Linear, sent: _Sent) -> None:
        super().__init__()
        self.in_features, self.out_features = _share(linear.in_features, sent.num_ranks), linear.out_features
        self.weight, self.bias = _local(linear.weight, 1, sent.num_ranks), linear.bias
        self._sent = sent

    def forward(self, value: Tensor) -> Tensor:
        out: Tensor = _Sum.apply(nn.functional.linear(value, self.weight), self._sent)  # type: ignore[no-untyped-call]
        return out if self.bias is None else out + self.bias


class _Sum(torch.autograd.Function):
    """A sum over ranks sends everything around a ring, twice."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, sent: _Sent) -> Tensor:
        sent.add(value, 2)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _SumBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, sent: _Sent) -> Tensor:
        ctx.sent = sent
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.sent.add(grad, 2)
        return grad.clone(), None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, whole: int, sent: _Sent) -> Tensor:
        ctx.size = value.shape[-1]
        out = value.new_empty((*value.shape[:-1], whole))
        sent.add(out, 1)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad[..., : ctx.size].clone(), None, None
