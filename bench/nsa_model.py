"""The rows of bench/nsa.py about the whole model: a process for each, compiled side by side, timed one at a time.

python bench/nsa_model.py sparse 1024 ...     one row, by bench/nsa.py: says "ready", waits for a line, says the row
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "src"), str(Path(__file__).resolve().parents[1])]

import torch  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402

from jackline.models.loss import why_no_kernel  # noqa: E402
from jackline.models.nsa.model import NSAModel  # noqa: E402
from jackline.models.nsa.shape import NSAShape  # noqa: E402

# For the dense model, the first that can: cuDNN's is the fastest on Hopper GPUs.
_BACKENDS = (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH)
_AT_ONCE = 5  # models that compile at the same time: the first step of each takes up to 30 GiB of the GPU
SMALL = NSAShape(
    num_layers=2, width=64, num_heads=4, num_groups=2, head_width=16, vocab_size=128,
    compressed_length=8, compressed_stride=4, block_length=16, num_blocks=4, window=24,
)  # fmt: skip


def shape_of(*, is_small: bool) -> NSAShape:
    return SMALL if is_small else replace(NSAShape(), vocab_size=50_304)


class Clock:
    """Milliseconds of a call on the device, the median of several; the device's own clock where it has one."""

    def __init__(self, device: torch.device, *, repeats: int, limit_s: float) -> None:
        self.device, self.repeats = device, repeats
        self.end_s = time.monotonic() + limit_s

    def is_over(self) -> bool:
        return time.monotonic() > self.end_s

    def time_ms(self, call: Callable[[], Any], *, warm: int = 3) -> float:
        for _ in range(warm):
            call()
        if self.device.type != "cuda":
            begin_s = time.perf_counter()
            call()
            return (time.perf_counter() - begin_s) * 1e3
        found = []
        for _ in range(self.repeats):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            call()
            end.record()
            torch.cuda.synchronize()
            found.append(begin.elapsed_time(end))
        return statistics.median(found)


@dataclass
class _Child:
    """A row in the making."""

    row: dict[str, Any]
    process: subprocess.Popen[str] | None = None
    is_ready: bool = False


def model_rows(clock: Clock, lengths: list[int], options: argparse.Namespace) -> list[dict[str, Any]]:
    children = [
        _Child({"what": f"model {name}", "length": length}) for length in lengths for name in ("sparse", "dense")
    ]
    waiting = sorted(children, key=lambda child: "dense" in child.row["what"])  # what compiles longest starts first
    while waiting and not clock.is_over():
        batch, waiting = waiting[:_AT_ONCE], waiting[_AT_ONCE:]
        for child in batch:
            child.process = _start(child.row, options)
        for child in batch:
            child.is_ready = _answer(child) == "ready"
    for child in children:
        _finish(child, clock)
        print(f"   {json.dumps(child.row)}", file=sys.stderr, flush=True)
    return [child.row for child in children]


def _start(row: dict[str, Any], options: argparse.Namespace) -> subprocess.Popen[str]:
    words = [row["what"].split()[1], str(row["length"]), "--repeats", str(options.repeats)]
    words += ["--tokens", str(options.tokens), "--compile", options.compile, *["--small"] * options.small]
    return subprocess.Popen(
        [sys.executable, __file__, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def _answer(child: _Child) -> str:
    assert child.process is not None and child.process.stdout is not None
    return child.process.stdout.readline().strip()


def _finish(child: _Child, clock: Clock) -> None:
    if child.process is None:
        child.row["error"] = "not measured: no time left"
        return
    if child.is_ready and not clock.is_over():
        assert child.process.stdin is not None
        child.process.stdin.write("go\n")
        child.process.stdin.flush()
        child.row |= json.loads(_answer(child) or '{"error": "its process ended"}')
    else:
        child.row["error"] = "not measured: no time left" if child.is_ready else "its first step failed"
        child.process.kill()
    child.process.communicate()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=("sparse", "dense"))
    parser.add_argument("length", type=int)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=32_768)
    parser.add_argument("--compile", choices=("whole", "block", "off"), default="whole")
    parser.add_argument("--small", action="store_true")
    options = parser.parse_args()
    if options.small:
        torch.set_num_threads(1)
    clock = Clock(torch.device("cpu" if options.small else "cuda"), repeats=options.repeats, limit_s=1e9)
    try:
        with sdpa_kernel([*_BACKENDS], set_priority=True):
            row = _time_model(clock, options)
    except Exception as problem:
        row = {"error": f"{type(problem).__name__}: {str(problem)[:160]}"}
        print("ready", flush=True)
    print(json.dumps(row), flush=True)
    return 0


def _time_model(clock: Clock, options: argparse.Namespace) -> dict[str, Any]:
    torch.manual_seed(0)
    began_s = time.monotonic()
    is_card = clock.device.type == "cuda"
    shape = shape_of(is_small=options.small)
    model = NSAModel(replace(shape, is_dense=options.name == "dense"))
    model = model.to(clock.device, torch.bfloat16 if is_card else torch.float32)
    model.has_loss_kernel = not why_no_kernel(model.head)  # as the trainer does, for both
    reason = model.use_kernels() if options.name == "sparse" else ""
    batch = max(1, (options.tokens if is_card else 256) // options.length)
    ids = torch.randint(0, shape.vocab_size, (batch, options.length + 1), device=clock.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=is_card)
    road: Any = model
    if is_card and options.compile == "whole":
        road = torch.compile(model, dynamic=False)
    elif is_card and options.compile == "block":
        for block in model.blocks:
            block.compile(dynamic=False)

    def step() -> None:
        loss = road(ids[:, :-1], ids[:, 1:]) / (batch * options.length)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    step()
    first_s = time.monotonic() - began_s
    if is_card:
        torch.cuda.empty_cache()  # room for the others' first steps
    print("ready", flush=True)
    sys.stdin.readline()
    if is_card:
        torch.cuda.reset_peak_memory_stats()
    milliseconds = clock.time_ms(step)
    row = {"batch": batch, "ms": round(milliseconds, 2)}
    row |= {"tokens_per_s": round(batch * options.length / milliseconds * 1e3)}
    row |= {"peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2) if is_card else 0.0}
    return row | {"first_s": round(first_s, 1), "kernels": reason or ("yes" if options.name == "sparse" else "-")}


if __name__ == "__main__":
    sys.exit(main())
