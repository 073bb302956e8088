"""Where the seconds before the first step go: `jackline train` beside a plain loop that compiles the same model.

    python bench/first_step.py                   the 124M model on the GPU: cold, cold with data, shared code, resumed
    python bench/first_step.py --only cold,hand  some rows
    python bench/first_step.py --small           a tiny model on the CPU: does it run

Each row is a process of its own with folders of its own, so nothing is cached unless its name says so. A thread looks
at the main thread's stack fifty times a second; each look counts for the time since the one before. The table has a
line for every phase that was announced and what the main thread did in it. `silent` is the longest time without a
line on stdout, as a pipe sees it; the promise is 2 s.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]
_REQUEST = "BENCH_FIRST_STEP"
ROWS = ("all-cold", "cold", "shared", "resumed", "hand", "hand-again")
_LOOK_EVERY_S = 0.02
# The innermost frame whose file has one of these words decides; an import counts as one wherever it is.
_DOING = (
    ("triton", "triton compiles kernels"),
    ("_inductor/async_compile", "waiting for compiling processes"),
    ("_inductor", "inductor makes code"),
    ("_functorch", "autograd traces"),
    ("_dynamo", "dynamo traces"),
    ("jackline/memory", "memory plan"),
    ("jackline/data", "data"),
    ("jackline/checkpoint", "checkpoint"),
    ("jackline/models", "model code"),
    ("torch/optim", "optimizer"),
    ("torch/", "torch"),
    ("jackline/", "jackline"),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="")
    parser.add_argument("--small", action="store_true")
    options = parser.parse_args()
    names = [name for name in options.only.split(",") if name] or list(ROWS)
    with tempfile.TemporaryDirectory(prefix="first-step-") as work:
        rows = {name: run_row(name, Path(work), options.small) for name in names}
    print_table(rows)
    if out := os.environ.get("OUT"):
        (Path(out) / "first_step.json").write_text(json.dumps(rows, indent=1))
    return 0


def run_row(name: str, work: Path, is_small: bool) -> dict[str, Any]:
    out = work / f"{name}.json"
    # `shared` uses what `cold` has compiled, `resumed` is the same run again; all but the first use prepared data.
    home = work / ("home-all" if name == "all-cold" else "home-hand" if name.startswith("hand") else "home")
    data = work / ("data-all" if name == "all-cold" else "data")
    if not name.startswith("hand") and name != "all-cold" and not data.exists():
        _start(
            name, ["max_steps=2", "compile=off"], (home.with_name("home-data"), data, work / "made"), is_small, out
        )
        out.unlink(missing_ok=True)
    run = work / ("cold" if name == "resumed" else name)
    print(f"[{time.strftime('%H:%M:%S')}] {name} ...", file=sys.stderr, flush=True)
    began_s = time.time()
    silent_s = _start(name, [], (home, data, run), is_small, out)
    if not out.exists():
        return {"error": f"no first step after {time.time() - began_s:.0f} s"}
    row: dict[str, Any] = json.loads(out.read_text())
    return {**row, "before_s": row["born_at_s"] - began_s, "silent_s": silent_s}


def _start(name: str, words: list[str], places: tuple[Path, Path, Path], is_small: bool, out: Path) -> float:
    """Run to the end; the longest silence until the first step."""
    home, data, run = places
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("TORCHINDUCTOR", "TRITON"))}
    environment |= {"XDG_CACHE_HOME": str(home), "XDG_STATE_HOME": str(home), "PYTHONUNBUFFERED": "1"}
    environment[_REQUEST] = json.dumps({"name": name, "out": str(out), "is_small": is_small})
    if name.startswith("hand"):
        environment["TORCHINDUCTOR_CACHE_DIR"] = str(home / "inductor")
        command = [sys.executable, str(HERE.with_name("first_step.py")), "--hand"]
    else:
        shape = [
            "model=small",
            "seq_len=1024",
            "vocab_size=50304",
            "batch_size=32",
            "micro_batch=32",
            "tokenizer=train",
        ]
        words = [*(["--quick"] if is_small else shape), *words, "data=python-stdlib", f"data_dir={data}"]
        words += ["eval_every=0", "full_eval=false", "warmup_steps=1"]
        words += [] if any(word.startswith("compile=") for word in words) else ["compile=on"]
        words += [] if any(word.startswith("max_steps=") for word in words) else ["max_steps=100000"]
        recipe = f"{HERE}:recipe"
        command = [sys.executable, "-m", "jackline", "train", recipe, *words, "--name", run.name, "--runs-dir"]
        command.append(str(run.parent))
    with subprocess.Popen(
        command, env=environment, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        last_s, longest_s = time.monotonic(), 0.0
        said: deque[bytes] = deque(maxlen=12)
        for line in child.stdout:
            said.append(line)
            now_s = time.monotonic()
            if not out.exists():
                longest_s = max(longest_s, now_s - last_s)
            last_s = now_s
    if child.returncode and not out.exists():
        sys.stderr.write(b"".join(said).decode(errors="replace"))
    return longest_s


# In the process that trains.


def recipe() -> Any:
    """A TrainConfig; in the process that trains also the clock."""
    from jackline.trainer.config import TrainConfig

    if _REQUEST in os.environ and "--resolve" not in sys.argv:
        _put_clock(json.loads(os.environ[_REQUEST]))
    return TrainConfig(data="python-stdlib")


def _put_clock(request: dict[str, Any]) -> None:
    from jackline.trainer.report.console import Console

    looks = Looks()
    plain_phase, plain_now = Console.phase, Console.now

    def phase(console: Console, tag: str, text: str) -> Any:
        looks.phase = f"{tag}: {text}"[:60]
        return plain_phase(console, tag, text)

    def now(console: Console, detail: Any) -> None:
        looks.phase = f"{detail}"[:60] if isinstance(detail, str) else looks.phase
        plain_now(console, detail)

    Console.phase, Console.now = phase, now  # type: ignore[method-assign,assignment]
    looks.when("jackline.trainer.language", lambda module: _put_end(module.LanguageTask, looks, request))


def _put_end(task: Any, looks: Looks, request: dict[str, Any]) -> None:
    plain = task.update

    def update(self: Any) -> Any:
        norm = plain(self)
        _synchronize()
        looks.write(request, _compile_facts())
        os._exit(75)  # stopped: the supervisor does not start it again
        return norm

    task.update = update


def _synchronize() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _compile_facts() -> dict[str, Any]:
    """What torch counted: graphs, cache hits, seconds of its own stages."""
    from torch._dynamo.utils import compilation_time_metrics, counters

    stages = {name: sum(times) for name, times in compilation_time_metrics.items() if sum(times) > 0.2}
    counted = {f"{group}.{name}": count for group, found in counters.items() for name, count in found.items()}
    wanted = ("stats.unique_graphs", "cache_hit", "cache_miss", "calls_captured")
    return {
        "stages_s": dict(sorted(stages.items(), key=lambda item: -item[1])[:8]),
        "counters": {name: count for name, count in counted.items() if any(word in name for word in wanted)},
    }


class Looks:
    """Looks at the main thread from a thread of its own."""

    def __init__(self) -> None:
        self.phase = "python starts"
        self.spent: dict[str, dict[str, float]] = {}
        self._waiting: list[tuple[str, Any]] = []
        self._main = threading.main_thread().ident or 0
        self._is_over = threading.Event()
        self._last_s = time.time()
        self.born_at_s = _born_at_s()
        self.spent["python starts"] = {"python": self._last_s - self.born_at_s}
        threading.Thread(target=self._watch, daemon=True, name="bench-looks").start()

    def when(self, module: str, act: Any) -> None:
        self._waiting.append((module, act))

    def _watch(self) -> None:
        while not self._is_over.wait(_LOOK_EVERY_S):
            self._look()
            for name, act in list(self._waiting):
                module = sys.modules.get(name)
                if module is not None and hasattr(module, "LanguageTask"):
                    self._waiting.remove((name, act))
                    act(module)

    def _look(self) -> None:
        now_s = time.time()
        row = self.spent.setdefault(self.phase, {})
        what = doing(sys._current_frames().get(self._main))
        row[what] = row.get(what, 0.0) + now_s - self._last_s
        self._last_s = now_s

    def write(self, request: dict[str, Any], more: dict[str, Any]) -> None:
        self._look()
        self._is_over.set()
        row = {"first_s": time.time() - self.born_at_s, "born_at_s": self.born_at_s, "spent": self.spent, **more}
        text = Path(request["out"])
        text.with_suffix(".part").write_text(json.dumps(row))
        text.with_suffix(".part").replace(text)


def doing(frame: Any) -> str:
    found = ""
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith("<frozen importlib"):
            return "importing"
        if not found:
            found = next((words for part, words in _DOING if part in file), "")
        frame = frame.f_back
    return found or "python"


def _born_at_s() -> float:
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    uptime_s = float(Path("/proc/uptime").read_text().split()[0])
    return time.time() - uptime_s + int(fields[19]) / os.sysconf("SC_CLK_TCK")


# The plain loop.


def hand() -> None:
    """What a person writes: the same model in bf16 autocast, compiled, fused AdamW."""
    request = json.loads(os.environ[_REQUEST])
    looks = Looks()
    looks.phase = "import torch"
    import torch

    from jackline.models.gpt import GPT
    from jackline.models.shapes import GPTShape

    looks.phase = "model"
    device = torch.device("cuda" if torch.cuda.is_available() and not request["is_small"] else "cpu")
    shape = GPTShape(2, 2, 64, context=64, vocab_size=512) if request["is_small"] else None
    shape = shape or GPTShape(12, 12, 768, context=1024, vocab_size=50_304)
    torch.manual_seed(0)
    model = GPT(shape).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=device.type == "cuda")
    compiled = torch.compile(model)
    tokens = torch.randint(shape.vocab_size, (4 if request["is_small"] else 32, shape.context + 1), device=device)
    looks.phase = "first step"
    with torch.autocast(device.type, dtype=torch.bfloat16):
        loss = compiled(tokens[:, :-1], tokens[:, 1:]) / tokens[:, 1:].numel()
    loss.backward()
    optimizer.step()
    _synchronize()
    looks.write(request, _compile_facts())


def print_table(rows: dict[str, dict[str, Any]]) -> None:
    for name, row in rows.items():
        if "error" in row:
            print(f"\n{name}: {row['error']}")
            continue
        total_s = row["before_s"] + row["first_s"]
        print(f"\n{name}: first step after {total_s:.1f} s; silent for at most {row['silent_s']:.1f} s")
        print(f"  {row['before_s']:6.1f}  before its process began")
        for phase, spent in row["spent"].items():
            parts = sorted(spent.items(), key=lambda item: -item[1])
            words = ", ".join(f"{what} {seconds:.1f}" for what, seconds in parts if seconds >= 0.1)
            if sum(spent.values()) >= 0.1:
                print(f"  {sum(spent.values()):6.1f}  {phase}: {words}")
        print(f"  torch's own stages: {', '.join(f'{key} {value:.1f}' for key, value in row['stages_s'].items())}")
        print(f"  torch counted: {', '.join(f'{key} {value}' for key, value in row['counters'].items())}")


if __name__ == "__main__":
    if "--hand" in sys.argv:
        hand()
    else:
        sys.exit(main())
