"""The grid of bench/memory.py: which configurations, their predictions (CPU only), and what a GPU measures.

Run through memory_stage.py, in processes of their own.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from jackline.memory.guard.safe_step import free_caches
from jackline.memory.plan.gpus import GPU_MODELS
from jackline.memory.predict.job import Job, StepOptions
from jackline.memory.predict.step import replay, trace_step
from jackline.memory.predict.trace import Trace
from jackline.models.gpt import GPT
from jackline.models.shapes import GPT2_VOCAB, SHAPES

GIB = 2**30
CARD = GPU_MODELS["H200"]
Write = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class Config:
    size: str
    batch: int
    length: int
    precision: str
    is_recomputing: bool

    @property
    def options(self) -> StepOptions:
        return StepOptions(self.precision, "foreach", self.is_recomputing, is_expandable=False)  # type: ignore[arg-type]

    @property
    def key(self) -> str:
        return f"{self.size} b{self.batch} t{self.length} {self.precision}{' rc' if self.is_recomputing else ''}"


def grid(*, is_smoke: bool = False) -> list[Config]:
    """The 116 configurations of the first measurement: 49M, 125M, 350M; the seeds' own batches first."""
    seeds = [("tiny", b, t) for t in (1024, 512) for b in (4, 8)]
    seeds += [("small", b, t) for t in (1024, 512) for b in (4, 6, 10)]
    seeds += [("medium", b, t) for t in (1024, 512) for b in (8, 16)]
    full = [(size, b, t) for size in ("tiny", "small", "medium") for t in (256, 512, 1024) for b in (4, 8, 16)]
    wanted: dict[Config, None] = {}
    for shapes, is_recomputing in ((seeds, False), (full, False), (full, True)):
        for size, batch, length in shapes:
            for precision in ("fp32", "bf16"):
                wanted[Config(size, batch, length, precision, is_recomputing)] = None
    configs = list(wanted)
    return [c for c in configs if c.size == "tiny" and c.batch == 4 and c.length == 256] if is_smoke else configs


def job_of(size: str, length: int, options: StepOptions, global_batch: int = 4096) -> Job:
    return Job(
        name=size,
        build=lambda how: GPT(SHAPES[size], is_recomputing=how.is_recomputing, loss_chunk_rows=how.loss_chunk_rows),
        batch=lambda count: torch.zeros((count, length), dtype=torch.long),
        loss=lambda model, ids: model(ids, ids) / float(ids.numel()),
        global_batch=global_batch,
        options=options,
    )


def trace_of(config: Config) -> Trace:
    """In a process that has multiplied before, as all those here have (`card_facts`)."""
    options = config.options
    job = job_of(config.size, config.length, options)
    return trace_step(job, config.batch, CARD, options, is_accumulating=False).in_warm_process()


# Predictions: no GPU.


def predict_all(write: Write, args: argparse.Namespace) -> None:
    part, of = (int(word) for word in args.part.split("/"))
    for number, config in enumerate(grid(is_smoke=args.smoke)):
        if number % of != part:
            continue
        started_s = time.process_time()
        trace = trace_of(config)
        made = replay(trace, config.batch, is_expandable=False)
        cpu_s = time.process_time() - started_s
        expandable = replay(trace, config.batch, is_expandable=True)
        write(
            {
                "key": config.key,
                "allocated": made.peak_allocated_bytes,
                "reserved": made.peak_reserved_bytes,
                "reserved_expandable": expandable.peak_reserved_bytes,
                "parts": made.parts,
                "phase": made.peak_phase,
                "cpu_s": cpu_s,
            }
        )


