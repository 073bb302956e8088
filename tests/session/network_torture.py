"""Two "machines" as network namespaces with a cable between them that is cut: `scripts/torture network`.

Two runs of `jackline train --nnodes`, one in each namespace, share a folder. Scenes:

    cut-10   the cable is cut for 10 s: the ranks wait, it is named, and the training continues
    cut-60   for 60 s: named on both machines, then continued, or stopped so that the same command resumes it
    elastic  one machine is killed whole, the other continues with the same global batch; the machine comes back

A scene holds if the losses of the whole training are those of one process, within 0.2 %: sums of float32
in another order drift apart over hundreds of steps.
Needs root and `ip netns`; elsewhere it says so and ends with exit code 0.

    scripts/torture network [cut-10 cut-60 elastic]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.places import Unavailable

HANGS_S = 600.0
MACHINES = ("A", "B")
TRAIN = (
    "demo",
    "--quick",
    "--eval-every",
    "0",
    "--full-eval",
    "no",
    "--sentinels",
    "off",
    "--save-every-steps",
    "10",
)


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@contextlib.contextmanager
def two_machines() -> Iterator[Machines]:
    """Namespaces with one cable between them; removed at the end, with every process in them."""
    tag = f"j{os.getpid() % 100_000}"
    if not shutil.which("ip") or os.geteuid():
        raise Unavailable("network namespaces need root and the command `ip`")
    try:
        for name in MACHINES:
            ip("netns", "add", f"{tag}{name}")
    except subprocess.CalledProcessError as error:
        raise Unavailable(f"network namespaces are not permitted: {error.stderr.decode().strip()}") from None
    with tempfile.TemporaryDirectory(prefix="network-") as folder:
        machines = Machines(tag, Path(folder))
        try:
            machines.connect()
            yield machines
        finally:
            for name in MACHINES:
                machines.kill(name)
                ip("netns", "del", f"{tag}{name}")


class Machines:
    """What a scene does with the two machines."""

    def __init__(self, tag: str, folder: Path) -> None:
        self.tag, self.folder = tag, folder
        self.jobs: dict[str, subprocess.Popen[str]] = {}

    def connect(self) -> None:
        ends = [f"{self.tag}v{name}" for name in MACHINES]
        ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        for number, (name, end) in enumerate(zip(MACHINES, ends, strict=True), 1):
            ip("link", "set", end, "netns", f"{self.tag}{name}")
            ip("-n", f"{self.tag}{name}", "addr", "add", f"10.77.0.{number}/24", "dev", end)
            for device in ("lo", end):
                ip("-n", f"{self.tag}{name}", "link", "set", device, "up")

    def set_cable(self, state: str) -> None:
        ip("-n", f"{self.tag}A", "link", "set", f"{self.tag}vA", state)

    def environ(self, name: str) -> dict[str, str]:
        end, folder = f"{self.tag}v{name}", self.folder
        found = {**os.environ, "GLOO_SOCKET_IFNAME": end, "TP_SOCKET_IFNAME": end, "OMP_NUM_THREADS": "1"}
        found |= {"JACKLINE_RUNS": str(folder / "runs"), "JACKLINE_DATA": str(folder / "data")}
        return {**found, "XDG_STATE_HOME": str(folder / f"state-{name}")}

    def jackline(self, name: str, *words: str) -> list[str]:
        return ["ip", "netns", "exec", f"{self.tag}{name}", sys.executable, "-m", "jackline", *words]

    def train(self, name: str, steps: int, nodes: str) -> None:
        words = (*TRAIN, "--max-steps", str(steps), "--nproc", "1", "--nnodes", nodes, "--rdzv", "10.77.0.1:29500")
        with (self.folder / f"out-{name}.txt").open("a") as out:
            self.jobs[name] = subprocess.Popen(
                self.jackline(name, "train", *words, "--name", "net", "--node", name),
                env=self.environ(name),
                stdout=out,
                stderr=subprocess.STDOUT,
                text=True,
            )

    def say(self, name: str, *words: str) -> str:
        done = subprocess.run(self.jackline(name, *words), env=self.environ(name), capture_output=True, text=True)
        return done.stdout + done.stderr

    def kill(self, name: str) -> None:
        """As when its power fails."""
        found = subprocess.run(["ip", "netns", "pids", f"{self.tag}{name}"], capture_output=True, text=True)
        for pid in found.stdout.split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        if name in self.jobs:
            self.jobs.pop(name).wait()

    def losses(self) -> dict[int, float]:
        """Of the whole job, by step: rank 0's machine writes them, and that may change."""
        found: dict[int, tuple[float, float]] = {}
        for path in self.folder.glob("runs/net-*/metrics-0.jsonl"):
            for line in path.read_text().splitlines():
                with contextlib.suppress(ValueError):
                    entry = json.loads(line)
                    if "loss" in entry:
                        found[entry["step"]] = max(
                            found.get(entry["step"], (0.0, 0.0)), (_time(entry), entry["loss"])
                        )
        return {step: loss for step, (_, loss) in sorted(found.items())}

    def newest(self) -> int:
        return max(self.losses(), default=0)

    def events(self) -> str:
        return "\n".join(path.read_text() for path in self.folder.glob("runs/net-*/events.jsonl"))

    def output(self) -> str:
        return "\n".join(f"-- {path.name}\n{path.read_text()[-3000:]}" for path in self.folder.glob("out-*.txt"))

    def wait_until(self, what: str, is_so: Callable[[], bool]) -> None:
        until_s = time.monotonic() + HANGS_S
        while not is_so():
            assert time.monotonic() < until_s, f"not within {HANGS_S:.0f} s: {what}\n{self.output()}"
            time.sleep(0.2)

    def wait_for_end(self, *names: str) -> None:
        self.wait_until(f"the end on {names}", lambda: all(self.jobs[name].poll() is not None for name in names))


