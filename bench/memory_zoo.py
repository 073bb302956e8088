"""Predicted against measured memory for some fifty public architectures, in bf16 autocast and in float32.

    python bench/memory_zoo.py [--out FOLDER] [--only NAME,NAME] [--precision bf16,fp32] [--sizes real,small]
                               [--limit-s 450] [--no-live]

Each model trains a few real steps with fused AdamW on the GPU of this machine, with the micro-batch that people use
and with a quarter of it; the prediction is made in other processes without a GPU, before. One line a model while it
runs, then the worst and the median error, and the table in FOLDER. Without a GPU only the predictions are printed. A
model that fails is printed with its error and counted as refused.

Of a line: predicted and measured MiB allocated and reserved, milliseconds of a step as predicted, as calibrated by
three steps, and as measured by later ones; how long Python took of it; and a fixed reference step, which shows how
fast Python was at that moment.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import gzip
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src"), str(HERE)]
EXPANDABLE = {name: "expandable_segments:True" for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")}
PRECISIONS = ("bf16", "fp32")
SIZES = ("real", "small")
MIB = 2**20
_THREE_STEPS = 3
_SHARE_AGAIN = 0.2  # of the time: for a second measurement
_TIMED_STEPS = 8
_WORTH_A_LOOK = {"allocated": 1.0, "reserved": 3.0}  # percent: then what lives at the peak is kept


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("zoo-results"))
    parser.add_argument("--only", default="")
    parser.add_argument("--precision", default=",".join(PRECISIONS))
    parser.add_argument("--sizes", default=",".join(SIZES))
    parser.add_argument("--limit-s", type=float, default=450.0)
    parser.add_argument("--no-live", action="store_true", help="do not record what lives at a peak that is off")
    parser.add_argument("--record", action="store_true", help="keep kernels' times and the allocator's events too")
    parser.add_argument("--no-predict", action="store_true", help="only measure, for predictions made elsewhere")
    parser.add_argument("--gpu", default="")
    parser.add_argument("--no-measure", action="store_true")
    parser.add_argument("--stage", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.stage:
        stage, _, part = options.stage.partition(":")
        {"predict": predict_part, "measure": measure_all, "again": measure_again}[stage](options, part)
        return 0
    options.out.mkdir(parents=True, exist_ok=True)
    for old in options.out.glob("*.jsonl"):
        old.unlink()
    return run_all(options)


def run_all(options: argparse.Namespace) -> int:
    ends_s = time.monotonic() + options.limit_s
    num_workers = max(1, min(12, (os.cpu_count() or 2) - 2))
    quiet = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    num_predicting = 0 if options.no_predict else num_workers
    workers = [start(options, f"predict:{k}/{num_workers}", quiet) for k in range(num_predicting)]
    # One after the other: the time of a step is measured too, and it depends on a free CPU.
    for worker in workers:
        with contextlib.suppress(subprocess.TimeoutExpired):
            worker.wait(timeout=max(5.0, (ends_s - time.monotonic()) / (1 if options.no_measure else 3)))
        worker.kill()
    if not options.no_measure and has_gpu():
        measure_until(options, ends_s - _SHARE_AGAIN * options.limit_s)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child = start(options, "again", EXPANDABLE)
            child.wait(timeout=max(1.0, ends_s - time.monotonic()))
        child.kill()
    return report(options)


def has_gpu() -> bool:
    seen = subprocess.run(["nvidia-smi", "-L"], capture_output=True, check=False) if _which("nvidia-smi") else None
    return seen is not None and seen.returncode == 0


def _which(name: str) -> bool:
    return any(os.access(Path(folder) / name, os.X_OK) for folder in os.environ.get("PATH", "").split(os.pathsep))


def start(options: argparse.Namespace, stage: str, env: dict[str, str]) -> subprocess.Popen[bytes]:
    argv = [sys.executable, str(Path(__file__)), "--stage", stage, "--out", str(options.out)]
    argv += ["--only", options.only, "--precision", options.precision, "--gpu", options.gpu, "--sizes", options.sizes]
    argv += ["--no-live"] if options.no_live else []
    argv += ["--record"] if options.record else []
    return subprocess.Popen(argv, env={**os.environ, **env})


def measure_until(options: argparse.Namespace, ends_s: float) -> None:
    """A child measures one after another. When it ends early (a fault on the GPU ends a process), the next child goes
    on after the model that was under way."""
    while True:
        begun = len(lines(options.out, "begun"))
        child = start(options, "measure", EXPANDABLE)
        try:
            code = child.wait(timeout=max(1.0, ends_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.kill()
            print("out of time: the models that are left were not measured", flush=True)
            return
        if code == 0 or len(lines(options.out, "begun")) == begun:
            return


def lines(folder: Path, name: str) -> list[dict[str, Any]]:
    return [
        json.loads(line) for path in sorted(folder.glob(f"{name}*.jsonl")) for line in path.read_text().splitlines()
    ]


def write(folder: Path, name: str, row: dict[str, Any]) -> None:
    with (folder / f"{name}.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")


def wanted(options: argparse.Namespace) -> Iterator[tuple[Any, str, str]]:
    """(model, precision, size), all of one size before the next: a run that is cut has the whole of the first."""
    from memory_zoo_models import zoo

    names = set(filter(None, options.only.split(",")))
    chosen = [entry for entry in zoo() if not names or entry.name in names or entry.family in names]
    for size in options.sizes.split(","):
        for precision in options.precision.split(","):
            for entry in chosen:
                small = max(1, entry.size // 4)
                if size == "real" or small != entry.size:
                    yield (entry if size == "real" else replace(entry, size=small)), precision, size


def key_of(row: dict[str, Any]) -> tuple[str, str, str]:
    return row["name"], row["precision"], row["size"]


def job_of(entry: Any, precision: str) -> Any:
    from jackline.memory.plan.target import call_model
    from jackline.memory.predict.job import Job, StepOptions

    return Job(
        name=entry.name,
        build=lambda _: entry.make(),
        batch=entry.batch,
        loss=entry.loss or call_model,
        global_batch=entry.size,
        options=StepOptions(precision=precision),  # type: ignore[arg-type]
    )


# Predictions, in processes without a GPU.


def predict_part(options: argparse.Namespace, part: str) -> None:
    import torch

    from jackline.memory.plan.gpus import find_gpu

    torch.set_num_threads(1)
    index, count = (int(number) for number in part.split("/"))
    gpu = find_gpu(options.gpu or "H200")
    for number, (entry, precision, size) in enumerate(wanted(options)):
        if number % count == index:
            row = predicted(entry, precision, size, gpu, is_recording=options.record)
            write(options.out, f"predicted-{index}", row)


def predicted(entry: Any, precision: str, size: str, gpu: Any, *, is_recording: bool = False) -> dict[str, Any]:
    from jackline.memory.predict.step import chosen_range, replay, trace_step
    from jackline.memory.predict.work import estimate

    row: dict[str, Any] = {"name": entry.name, "family": entry.family, "precision": precision, "size": size}
    began_s = time.perf_counter()
    try:
        job = job_of(entry, precision)
        trace = trace_step(job, entry.size, gpu, job.options, is_accumulating=False)
        found = replay(trace, entry.size, is_expandable=True)
    except Exception as error:  # the next model must still be tried
        return {**row, "error": _short(error), "trace": traceback.format_exc()[-1500:]}
    row |= {"allocated": found.peak_allocated_bytes, "reserved": found.peak_reserved_bytes, "phase": found.peak_phase}
    row |= {"parts": dict(found.parts), "assumptions": list(trace.assumptions), "unknowns": list(found.unknowns)}
    time_s = estimate(trace, gpu)
    row |= {"live": live_at_peak(trace), "step_ms": 1000 * time_s.seconds, "bound": time_s.bound}
    row |= {"low": row["allocated"], "high": row["allocated"]}
    if (chosen := chosen_range(trace)) is not None:
        row |= {"low": chosen[0], "high": chosen[1]}
    row["seconds"] = time.perf_counter() - began_s
    return {**row, **(counted(entry, precision, size, gpu, trace) if is_recording else {})}


def counted(entry: Any, precision: str, size: str, gpu: Any, trace: Any) -> dict[str, Any]:
    """What the estimate of the time is made of, and how many Python functions the forward pass calls."""
    from memory_record import Calls

    from jackline.memory.predict.kernel_time import seconds
    from jackline.memory.predict.step import trace_step

    job = job_of(entry, precision)
    calls = Calls()
    if precision == "bf16" and size == "real":  # the number hardly depends on either, and counting takes a while
        trace_step(replace(job, loss=calls.counting(job.loss)), entry.size, gpu, job.options, is_accumulating=False)
    rates, processors = gpu.rates, gpu.num_multiprocessors
    work = [[one.name, int(one.is_backward), seconds(one.kernel, rates, processors)] for one in trace.work]
    return {
        "work": work,
        "views": trace.num_views,
        "updated": trace.num_updated,
        "update_bytes": trace.update_bytes,
        "calls": calls.count,
        "modules": calls.modules,
    }


def live_at_peak(trace: Any, most: int = 25) -> list[tuple[int, int, str]]:
    """(bytes, how many, part) of what lives at the predicted peak, the largest first: for a look at an error."""
    now: dict[tuple[int, str], int] = {}
    size = peak = 0
    best: dict[tuple[int, str], int] = {}
    for event in trace.events:
        made = trace.allocations[event if event >= 0 else ~event]
        key, sign = (made.num_bytes, made.part), 1 if event >= 0 else -1
        now[key] = now.get(key, 0) + sign
        size += sign * made.num_bytes
        if size > peak:
            peak, best = size, dict(now)
    rows = sorted(
        ((size, count, part) for (size, part), count in best.items() if count), key=lambda row: -row[0] * row[1]
    )
    return rows[:most]


# Measurements.


def measure_all(options: argparse.Namespace, _: str) -> None:
    import torch

    done = {key_of(row) for row in lines(options.out, "begun")}
    guesses = {key_of(row): row for row in lines(options.out, "predicted")}
    reference = Reference()
    for entry, precision, size in wanted(options):
        row = {"name": entry.name, "precision": precision, "size": size}
        if key_of(row) in done:
            continue
        write(options.out, "begun", row)
        guess = guesses.get(key_of(row), {"error": "not predicted"})
        row |= measured(entry, precision, {} if options.no_live else guess, reference, is_recording=options.record)
        write(options.out, "measured", row)
        print(line(guess, row), flush=True)
        if "CUDA error" in row.get("error", ""):
            sys.exit(1)
        torch.cuda.empty_cache()


class Reference:
    """A step of 400 small operators that a GPU does at once: it takes as long as Python needs to start them."""

    def __init__(self) -> None:
        import torch

        self._layers = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(100))).cuda()
        self._value = torch.zeros(1, 8, device="cuda")

    def microseconds(self) -> float:
        import torch

        times = []
        for _ in range(3):
            torch.cuda.synchronize()
            began_s = time.perf_counter()
            self._layers(self._value).sum().backward()
            torch.cuda.synchronize()
            times.append(1e6 * (time.perf_counter() - began_s))
        return statistics.median(times) / 100


def measure_again(options: argparse.Namespace, _: str) -> None:
    """The time of a step, minutes later: a machine that is shared is slow for some seconds at a time."""
    import torch

    reference = Reference()
    whole = {key_of(row) for row in lines(options.out, "measured") if "step_ms" in row}
    for entry, precision, size in wanted(options):
        row = {"name": entry.name, "precision": precision, "size": size}
        if key_of(row) not in whole:
            continue
        steps = _Steps(job_of(entry, precision), entry.size, precision)
        steps.times_ms(_THREE_STEPS)
        before = reference.microseconds()
        row["again_ms"] = steps.times_ms(_TIMED_STEPS)[0]
        row["again_reference_us"] = min(before, reference.microseconds())
        write(options.out, "again", row)
        del steps
        gc.collect()
        torch.cuda.empty_cache()


def measured(
    entry: Any, precision: str, guess: dict[str, Any], reference: Reference, *, is_recording: bool = False
) -> dict[str, Any]:
    import torch
    from memory_record import begin_history, end_history, operator_times

    clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None)
    gc.collect()
    clear()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    base = torch.cuda.memory_allocated()
    try:
        if is_recording:
            begin_history()
        steps = _Steps(job_of(entry, precision), entry.size, precision)
        for _ in range(2):
            steps.run()
        torch.cuda.synchronize()
        row: dict[str, Any] = {
            "base": base,
            "allocated": torch.cuda.max_memory_allocated() - base,
            "reserved": torch.cuda.max_memory_reserved(),
        }
        if is_recording:
            row["events"] = end_history()
        row["three_ms"] = steps.times_ms(_THREE_STEPS)[0]
        before = reference.microseconds()
        row["step_ms"], row["host_ms"] = steps.times_ms(_TIMED_STEPS)
        row["reference_us"] = (before + reference.microseconds()) / 2
        row["phases_ms"] = steps.phases_ms()
        if is_recording:
            row["operators"] = _or_error(lambda: operator_times(steps.run))
        if "allocated" in guess and any(abs(off(guess, row, key)) > most for key, most in _WORTH_A_LOOK.items()):
            row["live"] = steps.live_at_peak()
    except Exception as error:  # the next model must still be tried
        row = {"error": _short(error), "trace": traceback.format_exc()[-1500:]}
    return row


def _or_error(record: Callable[[], Any]) -> Any:
    """What is only recorded costs no row."""
    try:
        return record()
    except Exception as error:
        return {"error": _short(error), "trace": traceback.format_exc()[-1500:]}


class _Steps:
    """The step that is predicted: forward, backward, fused AdamW, gradients dropped."""

    def __init__(self, job: Any, size: int, precision: str) -> None:
        import torch

        self._job, self._size = job, size
        with torch.device("cuda"):
            self._model = job.build(job.options).train()
        trained = [weight for weight in self._model.parameters() if weight.requires_grad]
        self._optimizer = torch.optim.AdamW(trained, lr=1e-5, fused=True)
        low = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
        self._autocast: Callable[[], Any] = contextlib.nullcontext
        self._phases: list[list[float]] = []
        if low is not None:
            self._autocast = lambda: torch.autocast("cuda", dtype=low)

    def run(self) -> None:
        import torch

        at_s = [time.perf_counter()]
        with torch.device("cuda"):
            batch = self._job.batch(self._size)
            at_s.append(time.perf_counter())
            with self._autocast():
                loss = self._job.loss(self._model, batch)
            at_s.append(time.perf_counter())
            loss.backward()
            at_s.append(time.perf_counter())
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        at_s.append(time.perf_counter())
        self._phases.append([1000 * (after - before) for before, after in itertools.pairwise(at_s)])

    def phases_ms(self) -> list[float]:
        """What Python took of batch, forward, backward and update in the last steps."""
        return [statistics.median(times) for times in zip(*self._phases[-_TIMED_STEPS:], strict=True)]

    def times_ms(self, count: int) -> tuple[float, float]:
        """(a step, what Python took of it)."""
        import torch

        whole, host = [], []
        for _ in range(count):
            began_s = time.perf_counter()
            self.run()
            host.append(1000 * (time.perf_counter() - began_s))
            torch.cuda.synchronize()
            whole.append(1000 * (time.perf_counter() - began_s))
        return statistics.median(whole), statistics.median(host)

    def live_at_peak(self, most: int = 25) -> list[tuple[int, int]]:
        """(bytes, how many) of the blocks that live at the peak of a step, from the allocator's own history."""
        import torch

        torch.cuda.memory._record_memory_history(max_entries=400_000, context=None, stacks="python")
        before = torch.cuda.memory._snapshot()
        self.run()
        after = torch.cuda.memory._snapshot()
        torch.cuda.memory._record_memory_history(enabled=None)
        now: dict[int, int] = {}
        for segment in before["segments"]:
            for block in segment["blocks"]:
                if block["state"] == "active_allocated":
                    now[block["size"]] = now.get(block["size"], 0) + 1
        size = sum(key * count for key, count in now.items())
        peak, best = size, dict(now)
        for event in after["device_traces"][0]:
            if event["action"] in ("alloc", "free_completed"):
                sign = 1 if event["action"] == "alloc" else -1
                now[event["size"]] = now.get(event["size"], 0) + sign
                size += sign * event["size"]
                if size > peak:
                    peak, best = size, dict(now)
        rows = sorted(((key, count) for key, count in best.items() if count), key=lambda row: -row[0] * row[1])
        return rows[:most]


