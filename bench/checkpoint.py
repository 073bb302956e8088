"""What saving and loading cost, beside torch.save, safetensors, dcp and the best one could write by hand.

    python bench/checkpoint.py                 on the CPU, 2.5 GB of state, about 10 minutes
    python bench/checkpoint.py --gpu           on the GPU, 1.5 GB of state, about 6 minutes; prints its table last
    python bench/checkpoint.py --gpu --cpu-smoke   the same code with tiny shapes on the CPU, seconds
    python bench/checkpoint.py --only stall,snapshot,durable,load,memory --gb 0.5 --repeats 3

All rows of a section are measured in one run, interleaved, each at least five times; what is compared is the median,
and the spread stands beside it. The excess of a save is wall time: a window of steps with a save in it, less the same
number of steps without one, measured right before and after it. The save is asked for after the window's first step,
when the GPU still has that step to do, as in any loop that does not wait for the GPU; "in call" is the time that the
loop's own thread spends in it, which for the others includes waiting for that step.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

import torch  # noqa: E402
from torch import nn  # noqa: E402

from bench import checkpoint_methods as methods  # noqa: E402
from bench.checkpoint_methods import BLOCK_BYTES  # noqa: E402

METHODS = (
    methods.Nothing,
    methods.Ours,
    methods.OursBlocking,
    methods.HandMade,
    methods.DcpAsync,
    methods.DcpKept,
    methods.DiskAlone,
    methods.Safetensors,
    methods.TorchSave,
)
GPU_METHODS = (
    methods.Nothing,
    methods.Ours,
    methods.OursBounce,
    methods.OursEach,
    *METHODS[2:],
)


@dataclass
class Row:
    """One way, measured several times. Seconds unless the name says otherwise."""

    name: str
    values: list[float] = field(default_factory=list)
    more: dict[str, list[float]] = field(default_factory=dict)

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def error(self) -> float:
        """Of the mean."""
        count = len(self.values)
        return statistics.stdev(self.values) / count**0.5 if count > 1 else float("nan")

    def spread(self, scale: float = 1.0) -> str:
        return f"{min(self.values) * scale:.3g}..{max(self.values) * scale:.3g}"

    def add(self, name: str, value: float) -> None:
        self.more.setdefault(name, []).append(value)

    def of(self, name: str) -> float:
        return statistics.median(self.more.get(name, [float("nan")]))


@dataclass
class Report:
    """Lines for the end, and the promises that did not hold."""

    lines: list[str] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)

    def say(self, line: str) -> None:
        self.lines.append(line)
        print(line, flush=True)

    def promise(self, what: str, value: float, limit: float, *, is_upper: bool = True) -> None:
        holds = value <= limit if is_upper else value >= limit
        sign = "<=" if is_upper else ">="
        self.say(f"  {'held ' if holds else 'SHORT'}  {what}: {value:.3g} (promised {sign} {limit:.3g})")
        if not holds:
            self.broken.append(what)


# ------------------------------------------------------------------------------------------------ training loops


class Loop:
    """A training loop that is stopped by nothing but the saves. `window` runs steps and returns their wall time."""

    def __init__(self, model: nn.Module, data: Callable[[], tuple[Any, ...]], device: str) -> None:
        self.model, self.data, self.device = model, data, device
        is_fused = True
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=is_fused)
        self.state = {"model": model, "optim": self.optimizer, "counters": {"step": 0}}

    def step(self, before_change: Callable[[], None]) -> None:
        with torch.autocast(self.device, dtype=torch.bfloat16, enabled=self.device == "cuda"):
            loss = self.model(*self.data())
        loss.backward()
        before_change()
        self.optimizer.step()
        # On the CPU gradients stay where they are: fresh pages for 0.8 GB each step made a step vary by a second.
        self.optimizer.zero_grad(set_to_none=self.device == "cuda")
        self.state["counters"]["step"] += 1

    def wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.current_stream().synchronize()

    def window(self, count: int, before_change: Callable[[], None] = lambda: None) -> float:
        self.wait()
        began_s = time.perf_counter()
        for _ in range(count):
            self.step(before_change)
        self.wait()
        return time.perf_counter() - began_s


def cpu_loop(state_gb: float) -> Loop:
    """Square layers until weights and two moments have the wanted size."""
    width = 2048 if state_gb >= 0.2 else 256
    depth = max(1, round(state_gb * 1e9 / 12 / width**2))
    torch.manual_seed(0)

    class Squares(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(depth))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            # Added to what came in: through fifty plain layers the gradients become denormal numbers, with which this
            # processor calculates ten times as slowly; steps of 4 s instead of 1 s hid what a save costs.
            for layer in self.layers:
                x = x + nn.functional.gelu(layer(x))
            return x.square().mean()

    batch = torch.randn(16, width)
    return Loop(Squares(), lambda: (batch,), "cpu")


def gpt_loop(device: str, *, is_tiny: bool) -> Loop:
    """The GPT-2 shape with 124 M parameters: 1.49 GB with AdamW's moments."""
    depth, heads, width, vocab, length, batch = (2, 2, 64, 512, 64, 4) if is_tiny else (12, 12, 768, 50304, 1024, 32)

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
            self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            size, steps, _ = x.shape
            parts = self.qkv(self.norm1(x)).view(size, steps, 3, heads, width // heads).permute(2, 0, 3, 1, 4)
            mixed = nn.functional.scaled_dot_product_attention(*parts.unbind(0), is_causal=True)
            x = x + self.out(mixed.transpose(1, 2).reshape(size, steps, width))
            return x + self.down(nn.functional.gelu(self.up(self.norm2(x)), approximate="tanh"))

    class Gpt(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.positions = nn.Embedding(vocab, width), nn.Embedding(length, width)
            self.blocks = nn.ModuleList(Block() for _ in range(depth))
            self.norm = nn.LayerNorm(width)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            hidden = self.tokens(x) + self.positions(torch.arange(length, device=x.device))
            for block in self.blocks:
                hidden = block(hidden)
            logits = nn.functional.linear(self.norm(hidden), self.tokens.weight)
            return nn.functional.cross_entropy(logits.view(-1, vocab).float(), y.view(-1))

    torch.manual_seed(0)
    with torch.device(device):
        model = Gpt()
    generator = torch.Generator().manual_seed(1)

    def data() -> tuple[torch.Tensor, torch.Tensor]:
        batch_of = torch.randint(0, vocab, (batch, length + 1), generator=generator)
        if device == "cuda":
            batch_of = batch_of.pin_memory().to(device, non_blocking=True)
        return batch_of[:, :-1].contiguous(), batch_of[:, 1:].contiguous()

    return Loop(model, data, device)


# ------------------------------------------------------------------------------------------------ sections


@dataclass(frozen=True)
class Excess:
    """Of one save: wall time, processor time of all our processes, until durable, and inside the call itself."""

    wall_s: float
    cpu_s: float
    durable_s: float
    called_s: float


def measure_excess(loop: Loop, method: methods.Method) -> Excess:
    method.end()
    gc.collect()
    count = 4 if loop.device == "cpu" else 8
    loop.window(1)
    before_s, before_cpu_s = timed(lambda: loop.window(count))
    loop.wait()
    began_s, began_cpu_s = time.perf_counter(), own_cpu_s()
    loop.step(method.before_change)
    asked_s = time.perf_counter()
    method.begin()
    called_s = time.perf_counter() - asked_s
    steps = 1
    durable_s = None
    while durable_s is None or steps < 3 or not method.is_quiet():
        loop.step(method.before_change)
        steps += 1
        if durable_s is None and method.is_durable():
            durable_s = time.perf_counter() - asked_s
    loop.wait()
    total_s, total_cpu_s = time.perf_counter() - began_s, own_cpu_s() - began_cpu_s
    method.end()
    loop.window(1)
    after_s, after_cpu_s = timed(lambda: loop.window(count))
    share = steps / count / 2
    return Excess(
        total_s - share * (before_s + after_s),
        total_cpu_s - share * (before_cpu_s + after_cpu_s),
        durable_s,
        called_s,
    )


def timed(work: Callable[[], float]) -> tuple[float, float]:
    began_cpu_s = own_cpu_s()
    return work(), own_cpu_s() - began_cpu_s


def own_cpu_s() -> float:
    """Of this process and its children. Unlike wall time it hardly depends on what else the machine does."""
    ticks = 0
    for pid in (os.getpid(), *children_of(os.getpid())):
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += sum(int(word) for word in words[11:15])
    return ticks / os.sysconf("SC_CLK_TCK")


def bench_stall(loop: Loop, work: Path, kinds: tuple[type, ...], repeats: int, report: Report) -> dict[str, Row]:
    for _ in range(3):
        loop.step(lambda: None)
    state_bytes = sum(tensor.numel() * tensor.element_size() for tensor in methods.flat_state(loop.state).values())
    step_s = loop.window(5) / 5
    report.say(f"state {state_bytes / 1e9:.2f} GB, step {step_s * 1e3:.1f} ms, {torch.get_num_threads()} threads")
    rows = {kind.name: Row(kind.name) for kind in kinds}
    alive: dict[str, methods.Method] = {}
    for repeat in range(repeats + 1):
        for kind in kinds:
            with guard(kind.name, report):
                if kind.name not in alive:
                    shared = {"share": alive[methods.Ours.name]} if kind is methods.OursBlocking else {}
                    alive[kind.name] = kind(work / kind.__name__, loop.state, **shared)
                one = measure_excess(loop, alive[kind.name])
                print(
                    f"    {kind.name:28} excess {one.wall_s * 1e3:9.1f} ms, durable {one.durable_s:6.2f} s",
                    flush=True,
                )
                if repeat:  # the first one warms up
                    rows[kind.name].values.append(one.wall_s)
                    rows[kind.name].add("durable_s", one.durable_s)
                    rows[kind.name].add("called_ms", one.called_s * 1e3)
                    rows[kind.name].add("cpu_s", one.cpu_s)
    for method in alive.values():
        method.close()
    return {name: row for name, row in rows.items() if row.values}


def show_stall(rows: dict[str, Row], report: Report) -> None:
    best = rows[methods.Ours.name].median if methods.Ours.name in rows else float("nan")
    report.say(
        f"  {'excess of one save':30}{'ms':>9}{'spread ms':>20}{'+-':>7}{'in call ms':>12}{'durable s':>11}"
        f"{'CPU s':>8}{'x ours':>8}"
    )
    for row in rows.values():
        ratio = row.median / best if best > 0 else float("inf")
        report.say(
            f"  {row.name:30}{row.median * 1e3:9.1f}{row.spread(1e3):>20}{row.error * 1e3:7.0f}"
            f"{row.of('called_ms'):12.1f}{row.of('durable_s'):11.2f}{row.of('cpu_s'):8.2f}{ratio:8.1f}"
        )


def bench_parts(loop: Loop, repeats: int, report: Report) -> None:
    """Where the time of a call goes, nothing else running: reading the state, enqueueing, and the GPU's own work."""
    from jackline.checkpoint.staging.arena import Arena
    from jackline.checkpoint.staging.gather import GpuCopies
    from jackline.checkpoint.staging.layout import lay_out_state
    from jackline.checkpoint.staging.stage import Stager
    from jackline.checkpoint.state.capture import capture

    sources = capture(loop.state).sources
    layout = lay_out_state(sources)
    arena = Arena(layout.size_bytes, is_pinned=loop.device == "cuda")
    arena.ready.wait()
    ways = ("whole", "bounce", "none")
    kinds, free = ("cuda", "cpu"), lambda device: 0
    stagers = {way: Stager(arena, GpuCopies(way, free_bytes=free, kinds=kinds)) for way in ways}
    rows = {name: Row(name) for name in ("capture", *ways)}
    for repeat in range(repeats + 1):
        for name, row in rows.items():
            loop.wait()
            began_s = time.perf_counter()
            if name == "capture":
                capture(loop.state)
                staging = None
            else:
                staging = stagers[name].begin(layout, sources, is_overlapped=True)
            called_s = time.perf_counter() - began_s
            for _, event in staging.gathered if staging else ():
                event.synchronize()
            gathered_s = time.perf_counter() - began_s
            if staging:
                staging.finish()
            if repeat:
                row.values.append(called_s)
                row.add("gathered", gathered_s * 1e3)
                row.add("copied", (time.perf_counter() - began_s) * 1e3)
    report.say(f"  {'':30}{'in call':>9}{'spread':>16}{'may change':>12}{'copied':>9}   {len(sources)} tensors")
    for row in rows.values():
        report.say(
            f"  {row.name:30}{row.median * 1e3:9.2f}{row.spread(1e3):>16}{row.of('gathered'):12.2f}"
            f"{row.of('copied'):9.2f}"
        )
    for stager in stagers.values():
        stager.close()
    arena.close()


def bench_snapshot(state: dict[str, Any], work: Path, repeats: int, report: Report) -> None:
    """The stall of an attached loop's save, against one memcpy of as many bytes between existing buffers; alone, and
    with another Python thread alive, when the copy keeps the GIL. Ratios are of neighbours in time.
    """
    from jackline.checkpoint.staging.arena import Arena

    ours = methods.OursBlocking(work / "snapshot", state)
    assert ours.engine._area.arena is not None
    size = ours.engine._area.arena.size_bytes
    source = torch.ones(size, dtype=torch.uint8)
    target = torch.ones(size, dtype=torch.uint8)
    memcpy, shared = Row("memcpy"), Row("memcpy into shared memory")
    alone, beside = Row("attached save"), Row("attached save, other thread")
    arena = Arena(size, is_pinned=False)
    arena.ready.wait()
    for repeat in range(repeats + 1):
        for row in (alone, beside):
            began_s = time.perf_counter()
            ctypes.memmove(target.data_ptr(), source.data_ptr(), size)
            copy_s = time.perf_counter() - began_s
            began_s = time.perf_counter()
            ctypes.memmove(arena.address, source.data_ptr(), size)
            shared_s = time.perf_counter() - began_s
            may_go = threading.Event()
            if row is beside:
                threading.Thread(target=may_go.wait).start()
            began_s = time.perf_counter()
            ours.begin()
            save_s = time.perf_counter() - began_s
            may_go.set()
            ours.end()
            if repeat:
                memcpy.values.append(copy_s)
                shared.values.append(shared_s)
                row.values.append(save_s)
                row.add("ratio", save_s / copy_s)
    ours.close()
    for row in (memcpy, shared, alone, beside):
        report.say(
            f"  {row.name:30}{row.median * 1e3:9.1f} ms  {row.spread(1e3)}  {size / row.median / 1e9:.1f} GB/s"
        )
    for row in (alone, beside):
        ratios = row.more["ratio"]
        report.promise(f"{row.name} / one memcpy ({min(ratios):.2f}..{max(ratios):.2f})", row.of("ratio"), 1.2)


def bench_durable(state: dict[str, Any], work: Path, repeats: int, report: Report) -> None:
    """From the call to the disk, nothing else running."""
    size = sum(tensor.numel() * tensor.element_size() for tensor in methods.flat_state(state).values())
    raw = torch.ones(size // 4096 * 4096 + 8192, dtype=torch.uint8)
    start = -raw.data_ptr() % 4096
    kinds = (methods.Ours, methods.Safetensors, methods.TorchSave)
    alive = {kind.name: kind(work / f"durable-{kind.__name__}", state) for kind in kinds}
    rows = {name: Row(name) for name in ("the disk, O_DIRECT", *alive)}
    for repeat in range(repeats + 1):
        for name, row in rows.items():
            began_s = time.perf_counter()
            if name in alive:
                alive[name].begin()
                while not alive[name].is_durable():
                    time.sleep(0.001)
            else:
                methods.write_direct(work / "raw", raw.data_ptr() + start, size // 4096 * 4096)
            took_s = time.perf_counter() - began_s
            if name in alive:
                alive[name].end()
            (work / "raw").unlink(missing_ok=True)
            if repeat:
                row.values.append(took_s)
    for method in alive.values():
        method.close()
    for row in rows.values():
        report.say(f"  {row.name:30}{row.median:9.2f} s   {row.spread()}  {size / row.median / 1e9:.2f} GB/s")
    ours, disk = rows[methods.Ours.name].median, rows["the disk, O_DIRECT"].median
    report.promise("durable: share of the disk's direct-write speed", disk / ours, 0.8, is_upper=False)
    report.promise("durable: times safetensors", rows[methods.Safetensors.name].median / ours, 2.0, is_upper=False)
    report.promise("durable: times torch.save", rows[methods.TorchSave.name].median / ours, 4.0, is_upper=False)


def bench_load(state: dict[str, Any], work: Path, repeats: int, report: Report) -> None:
    """Into tensors that exist: ours with checksums verified, safetensors without."""
    from safetensors import safe_open
    from safetensors.torch import load_file, save_file

    flat = methods.flat_state(state)
    path = work / "plain.safetensors"
    save_file(flat, path)
    ours = methods.OursBlocking(work / "load", state)
    ours.begin()
    ours.end()
    saved = [*ours.engine.folder.glob("step-*/*.safetensors"), path]

    def by_tensor() -> None:
        with safe_open(path, "pt") as file, torch.no_grad():
            for name, tensor in flat.items():
                tensor.copy_(file.get_tensor(name))

    def by_file() -> None:
        found = load_file(path)
        with torch.no_grad():
            for name, tensor in flat.items():
                tensor.copy_(found[name])

    ways = {
        "jackline, verified": lambda: ours.engine.load_newest(state),
        "safetensors, safe_open": by_tensor,
        "safetensors, load_file": by_file,
    }
    for is_cold in (False, True):
        rows = {name: Row(name) for name in ways}
        for repeat in range(repeats + 1):
            for name, way in ways.items():
                for file in saved:
                    forget(file) if is_cold else remember(file)
                began_s = time.perf_counter()
                way()
                if repeat:
                    rows[name].values.append(time.perf_counter() - began_s)
        size = path.stat().st_size
        for row in rows.values():
            how = "cold" if is_cold else "warm"
            report.say(
                f"  {how} {row.name:25}{row.median:9.3f} s   {row.spread()}  {size / row.median / 1e9:.2f} GB/s"
            )
        best = min(row.median for name, row in rows.items() if name != "jackline, verified")
        word = "cold" if is_cold else "warm"
        report.promise(
            f"load, {word}: share of plain safetensors", best / rows["jackline, verified"].median, 0.9, is_upper=False
        )
    ours.close()


def bench_limits(path: Path, device: str, repeats: int, report: Report) -> None:
    """What bounds a load to the GPU: the disk, read past the page cache, and the bus, from pinned memory."""
    from concurrent.futures import ThreadPoolExecutor

    from jackline.checkpoint.state.source import SIP_BYTES, Source

    size = path.stat().st_size
    host = torch.empty(size, dtype=torch.uint8, pin_memory=device == "cuda")
    place = torch.empty(size, dtype=torch.uint8, device=device)
    view = memoryview(host.numpy())

    def from_disk() -> None:
        source = Source(path, path.name)

        def read(start: int) -> None:
            source.read([view[start : min(start + SIP_BYTES, size)]], start, is_on_disk=True)

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(read, range(0, size, SIP_BYTES)))
        source.close()

    def over_the_bus() -> None:
        place.copy_(host, non_blocking=True)
        if device == "cuda":
            torch.cuda.synchronize()

    for name, way in {"limit: the disk": from_disk, "limit: the bus": over_the_bus}.items():
        row = Row(name)
        for repeat in range(repeats + 1):
            forget(path)
            began_s = time.perf_counter()
            way()
            if repeat:
                row.values.append(time.perf_counter() - began_s)
        report.say(f"       {name:25}{row.median:9.3f} s   {row.spread()}  {size / row.median / 1e9:.2f} GB/s")


def forget(path: Path) -> None:
    """Out of the page cache."""
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


def remember(path: Path) -> None:
    """Into the page cache: what is read past it does not come there by itself."""
    with open(path, "rb", buffering=0) as file:
        while file.read(BLOCK_BYTES):
            pass


def bench_memory(loop: Loop, work: Path, report: Report) -> None:
    """The most that saving adds to trainer and writer together, sampled while it saves."""
    method = methods.Ours(work / "memory", loop.state)
    arena = method.engine._area.arena
    assert arena is not None
    size = sum(tensor.numel() * tensor.element_size() for tensor in methods.flat_state(loop.state).values())
    loop.window(2)
    own = threading.Event()
    peak = [0]

    def watch() -> None:
        while not own.wait(0.005):
            peak[0] = max(peak[0], private_bytes(os.getpid()) + private_bytes(method.engine._link.writer.pid))

    before = private_bytes(os.getpid()) + private_bytes(method.engine._link.writer.pid)
    thread = threading.Thread(target=watch)
    thread.start()
    for _ in range(3):
        method.begin()
        loop.window(2, method.before_change)
        method.end()
    own.set()
    thread.join()
    method.close()
    grown = max(0, peak[0] - before)
    report.say(f"  arena {arena.size_bytes / 1e9:.3f} GB, private memory +{grown / 1e6:.0f} MB while saving")
    report.promise("extra memory / one copy of the state", (grown + arena.size_bytes) / size, 1.1)


def private_bytes(pid: int) -> int:
    """Anonymous memory: the arena is shared and counted by its size."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    return 0


class Neighbours:
    """How much of the machine other programs used meanwhile; a number above a few percent spoils the others."""

    def __init__(self) -> None:
        self._before = self._read()

    def line(self) -> str:
        now = self._read()
        total, busy, own = (after - before for after, before in zip(now, self._before, strict=True))
        return f"  other programs used {100 * max(0.0, busy - own) / max(total, 1e-9):.0f} % of the machine meanwhile"

    def _read(self) -> tuple[float, float, float]:
        fields = [int(word) for word in Path("/proc/stat").read_text().split("\n")[0].split()[1:9]]
        idle = fields[3] + fields[4]
        return float(sum(fields)), float(sum(fields) - idle), own_cpu_s() * os.sysconf("SC_CLK_TCK")


def children_of(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):
            found += [int(word) for word in (task / "children").read_text().split()]
    return found


@contextlib.contextmanager
def guard(name: str, report: Report) -> Any:
    """A peer that fails becomes a line and not the end."""
    try:
        yield
    except Exception as problem:
        first = str(problem).strip().splitlines()
        report.say(f"  {name} failed: {type(problem).__name__}: {first[0][:150] if first else ''}")


def run_cpu(given: argparse.Namespace, work: Path, report: Report) -> None:
    loop = cpu_loop(given.gb)
    loop.window(2)
    sections: dict[str, tuple[str, Callable[[], None]]] = {
        "stall": ("excess of one save in a training loop", lambda: run_stall(loop, given, work, report)),
        "snapshot": (
            "stall of an attached loop's save against one memcpy",
            lambda: bench_snapshot(loop.state, work, given.repeats, report),
        ),
        "durable": ("from the call to the disk", lambda: bench_durable(loop.state, work, given.repeats, report)),
        "load": ("loading into existing tensors", lambda: bench_load(loop.state, work, given.repeats, report)),
        "memory": ("memory", lambda: bench_memory(loop, work, report)),
    }
    for name in given.only.split(","):
        title, section = sections[name]
        report.say(f"-- {title}")
        neighbours = Neighbours()
        section()
        report.say(neighbours.line())


def run_stall(loop: Loop, given: argparse.Namespace, work: Path, report: Report) -> None:
    cores = len(os.sched_getaffinity(0))
    for threads in given.threads or dict.fromkeys((max(1, cores - 1), cores)):
        torch.set_num_threads(threads)
        report.say(f"  {threads} of {cores} cores training")
        rows = bench_stall(loop, work / f"stall-{threads}", chosen_methods(given), given.repeats, report)
        show_stall(rows, report)
        for peer in (methods.DcpAsync, methods.DcpKept):
            if peer.name in rows and methods.Ours.name in rows:
                ratio = rows[methods.Ours.name].median / rows[peer.name].median
                report.promise(f"overlapped excess / {peer.name}", ratio, 1 / 20)


def chosen_methods(given: argparse.Namespace) -> tuple[type, ...]:
    words = given.ways.split(",")
    return tuple(kind for kind in (GPU_METHODS if given.gpu else METHODS) if any(word in kind.name for word in words))


def run_gpu(given: argparse.Namespace, work: Path, report: Report) -> None:
    device = "cpu" if given.cpu_smoke else "cuda"
    if device == "cuda" and not torch.cuda.is_available():
        report.say("there is no GPU here")
        return
    from jackline.checkpoint.format.hashing import best_algorithm

    name = torch.cuda.get_device_name() if device == "cuda" else "CPU, tiny shapes"
    report.say(f"-- excess of one save in a training loop: {name}, torch {torch.__version__}, {best_algorithm()}")
    loop = gpt_loop(device, is_tiny=given.cpu_smoke)
    if given.only == "load":
        loop.window(2)
        bench_load(loop.state, work / "gpu-load", given.repeats, report)
        bench_limits(work / "gpu-load" / "plain.safetensors", device, given.repeats, report)
        return
    rows = bench_stall(loop, work / "gpu", chosen_methods(given), given.repeats, report)
    report.lines.append("")
    show_stall(rows, report)
    if methods.Ours.name in rows:
        report.promise("excess of an overlapped save, ms", rows[methods.Ours.name].median * 1e3, 10.0)
    report.say("-- the parts of a save, ms")
    with guard("parts", report):
        bench_parts(loop, given.repeats, report)
    report.say("-- loading into existing tensors")
    with guard("load", report):
        bench_load(loop.state, work / "gpu-load", 3, report)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--gpu", action="store_true")
    options.add_argument("--cpu-smoke", action="store_true")
    options.add_argument("--gb", type=float, default=2.5)
    options.add_argument("--repeats", type=int, default=5)
    options.add_argument(
        "--threads", type=int, action="append", help="of training; default: one core left free, then none"
    )
    options.add_argument("--ways", default="", help="parts of the names of those to measure, e.g. overlapped,dcp")
    options.add_argument("--only", default="stall,snapshot,durable,load,memory")
    options.add_argument("--folder", default=None, help="where to write; default: the temporary folder")
    given = options.parse_args()
    report = Report()
    work = Path(tempfile.mkdtemp(prefix="jackline-bench-checkpoint-", dir=given.folder))
    (work / "gpu-load").mkdir()
    began_s = time.monotonic()
    try:
        (run_gpu if given.gpu else run_cpu)(given, work, report)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    print(f"\n== all of it, {time.monotonic() - began_s:.0f} s")
    print("\n".join(report.lines))
    sys.exit(1 if report.broken else 0)


if __name__ == "__main__":
    main()
