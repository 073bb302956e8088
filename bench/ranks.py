"""What `jackline run` costs a job of several ranks, beside bare torchrun with DDP, by turns in one run.

    python bench/ranks.py [--ranks 2] [--repeats 5] [--steps 600]

Rows: the time of a step, the CPU time that a step takes in the ranks (steadier on a busy machine), and the CPU that
supervisor and keeper use, for each rank. The exit code is 1 when a promise is broken by more than the spread.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
PROGRAM = """
import json, os, sys, time
import torch, torch.distributed as dist
torch.set_num_threads(1)
dist.init_process_group("gloo")
model = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(8)])
net = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
rows, steps = torch.randn(64, 256), int(sys.argv[1])
for step in range(steps):
    if step == steps // 5:
        dist.barrier()
        began_s, cpu_s = time.perf_counter(), time.process_time()
    optimizer.zero_grad()
    net(rows).square().mean().backward()
    optimizer.step()
    if dist.get_rank() == 0 and step % 20 == 0:
        print("step", step, flush=True)
dist.barrier()
count = steps - steps // 5
told = {"step_s": (time.perf_counter() - began_s) / count, "cpu_s": (time.process_time() - cpu_s) / count}
open(f"told-{dist.get_rank()}.json", "w").write(json.dumps(told))
dist.destroy_process_group()
"""


class OursWatch(threading.Thread):
    """CPU of the supervisor and the keeper of a run, while it lasts."""

    def __init__(self, runs: Path) -> None:
        super().__init__(daemon=True)
        self._runs = runs
        self._first: tuple[float, float] | None = None
        self._last: tuple[float, float] | None = None
        self.is_over = False

    def run(self) -> None:
        while not self.is_over:
            used = self._read()
            if used is not None:
                self._first = self._first or (time.monotonic(), used)
                self._last = (time.monotonic(), used)
            time.sleep(0.5)

    def cores(self) -> float:
        if self._first is None or self._last is None or self._last[0] - self._first[0] < 1.0:
            return float("nan")
        return (self._last[1] - self._first[1]) / (self._last[0] - self._first[0])

    def _read(self) -> float | None:
        try:
            state = json.loads((self._runs / "job" / "supervisor.json").read_text())
            pids = [(state.get(word) or {}).get("pid") for word in ("supervisor", "keeper")]
            fields = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids if pid]
        except (OSError, ValueError):
            return None
        return sum(int(words[11]) + int(words[12]) for words in fields) / TICKS_PER_S if fields else None


def measure(folder: Path, *, ranks: int, steps: int, is_ours: bool) -> tuple[float, float, float]:
    """(seconds of a step, CPU seconds of a step in all ranks, cores that Jackline used)."""
    folder.mkdir()
    (folder / "train.py").write_text(PROGRAM)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command += ["train.py", str(steps)]
    env = {**os.environ, "JACKLINE_RUNS": str(folder / "runs"), "XDG_STATE_HOME": str(folder / "state")}
    watch = OursWatch(folder / "runs")
    if is_ours:
        command = [sys.executable, "-m", "jackline", "run", "--name", "job", "--", *command]
        watch.start()
    subprocess.run(command, cwd=folder, env=env, check=True, capture_output=True)
    watch.is_over = True
    told = [json.loads((folder / f"told-{rank}.json").read_text()) for rank in range(ranks)]
    return told[0]["step_s"], sum(one["cpu_s"] for one in told), watch.cores() if is_ours else 0.0


def row(what: str, bare: list[float], ours: list[float]) -> bool:
    """Print one comparison; returns whether at most 1 % more was used, as far as the spread of bare runs can tell."""
    before, now = statistics.median(bare), statistics.median(ours)
    spread = (max(bare) - min(bare)) / before
    more = now / before - 1.0
    told = f"bare {before * 1e3:.3f} ms, ours {now * 1e3:.3f} ms, {more:+.1%} (spread of bare runs {spread:.1%})"
    print(f"{what:28} {told}; promise 1 %", flush=True)
    return more <= 0.01 + spread


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=600)
    given = parser.parse_args()
    found: dict[bool, list[tuple[float, float, float]]] = {False: [], True: []}
    with tempfile.TemporaryDirectory(prefix="bench-ranks-") as folder:
        for number in range(2 * given.repeats):
            is_ours = number % 2 == 1
            place = Path(folder) / str(number)
            found[is_ours].append(measure(place, ranks=given.ranks, steps=given.steps, is_ours=is_ours))
    is_kept = row("a step", [one[0] for one in found[False]], [one[0] for one in found[True]])
    is_kept &= row("CPU of a step, all ranks", [one[1] for one in found[False]], [one[1] for one in found[True]])
    cores = statistics.median(one[2] for one in found[True]) / given.ranks
    print(f"{'supervisor and keeper':28} {cores:.2%} of a core for each of {given.ranks} ranks; promise 1 %")
    return 0 if is_kept and cores <= 0.01 else 1


if __name__ == "__main__":
    sys.exit(main())
