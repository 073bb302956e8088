"""A whole supervised run with a mirror: any of its processes is killed at any instant: `scripts/torture whole`.

    python -m tests.stories.whole_torture --rounds 20 --seed 1

A round is one attached training under `jackline run --mirror` on a small disk. Viewer, supervisor, keeper, training,
writer and both mirrors are killed with SIGKILL in random subsets, again and again, in some volleys while the disk is
full. In between a person watches or resumes the run; at last it may finish. No acknowledged checkpoint may be
missing after any volley, the weights must be those of an undisturbed run, the mirror must hold the last step, and no
process may be left.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from jackline.checkpoint.format.catalogue import LOCK, MIRROR
from jackline.checkpoint.writer.lock import read_holder
from jackline.rundir.layout import RunDir
from jackline.rundir.process_id import ProcessId, identify, is_alive
from jackline.rundir.records.mirror import read_mirror
from jackline.rundir.records.supervisor import read_supervisor
from jackline.rundir.status import read_status
from tests.checkpoint.light_trainer import newest_whole
from tests.places import Unavailable, fill_bytes, kept_full, make_room, small_disk
from tests.shell import Live, Shell

TOTAL = 200
LOOP = f"""
import os, time, torch, jackline
torch.manual_seed(0)
data = torch.utils.data.TensorDataset(torch.randn(400, 8))
loader = torch.utils.data.DataLoader(data, batch_size=10, shuffle=True)
model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Dropout(0.1), torch.nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
pause_s = float(os.environ["PAUSE_S"])
with jackline.attach(model=model, optimizer=optimizer, loader=loader, save_every_steps=5) as run:
    for batch in run.steps(total={TOTAL}):
        loss = model(batch[0]).square().mean()
        optimizer.zero_grad(); loss.backward(); optimizer.step()
        run.log(loss=loss)
        time.sleep(pause_s)
