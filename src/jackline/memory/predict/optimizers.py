"""What optimizers allocate: their state at the first step, and what they need during a step.

Owns those rules, one function for each algorithm. An update is imitated and not run: the fused AdamW refuses the meta
device, and the stock ones import PyTorch's compiler, a second of CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from jackline.memory.plan.model_settings import Algorithm
from jackline.memory.predict.job import StepOptions

# bitsandbytes: states of 8 bits have one float32 scale a block; small weights keep states of 32 bits.
_BLOCK_8BIT = 256
_LEAST_8BIT = 4096
# Paged states live in memory that the driver moves between host and GPU; PyTorch's allocator does not see them.
_LEAST_PAGED = 100_000


class MetaOptimizer:
    """With bf16 weights there may be a float32 master copy. Gradients are then widened for the update and the bf16
    ones dropped."""

    def __init__(self, weights: list[nn.Parameter], options: StepOptions) -> None:
        self._weights, self._options = weights, options
        has_master = options.precision == "bf16-weights"
        self._masters = [torch.empty_like(weight, dtype=torch.float32) for weight in weights] if has_master else []
        self._state: list[Tensor] = []
        self._has_state = False

    def step(self) -> None:
        if not self._has_state:
            self._has_state = True
            for weight in self._weights:
                self._state += _STATES[self._options.algorithm](weight, self._dtype(weight), self._options)
        wide = []
        for weight in self._weights if self._masters else ():
            if weight.grad is not None:
                wide.append(weight.grad.to(torch.float32))
                weight.grad = None
        self._temporaries()

    def _dtype(self, weight: Tensor) -> torch.dtype:
        return torch.float32 if self._masters else weight.dtype

    def _temporaries(self) -> None:
        """The foreach AdamW needs the square roots of all second moments at once, the for-loop one those of a single
        weight, the fused one nothing."""
        algorithm, kind = self._options.algorithm, self._options.optimizer
        if algorithm == "adamw" and kind == "foreach":
            roots = [torch.empty_like(weight, dtype=torch.float32) for weight in self._weights]
            del roots
        elif algorithm in ("adafactor", "muon") or (algorithm == "adamw" and kind == "for-loop"):
            for weight in self._weights:
                held = [torch.empty(shape, dtype=dtype) for shape, dtype in _needed(algorithm, weight)]
                del held

    def state_tensors(self) -> Iterator[Tensor]:
        yield from self._masters
        yield from self._state


def _needed(algorithm: Algorithm, weight: Tensor) -> list[tuple[torch.Size | tuple[int, ...], torch.dtype]]:
    """The tensors that the update of one weight holds at once: shape and dtype."""
    shape, wide = weight.shape, torch.float32
    if algorithm == "adafactor":
        copies = 2 if weight.dtype == wide else 4  # of the gradient and of the weight, when they are bf16
        return [(shape, wide)] * copies
    if algorithm == "muon" and weight.dim() == 2:
        # The momentum with Nesterov's term, then three products of the orthogonalisation in bf16.
        short = min(shape)
        return [(shape, weight.dtype), *[(shape, torch.bfloat16)] * 2, *[((short, short), torch.bfloat16)] * 3]
    return [(shape, wide)]


def _adamw(weight: Tensor, dtype: torch.dtype, options: StepOptions) -> list[Tensor]:
    count = [torch.empty((), dtype=torch.float32)] if options.optimizer == "fused" else []  # the step, on the GPU
    return [*count, *(torch.empty_like(weight, dtype=dtype) for _ in range(2))]


def _adamw_8bit(weight: Tensor, dtype: torch.dtype, options: StepOptions) -> list[Tensor]:
    if weight.numel() < _LEAST_8BIT:
        return [torch.empty_like(weight, dtype=torch.float32) for _ in range(2)]
    blocks = -(-weight.numel() // _BLOCK_8BIT)
    states = [torch.empty_like(weight, dtype=torch.uint8) for _ in range(2)]
    return [*states, *(torch.empty(blocks, dtype=torch.float32) for _ in range(2))]


def _paged_8bit(weight: Tensor, dtype: torch.dtype, options: StepOptions) -> list[Tensor]:
    return [] if weight.numel() >= _LEAST_PAGED else _adamw_8bit(weight, dtype, options)


def _adafactor(weight: Tensor, dtype: torch.dtype, options: StepOptions) -> list[Tensor]:
    if weight.dim() < 2:
        return [torch.empty_like(weight, dtype=torch.float32)]
    rows, columns = weight.shape[:-1], (*weight.shape[:-2], weight.shape[-1])
    return [torch.empty(rows, dtype=torch.float32), torch.empty(columns, dtype=torch.float32)]


def _one_buffer(weight: Tensor, dtype: torch.dtype, options: StepOptions) -> list[Tensor]:
    return [torch.empty_like(weight, dtype=dtype)]


def _muon(weight: Tensor, dtype: torch.dtype, options: StepOptions) -> list[Tensor]:
    return _one_buffer(weight, dtype, options) if weight.dim() == 2 else _adamw(weight, dtype, options)


_STATES: dict[Algorithm, Callable[[Tensor, torch.dtype, StepOptions], list[Tensor]]] = {
    "adamw": _adamw,
    "adamw8bit": _adamw_8bit,
    "paged-adamw8bit": _paged_8bit,
    "adafactor": _adafactor,
    "muon": _muon,
    "sgd": _one_buffer,
    "lion": _one_buffer,
}
