"""A small stranger's training script: standard library only, knows nothing of Jackline.

It counts letter pairs in the Python standard library's own sources and fits a tiny model of them. It is silent for
a while, saves checkpoints, crashes half-way through its first attempt (a real segmentation fault) and can resume.
"""

import argparse
import ctypes
import json
import math
import os
import random
import sysconfig
import time
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=120)
parser.add_argument("--out", type=Path, default=Path("demo-out"))
parser.add_argument("--resume", type=Path)
arguments = parser.parse_args()


def read_corpus() -> str:
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(folder.glob("*.py"))[:160]
    texts = []
    for done, path in enumerate(files, 1):
        texts.append(path.read_text(encoding="utf-8", errors="replace"))
        if done % 40 == 0:
            print(f"read {done}/{len(files)} files", flush=False)
    return "\n".join(texts)


def count_pairs(text: str) -> list[list[int]]:
    counts = [[1] * 128 for _ in range(128)]
    for before, after in zip(text, text[1:], strict=False):
        counts[ord(before) & 127][ord(after) & 127] += 1
    return counts


def loss_of(weights: list[list[float]], pairs: list[tuple[int, int]]) -> float:
    total = 0.0
    for before, after in pairs:
        row = weights[before]
        total += math.log(sum(math.exp(value) for value in row)) - row[after]
    return total / len(pairs)


def save(step: int, weights: list[list[float]]) -> None:
    arguments.out.mkdir(parents=True, exist_ok=True)
    path = arguments.out / f"step-{step:04d}.json"
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps({"step": step, "weights": weights}))
    draft.replace(path)


print("reading the corpus")
text = read_corpus()
print(f"{len(text):,} characters; counting pairs, silently", flush=False)
for _ in range(5):
    counts = count_pairs(text)

start = 0
weights = [[0.0] * 128 for _ in range(128)]
if arguments.resume:
    state = json.loads(arguments.resume.read_text())
    start, weights = state["step"], state["weights"]
    print(f"resumed from step {start}")

rng = random.Random(0)
codes = [ord(letter) & 127 for letter in text]
pairs = [(codes[i], codes[i + 1]) for i in (rng.randrange(len(codes) - 1) for _ in range(400))]
for step in range(start + 1, arguments.steps + 1):
    for before, row in enumerate(weights):
        total = sum(counts[before])
        for after in range(128):
            target = math.log(counts[before][after] / total)
            row[after] += 0.05 * (target - row[after])
    print(f"step {step}/{arguments.steps}  loss {loss_of(weights, pairs):.4f}")
    time.sleep(0.05)
    if step % 20 == 0:
        save(step, weights)
    if step == arguments.steps // 2 and os.environ.get("JACKLINE_ATTEMPT") == "1":
        ctypes.string_at(0)  # the crash: reads address 0

print("done")
