"""A training loop that eats host memory: 200 MB a second, a step every 0.1 s, guarded.

Run as a program: eater.py CHECKPOINT SAVE_MB. Put into its cgroup by whoever starts it, before it eats.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from jackline.errors import EXIT_STOPPED
from jackline.memory.guard.host import HostGuard, SaveAndExit, smaller_settings
from jackline.rundir.intent import write_intent
from jackline.rundir.layout import RunDir

STEP_S = 0.1
BYTES_A_STEP = int(200e6 * STEP_S)


def save(path: Path, num_bytes: int) -> float:
    """Whole or absent, and on the disk: what a checkpoint does."""
    started_s = time.monotonic()
    temporary = path.with_suffix(".tmp")
    with open(temporary, "wb") as file:
        for _ in range(num_bytes // 2**20):
            file.write(b"w" * 2**20)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    return time.monotonic() - started_s


def main() -> int:
    checkpoint, save_bytes = Path(sys.argv[1]), int(sys.argv[2]) * 2**20
    print("ready", flush=True)
    sys.stdin.readline()
    guard = HostGuard().start()
    save_s = save(checkpoint.with_name("proof"), save_bytes)
    eaten: list[bytearray] = []
    started_s = time.monotonic()
    while True:
        shard = bytearray(BYTES_A_STEP)
        shard[::4096] = b"x" * len(shard[::4096])
        eaten.append(shard)
        time.sleep(max(0.0, started_s + len(eaten) * STEP_S - time.monotonic()))
        action = guard.action(STEP_S, save_s)
        if isinstance(action, SaveAndExit):
            save(checkpoint, save_bytes)
            why = guard.describe(action.left_s)
            attempt = RunDir(Path(os.environ["JACKLINE_RUN_DIR"])).attempt(1)
            write_intent(attempt, restart=True, why=why, settings=smaller_settings(num_workers=4, prefetch=4))
            print(why, flush=True)
            return EXIT_STOPPED


if __name__ == "__main__":
    sys.exit(main())
