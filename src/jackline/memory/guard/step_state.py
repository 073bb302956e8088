"""The state that a step changes before its update: saved at its start, restored when the step must be repeated.

Owns the RNG states, the gradient scaler and the buffers that a forward pass writes to (BatchNorm's running
statistics and similar ones). Weights and optimizer are not here: nothing changes them before the update. Also tells
what can be seen of a compiled model from outside: private names of torch, where a version lacks one, give no answer.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from jackline import accelerator

_STATISTICS = (".running_mean", ".running_var", ".num_batches_tracked")
_SCALER_TENSORS = ("_scale", "_growth_tracker")
# Copies larger than this are kept in host memory, so that the copies themselves cannot run the GPU out of memory.
_MAX_ON_DEVICE_BYTES = 64 * 2**20


@dataclass(frozen=True)
class Generators:
    """The state of every RNG a step may draw from. Saving it takes about 50 us."""

    torch_cpu: Tensor
    torch_gpu: tuple[Tensor, ...]
    python: object
    numpy: Any

    @classmethod
    def take(cls) -> Generators:
        numpy = sys.modules.get("numpy")
        is_on_gpu = accelerator.is_open()
        return cls(
            torch.get_rng_state(),
            tuple(accelerator.rng_states()) if is_on_gpu else (),
            random.getstate(),
            numpy.random.get_state() if numpy is not None else None,
        )

    def put_back(self) -> None:
        torch.set_rng_state(self.torch_cpu)
        for index, state in enumerate(self.torch_gpu):
            accelerator.set_rng_state(state, index)
        random.setstate(self.python)  # type: ignore[arg-type]
        if self.numpy is not None:
            sys.modules["numpy"].random.set_state(self.numpy)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """What is drawn inside depends on `seed` alone, and leaves no trace outside."""
    before = Generators.take()
    torch.manual_seed(seed)
    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed & 0xFFFFFFFF)
    try:
        yield
    finally:
        before.put_back()


@contextmanager
def nothing_changed(modules: Sequence[nn.Module]) -> Iterator[None]:
    """What is drawn and written to buffers inside leaves no trace outside."""
    generators = Generators.take()
    with torch.no_grad():
        kept = [(buffer, buffer.clone()) for module in modules for buffer in module.buffers()]
    try:
        yield
    finally:
        generators.put_back()
        with torch.no_grad():
            for buffer, copy in kept:
                buffer.copy_(copy)


class Buffers:
    """The buffers that forward passes write to. All buffers are copied until the first step is over; from then on
    only those that were seen to change."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = modules
        self._written: set[str] | None = None
        self._versions: dict[str, int] = {}
        self._copies: dict[str, Tensor] = {}

    def _named(self) -> Iterator[tuple[str, Tensor]]:
        for number, module in enumerate(self._modules):
            yield from ((f"{number}.{name}", buffer) for name, buffer in module.named_buffers())

    @torch.no_grad()
    def take(self) -> None:
        self._versions = {name: buffer._version for name, buffer in self._named()}
        wanted = [(name, b) for name, b in self._named() if self._is_wanted(name)]
        is_large = sum(b.numel() * b.element_size() for _, b in wanted) > _MAX_ON_DEVICE_BYTES
        self._copies = {name: b.to("cpu", copy=True) if is_large else b.clone() for name, b in wanted}

    def _is_wanted(self, name: str) -> bool:
        return self._written is None or name in self._written or name.endswith(_STATISTICS)

    def _moved(self) -> set[str]:
        return {name for name, buffer in self._named() if buffer._version != self._versions.get(name)}

    @torch.no_grad()
    def put_back(self) -> tuple[str, ...]:
        """Restore the copies. Returns the names of buffers that were written to but not copied: those cannot be
        restored."""
        lost = self._moved() - set(self._copies)
        for name, buffer in self._named():
            if name in self._copies:
                buffer.copy_(self._copies[name])
        self._versions = {name: buffer._version for name, buffer in self._named()}
        return tuple(sorted(lost))

    @torch.no_grad()
    def learn(self) -> None:
        """The step is over: remember which buffers it wrote to, and drop the copies. Values are compared once, after
        the first step, because BatchNorm writes its statistics without raising their version counter."""
        written = self._moved()
        if self._written is None:
            written |= {name for name, b in self._named() if not torch.equal(self._copies[name].to(b.device), b)}
        self._written = (self._written or set()) | written
        self._copies = {}


class Scaler:
    """A GradScaler's own tensors. It does not use `state_dict()`, which would wait for the GPU at every step."""

    def __init__(self, scaler: Any) -> None:
        self._scaler = scaler
        self._copies = {
            name: value.clone()
            for name in _SCALER_TENSORS
            if isinstance(value := getattr(scaler, name, None), Tensor)
        }

    def put_back(self) -> None:
        for name, copy in self._copies.items():
            value = getattr(self._scaler, name, None)
            if isinstance(value, Tensor):
                value.copy_(copy)


def _contexts(model: nn.Module) -> Iterator[tuple[Any, bool]]:
    """(compiler configuration, is dynamic) of every compiled module in `model`."""
    for module in model.modules():
        context = getattr(module, "dynamo_ctx", None)
        if context is not None:
            yield getattr(context, "compiler_config", None), getattr(context, "_dynamic", None) is True
        call = getattr(module, "_compiled_call_impl", None)
        if call is not None:
            read = getattr(call, "get_compiler_config", None)
            yield (read() if callable(read) else None), False


def uses_cuda_graphs(model: nn.Module) -> bool:
    for config, _ in _contexts(model):
        if isinstance(config, dict) and "triton.cudagraphs" in config:
            if config["triton.cudagraphs"]:
                return True
        elif _default_has_graphs():
            return True
    return False


def _default_has_graphs() -> bool:
    config = sys.modules.get("torch._inductor.config")
    return bool(getattr(getattr(config, "triton", None), "cudagraphs", False))


def is_compiled_static(model: nn.Module) -> bool:
    """Whether a new batch size will be compiled before it runs."""
    return any(not is_dynamic for _, is_dynamic in _contexts(model))
