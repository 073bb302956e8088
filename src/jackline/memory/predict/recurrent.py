"""What cuDNN's LSTM, GRU and plain RNN allocate. On the meta device PyTorch would run them step by step.

Owns the shapes of what they keep for backward, as measured on an H200 (cuDNN 9): per layer and direction so many
numbers a hidden unit, time step and sample, the outputs between layers, and one bit each for dropout between layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from jackline.memory.predict.attention import OnWork
from jackline.memory.predict.work import RECURRENT_US

# Numbers kept per hidden unit: four gates and the cell of an LSTM; three gates and three parts before them of a GRU.
# Their workspace, as measured for an LSTM of two layers.
_MORE_A_SAMPLE, _FIXED_BYTES = 84, 16 * 2**20
RECURRENT = {"lstm": 5, "gru": 6, "rnn_tanh": 2, "rnn_relu": 2}
_GATES = {5: 4, 6: 3, 2: 1}  # by those numbers


def recur(
    name: str,
    func: Callable[..., Any],
    args: tuple[Any, ...],
    cast: Callable[[Tensor], Tensor],
    on_work: OnWork | None = None,
) -> tuple[Tensor, ...]:
    """`func` is torch.lstm or one of its like: (input, state, weights, has_biases, layers, dropout, is_training,
    is_bidirectional, is_batch_first). Packed sequences come as (data, batch_sizes, ...) and run as they are."""
    value, state, weights = args[0], args[1], args[2]
    if not isinstance(weights, list | tuple) or value.dim() != 3:
        found: tuple[Tensor, ...] = func(*args)
        return found
    layers, dropout, is_training, is_bidirectional, is_batch_first = args[4:9]
    states = state if isinstance(state, list | tuple) else (state,)
    shape = _Shape(RECURRENT[name], layers, 2 if is_bidirectional else 1, states[0].shape[-1], bool(is_batch_first))
    kept = shape.kept_bytes if is_training else (lambda *_: 0)
    low = [cast(weight) for weight in weights]
    out = _Recurrent.apply(cast(value), shape, kept, dropout if is_training else 0.0, *low)  # type: ignore[no-untyped-call]
    if on_work is not None:
        operations = 2 * sum(weight.numel() for weight in low) * value.shape[0] * value.shape[1]
        steps = value.shape[1] if is_batch_first else value.shape[0]
        count = 2 * layers * steps
        directions = 2 if is_bidirectional else 1
        # Backward is twice as much.
        on_work(3 * operations, (out, *low), count * RECURRENT_US, count * directions)
    last = [torch.empty(one.shape, dtype=out.dtype, device=out.device) for one in states]
    return (out, *last)


class _Shape:
    def __init__(self, numbers: int, layers: int, directions: int, hidden: int, is_batch_first: bool) -> None:
        self._numbers, self._layers = numbers, layers
        self._gates = _GATES[numbers]
        self.width = hidden * directions
        self.is_batch_first = is_batch_first

    def by_steps(self, value: Tensor) -> Tensor:
        return value.transpose(0, 1).contiguous() if self.is_batch_first else value.contiguous()

    def workspace_bytes(self, steps: int, batch: int, element_bytes: int) -> int:
        """All gates of all layers, of each sample some more, and a part that is always the same."""
        numbers = self._layers * self._gates * steps + _MORE_A_SAMPLE
        return numbers * batch * self.width * element_bytes + _FIXED_BYTES

    def kept_bytes(self, rows: int, element_bytes: int, dropout: float) -> int:
        count = rows * self.width
        between = (self._layers - 1) * count
        return (self._layers * self._numbers * count + between) * element_bytes + (between // 8 if dropout else 0)


class _Recurrent(torch.autograd.Function):
    """In the order in which cuDNN and PyTorch allocate: it decides where later blocks fit."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, shape: _Shape, kept: Any, dropout: float, *weights: Tensor) -> Tensor:
        ordered = shape.by_steps(value)
        steps, batch = ordered.shape[:2]
        out = torch.empty((steps, batch, shape.width), dtype=value.dtype, device=value.device)
        size = shape.workspace_bytes(steps, batch, value.element_size())
        workspace = torch.empty(size, dtype=torch.uint8, device=value.device)
        size = kept(steps * batch, value.element_size(), dropout)
        reserve = torch.empty(size, dtype=torch.uint8, device=value.device)
        del workspace, ordered
        ctx.save_for_backward(value, out, reserve, *weights)
        ctx.shape = shape
        return out.transpose(0, 1) if shape.is_batch_first else out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        value, _, _, *weights = ctx.saved_tensors
        shape = ctx.shape
        ordered = shape.by_steps(value)
        grad = shape.by_steps(grad)
        steps, batch = ordered.shape[:2]
        made = torch.empty(ordered.shape, dtype=value.dtype, device=value.device)
        size = shape.workspace_bytes(steps, batch, value.element_size())
        workspace = torch.empty(size, dtype=torch.uint8, device=value.device)
        del workspace, ordered
        ordered = shape.by_steps(value)
        flat = torch.empty(sum(one.numel() for one in weights), dtype=weights[0].dtype, device=value.device)
        workspace = torch.empty(size, dtype=torch.uint8, device=value.device)
        del workspace, ordered
        grads = [part.view(one.shape) for part, one in zip(_parts(flat, weights), weights, strict=True)]
        return (made.transpose(0, 1) if shape.is_batch_first else made, None, None, None, *grads)


def _parts(flat: Tensor, weights: Sequence[Tensor]) -> Sequence[Tensor]:
    return torch.split(flat, [one.numel() for one in weights])


@torch.no_grad()
def flatten_weights(model: nn.Module) -> list[Tensor]:
    """cuDNN wants the weights of a module in one block: PyTorch copies them there once the module is on the GPU."""
    made = []
    for module in model.modules():
        weights = list(module.parameters(recurse=False)) if isinstance(module, nn.RNNBase) else []
        is_alike = len({(one.dtype, one.device) for one in weights}) == 1
        if not is_alike or len({one.untyped_storage()._cdata for one in weights}) == 1:
            continue
        flat = torch.empty(sum(one.numel() for one in weights), dtype=weights[0].dtype, device=weights[0].device)
        for part, one in zip(_parts(flat, weights), weights, strict=True):
            one.data = part.view(one.shape)
        made.append(flat)
    return made