# The table.


def report(options: argparse.Namespace) -> int:
    predictions = {key_of(row): row for row in lines(options.out, "predicted")}
    later = {key_of(row): row for row in lines(options.out, "again")}
    measurements = {key_of(row): {**row, **later.get(key_of(row), {})} for row in lines(options.out, "measured")}
    rows = []
    for entry, precision, size in wanted(options):
        row = {"name": entry.name, "precision": precision, "size": size}
        guess = predictions.get(key_of(row), {"error": "not predicted"})
        seen = {**row, **measurements.get(key_of(row), {})}
        rows.append({**row, "family": entry.family, "predicted": guess, "measured": seen})
        if "allocated" not in seen:
            print(line(guess, seen))
    (options.out / "zoo.json.gz").write_bytes(gzip.compress(json.dumps(rows).encode()))
    return summary(rows)


def line(guess: dict[str, Any], seen: dict[str, Any]) -> str:
    head = f"{seen['name']:<16} {seen['precision']:<4} {seen['size']:<5}"
    if "error" in guess:
        found = f"{seen['allocated'] / MIB:7.1f} {seen['step_ms']:6.1f} ms" if "allocated" in seen else ""
        return f"{head} REFUSED {guess['error']} {found}{seen.get('error', '')}"
    first = f"{head} {guess['allocated'] / MIB:7.1f} "
    if "allocated" not in seen:
        return (
            f"{first} reserved {guess['reserved'] / MIB:7.0f} MiB, {guess['seconds']:.1f} s  {seen.get('error', '')}"
        )
    inside = guess["low"] <= seen["allocated"] * 1.001 and seen["allocated"] <= guess["high"] * 1.001
    text = (
        f"{first}{seen['allocated'] / MIB:7.1f} {off(guess, seen, 'allocated'):+5.1f}%{' ' if inside else '!'}"
        f"{guess['reserved'] / MIB:7.0f} {seen['reserved'] / MIB:7.0f} {off(guess, seen, 'reserved'):+5.1f}%"
        f"  ms {guess['step_ms']:6.1f} {seen['three_ms']:6.1f} {seen['step_ms']:6.1f}"
        f" {off(guess, seen, 'step_ms'):+4.0f}% {guess['bound'][:3]}"
        f" host {seen['host_ms']:6.1f} ref {seen['reference_us']:.0f}"
    )
    if "live" in seen:
        text += " live " + " ".join(f"{size // 1024}Kx{count}" for size, count in seen["live"][:12])
        text += " vs " + " ".join(f"{size // 1024}Kx{count}" for size, count, _ in guess["live"][:12])
    return text


