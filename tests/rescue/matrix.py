"""Every script of `zoo`, ended in six ways: the rescued state must be what the script itself would have saved.

    scripts/torture rescue [--scripts gan,amp] [--ways stuck]

A cell starts the unchanged script with the injected files of `jackline run` and no supervisor, asks where the way
needs a question, and compares the rescued checkpoint with the script's own state_dict of that step, bit for bit.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from jackline.checkpoint.format.tree import KIND, NOT_A_LEAF, decode
from jackline.checkpoint.format.verify import verify_checkpoint
from jackline.rundir.layout import AttemptDir
from jackline.rundir.records.rescue import RescueRecord, read_rescue
from jackline.supervisor.attempt.rescuing import ask_rescue
from jackline.supervisor.child.environment import INJECT_FOLDER
from tests.deadline import HANGS_S
from tests.rescue import zoo
from tests.rescue.truth import END

WAYS = ("exception", "oom", "interrupt", "sigterm", "stuck", "asked")
ENDS = {"exception": 1, "oom": 1, "interrupt": -signal.SIGINT, "sigterm": -signal.SIGTERM}
# Lightning has handlers of its own and exits by itself: only a supervisor, which asks first, has its state then.
OWN_ENDS = {("lightning", "interrupt"): 1, ("lightning", "sigterm"): 0}


@dataclass
class Cell:
    """One script on its way to one end."""

    folder: Path
    process: subprocess.Popen[bytes]

    @property
    def attempt(self) -> AttemptDir:
        return AttemptDir(self.folder / "run/attempts/001")

    def output(self) -> str:
        return (self.folder / "out.txt").read_text(errors="replace")

    def wait_for(self, what: str, is_there: Any) -> None:
        until_s = time.monotonic() + HANGS_S
        while not is_there():
            assert time.monotonic() < until_s, f"waited for {what}\n{self.output()}"
            assert self.process.poll() is None or is_there(), f"it ended before {what}\n{self.output()}"
            time.sleep(0.02)

    def ask(self, wait_s: float) -> RescueRecord:
        pid = self.process.pid
        question = ask_rescue(self.attempt, pid, "asked", wait_s)
        assert question is not None, f"nobody listens\n{self.output()}"
        self.wait_for("the answer", lambda: read_rescue(self.attempt, pid).id == question)
        return self.record()

    def record(self) -> RescueRecord:
        return read_rescue(self.attempt, self.process.pid)

    def end(self) -> int:
        if self.process.poll() is None:
            self.process.kill()
        return self.process.wait(HANGS_S)


def start(script: str, folder: Path, way: str, *, is_armed: bool = True) -> Cell:
    """Start a script of `zoo` in `folder`, as `jackline run` would, without a supervisor."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "train.py").write_text(zoo.source_of(script))
    return start_file(folder / "train.py", folder, way, is_armed=is_armed)


def start_file(script: Path, folder: Path, way: str, *, is_armed: bool = True) -> Cell:
    stacks = folder / "run/attempts/001/stacks"
    stacks.mkdir(parents=True)
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parent), "WAY": way, "TRUTH": str(folder)}
    env["JACKLINE"] = ""
    if is_armed:
        env["PYTHONPATH"] = f"{INJECT_FOLDER}:{env['PYTHONPATH']}"
        env |= {"JACKLINE_STACKS": str(stacks), "JACKLINE_RESCUE": "1", "JACKLINE_PYTHON": sys.executable}
    with (folder / "out.txt").open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, str(script)], cwd=folder, env=env, stdout=out, stderr=out, stdin=subprocess.DEVNULL
        )
    return Cell(folder, process)


def run_cell(script: str, way: str, folder: Path) -> str:
    """'' when the rescued state is right; else what is wrong with it."""
    cell = start(script, folder, way)
    try:
        if way in ENDS:
            code = cell.process.wait(HANGS_S)
            if code != (usual := OWN_ENDS.get((script, way), ENDS[way])):
                return f"exit code {code}, without Jackline {usual}\n{cell.output()[-2000:]}"
            record = cell.record()
            if (script, way) in OWN_ENDS and not record.is_there:
                return ""
        elif way == "stuck":
            cell.wait_for("its last step", (folder / "truth-12.pt").exists)
            record = cell.ask(0.2)
        else:
            cell.wait_for("its first steps", (folder / "truth-5.pt").exists)
            record = cell.ask(HANGS_S)
            if not record.is_boundary:
                return f"taken {record.moment}, though steps came"
        return compare(record, folder)
    finally:
        cell.end()


