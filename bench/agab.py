"""The affinity recipe in numbers: an epoch over 160,000 cached pairs, what a checkpoint is and costs, a kill, a rule.

    python bench/agab.py                          all of it on this machine's device; 2 CPU cores: about 10 minutes
    python bench/agab.py --only epoch,size        rows: epoch, batches, size, kill, rule
    python bench/agab.py --device cpu --json out.json

epoch    seconds for the training steps of one epoch over 160,000 training pairs at the recipe's own settings, through
         the whole loop (session, sentinels, curves, validation beside it), embeddings cached before
batches  the same for other batch sizes, from a few hundred steps each
size     bytes of a checkpoint, and what saving costs of the training time
kill     SIGKILL in the middle of an epoch, twice, then to the end: every bit of the last checkpoint against a run
         that was left alone
rule     a planted rule with known noise: Spearman on antigens never seen, as a share of what noise leaves possible

Tables are made here (CSV); nothing is downloaded. Needs no GPU, and uses one where there is one.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
PAIRS = 160_000
LETTERS = np.frombuffer(b"ACDEFGHIKLMNPQRSTVWY", np.uint8)
# The trainer, with the time of each save written down where the loop waits for it.
STALLS = """
import collections, json, os, sys
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
from jackline.checkpoint.engine import CheckpointEngine
from jackline.trainer.__main__ import main
count, stalls = CheckpointEngine._count_stall, collections.defaultdict(float)
def counted(engine, ticket, began_s):
    before_s = engine.stalled_s
    count(engine, ticket, began_s)
    stalls[ticket.step if ticket else -1] += engine.stalled_s - before_s
