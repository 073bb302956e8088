"""Native Sparse Attention on one GPU: the m7c model and its attention alone, against dense attention. One run.

    python bench/nsa.py                     attention alone, then tokens/s of the model, 1k to 64k tokens
    python bench/nsa.py --only attention    one part: attention, model, profile
    python bench/nsa.py --tune              the kernels alone with other tiles: what is fastest on this GPU
    python bench/nsa.py --small             tiny, on the CPU by the plain road: does the script run

Model: 12 x 768, 12 heads, 2 key/value groups, vocabulary 50,304, bf16 weights, AdamW, compiled as a whole. The dense
one is the same but for its attention: one branch, the same key/value groups, the faster of cuDNN and flash. Attention
alone is queries, keys and values in, mixed branches out, at 65,536 tokens a call. Other packages run where they
import; flash-linear-attention's kernel asks for 16 heads a group, so it and ours are also timed with 32 heads.
Rows that do not fit into --limit-s are named, not measured. Models compile side by side, a process each, and are
timed one at a time while all others rest.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "src"), str(Path(__file__).resolve().parents[1])]

import torch  # noqa: E402

from bench.nsa_model import Clock, model_rows, shape_of  # noqa: E402
from bench.nsa_rows import attention_rows, peer_rows, tune_rows  # noqa: E402
from jackline.models.nsa.shape import NSAShape  # noqa: E402

LENGTHS = (1024, 4096, 16384, 32768, 65536)


def main() -> int:
    options = _parse()
    if not torch.cuda.is_available() and not options.small:
        print("bench/nsa.py: no CUDA GPU here, nothing measured; --small runs the script on the CPU")
        return 0
    if options.small:
        torch.set_num_threads(1)
    device = torch.device("cpu" if options.small else "cuda")
    clock = Clock(device, repeats=options.repeats, limit_s=options.limit_s)
    shape = shape_of(is_small=options.small)
    lengths = [96, 128] if options.small else [int(word) for word in options.lengths.split(",")]
    parts: dict[str, Callable[[], list[dict[str, Any]]]] = {
        "attention": lambda: attention_rows(clock, shape, lengths, 1 << (9 if options.small else 16)),
        "peers": lambda: peer_rows(clock, shape, lengths, 1 << (9 if options.small else 16)),
        "model": lambda: model_rows(clock, lengths, options),
        "profile": lambda: profile_rows(clock, shape, lengths),
        "tune": lambda: tune_rows(clock, shape, lengths),
    }
    chosen = ["tune"] if options.tune else options.only.split(",")
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name() if device.type == 'cuda' else 'CPU'}")
    results = {}
    for name in chosen:
        results[name] = parts[name]()
        _print(name, results[name])
    if out := os.environ.get("OUT"):
        (Path(out) / f"nsa-{'-'.join(chosen)}.json").write_text(json.dumps(results, indent=1))
    return 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="attention,peers,model")
    parser.add_argument("--lengths", default=",".join(str(length) for length in LENGTHS))
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--limit-s", type=float, default=540.0)
    parser.add_argument("--tokens", type=int, default=32_768, help="per step of the model, at least one sequence")
    parser.add_argument("--compile", choices=("whole", "block", "off"), default="whole")
    return parser.parse_args()


def profile_rows(clock: Clock, shape: NSAShape, lengths: list[int]) -> list[dict[str, Any]]:
    """Where the time of our attention goes, kernel by kernel."""
    from torch.profiler import ProfilerActivity, profile

    from bench.nsa_rows import attention_inputs, sparse_call

    rows: list[dict[str, Any]] = []
    for length in lengths:
        forward_and_back = sparse_call(clock, shape, attention_inputs(clock, shape, length, 1 << 16))[1]
        for _ in range(3):
            forward_and_back()
        with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as seen:
            for _ in range(5):
                forward_and_back()
            if clock.device.type == "cuda":
                torch.cuda.synchronize()
        found = [(event.self_device_time_total / 5e3, event.count // 5, event.key) for event in seen.key_averages()]
        rows += [
            {"what": name[:60], "length": length, "ms": round(spent, 3), "calls": count}
            for spent, count, name in sorted(found, reverse=True)[:40]
            if spent > 0.005
        ]
    return rows


def _print(name: str, rows: list[dict[str, Any]]) -> None:
    print(f"\n{name}")
    for row in rows:
        words = [f"{key} {value:,}" if isinstance(value, int | float) else f"{key} {value}"
                 for key, value in row.items() if key not in ("what", "length")]  # fmt: skip
        print(f"  {row.get('length', ''):>6} {row['what']:60} " + "  ".join(words))
    if name == "model":
        _print_ratios(rows, "tokens_per_s")
    elif name == "attention":
        _print_ratios(rows, "both_ms")


def _print_ratios(rows: list[dict[str, Any]], key: str) -> None:
    """Sparse against the fastest dense row of the same length."""
    for length in sorted({row["length"] for row in rows}):
        ours = [row[key] for row in rows if row["length"] == length and "sparse" in row["what"] and key in row]
        dense = [row[key] for row in rows if row["length"] == length and "dense" in row["what"] and key in row]
        if ours and dense:
            ratio = min(dense) / ours[0] if key.endswith("ms") else ours[0] / max(dense)
            print(f"  {length:>6} {key}: sparse is {ratio:.2f} times as fast as dense")


if __name__ == "__main__":
    sys.exit(main())