# -- comparison ------------------------------------------------------------------------------------------------------


def compare(record: RescueRecord, folder: Path) -> str:
    if not record.is_saved:
        return f"{record.outcome}: {record.why}"
    rescued = Path(record.path)
    verify_checkpoint(rescued)
    truth = _truth_of(record.step, folder)
    state = json.loads((rescued / "state.json").read_bytes())
    tensors: dict[str, dict[str, torch.Tensor]] = {}

    def leaf(node: dict[str, Any], where: str) -> Any:
        if node[KIND] != "tensor":
            return NOT_A_LEAF
        file = node["file"]
        if file not in tensors:
            tensors[file] = load_file(rescued / f"{file}.safetensors")
        return tensors[file][node["name"]]

    keys = {part["expression"]: part["key"] for part in record.parts}
    for name, expected in truth.items():
        # A framework's frames may have other names for the same object: then any part with the same contents is it.
        key = keys.get(name, name) if name not in state else name
        candidates = [key] if key in state else [part["key"] for part in record.parts]
        if not any(_is_equal(*_contents(state[one], expected, leaf)) for one in candidates):
            why = f"is not what the script has (taken {record.moment})" if key in state else "is missing"
            return f"{name} of step {record.step} {why}; there are {sorted(state)}"
    return ""


def _truth_of(step: int | None, folder: Path) -> dict[str, Any]:
    """What the script noted when its optimizers had made `step` steps: a gradient scaler leaves steps out, and the
    script's own number is higher then."""
    number = step if step is not None else END  # of a script that nobody counts
    while True:
        truth: dict[str, Any] = torch.load(folder / f"truth-{number}.pt", weights_only=False)
        counts = [count for value in truth.values() for count in _steps_of(value)]
        if step is None or not counts or min(counts) >= step:
            return truth
        number += 1


def _steps_of(state: Any) -> list[int]:
    """The steps that an optimizer's state_dict has counted, if it has."""
    if not isinstance(state, dict) or "param_groups" not in state:
        return []
    return [int(each["step"]) for each in state["state"].values() if "step" in each][:1]


def tensors_of(rescued: Path) -> dict[str, dict[str, torch.Tensor]]:
    return {path.stem: load_file(path) for path in rescued.glob("*.safetensors")}


def _contents(node: Any, expected: Any, leaf: Any) -> tuple[Any, Any]:
    kind = node.get(KIND) if isinstance(node, dict) else None
    if kind == "module":
        return {name: leaf(value, "") for name, value in node["tensors"].items()}, expected
    if kind == "optimizer":
        is_optimizer = isinstance(expected, dict) and "param_groups" in expected
        return _optimizer(node, leaf), _plain_optimizer(expected) if is_optimizer else None
    return decode(node["state"] if kind == "stateful" else node, "", leaf), expected


def _optimizer(node: dict[str, Any], leaf: Any) -> dict[str, Any]:
    states = {int(number): decode(values, "", leaf) for number, values in node["state"].items()}
    return {"state": states, "lr": [group["settings"]["lr"] for group in node["groups"]]}


def _plain_optimizer(state: dict[str, Any]) -> dict[str, Any]:
    return {"state": state["state"], "lr": [group["lr"] for group in state["param_groups"]]}


def _is_equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor) and torch.equal(one, other)
    if isinstance(one, dict):
        return isinstance(other, dict) and set(one) == set(other) and all(_is_equal(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_is_equal, one, other))
    return bool(one == other)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scripts", default=",".join(zoo.SCRIPTS))
    parser.add_argument("--ways", default=",".join(WAYS))
    wanted = parser.parse_args()
    cells = [(script, way) for script in wanted.scripts.split(",") for way in wanted.ways.split(",")]
    num_wrong = 0
    for script, way in cells:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:  # a writer may end later
            began_s = time.monotonic()
            problem = run_cell(script, way, Path(folder))
        num_wrong += bool(problem)
        print(f"{script:13} {way:10} {time.monotonic() - began_s:5.1f} s  {problem or 'ok'}", flush=True)
    print(f"{len(cells) - num_wrong} of {len(cells)} cells are right")
    return 1 if num_wrong else 0


if __name__ == "__main__":
    sys.exit(main())