print("final", [value.sum().item().hex() for value in model.parameters()], flush=True)
"""
VICTIMS = ("viewer", "supervisor", "keeper", "training", "writer", "mirror of checkpoints", "mirror of the run")
MAX_VOLLEYS = 8
STARTS_AT_THE_END = 4
FULL_DISK = 0.2  # of the volleys


@dataclass
class Tally:
    """What was done and what came of it."""

    kills: Counter[str] = field(default_factory=Counter)
    full_disks: int = 0
    commits: int = 0  # checkpoints that were acknowledged
    num_rounds: int = 0
    wrong: list[str] = field(default_factory=list)

    def line(self) -> str:
        each = ", ".join(f"{name} {count}" for name, count in sorted(self.kills.items()))
        return (
            f"{self.num_rounds} runs; {self.kills.total()} kills ({each}), {self.full_disks} times a full disk; "
            f"{self.commits} commits acknowledged; {len(self.wrong)} wrong"
        )


@dataclass
class Round:
    """One run and the person in front of it."""

    shell: Shell
    dice: random.Random
    tally: Tally
    viewer: Live | None = None
    acknowledged: int = 0  # the newest step

    def __post_init__(self) -> None:
        self.run = RunDir(self.shell.runs / "mine")

    def play(self) -> None:
        """Kill until the dice say so, then let it finish. Raises AssertionError with what broke."""
        for _ in range(self.dice.randint(3, MAX_VOLLEYS)):
            self.watch_or_start()
            self.wait_for_a_sign()
            with self.maybe_full():
                self.volley()
            self.check_checkpoints()
            if self.is_final():
                break
        self.finish()

    def words(self) -> list[str]:
        far = str(self.shell.work / "far")
        return ["run", "--name", "mine", "--mirror", far, "--", sys.executable, str(self.shell.work / "loop.py")]

    def watch_or_start(self) -> None:
        """What a person does next: look at it if it lives, else start it again in one of the two ways."""
        if self.viewer is not None and self.viewer.code() is None and self.dice.random() < 0.5:
            return
        is_new = not self.run.run_file.exists()
        again = self.words() if is_new or self.dice.random() < 0.6 else ["resume", "mine"]
        self.viewer = self.shell.start(*again)

    def wait_for_a_sign(self) -> None:
        """Mostly until it has saved once more, now and then some instant of its start."""
        known, patience_s = self.commits(), self.dice.choice((self.dice.uniform(0.0, 4.0), 60.0, 60.0, 60.0))
        deadline_s = time.monotonic() + patience_s
        while self.commits() == known and time.monotonic() < deadline_s and not self.is_over():
            self.read()
            time.sleep(0.02)
        time.sleep(self.dice.random() ** 2 * 0.3)  # not to wait for something: any instant will do

    @contextlib.contextmanager
    def maybe_full(self) -> Iterator[None]:
        if self.dice.random() > FULL_DISK:
            yield
            return
        self.tally.full_disks += 1
        with kept_full(self.shell.runs, fill_bytes):
            time.sleep(self.dice.uniform(0.0, 1.5))  # long enough for a save to meet it
            yield
        make_room(self.shell.runs)

    def volley(self) -> None:
        for name in self.dice.sample(VICTIMS, self.dice.randint(1, len(VICTIMS))):
            process = self.processes().get(name)
            if is_alive(process):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)
                    self.tally.kills[name] += 1
            time.sleep(self.dice.choice((0.0, 0.0, 0.0, 0.02, 0.2)))

    def processes(self) -> dict[str, ProcessId | None]:
        state = read_supervisor(self.run)
        return {
            "viewer": identify(self.viewer.pid) if self.viewer is not None and self.viewer.code() is None else None,
            "supervisor": state.supervisor,
            "keeper": state.keeper,
            "training": state.child,
            "writer": read_holder(self.run.checkpoints / LOCK).writer,
            "mirror of checkpoints": read_mirror(self.run.checkpoints / MIRROR).process,
            "mirror of the run": read_mirror(self.run.path / MIRROR).process,
        }

    def check_checkpoints(self) -> None:
        """Whatever was acknowledged is there, or something newer."""
        self.acknowledged = max([self.acknowledged, *self.steps_acknowledged()])
        if self.acknowledged:
            found = newest_whole(self.run.checkpoints)
            step = found[0] if found else None
            assert step is not None and step >= self.acknowledged, (
                f"step {self.acknowledged} was acknowledged, the newest whole one is {step}"
            )

    def steps_acknowledged(self) -> list[int]:
        file = self.run.session_events()
        lines = file.read_text(errors="replace").split("\n")[:-1] if file.exists() else []
        found = [re.search(r'"step": ?(\d+)', line) for line in lines if '"checkpoint_committed"' in line]
        return [int(one[1]) for one in found if one]  # a full disk may have torn a line

    def commits(self) -> int:
        return len(self.steps_acknowledged())

    def is_over(self) -> bool:
        return self.viewer is not None and self.viewer.code() is not None

    def is_final(self) -> bool:
        return read_status(self.run).state == "finished"

    def finish(self) -> None:
        """Start it until it has finished, as a person would; nothing is killed any more."""
        for _ in range(STARTS_AT_THE_END):
            if self.is_final():
                break
            live = self.shell.start(*self.words())
            live.wait()
        status = read_status(self.run)
        assert status.state == "finished", f"it does not finish: {status.state}\n{self.shell.jackline('why', 'mine')}"
        self.check_checkpoints()
        self.tally.commits += self.commits()
        assert TOTAL in self.mirrored(), f"the mirror has {self.mirrored()}"
        left = self.shell.left_over()
        assert not left, f"left over: {left}"

    def mirrored(self) -> list[int]:
        found = (self.shell.work / "far" / "mine" / "checkpoints").glob("step-*/manifest.json")
        return sorted(int(path.parent.name.split("-")[1]) for path in found)

    def read(self) -> None:
        if self.viewer is not None:
            self.viewer.read(0.0)


def final_of(shell: Shell) -> list[str]:
    return sorted(set(re.findall(r"^final .*$", "\n".join(shell.run_dir("mine").log_lines()), re.M)))


def new_shell(folder: Path, pause_s: float) -> Shell:
    shell = Shell(folder)
    shell.runs.mkdir(exist_ok=True)
    shell.env.update(PAUSE_S=str(pause_s), OMP_NUM_THREADS="1")
    shell.script("loop.py", LOOP)
    return shell


def undisturbed(folder: Path) -> list[str]:
    shell = new_shell(folder, 0.0)
    try:
        done = shell.jackline("run", "--name", "mine", "--", sys.executable, str(shell.work / "loop.py"))
        assert done.code == 0, str(done)
        return final_of(shell)
    finally:
        shell.close()


def torture_one(folder: Path, wanted: list[str], dice: random.Random, tally: Tally) -> None:
    """One run from its first start to its end; what is wrong is added to the tally."""
    shell = new_shell(folder, dice.choice((0.0, 0.005, 0.02)))
    try:
        with small_disk(shell.runs, "200M"):
            try:
                Round(shell, dice, tally).play()
                found = final_of(shell)
                assert found == wanted, f"{found} instead of {wanted}"
            except AssertionError as wrong:
                log = "\n".join(shell.run_dir("mine").log().splitlines()[-40:])
                tally.wrong.append(f"{folder.name}: {wrong}\n{log}")
            shell.close()
    finally:
        shell.close()
    tally.num_rounds += 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    tally = Tally()
    with tempfile.TemporaryDirectory(prefix="whole-torture-", ignore_cleanup_errors=True) as folder:
        wanted = undisturbed(Path(folder) / "undisturbed")
        for number in range(given.rounds):
            dice = random.Random(f"{given.seed} {number}")
            try:
                torture_one(Path(folder) / f"seed-{given.seed}-round-{number}", wanted, dice, tally)
            except Unavailable as reason:
                print(f"not run: {reason}")
                return 0
            print(tally.line(), flush=True)
    print("\n".join(tally.wrong))
    return int(bool(tally.wrong))


if __name__ == "__main__":
    sys.exit(main())
