"""Our rows of bench/throughput.py: `jackline train` itself, supervised, with a recipe that only counts steps.

`recipe` is what the trainer is pointed at; in the trainer's own process it puts a clock behind every update. The row
is written by that process, so what is measured is what a person gets. It saves ten times as often as promised, so
that saves fall into the measured steps, then kills itself with SIGKILL; what the attempt after it needs until its
first step, with the compiled code of the first, is the row's `restart_s`; and `leave_s` is the time between that
attempt's last line and the end of its process.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]
_REQUEST = "BENCH_REQUEST"
_AFTER = 20  # steps behind the measured ones, for the attempt after the kill


def ours(bench: Any, name: str) -> None:
    """Start the trainer on this file's recipe and wait for it; the row is written over there."""
    request = {**bench.request, "name": name}
    work = Path(request["work"]) / "runs"
    shutil.rmtree(work / name, ignore_errors=True)
    if name == "ours-bare":
        (work / name).mkdir(parents=True)
    batch = 64 if name == "ours-64" else request["micro_batch"]
    words = [f"model={request['model']}", f"seq_len={request['seq_len']}", "vocab_size=50304", "tokenizer=train"]
    words += [f"batch_size={batch}", f"micro_batch={batch}"]
    if request["is_small"]:
        words = ["--quick", "save_every_steps=2"]
    steps = bench.warm + bench.steps + _AFTER
    words += [f"max_steps={steps}", "warmup_steps=1", "eval_every=0", "full_eval=false", "rehearse=true"]
    words += [
        "data=python-stdlib",
        f"data_dir={request['work']}/cache",
        "compile=on" if _has_card() else "compile=off",
    ]
    if not request["is_small"]:
        words += ["save_every_s=6"]
    environment = {**os.environ, _REQUEST: json.dumps(request)}
    recipe = f"{Path(__file__).resolve()}:recipe"
    if name == "ours-bare":
        command = [sys.executable, "-m", "jackline.trainer", str(work / name), recipe, *words]
        environment["JACKLINE"] = "off"
    else:
        run = ["--name", name, "--runs-dir", str(work), "--new"]
        command = [sys.executable, "-m", "jackline", "train", recipe, *words, *run]
    again = [word for word in command if word != "--new"]  # what a person does whose machine died
    has_restart = name == "ours" and "BENCH_TURN" not in os.environ
    for words_of in [command, again] if has_restart else [command]:
        subprocess.run(words_of, env=environment, cwd=ROOT, check=False, stdin=subprocess.DEVNULL)
    out = Path(request["out"])
    if has_restart and out.exists():
        out.write_text(json.dumps(json.loads(out.read_text()) | _leaving(work / name)))


def _leaving(run: Path) -> dict[str, float]:
    """From the last of the trainer's own lines to the end of its process, by the supervisor's clock."""
    said = [line for line in (run / "out.log").read_text().splitlines() if " [end] " in line]
    exits = sorted(run.glob("attempts/*/exit.json"))
    if not said or not exits:
        return {}
    said_at = datetime.fromisoformat(said[-1].split()[0]).timestamp()
    return {"leave_s": json.loads(exits[-1].read_text())["ended_at_s"] - said_at}


def _has_card() -> bool:
    import torch

    return torch.cuda.is_available()


def recipe() -> Any:
    """A TrainConfig; and, in the process that trains, the clock."""
    from jackline.trainer.config import TrainConfig

    if _REQUEST in os.environ and "--resolve" not in sys.argv:
        _put_clock(json.loads(os.environ[_REQUEST]))
    return TrainConfig(data="python-stdlib")


def _put_clock(request: dict[str, Any]) -> None:
    from bench.throughput_rows import Bench
    from jackline.trainer.language import LanguageTask

    bench = Bench(request)
    bench.micro_batch = 64 if request["name"] == "ours-64" else bench.micro_batch
    plain = LanguageTask.update

    def update(task: LanguageTask) -> Any:
        norm = plain(task)
        _after_update(bench, request)
        return norm

    LanguageTask.update = update  # type: ignore[method-assign]


def _after_update(bench: Any, request: dict[str, Any]) -> None:
    out = Path(request["out"])
    if os.environ.get("JACKLINE_ATTEMPT", "1") not in ("", "0", "1"):
        if bench._count == 0:
            bench.sync()
            row = json.loads(out.read_text()) | {"restart_s": time.time() - _born_at_s()}
            out.write_text(json.dumps(row))
        bench._count += 1
    elif bench.tick() and not out.exists():
        if request.get("has_profile") and not _is_profiled(bench):
            return
        bench.write(0.0)
        if request["name"] == "ours":
            os.kill(os.getpid(), signal.SIGKILL)


def _is_profiled(bench: Any) -> bool:
    """After the measured steps: False while the profiler still looks."""
    from bench.throughput_rows import PROFILED_STEPS, begin_profile, end_profile

    if bench.seen is None:
        bench.seen, bench.profiled = begin_profile(), 0
        return False
    bench.profiled += 1
    if bench.profiled < PROFILED_STEPS:
        return False
    bench.extra["profile"] = end_profile(bench.seen)
    return True


def _born_at_s() -> float:
    """When this process began, by the kernel's clock."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    uptime_s = float(Path("/proc/uptime").read_text().split()[0])
    return time.time() - uptime_s + int(fields[19]) / os.sysconf("SC_CLK_TCK")
