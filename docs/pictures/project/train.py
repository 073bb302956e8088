"""The training of the README's picture: it knows nothing of Jackline and fails twice, for real."""

import ctypes
import os
import sys
from pathlib import Path

import loader

attempt = os.environ["JACKLINE_ATTEMPT"]
start = int(Path(sys.argv[2]).stem) if sys.argv[1:] else 0


def step(number: int) -> None:
    loader.next_batch(hangs=attempt == "2" and number == 330)
    if attempt == "1" and number == 230:
        ctypes.string_at(0)  # a bug in a C++ extension
    if number % 50 == 0:
        print(f"step {number}/400  loss {2.2 + 40 / (number + 20):.3f}")
        Path(f"ckpt/{number:04d}.json").write_text("{}")


loader.read_shards()
for number in range(start + 1, 401):
    step(number)
