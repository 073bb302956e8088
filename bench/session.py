"""What an attached loop costs, beside the same loop without Jackline.

    python bench/session.py                    on the CPU, about 5 minutes
    python bench/session.py --gpu              a 124M GPT on the GPU, about 6 minutes
    python bench/session.py --only overhead,log,resume,memory --seconds 60

The overhead is measured in blocks of steps that alternate between the bare and the attached loop, same shapes, same
data, in one process; what is compared are neighbouring blocks, and what saves made the loop wait is added. Every row
says its spread and the target; a missed one ends with exit code 1.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

import torch  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

import jackline  # noqa: E402
from bench.session_scripts import MEMORY, RESUME  # noqa: E402


@dataclass
class Report:
    """The table for the end, and what fell short."""

    rows: list[tuple[str, str, str, str]] = field(default_factory=list)
    num_missed: int = 0

    def add(self, what: str, target: str, measured: str, ratio: float | None) -> None:
        """`ratio` is measured to target: 1 or less is met; None says that nothing was promised."""
        shown = "" if ratio is None else f"{ratio:.2f}"
        self.num_missed += ratio is not None and ratio > 1
        self.rows.append((what, target, measured, shown))
        print(f"{what}: {measured} (target {target}{', ratio ' + shown if shown else ''})", flush=True)

    def table(self) -> str:
        lines = ["| what | target | measured | measured / target |", "|---|---|---|---|"]
        return "\n".join(lines + [f"| {' | '.join(row)} |" for row in self.rows])


# -- overhead -------------------------------------------------------------------------------------------------------


@dataclass
class Loop:
    """A model, its optimizer and its data; `train` does one step on a batch and returns the loss."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    loader: Any
    train: Callable[[Any], torch.Tensor]
    device: torch.device

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def small_loop() -> Loop:
    """A convolutional classifier of 32 x 32 images, 0.3 M parameters: 10 to 20 ms a step on one core."""
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(2000, 3, 32, 32), torch.randint(0, 10, (2000,)))
    loader = DataLoader(data, batch_size=32, shuffle=True)
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(64 * 64, 64), nn.ReLU(), nn.Linear(64, 10),
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def train(batch: Any) -> torch.Tensor:
        loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return Loop(model, optimizer, loader, train, torch.device("cpu"))


def gpt_loop(batch_size: int, device: torch.device) -> Loop:
    """GPT-2 small on random tokens, bf16 autocast, fused AdamW."""
    from jackline.models.gpt import GPT
    from jackline.models.shapes import GPTShape

    torch.manual_seed(0)
    is_small = device.type == "cpu"
    shape = GPTShape(2, 2, 64, context=64, vocab_size=500) if is_small else GPTShape(12, 12, 768)
    model = GPT(shape).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    tokens = torch.randint(0, shape.vocab_size, (batch_size * 50, shape.context + 1))
    loader = DataLoader(TensorDataset(tokens), batch_size=batch_size, shuffle=True, pin_memory=not is_small)

    def train(batch: Any) -> torch.Tensor:
        ids = batch[0].to(device, non_blocking=True)
        with torch.autocast(device.type, torch.bfloat16):
            loss = model(ids[:, :-1], ids[:, 1:]) / ids[:, 1:].numel()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return Loop(model, optimizer, loader, train, device)


