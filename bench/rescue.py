"""What rescue, replay and the forecast of GPU memory cost and find, on a real GPU.

    python bench/rescue.py                     all but the creep, about 2 minutes
    python bench/rescue.py --only creep        a program that leaks 50 MB a minute, about 4 minutes
    python bench/rescue.py --only all          both, under 6 minutes: the hook is measured while the memory creeps
    python bench/rescue.py --only stall,hook   some

stall   a script that never saves, with 1.5 GB of state, is asked for it three times: how long its loop was held
hook    what the injected hook costs a step when nothing is asked (CPU time), and how much memory the injection takes
equal   losses of a script with and without rescue armed and asked, bit by bit
oom     scripts that ask for more memory than the GPU has (plain, AMP, compiled): what was rescued is the state before
        the failed step
replay  a step of 124M parameters with and without its loss read, in windows by turns, with a 95 % confidence interval
        of the difference; and what one step done again takes
creep   50 MB a minute in real time; a ballast leaves 1.3 GB free, so that it is full in 26 minutes and not in days
Where there is no GPU the same runs on the CPU with a small state, without `creep`.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

IS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if IS_GPU else "cpu"
BEGAN_S = time.monotonic()
LONGEST_S = 75.0  # of a part, before the stacks say where it stands

TRAINING = """
import sys, time, torch
torch.manual_seed(0)
torch.use_deterministic_algorithms(True)
width, steps, device = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
torch.set_num_threads(1)
model = torch.nn.Sequential(*[torch.nn.Linear(width, width) for _ in range(8)]).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
longest = 0.0
for step in range(steps):
    began = time.perf_counter()
    loss = model(torch.randn(4096 if device == "cuda" else 16, width, device=device)).square().mean()
    optimizer.zero_grad(); loss.backward(); optimizer.step()
    print("step", step, float(loss).hex(), f"{1e3 * (time.perf_counter() - began):.2f} ms", flush=True)
"""
HOOK = """
import sys, time, torch
class Nothing(torch.optim.Optimizer):
    def __init__(self, params): super().__init__(params, {})
    def step(self, closure=None): pass
optimizer = Nothing([torch.nn.Parameter(torch.zeros(1))])
optimizer.step()
best = 1e9
for _ in range(20):
    began = time.thread_time()
    for _ in range(5000): optimizer.step()
    best = min(best, (time.thread_time() - began) / 5000)
