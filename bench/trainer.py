"""What the built-in trainer costs against a bare loop on a CPU, and how long `train demo --quick` is ever silent.

    python bench/trainer.py                       both, about 4 minutes on 2 quiet cores
    python bench/trainer.py overhead              nano model: seconds a step, trainer over bare loop (target 1.02)
    python bench/trainer.py silence               through a pipe: longest gap (targets 2 s in the trainer's own
                                                  phases, 10 s anywhere) and the whole duration (target 60 s)

Trainer and bare loop run in processes of their own, a few steps turn and turn about, with the same model, data,
optimizer and batches; the ratio is that of neighbours, over several pairs of processes, since one process may be
faster than its twin for as long as it lives. The trainer has everything on: session, checkpoints, sentinels, step
lines, curves. Processor time is given too: it can be compared on a machine that is not quiet.
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
HEAR = SAY = -1  # pipes of a child
Pair = tuple[tuple[float, float], tuple[float, float]]  # bare loop, trainer: wall and processor seconds a step
FIRST = 5  # updates that are not timed: caches, the first allocation
SETTINGS = ["seq_len=128", "batch_size=16", "eval_every=0", "full_eval=no", "warmup_steps=2", "num_threads=1"]


class Turns:
    """Counts updates in the child, and after every block says what it took and waits for its turn."""

    def __init__(self, num_blocks: int, block: int) -> None:
        self.num_steps = FIRST + num_blocks * block
        self._block, self._num_updates = block, 0
        self._began = (0.0, 0.0)

    def tick(self) -> None:
        self._num_updates += 1
        done = self._num_updates - FIRST
        if done < 0 or done % self._block:
            return
        now = (time.perf_counter(), time.process_time())
        if done:
            spent = [(after - before) / self._block for before, after in zip(self._began, now, strict=True)]
            os.write(SAY, (json.dumps(spent) + "\n").encode())
        else:
            os.write(SAY, b"ready\n")
        os.read(HEAR, 1)
        self._began = (time.perf_counter(), time.process_time())


def child_trainer(work: Path, turns: Turns) -> None:
    from jackline.rundir.layout import RunDir
    from jackline.trainer.config import resolve
    from jackline.trainer.language import LanguageTask
    from jackline.trainer.loop import train

    update = LanguageTask.update

    def timed(task: Any) -> Any:
        norm = update(task)
        turns.tick()
        return norm

    LanguageTask.update = timed  # type: ignore[method-assign]
    words = [*SETTINGS, f"max_steps={turns.num_steps}", f"data_dir={work / 'data'}", "rehearse=no"]
    train(resolve("demo", words), RunDir(work / "runs" / f"run-{os.getpid()}"))


def child_bare(work: Path, turns: Turns) -> None:
    """What a person would write: the same parts, and nothing around them."""
    import torch

    from jackline.data.loader.batches import ToDevice
    from jackline.trainer.build import build
    from jackline.trainer.config import resolve
    from jackline.trainer.optim.schedule import lr_at
    from jackline.trainer.report.console import Console

    words = [*SETTINGS, f"max_steps={turns.num_steps}", f"data_dir={work / 'data'}"]
    task = build(resolve("demo", words).config, Console(), work)
    to_device = ToDevice("cpu")
    weights = list(task.learner.model.parameters())
    for step in range(turns.num_steps):
        for group in task.learner.optimizer.param_groups:
            group["lr"] = lr_at(step, task.schedule)
        tokens = to_device(next(task.loader).tokens)
        loss = task.learner.model(tokens[:, :-1], tokens[:, 1:]) / task.counting.per_step
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, task.config.clip)
        task.learner.optimizer.step()
        task.learner.optimizer.zero_grad(set_to_none=True)
        turns.tick()
        loss.item()
    task.close()


class Child:
    """A loop that waits after every block until it is told to continue."""

    def __init__(self, kind: str, work: Path, num_blocks: int, block: int) -> None:
        heard, say = os.pipe()
        hear, self._tell = os.pipe()
        words = ["--work", str(work), "--blocks", str(num_blocks), "--block", str(block), "--pipes", f"{hear},{say}"]
        env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "XDG_STATE_HOME": str(work / "state")}
        self._log = open(work / f"{kind}.log", "w+")  # noqa: SIM115 - open as long as the child lives
        self._process = subprocess.Popen(
            [sys.executable, __file__, kind, *words], env=env, cwd=work, pass_fds=(hear, say),
            stdin=subprocess.DEVNULL, stdout=self._log, stderr=subprocess.STDOUT,
        )  # fmt: skip
        os.close(hear), os.close(say)
        self._heard = os.fdopen(heard)

    def wait(self) -> str:
        line = self._heard.readline()
        if not line:
            self._log.seek(0)
            sys.exit(self._log.read())
        return line

    def block(self) -> tuple[float, float]:
        """Wall and processor seconds of a step of the next block."""
        os.write(self._tell, b".")
        wall_s, cpu_s = json.loads(self.wait())
        return wall_s, cpu_s

    def end(self) -> None:
        os.write(self._tell, b".")
        self._process.wait()
        self._heard.close(), self._log.close(), os.close(self._tell)


def overhead(rounds: int, num_blocks: int, block: int) -> dict[str, Any]:
    """Blocks turn and turn about, seconds apart: this machine's speed changes by a tenth within minutes."""
    pairs: list[Pair] = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(rounds):
            pairs += _round(number, Path(folder), num_blocks, block)
    found: dict[str, Any] = {}
    print(f"trainer over bare loop, {len(pairs)} pairs of blocks of {block} steps (target at most 1.02):")
    for name, at in (("wall time", 0), ("processor time", 1)):
        bare, ours = ([pair[kind][at] for pair in pairs] for kind in (0, 1))
        ratios = sorted(right / left for left, right in zip(bare, ours, strict=True))
        quarter, middle, whole = len(ratios) // 4, statistics.median(ratios), sum(ours) / sum(bare)
        doubt = 1.25 * statistics.stdev(ratios) / len(ratios) ** 0.5
        found[name] = {"median": middle, "standard_error": doubt, "of_sums": whole}
        print(
            f"  {name}: median {middle:.4f} (standard error {doubt:.4f}, middle half {ratios[quarter]:.3f} to"
            f" {ratios[-1 - quarter]:.3f}), of the sums {whole:.4f}"
        )
    return found