def endless(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


@dataclass
class Blocks:
    """Blocks of steps that took turns, bare and attached."""

    bare_s: list[float] = field(default_factory=list)
    attached_s: list[float] = field(default_factory=list)
    bare_cpu_s: float = 0.0
    attached_cpu_s: float = 0.0

    def timed(self, loop: Loop, steps: Callable[[], None], *, is_attached: bool) -> None:
        loop.wait()
        began_s, began_cpu_s = time.perf_counter(), time.process_time()
        steps()
        loop.wait()
        took_s, cpu_s = time.perf_counter() - began_s, time.process_time() - began_cpu_s
        if is_attached:
            self.attached_s.append(took_s)
            self.attached_cpu_s += cpu_s
        else:
            self.bare_s.append(took_s)
            self.bare_cpu_s += cpu_s

    def ratios(self) -> list[float]:
        """Neighbours in time, so that a machine that slows down slows both."""
        return [attached / bare - 1 for attached, bare in zip(self.attached_s, self.bare_s, strict=True)]


def measure_overhead(name: str, make: Callable[[], Loop], *, seconds: float, block: int, report: Report) -> None:
    """What is judged: the median over neighbouring blocks, which has few saves in it, and on top of it what all saves
    made the loop wait. The sum has the saves in it and all the noise too; it is shown beside."""
    bare, attached, blocks = make(), make(), Blocks()
    with jackline.attach(model=attached.model, optimizer=attached.optimizer, loader=attached.loader, new=True) as run:
        batches, steps = endless(bare.loader), run.steps(total=10**9)
        tickets = watch_saves(run._attached.saver)

        def train_bare() -> None:
            for batch in itertools.islice(batches, block):
                bare.train(batch)

        def train_attached() -> None:
            for batch in itertools.islice(steps, block):
                run.log(loss=attached.train(batch))

        train_bare()
        train_attached()
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s:
            # Who goes first alternates as well: caches are warm for the second.
            for is_attached in (False, True) if len(blocks.bare_s) % 2 else (True, False):
                loop, work = (attached, train_attached) if is_attached else (bare, train_bare)
                blocks.timed(loop, work, is_attached=is_attached)
        run._attached.stop.ask("the end of the benchmark")
        with contextlib.suppress(jackline.Stopped):
            next(steps)
    tell_overhead(name, blocks, block, [ticket.stall_s for ticket in tickets[:-1]], report)


def watch_saves(saver: Any) -> list[Any]:
    """The tickets of all saves from now on, the last of which is the one at the end."""
    found: list[Any] = []
    save = saver.save

    def noted(*words: Any, **more: Any) -> Any:
        ticket = save(*words, **more)
        if ticket is not None and ticket.outcome != "skipped":
            found.append(ticket)
        return ticket

    saver.save = noted
    return found


def tell_overhead(name: str, blocks: Blocks, block: int, stalls_s: list[float], report: Report) -> None:
    ratios = blocks.ratios()
    quarters = statistics.quantiles(ratios, n=4)
    by_stalls = sum(stalls_s) / sum(blocks.attached_s)
    by_sum = sum(blocks.attached_s) / sum(blocks.bare_s) - 1
    by_cpu = blocks.attached_cpu_s / blocks.bare_cpu_s - 1
    judged = quarters[1] + by_stalls
    step_ms = 1000 * statistics.median(blocks.bare_s) / block
    measured = (
        f"{judged:+.2%} = {quarters[1]:+.2%} (median of {len(ratios)} pairs of blocks of {block}, middle half "
        f"{quarters[0]:+.2%} to {quarters[2]:+.2%}) {by_stalls:+.2%} ({len(stalls_s)} saves, "
        f"{1000 * max(stalls_s, default=0.0):.1f} ms at most); by sum {by_sum:+.2%}, CPU {by_cpu:+.2%}; "
        f"{step_ms:.2f} ms a step"
    )
    report.add(f"overhead, {name}", "<= 0.5 %", measured, max(0.0, judged) / 0.005)


def measure_own_cost(report: Report) -> None:
    """The session's own time a step, from a step that does next to nothing: the noise of a real one hides it."""
    torch.manual_seed(0)
    weight = nn.Parameter(torch.zeros(4))
    weight.grad = torch.zeros(4)
    model = nn.ParameterList([weight])
    optimizer = torch.optim.SGD([weight], lr=0.0)
    data = DataLoader(TensorDataset(torch.zeros(32_000, 4)), batch_size=4, shuffle=True)
    loss = torch.tensor(1.0)
    bare_s: list[float] = []
    attached_s: list[float] = []
    block = 400
    plain = torch.optim.SGD([weight], lr=0.0)
    with jackline.attach(model=model, optimizer=optimizer, loader=data, new=True, name="cost") as run:
        steps, batches = run.steps(total=10**9), endless(data)
        for _ in range(40):
            began_s = time.process_time()
            for _ in itertools.islice(batches, block):
                plain.step()
            bare_s.append((time.process_time() - began_s) / block)
            began_s = time.process_time()
            for _ in itertools.islice(steps, block):
                optimizer.step()
                run.log(loss=loss)
            attached_s.append((time.process_time() - began_s) / block)
        run._attached.stop.ask("the end of the benchmark")
        with contextlib.suppress(jackline.Stopped):
            next(steps)
    cost_us = [1e6 * (attached - bare) for attached, bare in zip(attached_s, bare_s, strict=True)]
    measured = f"{statistics.median(cost_us):.1f} us of CPU, middle half {_middle_half(cost_us)}"
    report.add("own cost a step, one log included", "none set", measured, None)


# -- the rest -------------------------------------------------------------------------------------------------------


def measure_log(report: Report, device: torch.device) -> None:
    from jackline.session.metrics.scalars import Scalars

    scalars = Scalars()
    loss, other = torch.ones((), device=device), torch.ones((), dtype=torch.bfloat16, device=device)
    for name, values in (("one value", {"loss": loss}), ("three values", {"loss": loss, "norm": other, "lr": 0.1})):
        costs = []
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("error")  # any call that waits for the device raises
        for _ in range(300):
            began_s = time.perf_counter()
            for _ in range(20):
                scalars.log(1, values)
            costs.append((time.perf_counter() - began_s) / 20)
            scalars.send(float("inf"))
            scalars.resolve()
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("default")
        median_us = 1e6 * statistics.median(costs)
        words = f"{median_us:.1f} us, middle half {_middle_half([1e6 * cost for cost in costs])} ({device.type}"
        words += ", no sync seen)" if device.type == "cuda" else ")"
        report.add(f"log, {name}", "<= 20 us", words, median_us / 20)
    lines = scalars.resolve(wait=True)
    assert all(value in (1.0, 0.1) for _, _, line in lines for value in line.values())


def measure_resume(report: Report, folder: Path, num_pairs: int = 9) -> None:
    """A data set of 10^7 samples, left at the beginning and at sample 9 * 10^6: both are taken up again in turn."""
    script = folder / "resume.py"
    script.write_text(RESUME)
    for name, until in (("near", 0), ("far", 9000)):
        _run([str(script), str(until), name])
    times: dict[str, list[tuple[float, float]]] = {"near": [], "far": []}
    for _ in range(num_pairs):
        for name, until in (("near", 0), ("far", 9000)):
            words = _run([str(script), str(until), name]).split()
            assert words[1] == str(until), words
            times[name].append((float(words[2]), float(words[3])))
    wall = [1000 * min(pair[0] for pair in times[name]) for name in ("near", "far")]
    cpu = [1000 * statistics.median(pair[1] for pair in times[name]) for name in ("near", "far")]
    pairs = [1000 * (far[0] - near[0]) for far, near in zip(times["far"], times["near"], strict=True)]
    measured = (
        f"{wall[1] - wall[0]:+.0f} ms, ratio {wall[1] / wall[0]:.2f} (sample 0: {wall[0]:.0f} ms, sample 9e6: "
        f"{wall[1]:.0f} ms from attach to the first batch, best of {len(pairs)}; pairs' middle half "
        f"{_middle_half(pairs)} ms; CPU {cpu[0]:.0f} and {cpu[1]:.0f} ms, median)"
    )
    report.add("resume, far against near", "within 50 ms", measured, abs(wall[1] - wall[0]) / 50)


def measure_memory(report: Report, folder: Path) -> None:
    """Memory of its own that an attached loop takes beyond a bare one. The staged copy is shared: counted apart."""
    script = folder / "memory.py"
    script.write_text(MEMORY)
    grown: dict[str, list[dict[str, int]]] = {"bare": [], "attached": []}
    for _ in range(3):
        for how in grown:
            grown[how].append(json.loads(_run([str(script), how])))
    own = {how: statistics.median(one["RssAnon"] for one in values) for how, values in grown.items()}
    spread = [one["RssAnon"] / 1e6 for one in grown["attached"]]
    shared = statistics.median(one["RssShmem"] for one in grown["attached"]) / 1e6
    extra = (own["attached"] - own["bare"]) / 1e6
    report.add(
        "memory beside the staged copy",
        "<= 20 MB",
        f"{extra:.1f} MB (attached {min(spread):.1f} to {max(spread):.1f}, bare {own['bare'] / 1e6:.1f}; "
        f"staged copy {shared:.0f} MB)",
        extra / 20,
    )


def _middle_half(values: list[float]) -> str:
    quarters = statistics.quantiles(values, n=4)
    return f"{quarters[0]:.1f} to {quarters[2]:.1f}"


def _run(words: list[str]) -> str:
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=600)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return done.stdout.strip().splitlines()[-1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--only", default="overhead,cost,log,resume,memory")
    parser.add_argument("--seconds", type=float, default=90.0, help="for each overhead")
    parser.add_argument("--pairs", type=int, default=9, help="of resumes")
    parser.add_argument("--batch-size", type=int, default=16, help="of the 124M model")
    arguments = parser.parse_args()
    wanted, report = arguments.only.split(","), Report()
    folder = Path(tempfile.mkdtemp(prefix="session-bench-"))
    os.environ |= {"JACKLINE_RUNS": str(folder / "runs"), "XDG_STATE_HOME": str(folder / "state")}
    os.environ["PYTHONPATH"] = str(ROOT / "src")
    device = torch.device("cuda" if arguments.gpu else "cpu")
    try:
        if "log" in wanted:
            measure_log(report, device)
        if "cost" in wanted:
            measure_own_cost(report)
        if "overhead" in wanted and arguments.gpu:
            make = lambda: gpt_loop(arguments.batch_size, device)  # noqa: E731
            measure_overhead("124M GPT", make, seconds=arguments.seconds, block=10, report=report)
        elif "overhead" in wanted:
            torch.set_num_threads(1)
            measure_overhead("small CPU model", small_loop, seconds=arguments.seconds, block=25, report=report)
        if "resume" in wanted:
            measure_resume(report, folder, arguments.pairs)
        if "memory" in wanted and not arguments.gpu:
            measure_memory(report, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(f"\n{report.table()}")
    return int(report.num_missed > 0)


if __name__ == "__main__":
    sys.exit(main())
