"""Reads the GPUs of this machine: memory, utilisation, power, and which processes use them, for every vendor.

Owns that a reading never hangs: a GPU that fell off the bus makes its driver hang forever, so every query runs in a
thread of its own and is abandoned after a deadline. The queries of each driver are in `vendors/`.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import threading
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Protocol, cast

from jackline.machine.gpu import vendors
from jackline.machine.readings import GpuReading

Ask = Callable[[], tuple[GpuReading, ...]]


class Vendor(Protocol):
    """The interface of a module in `vendors/`."""

    DEVICE_FILES: tuple[str, ...]

    def find_source(self) -> str: ...

    def open_reader(self) -> Ask | None: ...


@cache
def known_vendors() -> tuple[Vendor, ...]:
    folder = Path(vendors.__path__[0])
    names = sorted(path.stem for path in folder.glob("*.py") if path.stem != "__init__")
    return tuple(cast(Vendor, importlib.import_module(f"{vendors.__name__}.{name}")) for name in names)


def _present_vendors() -> list[Vendor]:
    """Vendors with a device file. The check takes 5 us, and a machine without a driver never does more."""
    return [vendor for vendor in known_vendors() if any(os.path.exists(path) for path in vendor.DEVICE_FILES)]


class _Reader:
    """State kept between calls: that there is no GPU, the opened drivers, a query that hangs."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.asks: list[Ask] | None = None
        self.hanging: threading.Thread | None = None

    def read(self, deadline_s: float) -> tuple[GpuReading, ...]:
        with self.lock:
            if self.asks == [] or (self.hanging is not None and self.hanging.is_alive()):
                return ()
            answers: list[tuple[GpuReading, ...]] = []
            thread = threading.Thread(target=self._run, args=(answers,), name="jackline-gpu", daemon=True)
            thread.start()
            thread.join(deadline_s)
            self.hanging = thread if thread.is_alive() else None
            return answers[0] if answers else ()

    def _run(self, answers: list[tuple[GpuReading, ...]]) -> None:
        # A driver may fail in any way, and a failed reading must never raise in the supervisor.
        with contextlib.suppress(Exception):
            if self.asks is None:
                opened = [vendor.open_reader() for vendor in _present_vendors()]
                self.asks = [ask for ask in opened if ask is not None]
            answers.append(tuple(reading for ask in self.asks for reading in ask()))


_reader = _Reader()


def read_gpus(deadline_s: float = 1.0) -> tuple[GpuReading, ...]:
    """Every GPU; () without one or when a driver does not answer in time. Costs 0.2 ms per GPU with NVML."""
    if not has_device_file():
        return ()
    return _reader.read(deadline_s)


_USE_FILES = ("/dev/nvidia-uvm", "/dev/dxg", "/dev/kfd", "/dev/dri/render")
_USE_LIBRARIES = (b"libcuda.so", b"libamdhip64.so", b"libze_intel_gpu.so")
_LOOK_AGAIN_S = 10.0


class GpuUse:
    """Whether watched processes use the GPUs. Remembers those that do; the others are looked at again after a while.

    A driver lists its users, but hides them in many containers, or names them by numbers of another namespace. Then
    what the processes have open and loaded decides: a hung script must not be taken for working because a neighbour
    keeps the GPU busy.
    """

    def __init__(self) -> None:
        self._users: set[int] = set()
        self._looked_at_s: dict[int, float] = {}

    def mark(self, gpus: tuple[GpuReading, ...], pids: Collection[int], now_s: float) -> tuple[GpuReading, ...]:
        return tuple(replace(gpu, is_ours=self._is_used(gpu, pids, now_s)) for gpu in gpus)

    def _is_used(self, gpu: GpuReading, pids: Collection[int], now_s: float) -> bool:
        listed = {process.pid for process in gpu.processes}
        if listed & set(pids):
            return True
        if any(os.path.exists(f"/proc/{pid}") for pid in listed):
            return False  # the numbers are those of this namespace
        return any([self._has_gpu(pid, now_s) for pid in pids])

    def _has_gpu(self, pid: int, now_s: float) -> bool:
        if pid not in self._users and now_s - self._looked_at_s.get(pid, -_LOOK_AGAIN_S) >= _LOOK_AGAIN_S:
            self._looked_at_s[pid] = now_s
            if uses_a_gpu(pid):
                self._users.add(pid)
        return pid in self._users


def uses_a_gpu(pid: int) -> bool:
    """By its open files and loaded libraries; True where we may not look."""
    try:
        links = list(Path(f"/proc/{pid}/fd").iterdir())
        with open(f"/proc/{pid}/maps", "rb") as maps:
            if any(name in line for line in maps for name in _USE_LIBRARIES):
                return True
    except FileNotFoundError:
        return False
    except OSError:
        return True
    for link in links:
        with contextlib.suppress(OSError):
            if str(link.readlink()).startswith(_USE_FILES):
                return True
    return False


def gpu_names() -> list[str]:
    return [gpu.name for gpu in read_gpus()]


def gpu_sizes() -> list[int]:
    """The total memory of each GPU in bytes; 0 where the driver does not report it."""
    return [gpu.total_bytes for gpu in read_gpus()]


def is_hanging() -> bool:
    """Whether the driver has not answered the last query yet."""
    return _reader.hanging is not None and _reader.hanging.is_alive()


def has_device_file() -> bool:
    return bool(_present_vendors())


def find_source() -> str:
    """Which interfaces are available, such as 'NVML' or 'nvidia-smi'; '' without a GPU."""
    return ", ".join(filter(None, (vendor.find_source() for vendor in _present_vendors())))
