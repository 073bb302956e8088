"""`exact=True`: the same bits on the same GPU. Deterministic kernels, no timing-dependent choice between kernels."""

from __future__ import annotations

import os

import torch

from jackline import accelerator
from jackline.session.metrics.reporting import say

_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


def make_exact() -> None:
    """Applies to the whole process.

    From now on an operation without a deterministic kernel raises and names itself.
    """
    if _WORKSPACE not in os.environ:
        if accelerator.is_open():
            say(f"exact=True: set {_WORKSPACE}=:4096:8 before CUDA is used, or matrix products may differ")
        os.environ[_WORKSPACE] = ":4096:8"
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True
    if accelerator.is_available():
        import torch._inductor.config as inductor

        inductor.max_autotune = False
        inductor.max_autotune_gemm = False
        inductor.max_autotune_pointwise = False
