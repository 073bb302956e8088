"""Settings of PyTorch's CUDA allocator that Jackline makes by default. No torch at import.

Owns the environment variables, which must be set before torch is imported, and the memory cap. Some drivers (WSL,
Windows) spill into host memory when the GPU is full; the cap makes the allocation fail with an error instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

# torch 2.9 reads only the old name, later versions prefer the new one: both are always set to the same value.
from jackline import accelerator

NAMES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
_EXPANDABLE = "expandable_segments:True"
# Memory the driver and other libraries take after start: NCCL buffers, cuDNN plans, kernels loaded late.
_KEEP_FREE_SHARE = 0.01
_KEEP_FREE_BYTES = 128 * 2**20


def allocator_environment(environ: Mapping[str, str], *, is_wsl: bool | None = None) -> dict[str, str]:
    """The variables to add before torch is imported; {} when there is nothing to add. What the user set is kept.

    Expandable segments clash with max_split_size_mb and do not exist under WSL; in both cases they stay off.
    """
    asked = next((environ[name] for name in NAMES if environ.get(name)), "")
    if "max_split_size_mb" in asked or (_is_wsl() if is_wsl is None else is_wsl) or "expandable_segments" in asked:
        wanted = asked
    else:
        wanted = f"{asked},{_EXPANDABLE}" if asked else _EXPANDABLE
    return {name: wanted for name in NAMES if wanted and environ.get(name) != wanted}


def _is_wsl() -> bool:
    """Whether this is WSL, where the driver spills into host memory instead of failing."""
    try:
        return "microsoft" in Path("/proc/version").read_text().lower()
    except OSError:
        return False


def allocator_fraction(free_bytes: int, total_bytes: int) -> float:
    """The share of the GPU's total memory this process may take, given what is free now."""
    keep = max(_KEEP_FREE_BYTES, int(total_bytes * _KEEP_FREE_SHARE))
    return max(0.0, min(1.0, (free_bytes - keep) / total_bytes)) if total_bytes else 1.0


def cap_where_spilling() -> float | None:
    """Call `cap_allocator` where a full GPU would slow down instead of failing; elsewhere None, CUDA untouched."""
    return cap_allocator() if _is_wsl() else None


def cap_allocator() -> float | None:
    """Cap this process at what is free now; None without a GPU. Call it once, before the model is on the GPU."""
    if not accelerator.is_available():
        return None
    free_bytes, total_bytes = accelerator.memory_info()
    fraction = allocator_fraction(free_bytes + accelerator.reserved_bytes(), total_bytes)
    accelerator.limit_memory(fraction)
    return fraction
