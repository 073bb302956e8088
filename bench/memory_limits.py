"""Is "it fits" true near the limit? Models of the zoo train under a limit on the GPU's memory just above and below
what was predicted, and what `plan` says of such a GPU is compared with what happens.

    python bench/memory_limits.py [--out FOLDER] [--only NAME,NAME] [--limit-s 120]

For each model the limit is 1.08, 1.05, 1.03, 1.00, 0.97 and 0.92 of the predicted reserved memory. "fits" that runs
out of memory within three steps is wrong, and none may be. "tight" that runs out and "no" that trains are counted.
"""

from __future__ import annotations

import argparse
import gc
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src"), str(HERE)]

from memory_zoo import EXPANDABLE, MIB, _Steps, has_gpu, job_of, key_of, lines, write  # noqa: E402

SHARES = (1.08, 1.05, 1.03, 1.00, 0.97, 0.92)
CHOSEN = (
    "llama llama-recompute llama-lora gpt2 qwen2 gemma2 mixtral mamba2 bert deberta-v2 modernbert t5 bart whisper"
    " wav2vec2 lstm gru vit swin convnext segformer resnet50 efficientnet densenet unet dit graph"
)
_NUM_STEPS = 3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("limit-results"))
    parser.add_argument("--only", default=",".join(CHOSEN.split()))
    parser.add_argument("--limit-s", type=float, default=120.0)
    parser.add_argument("--stage", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.stage:
        stage, _, part = options.stage.partition(":")
        (judge_part if stage == "judge" else train_all)(options, part)
        return 0
    options.out.mkdir(parents=True, exist_ok=True)
    for old in options.out.glob("*.jsonl"):
        old.unlink()
    count = max(1, min(12, (os.cpu_count() or 2) - 2))
    quiet = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    workers = [start(options, f"judge:{k}/{count}", quiet) for k in range(count)]
    for worker in workers:
        worker.wait()
    if has_gpu():
        start(options, "train", EXPANDABLE).wait()
    return summary(options)


def start(options: argparse.Namespace, stage: str, env: dict[str, str]) -> subprocess.Popen[bytes]:
    argv = [sys.executable, str(Path(__file__)), "--stage", stage, "--out", str(options.out), "--only", options.only]
    return subprocess.Popen([*argv, "--limit-s", str(options.limit_s)], env={**os.environ, **env})


def wanted(options: argparse.Namespace) -> list[tuple[Any, str, str]]:
    """Precisions by turns: half of the models in each."""
    from memory_zoo_models import zoo

    entries = {entry.name: entry for entry in zoo()}
    names = [name for name in options.only.split(",") if name in entries]
    return [(entries[name], ("bf16", "fp32")[number % 2], "real") for number, name in enumerate(names)]


def judge_part(options: argparse.Namespace, part: str) -> None:
    import torch

    from jackline.memory.plan.choose import Room, judged
    from jackline.memory.plan.gpus import find_gpu
    from jackline.memory.predict.step import replay, trace_step

    torch.set_num_threads(1)
    index, count = (int(number) for number in part.split("/"))
    gpu = find_gpu("H200")
    for entry, precision, size in wanted(options)[index::count]:
        row: dict[str, Any] = {"name": entry.name, "precision": precision, "size": size}
        try:
            job = job_of(entry, precision)
            trace = trace_step(job, entry.size, gpu, job.options, is_accumulating=False)
        except Exception as error:
            print(entry.name, precision, "REFUSED", str(error)[:200], flush=True)
            continue
        reserved = replay(trace, entry.size, is_expandable=True).peak_reserved_bytes
        caps = [int(share * reserved) for share in SHARES]
        said = [judged(trace, entry.size, Room(cap), is_expandable=True)[1] for cap in caps]
        write(options.out, f"judged-{index}", {**row, "reserved": reserved, "caps": caps, "said": said})


def train_all(options: argparse.Namespace, _: str) -> None:
    import torch

    ends_s = time.monotonic() + options.limit_s
    total = torch.cuda.get_device_properties(0).total_memory
    judged = {key_of(row): row for row in lines(options.out, "judged")}
    for entry, precision, size in wanted(options):
        row = judged.get((entry.name, precision, size))
        if row is None or time.monotonic() > ends_s:
            continue
        trained: list[bool] = []
        for cap in row["caps"]:
            # Where a larger limit was too small, a smaller one is too.
            trained.append((not trained or trained[-1]) and trains_under(entry, precision, cap / total))
        write(options.out, "trained", {**row, "trained": trained})
        pairs = " ".join(
            f"{share:.2f} {said}/{'ran' if ran else 'OOM'}{'!' if said == 'fits' and not ran else ''}"
            for share, said, ran in zip(SHARES, row["said"], trained, strict=True)
        )
        print(f"{entry.name:<16} {precision:<4} {row['reserved'] / MIB:7.0f} MiB  {pairs}", flush=True)


def trains_under(entry: Any, precision: str, share: float) -> bool:
    import torch

    clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None)
    gc.collect()
    clear()
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(min(1.0, share))
    steps = None
    try:
        steps = _Steps(job_of(entry, precision), entry.size, precision)
        for _ in range(_NUM_STEPS):
            steps.run()
        torch.cuda.synchronize()
    except (torch.OutOfMemoryError, RuntimeError) as error:
        if "memory" not in str(error) and "ALLOC" not in str(error) and "workspace" not in str(error):
            raise
        return False
    finally:
        del steps
        torch.cuda.set_per_process_memory_fraction(1.0)
    return True


def summary(options: argparse.Namespace) -> int:
    counts: dict[tuple[str, bool], int] = {}
    for row in lines(options.out, "trained"):
        for said, ran in zip(row["said"], row["trained"], strict=True):
            counts[said, ran] = counts.get((said, ran), 0) + 1
    print(f"{len(lines(options.out, 'trained'))} models at {len(SHARES)} limits")
    for said in ("fits", "tight", "no"):
        print(f"{said}: {counts.get((said, True), 0)} trained, {counts.get((said, False), 0)} ran out of memory")
    return counts.get(("fits", False), 0)


if __name__ == "__main__":
    sys.exit(main())
