"""The rows of `bench/throughput.py --variants`: the step alone, one thing changed, and what it gains.

All variants compile side by side, a process each, and are then timed in turns while the others rest, so that a
difference of half a percent can be seen. A variant that tunes kernels compiles without neighbours (`ALONE`). The last
loss of each round is told too: after as many steps on the same tokens it shows whether the arithmetic is the same.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from bench.throughput_rows import Bench
    from jackline.models.gpt import GPT

ROOT = Path(__file__).resolve().parents[1]
_OURS = "embed kernel loss"
VARIANTS = {
    "v-base": "",
    "v-embed": "embed",
    "v-kernel": "embed kernel",
    "v-loss": "embed loss",
    "v-all": _OURS,
    "v-flash": f"{_OURS} flash",
    "v-block": f"{_OURS} block",
    "v-parts": f"{_OURS} parts",  # as the trainer does
    "v-fused": f"{_OURS} parts fused",  # the kernels of models/block_kernel.py
    "v-tuned": f"{_OURS} parts fused tuned",  # with the tiles that bench/block_kernels.py --keep has found
    "v-nested": f"{_OURS} nested",
    "v-chunk": "embed kernel chunk",
    "v-graph": f"{_OURS} parts graph",
    "v-workspace": f"{_OURS} parts workspace",
    "v-pdl": f"{_OURS} parts pdl",
    "v-combo": f"{_OURS} parts combo",
    "v-unmixed": f"{_OURS} parts unmixed",
    "v-split": f"{_OURS} parts split",
    "v-descent": f"{_OURS} parts descent",
    "v-pointwise": f"{_OURS} parts pointwise",
    "v-products": f"{_OURS} parts products",
    "v-graph-all": f"{_OURS} graph",
    "v-best": f"{_OURS} graph descent split",
}
ALONE = ("descent", "pointwise", "products")
# Switches of torch's compiler. A version that does not know one says so, and the row is an error.
_OPTIONS: dict[str, dict[str, Any]] = {
    "pdl": {"triton.enable_pdl": True},
    "combo": {"combo_kernels": True},
    "unmixed": {"triton.mix_order_reduction": False},
    "split": {"triton.mix_order_reduction_autotune_split_size": True},
    "descent": {"coordinate_descent_tuning": True},
    "pointwise": {"max_autotune_pointwise": True},
    "products": {"max_autotune_gemm": True, "triton.enable_persistent_tma_matmul": True},
}


# The side that starts them.


@dataclass
class _Child:
    name: str
    process: subprocess.Popen[str]
    rows: list[dict[str, Any]] = field(default_factory=list)
    error: str = ""


def run_variants(
    names: list[str], request: dict[str, Any], rounds: int, at_once: int
) -> dict[str, list[dict[str, Any]]]:
    quiet = [name for name in names if any(word in VARIANTS[name].split() for word in ALONE)]
    others = [name for name in names if name not in quiet]
    groups = [others[at : at + at_once] for at in range(0, len(others), at_once)] + [[name] for name in quiet]
    children: list[_Child] = []
    for group in groups:
        began_s = time.monotonic()
        started = [_start(name, request) for name in group]
        for child in started:
            _read_ready(child)
        print(f"   {', '.join(group)}: ready after {time.monotonic() - began_s:.0f} s", file=sys.stderr, flush=True)
        children += started
    for number in range(rounds):
        for child in children if number % 2 == 0 else reversed(children):
            if not child.error:
                _time(child)
    for child in children:
        child.process.communicate("")
        if child.error:
            print(f"   {child.name}: {child.error}", file=sys.stderr, flush=True)
    return {child.name: child.rows or [{"error": child.error}] for child in children}


def _start(name: str, request: dict[str, Any]) -> _Child:
    work = Path(request["work"])
    environment = {
        **os.environ,
        "TORCHINDUCTOR_CACHE_DIR": str(work / f"code-{name}"),
        "TRITON_CACHE_DIR": str(work / f"triton-{name}"),
        "TORCHINDUCTOR_COMPILE_THREADS": "4",
        "STARTED_AT_S": repr(time.time()),
    }
    if "workspace" in VARIANTS[name]:
        environment |= {"CUBLASLT_WORKSPACE_SIZE": "262144", "CUBLAS_WORKSPACE_CONFIG": ":262144:2"}  # in KiB
    log = (work / f"{name}.log").open("w")
    words = [sys.executable, "-m", "bench.throughput_rows", json.dumps({**request, "name": name})]
    process = subprocess.Popen(
        words, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
    )
    log.close()
    return _Child(name, process)


def _read_ready(child: _Child) -> None:
    assert child.process.stdout is not None
    if child.process.stdout.readline().strip() != "ready":
        _fail(child)


def _time(child: _Child) -> None:
    assert child.process.stdin is not None and child.process.stdout is not None
    try:
        child.process.stdin.write("go\n")
        child.process.stdin.flush()
        child.rows.append(json.loads(child.process.stdout.readline()))
        row = child.rows[-1]
        print(f"   {child.name}: {row['ms']:.2f} ms, loss {row['loss']:.5f}", file=sys.stderr, flush=True)
    except (OSError, ValueError):
        _fail(child)


def _fail(child: _Child) -> None:
    work = Path(json.loads(child.process.args[-1])["work"])  # type: ignore[index,call-overload]
    said = (work / f"{child.name}.log").read_text(errors="replace").strip().splitlines()
    child.error = next((line for line in reversed(said) if "Error" in line), said[-1] if said else "no word")[:300]


# The side that trains.


def serve(bench: Bench, name: str) -> None:
    """Compile, say "ready", then a row for every line that comes."""
    import torch

    from bench.throughput_rows import profile_step
    from jackline.trainer.startup.precision import attention_kernels

    words = VARIANTS[name].split()
    is_gpu = bench.device.type == "cuda"
    with ExitStack() as stack:
        for word in words:
            if word in _OPTIONS:
                from torch._inductor import config

                stack.enter_context(config.patch(_OPTIONS[word]))
        if is_gpu:
            stack.enter_context(attention_kernels("flash" if "flash" in words else "cudnn"))
        step = make_step(bench, words)
        for _ in range(3 if is_gpu else 1):
            loss = step()
        bench.sync()
        bench.first_s = time.time() - float(os.environ.get("STARTED_AT_S", time.time()))
        if is_gpu:
            torch.cuda.empty_cache()
        print("ready", flush=True)
        for _ in sys.stdin:
            for _ in range(min(10, bench.warm)):  # a rest of some seconds has cooled the GPU
                step()
            bench.sync()
            began_s = time.perf_counter()
            for _ in range(bench.steps):
                loss = step()
            bench.sync()
            bench.took_s = time.perf_counter() - began_s
            if is_gpu and bench.request.get("has_profile") and "profile" not in bench.extra:
                bench.extra["profile"] = profile_step(step)
            row = bench.row(float(loss))
            if is_gpu:
                torch.cuda.empty_cache()  # room for the others
            print(json.dumps(row), flush=True)


def make_step(bench: Bench, words: list[str]) -> Callable[[], Tensor]:
    import torch
    from torch import nn

    from bench.throughput_rows import BETAS, CLIP, DECAY, LR
    from jackline.models.gpt import GPT, Block
    from jackline.models.loss import why_no_kernel
    from jackline.trainer.optim.optimizer import MasterAdamW, clip_gradients, make_optimizer

    with torch.device(bench.device):
        model = GPT(bench.shape, loss_chunk_rows=8192 if "chunk" in words else 0)
    optimizer = make_optimizer(model, lr=LR, betas=BETAS, weight_decay=DECAY, precision="bf16-weights")
    if "kernel" not in words and isinstance(optimizer, MasterAdamW):
        optimizer._kernel = False
    if "embed" not in words:
        GPT._embed = lambda self, ids: self.tokens(ids)  # type: ignore[method-assign]
    model.has_loss_kernel = "loss" in words and not why_no_kernel(model.head)
    bench.extra["loss_kernel"] = model.has_loss_kernel
    if "tuned" in words:
        _use_tiles(Path(bench.request["work"]) / "tiles.json")
    if "fused" in words:
        bench.extra["block_kernels"] = model.use_kernels() or "used"
    if "nested" in words:
        Block.forward = torch.compiler.nested_compile_region(Block.forward)  # type: ignore[method-assign]
    if "block" in words or "parts" in words:
        for part in model.blocks if "block" in words else [model]:
            part.compile(dynamic=False)
    elif not bench.is_small:
        nn.Module.compile(model, dynamic=False)  # as one graph
    batches = bench.batches()
    has_graph = "graph" in words and bench.device.type == "cuda"
    forward_and_back = _captured(model, batches) if has_graph else _plain(model, batches)

    def step() -> Tensor:
        loss = forward_and_back()
        clip_gradients(optimizer, CLIP)
        optimizer.step()
        if not has_graph:
            optimizer.zero_grad(set_to_none=True)
        return loss

    return step


def _use_tiles(path: Path) -> None:
    from jackline.models import block_kernel, loss_kernel

    while not path.exists():  # bench/block_kernels.py runs beside this one
        time.sleep(0.5)
    tables = json.loads(path.read_text())
    loss_kernel.TILE = tables.pop("loss_kernel.TILE", (loss_kernel.TILE, 0))[0]
    for table, (tile, parts) in tables.items():
        setattr(block_kernel, table, tile)
        if parts:
            setattr(block_kernel, table.replace("_BACK", "") + "_PARTS", parts)


def _plain(model: GPT, batches: Iterator[tuple[Tensor, Tensor]]) -> Callable[[], Tensor]:
    def run() -> Tensor:
        ids, targets = next(batches)
        loss: Tensor = model(ids, targets) / targets.numel()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    return run


def _captured(model: GPT, batches: Iterator[tuple[Tensor, Tensor]]) -> Callable[[], Tensor]:
    """Forward and backward pass as one CUDA graph; gradients lie where they lay when it was recorded."""
    import torch

    # The same tensors from the beginning: slices of a batch have other strides, and would be compiled anew.
    ids, targets = (part.clone() for part in next(batches))

    def plain() -> None:
        (model(ids, targets) / targets.numel()).backward()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            plain()
            model.zero_grad(set_to_none=True)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="relaxed"):
        loss = model(ids, targets) / targets.numel()
        loss.backward()

    def run() -> Tensor:
        for place, part in zip((ids, targets), next(batches), strict=True):
            place.copy_(part)
        graph.replay()
        return loss.detach()

    return run
