"""Torch's dtypes and the dtypes of a safetensors file.

A dtype that the file format does not have is stored as another one with the same bits: complex numbers as pairs,
exotic floats as bytes. state.json keeps the true dtype. Nothing is ever rounded.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from jackline.checkpoint.format.tree import CannotSave

_STORED = {
    torch.bool: "BOOL", torch.uint8: "U8", torch.int8: "I8", torch.int16: "I16", torch.int32: "I32",
    torch.int64: "I64", torch.float16: "F16", torch.bfloat16: "BF16", torch.float32: "F32", torch.float64: "F64",
    torch.uint16: "U16", torch.uint32: "U32", torch.uint64: "U64",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip
STORED_AS_THEMSELVES = frozenset(_STORED)
_TORCH = {name: dtype for dtype, name in _STORED.items()}
PLAIN_TYPES = (Tensor, torch.nn.Parameter)
_PAIRS = {torch.complex32: "F16", torch.complex64: "F32", torch.complex128: "F64"}
_BITS = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}


def stored_dtype(dtype: torch.dtype) -> str:
    """The dtype's name in a safetensors header."""
    if dtype in _STORED:
        return _STORED[dtype]
    if dtype in _PAIRS:
        return _PAIRS[dtype]
    return _STORED[_BITS[dtype.itemsize]]


def stored_shape(tensor: Tensor) -> tuple[int, ...]:
    shape = tuple(tensor.shape)
    return (*shape, 2) if tensor.dtype in _PAIRS else shape


def as_stored(tensor: Tensor) -> Tensor:
    """The same bits with a dtype the file format has; shares memory unless a conjugation is pending."""
    if tensor.dtype in _STORED:
        return tensor
    if tensor.dtype in _PAIRS:
        return torch.view_as_real(tensor.resolve_conj())
    return tensor.view(_BITS[tensor.dtype.itemsize])


def torch_dtype(stored: str) -> torch.dtype:
    return _TORCH[stored]


def dtype_name(dtype: torch.dtype) -> str:
    """'float32' and not 'torch.float32'."""
    return str(dtype).removeprefix("torch.")


def parse_dtype(name: str) -> torch.dtype | None:
    """The reverse; None for a name torch does not have. The name is untrusted, so it is only looked up."""
    found = getattr(torch, name, None) if name.isidentifier() else None
    return found if isinstance(found, torch.dtype) else None


def require_storable(tensor: Tensor, where: str) -> None:
    """Refuse, by name, a tensor that has no plain bytes."""
    if type(tensor) in PLAIN_TYPES and tensor.layout is torch.strided and not (tensor.is_meta or tensor.is_quantized):
        return
    what = None
    if tensor.layout is not torch.strided:
        what = f"a tensor of layout {str(tensor.layout).removeprefix('torch.')}"
    elif tensor.is_meta:
        what = "a tensor on the meta device has no values"
    elif tensor.is_quantized:
        what = f"a quantized tensor ({dtype_name(tensor.dtype)})"
    elif hasattr(tensor, "device_mesh"):
        what = "a distributed tensor (DTensor)"
    if what is not None:
        raise CannotSave(f"{where} cannot be saved: {what}", hint="save its parts as dense tensors instead")


def plain_bytes(tensor: torch.Tensor) -> bytes:
    """The bytes of a tensor, in logical order. Not by `numpy()`: that would make the owner's storage unresizable."""
    plain = tensor.detach().cpu().contiguous()
    return ctypes.string_at(plain.data_ptr(), plain.numel() * plain.element_size()) if plain.numel() else b""
