"""The GPUs people train on: how much memory of each is usable, and what it can do. No torch.

Owns the parsing of `--gpu`. What the driver reports about a GPU of this machine (`detect_gpu`) takes precedence over
the table, which is in `gpu_table`.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, replace
from typing import Literal

from jackline.errors import UsageError
from jackline.machine.gpu.watch import read_gpus
from jackline.memory.plan.gpu_table import ROWS, SHORT_NAMES, Row

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
class Rates:
    """What the manufacturer promises: TFLOP/s of dense products, and GB/s of memory. The defaults are an A100's."""

    half: float = 312.0
    tf32: float = 156.0
    single: float = 19.5
    bandwidth: float = 1555.0


@dataclass(frozen=True)
class GpuModel:
    """One GPU model."""

    name: str
    usable_bytes: int
    compute_capability: int  # 80 for 8.0
    context_bytes: int
    is_assumed: bool = False  # the user gave a memory size, not a GPU
    num_multiprocessors: int = 108
    rates: Rates = Rates()
    count: int = 1  # how many of them train together
    is_amd: bool = False
    start_factor: float = 1.0  # how much longer Python needs here to start an operator than usual

    @property
    def has_bf16(self) -> bool:
        return self.compute_capability >= 80

    @property
    def has_flash_attention(self) -> bool:
        return self.compute_capability >= 80

    @property
    def has_cudnn_attention(self) -> bool:
        """PyTorch prefers cuDNN's attention on Hopper and data-centre Blackwell, elsewhere its own."""
        return self.compute_capability // 10 in (9, 10)

    @property
    def processors(self) -> Processors:
        return Processors(self.num_multiprocessors, _THREADS.get(self.compute_capability, 2048))

    @property
    def precision(self) -> Precision:
        return "bf16" if self.has_bf16 else "fp16"

    @property
    def workspace_bytes(self) -> int:
        """The cuBLAS workspace of each thread that multiplies matrices: the main thread and the backward thread."""
        return _WORKSPACE_HOPPER if self.compute_capability // 10 in (9, 10) else _WORKSPACE


def _gpu_model(row: Row) -> GpuModel:
    return GpuModel(
        row.name,
        int(row.usable_gib * GIB),
        row.compute_capability,
        int(row.context_gib * GIB),
        num_multiprocessors=row.processors,
        rates=Rates(row.half, row.tf32, row.single, row.bandwidth),
        is_amd=row.is_amd,
    )


GPU_MODELS: dict[str, GpuModel] = {row.name: _gpu_model(row) for row in ROWS}
_ASSUMED_CAPABILITY = 80
_ASSUMED_CONTEXT = int(0.6 * GIB)


def find_gpu(text: str) -> GpuModel:
    """'T4', 'a100-80', 'NVIDIA L4', '4090', two of them as 'T4 x2' or '2xT4', or a size in GiB: '15', '23.5GiB'. A
    bare size means a GPU with bf16."""
    name, count = _counted(text)
    found = _named(name)
    if found is not None:
        return replace(found, count=count) if count > 1 else found
    size = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:gib|gb|g)?", name.strip().lower())
    if size is not None and float(size[1]) > 0:
        usable = int(float(size[1]) * GIB)
        return GpuModel(f"{size[1]} GiB", usable, _ASSUMED_CAPABILITY, _ASSUMED_CONTEXT, is_assumed=True, count=count)
    near = difflib.get_close_matches(_letters(name), [_letters(known) for known in GPU_MODELS], n=1)
    also = f"did you mean {next(known for known in GPU_MODELS if _letters(known) == near[0])}? " if near else ""
    raise UsageError(
        f"there is no GPU '{text}' in the table",
        detail=("known GPUs: " + ", ".join(GPU_MODELS),),
        hint=f"{also}or give its memory in GiB: --gpu 15",
    )


_TIME = re.compile(r"(-?\d+(?:\.\d+)?)\s*(h|hrs?|hours?|d|days?|min|minutes?|w|weeks?)\b\.?", re.IGNORECASE)
_SECONDS = {"h": 3600, "d": 86400, "m": 60, "w": 7 * 86400}
_MOST_TIME_S = 10 * 365 * 86400


def find_gpu_and_time(text: str) -> tuple[str, float]:
    """'A100-80 x2, 24 h' -> ('A100-80 x2', 86400.0). Either may be missing: '' and 0."""
    gpus, seconds = [], 0.0
    for part in filter(None, (part.strip() for part in re.split(r"[,;]|\bfor\b|\bin\b", text))):
        time = re.fullmatch(_TIME, part)
        if time is None:
            gpus.append(part)
        elif seconds:
            raise UsageError(f"--fit '{text}' has two times", hint='one is enough: --fit "A100-80 x2, 24 h"')
        elif not 0 < float(time[1]) * _SECONDS[time[2][0].lower()] <= _MOST_TIME_S:
            raise UsageError(f"--fit '{text}': the time is above 0 and at most 10 years, not '{part}'")
        else:
            seconds = float(time[1]) * _SECONDS[time[2][0].lower()]
    if len(gpus) > 1:
        raise UsageError(
            f"--fit '{text}' has {len(gpus)} GPUs: {' and '.join(gpus)}",
            hint='one type at a time, several of it as "A100-80 x2", time as "24 h"',
        )
    if gpus:
        find_gpu(gpus[0])
    return (gpus[0] if gpus else ""), seconds


def _counted(text: str) -> tuple[str, int]:
    for pattern in (r"(?P<name>.*\S)\s*[x*]\s*(?P<count>\d{1,4})", r"(?P<count>\d{1,4})\s*[x*]\s*(?P<name>\S.*)"):
        found = re.fullmatch(pattern, text.strip(), flags=re.IGNORECASE)
        if found is not None and int(found["count"]) > 0 and _named(text) is None:
            return found["name"], int(found["count"])
    return text, 1


def _named(text: str) -> GpuModel | None:
    wanted = re.sub(r"gi?b$", "", _letters(text))
    for name, gpu in GPU_MODELS.items():
        if wanted in (_letters(name), _letters(name).removeprefix("rtx")):
            return gpu
    short = SHORT_NAMES.get(wanted, "")
    return GPU_MODELS.get(short)


def _letters(text: str) -> str:
    lower = re.sub(r"nvidia|tesla|geforce|amd|instinct|generation", "", text.lower())
    return re.sub(r"[^a-z0-9]", "", lower)


def match_gpu(name: str, total_bytes: int) -> GpuModel:
    """The table's entry for the driver's name ('NVIDIA A100-SXM4-80GB'), with the memory the driver reports."""
    wanted = _letters(name)
    starts = {gpu.name: _letters(gpu.name.split("-")[0]) for gpu in GPU_MODELS.values()}
    longest = max((len(start) for start in starts.values() if wanted.startswith(start)), default=0)
    near = [
        GPU_MODELS[known] for known, start in starts.items() if wanted.startswith(start) and len(start) == longest
    ]
    if not near:
        return GpuModel(name, total_bytes, _ASSUMED_CAPABILITY, _ASSUMED_CONTEXT, is_assumed=True)
    has_slot = "pcie" in wanted
    best = min(near, key=lambda gpu: (abs(gpu.usable_bytes - total_bytes), ("PCIe" in gpu.name) != has_slot))
    return replace(best, usable_bytes=total_bytes)


def detect_gpu() -> GpuModel | None:
    """The first GPU of this machine as the driver describes it; None without one."""
    gpus = read_gpus()
    return match_gpu(gpus[0].name, gpus[0].total_bytes) if gpus else None
