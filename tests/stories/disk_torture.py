"""A disk that refuses, at seeded moments of everything that writes: `scripts/torture disk`.

    python -m tests.stories.disk_torture --rounds 40 --seed 1

A round takes a subject (a plain command, an attached loop bare and supervised, `train demo`, `data prepare`), a fault
(no bytes, no inodes, read-only, a used-up quota) on a small tmpfs and a moment of the subject's life. While the fault
lasts, every command must work without a traceback. After room is given, the subject is started again until it
finishes, and its result must be that of an undisturbed one, bit for bit. Exits 1 when a round breaks one of these.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.places import (
    Unavailable,
    fill_bytes,
    fill_inodes,
    kept_full,
    make_room,
    quota_environment,
    read_only,
    small_disk,
    used_up_quota,
)

ROOT = Path(__file__).parents[2]
ENDS_WITHIN_S = 600.0
MAX_STARTS = 6
INODES = 900
STOPPED = 75

COMMAND = """
import sys, time
for step in range(1, 61):
    print(f"step {step}/60", flush=True)
    time.sleep(0.02)
print("result", 60, flush=True)
"""
LOOP = """
import os, torch, jackline
torch.manual_seed(0)
data = torch.utils.data.TensorDataset(torch.randn(400, 8))
loader = torch.utils.data.DataLoader(data, batch_size=10, shuffle=True)
model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Dropout(0.1), torch.nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
with jackline.attach(
    model=model, optimizer=optimizer, loader=loader, name="x", save_every_steps=7, wait_for_disk_s=3,
    on_change={"arguments": "warn"},
) as run:
    for batch in run.steps(total=80):
        loss = model(batch[0]).square().mean()
        optimizer.zero_grad(); loss.backward(); optimizer.step()
        run.log(loss=loss)
        print("step", run.step, flush=True)
