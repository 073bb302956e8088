"""NVIDIA GPUs: NVML through the optional nvidia-ml-py and, without it, `nvidia-smi`.

Inside a container NVML reports pids of the host.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator
from typing import Any

from jackline.machine.host import find_program
from jackline.machine.readings import GpuProcess, GpuReading

DEVICE_FILES = ("/dev/nvidiactl", "/dev/dxg")
_MIB = 2**20
# NVML's reasons, the ones that mean 'slower than it could be'; idle and the user's own clock settings do not.
_SLOWDOWNS = {0x4: "power cap", 0x8: "slowed by the hardware", 0x20: "too hot", 0x40: "too hot", 0x80: "power brake"}
# Two starts of `nvidia-smi` take 0.05 s on an H200 and a second on a host of eight GPUs.
_SMI_EVERY_S = 5.0
# Query `free`, not `used`: what the driver keeps for itself (0.6 GiB of an H200) is in neither and is not available.
_GPU_FIELDS = "uuid,index,name,memory.total,memory.free,utilization.gpu,utilization.memory,power.draw,power.limit"


def find_source() -> str:
    """Which interface is available: 'NVML', 'nvidia-smi' or ''."""
    if _import_nvml() is not None:
        return "NVML"
    return "nvidia-smi" if find_program("nvidia-smi") else ""


def open_reader() -> Callable[[], tuple[GpuReading, ...]] | None:
    return _open_nvml() or _open_smi()


def _import_nvml() -> Any:
    try:
        import pynvml
    except Exception:  # a broken installation of the package counts as none
        return None
    return pynvml


def _open_nvml() -> Callable[[], tuple[GpuReading, ...]] | None:
    nvml = _import_nvml()
    if nvml is None:
        return None
    try:
        nvml.nvmlInit()
    except Exception:
        return None
    return lambda: tuple(_read_gpu(nvml, index) for index in range(nvml.nvmlDeviceGetCount()))


def _read_gpu(nvml: Any, index: int) -> GpuReading:
    gpu = nvml.nvmlDeviceGetHandleByIndex(index)
    name = _or_none(lambda: nvml.nvmlDeviceGetName(gpu)) or "unknown"
    memory = _or_none(lambda: nvml.nvmlDeviceGetMemoryInfo(gpu))
    rates = _or_none(lambda: nvml.nvmlDeviceGetUtilizationRates(gpu))
    milliwatts = _or_none(lambda: nvml.nvmlDeviceGetPowerUsage(gpu))
    limit_milliwatts = _or_none(lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(gpu))
    return GpuReading(
        index=index,
        name=name.decode("utf-8", "replace") if isinstance(name, bytes) else str(name),
        total_bytes=memory.total if memory else 0,
        used_bytes=memory.used if memory else 0,
        utilisation_percent=rates.gpu if rates else None,
        memory_utilisation_percent=rates.memory if rates else None,
        power_w=None if milliwatts is None else milliwatts / 1000,
        processes=tuple(_read_processes(nvml, gpu)),
        power_limit_w=None if limit_milliwatts is None else limit_milliwatts / 1000,
        clock_share=_or_none(lambda: _clock_share(nvml, gpu)),
        slowdown=_or_none(lambda: _slowdown(nvml, gpu)) or "",
    )


def _clock_share(nvml: Any, gpu: Any) -> float:
    now = nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM)
    share: float = now / nvml.nvmlDeviceGetMaxClockInfo(gpu, nvml.NVML_CLOCK_SM)
    return share


def _slowdown(nvml: Any, gpu: Any) -> str:
    reasons = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(gpu)
    return next((word for bit, word in _SLOWDOWNS.items() if reasons & bit), "")


def _or_none(ask: Callable[[], Any]) -> Any:
    """None on an error: some GPUs, drivers and MIG slices do not report every figure."""
    try:
        return ask()
    except Exception:
        return None


def _read_processes(nvml: Any, gpu: Any) -> Iterator[GpuProcess]:
    for process in _or_none(lambda: nvml.nvmlDeviceGetComputeRunningProcesses(gpu)) or ():
        yield GpuProcess(int(process.pid), process.usedGpuMemory)


def _open_smi() -> Callable[[], tuple[GpuReading, ...]] | None:
    program = find_program("nvidia-smi")
    if program is None:
        return None
    last: list[tuple[float, tuple[GpuReading, ...]]] = []

    def ask() -> tuple[GpuReading, ...]:
        if not last or time.monotonic() - last[0][0] > _SMI_EVERY_S:
            gpus = _run_smi(program, f"--query-gpu={_GPU_FIELDS}")
            users = _run_smi(program, "--query-compute-apps=gpu_uuid,pid,used_memory")
            last[:] = [(time.monotonic(), parse_smi(gpus, users))]
        return last[0][1]

    return ask


def _run_smi(program: str, query: str) -> str:
    # Runs in the thread that may hang: a process inside a dead driver does not exit even after SIGKILL.
    done = subprocess.run(
        [program, query, "--format=csv,noheader,nounits"],
        capture_output=True,
        text=True,
        errors="replace",
        timeout=10,
        stdin=subprocess.DEVNULL,
    )
    return done.stdout if done.returncode == 0 else ""


def parse_smi(gpus: str, users: str) -> tuple[GpuReading, ...]:
    """The two tables of `nvidia-smi --query-... --format=csv,noheader,nounits`; '[N/A]' where a value is unknown."""
    processes: dict[str, list[GpuProcess]] = {}
    for row in _rows(users, 3):
        if row[1].isdigit():
            used = _number(row[2])
            processes.setdefault(row[0], []).append(
                GpuProcess(int(row[1]), None if used is None else int(used * _MIB))
            )
    return tuple(
        GpuReading(
            index=int(_number(row[1]) or 0),
            name=row[2],
            total_bytes=int((_number(row[3]) or 0) * _MIB),
            used_bytes=_used_bytes(row[3], row[4]),
            utilisation_percent=_percent(row[5]),
            memory_utilisation_percent=_percent(row[6]),
            power_w=_number(row[7]),
            processes=tuple(processes.get(row[0], ())),
            power_limit_w=_number(row[8]),
        )
        for row in _rows(gpus, 9)
    )


def _rows(table: str, columns: int) -> Iterator[list[str]]:
    for line in table.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) == columns:
            yield cells


def _number(cell: str) -> float | None:
    try:
        return float(cell)
    except ValueError:
        return None


def _used_bytes(total: str, free: str) -> int:
    total_mib, free_mib = _number(total), _number(free)
    return 0 if total_mib is None or free_mib is None else int((total_mib - free_mib) * _MIB)


def _percent(cell: str) -> int | None:
    number = _number(cell)
    return None if number is None else int(number)