def _round(number: int, work: Path, num_blocks: int, block: int) -> list[Pair]:
    children = {}
    for kind in ("child-bare", "child-trainer"):  # the first tokenises the corpus for all
        children[kind] = Child(kind, work, num_blocks, block)
        children[kind].wait()
    pairs = []
    for turn in range(num_blocks):
        kinds = list(children)[:: 1 if turn % 2 else -1]
        found = {kind: children[kind].block() for kind in kinds}
        pairs.append((found["child-bare"], found["child-trainer"]))
    bare_ms, ours_ms = (1e3 * statistics.median(pair[kind][0] for pair in pairs) for kind in (0, 1))
    print(f"round {number + 1}: medians bare {bare_ms:.1f} ms/step, trainer {ours_ms:.1f}", flush=True)
    for child in children.values():
        child.end()
    return pairs


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
    parser.add_argument("--rounds", type=int, default=4, help="pairs of processes")
    parser.add_argument("--blocks", type=int, default=50)
    parser.add_argument("--block", type=int, default=2, help="steps")
    parser.add_argument("--pipes", help="of a child: where it hears and says")
    parser.add_argument("--work", type=Path)
    parser.add_argument("--json", type=Path, help="write the numbers there")
    given = parser.parse_args()
    if given.what.startswith("child-"):
        global HEAR, SAY
        HEAR, SAY = map(int, given.pipes.split(","))
        turns = Turns(given.blocks, given.block)
        (child_bare if given.what == "child-bare" else child_trainer)(given.work, turns)
        return
    found: dict[str, Any] = {}
    if given.what in ("all", "overhead"):
        found["overhead"] = overhead(given.rounds, given.blocks, given.block)
    if given.what in ("all", "silence"):
        found["silence"] = silence([])
    if given.json:
        given.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
