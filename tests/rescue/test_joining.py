"""A process that was started without Jackline is asked for its state: `jackline rescue --pid N`.

`sys.remote_exec` exists from Python 3.14 on. One test needs such an interpreter with torch (`python3.14`, or the one
that PYTHON314 names); the others run what it would run.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from jackline.cli.rescue.joining import write_request
from jackline.rundir.layout import AttemptDir
from jackline.rundir.records.rescue import RescueRecord, read_rescue
from jackline.supervisor.attempt.rescuing import ask_rescue
from tests.deadline import HANGS_S

# Two optimizers, so that it matters whether a rescue is taken between two rounds or inside of one.
PROGRAM = """
import os, pathlib, sys, torch
torch.manual_seed(0)
torch.set_num_threads(1)

def main():
    maker, judge = torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)
    first = torch.optim.Adam(judge.parameters(), 1e-3)
    second = torch.optim.Adam(maker.parameters(), 1e-3)
    request = pathlib.Path(sys.argv[1]) / f"join.{os.getpid()}.py"
    for step in range(1, 10**9):
        noise = torch.randn(8, 4)
        first.zero_grad()
        judge(maker(noise).detach()).square().mean().backward()
        first.step()
        if request.exists():  # as sys.remote_exec would: between two instructions, here in the middle of a round
            exec(compile(request.read_text(), request, "exec"), {})
            request.rename(f"{request}.done")
        second.zero_grad()
        (1 - judge(maker(noise))).square().mean().backward()
        second.step()
        weights = [tensor.flatten() for module in (maker, judge) for tensor in module.state_dict().values()]
        print(step, torch.cat(weights).double().sum().item().hex(), flush=True)

main()
"""


def wait_for(ask: Callable[[], object], process: subprocess.Popen[bytes]) -> None:
    until_s = time.monotonic() + HANGS_S
    while not ask():
        assert process.poll() is None and time.monotonic() < until_s
        time.sleep(0.02)


def check(record: RescueRecord, log: str) -> None:
    assert (record.outcome, record.is_boundary) == ("saved", True), record
    assert {part["expression"] for part in record.parts} == {"maker", "judge", "first", "second"}
    found = [
        load_file(f"{record.path}/{name}.safetensors")[key]
        for name in ("maker", "judge")
        for key in ("weight", "bias")
    ]
    total = torch.cat([tensor.flatten() for tensor in found]).double().sum().item().hex()
    assert dict(line.split() for line in log.splitlines() if line.count(" ") == 1)[str(record.step)] == total


def jackline(folder: Path, *words: object) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "jackline", *map(str, words)]
    return subprocess.run(line, cwd=folder, capture_output=True, text=True, timeout=HANGS_S)


def test_what_comes_in_the_middle_of_a_round_saves_between_two_rounds(tmp_path: Path) -> None:
    attempt = AttemptDir(tmp_path / "run/attempts/001")
    attempt.stacks.mkdir(parents=True)
    (tmp_path / "train.py").write_text(PROGRAM)
    with (tmp_path / "log.txt").open("wb") as log:
        process = subprocess.Popen([sys.executable, "train.py", attempt.stacks], cwd=tmp_path, stdout=log, stderr=log)
    try:
        wait_for(lambda: (tmp_path / "log.txt").read_text().count("\n") > 3, process)
        write_request(attempt, process.pid, "q")
        wait_for(attempt.rescue_door(process.pid).exists, process)
        question = ask_rescue(attempt, process.pid, "asked", HANGS_S)
        wait_for(lambda: read_rescue(attempt, process.pid).id == question, process)
        record = read_rescue(attempt, process.pid)
        wait_for(lambda: f"\n{record.step} " in (tmp_path / "log.txt").read_text(), process)
        check(record, (tmp_path / "log.txt").read_text())
    finally:
        process.kill()
        process.wait()


def test_a_process_that_cannot_be_asked_is_refused_in_words_and_not_made_a_run(tmp_path: Path) -> None:
    sleep = shutil.which("sleep") or "sleep"
    for command, text in (
        ([sleep, "1000"], f"is not a Python interpreter ({os.path.realpath(sleep)})"),
        ([sys.executable, "-c", "import time; time.sleep(1000)"], "can be asked for its state from Python 3.14 on"),
    ):
        if "3.14 on" in text and sys.version_info >= (3, 14):
            continue
        process = subprocess.Popen(command, cwd=tmp_path)
        try:
            told = jackline(tmp_path, "rescue", "--pid", process.pid)
        finally:
            process.kill()
            process.wait()
        assert told.returncode == 2 and f"process {process.pid}" in told.stderr and text in told.stderr
        assert not (tmp_path / "runs").exists()
    gone = jackline(tmp_path, "rescue", "--pid", process.pid)
    assert gone.returncode == 2 and f"there is no process {process.pid}" in gone.stderr


def python314() -> str:
    path = os.environ.get("PYTHON314") or shutil.which("python3.14")
    if path is None:
        pytest.skip("there is no python3.14 here (PYTHON314 may name one)")
    done = subprocess.run([path, "-c", "import torch"], capture_output=True, timeout=HANGS_S)
    if done.returncode:
        pytest.skip(f"{path} has no torch")
    return path


def test_a_training_of_python_3_14_that_was_started_without_us_is_rescued(tmp_path: Path) -> None:
    python = python314()
    (tmp_path / "train.py").write_text(PROGRAM)
    with (tmp_path / "log.txt").open("wb") as log:
        process = subprocess.Popen([python, "train.py", tmp_path], cwd=tmp_path, stdout=log, stderr=log)
    try:
        wait_for(lambda: (tmp_path / "log.txt").read_text().count("\n") > 3, process)
        told = jackline(tmp_path, "rescue", "--pid", process.pid, "--wait", "200s")
        assert told.returncode == 0, told.stderr
        record = read_rescue(AttemptDir(tmp_path / f"runs/train-pid-{process.pid}/attempts/001"), process.pid)
        wait_for(lambda: f"\n{record.step} " in (tmp_path / "log.txt").read_text(), process)
        check(record, (tmp_path / "log.txt").read_text())
    finally:
        process.kill()
        process.wait()
    env = {**os.environ, "PYTHON_DISABLE_REMOTE_DEBUG": "1"}
    process = subprocess.Popen([python, "-c", "import time; time.sleep(1000)"], cwd=tmp_path, env=env)
    try:
        told = jackline(tmp_path, "rescue", "--pid", process.pid)
        assert told.returncode == 2 and "refuses code from outside" in told.stderr
    finally:
        process.kill()
        process.wait()
