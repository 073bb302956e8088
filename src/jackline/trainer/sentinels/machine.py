"""What happens around the training, read when it became slow: other processes' CPU time, the GPU's clock and who
else is on it, the allocator, swap.

Owns the reading for `sentinel_speed`; decides nothing. 1-5 ms, with the driver's deadline as the upper end. Never
touches the device's stream, so nothing waits for a kernel.
"""

from __future__ import annotations

import contextlib
import os
import time
from typing import Any

from jackline import accelerator
from jackline.machine import procfs
from jackline.machine.gpu.watch import has_device_file, read_gpus
from jackline.machine.proc import read_command
from jackline.trainer.sentinels.facts import Surroundings

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
# NVML's reasons, the ones that mean 'slower than it could be'; idle and the user's own clock settings do not.
_SLOWDOWNS = {0x4: "power cap", 0x8: "slowed by the hardware", 0x20: "too hot", 0x40: "too hot", 0x80: "power brake"}


def read_surroundings() -> Surroundings:
    retries = _allocator_retries()
    return Surroundings(
        at_s=time.monotonic(),
        others_cpu_s=_others_cpu_s(),
        queued_s=_queued_s(),
        allocator_retries=retries,
        swapped_bytes=procfs.read_fields("/proc/self/status").get("VmSwap"),
        **(_gpu() if retries is not None else {}),
    )


def _others_cpu_s() -> float | None:
    words = (procfs.read_text("/proc/stat") or "").partition("\n")[0].split()
    if len(words) < 8 or words[0] != "cpu":
        return None
    # user, nice, system, irq, softirq; not idle and not waiting for the disk.
    busy = sum(int(words[at]) for at in (1, 2, 3, 6, 7)) * _TICK_S
    times = os.times()
    return busy - times.user - times.system


def _queued_s() -> float | None:
    """The second number of schedstat, of all threads: nanoseconds on a run queue."""
    total = 0
    for thread in procfs.list_numbers("/proc/self/task"):
        words = (procfs.read_text(f"/proc/self/task/{thread}/schedstat") or "").split()
        if len(words) < 2:
            return None
        total += int(words[1])
    return total / 1e9


def _allocator_retries() -> int | None:
    """None without a GPU in use."""

    if not accelerator.is_open():
        return None
    return accelerator.num_allocator_retries()


def _gpu() -> dict[str, Any]:
    if not has_device_file():
        return {}

    index = accelerator.current_device().index
    found: dict[str, Any] = {}
    gpus = read_gpus()
    if index < len(gpus):
        others = [process.pid for process in gpus[index].processes if process.pid != os.getpid()]
        # A pid that cannot be seen is the host's name for somebody, very likely for this process itself.
        seen = [(pid, read_command(pid)) for pid in others]
        found["gpu_others"] = tuple(f"pid {pid} ({command[:40]})" for pid, command in seen if command)
    with contextlib.suppress(Exception):
        import pynvml

        gpu = pynvml.nvmlDeviceGetHandleByIndex(index)
        now = pynvml.nvmlDeviceGetClockInfo(gpu, pynvml.NVML_CLOCK_SM)
        found["gpu_clock_share"] = now / pynvml.nvmlDeviceGetMaxClockInfo(gpu, pynvml.NVML_CLOCK_SM)
        reasons = pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(gpu)
        found["gpu_slowdown"] = next((word for bit, word in _SLOWDOWNS.items() if reasons & bit), "")
    return found
