"""One row of bench/throughput.py, in a process of its own: `python -m bench.throughput_rows REQUEST` (JSON).

Each peer trains the same shape on the same tokens in the way its documentation shows: bf16 autocast, torch.compile,
fused AdamW, clipping at 1, two loader workers. The first steps are warm-up; the loss is read every tenth step.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from jackline.models.gpt import GPT
from jackline.models.shapes import GPTShape, count_parameters, find_shape

STARTED_AT_S = float(os.environ.get("STARTED_AT_S", time.time()))
WARM_STEPS = 25
LR, BETAS, DECAY, CLIP = 3e-4, (0.9, 0.95), 0.1, 1.0


class Bench:
    """What every row shares: shape, tokens, clock, and where its figures go."""

    def __init__(self, request: dict[str, Any]) -> None:
        self.request = request
        self.is_small = bool(request["is_small"])
        self.device = torch.device("cuda" if torch.cuda.is_available() and not self.is_small else "cpu")
        small = GPTShape(2, 2, 64, context=64, vocab_size=512)
        wanted = replace(find_shape(request["model"]), context=request["seq_len"], vocab_size=50_304)
        self.shape = small if self.is_small else wanted
        self.micro_batch = 4 if self.is_small else int(request["micro_batch"])
        self.warm = 2 if self.is_small else WARM_STEPS
        self.steps = int(request["steps"])
        self.first_s = 0.0
        self.extra: dict[str, Any] = {}
        self._count = 0
        self._began_s = 0.0
        self.took_s = 0.0
        self.seen: Any = None  # a profiler
        self.profiled = 0
        torch.manual_seed(1337)
        torch.set_float32_matmul_precision("high")

    def sync(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def tick(self) -> bool:
        """After a step; True when all are done."""
        self._count += 1
        if self._count == 1:
            self.sync()
            self.first_s = time.time() - STARTED_AT_S
        if self._count == max(1, self.warm - 10) and "BENCH_TURN" in os.environ:
            self._wait_for_turn(Path(os.environ["BENCH_TURN"]))
        if self._count == self.warm:
            self.sync()
            self._began_s = time.perf_counter()
        if self._count == self.warm + self.steps:
            self.sync()
            self.took_s = time.perf_counter() - self._began_s
        return self._count >= self.warm + self.steps

    def _wait_for_turn(self, turn: Path) -> None:
        """`bench/throughput.py --side-by-side`: others are being timed."""
        self.sync()
        name = self.request["name"]
        (turn.parent / f"ready-{name}").touch()
        while turn.read_text() != name:
            time.sleep(0.05)

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        tokens = np.memmap(self.request["data"], dtype=np.uint16, mode="r")
        dice, length = np.random.default_rng(1), self.shape.context
        while True:
            starts = dice.integers(0, len(tokens) - length - 1, self.micro_batch)
            rows = torch.from_numpy(np.stack([tokens[at : at + length + 1] for at in starts]).astype(np.int64))
            if self.device.type == "cuda":
                rows = rows.pin_memory().to(self.device, non_blocking=True)
            yield rows[:, :-1], rows[:, 1:]

    def loader(self) -> Any:
        data = Tokens(self.request["data"], self.shape.context, self.micro_batch * (self.warm + self.steps + 4))
        return torch.utils.data.DataLoader(
            data, self.micro_batch, shuffle=True, num_workers=2, pin_memory=not self.is_small, drop_last=True
        )

    def write(self, loss: float) -> None:
        Path(self.request["out"]).write_text(json.dumps(self.row(loss)))

    def row(self, loss: float) -> dict[str, Any]:
        milliseconds = 1e3 * self.took_s / self.steps
        shape, per_step = self.shape, self.micro_batch * self.shape.context
        matrices = count_parameters(shape) - shape.context * shape.width
        peak = torch.cuda.max_memory_allocated() / 2**30 if self.device.type == "cuda" else 0.0
        return {
            "micro_batch": self.micro_batch, "ms": milliseconds, "tokens_per_s": 1e3 * per_step / milliseconds,
            "flops_per_token": 6 * matrices + 12 * shape.num_layers * shape.width * shape.context,
            "peak_gib": peak, "first_s": self.first_s, "loss": loss, **self.extra,
        }  # fmt: skip


class Tokens(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """Windows of the token file, for the peers' DataLoaders."""

    def __init__(self, path: str, length: int, count: int) -> None:
        self._path, self._length, self._count = path, length, count
        self._tokens: Any = None

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if self._tokens is None:
            self._tokens = np.memmap(self._path, dtype=np.uint16, mode="r")
        at = (index * 1_037_389) % (len(self._tokens) - self._length - 1)
        row = torch.from_numpy(self._tokens[at : at + self._length + 1].astype(np.int64))
        return row[:-1], row[1:]


