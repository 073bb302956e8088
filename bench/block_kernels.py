"""The kernels of `models/block_kernel.py` one by one: which tiles are fastest, how near to memory's own speed, and
the matrix products of a step, each by itself.

    python bench/block_kernels.py                 GPT-2 124M, micro-batch 32, on a GPU: half a minute
    python bench/block_kernels.py --keep FILE     the best tiles as JSON, for `bench/throughput.py --variants`
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent / "src")]
ROWS, WIDTH = 32 * 1024, 768
# (rows of a tile, warps), loads in flight, and programs that share the rows; gelu: (rows, columns, warps).
_NORM = [(1, 4), (1, 8), (2, 4), (2, 8)]
_NORM_BACK = [(1, 1), (1, 2), (1, 4), (2, 2), (2, 4)]
_NORM_PARTS = [528, 1056]
_GELU = [(4, 512, 4), (8, 512, 4)]
_GELU_BACK = [(2, 1024, 4), (4, 512, 4), (8, 512, 4), (8, 256, 4), (4, 256, 2)]
_GELU_PARTS = [256, 512]
_STAGES = [1, 2, 3]
_LOSS = [(2048, 8), (4096, 8), (4096, 16), (8192, 16), (4096, 32), (8192, 32)]


def main() -> int:
    import torch

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", default="")
    options = parser.parse_args()
    torch.manual_seed(0)
    copied = torch.empty(1 << 29, dtype=torch.bfloat16, device="cuda")
    target = torch.empty_like(copied)
    took_ms = _time(lambda: target.copy_(copied))
    bytes_per_ms = 2 * copied.numel() * 2 / took_ms
    print(f"a copy of 1 GiB: {bytes_per_ms / 1e9:.2f} TB/s", flush=True)
    found = _kernels(bytes_per_ms)
    found["loss_kernel.TILE"] = _loss(bytes_per_ms)
    if options.keep:
        Path(options.keep).write_text(json.dumps(found))
    _products()
    return 0


def _time(work: Callable[[], Any], repeats: int = 12) -> float:
    """The least milliseconds of three series; memory is larger than the cache between two calls."""
    import torch

    work()
    best = float("inf")
    for _ in range(3):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(repeats):
            work()
        end.record()
        end.synchronize()
        best = min(best, begin.elapsed_time(end) / repeats)
    return best


def _kernels(bytes_per_ms: float) -> dict[str, Any]:
    import torch

    from jackline.models import block_kernel as kernels

    def draw(*sizes: int) -> Any:
        return torch.randn(*sizes, device="cuda", dtype=torch.bfloat16)

    a, b = draw(ROWS, WIDTH), draw(ROWS, WIDTH)
    vectors = [draw(WIDTH) for _ in range(4)]
    wide, other, bias = draw(ROWS, 4 * WIDTH), draw(ROWS, 4 * WIDTH), draw(4 * WIDTH)
    ops = torch.ops.jackline
    total, _, means, scales = ops.add_norm(a, b, *vectors[:2], 1e-5, *vectors[2:])
    unit = ROWS * WIDTH * 2
    began_s = time.monotonic()

    def best(what: str, table: str, choices: list[tuple[dict[str, int], int]], passes: int, work: Any) -> Any:
        rows = []
        for tile, parts in choices:
            setattr(kernels, table, tile)
            if parts:
                setattr(kernels, table.replace("_BACK", "") + "_PARTS", parts)
            try:
                rows.append((_time(work), tile, parts))
            except Exception as problem:  # a tile that does not fit
                print(f"    {what} {tile} {parts}: {type(problem).__name__}")
        rows.sort(key=lambda row: row[0])
        for took_ms, tile, parts in rows[:3] + rows[-1:]:
            share = passes * unit / took_ms / bytes_per_ms
            print(f"  {what:14} {1e3 * took_ms:7.1f} us, {share:.2f} of the copy's speed: {tile} {parts or ''}")
        setattr(kernels, table, rows[0][1])
        if rows[0][2]:
            setattr(kernels, table.replace("_BACK", "") + "_PARTS", rows[0][2])
        print(f"  ({time.monotonic() - began_s:.0f} s)", flush=True)
        return rows[0][1:]

    pairs = [{"tile": tile, "num_warps": warps} for tile, warps in _NORM]
    found = {}
    found["NORM"] = best("add_norm", "NORM", [(pair, 0) for pair in pairs], 4,
                         lambda: ops.add_norm(a, b, *vectors[:2], 1e-5, *vectors[2:]))  # fmt: skip
    pairs = [{"tile": tile, "stages": stages, "num_warps": warps}
             for (tile, warps), stages in itertools.product(_NORM_BACK, _STAGES)]  # fmt: skip
    found["NORM_BACK"] = best("add_norm_back", "NORM_BACK", list(itertools.product(pairs, _NORM_PARTS)), 4,
                              lambda: ops.add_norm_back(a, b, total, vectors[0], means, scales, vectors[3]),
                              )  # fmt: skip
    tiles = [{"tile": tile, "columns": columns, "num_warps": warps} for tile, columns, warps in _GELU]
    found["GELU"] = best("gelu", "GELU", [(tile, 0) for tile in tiles], 8, lambda: ops.bias_gelu(wide, bias))
    tiles = [{"tile": tile, "columns": columns, "stages": stages, "num_warps": warps}
             for (tile, columns, warps), stages in itertools.product(_GELU_BACK, _STAGES)]  # fmt: skip
    found["GELU_BACK"] = best("gelu_back", "GELU_BACK", list(itertools.product(tiles, _GELU_PARTS)), 12,
                              lambda: ops.bias_gelu_back(other, wide, bias))  # fmt: skip
    return found


def _loss(bytes_per_ms: float) -> Any:
    import torch

    from jackline.models import loss_kernel

    logits = torch.randn(ROWS, 50_304, device="cuda", dtype=torch.bfloat16)
    labels, rows = torch.randint(0, 50_304, (ROWS,), device="cuda"), []
    for (block, warps), stages in itertools.product(_LOSS, _STAGES):
        loss_kernel.TILE = {"block": block, "stages": stages, "num_warps": warps}
        try:
            took_ms = _time(lambda: loss_kernel.overwrite_with_gradients(logits, labels), 4)
        except Exception as problem:
            print(f"    loss {loss_kernel.TILE}: {type(problem).__name__}")
            continue
        rows.append((took_ms, loss_kernel.TILE))
    rows.sort(key=lambda row: row[0])
    for took_ms, tile in rows:
        share = 2 * logits.numel() * 2 / took_ms / bytes_per_ms
        print(f"  loss {took_ms:.3f} ms, {share:.2f} of the copy's speed: {tile}")
    return rows[0][1], 0


def _products() -> None:
    """Forward, gradient of the input, and gradient of the weights in both orders (one is the other's transpose)."""
    import torch

    print("  TFLOP/s of products:    forward   of input   of weights   transposed")
    for name, inside, outside in (
        ("qkv", WIDTH, 3 * WIDTH), ("projection", WIDTH, WIDTH), ("up", WIDTH, 4 * WIDTH), ("down", 4 * WIDTH, WIDTH),
        ("head", WIDTH, 50_304),
    ):  # fmt: skip
        x = torch.randn(ROWS, inside, device="cuda", dtype=torch.bfloat16)
        weight = torch.randn(outside, inside, device="cuda", dtype=torch.bfloat16)
        gradient = torch.randn(ROWS, outside, device="cuda", dtype=torch.bfloat16)
        pairs = [(x, weight.t()), (gradient, weight), (gradient.t(), x), (x.t(), gradient)]
        rates = [
            2 * ROWS * inside * outside / _time(lambda left=left, right=right: left @ right, 6) / 1e9  # type: ignore[misc]
            for left, right in pairs
        ]
        print(f"  {name:20} " + "  ".join(f"{rate:10.0f}" for rate in rates), flush=True)


if __name__ == "__main__":
    sys.exit(main())