rss = int(open("/proc/self/statm").read().split()[1]) * 4096
print("each", best * 1e6, "rss", rss, flush=True)
"""
OOM = """
import sys, torch
kind, device = sys.argv[1:]
torch.manual_seed(0)
model = torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(8)]).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
scaler = torch.amp.GradScaler(device, init_scale=1024.0, enabled=kind == "amp")
forward = torch.compile(model) if kind == "compiled" else model
def fill():
    if device == "cpu":
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    return torch.empty(torch.cuda.mem_get_info()[1], dtype=torch.uint8, device=device)
for step in range(1, 100):
    with torch.autocast(device, torch.float16, enabled=kind == "amp"):
        loss = forward(torch.randn(64, 512, device=device)).float().square().mean()
    optimizer.zero_grad(); scaler.scale(loss).backward()
    kept = fill() if step == 30 else None
    scaler.step(optimizer); scaler.update()
    torch.save({"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()["state"]}, "truth.pt")
"""
LEAKING = """
import time, torch
free, total = torch.cuda.mem_get_info()
ballast = torch.empty(free - 1300 * 2**20, dtype=torch.uint8, device="cuda")
model = torch.nn.Linear(512, 512, device="cuda")
kept = []
for step in range(10_000):
    loss = model(torch.randn(2048, 512, device="cuda")).square().mean()
    loss.backward(); model.zero_grad()
    kept.append(torch.ones(50 * 10**6 // 60 // 4, device="cuda"))  # HERE
    print("step", step, float(loss), flush=True)
    time.sleep(1.0)
"""


def jackline(*words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "jackline", *words], cwd=folder, capture_output=True, text=True)


def start(folder: Path, script: str, *words: str, options: tuple[str, ...] = ("--rescue",)) -> str:
    (folder / "train.py").write_text(script)
    os.environ["JACKLINE_RUNS"] = str(folder / "runs")
    done = jackline(
        "run", *options, "--name", "one", "--detach", "--", sys.executable, "train.py", *words, folder=folder
    )
    assert done.returncode == 0, done.stderr
    return "one"


def wait_for(ask: Callable[[], Any], seconds: float) -> Any:
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        if found := ask():
            return found
        time.sleep(0.2)
    return None


def log_of(folder: Path) -> str:
    path = folder / "runs" / "one" / "out.log"
    return path.read_text(errors="replace") if path.exists() else ""


def measure_stall(folder: Path) -> None:
    """1.5 GB: 8 layers of 4,000 x 4,000 with two moments each."""
    width = "4000" if IS_GPU else "400"
    start(folder, TRAINING, width, "100000", DEVICE)
    wait_for(lambda: "step 40 " in log_of(folder), 120.0)
    lines = []
    for _ in range(4):
        done = jackline("rescue", "one", "--json", folder=folder)
        record = json.loads(done.stdout)
        record = record["rescues"][0] if "rescues" in record else record
        lines.append(f"{1e3 * record['stall_s']:.1f} ms ({record['size_bytes'] / 1e9:.2f} GB, {record['outcome']})")
        time.sleep(1.0)
    jackline("stop", "one", folder=folder)
    print(f"stall: first {lines[0]}; later {', '.join(lines[1:])}; targets 60 and 15 ms", flush=True)
    steps = [float(one) for one in re.findall(r" (\d+\.\d+) ms", log_of(folder))][5:]
    print(f"       steps of the loop: median {median(steps):.1f} ms, the six longest {sorted(steps)[-6:]}")


def measure_hook(folder: Path) -> None:
    found: dict[str, tuple[float, int]] = {}
    (folder / "train.py").write_text(HOOK)
    for name in ("plain", "armed", "plain again", "armed again"):
        if name.startswith("plain"):
            text = subprocess.run([sys.executable, "train.py"], cwd=folder, capture_output=True, text=True).stdout
        else:
            (own := folder / name).mkdir()
            start(own, HOOK)
            wait_for((own / "runs/one/attempts/001/exit.json").exists, 120.0)
            text = log_of(own)
        match = re.search(r"each (\S+) rss (\d+)", text)
        assert match, text
        found[name] = float(match[1]), int(match[2])
    plain = min(found["plain"][0], found["plain again"][0])
    armed = min(found["armed"][0], found["armed again"][0])
    memory = (found["armed"][1] - found["plain"][1]) / 1e6
    print(f"hook: {armed - plain:.2f} us a step (target 5), {memory:.2f} MB (target 3)", flush=True)


def measure_equal(folder: Path) -> None:
    """The armed script trains until it was asked twice; then the plain one trains as many steps."""
    words = ("1024" if IS_GPU else "64", "100000", DEVICE)
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    start(folder, TRAINING, *words)
    assert wait_for(lambda: "step 20 " in log_of(folder), 40.0), "no step 20 after 40 s"
    say("equal: training with rescue armed")
    asked = [jackline("rescue", "one", "--json", folder=folder).stdout for _ in range(2)]
    say(f"equal: asked twice, {sum('stall_s' in one for one in asked)} rescued")
    seen = len(losses(log_of(folder)))
    wait_for(lambda: len(losses(log_of(folder))) > seen + 20, 20.0)
    jackline("stop", "one", folder=folder)
    armed = losses(log_of(folder))
    say(f"equal: stopped after {len(armed)} steps; now without rescue")
    command = [sys.executable, "train.py", words[0], str(len(armed)), DEVICE]
    plain = losses(subprocess.run(command, cwd=folder, capture_output=True, text=True).stdout)
    say(f"equal: {plain == armed} ({len(plain)} losses without rescue, {len(armed)} with)")


def measure_oom(folder: Path) -> None:
    """The uncaught OutOfMemoryError comes between backward and the optimizer's step: the weights are those of the
    step before. Without a GPU the error is raised by hand."""
    for kind in ("plain", "amp", "compiled"):
        faulthandler.dump_traceback_later(LONGEST_S)
        (own := folder / kind).mkdir()
        start(own, OOM, kind, DEVICE)
        assert wait_for((own / "runs/one/attempts/001/exit.json").exists, 200.0), "it has not ended"
        done = jackline("rescue", "one", "--json", folder=own)
        assert done.returncode == 0, done.stderr + log_of(own)[-2000:]
        record = json.loads(done.stdout)["rescues"][0]
        truth = torch.load(own / "truth.pt", map_location="cpu")
        where = f"step {record['step']} of {truth['step']}"
        is_equal = is_same_state(record, truth)
        say(
            f"oom, {kind}: {record['outcome']} at '{record['cause']}', {where}; weights and moments equal: {is_equal}"
        )
        say(f"     {record['moment']}; {[part['key'] for part in record['parts']]}")


def is_same_state(record: dict[str, Any], truth: dict[str, Any]) -> bool:
    """Bit by bit. A compiled model is saved as what it wraps, whatever variable named it."""
    from safetensors.torch import load_file

    files = {
        part["kind"]: load_file(Path(record["path"]) / f"{part['key']}.safetensors")
        for part in record["parts"]
        if part["kind"] in ("module", "optimizer")
    }
    moments = {
        f"state.{index}.{word}": value for index, one in truth["optimizer"].items() for word, value in one.items()
    }
    wanted = {"module": truth["model"], "optimizer": moments}
    return all(
        set(files[kind]) == set(values) and all(torch.equal(files[kind][name], values[name].cpu()) for name in values)
        for kind, values in wanted.items()
    )


def losses(text: str) -> list[str]:
    return re.findall(r"step \d+ (-?0x\S+) [\d.]+ ms", text)


CADENCE = 2000  # what the guide proposes


def measure_replay(folder: Path) -> None:
    """The cost of a step that only looks at its loss, and of one that is done again, in turns; the share of a long
    training is the first and a 2,000th of the second."""
    from jackline.memory.guard.replay import Replay

    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True)  # as exact=True does; with warn_only attention would not be
    torch.utils.deterministic.fill_uninitialized_memory = False
    train, told = _trainer(), []
    plain, watched, always = train(None), train(Replay(10**9, told.append)), train(Replay(1, told.append))
    for name, one in (("plain", plain), ("loss read", watched), ("done again", always), ("plain", plain)):
        say(f"replay: warm-up, {name}: {1e3 * one(6):.1f} ms a step")
    pairs, agains = _by_turns(plain, watched, always)
    without, again = median(one[0] for one in pairs), median(agains)
    reads = interval([one[1] - one[0] for one in pairs]) if IS_GPU else (_look_s(),) * 3
    least = [1e3 * min(one[number] for one in pairs) for number in (0, 1)]
    say(
        f"replay: {len(pairs)} pairs of windows of {WINDOW} steps; ms a step, median (least): {1e3 * without:.3f} "
        f"({least[0]:.3f}), loss read {1e3 * median(one[1] for one in pairs):.3f} ({least[1]:.3f}), done again "
        f"{1e3 * again:.3f}; told {[one.text for one in told][:1]}"
    )
    redone = (again - without) / without / CADENCE
    if IS_GPU:
        copy_s = _copy_s()
        say(
            f"replay: counted, the GPU copies a number each step, {1e6 * copy_s:.1f} us, and the loop looks at it "
            f"for {1e6 * _look_s():.1f} us while the backward pass runs; with the step done again "
            f"{100 * (redone + copy_s / without):.4f} % (target 0.1 %)"
        )
    low, middle, high = (f"{1e6 * value:.1f} us, {100 * value / without:.4f} %" for value in reads)
    share = [f"{100 * (redone + value / without):.4f}" for value in reads]
    say(f"replay: reading the loss takes {middle} of a step (95 % confidence: {low} to {high})")
    say(f"replay: a step done again takes {redone * CADENCE:.2f} steps, {100 * redone:.4f} % at every {CADENCE}th")
    say(f"replay: together {share[1]} % (95 % confidence: {share[0]} to {share[2]} %; target 0.1 %)")


def _copy_s() -> float:
    """The GPU's time for the copy of one loss to the host."""
    value, slot = torch.ones((), device=DEVICE), torch.empty((), pin_memory=True)
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for _ in range(2):
        first.record()
        for _ in range(500):
            slot.copy_(value, non_blocking=True)
        last.record()
        last.synchronize()
    return first.elapsed_time(last) / 1e3 / 500


WINDOWS_S = 30.0
WINDOW = 8  # steps, between two waits for the GPU: short, so that a slow drift of clocks meets both alike


def _by_turns(plain: Any, watched: Any, always: Any) -> tuple[list[tuple[float, float]], list[float]]:
    """(without, with) of neighbouring windows: without with, with without, and so on, as long as the time allows."""
    pairs: list[tuple[float, float]] = []
    agains: list[float] = []
    began_s = time.monotonic()
    while time.monotonic() - began_s < WINDOWS_S or not pairs:
        first, second = (plain, watched) if len(pairs) % 2 else (watched, plain)
        made = first(WINDOW), second(WINDOW)
        pairs.append(made if len(pairs) % 2 else made[::-1])
        if len(pairs) % 8 == 1:
            agains.append(always(4))
            plain(1)  # what comes first after it is not measured
    return pairs, agains


def interval(values: list[float]) -> tuple[float, float, float]:
    """The median with its 95 % confidence interval, by order statistics: no distribution is assumed."""
    ranked, number = sorted(values), len(values)
    apart = 0.98 * number**0.5
    low, high = max(0, int(number / 2 - apart)), min(number - 1, int(number / 2 + apart))
    return ranked[low], median(ranked), ranked[high]


def _look_s() -> float:
    """What a step's look at its loss takes on a CPU, where no GPU is waited for: less than its steps differ by."""
    from jackline.memory.guard.replay import Redo, Replay

    class Known:
        def known_loss(self) -> float:
            return 2.0 + time.perf_counter() % 0.01

    replay, known, redo = Replay(10**9, print), Known(), Redo(lambda: known, lambda: 2.0, ())
    replay._is_deterministic = True
    began_s = time.process_time()
    for step in range(1, 20_001):
        replay.look(step, known, redo)
    return (time.process_time() - began_s) / 20_000


def _trainer() -> Callable[[Any], Callable[[int], float]]:
    """Makes functions that train some steps and return the seconds of one: 124M parameters on a GPU."""
    from jackline.memory.guard.safe_step import SafeStep

    if IS_GPU:  # the one backend whose backward pass can be deterministic
        torch.backends.cuda.enable_cudnn_sdp(False)
        torch.backends.cuda.enable_mem_efficient_sdp(False)
    width, layers, samples = (768, 12, 16) if IS_GPU else (64, 2, 4)
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(width, 12 if IS_GPU else 2, 4 * width, 0.0, batch_first=True)
    head = torch.nn.Linear(width, 50304 if IS_GPU else 2048)
    model = torch.nn.Sequential(torch.nn.TransformerEncoder(layer, layers), head).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=IS_GPU)
    given = torch.randn(samples, 512 if IS_GPU else 64, width, device=DEVICE)

    def loss(part: torch.Tensor) -> tuple[torch.Tensor, int]:
        with torch.autocast(DEVICE, torch.bfloat16):
            return model(part).square().mean() * len(part), len(part)

    clock = time.perf_counter if IS_GPU else time.process_time  # of a shared CPU our own share

    def with_replay(replay: Any) -> Callable[[int], float]:
        safe = SafeStep(model, micro_batch=samples)
        safe.replay, safe.step = replay, 1

        def train(steps: int) -> float:
            synchronize()
            began_s = clock()
            for _ in range(steps):
                optimizer.zero_grad()
                safe(loss, given)
                optimizer.step()
            synchronize()
            return (clock() - began_s) / steps

        return train

    return with_replay


def say(text: str) -> None:
    """At once, with the seconds since the start: what is killed at its limit has still told how far it came."""
    print(f"{text} [{time.monotonic() - BEGAN_S:.0f} s]", flush=True)


def synchronize() -> None:
    if IS_GPU:
        torch.cuda.synchronize()


def measure_creep(folder: Path, beside: Callable[[], None] | None = None) -> None:
    start(folder, LEAKING, options=())
    line = 1 + next(number for number, text in enumerate(LEAKING.splitlines()) if "HERE" in text)
    began_s = time.monotonic()
    if beside is not None:
        beside()  # needs no GPU
    found = wait_for(lambda: re.search(r"GPU \d: .*a minute.*", log_of(folder)), 225.0 - (time.monotonic() - began_s))
    took_s = time.monotonic() - began_s
    text = found[0] if found else f"nothing was told: {log_of(folder)[-500:]}"
    left = [json.loads(one) for one in (folder / "runs/one/events-supervisor.jsonl").read_text().splitlines()]
    ahead = [one["seconds_to_limit"] for one in left if one.get("event") == "memory"]
    minutes = ahead[0] / 60 if ahead else 0.0
    print(f"creep: told after {took_s:.0f} s, {minutes:.1f} min ahead (target 10); it leaks at train.py:{line}")
    print(f"       {text}", flush=True)
    jackline("stop", "one", folder=folder)


def measure_together(folder: Path) -> None:
    def beside() -> None:
        (folder / "hook").mkdir()
        measure_hook(folder / "hook")
        os.environ["JACKLINE_RUNS"] = str(folder / "runs")

    measure_creep(folder, beside)


PARTS: dict[str, Callable[[Path], None]] = {
    "stall": measure_stall,
    "hook": measure_hook,
    "equal": measure_equal,
    "oom": measure_oom,
    "replay": measure_replay,
    "creep": measure_creep,
    "creep and hook": measure_together,
}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="stall,hook,equal,oom,replay")
    only = parser.parse_args().only
    words = ["stall", "equal", "oom", "replay", "creep and hook"] if only == "all" else only.split(",")
    if not IS_GPU:
        torch.set_num_threads(1)  # threads that wait for each other measure the neighbours
        words = [word for word in words if word not in ("creep", "creep and hook")]
        print("creep: skipped, there is no GPU")
    say(f"{torch.cuda.get_device_name() if IS_GPU else 'CPU'}, torch {torch.__version__}")
    is_well = True
    for name in words:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:  # a writer may end later
            os.environ["XDG_STATE_HOME"] = str(Path(folder) / "state")
            if "creep" not in name:
                faulthandler.dump_traceback_later(LONGEST_S)
            try:
                PARTS[name](Path(folder))
            except Exception as problem:  # the other parts are worth their time on a rented GPU
                is_well = False
                print(f"{name}: failed: {type(problem).__name__}: {problem}")
                print(log_of(Path(folder))[-2000:], flush=True)
            faulthandler.cancel_dump_traceback_later()
    return 0 if is_well else 1


if __name__ == "__main__":
    sys.exit(main())
