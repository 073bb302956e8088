"""Ranks with DDP or FSDP2 on two "nodes", killed again and again at random instants: `scripts/torture ranks`.

Every round starts all ranks and kills one of them, or a whole node (its ranks and the writers of their checkpoints,
at once), with SIGKILL at a random instant: in the start, while they train, while they save. The others must end by
themselves, or are killed too. It starts again until the training is complete. The final weights must be those of a
run of as many ranks that nobody killed, and every start must resume behind the newest checkpoint that was on disk.

    scripts/torture ranks --kills 100 --seed 7
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from jackline.rundir.access.reading import read_json
from tests.session.nursery import Child, Ended, Nursery

PROGRAM = Path(__file__).with_name("ranks_program.py")
HANGS_S = 240.0
IMPORTS = ("torch.distributed.fsdp", "torch.distributed.tensor", "safetensors.torch", "jackline")
NODE = "JACKLINE_TEST_NODE"  # in the environment of a rank and of its writer


class Started:
    """A rank that Python itself has started; `Child` is one that was forked from a warm process."""

    def __init__(self, env: dict[str, str], work: Path) -> None:
        self._out = work / f"out-{uuid.uuid4().hex}.txt"
        with self._out.open("w") as out:
            self._process = subprocess.Popen(
                [sys.executable, str(PROGRAM)], env=env, cwd=work, stdout=out, stderr=subprocess.STDOUT
            )
        self.pid = self._process.pid

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def kill(self) -> None:
        self._process.kill()

    def wait(self) -> Ended:
        return Ended(self._process.wait(HANGS_S), self._out.read_text())


@dataclass
class Job:
    """The ranks of one start."""

    ranks: list[Started | Child]
    nodes: list[str] = field(default_factory=list)  # of each rank
    outputs: list[str] = field(default_factory=list)

    def wait(self) -> list[int]:
        ended = [one.wait() for one in self.ranks]
        self.outputs = [one.output for one in ended]
        return [one.code for one in ended]

    def kill(self) -> None:
        for one in self.ranks:
            if not one.has_ended:
                one.kill()

    def wait_for_writers(self, *endings: str) -> None:
        """Until nothing that the ranks of these nodes have started is alive: writers and mirrors outlive them."""
        while any(_started_with(node) for node in self.nodes if node.endswith(endings)):
            time.sleep(0.05)

    def kill_node(self, node: str) -> None:
        """All ranks of a node and their writers, as when its power fails."""
        ranks = [
            one.pid for one, place in zip(self.ranks, self.nodes, strict=True) if place == node and not one.has_ended
        ]
        for pid in [*ranks, *_started_with(node)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    @property
    def text(self) -> str:
        return "\n".join(self.outputs)


def _started_with(node: str) -> list[int]:
    """The processes that have the node in the environment that they were started with: the writers."""
    wanted, found = f"{NODE}={node}".encode(), []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if wanted in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
    return found


def start(work: Path, size: int, total: int, nursery: Nursery | None = None, **environ: str) -> Job:
    """Start the program with `size` ranks in `work`; its runs are in work/runs."""
    with tempfile.NamedTemporaryFile(dir=work, prefix="meet-") as meet:
        place = meet.name  # deleted again: the ranks create it and meet there
    known = {**os.environ, "JACKLINE_RUNS": str(work / "runs"), "XDG_STATE_HOME": str(work / "state")}
    known.update({"OMP_NUM_THREADS": "1", "INIT": f"file://{place}", "TOTAL": str(total), **environ})
    for name in ("JACKLINE_RUN_DIR", "JACKLINE_ATTEMPT", "RANK", "WORLD_SIZE"):
        known.pop(name, None)
    token = uuid.uuid4().hex
    job = Job([], [f"{token}-{2 * rank // size}" for rank in range(size)])  # two nodes, half of the ranks each
    for rank in range(size):
        env = {**known, "RANK": str(rank), "WORLD_SIZE": str(size), NODE: job.nodes[rank]} if size > 1 else known
        job.ranks.append(Started(env, work) if nursery is None else nursery.start(PROGRAM, [], work, env))
    return job


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
    while not job.ranks[0].has_ended and time.monotonic() < until_s:
        found = read_json(work / "runs/job/session-0.json")
        if isinstance(found, dict) and (found.get("process") or {}).get("pid") == job.ranks[0].pid:
            return
        time.sleep(0.02)


@dataclass(frozen=True)
class Wanted:
    """How the uninterrupted run ended."""

    weights: set[str]
    losses: dict[int, float]

    def difference(self, job: Job) -> str:
        """What one start of another run trained, and from where on it was different."""
        found = losses(job)
        if not found:
            return "trained nothing"
        wrong = [step for step in found if found[step] != self.losses.get(step)]
        told = f"trained {min(found)}..{max(found)}"
        return f"{told}, different from step {wrong[0]} on" if wrong else told


@dataclass(frozen=True)
class Crew:
    """How a job is started each time. Without a nursery Python starts every rank, which takes seconds."""

    size: int = 2
    mode: str = "ddp"
    total: int = 400
    nursery: Nursery | None = None

    def start(self, work: Path) -> Job:
        work.mkdir(parents=True, exist_ok=True)
        return start(work, self.size, self.total, self.nursery, DROPOUT="0.1", MODE=self.mode)

    def undisturbed(self, work: Path) -> Wanted:
        job = self.start(work)
        assert job.wait() == [0] * self.size, job.text
        return Wanted(digests(job), losses(job))

    def __str__(self) -> str:
        return f"{self.size} ranks of {self.mode}"


def strike(crew: Crew, work: Path, rng: random.Random) -> tuple[Job, str]:
    """Start a job and kill a rank or a node at a random instant. Returns what was killed; '' if it had ended."""
    job = crew.start(work)
    victim, is_node = rng.randrange(crew.size), rng.random() < 0.4
    has_begun = rng.random() < 0.85
    if has_begun:
        wait_for_session(work, job)
    until_s = time.monotonic() + rng.uniform(0.0, 2.5)
    while time.monotonic() < until_s and not job.ranks[victim].has_ended:
        time.sleep(0.002)
    is_late = job.ranks[victim].has_ended
    if is_node:
        job.kill_node(job.nodes[victim])
    elif not is_late:
        job.ranks[victim].kill()
    if not has_begun or rng.random() < 0.6:
        # The others meet the end, or not, before they are killed too. While ranks find one another torch waits for
        # one that is gone for half an hour; then a launcher ends them.
        time.sleep(rng.uniform(0.0, 0.3))
        job.kill()
    job.wait()  # the others end by themselves, or this raises
    return job, "" if is_late else "node" if is_node else "rank"


def torment(crew: Crew, work: Path, wanted: Wanted, rng: random.Random, *, kills: int) -> tuple[Counter[str], str]:
    """Kill `kills` times, then let it end. Returns the kills, and what is wrong: '' when all is well."""
    done: Counter[str] = Counter()
    newest, told = 0, []
    for _ in range(kills):
        job, what = strike(crew, work, rng)
        done[what] += 1
        told.append(f"{wanted.difference(job)}; killed: {what or 'nothing'}; on disk {steps_saved(work)}")
        first, saved = min(losses(job), default=newest + 1), steps_saved(work)
        if first <= newest or (saved[-1] if saved else 0) < newest:
            return done, "\n".join([f"acknowledged was step {newest}; trained from {first}", *told, _notes(job)])
        newest = saved[-1] if saved else newest
    job = crew.start(work)
    codes = job.wait()
    if codes != [0] * crew.size or digests(job) != wanted.weights:
        return done, "\n".join([f"exit codes {codes}", *told, wanted.difference(job), _notes(job)])
    if min(losses(job), default=newest + 1) <= newest:
        return done, f"acknowledged was step {newest}; trained from {min(losses(job))}"
    return done, ""


def _notes(job: Job) -> str:
    return "\n".join([line for line in job.text.splitlines() if not line.startswith("STEP ")][-40:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--modes", nargs="+", choices=("ddp", "fsdp"), default=["ddp", "fsdp"])
    parser.add_argument("--sizes", nargs="+", type=int, default=[2, 4])
    options = parser.parse_args()
    rng, done, bad = random.Random(options.seed), Counter[str](), 0
    nursery = Nursery(*IMPORTS)
    crews = [Crew(size, mode, options.steps, nursery) for size in options.sizes for mode in options.modes]
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        wanted = [crew.undisturbed(Path(folder) / f"whole-{number}") for number, crew in enumerate(crews)]
        num_rounds = 0
        while done["rank"] + done["node"] < options.kills:
            number, left = num_rounds % len(crews), options.kills - done["rank"] - done["node"]
            work, count = Path(folder) / f"round-{num_rounds}", min(rng.randint(1, 4), left)
            found, problem = torment(crews[number], work, wanted[number], rng, kills=count)
            done, num_rounds, bad = done + found, num_rounds + 1, bad + bool(problem)
            print(f"round {num_rounds}, {crews[number]}: {problem or 'bit-equal'}; {_told(done)}", flush=True)
    nursery.close()
    print(f"{_told(done)}: {bad} of {num_rounds} rounds did not end as the uninterrupted run")
    sys.exit(1 if bad else 0)


def _told(done: Counter[str]) -> str:
    return f"{done['rank']} ranks and {done['node']} nodes killed"


if __name__ == "__main__":
    main()