print("result", [value.sum().item().hex() for value in model.parameters()], flush=True)
"""
DEMO = ("--quick", "--max-steps", "12", "--save-every-steps", "3", "--eval-every", "0", "--wait-for-disk-s", "3")


@dataclass(frozen=True)
class Subject:
    """Something that writes. `words` start it, and continue it; `done` reads its result from the output."""

    name: str
    words: tuple[str, ...]
    moments: tuple[str, ...]  # texts of its output, after which the disk begins to refuse
    is_run: bool = True
    disk: str = "220M"
    codes: tuple[int, ...] = (0,)  # exit codes besides 75 that mean: refused cleanly or failed resumably


@dataclass
class World:
    """One place: its own runs, registry, data caches and work folder. `disk` is the small one."""

    folder: Path
    disk: Path = field(init=False)

    def __post_init__(self) -> None:
        self.disk = self.folder / "disk"
        for name in ("disk", "work", "state"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        (self.folder / "work" / "command.py").write_text(COMMAND)
        (self.folder / "work" / "loop.py").write_text(LOOP)
        (self.folder / "work" / "text.txt").write_text(
            "\n\n".join(f"document {n} " + "word " * 50 for n in range(3000))
        )

    @property
    def env(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("JACKLINE")}
        return {
            **kept,
            "JACKLINE_RUNS": str(self.disk / "runs"),
            "JACKLINE_DATA": str(self.disk / "data"),
            "XDG_STATE_HOME": str(self.folder / "state"),
            "XDG_CACHE_HOME": str(self.folder / "cache"),
            "OMP_NUM_THREADS": "1",
            "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_FP16",
            "PYTHONPATH": str(ROOT / "src"),
            **quota_environment(self.disk),
        }

    def start(self, words: tuple[str, ...], out: Path) -> subprocess.Popen[bytes]:
        with open(out, "ab") as file:
            return subprocess.Popen(
                words, cwd=self.folder / "work", env=self.env, stdin=subprocess.DEVNULL, stdout=file, stderr=file
            )

    def jackline(self, *words: str) -> tuple[int, str]:
        done = subprocess.run(
            [sys.executable, "-m", "jackline", *words],
            cwd=self.folder / "work",
            env=self.env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=ENDS_WITHIN_S,
        )
        return done.returncode, done.stdout + done.stderr


JACKLINE = (sys.executable, "-m", "jackline")
IN_LOOP = ("", "saving every", "step 5\n", "step 33\n", "step 79\n")
IN_DEMO = ("", "process ", "rehears", "12")
SUBJECTS = (
    Subject(
        "run",
        (*JACKLINE, "run", "--name", "x", "--", sys.executable, "command.py"),
        ("", "step 3/60", "step 40/60", "result"),
        codes=(0, 1, 2),
    ),
    Subject(
        "attach",
        (sys.executable, "loop.py"),
        IN_LOOP,
        codes=(1, 2),
    ),
    Subject(
        "run attach",
        (*JACKLINE, "run", "--name", "x", "--", sys.executable, "loop.py"),
        IN_LOOP,
        codes=(1, 2),
    ),
    Subject("train", (*JACKLINE, "train", "demo", *DEMO, "--name", "x"), IN_DEMO, disk="700M", codes=(1, 2)),
    Subject(
        "data",
        (*JACKLINE, "data", "prepare", "text.txt", "--tokenizer", "bytes", "--documents", "block"),
        ("", "token"),
        is_run=False,
        codes=(1, 2),
    ),
)
FAULTS: dict[str, Callable[[Path], contextlib.AbstractContextManager[None]]] = {
    "no bytes": lambda disk: kept_full(disk, fill_bytes),
    "no inodes": lambda disk: kept_full(disk, fill_inodes),
    "read-only": read_only,
    "quota": used_up_quota,
}


def result_of(world: World, subject: Subject, output: str) -> str:
    """What must be the same as without a fault."""
    if subject.name == "data":
        return world.jackline("data", "show", "text.txt", "--tokenizer", "bytes", "--documents", "block")[1].split(
            "\n"
        )[-2]
    if subject.name == "train":
        found = re.findall(r'"step": ?12,[^\n]*?"loss": ?([-\d.e]+)', metrics_of(world))
        return found[-1] if found else ""
    lines = [line for line in output.splitlines() if line.startswith("result")]
    return lines[-1] if lines else ""


def metrics_of(world: World) -> str:
    path = world.disk / "runs" / "x" / "metrics-0.jsonl"
    return path.read_text() if path.exists() else ""


def wait_for(process: subprocess.Popen[bytes], out: Path, text: str) -> None:
    """Until the output holds `text`, or the process has ended before."""
    deadline_s = time.monotonic() + ENDS_WITHIN_S
    while process.poll() is None and text not in out.read_text(errors="replace"):
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"{text!r} was not printed")
        time.sleep(0.002)


def check_commands(world: World, subject: Subject) -> list[str]:
    """Every command that a person would type now; returns what is wrong with the answers."""
    if not subject.is_run or not (world.disk / "runs" / "x" / "run.json").exists():
        return []
    wrong = []
    for words in (("status", "x"), ("why", "x"), ("runs",), ("logs", "x"), ("checkpoints", "x")):
        code, said = world.jackline(*words)
        is_ours = words[0] != "logs"  # a log holds what the command itself printed
        if ("Traceback" in said and is_ours) or code not in (0, 2):
            wrong.append(f"jackline {' '.join(words)}: exit code {code}: {said[-600:]}")
    return wrong


def end(process: subprocess.Popen[bytes]) -> int:
    try:
        return process.wait(ENDS_WITHIN_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        raise


def one_round(world: World, subject: Subject, fault: str, moment: str, wanted: str) -> list[str]:
    """What went wrong; empty when everything held."""
    out = world.folder / "out.txt"
    out.touch()
    process = world.start(subject.words, out)
    wait_for(process, out, moment)
    with FAULTS[fault](world.disk):
        wrong = check_commands(world, subject)
        code = end(process)
        wrong += check_commands(world, subject)
        said = out.read_text(errors="replace")
        if code not in (0, STOPPED, *subject.codes):
            wrong.append(f"it ended with exit code {code}: {said[-1500:]}")
        if code and not re.search("full|inodes|read-only|quota|No space|Read-only", said + why_of(world, subject)):
            wrong.append(f"the cause is not named (exit code {code}): {said[-1500:]}")
    make_room(world.disk)
    return wrong + go_on(world, subject, code, wanted)


def why_of(world: World, subject: Subject) -> str:
    return world.jackline("why", "x")[1] if subject.is_run else ""


def go_on(world: World, subject: Subject, code: int, wanted: str) -> list[str]:
    """Start it again, with room, until it is finished; then compare."""
    out = world.folder / "again.txt"
    out.touch()
    starts = 0
    while (code or not result_of(world, subject, texts(world))) and starts < MAX_STARTS:
        starts += 1
        code = end(world.start(subject.words, out))
        if code == 2 and "finished already" in out.read_text():
            break
    found = result_of(world, subject, texts(world))
    if found != wanted:
        return [f"after {starts} starts with room: {found!r} instead of {wanted!r}\n{texts(world)[-3000:]}"]
    return []


def texts(world: World) -> str:
    logs = (world.folder / "out.txt", world.folder / "again.txt")
    return "".join(path.read_text(errors="replace") for path in logs if path.exists())


@contextlib.contextmanager
def new_world(subject: Subject) -> Iterator[World]:
    with tempfile.TemporaryDirectory(prefix="disk-torture-", ignore_cleanup_errors=True) as folder:
        world = World(Path(folder))
        with small_disk(world.disk, subject.disk, inodes=INODES):
            yield world


def undisturbed(subject: Subject) -> str:
    with new_world(subject) as world:
        out = world.folder / "out.txt"
        code = end(world.start(subject.words, out))
        found = result_of(world, subject, texts(world))
        assert code == 0 and found, f"{subject.name} fails without any fault: {texts(world)[-3000:]}"
        return found


def torture(rounds: int, seed: int, names: tuple[str, ...]) -> int:
    dice, wanted, num_wrong = random.Random(seed), dict[str, str](), 0
    chosen = [subject for subject in SUBJECTS if subject.name in names]
    for number in range(1, rounds + 1):
        subject = chosen[number % len(chosen)]
        fault, moment = dice.choice(list(FAULTS)), dice.choice(subject.moments)
        wanted[subject.name] = wanted.get(subject.name) or undisturbed(subject)
        began_s = time.monotonic()
        with new_world(subject) as world:
            wrong = one_round(world, subject, fault, moment, wanted[subject.name])
        word = "WRONG" if wrong else "held"
        print(
            f"{number}: {subject.name}, {fault} after {moment!r}: {word}, {time.monotonic() - began_s:.0f} s",
            flush=True,
        )
        for text in wrong:
            num_wrong += 1
            print(f"   {text}", flush=True)
    print(f"{rounds} rounds, {num_wrong} wrong", flush=True)
    return int(num_wrong > 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default=",".join(subject.name for subject in SUBJECTS))
    given = parser.parse_args()
    try:
        sys.exit(torture(given.rounds, given.seed, tuple(given.only.split(","))))
    except Unavailable as reason:
        print(f"not run: {reason}")


if __name__ == "__main__":
    main()
