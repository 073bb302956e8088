"""What the GPUs of this machine say: memory, utilisation, power, and who uses them. The same for every vendor.

Owns that a reading never hangs: a GPU that fell off the bus makes its driver hang for ever, so every question is
asked in a thread of its own and given up after a deadline. What a driver is asked is in `vendors/`.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import pkgutil
import threading
from collections.abc import Callable
from functools import cache
from typing import Protocol, cast

from jackline.machine.gpu import vendors
from jackline.machine.readings import GpuReading

Ask = Callable[[], tuple[GpuReading, ...]]


class Vendor(Protocol):
    """What a module in `vendors/` has."""

    DEVICE_FILES: tuple[str, ...]

    def find_source(self) -> str: ...

    def open_reader(self) -> Ask | None: ...


@cache
def known_vendors() -> tuple[Vendor, ...]:
    names = sorted(module.name for module in pkgutil.iter_modules(vendors.__path__))
    return tuple(cast(Vendor, importlib.import_module(f"{vendors.__name__}.{name}")) for name in names)


def _present_vendors() -> list[Vendor]:
    """Those with a device file, 5 us: a machine without a driver never pays for more."""
    return [vendor for vendor in known_vendors() if any(os.path.exists(path) for path in vendor.DEVICE_FILES)]


class _Reader:
    """What is remembered between calls: that there is no GPU, the opened drivers, a question that hangs."""

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
        # A driver may fail in any way; a reading is never worth an exception in the supervisor.
        with contextlib.suppress(Exception):
            if self.asks is None:
                opened = [vendor.open_reader() for vendor in _present_vendors()]
                self.asks = [ask for ask in opened if ask is not None]
            answers.append(tuple(reading for ask in self.asks for reading in ask()))


_reader = _Reader()


def read_gpus(deadline_s: float = 1.0) -> tuple[GpuReading, ...]:
    """Every GPU; () without one or when a driver does not answer in time. 0.2 ms a GPU with NVML."""
    if not has_device_file():
        return ()
    return _reader.read(deadline_s)


def card_names() -> list[str]:
    return [card.name for card in read_gpus()]


def card_sizes() -> list[int]:
    """The whole memory of each, in bytes; 0 where the driver does not say."""
    return [card.total_bytes for card in read_gpus()]


def is_hanging() -> bool:
    """The driver did not answer the last question and still does not."""
    return _reader.hanging is not None and _reader.hanging.is_alive()


def has_device_file() -> bool:
    return bool(_present_vendors())


def find_source() -> str:
    """Which ways of reading are available, '' without a GPU: 'NVML', 'nvidia-smi'."""
    return ", ".join(filter(None, (vendor.find_source() for vendor in _present_vendors())))
