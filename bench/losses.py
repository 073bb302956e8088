"""Do our kernels and dtypes cost anything in the loss? The same start and tokens, trained in three ways, step by step.

    python bench/losses.py                       GPT-2 124M, 2,000 steps of 4 x 1,024 bytes of Python text, on a GPU
    python bench/losses.py --small --steps 20    does it run, on a CPU

`hand` is the plain loop of bench/throughput.py (float32 weights, autocast); `flash` is the same with another attention
kernel, which shows what rounding alone does; `ours` is the trainer's step: bf16 weights with float32 masters and all
kernels. They run side by side, because only losses count here. Printed are means over windows of steps, and how far
each is from `hand`.
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
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent / "src")]
WAYS = ("hand", "flash", "ours")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--micro-batch", type=int, default=4)
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
    for way in WAYS:
        own = {"TORCHINDUCTOR_CACHE_DIR": str(work / f"code-{way}"), "TORCHINDUCTOR_COMPILE_THREADS": "4"}
        children.append(subprocess.Popen([*words, way], env={**os.environ, **own}, cwd=HERE.parent))
    codes = [child.wait() for child in children]
    if any(codes):
        print(f"exit codes {codes}")
        return 1
    return _compare({way: json.loads((work / f"{way}.json").read_text()) for way in WAYS})


def _make_tokens(path: Path, vocab: int) -> None:
    import numpy as np

    files = sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py"))[:3000]
    text = b"".join(file.read_bytes() for file in files)
    (np.frombuffer(text, dtype=np.uint8).astype(np.uint16) % vocab).tofile(path)


def _train(options: argparse.Namespace) -> int:
    import torch

    from bench.throughput_rows import BETAS, CLIP, DECAY, LR, Bench, Mean
    from bench.throughput_variants import VARIANTS, make_step
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
            for _ in range(options.steps):
                losses.append(step())
        else:
            with torch.device(bench.device):
                model = Mean(bench.shape)
            optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=BETAS, weight_decay=DECAY, fused=True)
            compiled: Any = model if bench.is_small else torch.compile(model, dynamic=False)
            batches = bench.batches()
            for _ in range(options.steps):
                with torch.autocast(bench.device.type, dtype=torch.bfloat16):
                    loss = compiled(*next(batches))
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP, foreach=True)
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
                losses.append(loss.detach())
    found = torch.stack(losses).float().tolist()
    (work / f"{options.way}.json").write_text(json.dumps(found))
    print(f"{options.way}: {len(found)} steps in {time.monotonic() - began_s:.0f} s", file=sys.stderr, flush=True)
    return 0


def _compare(losses: dict[str, list[float]]) -> int:
    count = len(losses["hand"])
    ends = [count // 20, count // 10, count // 4, count // 2, 3 * count // 4, count]
    print(
        f"{'steps':>12} {'hand':>9} {'flash':>9} {'ours':>9} {'flash-hand':>11} {'ours-hand':>11}   and of single steps"
    )
    for begin, end in zip([0, *ends], ends, strict=False):
        means = [sum(losses[way][begin:end]) / (end - begin) for way in WAYS]
        single = [
            (sum((a - b) ** 2 for a, b in zip(losses[way][begin:end], losses["hand"][begin:end], strict=True))
             / (end - begin)) ** 0.5
            for way in WAYS[1:]
        ]  # fmt: skip
        print(f"{begin:5}..{end:<5} " + " ".join(f"{mean:9.4f}" for mean in means)
              + f" {means[1] - means[0]:+11.5f} {means[2] - means[0]:+11.5f}   {single[0]:.4f} {single[1]:.4f}")  # fmt: skip
    if out := os.environ.get("OUT"):
        (Path(out) / "losses.json").write_text(json.dumps(losses))
    return 0


if __name__ == "__main__":
    sys.exit(main())
