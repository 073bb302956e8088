"""What cuBLASLt could save a GPT's step: products with GELU, its gradient or a bias' gradient at their end.

    python bench/products.py            GPT-2 124M, micro-batch 32, on a GPU

torch has the library loaded but offers no operators for these, so they are called through ctypes. A row has the
microseconds of the product alone, of product and kernel as two, and of the one call with each algorithm that
cuBLASLt proposes, its own favourite first; how far the results are apart; and whether ten calls are bit-equal. The
trainer uses none of it until it is faster here. Written on a machine without a GPU and not yet run on one.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent / "src")]

from bench.block_kernels import ROWS, WIDTH, _time  # noqa: E402

# Of cublasLt.h and library_types.h; they are part of its binary interface.
_BF16, _FLOAT32, _COMPUTE_FLOAT32 = 14, 0, 68
_TRANSPOSE_A, _TRANSPOSE_B, _EPILOGUE, _VECTOR, _AUX, _AUX_STRIDE = 3, 4, 7, 8, 11, 12
_WORKSPACE_LIMIT = 1
PLAIN, GELU_AND_INPUT, TIMES_GELU_GRADIENT, SUM_OF_SECOND = 1, 32 | 128 | 4, 64 | 128 | 16, 512
_WORKSPACE_BYTES = 32 * 2**20
_ALGORITHMS = 12


class _Found(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = (
        ("algorithm", ctypes.c_uint64 * 8),
        ("workspace_bytes", ctypes.c_size_t),
        ("status", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


class _Shape(NamedTuple):
    """Of D = op(A) op(B), in columns."""

    rows: int
    columns: int
    inner: int
    is_first_turned: bool
    is_second_turned: bool
    epilogue: int
    device: int


class _Plan(NamedTuple):
    operation: ctypes.c_void_p
    first: ctypes.c_void_p
    second: ctypes.c_void_p
    result: ctypes.c_void_p
    algorithms: Any


class _Library:
    """cuBLASLt as torch has loaded it: another copy would have other kernels."""

    def __init__(self) -> None:
        with open("/proc/self/maps") as maps:
            paths = {line.split()[-1] for line in maps if "libcublasLt.so" in line}
        if len(paths) != 1:
            raise RuntimeError(f"torch has loaded {len(paths)} libraries of the name cublasLt")
        self._calls = ctypes.CDLL(paths.pop())
        self.handle = ctypes.c_void_p()
        self.call("Create", ctypes.byref(self.handle))

    def call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._calls, f"cublasLt{name}")(*arguments)
        if code:
            raise RuntimeError(f"cublasLt{name} returned {code}")

    def set(self, operation: ctypes.c_void_p, attribute: int, value: Any) -> None:
        self.call("MatmulDescSetAttribute", operation, attribute, ctypes.byref(value), ctypes.sizeof(value))


@cache
def _library() -> _Library:
    return _Library()


def _layout(library: _Library, rows: int, columns: int) -> ctypes.c_void_p:
    made = ctypes.c_void_p()
    words = (ctypes.c_uint64(rows), ctypes.c_uint64(columns), ctypes.c_int64(rows))
    library.call("MatrixLayoutCreate", ctypes.byref(made), _BF16, *words)
    return made


@cache
def _plan(shape: _Shape, count: int) -> _Plan:
    """Made once for a shape and never freed: a model has few."""
    library, operation = _library(), ctypes.c_void_p()
    library.call("MatmulDescCreate", ctypes.byref(operation), _COMPUTE_FLOAT32, _FLOAT32)
    library.set(operation, _TRANSPOSE_A, ctypes.c_int32(shape.is_first_turned))
    library.set(operation, _TRANSPOSE_B, ctypes.c_int32(shape.is_second_turned))
    library.set(operation, _EPILOGUE, ctypes.c_uint32(shape.epilogue))
    if shape.epilogue in (GELU_AND_INPUT, TIMES_GELU_GRADIENT):
        library.set(operation, _AUX_STRIDE, ctypes.c_int64(shape.rows))
        library.set(operation, _AUX, ctypes.c_void_p(512))  # only its alignment counts here
    if shape.epilogue != PLAIN:
        library.set(operation, _VECTOR, ctypes.c_void_p(512))
    sides = (shape.rows, shape.inner), (shape.inner, shape.columns)
    turned = (shape.is_first_turned, shape.is_second_turned)
    first, second = (
        _layout(library, *(side[::-1] if is_turned else side)) for side, is_turned in zip(sides, turned, strict=True)
    )
    result, preference = _layout(library, shape.rows, shape.columns), ctypes.c_void_p()
    library.call("MatmulPreferenceCreate", ctypes.byref(preference))
    limit = ctypes.c_uint64(_WORKSPACE_BYTES)
    library.call(
        "MatmulPreferenceSetAttribute", preference, _WORKSPACE_LIMIT, ctypes.byref(limit), ctypes.sizeof(limit)
    )
    found, number = (_Found * count)(), ctypes.c_int()
    library.call(
        "MatmulAlgoGetHeuristic", library.handle, operation, first, second, result, result, preference, count,
        found, ctypes.byref(number),
    )  # fmt: skip
    if not number.value:
        raise RuntimeError("cublasLt knows no algorithm for this product")
    return _Plan(operation, first, second, result, found[: number.value])


def _multiply(  # noqa: PLR0913
    shape: _Shape, first: Tensor, second: Tensor, result: Tensor, vector: Tensor | None, aux: Tensor | None,
    *, choice: int = 0,
) -> None:  # fmt: skip
    library, plan = _library(), _plan(shape, _ALGORITHMS)
    if aux is not None:
        library.set(plan.operation, _AUX, ctypes.c_void_p(aux.data_ptr()))
    if vector is not None:
        library.set(plan.operation, _VECTOR, ctypes.c_void_p(vector.data_ptr()))
    found = plan.algorithms[choice]
    workspace = torch.empty(max(found.workspace_bytes, 16), dtype=torch.uint8, device=first.device)
    one, nothing = ctypes.c_float(1.0), ctypes.c_float(0.0)
    library.call(
        "Matmul", library.handle, plan.operation, ctypes.byref(one),
        ctypes.c_void_p(first.data_ptr()), plan.first, ctypes.c_void_p(second.data_ptr()), plan.second,
        ctypes.byref(nothing), ctypes.c_void_p(result.data_ptr()), plan.result,
        ctypes.c_void_p(result.data_ptr()), plan.result, ctypes.byref(found.algorithm),
        ctypes.c_void_p(workspace.data_ptr()), ctypes.c_size_t(found.workspace_bytes),
        ctypes.c_void_p(torch.cuda.current_stream(first.device).cuda_stream),
    )  # fmt: skip


def _index(tensor: Tensor) -> int:
    return tensor.device.index if tensor.device.index is not None else torch.cuda.current_device()


def linear_gelu(given: Tensor, weight: Tensor, bias: Tensor, *, choice: int = 0) -> tuple[Tensor, Tensor]:
    """`gelu(given @ weight.T + bias)` with tanh, and what GELU was given."""
    rows, (outside, inside) = given.shape[0], weight.shape
    found, before = (torch.empty(rows, outside, dtype=given.dtype, device=given.device) for _ in range(2))
    shape = _Shape(outside, rows, inside, True, False, GELU_AND_INPUT, _index(given))
    _multiply(shape, weight, given, found, bias, before, choice=choice)
    return found, before


def back_through_gelu(gradient: Tensor, weight: Tensor, before: Tensor, *, choice: int = 0) -> tuple[Tensor, Tensor]:
    """`gradient @ weight` times GELU's gradient at `before`, and the sum of its rows."""
    rows, (outside, inside) = gradient.shape[0], weight.shape
    found, sums = torch.empty_like(before), torch.empty(inside, dtype=gradient.dtype, device=gradient.device)
    shape = _Shape(inside, rows, outside, False, False, TIMES_GELU_GRADIENT, _index(gradient))
    _multiply(shape, weight, gradient, found, sums, before, choice=choice)
    return found, sums


