"""Training throughput on one GPU: Jackline's trainer beside what people would take instead. One run, ratios.

    python bench/throughput.py                        all rows, two rounds, about 8 minutes on an H200
    python bench/throughput.py --only ours,lightning  some rows
    python bench/throughput.py --variants             the step alone, one change at a time: where the gain comes from
    python bench/throughput.py --model xl --micro-batch 16 --only hand,lightning,ours     1.3B
    python bench/throughput.py --seq-len 8192 --micro-batch 4 --only hand,lightning,ours  a long context
    python bench/throughput.py --small                everything on the CPU with a tiny shape: does it run

GPT-2 124M shape (12 x 768, 12 heads, vocabulary 50,304, sequence 1,024, no dropout) unless said otherwise, bf16,
AdamW, clipping, tokens from a file. Each row is a process of its own; rounds are interleaved. `ours` is
`jackline train` with all protections on and a save every 60 s. MFU counts 6N + 12 L d T per token against the GPU's
own measured bf16 product.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent / "src")]

from bench.throughput_variants import VARIANTS, run_variants  # noqa: E402

PEERS = ("hand", "accelerate", "lightning", "transformers")
OURS = ("ours", "ours-bare", "ours-64")


def main() -> int:
    options = _parse()
    work = Path(options.work or tempfile.mkdtemp(prefix="throughput-"))
    work.mkdir(parents=True, exist_ok=True)
    data = work / "tokens.bin"
    _make_tokens(data, 512 if options.small else 50_257, 400_000 if options.small else 40_000_000)
    names = list(options.only.split(",") if options.only else [*VARIANTS] if options.variants else (*PEERS, *OURS))
    if not options.variants:
        names = ["ceiling", *names]
    rows: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    if options.side_by_side:
        rows = _run_side_by_side(names, work, data, options)
        _print(rows)
        return _keep(rows, work)
    if options.variants:
        rows = run_variants(names, _request(work, data, options), options.rounds, options.at_once)
        _print(rows)
        return _keep(rows, work)
    for number in range(options.rounds):
        for name in names if number % 2 == 0 else reversed(names):
            if number and (name == "ceiling" or name in options.once.split(",")):
                continue
            rows[name].append(_run(name, work, data, options))
    _print(rows)
    return _keep(rows, work)


def _keep(rows: dict[str, list[dict[str, Any]]], work: Path) -> int:
    (work / "throughput.json").write_text(json.dumps(rows, indent=1))
    if out := os.environ.get("OUT"):
        (Path(out) / "throughput.json").write_text(json.dumps(rows, indent=1))
    return 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="")
    parser.add_argument("--once", default="", help="rows for the first round alone")
    parser.add_argument("--variants", action="store_true")
    parser.add_argument("--at-once", type=int, default=6, help="variants that compile side by side")
    parser.add_argument(
        "--side-by-side", action="store_true",
        help="compile all rows at once, then time one after the other while the others wait; one round",
    )  # fmt: skip
    parser.add_argument("--profile", action="store_true", help="of each variant: milliseconds by kernel")
    parser.add_argument("--wait-for", default="", help="side by side: no timing before this file exists")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--work", default="")
    parser.add_argument("--model", default="small")
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument("--micro-batch", type=int, default=32)
    return parser.parse_args()


def _make_tokens(path: Path, vocab: int, count: int) -> None:
    """Zipf-like ids, as text has them: an embedding's gradient meets the same few rows again and again."""
    import numpy as np

    if path.exists():
        return
    ranks = np.random.default_rng(0).zipf(1.2, count)
    (ranks % vocab).astype(np.uint16).tofile(path)


def _run_side_by_side(
    names: list[str], work: Path, data: Path, options: argparse.Namespace
) -> dict[str, list[dict[str, Any]]]:
    """The file `turn` names the row that may be timed; `ready-NAME` says that a row has compiled and waits."""
    os.environ["BENCH_TURN"] = str(work / "turn")
    (work / "turn").write_text("")
    rows: dict[str, list[dict[str, Any]]] = {}
    with ThreadPoolExecutor(len(names)) as pool:
        found = {name: pool.submit(_run, name, work, data, options) for name in names if name != "ceiling"}
        if options.wait_for:
            while not Path(options.wait_for).exists():
                time.sleep(0.2)
        if "ceiling" in names:
            rows["ceiling"] = [_run("ceiling", work, data, options)]
        while not all((work / f"ready-{name}").exists() or found[name].done() for name in found):
            time.sleep(0.1)  # who still compiles takes cores from who is timed
        for name, future in found.items():
            (work / "turn").write_text(name)
            while not (work / f"{name}.json").exists() and not future.done():
                time.sleep(0.1)  # its process may take seconds to end
        rows |= {name: [future.result()] for name, future in found.items()}
    return {name: rows[name] for name in names}


