"""The training of the pictures of the page: a regression in plain Python. It knows nothing of Jackline.

night.py NAME [--lr X] [--steps N] [--lose-connection-at STEP] [--hang-at STEP] [--resume CHECKPOINT]
"""

import argparse
import json
import math
import random
import threading
import time
from pathlib import Path


def next_batch(step: int, asked: argparse.Namespace) -> list[tuple[float, float]]:
    if step == asked.lose_connection_at and not asked.resume:
        raise ConnectionResetError("[Errno 104] Connection reset by peer: data.example.org")
    if step == asked.hang_at:
        lock = threading.Lock()
        lock.acquire()
        lock.acquire()
    rng = random.Random(step)
    return [(x, 3 * x + 1 + rng.gauss(0, 0.3)) for x in (rng.gauss(0, 1) for _ in range(64))]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("name")
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--lose-connection-at", type=int, default=-1)
    parser.add_argument("--hang-at", type=int, default=-1)
    parser.add_argument("--resume", type=Path)
    asked = parser.parse_args()
    step, slope, shift = json.loads(asked.resume.read_text()) if asked.resume else (0, 0.0, 0.0)
    buffer = []
    while step < asked.steps:
        batch = next_batch(step, asked)
        time.sleep(0.03)
        errors = [slope * x + shift - y for x, y in batch]
        lr = asked.lr * min(1.0, (step + 1) / 100) * (0.5 + 0.5 * math.cos(math.pi * step / asked.steps))
        slope -= lr * 2 * sum(error * x for error, (x, _) in zip(errors, batch, strict=True)) / len(batch)
        shift -= lr * 2 * sum(errors) / len(batch)
        step += 1
        buffer.append(bytearray(100_000 if step < 400 else 0))
        if step % 5 == 0:
            loss = sum(error * error for error in errors) / len(batch)
            print(f"step {step}/{asked.steps} loss {loss:.4f} lr {lr:.6f}", flush=True)
        if step % 200 == 0:
            folder = Path("checkpoints") / asked.name
            folder.mkdir(parents=True, exist_ok=True)
            fresh = folder / ".fresh"
            fresh.write_text(json.dumps([step, slope, shift]))
            fresh.rename(folder / f"step-{step:06d}.json")


main()
