"""The GPUs people train on: how much memory of each is usable, and what it can do. No torch.

Owns the table and the parsing of `--gpu`. What the driver reports about a GPU of this machine (`detect_gpu`) takes
precedence over the table. Usable bytes are what `torch.cuda.get_device_properties` shows. Context is what the driver
takes in addition to torch's own figure: 0.76 GiB was measured on an H200, the others are estimates until a rehearsal
has measured them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Literal

from jackline.errors import UsageError
from jackline.machine.gpu.watch import read_gpus

GIB = 2**30
MIB = 2**20
Precision = Literal["fp32", "bf16", "fp16", "bf16-weights", "bf16-pure"]

# The workspace of cuBLAS: 32 MiB on Hopper (:4096:8), 8.1 MiB on older GPUs (:4096:2:16:8).
_WORKSPACE_HOPPER = 32 * MIB
_WORKSPACE = 8320 * 2**10


# How many threads a multiprocessor runs at once, by compute capability; 2048 for those not listed.
_THREADS = {75: 1024, 86: 1536, 89: 1536, 120: 1536}


@dataclass(frozen=True)
class Processors:
    """The properties of a GPU that decide how kernels divide their work."""

    count: int
    threads_each: int


@dataclass(frozen=True)
class GpuModel:
    """One GPU model."""

    name: str
    usable_bytes: int
    compute_capability: int  # 80 for 8.0
    context_bytes: int
    is_assumed: bool = False  # the user gave a memory size, not a GPU
    num_multiprocessors: int = 108

    @property
    def has_bf16(self) -> bool:
        return self.compute_capability >= 80

    @property
    def has_flash_attention(self) -> bool:
        return self.compute_capability >= 80

    @property
    def has_cudnn_attention(self) -> bool:
        """PyTorch prefers cuDNN's attention on Hopper; elsewhere it prefers its own where both exist."""
        return self.compute_capability // 10 == 9

    @property
    def processors(self) -> Processors:
        return Processors(self.num_multiprocessors, _THREADS.get(self.compute_capability, 2048))

    @property
    def precision(self) -> Precision:
        return "bf16" if self.has_bf16 else "fp16"

    @property
    def workspace_bytes(self) -> int:
        """The cuBLAS workspace of each thread that multiplies matrices: the main thread and the backward thread."""
        return _WORKSPACE_HOPPER if self.compute_capability // 10 == 9 else _WORKSPACE


def _gpu_model(
    name: str, usable_gib: float, compute_capability: int, context_gib: float, processors: int
) -> GpuModel:
    return GpuModel(
        name, int(usable_gib * GIB), compute_capability, int(context_gib * GIB), num_multiprocessors=processors
    )


GPU_MODELS: dict[str, GpuModel] = {
    gpu.name: gpu
    for gpu in (
        _gpu_model("T4", 14.56, 75, 0.45, 40),
        _gpu_model("P100", 15.88, 60, 0.45, 56),
        _gpu_model("V100-16", 15.77, 70, 0.45, 80),
        _gpu_model("V100-32", 31.73, 70, 0.45, 80),
        _gpu_model("L4", 22.03, 89, 0.5, 58),
        _gpu_model("A10G", 22.06, 86, 0.5, 80),
        _gpu_model("RTX4090", 23.52, 89, 0.5, 128),
        _gpu_model("L40S", 44.31, 89, 0.5, 142),
        _gpu_model("A100-40", 39.38, 80, 0.6, 108),
        _gpu_model("A100-80", 79.14, 80, 0.6, 108),
        _gpu_model("H100", 79.10, 90, 0.76, 132),
        _gpu_model("H200", 139.72, 90, 0.76, 132),
    )
}
_ASSUMED_CAPABILITY = 80
_ASSUMED_CONTEXT = int(0.6 * GIB)


def find_gpu(text: str) -> GpuModel:
    """'T4', 'a100-80', 'NVIDIA L4' or a size in GiB: '15', '23.5GiB'. A bare size means a GPU with bf16."""
    wanted = _letters(text)
    for name, gpu in GPU_MODELS.items():
        if _letters(name) == wanted:
            return gpu
    size = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:gib|gb|g)?", text.strip().lower())
    if size is not None and float(size[1]) > 0:
        usable = int(float(size[1]) * GIB)
        return GpuModel(f"{size[1]} GiB", usable, _ASSUMED_CAPABILITY, _ASSUMED_CONTEXT, is_assumed=True)
    raise UsageError(
        f"there is no GPU '{text}' in the table",
        detail=("known GPUs: " + ", ".join(GPU_MODELS),),
        hint="or give its memory in GiB: --gpu 15",
    )


def _letters(text: str) -> str:
    return re.sub(r"[^a-z0-9]", "", text.lower().replace("nvidia", "").replace("tesla", ""))


def match_gpu(name: str, total_bytes: int) -> GpuModel:
    """The table's entry for the driver's name ('NVIDIA A100-SXM4-80GB'), with the memory the driver reports."""
    wanted = _letters(name)
    near = [gpu for gpu in GPU_MODELS.values() if wanted.startswith(_letters(gpu.name.split("-")[0]))]
    if not near:
        return GpuModel(name, total_bytes, _ASSUMED_CAPABILITY, _ASSUMED_CONTEXT, is_assumed=True)
    best = min(near, key=lambda gpu: abs(gpu.usable_bytes - total_bytes))
    return replace(best, usable_bytes=total_bytes)


def detect_gpu() -> GpuModel | None:
    """The first GPU of this machine as the driver describes it; None without one."""
    gpus = read_gpus()
    return match_gpu(gpus[0].name, gpus[0].total_bytes) if gpus else None
