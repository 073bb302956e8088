"""What a result's bits depend on besides the state: versions, device, threads, flags.

Recorded in every checkpoint and compared at resume. So a run that cannot be bit-exact reports that, and why.
"""

from __future__ import annotations

import os
from typing import Any

import torch

from jackline import accelerator

_VARIABLES = ("CUBLAS_WORKSPACE_CONFIG", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "NVIDIA_TF32_OVERRIDE", "WORLD_SIZE")


def describe_environment() -> dict[str, Any]:
    """Plain values only. Cheap: nothing here synchronises with the device."""
    found: dict[str, Any] = {
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "matmul_precision": torch.get_float32_matmul_precision(),
    }
    for name in _VARIABLES:
        if name in os.environ:
            found[name] = os.environ[name]
    if accelerator.is_open():
        found |= {
            "gpu": accelerator.name(),
            "gpus": accelerator.count(),
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]
            "cudnn_benchmark": torch.backends.cudnn.benchmark,
            "tf32": torch.backends.cuda.matmul.allow_tf32,
        }
    return found


def compare_environment(saved: Any, now: dict[str, Any]) -> tuple[str, ...]:
    """'threads: 8 -> 4' for everything that differs; empty when the checkpoint has no record."""
    if not isinstance(saved, dict):
        return ()
    names = sorted(set(saved) | set(now))
    return tuple(
        f"{name}: {saved.get(name, '(not set)')} -> {now.get(name, '(not set)')}"
        for name in names
        if saved.get(name) != now.get(name)
    )
