"""Would fp8 products make a training step faster? bf16 beside fp8, GPT shapes, on one GPU of the H100's class.

    python bench/fp8.py                   350M and 1.3B, the products alone and whole compiled steps
    python bench/fp8.py --only products   the upper bound alone

Every linear layer of the blocks computes its three products (forward, input gradient, weight gradient) in fp8 with
one scale for each tensor, taken anew at each step (e4m3 for values, e5m2 for gradients): the fastest recipe there is,
and the least exact. The head and the attention stay in bf16. `bound` is what a step would gain if nothing but these
products changed and the casts cost nothing.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from jackline.models.gpt import GPT
from jackline.models.loss import why_no_kernel
from jackline.models.shapes import GPTShape, count_parameters
from jackline.trainer.optim.optimizer import clip_gradients, make_optimizer
from jackline.trainer.startup.precision import attention_kernels

SIZES = {
    "350M": (GPTShape(24, 16, 1024, context=1024, vocab_size=50_304), 32),
    "1.3B": (GPTShape(24, 16, 2048, context=1024, vocab_size=50_304), 16),
}
_MOST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57_344.0}
_ROUNDS, _STEPS, _WARM = 3, 12, 6


def to_fp8(value: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The tensor times a scale that makes its largest element the largest of the dtype, and one over that scale."""
    scale = _MOST[dtype] / value.detach().abs().amax().float().clamp(min=1e-12)
    return (value.float() * scale).to(dtype), scale.reciprocal()


def product(left: Tensor, right: Tensor, scales: tuple[Tensor, Tensor]) -> Tensor:
    """left @ right; `right` lies by columns, as the hardware wants it."""
    return torch._scaled_mm(left, right, *scales, out_dtype=torch.bfloat16, use_fast_accum=True)


class Fp8Product(torch.autograd.Function):
    """rows @ weight.t() with all three products in fp8. What the gradients need is kept in fp8 and already turned."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor) -> Tensor:
        (low_rows, rows_scale), (low_weight, weight_scale) = (to_fp8(t, torch.float8_e4m3fn) for t in (rows, weight))
        turned_rows, turned_weight = low_rows.t().contiguous(), low_weight.t().contiguous()
        ctx.save_for_backward(turned_rows, rows_scale, turned_weight, weight_scale)
        return product(low_rows, low_weight.t(), (rows_scale, weight_scale))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        turned_rows, rows_scale, turned_weight, weight_scale = ctx.saved_tensors
        low, scale = to_fp8(gradients[0], torch.float8_e5m2)
        of_rows = product(low, turned_weight.t(), (scale, weight_scale))
        of_weight = product(low.t().contiguous(), turned_rows.t(), (scale, rows_scale))
        return of_rows, of_weight


class Fp8Linear(nn.Linear):
    """A linear layer whose products are fp8."""

    def forward(self, rows: Tensor) -> Tensor:
        made = Fp8Product.apply(rows.reshape(-1, self.in_features), self.weight)
        shaped: Tensor = made.view(*rows.shape[:-1], self.out_features)
        return shaped if self.bias is None else shaped + self.bias


def time_ms(work: Callable[[], Any], count: int) -> float:
    for _ in range(3):
        work()
    torch.cuda.synchronize()
    began_s = time.perf_counter()
    for _ in range(count):
        work()
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - began_s) / count


def products(name: str) -> float:
    """Milliseconds that fp8 saves in the products of one step, casts not counted."""
    shape, batch = SIZES[name]
    rows = batch * shape.context
    saved = 0.0
    for inner, outer in ((1, 3), (1, 1), (1, 4), (4, 1)):
        width, made = inner * shape.width, outer * shape.width
        for m, k, n, dtypes in (
            (rows, width, made, (torch.float8_e4m3fn, torch.float8_e4m3fn)),
            (rows, made, width, (torch.float8_e5m2, torch.float8_e4m3fn)),
            (made, rows, width, (torch.float8_e5m2, torch.float8_e4m3fn)),
        ):
            left, right = (
                torch.randn(m, k, device="cuda", dtype=torch.bfloat16),
                torch.randn(n, k, device="cuda", dtype=torch.bfloat16),
            )
            (low, scale), (low_right, right_scale) = to_fp8(left, dtypes[0]), to_fp8(right, dtypes[1])
            plain = time_ms(lambda left=left, right=right: left @ right.t(), 20)
            fast = time_ms(
                lambda low=low, other=low_right, scales=(scale, right_scale): product(low, other.t(), scales), 20
            )
            saved += shape.num_layers * (plain - fast)
            flops = 2 * m * k * n / 1e9
            print(f"  {name} {m} x {k} x {n}: bf16 {plain:.3f} ms ({flops / plain:.0f} TFLOP/s), "
                  f"fp8 {fast:.3f} ms ({flops / fast:.0f}), {plain / fast:.2f}x", flush=True)  # fmt: skip
    return saved


def step(name: str, is_fp8: bool) -> Callable[[], Tensor]:
    shape, batch = SIZES[name]
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = GPT(shape)
    optimizer = make_optimizer(model, lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, precision="bf16-weights")
    if is_fp8:
        for block in model.blocks:
            for part in ("qkv", "projection", "up", "down"):
                getattr(block, part).__class__ = Fp8Linear
    model.has_loss_kernel = not why_no_kernel(model.head)
    model.compile(dynamic=False)
    ids = torch.randint(0, 50_000, (batch, shape.context + 1), device="cuda")

    def run() -> Tensor:
        loss: Tensor = model(ids[:, :-1], ids[:, 1:]) / ids[:, 1:].numel()
        loss.backward()
        clip_gradients(optimizer, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return run


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="products,steps")
    parser.add_argument("--sizes", default="350M,1.3B")
    options = parser.parse_args()
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9):
        print("skipped: fp8 needs a GPU of compute capability 8.9 or newer")
        return 0
    for name in options.sizes.split(","):
        saved_ms = products(name) if "products" in options.only else 0.0
        if "steps" not in options.only:
            continue
        with attention_kernels("cudnn"):
            runs = {word: step(name, word == "fp8") for word in ("bf16", "fp8")}
            losses = {word: [float(run()) for _ in range(_WARM)][-1] for word, run in runs.items()}
            took: dict[str, list[float]] = {word: [] for word in runs}
            for _ in range(_ROUNDS):
                for word, run in runs.items():
                    took[word].append(time_ms(run, _STEPS))
        plain, fast = (statistics.median(took[word]) for word in ("bf16", "fp8"))
        millions = count_parameters(SIZES[name][0]) / 1e6
        print(f"{name} ({millions:.0f}M): bf16 {plain:.1f} ms ({min(took['bf16']):.1f}..{max(took['bf16']):.1f}), "
              f"fp8 {fast:.1f} ms ({min(took['fp8']):.1f}..{max(took['fp8']):.1f}), {plain / fast:.3f}x; "
              f"bound {plain / (plain - saved_ms):.3f}x; loss after {_WARM} steps {losses['bf16']:.4f} and "
              f"{losses['fp8']:.4f}", flush=True)  # fmt: skip
        del runs
        torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())
