"""Every RNG state in the process: reading it and restoring it.

Owns Python's, numpy's and torch's global generators, all CUDA devices, and single generator objects. States are plain
bytes and numbers, so they fit into state.json.
"""

from __future__ import annotations

import random
import struct
import sys
from typing import Any

import torch

from jackline import accelerator

_WORDS = struct.Struct("<625I")


class ProcessRandom:
    """All global generators, as one entry of the state, e.g. {"random": ProcessRandom()}.

    Restored last of all, and once more by `reapply` after the data iterators were made: making one draws a number.
    """

    def __init__(self) -> None:
        self.restored: dict[str, Any] | None = None
        self.held: dict[str, Any] | None = None  # an earlier `state_dict()`, to be saved instead of the current one

    def state_dict(self) -> dict[str, Any]:
        if self.held is not None:
            return self.held
        state: dict[str, Any] = {"python": pack_python(random.getstate()), "torch": _bytes(torch.get_rng_state())}
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            state["numpy"] = pack_numpy(numpy.random.get_state(legacy=False))
        if accelerator.is_open():
            state["cuda"] = [_bytes(one) for one in accelerator.rng_states()]
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.restored = state
        self.reapply()

    def reapply(self) -> None:
        """Restore the RNG states again. Does nothing when nothing was restored."""
        state = self.restored
        if state is None:
            return
        random.setstate(unpack_python(state["python"]))
        torch.set_rng_state(_tensor(state["torch"]))
        if "numpy" in state:
            import numpy

            numpy.random.set_state(unpack_numpy(state["numpy"]))
        for device, saved in enumerate(state.get("cuda", ())):
            if device < accelerator.count():
                accelerator.set_rng_state(_tensor(saved), device)


def read_generator(generator: torch.Generator) -> bytes:
    return _bytes(generator.get_state())


def write_generator(generator: torch.Generator, state: bytes) -> None:
    generator.set_state(_tensor(state))


def pack_python(state: tuple[Any, ...]) -> dict[str, Any]:
    version, words, gauss = state
    return {"version": version, "words": _WORDS.pack(*words), "gauss": gauss}


def unpack_python(state: dict[str, Any]) -> tuple[Any, ...]:
    return (state["version"], _WORDS.unpack(state["words"]), state["gauss"])


def pack_numpy(state: dict[str, Any]) -> dict[str, Any]:
    """A bit generator's state; its arrays (the Mersenne twister has one) become bytes with their dtype."""
    return {key: _pack_value(value) for key, value in state.items()}


def unpack_numpy(state: dict[str, Any]) -> dict[str, Any]:
    return {key: _unpack_value(value) for key, value in state.items()}


def _pack_value(value: Any) -> Any:
    if isinstance(value, dict):
        return pack_numpy(value)
    if hasattr(value, "tobytes") and hasattr(value, "dtype"):
        return {"array": value.tobytes(), "dtype": str(value.dtype)} if value.ndim else value.item()
    return value


def _unpack_value(value: Any) -> Any:
    if isinstance(value, dict) and set(value) == {"array", "dtype"}:
        import numpy

        return numpy.frombuffer(value["array"], dtype=numpy.dtype(str(value["dtype"]))).copy()
    return unpack_numpy(value) if isinstance(value, dict) else value


def _bytes(state: torch.Tensor) -> bytes:
    return state.cpu().numpy().tobytes()


def _tensor(state: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)
