"""The GPU that a traced program asks about: `torch.cuda.is_available()`, `.cuda()`, `device="cuda"`.

Most training code chooses its device by the first of these. Without an answer it would choose the CPU, where nothing
is traced, or end with an error. So while a person's own code is built and traced, PyTorch says that the planned GPU
is here, and what goes to it goes to the meta device.

Owns those answers and the change of devices. Not covered: streams and events, and packages that ask the driver.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from jackline import accelerator
from jackline.memory.plan.gpus import GpuModel

_META = torch.device("meta")
# What only has an effect on the GPU itself, or says how much of it is used.
_IDLE = (
    "synchronize empty_cache reset_peak_memory_stats reset_accumulated_memory_stats set_device ipc_collect init"
    " _lazy_init manual_seed manual_seed_all seed seed_all set_per_process_memory_fraction"
)
_COUNTERS = "memory_allocated max_memory_allocated memory_reserved max_memory_reserved current_device"


@contextlib.contextmanager
def imagined_gpu(gpu: GpuModel) -> Iterator[None]:
    """PyTorch answers as on a machine with this GPU. Enter it after `torch.device("meta")`."""
    asked = accelerator.backend()
    answers = _answers(gpu)
    kept = {name: getattr(asked, name) for name in answers if hasattr(asked, name)}
    vendor = accelerator.device_type()
    try:
        for name in kept:
            setattr(asked, name, answers[name])
        with _ToMeta(vendor):
            yield
    finally:
        for name, answer in kept.items():
            setattr(asked, name, answer)


def _answers(gpu: GpuModel) -> dict[str, Callable[..., Any]]:
    major, minor = divmod(gpu.compute_capability, 10)
    properties = SimpleNamespace(
        name=gpu.name,
        major=major,
        minor=minor,
        total_memory=gpu.usable_bytes,
        multi_processor_count=gpu.num_multiprocessors,
    )
    return {
        **{name: _always(None) for name in _IDLE.split()},
        **{name: _always(0) for name in _COUNTERS.split()},
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "is_bf16_supported": lambda *_, **__: gpu.has_bf16,
        "device_count": lambda: 1,
        "get_device_name": lambda *_: gpu.name,
        "get_device_capability": lambda *_: (major, minor),
        "get_device_properties": lambda *_: properties,
        "mem_get_info": lambda *_: (gpu.usable_bytes, gpu.usable_bytes),
        "device": lambda *_: contextlib.nullcontext(),
    }


def _always(answer: int | None) -> Callable[..., int | None]:
    """A function of its own for each name: torch's compiler, if it is imported now, wants to tell them apart."""
    return lambda *_, **__: answer


class _ToMeta(TorchFunctionMode):
    """What is made on the GPU or moved there is on the meta device. `vendor` is what PyTorch calls it: 'cuda'."""

    def __init__(self, vendor: str) -> None:
        super().__init__()
        self._vendor = vendor
        self._is_there = getattr(Tensor, f"is_{vendor}").__get__

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if kwargs.get("device") is not None and self._is_gpu(kwargs["device"]):
            kwargs = {**kwargs, "device": _META}
        if name == self._vendor and args and isinstance(args[0], Tensor):
            return _moved(args[0])
        if name == "to" and len(args) > 1 and self._is_gpu(args[1]):
            args = (args[0], _META, *args[2:])
        if name == "pin_memory" and args and isinstance(args[0], Tensor):
            return args[0]
        if name == "__get__" and func == self._is_there:
            return args[0].is_meta
        return func(*args, **kwargs)

    def _is_gpu(self, device: Any) -> bool:
        if isinstance(device, torch.device):
            return device.type == self._vendor
        if isinstance(device, str):
            return device.partition(":")[0] == self._vendor
        return isinstance(device, int) and not isinstance(device, bool)


def _moved(value: Tensor) -> Tensor:
    return value if value.is_meta else value.to(_META)
