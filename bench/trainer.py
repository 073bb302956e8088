"""What the built-in trainer costs against a bare loop on a CPU, and how long `train demo --quick` is ever silent.

    python bench/trainer.py                       both, about 4 minutes on 2 quiet cores
    python bench/trainer.py overhead --rounds 5   nano model: seconds a step, trainer over bare loop (target 1.02)
    python bench/trainer.py silence               through a pipe: longest gap (targets 2 s in the trainer's own
                                                  phases, 10 s anywhere) and the whole duration (target 60 s)

Trainer and bare loop run in processes of their own, turn and turn about, with the same model, data, optimizer and
batches, and are timed between the same two updates; the ratio is that of the same round. The trainer has everything
on: session, checkpoints, sentinels, step lines, curves. Processor time is given too: it can be compared on a machine
that is not quiet.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
FIRST = 5  # updates that are not timed: caches, the first allocation
SETTINGS = ["seq_len=128", "batch_size=16", "eval_every=0", "full_eval=no", "warmup_steps=2", "num_threads=1"]


class Stopwatch:
    """Between update FIRST and the last one."""

    def __init__(self, num_steps: int) -> None:
        self._num_steps = num_steps
        self._num_updates = 0
        self._began = (0.0, 0.0)
        self.result: dict[str, float] = {}

    def tick(self) -> None:
        self._num_updates += 1
        now = (time.perf_counter(), time.process_time())
        if self._num_updates == FIRST:
            self._began = now
        if self._num_updates == self._num_steps:
            steps = self._num_steps - FIRST
            self.result = {
                "step_s": (now[0] - self._began[0]) / steps,
                "cpu_s": (now[1] - self._began[1]) / steps,
            }


def child_trainer(work: Path, num_steps: int) -> dict[str, float]:
    from jackline.rundir.layout import RunDir
    from jackline.trainer.build import Parts
    from jackline.trainer.config import resolve
    from jackline.trainer.loop import train

    watch, update = Stopwatch(num_steps), Parts.update

    def timed(parts: Any) -> Any:
        norm = update(parts)
        watch.tick()
        return norm

    Parts.update = timed  # type: ignore[method-assign]
    words = [*SETTINGS, f"max_steps={num_steps}", f"data_dir={work / 'data'}", "rehearse=no"]
    train(resolve("demo", words), RunDir(work / "runs" / f"run-{os.getpid()}"))
    return watch.result


def child_bare(work: Path, num_steps: int) -> dict[str, float]:
    """What a person would write: the same parts, and nothing around them."""
    import torch

    from jackline.data.batches import ToDevice
    from jackline.trainer.build import build
    from jackline.trainer.config import resolve
    from jackline.trainer.schedule import lr_at
    from jackline.trainer.voice import Voice

    words = [*SETTINGS, f"max_steps={num_steps}", f"data_dir={work / 'data'}"]
    parts = build(resolve("demo", words).config, Voice(), work)
    to_device, watch = ToDevice("cpu"), Stopwatch(num_steps)
    weights = list(parts.model.parameters())
    for step in range(num_steps):
        for group in parts.optimizer.param_groups:
            group["lr"] = lr_at(step, parts.schedule)
        tokens = to_device(next(parts.loader).tokens)
        loss = parts.model(tokens[:, :-1], tokens[:, 1:]) / parts.tokens_per_step
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, parts.config.clip)
        parts.optimizer.step()
        parts.optimizer.zero_grad(set_to_none=True)
        watch.tick()
        loss.item()
    parts.loader.close()
    parts.corpus.close()
    return watch.result


def run_child(kind: str, work: Path, num_steps: int) -> dict[str, float]:
    argv = [sys.executable, __file__, kind, "--work", str(work), "--steps", str(num_steps)]
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "XDG_STATE_HOME": str(work / "state")}
    done = subprocess.run(argv, env=env, cwd=work, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        sys.exit(done.stdout)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def overhead(rounds: int, num_steps: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        run_child("child-bare", work, FIRST + 1)  # the corpus is tokenised here, for all
        ratios: dict[str, list[float]] = {"step_s": [], "cpu_s": []}
        for number in range(rounds):
            kinds = ["child-bare", "child-trainer"]
            found = {kind: run_child(kind, work, num_steps) for kind in (kinds if number % 2 else kinds[::-1])}
            for name, values in ratios.items():
                values.append(found["child-trainer"][name] / found["child-bare"][name])
            bare, ours = found["child-bare"], found["child-trainer"]
            print(
                f"round {number + 1}: bare {1e3 * bare['step_s']:.1f} ms/step ({1e3 * bare['cpu_s']:.1f} cpu), "
                f"trainer {1e3 * ours['step_s']:.1f} ({1e3 * ours['cpu_s']:.1f} cpu), "
                f"ratio {ratios['step_s'][-1]:.3f} ({ratios['cpu_s'][-1]:.3f} cpu)",
                flush=True,
            )
    medians = {f"ratio_{name}": round(statistics.median(values), 4) for name, values in ratios.items()}
    print(f"trainer over bare loop, median of {rounds}: {medians['ratio_step_s']:.3f} (target at most 1.02)")
    return medians


def silence(words: list[str]) -> dict[str, Any]:
    """Every print of the whole command, timed."""
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        env = {
            **os.environ,
            "PYTHONPATH": str(ROOT / "src"),
            "JACKLINE_RUNS": str(work / "runs"),
            "JACKLINE_DATA": str(work / "data"),
            "XDG_STATE_HOME": str(work / "state"),
        }
        argv = [sys.executable, "-m", "jackline", "train", "demo", "--quick", *words]
        began_s = time.monotonic()
        process = subprocess.Popen(argv, cwd=work, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        assert process.stdout is not None
        heard: list[tuple[float, str]] = [(0.0, "start")]
        while data := os.read(process.stdout.fileno(), 65536):
            lines = data.decode("utf-8", "replace").strip().splitlines() or [""]
            heard.append((time.monotonic() - began_s, lines[-1]))
        code = process.wait()
        total_s = time.monotonic() - began_s
    return report_silence(heard, total_s, code)


def report_silence(heard: list[tuple[float, str]], total_s: float, code: int) -> dict[str, Any]:
    gaps = [(b[0] - a[0], a[1], b[1]) for a, b in itertools.pairwise(heard)]
    gaps.append((total_s - heard[-1][0], heard[-1][1], "end"))
    own = [gap for gap in gaps if _is_own(gap[1]) and _is_own(gap[2])]
    anywhere, inside = max(gaps), max(own)
    print(f"train demo --quick: exit code {code}, {total_s:.1f} s in all (target 60 s), {len(heard)} prints")
    for name, gap, target in (("anywhere", anywhere, 10), ("in the trainer's own phases", inside, 2)):
        print(f"longest silence {name}: {gap[0]:.2f} s (target {target} s)")
        print(f"    after  {gap[1][:110]}\n    before {gap[2][:110]}")
    return {"total_s": total_s, "anywhere_s": anywhere[0], "inside_s": inside[0], "code": code}


def _is_own(line: str) -> bool:
    """Said by the trainer itself, once it can: importing is not one of its phases."""
    return re.match(r"\[(data|model|plan|rehearsal|train|eval|sentinel|end)\]", line) is not None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    kinds = ["all", "overhead", "silence", "child-bare", "child-trainer"]
    parser.add_argument("what", nargs="?", default="all", choices=kinds)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=105)
    parser.add_argument("--work", type=Path)
    parser.add_argument("--json", type=Path, help="write the numbers there")
    given = parser.parse_args()
    if given.what.startswith("child-"):
        make = child_bare if given.what == "child-bare" else child_trainer
        print(json.dumps(make(given.work, given.steps)), flush=True)
        return
    found: dict[str, Any] = {}
    if given.what in ("all", "overhead"):
        found["overhead"] = overhead(given.rounds, given.steps)
    if given.what in ("all", "silence"):
        found["silence"] = silence([])
    if given.json:
        given.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