CheckpointEngine._count_stall = counted
code = main(sys.argv[1:])
print("stalls:", json.dumps(stalls))
sys.exit(code)
"""
TARGETS = {
    "epoch": "<= 60 s on 2 CPU cores, <= 5 s on an H200",
    "size": "<= 40 MB, < 0.1 % of the time",
    "kill": "bit-equal",
    "rule": ">= 90 % of the ceiling",
    "batches": "for comparison",
}


def main() -> int:
    options = _parse()
    work = Path(options.work or tempfile.mkdtemp(prefix="bench-agab-"))
    work.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {}
    rows: dict[str, Callable[[argparse.Namespace, Path], dict[str, Any]]] = {
        "epoch": epoch,
        "batches": batches,
        "size": size,
        "kill": kill,
        "rule": rule,
    }
    for name in options.only.split(","):
        found[name] = {**rows[name](options, work), "target": TARGETS[name]}
        print(f"{name:<9}{json.dumps(found[name])}", flush=True)
        for place in (options.json, f"{os.environ['OUT']}/agab.json" if "OUT" in os.environ else ""):
            if place:
                Path(place).write_text(json.dumps(found, indent=1))
    return 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="epoch,batches,size,kill,rule")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--pairs", type=int, default=PAIRS)
    parser.add_argument("--batches", default="8,16,32,64,128,256,512")
    parser.add_argument("--rule-rows", type=int, default=20_000)
    parser.add_argument("--json", default="")
    parser.add_argument("--work", default="")
    return parser.parse_args()


# -- rows ----------------------------------------------------------------------------------------------------------


def epoch(options: argparse.Namespace, work: Path) -> dict[str, Any]:
    """Two epochs; the second is told, because the first has the device's and the allocator's beginning in it."""
    table = _table(options, work)
    run = _train(options, work, "epoch", [f"data={table}", "epochs=2"])
    steps = int(_find(run, r"([\d,]+) to an epoch"))
    pairs = int(_find(run, r"batch \d+ of ([\d,]+) training pairs"))
    spent = _spent(run)
    training_s = spent["training"] + spent.get("saving", 0.0)
    return {
        "device": _find(run, r"\[start\] device (.+?), torch"),
        "batch_size": int(_find(run, r"\[plan\] batch (\d+)")),
        "training_pairs": pairs,
        "steps": steps,
        "seconds_per_epoch": round(training_s / 2, 2),
        "with_validation_s": round((training_s + spent.get("evaluation", 0.0)) / 2, 2),
        "pairs_per_s": round(2 * pairs / training_s),
    }


def batches(options: argparse.Namespace, work: Path) -> dict[str, Any]:
    """Extrapolated from 300 steps (fewer for large batches) to 160,000 pairs."""
    table, found = _table(options, work), {}
    for count in map(int, options.batches.split(",")):
        steps = 300 if count <= 64 else 100
        words = [f"data={table}", f"batch_size={count}", f"max_steps={steps}", "full_eval=no"]
        spent = _spent(_train(options, work, f"batch-{count}", words))
        found[str(count)] = round((spent["training"] + spent.get("saving", 0.0)) / steps * options.pairs / count, 1)
    return {"seconds_per_epoch_by_batch": found}


def size(options: argparse.Namespace, work: Path) -> dict[str, Any]:
    """A checkpoint, and what each costs the loop: 200 steps, one every 10, counted where the loop is held up. At the
    recipe's settings there is one a minute, and at most two an epoch for a new best."""
    table = _table(options, work)
    run = _train(options, work, "size", [f"data={table}", "max_steps=200", "save_every_steps=10"], program=STALLS)
    newest = max((work / "runs" / "size" / "checkpoints").glob("step-*"))
    num_bytes = sum(path.stat().st_size for path in newest.iterdir())
    stalls = json.loads(_find(run, r"stalls: (.+)"))
    usual = sorted(value for step, value in stalls.items() if 0 < int(step) < 200)
    step_s = _spent(run)["training"] / 200
    epoch_s = step_s * options.pairs / int(_find(run, r"\[plan\] batch (\d+)"))
    mean_s = sum(usual) / len(usual)
    most = mean_s * (epoch_s / 60 + 2) / epoch_s
    return {
        "checkpoint_mb": round(num_bytes / 1e6, 2),
        "num_saves": len(usual),
        "stall_ms_mean": round(1000 * mean_s, 2),
        "stall_ms_median": round(1000 * usual[len(usual) // 2], 2),
        "percent_one_a_minute": round(100 * mean_s / 60, 4),
        "percent_at_most": round(100 * most, 4),
    }


def kill(options: argparse.Namespace, work: Path) -> dict[str, Any]:
    """On a small table, because every bit is compared and not the speed."""
    table = work / "kill.csv"
    _write_random(table, 3000, antibodies=1500, antigens=40)
    words = [f"data={table}", "epochs=2", "batch_size=32", "save_every_steps=10", "rehearse=no", "exact=yes"]
    _train(options, work, "left-alone", words)
    shutil.rmtree(work / "runs" / "killed", ignore_errors=True)
    killed_at = [_kill(options, work, words, step) for step in (25, 70)]
    _train(options, work, "killed", words)
    one, other = (_newest_bytes(work / "runs" / name) for name in ("left-alone", "killed"))
    differing = sorted(name for name in one if one[name] != other.get(name))
    return {"killed_after_steps": killed_at, "files_compared": len(one), "differing": differing}


def rule(options: argparse.Namespace, work: Path) -> dict[str, Any]:
    sys.path.insert(0, str(ROOT))
    from tests.recipes.agab.data.planted import write_planted

    table = work / "rule.csv"
    ceiling = write_planted(table, options.rule_rows, max(60, options.rule_rows // 100), seed=1, noise=0.4)
    began_s = time.monotonic()
    _train(options, work, "rule", [f"data={table}", "epochs=12"])
    found = json.loads((work / "runs" / "rule" / "test_metrics.json").read_bytes())["spearman"]
    return {
        "pairs": options.rule_rows,
        "spearman": round(found, 4),
        "ceiling": round(ceiling, 4),
        "share_of_ceiling": round(found / ceiling, 4),
        "seconds": round(time.monotonic() - began_s, 1),
    }


# -- parts ---------------------------------------------------------------------------------------------------------


def _table(options: argparse.Namespace, work: Path) -> Path:
    """As many pairs as leave `--pairs` for training, embedded beforehand by a run of one step."""
    table = work / "pairs.csv"
    if not table.exists():
        began_s = time.monotonic()
        rows = round(options.pairs / 0.7)
        _write_random(table, rows, antibodies=max(10, rows // 2), antigens=400)
        made_s = time.monotonic() - began_s
        _train(options, work, "embed", [f"data={table}", "max_steps=1", "full_eval=no", "split=random"])
        took_s = time.monotonic() - began_s - made_s
        print(
            f"table of {rows:,} pairs written in {made_s:.0f} s, embedded in {took_s:.0f} s, start and one step in it"
        )
    return table


def _write_random(path: Path, rows: int, *, antibodies: int, antigens: int) -> None:
    draw = np.random.default_rng(7)
    first, second = _proteins(draw, antibodies, 230, 240), _proteins(draw, antigens, 150, 400)
    of_antibody, of_antigen = draw.integers(0, antibodies, rows), draw.integers(0, antigens, rows)
    pkd = np.clip(draw.normal(8.0, 1.0, rows), 4.1, 13.9)
    with open(path, "w") as file:
        file.write("antibody_sequence,antigen_sequence,pKd\n")
        for one, other, value in zip(of_antibody, of_antigen, pkd, strict=True):
            heavy = first[one]
            file.write(f"{heavy[:122]}|{heavy[122:]},{second[other]},{value:.4f}\n")


def _proteins(draw: np.random.Generator, count: int, shortest: int, longest: int) -> list[str]:
    lengths = draw.integers(shortest, longest, count)
    letters = LETTERS[draw.integers(0, 20, int(lengths.sum()))].tobytes().decode()
    ends = np.cumsum(lengths)
    return [letters[end - length : end] for end, length in zip(ends, lengths, strict=True)]


def _command(
    options: argparse.Namespace, work: Path, name: str, words: list[str], program: str = ""
) -> tuple[list[str], dict[str, str]]:
    split = [] if any(word.startswith("split=") for word in words) else ["split=random"]
    settings = [*words, *split, f"device={options.device}", f"data_dir={work / 'cache'}"]
    if name == "rule":
        settings.remove("split=random")
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "XDG_STATE_HOME": str(work / "state")}
    start = ["-c", program] if program else ["-m", "jackline.trainer"]
    return [sys.executable, *start, str(work / "runs" / name), "agab", *settings], environment


def _train(options: argparse.Namespace, work: Path, name: str, words: list[str], program: str = "") -> str:
    command, environment = _command(options, work, name, words, program)
    if name != "killed":  # which continues where it was killed; the others must begin anew
        shutil.rmtree(work / "runs" / name, ignore_errors=True)
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise SystemExit(f"{name} ended with {done.returncode}:\n{done.stdout[-4000:]}")
    (work / "runs" / name / "bench.log").write_text(done.stdout)
    return done.stdout


def _kill(options: argparse.Namespace, work: Path, words: list[str], after: int) -> int:
    """SIGKILL as soon as the metrics tell of step `after`; returns the last step they tell of."""
    command, environment = _command(options, work, "killed", words)
    child = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    session = work / "runs" / "killed" / "session-0.json"
    step = 0
    while step < after and child.poll() is None:
        time.sleep(0.01)
        try:
            state = json.loads(session.read_bytes())
            step = int(state["step"]) if state["process"]["pid"] == child.pid else 0
        except (OSError, ValueError, KeyError, TypeError):
            continue
    child.send_signal(signal.SIGKILL)
    child.wait()
    return step


def _newest_bytes(run: Path) -> dict[str, bytes]:
    newest = max((run / "checkpoints").glob("step-*"))
    return {path.name: path.read_bytes() for path in newest.glob("*.safetensors")}


def _find(text: str, pattern: str) -> str:
    found = re.search(pattern, text)
    if found is None:
        raise SystemExit(f"no {pattern!r} in:\n{text[-3000:]}")
    return found[1].replace(",", "") if found[1].replace(",", "").isdigit() else found[1]


def _spent(text: str) -> dict[str, float]:
    """Seconds by name, from the line about time at the end."""
    line = _find(text, r"\[end\] time +(.+)")
    found = {}
    units = {"h": 3600.0, "min": 60.0, "s": 1.0}
    for name, spent in re.findall(r"([a-z ]+?) ((?:\d+ h )?(?:\d+ min )?(?:[\d.]+ s)?) ?\(", line):
        parts = re.findall(r"([\d.]+) (h|min|s)", spent)
        found[name.strip()] = sum(float(value) * units[unit] for value, unit in parts)
    return found


if __name__ == "__main__":
    sys.exit(main())