def _time(entry: dict[str, object]) -> float:
    value = entry.get("at_s", entry.get("time_s", 0.0))
    return float(value) if isinstance(value, int | float) else 0.0


# -- the scenes -----------------------------------------------------------------------------------------------------


def cut(machines: Machines, seconds: float, steps: int = 300) -> str:
    """Returns what was said about it while the cable was cut."""
    for name in MACHINES:
        machines.train(name, steps, "2")
    machines.wait_until("20 steps", lambda: machines.newest() >= 20)
    machines.set_cable("down")
    cut_at_s, told = time.monotonic(), ""
    while time.monotonic() - cut_at_s < seconds:
        told += machines.say("A", "status", "net-A") + machines.say("B", "status", "net-B")
        time.sleep(2.0)
    machines.set_cable("up")
    finish(machines, steps, "2")
    return told


def finish(machines: Machines, steps: int, nodes: str) -> None:
    """To the last step. A machine that has stopped is started again with the same command, as its owner would."""
    again = 0
    until_s = time.monotonic() + HANGS_S
    while machines.newest() < steps:
        assert time.monotonic() < until_s, f"step {steps} did not come\n{machines.output()}"
        if all(job.poll() is not None for job in machines.jobs.values()) and machines.newest() < steps:
            again += 1
            assert again <= 2, f"it does not resume\n{machines.output()}"
            for name in MACHINES:
                machines.train(name, steps, nodes)
        time.sleep(0.2)
    machines.wait_for_end(*machines.jobs)


def elastic(machines: Machines, steps: int = 600) -> str:
    for name in MACHINES:
        machines.train(name, steps, "1:2")
    machines.wait_until("20 steps of two machines", lambda: machines.newest() >= 20)
    machines.kill("B")
    lost_at = machines.newest()
    machines.wait_until("steps of one machine", lambda: machines.newest() >= lost_at + 20)
    told = machines.say("A", "status", "net-A")
    machines.train("B", steps, "1:2")
    machines.wait_until("both machines", lambda: "net-B: rank" in machines.say("A", "status", "net-A"))
    finish(machines, steps, "1:2")
    return told


def alone(folder: Path, steps: int) -> dict[int, float]:
    env = {**os.environ, "JACKLINE_RUNS": str(folder / "runs"), "JACKLINE_DATA": str(folder / "data")}
    env |= {"XDG_STATE_HOME": str(folder / "state"), "OMP_NUM_THREADS": "1"}
    words = ("train", *TRAIN, "--max-steps", str(steps), "--name", "net-alone")
    subprocess.run([sys.executable, "-m", "jackline", *words], env=env, check=True, capture_output=True)
    lines = (folder / "runs/net-alone/metrics-0.jsonl").read_text().splitlines()
    return {entry["step"]: entry["loss"] for entry in map(json.loads, lines) if "loss" in entry}


SCENES: dict[str, Callable[[Machines], str]] = {
    "cut-10": lambda machines: cut(machines, 10.0),
    "cut-60": lambda machines: cut(machines, 60.0),
    "elastic": elastic,
}


def judge(scene: str, told: str, found: dict[int, float], wanted: dict[int, float]) -> list[str]:
    wrong = []
    if scene != "elastic" and "the network between the machines is cut" not in told:
        wrong.append("the cut was not named")
    both = sorted(found.keys() & wanted.keys())
    far = [step for step in both if abs(found[step] - wanted[step]) > 2e-3 * abs(wanted[step])]
    if not both or both[-1] != max(wanted):
        wrong.append(f"steps are missing: {len(both)} of {len(wanted)}")
    return wrong + [f"step {step}: loss {found[step]} instead of {wanted[step]}" for step in far[:3]]


def play(scene: str) -> list[str]:
    """What is wrong; nothing when the scene holds."""
    with two_machines() as machines:
        told = SCENES[scene](machines)
        found = machines.losses()
        steps = max(found)
        with tempfile.TemporaryDirectory(prefix="alone-") as folder:
            wrong = judge(scene, told, found, alone(Path(folder), steps))
        alarms = [line for line in machines.events().splitlines() if "STUCK" in line or "moves again" in line]
        print(f"{scene}: {len(found)} steps, {len(alarms)} events of alarm", flush=True)
        said = sorted({line.strip()[:200] for line in told.splitlines() if "ranks:" in line or "verdict:" in line})
        return [*wrong, *said, machines.output()] if wrong else []


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scenes", nargs="*", choices=[*SCENES, []], default=list(SCENES))
    bad = 0
    for scene in parser.parse_args().scenes or SCENES:
        try:
            wrong = play(scene)
        except Unavailable as reason:
            print(f"{scene}: not run: {reason}")
            continue
        except AssertionError as problem:
            wrong = [str(problem)]
        bad += bool(wrong)
        print(f"{scene}: {'holds' if not wrong else 'WRONG: ' + chr(10).join(wrong)}", flush=True)
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