def gradient_of_weight(gradient: Tensor, given: Tensor, *, choice: int = 0) -> tuple[Tensor, Tensor]:
    """`gradient.T @ given`, and the sum of the rows of `gradient`."""
    rows, outside, inside = gradient.shape[0], gradient.shape[1], given.shape[1]
    found = torch.empty(outside, inside, dtype=gradient.dtype, device=gradient.device)
    sums = torch.empty(outside, dtype=gradient.dtype, device=gradient.device)
    shape = _Shape(inside, outside, rows, False, True, SUM_OF_SECOND, _index(gradient))
    _multiply(shape, given, gradient, found, sums, None, choice=choice)
    return found, sums


def main() -> int:
    from jackline.models import block_kernel  # needs Triton

    torch.manual_seed(0)

    def draw(*sizes: int, scale: float = 1.0) -> Any:
        return scale * torch.randn(*sizes, device="cuda", dtype=torch.bfloat16)

    x, wide = draw(ROWS, WIDTH), draw(ROWS, 4 * WIDTH)
    up, down, bias = draw(4 * WIDTH, WIDTH, scale=0.03), draw(WIDTH, 4 * WIDTH, scale=0.03), draw(4 * WIDTH)
    torch.mm(x, up.t())  # loads the library
    qkv = draw(ROWS, 3 * WIDTH)

    def up_and_gelu() -> Any:
        before = functional.linear(x, up)
        return block_kernel.gelu(before, bias), before + bias

    _row("up, GELU", lambda: functional.linear(x, up), up_and_gelu,
         lambda choice: linear_gelu(x, up, bias, choice=choice),
         lambda: block_kernel.gelu(functional.linear(x, up), bias))  # fmt: skip
    before = functional.linear(x, up)

    def back() -> Any:
        return torch.ops.jackline.bias_gelu_back(x @ down, before, bias)

    shifted = before + bias
    _row("down's input, GELU's gradient", lambda: x @ down, back,
         lambda choice: back_through_gelu(x, down, shifted, choice=choice), back)  # fmt: skip
    for what, gradient in (("qkv's weight", qkv), ("up's weight", wide), ("projection's weight", x)):

        def two(gradient: Any = gradient) -> Any:
            return gradient.t() @ x, gradient.sum(0, dtype=torch.float32)

        _row(what, lambda gradient=gradient: gradient.t() @ x, two,  # type: ignore[misc]
             lambda choice, gradient=gradient: gradient_of_weight(gradient, x, choice=choice), two)  # type: ignore[misc]  # fmt: skip
    for name, inside, outside in (
        ("qkv", WIDTH, 3 * WIDTH), ("projection", WIDTH, WIDTH), ("up", WIDTH, 4 * WIDTH), ("down", 4 * WIDTH, WIDTH),
        ("head", WIDTH, 50_304),
    ):  # fmt: skip
        _plain_products(name, draw(ROWS, inside), draw(outside, inside), draw(ROWS, outside))
    return 0


