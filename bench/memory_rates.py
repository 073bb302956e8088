"""How fast this GPU, and Python on this machine, do single operators: the facts from which a step's time is made.

    python bench/memory_rates.py [--out FILE]

Of each kernel the median of some runs by CUDA events, over other data than the run before where it would fit into the
cache; of Python the time to start an operator whose kernel is nothing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

_RUNS = 7
_STARTS = 300
HALF, SINGLE = torch.bfloat16, torch.float32


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("rates.jsonl"))
    options = parser.parse_args()
    with options.out.open("w") as file:
        for name, make in (*host_cases(), *gpu_cases()):
            try:
                row = {"name": name, **make()}
            except Exception as error:  # the next one must still be tried
                row = {"name": name, "error": f"{type(error).__name__}: {error}"[:200]}
            file.write(json.dumps(row) + "\n")
            file.flush()
    return 0


# What Python, autograd and the driver take to start an operator.


def started_us(act: Callable[[], Any], count: int = _STARTS) -> float:
    for _ in range(10):
        act()
    times = []
    for _ in range(3):
        torch.cuda.synchronize()
        began_s = time.perf_counter()
        for _ in range(count):
            act()
        times.append(1e6 * (time.perf_counter() - began_s) / count)
    torch.cuda.synchronize()
    return min(times)


def host_cases() -> Iterator[tuple[str, Callable[[], dict[str, float]]]]:
    device = torch.device("cuda")
    torch.zeros(1, device=device)
    low = {True: "autocast", False: "plain"}
    for is_low in (False, True):
        for name, make in _starts().items():

            def timed(make: Any = make, is_low: bool = is_low) -> dict[str, float]:
                with torch.device("cuda"):
                    act = make()
                with torch.autocast("cuda", dtype=HALF, enabled=is_low):
                    forward = started_us(act)
                    result = act()
                    alone = started_us(lambda: (act(), None)[1])
                found = {"forward_us": forward, "again_us": alone}
                if isinstance(result, torch.Tensor) and result.requires_grad:
                    found["backward_us"] = chained_us(act, is_low=is_low)
                return found

            yield f"host {low[is_low]} {name}", timed
    yield "host step of AdamW", _adamw_us


def chained_us(act: Callable[[], torch.Tensor], *, is_low: bool) -> float:
    """Of backward, an operator: the sum of many."""
    times = []
    for _ in range(3):
        with torch.autocast("cuda", dtype=HALF, enabled=is_low):
            outputs = [act() for _ in range(100)]
        grads = [torch.ones_like(one) for one in outputs]
        torch.cuda.synchronize()
        began_s = time.perf_counter()
        torch.autograd.backward(outputs, grads)
        times.append(1e6 * (time.perf_counter() - began_s) / 100)
        torch.cuda.synchronize()
    return min(times)


def _starts() -> dict[str, Callable[[], Callable[[], Any]]]:
    """Operators on next to nothing, and modules."""

    def of(make: Callable[..., Any], *shapes: tuple[int, ...]) -> Callable[[], Callable[[], Any]]:
        def prepare() -> Callable[[], Any]:
            values = [torch.randn(shape, requires_grad=True) for shape in shapes]
            return lambda: make(*values)

        return prepare

    def module(made: Callable[[], nn.Module], *shape: int) -> Callable[[], Callable[[], Any]]:
        def prepare() -> Callable[[], Any]:
            net, value = made(), torch.randn(shape, requires_grad=True)
            return lambda: net(value)

        return prepare

    row, image, heads = (2, 8, 8), (2, 8, 8, 8), (2, 2, 8, 8)
    return {
        "view": of(lambda a: a.view(4, -1), row),
        "transpose": of(lambda a: a.transpose(0, 1), row),
        "add": of(lambda a, b: a + b, row, row),
        "mul": of(lambda a, b: a * b, row, row),
        "scale": of(lambda a: a * 2.0, row),
        "pow": of(lambda a: a.pow(2), row),
        "mean": of(lambda a: a.mean(-1, keepdim=True), row),
        "rsqrt": of(lambda a: torch.rsqrt(a * a + 1.0), row),
        "cat": of(lambda a, b: torch.cat([a, b], -1), row, row),
        "chunk": of(lambda a: a.chunk(2, -1)[0], row),
        "slice": of(lambda a: a[..., :4], row),
        "contiguous": of(lambda a: a.transpose(0, 1).contiguous(), row),
        "to": of(lambda a: a.to(HALF), row),
        "float": of(lambda a: a.float(), row),
        "gelu": of(functional.gelu, row),
        "silu": of(functional.silu, row),
        "softmax": of(lambda a: functional.softmax(a, -1), row),
        "dropout": of(lambda a: functional.dropout(a, 0.1), row),
        "linear": of(functional.linear, row, (8, 8)),
        "linear bias": of(functional.linear, row, (8, 8), (8,)),
        "matmul": of(torch.matmul, heads, heads),
        "layer_norm": of(lambda a, w, b: functional.layer_norm(a, (8,), w, b), row, (8,), (8,)),
        "rms_norm": of(lambda a, w: functional.rms_norm(a, (8,), w), row, (8,)),
        "sdpa": of(functional.scaled_dot_product_attention, heads, heads, heads),
        "conv2d": of(lambda a, w: functional.conv2d(a, w, padding=1), image, (8, 8, 3, 3)),
        "depthwise": of(lambda a, w: functional.conv2d(a, w, padding=1, groups=8), image, (8, 1, 3, 3)),
        "identity module": module(nn.Identity, *row),
        "linear module": module(lambda: nn.Linear(8, 8), *row),
        "layer norm module": module(lambda: nn.LayerNorm(8), *row),
        "batch norm module": module(lambda: nn.BatchNorm2d(8), *image),
        "group norm module": module(lambda: nn.GroupNorm(2, 8), *image),
        "conv module": module(lambda: nn.Conv2d(8, 8, 3, padding=1), *image),
        "lstm module": module(lambda: _First(nn.LSTM(8, 8, 1, batch_first=True)), 2, 8, 8),
        "empty function": lambda: lambda: _nothing(1, 2, three=3),
    }


class _First(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        first: torch.Tensor = self.inner(value)[0]
        return first


def _nothing(one: int, two: int, *, three: int) -> int:
    return one + two + three


def _adamw_us() -> dict[str, float]:
    found = {}
    for count in (10, 100, 400):
        weights = [nn.Parameter(torch.zeros(8, 8, device="cuda")) for _ in range(count)]
        for one in weights:
            one.grad = torch.zeros_like(one)
        optimizer = torch.optim.AdamW(weights, fused=True)
        found[f"of_{count}_us"] = started_us(optimizer.step, 5)
    return found


# What kernels take.


def kernel_us(act: Callable[[int], Any]) -> float:
    for number in range(2):
        act(number)
    times = []
    for number in range(_RUNS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        act(number)
        act(number + 1)
        end.record()
        end.synchronize()
        times.append(500 * begin.elapsed_time(end))
    return statistics.median(times)


def gpu_cases() -> Iterator[tuple[str, Callable[[], dict[str, float]]]]:
    yield from _products()
    yield from _elementwise()
    yield from _convolutions()


def _products() -> Iterator[tuple[str, Callable[[], dict[str, float]]]]:
    shapes = [(m, n, k) for m in (512, 2048, 8192) for n in (256, 1024, 4096) for k in (256, 1024, 4096)]
    for dtype in (HALF, SINGLE):
        for m, n, k in shapes:

            def timed(m: int = m, n: int = n, k: int = k, dtype: torch.dtype = dtype) -> dict[str, float]:
                left = [torch.randn(m, k, device="cuda", dtype=dtype) for _ in range(2)]
                right = torch.randn(k, n, device="cuda", dtype=dtype)
                return {"us": kernel_us(lambda number: left[number % 2] @ right)}

            yield f"mm {str(dtype)[6:]} {m} {n} {k}", timed
        for batch, length, width in ((48, 512, 64), (96, 256, 64), (32, 1024, 128), (384, 64, 32)):

            def batched(b: int = batch, s: int = length, w: int = width, dtype: Any = dtype) -> dict[str, float]:
                left = torch.randn(b, s, w, device="cuda", dtype=dtype)
                other = torch.randn(b, w, s, device="cuda", dtype=dtype)
                return {"us": kernel_us(lambda _: left @ other)}

            yield f"bmm {str(dtype)[6:]} {batch} {length} {width}", batched


def _elementwise() -> Iterator[tuple[str, Callable[[], dict[str, float]]]]:
    acts: dict[str, Callable[[torch.Tensor], Any]] = {
        "add": lambda a: a + a,
        "scale": lambda a: a * 2.0,
        "gelu": functional.gelu,
        "layer_norm": lambda a: functional.layer_norm(a, (a.shape[-1],)),
        "softmax": lambda a: functional.softmax(a, -1),
        "sum rows": lambda a: a.sum(0),
        "sum columns": lambda a: a.sum(-1),
        "transposed copy": lambda a: a.t().contiguous(),
        "dropout": lambda a: functional.dropout(a, 0.1),
        "other dtype": lambda a: a.to(HALF if a.dtype == SINGLE else SINGLE),
    }
    for dtype in (HALF, SINGLE):
        for name, act in acts.items():
            for rows in (256, 2048, 16384, 131072):

                def timed(act: Any = act, rows: int = rows, dtype: torch.dtype = dtype) -> dict[str, float]:
                    values = [torch.randn(rows, 1024, device="cuda", dtype=dtype) for _ in range(2)]
                    return {"us": kernel_us(lambda number: act(values[number % 2]))}

                yield f"{name} {str(dtype)[6:]} {rows}x1024", timed


def _convolutions() -> Iterator[tuple[str, Callable[[], dict[str, float]]]]:
    shapes = (
        (16, 64, 64, 56, 3, 1),
        (16, 256, 256, 14, 3, 1),
        (16, 512, 512, 7, 3, 1),
        (16, 128, 128, 64, 3, 1),
        (16, 64, 256, 56, 1, 1),
        (16, 1024, 256, 14, 1, 1),
        (16, 3, 64, 224, 7, 1),
        (16, 96, 96, 56, 7, 96),
        (16, 384, 384, 14, 7, 384),
        (16, 128, 128, 56, 3, 128),
        (16, 672, 672, 14, 5, 672),
        (16, 256, 256, 28, 3, 32),
        (32, 128, 128, 56, 3, 8),
    )
    for dtype in (HALF, SINGLE):
        for count, before, after, side, kernel, groups in shapes:

            def timed(
                of: tuple[int, ...] = (count, before, after, side, kernel, groups), dtype: torch.dtype = dtype
            ) -> dict[str, float]:
                count, before, after, side, kernel, groups = of
                value = torch.randn(count, before, side, side, device="cuda", dtype=dtype, requires_grad=True)
                weight = torch.randn(after, before // groups, kernel, kernel, device="cuda", dtype=dtype)
                weight.requires_grad_()
                apply = lambda _: functional.conv2d(value, weight, padding=kernel // 2, groups=groups)  # noqa: E731
                out = apply(0)
                grad = torch.randn_like(out)
                backward = kernel_us(lambda _: torch.autograd.grad(out, (value, weight), grad, retain_graph=True))
                return {"us": kernel_us(apply), "backward_us": backward}

            yield f"conv {str(dtype)[6:]} {count} {before} {after} {side} k{kernel} g{groups}", timed


if __name__ == "__main__":
    raise SystemExit(main())