def live_at_peak(trace: Trace) -> Counter[tuple[int, str]]:
    """(bytes, part) of everything that lives at the predicted peak."""
    live: dict[int, int] = {}
    now = peak = 0
    best: dict[int, int] = {}
    for event in trace.events:
        if event >= 0:
            live[event] = trace.allocations[event].num_bytes
            now += live[event]
            if now > peak:
                peak, best = now, dict(live)
        else:
            now -= live.pop(~event)
    return Counter((-(-size // 512) * 512, trace.allocations[index].part) for index, size in best.items())


# On the GPU.


def autocast(precision: str) -> contextlib.AbstractContextManager[object]:
    return torch.autocast("cuda", dtype=torch.bfloat16) if precision == "bf16" else contextlib.nullcontext()


def build(size: str, is_recomputing: bool) -> GPT:
    with torch.device("cuda"):
        return GPT(SHAPES[size], is_recomputing=is_recomputing)


def run_steps(config: Config, num_steps: int = 2) -> None:
    """As a plain loop does it: stock AdamW, one slice, the loss dropped after backward."""
    model = build(config.size, config.is_recomputing)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    ids = torch.randint(0, GPT2_VOCAB, (config.batch, config.length), device="cuda")
    for _ in range(num_steps):
        with autocast(config.precision):
            loss = model(ids, ids) / float(ids.numel())
        loss.backward()
        del loss
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    torch.cuda.synchronize()


def measure_grid(write: Write, args: argparse.Namespace) -> None:
    started_s = time.monotonic()
    write({"facts": card_facts()})
    run_steps(Config("tiny", 4, 256, "bf16", False))
    configs = grid(is_smoke=args.smoke)
    if args.every > 1:
        configs = configs[:: args.every]
    for config in configs:
        if time.monotonic() - started_s > args.limit_s:
            write({"cut_off": True})
            break
        free_caches()
        base = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        try:
            run_steps(config)
        except RuntimeError as error:
            write({"key": config.key, "error": str(error)[:300]})
            continue
        free, total = torch.cuda.mem_get_info()
        stats = torch.cuda.memory_stats()
        write(
            {
                "key": config.key,
                "allocated": torch.cuda.max_memory_allocated(),
                "reserved": torch.cuda.max_memory_reserved(),
                "used": total - free,
                "base": base,
                "requested": stats.get("requested_bytes.all.peak", 0),
                "split": stats.get("inactive_split_bytes.all.peak", 0),
            }
        )


def card_facts() -> dict[str, Any]:
    torch.backends.cuda.matmul.allow_tf32 = True  # speed only; memory is the same
    properties = torch.cuda.get_device_properties(0)
    torch.zeros(1, device="cuda")
    free, total = torch.cuda.mem_get_info()
    before = torch.cuda.memory_allocated()
    value = torch.randn(2048, 2048, device="cuda", requires_grad=True)
    (value @ value).sum().backward()
    del value
    gc.collect()
    facts = {
        "name": properties.name,
        "torch": torch.__version__,
        "total": total,
        "context": total - free - torch.cuda.memory_reserved(),
        "workspace": torch.cuda.memory_allocated() - before,
        "conf": os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""),
    }
    with contextlib.suppress(Exception):
        names = {0: "math", 1: "flash", 2: "efficient", 3: "cudnn"}
        query = torch.empty(2, 12, 1024, 64, device="cuda")
        for dtype in (torch.float32, torch.bfloat16):
            chosen = torch._fused_sdp_choice(*[query.to(dtype)] * 3, is_causal=True)
            facts[f"attention_{str(dtype)[6:]}"] = names.get(int(chosen), str(chosen))
    return facts


def snapshots(write: Write, args: argparse.Namespace) -> None:
    """For a handful of configurations: what lives at the measured peak beside what lives at the predicted one."""
    keys = ("small b8 t1024 bf16", "small b8 t1024 fp32", "medium b16 t1024 bf16 rc", "tiny b4 t256 bf16")
    configs = [config for config in grid(is_smoke=args.smoke) if config.key in keys or args.smoke][:4]
    for config in configs:
        free_caches()
        trace = trace_of(config)
        predicted = Counter({size: 0 for size, _ in live_at_peak(trace)})
        parts: dict[int, set[str]] = {}
        for (size, part), count in live_at_peak(trace).items():
            predicted[size] += count
            parts.setdefault(size, set()).add(part)
        torch.cuda.memory._record_memory_history(max_entries=400_000, stacks="python")
        try:
            run_steps(config)
            events = torch.cuda.memory._snapshot()["device_traces"][0]
        finally:
            torch.cuda.memory._record_memory_history(enabled=None)
        measured, places = measured_at_peak(events)
        rows = [
            {
                "bytes": size,
                "predicted": predicted[size],
                "measured": measured[size],
                "part": ",".join(sorted(parts.get(size, ()))),
                "place": places.get(size, ""),
            }
            for size in sorted({*predicted, *measured}, reverse=True)
        ]
        off = [row for row in rows if row["predicted"] != row["measured"]]
        write({"key": config.key, "differences": off[:40], "largest": rows[:15]})


def measured_at_peak(events: list[dict[str, Any]]) -> tuple[Counter[int], dict[int, str]]:
    live: dict[int, int] = {}
    now = peak = 0
    best: Counter[int] = Counter()
    places: dict[int, str] = {}
    for event in events:
        size, address = int(event["size"]), int(event["addr"])
        rounded = -(-size // 512) * 512
        if event["action"] == "alloc":
            live[address] = rounded
            now += rounded
            places.setdefault(rounded, place_of(event.get("frames", [])))
            if now > peak:
                peak, best = now, Counter(live.values())
        elif event["action"] == "free_completed" and address in live:
            now -= live.pop(address)
    return best, places


def place_of(frames: list[dict[str, Any]]) -> str:
    return " < ".join(f"{Path(str(f.get('filename'))).name}:{f.get('line')} {f.get('name')}" for f in frames[:3])
