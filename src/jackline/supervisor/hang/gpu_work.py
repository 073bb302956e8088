"""Whether a GPU of the run really works, or only shows full use. Pure.

Owns the limits. Utilisation alone is no evidence: a hung kernel shows 100 %.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from jackline.machine.readings import GpuReading, TreeReading

GPU_MEMORY_PERCENT = 1
GPU_POWER_FACTOR = 1.2  # relative to the lowest power seen
# A GPU without a CUDA context draws less power than one with an idle context (an H200: 80 and 125 of 700 W). So by
# the lowest power seen alone, a spinning kernel would count as work.
GPU_POWER_SHARE = 0.25


def lowest_power(known: Mapping[int, float], gpus: tuple[GpuReading, ...]) -> dict[int, float]:
    lowest = dict(known)
    for gpu in gpus:
        if gpu.power_w is not None:
            lowest[gpu.index] = min(gpu.power_w, lowest.get(gpu.index, gpu.power_w))
    return lowest


def gpu_works(gpus: tuple[GpuReading, ...], tree: TreeReading, idle_power_w: Mapping[int, float]) -> bool:
    """Whether a GPU of ours really works. Utilisation is no evidence: a hung kernel shows 100 %."""
    return any(is_ours(gpu, tree) and _gpu_works(gpu, idle_power_w) for gpu in gpus)


def _gpu_works(gpu: GpuReading, idle_power_w: Mapping[int, float]) -> bool:
    cold_w = max(
        GPU_POWER_FACTOR * idle_power_w.get(gpu.index, math.inf), GPU_POWER_SHARE * (gpu.power_limit_w or 0.0)
    )
    is_hot = gpu.power_w is not None and gpu.power_w > cold_w
    return is_hot or (gpu.memory_utilisation_percent or 0) >= GPU_MEMORY_PERCENT


def is_ours(gpu: GpuReading, tree: TreeReading) -> bool:
    """Whether a process of the tree uses it. Many containers hide which process does; then it counts as ours."""
    pids = {process.pid for process in tree.processes}
    return not gpu.processes or any(process.pid in pids for process in gpu.processes)


def is_spinning(gpus: tuple[GpuReading, ...], tree: TreeReading, idle_power_w: Mapping[int, float]) -> bool:
    """Whether a GPU of ours shows full utilisation without using its memory or drawing power."""
    for gpu in gpus:
        is_full = (gpu.utilisation_percent or 0) >= 90 and gpu.memory_utilisation_percent == 0
        if is_full and gpu.power_w is not None and is_ours(gpu, tree) and not _gpu_works(gpu, idle_power_w):
            return True
    return False
