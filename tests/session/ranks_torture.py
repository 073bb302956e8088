"""Two ranks with DDP or FSDP2, killed again and again at random instants: `scripts/torture ranks`.

Every round starts both ranks, kills one of them with SIGKILL at a random instant (also while they save), ends the
other, and starts again until the training is complete. The final weights must be those of a run that nobody killed,
and no checkpoint that was acknowledged may be missing afterwards.

    scripts/torture ranks --kills 100 --seed 7
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from jackline.rundir.access.reading import read_json

PROGRAM = Path(__file__).with_name("ranks_program.py")
HANGS_S = 240.0


@dataclass
class Job:
    """The ranks of one start."""

    ranks: list[subprocess.Popen[str]]
    outputs: list[str] = field(default_factory=list)

    def wait(self) -> list[int]:
        self.outputs = [one.communicate(timeout=HANGS_S)[0] for one in self.ranks]
        return [one.returncode for one in self.ranks]

    def kill(self) -> None:
        for one in self.ranks:
            one.kill()
            one.wait()
            if one.stdout is not None:
                one.stdout.close()

    @property
    def text(self) -> str:
        return "\n".join(self.outputs)


def start(work: Path, size: int, total: int, **environ: str) -> Job:
    """Start the program with `size` ranks in `work`; its runs are in work/runs."""
    with tempfile.NamedTemporaryFile(dir=work, prefix="meet-") as meet:
        place = meet.name  # deleted again: the ranks create it and meet there
    known = {**os.environ, "JACKLINE_RUNS": str(work / "runs"), "XDG_STATE_HOME": str(work / "state")}
    known.update({"OMP_NUM_THREADS": "1", "INIT": f"file://{place}", "TOTAL": str(total), **environ})
    for name in ("JACKLINE_RUN_DIR", "JACKLINE_ATTEMPT", "RANK", "WORLD_SIZE"):
        known.pop(name, None)
    ranks = []
    for rank in range(size):
        env = {**known, "RANK": str(rank), "WORLD_SIZE": str(size)} if size > 1 else known
        ranks.append(
            subprocess.Popen(
                [sys.executable, str(PROGRAM)],
                env=env,
                cwd=work,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    return Job(ranks)


def digests(job: Job) -> set[str]:
    return {line.split()[2] for line in job.text.splitlines() if line.startswith("END ")}


def losses(job: Job) -> dict[int, float]:
    found = (line.split() for line in job.text.splitlines() if line.startswith("STEP "))
    return {int(words[1]): float(words[2]) for words in found}


def steps_saved(work: Path) -> list[int]:
    """The steps of checkpoints that are on disk under their final names."""
    return sorted(int(path.name.split("-")[1]) for path in work.glob("runs/job/checkpoints/step-*"))


def wait_for_session(work: Path, job: Job) -> None:
    """Until rank 0 has attached, or has ended."""
    until_s = time.monotonic() + HANGS_S
    while job.ranks[0].poll() is None and time.monotonic() < until_s:
        found = read_json(work / "runs/job/session-0.json")
        if isinstance(found, dict) and (found.get("process") or {}).get("pid") == job.ranks[0].pid:
            return
        time.sleep(0.02)


def torment(work: Path, wanted: set[str], rng: random.Random, *, total: int, kills: int, mode: str = "ddp") -> str:
    """Kill `kills` times, then let it end. Returns what is wrong; '' when all is well."""
    newest = 0
    for _ in range(kills):
        job = start(work, 2, total, DROPOUT="0.1", MODE=mode)
        victim = rng.choice(job.ranks)
        if rng.random() < 0.9:
            wait_for_session(work, job)  # else in the imports, which take seconds
        try:
            victim.wait(rng.uniform(0.0, 3.0))
        except subprocess.TimeoutExpired:
            victim.send_signal(signal.SIGKILL)
        time.sleep(rng.uniform(0.0, 0.3))  # the other rank meets the end, or not, before it is killed too
        job.kill()
        saved = steps_saved(work)
        if (saved[-1] if saved else 0) < newest:
            return f"an acknowledged checkpoint is gone: step {newest}, now {saved}"
        newest = saved[-1] if saved else newest
    job = start(work, 2, total, DROPOUT="0.1", MODE=mode)
    codes = job.wait()
    if codes != [0, 0] or digests(job) != wanted:
        return f"exit codes {codes}, weights {digests(job)} instead of {wanted}\n{job.text[-3000:]}"
    return ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--modes", nargs="+", choices=("ddp", "fsdp"), default=["ddp", "fsdp"])
    options = parser.parse_args()
    rng, done, bad, num_rounds = random.Random(options.seed), 0, 0, 0
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        whole = Path(folder) / "whole"
        whole.mkdir()
        wanted = {}
        for mode in options.modes:
            (whole / mode).mkdir()
            job = start(whole / mode, 2, options.steps, DROPOUT="0.1", MODE=mode)
            assert job.wait() == [0, 0], job.text
            wanted[mode] = digests(job)
        while done < options.kills:
            work = Path(folder) / f"round-{done}"
            work.mkdir()
            count = min(rng.randint(1, 4), options.kills - done)
            mode = options.modes[num_rounds % len(options.modes)]
            problem = torment(work, wanted[mode], rng, total=options.steps, kills=count, mode=mode)
            done, num_rounds = done + count, num_rounds + 1
            bad += bool(problem)
            print(f"{done} kills, {mode}: {problem or 'bit-equal'}", flush=True)
    print(f"{done} kills, {bad} rounds that did not end as the uninterrupted run")
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