class Mean(nn.Module):
    """The same model with the mean loss that the peers expect."""

    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        self.gpt = GPT(shape)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        return self.gpt(ids, targets) / targets.numel()


def ceiling(bench: Bench) -> None:
    size = 256 if bench.is_small else 8192
    left, right = (torch.randn(size, size, device=bench.device, dtype=torch.bfloat16) for _ in range(2))
    for _ in range(3):
        left @ right
    bench.sync()
    best = 0.0
    for _ in range(5):
        began_s = time.perf_counter()
        for _ in range(10):
            left @ right
        bench.sync()
        best = max(best, 10 * 2 * size**3 / (time.perf_counter() - began_s) / 1e12)
    Path(bench.request["out"]).write_text(json.dumps({"tflops": best}))


def hand(bench: Bench) -> None:
    """What a good engineer writes in an afternoon."""
    with torch.device(bench.device):
        model = Mean(bench.shape)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=BETAS, weight_decay=DECAY, fused=True)
    step = torch.compile(model, dynamic=False) if not bench.is_small else model
    for count, (ids, targets) in enumerate(bench.batches()):
        with torch.autocast(bench.device.type, dtype=torch.bfloat16):
            loss = step(ids, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if count % 10 == 9:
            loss.item()
        if bench.tick():
            break
    bench.write(loss.item())


def accelerate(bench: Bench) -> None:
    from accelerate import Accelerator

    machine = Accelerator(
        mixed_precision="bf16", dynamo_backend="no" if bench.is_small else "inductor", cpu=bench.is_small
    )
    plain = Mean(bench.shape).to(machine.device)
    rule = torch.optim.AdamW(plain.parameters(), lr=LR, betas=BETAS, weight_decay=DECAY, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(rule, lambda _: 1.0)
    model, optimizer, loader, schedule = machine.prepare(plain, rule, bench.loader(), schedule)
    for count, (ids, targets) in enumerate(loader):
        loss = model(ids, targets)
        machine.backward(loss)
        machine.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        if count % 10 == 9:
            loss.item()
        if bench.tick():
            break
    bench.write(loss.item())


def lightning(bench: Bench) -> None:
    try:
        import lightning.pytorch as pl
    except ImportError:
        import pytorch_lightning as pl

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = Mean(bench.shape)
            self.last: Any = None

        def training_step(self, batch: Any, number: int) -> Tensor:
            loss = self.step(*batch)
            self.last = loss.detach()
            self.log("loss", self.last)
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=LR, betas=BETAS, weight_decay=DECAY, fused=True)

        def configure_gradient_clipping(self, *_: Any, **__: Any) -> None:
            # Trainer(gradient_clip_val=) refuses fused optimizers under mixed precision.
            torch.nn.utils.clip_grad_norm_(self.parameters(), CLIP, foreach=True)

    class Watch(pl.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
            bench.tick()
            if trainer.global_step % 10 == 9:
                module.last.item()

    module = Module()
    module.__dict__["step"] = module.model if bench.is_small else torch.compile(module.model, dynamic=False)
    trainer = pl.Trainer(
        max_steps=bench.warm + bench.steps, precision="bf16-mixed", accelerator="cpu" if bench.is_small else "gpu",
        devices=1, logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        log_every_n_steps=10, callbacks=[Watch()], default_root_dir=bench.request["work"],
    )  # fmt: skip
    trainer.fit(module, bench.loader())
    bench.write(float(module.last))


def transformers(bench: Bench) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

    shape, losses = bench.shape, [0.0]
    settings = GPT2Config(
        vocab_size=shape.vocab_size, n_positions=shape.context, n_embd=shape.width, n_layer=shape.num_layers,
        n_head=shape.num_heads, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip

    class Watch(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            bench.tick()

        def on_log(self, *_: Any, logs: Any = None, **__: Any) -> None:
            losses.append(float((logs or {}).get("loss", losses[-1])))

    arguments = TrainingArguments(
        output_dir=str(Path(bench.request["work"]) / "hf"), per_device_train_batch_size=bench.micro_batch,
        max_steps=bench.warm + bench.steps, bf16=True, torch_compile=not bench.is_small, dataloader_num_workers=2,
        optim="adamw_torch_fused", report_to="none", logging_steps=10, save_strategy="no", learning_rate=LR,
        weight_decay=DECAY, adam_beta2=BETAS[1], max_grad_norm=CLIP, disable_tqdm=True,
        remove_unused_columns=False, use_cpu=bench.is_small,
    )  # fmt: skip
    data = Tokens(bench.request["data"], shape.context, bench.micro_batch * (bench.warm + bench.steps + 4))
    Trainer(
        model=GPT2LMHeadModel(settings), args=arguments, train_dataset=data, callbacks=[Watch()],
        data_collator=lambda rows: {
            "input_ids": torch.stack([row[0] for row in rows]), "labels": torch.stack([row[0] for row in rows])
        },
    ).train()  # fmt: skip
    bench.write(losses[-1])


PROFILED_STEPS = 12


def begin_profile() -> Any:
    from torch.profiler import ProfilerActivity, profile

    seen = profile(activities=[ProfilerActivity.CUDA])
    seen.__enter__()
    return seen


def profile_step(step: Callable[[], Any]) -> str:
    seen = begin_profile()
    for _ in range(PROFILED_STEPS):
        step()
    return end_profile(seen)


def end_profile(seen: Any) -> str:
    """Milliseconds of a step by kind of kernel, the largest kernels, and where the GPU waits."""
    torch.cuda.synchronize()
    seen.__exit__(None, None, None)
    steps = PROFILED_STEPS
    kinds: dict[str, float] = {}
    top: dict[str, tuple[float, int]] = {}
    gaps: dict[str, float] = {}
    kernels = sorted(
        (event.start_ns(), event.duration_ns(), event.name())
        for event in seen.profiler.kineto_results.events()
        if event.device_type() == torch.autograd.DeviceType.CUDA and event.duration_ns() > 0
    )
    if not kernels:
        return ""  # on a CPU
    kernels = kernels[len(kernels) // steps :]  # the first step waits for the profiler
    count, last_ns, last = steps - 1, kernels[0][0], ""
    for start_ns, took_ns, name in kernels:
        kind = _kind(name.lower())
        kinds[kind] = kinds.get(kind, 0.0) + took_ns / 1e6 / count
        spent, times = top.get(name, (0.0, 0))
        top[name] = (spent + took_ns / 1e6 / count, times + 1)
        if start_ns > last_ns:
            place = f"{last[:28]} > {name[:28]}"
            gaps[place] = gaps.get(place, 0.0) + (start_ns - last_ns) / 1e6 / count
        last_ns, last = max(last_ns, start_ns + took_ns), name
    span_ms = (last_ns - kernels[0][0]) / 1e6 / count
    words = ", ".join(f"{kind} {spent:.2f}" for kind, spent in sorted(kinds.items(), key=lambda pair: -pair[1]))
    largest = sorted(
        ((spent, f"{times // count}x {name[:60]}") for name, (spent, times) in top.items()), reverse=True
    )
    waits = sorted(((spent, place) for place, spent in gaps.items()), reverse=True)
    return (
        f"span {span_ms:.2f}, waits {sum(gaps.values()):.2f}: {words} | "
        + "; ".join(f"{spent:.2f} {word}" for spent, word in largest[:30])
        + " | waits: "
        + "; ".join(f"{spent:.2f} {place}" for spent, place in waits[:10])
    )


def _kind(key: str) -> str:
    marks = {
        "attention": ("flash", "fmha", "sdpa", "sdp"), "adamw": ("adam",),
        "matmul": ("gemm", "nvjet", "cutlass", "cublas", "wgmma"), "fused": ("triton",), "copy": ("memcpy", "memset"),
    }  # fmt: skip
    return next((kind for kind, words in marks.items() if any(word in key for word in words)), "other")


ROWS: dict[str, Callable[[Bench], None]] = {
    "ceiling": ceiling, "hand": hand, "accelerate": accelerate, "lightning": lightning, "transformers": transformers,
}  # fmt: skip


def main() -> None:
    request = json.loads(sys.argv[1])
    name, bench = request["name"], Bench(request)
    if name.startswith("v-"):
        from bench.throughput_variants import serve

        serve(bench, name)
    elif name.startswith("ours"):
        from bench.throughput_ours import ours

        ours(bench, name)
    else:
        ROWS[name](bench)


if __name__ == "__main__":
    main()
