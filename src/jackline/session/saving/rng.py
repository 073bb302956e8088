"""The global generators of this process, watched, saved and restored: torch's, Python's and numpy's on the host.

There are three levels, because they are used at every batch: a mark tells whether anything was drawn (6 us), a full
copy can be restored exactly (120 us, most of it numpy's), seeding makes later draws depend only on a key.
Does not own what is saved in a checkpoint (checkpoint/state/rng.py).
"""

from __future__ import annotations

import contextlib
import ctypes
import random
import struct
from collections.abc import Collection, Iterator
from typing import Any

import numpy
import torch

SOURCES = ("torch", "python", "numpy")
_WORDS = struct.Struct("<i624I")
_HEAD_BYTES = object.__basicsize__


class RngState:
    """Stateless except for two addresses that were checked once."""

    def __init__(self) -> None:
        self._torch = torch.default_generator
        self._python: Any = getattr(random, "_inst", None)
        self._python_address = _find_python_state(self._python)
        self._numpy_generator: Any = None
        self._numpy_address = 0
        self._find_numpy_generator = numpy.random.mtrand.get_bit_generator

    def mark(self) -> dict[str, Any]:
        """What `changed` compares with.

        `go_back` can restore it, except for a second normal number that numpy has cached.
        """
        return {"torch": self._torch.get_state(), "python": self._mark_python(), "numpy": self._mark_numpy()}

    def changed(self, before: dict[str, Any]) -> set[str]:
        """The sources that were drawn from, or seeded, since `before`."""
        found = set()
        if not torch.equal(self._torch.get_state(), before["torch"]):
            found.add("torch")
        if self._mark_python() != before["python"]:
            found.add("python")
        if self._mark_numpy() != before["numpy"]:
            found.add("numpy")
        return found

    def go_back(self, mark: dict[str, Any], sources: Collection[str]) -> None:
        """Restore `sources` to their state at `mark`."""
        if "torch" in sources:
            self._torch.set_state(mark["torch"])
        if "python" in sources:
            state, gauss = mark["python"]
            random.setstate((3, state, gauss) if isinstance(state, tuple) else _unpack_python(state, gauss))
        if "numpy" in sources:
            state = mark["numpy"]
            if isinstance(state, bytes):  # a non-default bit generator can be watched, not restored
                numpy.random.set_state(_unpack_numpy(state))

    def copy(self, sources: Collection[str] = SOURCES) -> dict[str, Any]:
        """The complete state of `sources`."""
        found: dict[str, Any] = {}
        if "torch" in sources:
            found["torch"] = self._torch.get_state()
        if "python" in sources:
            found["python"] = random.getstate()
        if "numpy" in sources:
            found["numpy"] = numpy.random.get_state(legacy=False)
        return found

    def put_back(self, copy: dict[str, Any]) -> None:
        if "torch" in copy:
            self._torch.set_state(copy["torch"])
        if "python" in copy:
            random.setstate(copy["python"])
        if "numpy" in copy:
            numpy.random.set_state(copy["numpy"])

    def seed(self, key: int, sources: Collection[str] = SOURCES) -> None:
        """From here on `sources` depend only on `key`, a 64-bit number."""
        if "torch" in sources:
            self._torch.manual_seed(key >> 1)
        if "python" in sources:
            random.seed(key)
        if "numpy" in sources:
            numpy.random.seed((key ^ key >> 32) & 0xFFFFFFFF)

    @contextlib.contextmanager
    def set_aside(self) -> Iterator[None]:
        """Draws inside this block have no effect on the generators outside."""
        copy = self.copy()
        try:
            yield
        finally:
            self.put_back(copy)

    def _mark_python(self) -> tuple[Any, Any]:
        if self._python_address:
            return ctypes.string_at(self._python_address, _WORDS.size), self._python.gauss_next
        _, words, gauss = random.getstate()
        return words, gauss

    def _mark_numpy(self) -> Any:
        generator = self._find_numpy_generator()
        if generator is not self._numpy_generator:
            self._numpy_generator, self._numpy_address = generator, _find_numpy_state(generator)
        if self._numpy_address:
            return ctypes.string_at(self._numpy_address, _WORDS.size)
        return repr(numpy.random.get_state(legacy=False))


def _find_python_state(instance: Any) -> int:
    """The address of CPython's index and state words, after checking that it is right; otherwise 0.

    Reading the state there takes 0.7 us instead of 27.
    """
    if type(instance) is not random.Random:
        return 0
    probe = random.Random(1)
    for _ in range(3):
        probe.random()
        state = _unpack_python(ctypes.string_at(id(probe) + _HEAD_BYTES, _WORDS.size), None)
        if state != probe.getstate():
            return 0
    return id(instance) + _HEAD_BYTES


def _find_numpy_state(generator: Any) -> int:
    if type(generator).__name__ != "MT19937":
        return 0
    address = int(generator.ctypes.state_address)
    inner = generator.state["state"]
    found = _unpack_numpy(ctypes.string_at(address, _WORDS.size))["state"]
    return address if found["pos"] == inner["pos"] and bool((found["key"] == inner["key"]).all()) else 0


def _unpack_python(state: bytes, gauss: Any) -> tuple[Any, ...]:
    index, *words = _WORDS.unpack(state)
    return (3, (*words, index), gauss)


def _unpack_numpy(state: bytes) -> dict[str, Any]:
    key = numpy.frombuffer(state[:2496], dtype=numpy.uint32).copy()
    position = int.from_bytes(state[2496:2500], "little")
    return {"bit_generator": "MT19937", "state": {"key": key, "pos": position}, "has_gauss": 0, "gauss": 0.0}