def _run(name: str, work: Path, data: Path, options: argparse.Namespace) -> dict[str, Any]:
    out = work / f"{name}.json"
    out.unlink(missing_ok=True)
    request = {"name": name, "out": str(out), **_request(work, data, options)}
    began_s = time.monotonic()
    print(f"[{time.strftime('%H:%M:%S')}] {name} ...", file=sys.stderr, flush=True)
    # A folder for each row: otherwise a row's first step gets what another has compiled.
    environment = {**os.environ, "STARTED_AT_S": repr(time.time())}
    environment |= {
        "TORCHINDUCTOR_CACHE_DIR": str(work / f"code-{name}"),
        "TRITON_CACHE_DIR": str(work / f"triton-{name}"),
    }
    ended = subprocess.run(
        [sys.executable, "-m", "bench.throughput_rows", json.dumps(request)],
        cwd=HERE.parent, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if not out.exists():
        tail = (ended.stdout + ended.stderr)[-1500:]
        print(f"{name} failed with exit {ended.returncode}:\n{tail}", file=sys.stderr, flush=True)
        return {"error": tail.strip().splitlines()[-1][:100] if tail.strip() else f"exit {ended.returncode}"}
    row: dict[str, Any] = json.loads(out.read_text())
    row["took_s"] = time.monotonic() - began_s
    print(f"   {json.dumps(row)[:300]}", file=sys.stderr, flush=True)
    return row


def _request(work: Path, data: Path, options: argparse.Namespace) -> dict[str, Any]:
    """What every row is told."""
    request = {"data": str(data), "work": str(work), "has_profile": options.profile}
    request |= {"steps": 6 if options.small else options.steps, "is_small": options.small}
    return request | {"model": options.model, "seq_len": options.seq_len, "micro_batch": options.micro_batch}


def _print(rows: dict[str, list[dict[str, Any]]]) -> None:
    good = {name: [row for row in found if "ms" in row] for name, found in rows.items()}
    peak = next((row["tflops"] for row in rows.get("ceiling", []) if "tflops" in row), None)
    peers = [statistics.median(row["tokens_per_s"] for row in good[name]) for name in PEERS if good.get(name)]
    best = max(peers, default=None)
    if peak:
        print(f"bf16 product 8192^3: {peak:.0f} TFLOP/s")
    print(f"{'what':16} {'batch':>5} {'ms/step':>8} {'spread':>13} {'tokens/s':>9} {'of best peer':>12} {'MFU %':>6} "
          f"{'peak GiB':>8} {'first step s':>12}")  # fmt: skip
    for name, found in good.items():
        if name == "ceiling":
            continue
        if not found:
            print(f"{name:16} {rows[name][0].get('error', 'no figure') if rows[name] else ''}")
            continue
        milliseconds = [row["ms"] for row in found]
        rate = statistics.median(row["tokens_per_s"] for row in found)
        share = f"{rate / best:.3f}" if best else "-"
        mfu = f"{100 * rate * found[0]['flops_per_token'] / 1e12 / peak:.1f}" if peak else "-"
        firsts = [row["first_s"] for row in found if row.get("first_s")]
        first = "..".join(f"{value:.0f}" for value in firsts[:1] + firsts[-1:])  # cold, then with what torch cached
        print(f"{name:16} {found[0]['micro_batch']:5} {statistics.median(milliseconds):8.2f} "
              f"{min(milliseconds):6.2f}..{max(milliseconds):<5.2f} {rate:9,.0f} {share:>12} {mfu:>6} "
              f"{found[0]['peak_gib']:8.1f} {first:>12}")  # fmt: skip
        if restarts := [row["restart_s"] for row in found if "restart_s" in row]:
            words = ", ".join(f"{value:.1f}" for value in restarts)
            print(f"    first step of the attempt after a kill -9, compiled code kept: {words} s after its start")
        if leaves := [row["leave_s"] for row in found if "leave_s" in row]:
            print(f"    its process ended {', '.join(f'{value:.1f}' for value in leaves)} s after its last line")
        if found[-1].get("profile"):
            print(f"    profile: {found[-1]['profile']}")


if __name__ == "__main__":
    sys.exit(main())