def _plain_products(name: str, given: Tensor, weight: Tensor, gradient: Tensor) -> None:
    """The three products of a layer by each algorithm: torch always takes the first."""
    index, (outside, inside) = _index(given), weight.shape
    found, back, of_weight = torch.empty_like(gradient), torch.empty_like(given), torch.empty_like(weight)

    def compare(what: str, shape: _Shape, first: Tensor, second: Tensor, result: Tensor, by_torch: Any) -> None:
        def one(choice: int) -> tuple[Tensor]:
            _multiply(shape, first, second, result, None, None, choice=choice)
            return (result,)

        _row(f"{name} {what}", by_torch, None, one, None)

    compare("forward", _Shape(outside, ROWS, inside, True, False, PLAIN, index), weight, given, found,
            lambda: torch.mm(given, weight.t(), out=found))  # fmt: skip
    compare("of input", _Shape(inside, ROWS, outside, False, False, PLAIN, index), weight, gradient, back,
            lambda: torch.mm(gradient, weight, out=back))  # fmt: skip
    compare("of weight", _Shape(inside, outside, ROWS, False, True, PLAIN, index), given, gradient, of_weight,
            lambda: torch.mm(gradient.t(), given, out=of_weight))  # fmt: skip


def _row(what: str, alone: Callable[[], Any], both: Any, one: Callable[[int], Any], timed: Any) -> None:
    right = both() if both else None
    took = [1e3 * _time(alone, 6), 1e3 * _time(timed, 6) if timed else float("nan")]
    times, off, is_same = [], 0.0, True
    for choice in range(12):
        try:
            found = one(choice)
            first = [part.clone() for part in found]
            if right is not None:
                off = max(off, *(_difference(a, b) for a, b in zip(found, right, strict=True)))
            is_same &= all(torch.equal(a, b) for _ in range(10) for a, b in zip(one(choice), first, strict=True))
            times.append(1e3 * _time(lambda choice=choice: one(choice), 6))  # type: ignore[misc]
        except (RuntimeError, IndexError) as problem:
            times.append(float("nan"))
            if "list index" not in str(problem) and "out of range" not in str(problem):
                print(f"    {what} {choice}: {problem}")
    words = " ".join(f"{value:.0f}" for value in times)
    print(
        f"  {what:32} alone {took[0]:6.0f} us, two {took[1]:6.0f}, one {words} | off {off:.4f}, equal {is_same}",
        flush=True,
    )


def _difference(found: Tensor, right: Tensor) -> float:
    return float((found.float() - right.float()).norm() / right.float().norm())


if __name__ == "__main__":
    sys.exit(main())
