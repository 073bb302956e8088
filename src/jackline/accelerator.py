"""The device that trains: the one place that knows what torch calls a vendor's devices.

NVIDIA's and AMD's (ROCm) are `torch.cuda`, Intel's are `torch.xpu`; tried on NVIDIA only. Owns questions about the
device, its memory, streams, events and RNG states. Does not own watching devices from outside (machine/gpu) nor
kernels written for one vendor. Importing it does not import torch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every device


@functools.cache
def backend() -> Any:
    """The module of torch for the devices that this build of torch can use; `torch.cuda` where it can use none."""
    import torch

    current = getattr(getattr(torch, "accelerator", None), "current_accelerator", lambda: None)()
    return torch.get_device_module(current) if current is not None else torch.cuda


def device_type() -> str:
    """What `tensor.to(...)` calls such a device: 'cuda', 'xpu'."""
    return str(backend().__name__).removeprefix("torch.")


def is_gpu(device: torch.device | str) -> bool:
    kind = device.partition(":")[0] if isinstance(device, str) else device.type
    return kind not in ("cpu", "meta")


def is_on_gpu(tensor: Tensor) -> bool:
    return not (tensor.is_cpu or tensor.is_meta)


def is_available() -> bool:
    return bool(backend().is_available())


def is_open() -> bool:
    """Whether this process has used such a device: questions before that would open it, which takes seconds."""
    return bool(backend().is_initialized()) and is_available()


def choose() -> torch.device:
    import torch

    return torch.device(device_type() if is_available() else "cpu")


def name(device: torch.device | None = None) -> str:
    return str(backend().get_device_name(device))


def count() -> int:
    return int(backend().device_count())


def capability(device: torch.device) -> tuple[int, int]:
    """NVIDIA's compute capability; AMD's architectures have numbers of the same form."""
    major, minor = backend().get_device_capability(device)
    return int(major), int(minor)


# -- memory ----------------------------------------------------------------------------------------------------------


def memory_info(device: torch.device | None = None) -> tuple[int, int]:
    """(free, total) bytes as the driver counts them, other processes included."""
    free_bytes, total_bytes = backend().mem_get_info(device)
    return int(free_bytes), int(total_bytes)


def free_bytes(device: torch.device | None = None) -> int:
    """What this process can still take: what is free, and at most what a limit on its allocator leaves."""
    free, total = memory_info(device)
    return min(free, max(0, int(total * _share(device)) - reserved_bytes(device)))


def is_limited(device: torch.device | None = None) -> bool:
    """Whether somebody set a limit on this process's allocator."""
    return _share(device) < 1.0


def _share(device: torch.device | None) -> float:
    share_of = getattr(backend(), "get_per_process_memory_fraction", None)
    return 1.0 if share_of is None else float(share_of(device))


def total_bytes(device: torch.device | int | None = None) -> int:
    return int(backend().get_device_properties(device).total_memory)


def allocated_bytes() -> int:
    return int(backend().memory_allocated())


def reserved_bytes(device: torch.device | None = None) -> int:
    return int(backend().memory_reserved(device))


def peak_allocated_bytes() -> int:
    return int(backend().max_memory_allocated())


def peak_reserved_bytes(device: torch.device | None = None) -> int:
    return int(backend().max_memory_reserved(device))


def reset_peaks() -> None:
    backend().reset_peak_memory_stats()


def empty_cache() -> None:
    backend().empty_cache()


def num_allocator_retries() -> int:
    """How often the caching allocator had to give its memory back to the driver and ask again."""
    return int(backend().memory_stats().get("num_alloc_retries", 0))


def limit_memory(fraction: float) -> None:
    """Let the allocator take at most this share of the device's memory."""
    backend().set_per_process_memory_fraction(fraction)


def pin_memory(address: int, size_bytes: int) -> bool:
    """Pin host memory that torch did not allocate. False where that cannot be done."""
    if device_type() != "cuda":
        return False
    cudart = backend().cudart()
    return int(cudart.cudaHostRegister(address, size_bytes, _PORTABLE)) == 0


def unpin_memory(address: int) -> None:
    backend().cudart().cudaHostUnregister(address)


# -- streams and events ----------------------------------------------------------------------------------------------


def synchronize(device: torch.device | None = None) -> None:
    backend().synchronize(device)


def use(device: torch.device) -> None:
    """Make it this process's own, where it is a GPU: one of several ranks on a machine."""
    if is_gpu(device):
        backend().set_device(device)


def current_device() -> torch.device:
    import torch

    return torch.device(device_type(), backend().current_device())


def current_stream(device: torch.device | int) -> Any:
    return backend().current_stream(device)


def new_stream(device: torch.device) -> Any:
    return backend().Stream(device)


def new_event(*, is_blocking: bool = False) -> Any:
    """`is_blocking`: who waits for it sleeps instead of spinning, where the device can do that."""
    return backend().Event(blocking=True) if is_blocking and device_type() == "cuda" else backend().Event()


def record(work: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor] | None:
    """`work` recorded once: calling the first of the result repeats it without the cost of starting each kernel, into
    the same tensor. None where the device cannot record. `work` must use the same tensors each time."""
    kernels = backend()
    if not hasattr(kernels, "CUDAGraph"):
        return None
    side, here = kernels.Stream(), kernels.current_stream()
    side.wait_stream(here)
    with kernels.stream(side):
        for _ in range(2):  # libraries choose their kernels before they are recorded
            work()
    here.wait_stream(side)
    graph = kernels.CUDAGraph()
    with kernels.graph(graph):
        result = work()
    return graph.replay, result


# -- random generators -----------------------------------------------------------------------------------------------


def rng_states() -> list[Tensor]:
    """The state of each device's generator."""
    return [backend().get_rng_state(index) for index in range(count())]


def set_rng_state(state: Tensor, index: int) -> None:
    backend().set_rng_state(state, index)


def rng_offsets() -> tuple[int, ...]:
    """How much was drawn on each device so far. Does not make the device wait."""
    return tuple(generator.get_offset() for generator in backend().default_generators) if is_open() else ()
