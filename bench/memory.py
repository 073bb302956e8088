"""Predicted memory against measured memory, and what happens when it runs out.

    python bench/memory.py [--out results.json] [--smoke] [--budget-s 460] [--reserved]

On a machine with an NVIDIA GPU: the grid of 116 configurations (49M, 125M, 350M; fp32 and bf16; with and without
recomputation), simulated GPUs of 8 to 24 GiB, and the out-of-memory drill; at most 8 minutes. Without a GPU those
rows are skipped and the rest runs: time of a prediction, the drill on the CPU, and the host-memory drill. The table
comes last; the exit code is 1 when a promise is broken. `--reserved` runs the grid twice instead, all 116 with
default and with expandable segments, and lays the allocator's own history beside the replay where it is off.
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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src")]
GIB = 2**30
EXPANDABLE = {name: "expandable_segments:True" for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")}
DEFAULT = {name: "" for name in EXPANDABLE}


@dataclass(frozen=True)
class Row:
    """One promise. `is_kept` is None when there was nothing to hold it against."""

    what: str
    seen: str
    promise: str = ""
    is_kept: bool | None = None


class Stages:
    """Children and their lines of JSON, inside a budget of time."""

    def __init__(self, folder: Path, budget_s: float, *, is_smoke: bool) -> None:
        self._folder, self._is_smoke = folder, is_smoke
        self._ends_s = time.monotonic() + budget_s
        self._files: dict[str, list[Path]] = {}

    def left_s(self) -> float:
        return max(1.0, self._ends_s - time.monotonic())

    def start(self, stage: str, name: str, *words: str, env: dict[str, str]) -> subprocess.Popen[bytes]:
        path = self._folder / f"{name}-{len(self._files.get(name, []))}.jsonl"
        self._files.setdefault(name, []).append(path)
        path.touch()
        argv = [sys.executable, str(HERE / "memory_stage.py"), stage, str(path), *words]
        argv += ["--smoke"] if self._is_smoke else []
        paths = os.pathsep.join((str(ROOT / "src"), str(ROOT)))
        return subprocess.Popen(argv, env={**os.environ, "PYTHONPATH": paths, **env}, stdout=sys.stderr)

    def run(self, stage: str, name: str, *, limit_s: float, env: dict[str, str], every: int = 1) -> None:
        limit_s = min(limit_s, self.left_s())
        say(f"{name}: at most {limit_s:.0f} s")
        child = self.start(stage, name, "--limit-s", str(limit_s * 0.9), "--every", str(every), env=env)
        try:
            code = child.wait(timeout=limit_s + 15)
        except subprocess.TimeoutExpired:
            child.kill()
            code = child.wait()
        say(f"{name}: {'done' if code == 0 else f'ended with {code}'}")

    def lines(self, name: str) -> list[dict[str, Any]]:
        text = "".join(path.read_text() for path in self._files.get(name, []))
        return [json.loads(line) for line in text.splitlines()]


def say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


# Rows that need a GPU.


def gpu_stages(stages: Stages) -> dict[str, Any]:
    num_workers = max(1, min(10, (os.cpu_count() or 2) - 3))
    env = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    workers = [
        stages.start("predict", "predict", "--part", f"{k}/{num_workers}", env=env) for k in range(num_workers)
    ]
    stages.run("grid", "grid", limit_s=150, env=DEFAULT)
    stages.run("grid", "grid-expandable", limit_s=70, env=EXPANDABLE, every=3)
    stages.run("snapshots", "snapshots", limit_s=40, env=DEFAULT)
    for worker in workers:
        worker.wait()
    stages.run("caps", "caps", limit_s=min(150, stages.left_s() - 55), env=EXPANDABLE)
    stages.run("drill", "drill", limit_s=70, env=EXPANDABLE)
    return {name: stages.lines(name) for name in ("predict", "grid", "grid-expandable", "snapshots", "caps", "drill")}


def reserved_stages(stages: Stages) -> dict[str, Any]:
    """The whole grid with both kinds of segments, nothing else: about 5 minutes."""
    num_workers = max(1, min(10, (os.cpu_count() or 2) - 3))
    env = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    workers = [
        stages.start("predict", "predict", "--part", f"{k}/{num_workers}", env=env) for k in range(num_workers)
    ]
    stages.run("grid", "grid-expandable", limit_s=170, env=EXPANDABLE)
    stages.run("grid", "grid", limit_s=170, env=DEFAULT)
    stages.run("segments", "segments", limit_s=60, env=DEFAULT)
    stages.run("segments", "segments-expandable", limit_s=60, env=EXPANDABLE)
    for worker in workers:
        worker.wait()
    return {
        name: stages.lines(name) for name in ("predict", "grid", "grid-expandable", "segments", "segments-expandable")
    }


def print_segments(lines: list[dict[str, Any]]) -> None:
    for line in lines:
        print(
            f"\n{line['key']}: reserved {line['reserved']:.3f} GiB; replay of the GPU's own events"
            f" {line['replay_of_the_cards_events']:.3f}, predicted {line['predicted']:.3f};"
            f" events {line['num_events'][0]} predicted, {line['num_events'][1]} measured"
        )
        for row in line["first_differences"]:
            words = {
                name: ", ".join(f"{action} {size / 2**20:.3f} MiB" for action, size in row[name][:6]) or "nothing"
                for name in ("predicted", "measured")
            }
            print(f"  large event {row['event']}, {row['times']} times: only predicted {words['predicted']}")
            print(f"  {'':>12} only measured {words['measured']}")


@dataclass(frozen=True)
class Pair:
    key: str
    predicted: dict[str, Any]
    measured: dict[str, Any]

    def off(self, what: str, predicted: str | None = None) -> float:
        return float(self.predicted[predicted or what] / self.measured[what] - 1)


def pair_up(predicted: list[dict[str, Any]], measured: list[dict[str, Any]]) -> list[Pair]:
    by_key = {line["key"]: line for line in predicted}
    return [Pair(m["key"], by_key[m["key"]], m) for m in measured if "allocated" in m and m["key"] in by_key]


def print_pairs(pairs: list[Pair], expandable: list[Pair]) -> None:
    reserved = {pair.key: pair for pair in expandable}
    columns = f"{'measured':>9} {'predicted':>9} {'off':>7}"
    print(f"\n{'':<28} {'allocated':^27}  {'reserved, default':^27}  {'expandable':^18}")
    print(f"{'configuration':<28} {columns}  {columns}  {'measured':>10} {'off':>7}    base  at the predicted peak")
    for pair in pairs:
        p, m = pair.predicted, pair.measured
        other = reserved.get(pair.key)
        more = (
            f"{other.measured['reserved'] / GIB:10.3f} {100 * other.off('reserved', 'reserved_expandable'):+6.2f}%"
            if other
            else " " * 18
        )
        parts = " ".join(f"{name}={size / GIB:.2f}" for name, size in p["parts"].items() if size > 2**24)
        print(
            f"{pair.key:<28} {three(pair, 'allocated')}  {three(pair, 'reserved')}  {more}"
            f"  {m['base'] / 2**20:5.0f}M  {p['phase']}: {parts}"
        )


def three(pair: Pair, what: str) -> str:
    measured, predicted = pair.measured[what] / GIB, pair.predicted[what] / GIB
    return f"{measured:9.3f} {predicted:9.3f} {100 * pair.off(what):+6.2f}%"


def print_snapshots(lines: list[dict[str, Any]]) -> None:
    for line in lines:
        print(f"\nat the peak of {line['key']}: sizes whose number differs (predicted, measured)")
        for row in line["differences"][:14]:
            counts = f"{row['predicted']:4d} {row['measured']:4d}"
            print(f"  {row['bytes'] / 2**20:10.3f} MiB  {counts}  {row['part']:<24} {row['place']}")


def print_caps(lines: list[dict[str, Any]]) -> None:
    words = ("cap", "chosen", "after", "largest", "by replay", "measured/predicted")
    print(f"\n{'job':<24} {words[0]:>4} {words[1]:>6} {words[2]:>6} {words[3]:>7} {words[4]:>9} {words[5]:>18}")
    for line in lines:
        if "job" in line:
            ratio = f"{line['ratio']:.4f}" if line["ratio"] else "-"
            wrong = "  WRONG: did not fit" if line["is_wrong"] or line["is_wrong_after"] else ""
            print(
                f"{line['job']:<24} {line['cap_gib']:>4} {line['chosen']:>6} {line['after_rehearsal']:>6}"
                f" {line['largest']:>7} {line['largest_predicted']:>9} {ratio:>18}{wrong}"
            )


def gpu_rows(data: dict[str, Any]) -> list[Row]:
    pairs = pair_up(data["predict"], data["grid"])
    rows = [off_row("allocated", [abs(p.off("allocated")) for p in pairs], worst=0.05, median=0.01)]
    rows.append(off_row("reserved, default segments", [abs(p.off("reserved")) for p in pairs], worst=0.10))
    expandable = pair_up(data["predict"], data["grid-expandable"])
    off = [abs(p.off("reserved", "reserved_expandable")) for p in expandable]
    rows.append(off_row("reserved, expandable segments", off, worst=0.10))
    if "caps" not in data:
        return rows
    rows += cap_rows([line for line in data["caps"] if "job" in line])
    return rows + drill_rows(data["drill"])


def off_row(what: str, off: Sequence[float], *, worst: float, median: float | None = None) -> Row:
    if not off:
        return Row(f"{what}: predicted against measured", "nothing was measured", is_kept=False)
    seen_worst, seen_median = max(off), statistics.median(off)
    is_kept = seen_worst <= worst and (median is None or seen_median <= median)
    promise = f"worst {100 * worst:.0f} %" + (f", median {100 * median:.0f} %" if median else "")
    seen = f"worst {100 * seen_worst:.2f} %, median {100 * seen_median:.2f} % of {len(off)}"
    return Row(f"{what}: predicted against measured", seen, promise, is_kept)


def cap_rows(lines: list[dict[str, Any]]) -> list[Row]:
    if not lines:
        return [Row("simulated GPUs", "nothing was measured", is_kept=False)]
    wrong = sum(line["is_wrong"] or line["is_wrong_after"] for line in lines)
    near = [line["largest"] - line["after_rehearsal"] <= max(1, line["largest"] // 10) for line in lines]
    return [
        Row("wrong 'it fits' on simulated GPUs", f"{wrong} of {len(lines)}", "0", wrong == 0),
        Row(
            "micro-batch after rehearsal, 90 % of the largest or within one",
            f"{sum(near)} of {len(near)}",
            "all",
            all(near),
        ),
    ]


def drill_rows(lines: list[dict[str, Any]]) -> list[Row]:
    if not lines:
        return [Row("out-of-memory drill", "did not finish", is_kept=False)]
    line = lines[0]
    steps = " -> ".join(str(c["old_micro_batch"]) for c in line["shrunk"]) + f" -> {line['micro_batch']}"
    reserved = line["reserved"]
    growth = reserved[-1] - reserved[min(1, len(reserved) - 1)]
    return [
        Row(
            f"drill: gradients against the unshrunk step, {steps}",
            f"{line['of_unshrunk']:.1e} (clean step of the same size {line['of_clean']:.1e},"
            f" two clean ones differ by {line['two_clean_steps_differ_by']:.1e})",
            "5e-6",
            line["of_unshrunk"] <= 5e-6,
        ),
        Row("drill: the whole recovered step", f"{line['recovery_s']:.1f} s", "6 s", line["recovery_s"] <= 6),
        Row("drill: growth of reserved memory over further steps", f"{growth / 2**20:.0f} MiB", "0", growth <= 0),
    ]


# Rows that need none.

_PREDICT = """
import json, time
import torch
started_s = time.process_time()
from memory_grid import CARD, Config, job_of
from jackline.memory.predict.step import replay, trace_step
config = Config("small", 8, 1024, "bf16", False)
imported_s = time.process_time() - started_s
started_s = time.process_time()
job = job_of("small", 1024, config.options)
first = replay(trace_step(job, 8, CARD, config.options), 8, is_expandable=True)
first_s = time.process_time() - started_s
started_s = time.process_time()
replay(trace_step(job, 9, CARD, config.options), 9, is_expandable=True)
print(json.dumps({"first_s": first_s, "next_s": time.process_time() - started_s, "import_s": imported_s}))
"""


def prediction_row() -> Row:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT / "src"), str(HERE))), "OMP_NUM_THREADS": "1"}
    env["CUDA_VISIBLE_DEVICES"] = ""
    done = subprocess.run([sys.executable, "-c", _PREDICT], env=env, capture_output=True, text=True)
    if done.returncode:
        return Row("one prediction, 125M", done.stderr.strip().splitlines()[-1][:90], "2 s of CPU", False)
    told = json.loads(done.stdout)
    seen = f"{told['first_s']:.2f} s of CPU in a fresh process after importing torch, {told['next_s']:.2f} s the next"
    return Row("one prediction, 125M, no GPU", seen, "2 s of CPU", told["first_s"] <= 2.0)


def cpu_drill_rows() -> list[Row]:
    import torch

    from jackline.memory.guard.safe_step import SafeStep
    from jackline.models.gpt import GPT
    from jackline.models.shapes import GPTShape
    from tests.memory.injected import OutOfMemoryAt

    torch.manual_seed(0)
    model = GPT(GPTShape(4, 4, 128, context=64, vocab_size=997))
    ids = torch.randint(0, 997, (32, 64))

    def gradients(safe: SafeStep) -> list[torch.Tensor]:
        model.zero_grad(set_to_none=True)
        safe(lambda part: (model(part, part), part.numel()), ids)
        return [w.grad.clone() for w in model.parameters() if w.grad is not None]

    with OutOfMemoryAt(max_rows=8 * 64) as injected:
        ours = gradients(SafeStep(model))
    clean, unshrunk = gradients(SafeStep(model, micro_batch=8)), gradients(SafeStep(model))
    is_equal = injected.num_raised == 2 and all(torch.equal(a, b) for a, b in zip(ours, clean, strict=True))
    off = sum(((a.double() - b.double()) ** 2).sum() for a, b in zip(ours, unshrunk, strict=True))
    relative = float((off / sum((b.double() ** 2).sum() for b in unshrunk)) ** 0.5)
    return [
        Row(
            "drill on the CPU, 32 -> 16 -> 8, against a clean step of 8",
            "bit-equal" if is_equal else "differs",
            "bit-equal",
            is_equal,
        ),
        Row("drill on the CPU, against the unshrunk step, relative L2", f"{relative:.1e}", "5e-6", relative <= 5e-6),
    ]


def host_row(num_runs: int) -> Row:
    from tests.memory.test_host_guard import eat
    from tests.places import Unavailable

    what = f"host memory: {num_runs} eaters of 200 MB/s under 4 GB"
    codes = []
    for number in range(num_runs):
        with tempfile.TemporaryDirectory() as folder:
            try:
                code, _ = eat(Path(folder), limit="4G", save_mb=128)
            except Unavailable as reason:
                return Row(what, f"skipped: {reason}")
            is_saved = (Path(folder) / "checkpoint").exists() and code == 75
            codes.append(is_saved)
            say(f"eater {number + 1} of {num_runs}: exit {code}")
    return Row(what, f"{sum(codes)} of {num_runs} left with a checkpoint and 75", "all", all(codes))


def attempt(what: str, rows: Callable[[], list[Row]]) -> list[Row]:
    """A row that cannot be made is a broken promise with its reason, not the end of the table."""
    try:
        return rows()
    except ImportError as error:
        return [Row(what, f"skipped: {error}")]


def has_gpu() -> bool:
    try:
        import torch
    except ImportError:
        return False
    return torch.cuda.is_available()


def print_table(rows: list[Row]) -> None:
    width = max(len(row.what) for row in rows)
    print(f"\n{'what':<{width}}  seen")
    for row in rows:
        mark = {True: "kept", False: "BROKEN", None: ""}[row.is_kept]
        promise = f"  (promised: {row.promise}; {mark})" if row.promise or mark else ""
        print(f"{row.what:<{width}}  {row.seen}{promise}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="where to write everything as JSON")
    parser.add_argument("--smoke", action="store_true", help="a few small configurations, about a minute")
    parser.add_argument("--budget-s", type=float, default=460)
    parser.add_argument("--reserved", action="store_true", help="all configurations with both kinds of segments")
    parser.add_argument("--host-runs", type=int, default=0, help="eaters of host memory, 20 s each; needs root")
    args = parser.parse_args()
    data: dict[str, Any] = {}
    rows = [prediction_row(), *attempt("drill on the CPU", cpu_drill_rows)]
    if args.host_runs:
        rows += attempt("host memory", lambda: [host_row(args.host_runs)])
    if has_gpu():
        with tempfile.TemporaryDirectory() as folder:
            stages = Stages(Path(folder), args.budget_s, is_smoke=args.smoke)
            data = reserved_stages(stages) if args.reserved else gpu_stages(stages)
        expandable = pair_up(data["predict"], data["grid-expandable"])
        print_pairs(pair_up(data["predict"], data["grid"]), expandable)
        print_snapshots(data.get("snapshots", []))
        print_segments([*data.get("segments", []), *data.get("segments-expandable", [])])
        print_caps(data.get("caps", []))
        print("\nfacts:", json.dumps(next((line["facts"] for line in data["grid"] if "facts" in line), {})))
        rows += gpu_rows(data)
    else:
        say("no CUDA GPU here: the grid, the simulated GPUs and the drill on a GPU are skipped")
    print_table(rows)
    if args.out:
        args.out.write_text(json.dumps({"rows": [vars(row) for row in rows], **data}, indent=1))
    return 1 if any(row.is_kept is False for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
