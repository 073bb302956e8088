"""Do our kernels and dtypes cost anything in the loss? One start, the same tokens, three ways to train, step by step.

    python bench/losses.py                       GPT-2 124M, 2,000 steps of 4 x 1,024 bytes of Python text, on a GPU
    python bench/losses.py --small --steps 20    does it run, on a CPU

`hand` is the plain loop of bench/throughput.py (float32 weights, autocast), but decays what ours decays, matrices
alone. `flash` is the same with another attention kernel, which shows what rounding alone does. `ours` is the step of
the trainer: bf16 weights with float32 masters, and all kernels. They run side by side.
Printed are means over windows of steps, and how far each is from `hand`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent / "src")]
WAYS = ("hand", "flash", "ours")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--micro-batch", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=3600.0, help="fewer steps if these are over")
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--way", default="", help=argparse.SUPPRESS)
    parser.add_argument("--work", default="")
    options = parser.parse_args()
    if options.way:
        return _train(options)
    work = Path(options.work or tempfile.mkdtemp(prefix="losses-"))
    work.mkdir(parents=True, exist_ok=True)
    _make_tokens(work / "tokens.bin", 100 if options.small else 256)
    words = [sys.executable, __file__, *sys.argv[1:], "--work", str(work), "--way"]
    children = []
    ways = options.ways.split(",")
    for way in ways:
        own = {"TORCHINDUCTOR_CACHE_DIR": str(work / f"code-{way}"), "TORCHINDUCTOR_COMPILE_THREADS": "4"}
        children.append(subprocess.Popen([*words, way], env={**os.environ, **own}, cwd=HERE.parent))
    codes = [child.wait() for child in children]
    if any(codes):
        print(f"exit codes {codes}")
        return 1
    return _compare({way: json.loads((work / f"{way}.json").read_text()) for way in ways})


def _make_tokens(path: Path, vocab: int) -> None:
    import numpy as np

    files = sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py"))[:3000]
    text = b"".join(file.read_bytes() for file in files)
    (np.frombuffer(text, dtype=np.uint8).astype(np.uint16) % vocab).tofile(path)


def _train(options: argparse.Namespace) -> int:
    import torch

    from bench.throughput_rows import BETAS, CLIP, DECAY, LR, Bench, Mean
    from bench.throughput_variants import VARIANTS, make_step
    from jackline.trainer.optim.optimizer import make_optimizer
    from jackline.trainer.startup.precision import attention_kernels

    work = Path(options.work)
    request: dict[str, Any] = {"data": str(work / "tokens.bin"), "is_small": options.small, "model": "small"}
    request |= {"seq_len": 1024, "micro_batch": options.micro_batch, "steps": options.steps, "work": str(work)}
    bench, losses = Bench(request), []
    kind: Any = "plain" if bench.device.type != "cuda" else "flash" if options.way == "flash" else "cudnn"
    began_s = time.monotonic()
    with attention_kernels(kind):
        if options.way == "ours":
            step = make_step(bench, VARIANTS["v-fused"].split())
        else:
            with torch.device(bench.device):
                model = Mean(bench.shape)
            optimizer = make_optimizer(model, lr=LR, betas=BETAS, weight_decay=DECAY, precision="bf16")
            step = _by_hand(bench, model, optimizer, CLIP)
        while len(losses) < options.steps and time.monotonic() < began_s + options.seconds:
            losses.append(step())
            if len(losses) % 100 == 0:
                bench.sync()  # else the clock is far ahead of the GPU
    found = torch.stack(losses).float().tolist()
    (work / f"{options.way}.json").write_text(json.dumps(found))
    print(f"{options.way}: {len(found)} steps in {time.monotonic() - began_s:.0f} s", file=sys.stderr, flush=True)
    return 0


def _by_hand(bench: Any, model: Any, optimizer: Any, clip: float) -> Callable[[], Any]:
    import torch

    compiled: Any = model if bench.is_small else torch.compile(model, dynamic=False)
    batches = bench.batches()

    def step() -> Any:
        with torch.autocast(bench.device.type, dtype=torch.bfloat16):
            loss = compiled(*next(batches))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def _compare(losses: dict[str, list[float]]) -> int:
    hand, count = losses["hand"], min(map(len, losses.values()))
    others = [way for way in losses if way != "hand"]
    print(f"{'steps':>12} {'hand':>9}" + "".join(f"  {way:>9} {'less hand':>10} {'each step':>9}" for way in others))
    ends = [end for end in (count // 20, count // 10, count // 4, count // 2, 3 * count // 4, count) if end]
    for begin, end in zip([0, *ends], ends, strict=False):
        own = sum(hand[begin:end]) / (end - begin)
        line = f"{begin:5}..{end:<5} {own:9.4f}"
        for way in others:
            mean = sum(losses[way][begin:end]) / (end - begin)
            squares = sum((a - b) ** 2 for a, b in zip(losses[way][begin:end], hand[begin:end], strict=True))
            line += f"  {mean:9.4f} {mean - own:+10.5f} {(squares / (end - begin)) ** 0.5:9.4f}"
        print(line)
    if out := os.environ.get("OUT"):
        (Path(out) / "losses.json").write_text(json.dumps(losses))
    return 0


if __name__ == "__main__":
    sys.exit(main())