def off(guess: dict[str, Any], seen: dict[str, Any], key: str) -> float:
    return 100 * (float(guess[key]) / seen[key] - 1)


def summary(rows: Sequence[dict[str, Any]]) -> int:
    refused = [row for row in rows if "error" in row["predicted"]]
    both = [row for row in rows if "allocated" in row["measured"] and "allocated" in row["predicted"]]
    print(f"\n{len(rows)} rows, {len(refused)} refused, {len(both)} measured")
    for key in ("allocated", "reserved", "step_ms"):
        tell(key, [(off(row["predicted"], row["measured"], key), row) for row in both])
    lower = [
        (row["predicted"], {"step_ms": min(row["measured"]["step_ms"], row["measured"]["again_ms"])}, row)
        for row in both
        if "again_ms" in row["measured"]
    ]
    tell("step_ms, the lower of two times", [(off(guess, seen, "step_ms"), row) for guess, seen, row in lower])
    three = [({"step_ms": row["measured"]["three_ms"]}, row) for row in both]
    tell(
        "step_ms, calibrated by three steps", [(off(guess, row["measured"], "step_ms"), row) for guess, row in three]
    )
    return 0


def tell(what: str, errors: Sequence[tuple[float, dict[str, Any]]]) -> None:
    if not errors:
        return
    sizes = sorted(((abs(error), row) for error, row in errors), key=lambda pair: pair[0])
    near = {most: sum(error <= most for error, _ in sizes) for most in (0.1, 3, 5, 10, 25)}
    counts = ", ".join(f"{count} within {most} %" for most, count in near.items())
    worst = ", ".join(
        f"{row['name']} {row['precision']} {row['size']} {error:.1f} %" for error, row in reversed(sizes[-6:])
    )
    print(f"{what}: median {statistics.median(error for error, _ in sizes):.2f} %; {counts}; worst {worst}")


def _short(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:200]}"


if __name__ == "__main__":
    sys.exit(main())
