"""An attached script under `jackline run`: found by status, stopped by stop, continued by the same command."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.deadline import HANGS_S
from tests.session.nursery import ROOT, Nursery

SCRIPT = """
import os, time, torch, jackline
torch.manual_seed(0)
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = torch.utils.data.TensorDataset(torch.randn(40, 4))
loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)
with jackline.attach(model=model, optimizer=optimizer, loader=loader, save_every_steps=1) as run:
    for (batch,) in run.steps(total=30):
        loss = model(batch).square().mean()
        optimizer.zero_grad(); loss.backward(); optimizer.step()
        run.log(loss=loss)
        while run.step == 12 and not run.should_stop and not os.path.exists("go"): time.sleep(0.01)
print("final", run.step, model.weight.sum().item().hex())
"""
# The same training without an optimizer of torch, which imports torch's compiler: a third of the script's CPU time.
BY_HAND = (
    SCRIPT.replace("optimizer = torch.optim.SGD(model.parameters(), lr=0.01)\n", "")
    .replace("optimizer=optimizer, ", "")
    .replace(
        "optimizer.zero_grad(); loss.backward(); optimizer.step()\n",
        "torch.autograd.backward(loss)\n"
        "        for weight in model.parameters(): weight.data -= 0.01 * weight.grad; weight.grad = None\n",
    )
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path


def jackline(folder: Path, *words: str, **more: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "jackline", *words], **settings(folder), timeout=HANGS_S, **more)


def settings(folder: Path) -> dict[str, Any]:
    env = {**os.environ, "JACKLINE_RUNS": str(folder / "runs"), "XDG_STATE_HOME": str(folder / "state")}
    env |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
    return {"env": env, "cwd": folder, "text": True, "capture_output": True}


def run_of(folder: Path) -> Path:
    (run,) = [path for path in (folder / "runs").iterdir() if not path.name.startswith(".")]
    return run


def wait_until(holds: Callable[[], bool], deadline_s: float = HANGS_S) -> None:
    end_s = time.monotonic() + deadline_s
    while not holds():
        assert time.monotonic() < end_s, "it never became true"
        time.sleep(0.05)


def read_session(folder: Path) -> dict[str, Any]:
    try:
        return json.loads((run_of(folder) / "session-0.json").read_text())
    except (OSError, ValueError):
        return {}


def start(folder: Path) -> None:
    done = jackline(folder, "run", "--detach", "--", sys.executable, "train.py")
    assert done.returncode == 0, done.stderr
    wait_until(lambda: read_session(folder).get("step") == 12)


def test_status_tells_what_the_session_knows_and_stop_saves(folder: Path) -> None:
    start(folder)
    wait_until(lambda: (read_session(folder).get("last_checkpoint") or {}).get("step", 0) > 0)
    status = jackline(folder, "status").stdout
    assert "train, 12 of 30 steps (40 %)" in status
    assert "at risk: " in status
    stopped = jackline(folder, "stop")
    assert stopped.returncode == 0, stopped.stderr
    attempt = run_of(folder) / "attempts" / "001"
    ending = json.loads((attempt / "exit.json").read_text())
    assert (ending["exit_code"], ending["cause"], ending["is_stopped"]) == (75, "stopped", True)
    assert json.loads((attempt / "intent.json").read_text())["why"] == "SIGTERM: stopped at step 12, saved"
    (folder / "go").touch()
    again = jackline(folder, "run", "--", sys.executable, "train.py")
    assert again.returncode == 0, again.stderr
    assert "resuming from step-00000012" in again.stdout
    assert "final 30 " in again.stdout


def test_a_killed_script_resumes_bit_exactly_under_the_same_command(folder: Path, nursery: Nursery) -> None:
    start(folder)
    pid = read_session(folder)["process"]["pid"]
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: (run_of(folder) / "attempts" / "001" / "exit.json").exists())
    (folder / "go").touch()
    again = jackline(folder, "run", "--", sys.executable, "train.py")
    assert again.returncode == 0, again.stderr
    whole = nursery.run(folder / "train.py", (), folder, {"JACKLINE_RUNS": str(folder / "other")})
    final = [line for line in again.stdout.splitlines() if line.startswith("final 30")]
    assert final and final[0] in whole.output


def test_a_bare_run_is_seen_by_status_and_stopped_by_stop(folder: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "train.py"], env=settings(folder)["env"], cwd=folder, text=True, stderr=subprocess.PIPE
    ) as bare:
        wait_until(lambda: (folder / "runs").exists() and read_session(folder).get("step") == 12)
        assert "train, 12 of 30 steps (40 %)" in jackline(folder, "status").stdout
        stopped = jackline(folder, "stop")
        assert stopped.returncode == 0, stopped.stderr
        assert bare.wait(HANGS_S) == 75
        assert bare.stderr is not None
        assert "SIGTERM: stopped at step 12, saved" in bare.stderr.read()
    assert ": stopped " in jackline(folder, "status").stdout


CRASHING = BY_HAND.replace(
    "        while run.step == 12",
    "        if run.step == 12 and not os.path.exists('crashed'): open('crashed', 'w'); os.kill(os.getpid(), 11)\n"
    "        while False and run.step == 12",
)


@pytest.mark.parametrize(("asked", "code", "attempts"), [((), 0, 2), (("--restart", "0"), 139, 1)])
def test_a_crashed_script_that_attached_is_started_again_unless_that_was_forbidden(
    folder: Path, asked: tuple[str, ...], code: int, attempts: int
) -> None:
    (folder / "train.py").write_text(CRASHING)
    done = jackline(folder, "run", *asked, "--", sys.executable, "train.py")
    assert len(list((run_of(folder) / "attempts").iterdir())) == attempts, done.stderr
    assert done.returncode == code
    assert ("final 30 " in done.stdout) == (code == 0)
    assert ("restart 1 of 10" in done.stderr) == (code == 0), done.stderr


def kill_bare(folder: Path, env: dict[str, str] | None = None) -> None:
    """Start the script as a plain command and kill it with -9 at step 12, with a checkpoint of an earlier step."""
    (folder / "train.py").write_text(BY_HAND)
    more = {"cwd": folder, "env": {**settings(folder)["env"], **(env or {})}}
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    bare = subprocess.Popen([sys.executable, "train.py"], **more, **quiet)
    try:
        wait_until(lambda: read_session(folder).get("step") == 12)
        wait_until(lambda: ((read_session(folder).get("last_checkpoint") or {}).get("step") or 0) > 0)
    finally:
        bare.kill()
        bare.wait()
    wait_until(lambda: not processes_in(folder))  # the writer finishes what it has; it would make a moved folder anew


def processes_in(folder: Path) -> list[str]:
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (
                str((process / "cwd").readlink()) == str(folder)
                or os.fsencode(folder) in (process / "cmdline").read_bytes()
            ):
                found.append(process.name)
    return [pid for pid in found if pid != str(os.getpid())]


def test_a_plain_command_killed_with_9_is_taken_up_by_run_in_another_spelling(folder: Path) -> None:
    kill_bare(folder)
    (folder / "go").touch()
    again = jackline(folder, "run", "--", sys.executable, "-u", str(folder / "train.py"))
    assert again.returncode == 0, again.stderr
    assert "resuming from step-000000" in again.stdout
    assert "final 30 " in again.stdout
    run = run_of(folder)  # the only one
    assert sorted(path.name for path in (run / "attempts").iterdir()) == ["001", "002"]


def test_a_plain_command_killed_on_another_machine_continues_in_the_copied_folder(folder: Path) -> None:
    """The words of each refusal lead to the next command."""
    kill_bare(folder, {"JACKLINE_HOST": "gpu-box"})
    (folder / "go").touch()
    moved = folder.rename(folder.with_name("moved"))
    name = run_of(moved).name
    first = jackline(moved, "resume", name)
    assert first.returncode == 2
    assert f"hint: once you know that it ended there: jackline resume {name} --here" in first.stderr
    beating = jackline(moved, "resume", name, "--here")
    assert beating.returncode == 2
    assert f"error: run '{name}' is alive on 'gpu-box' (process " in beating.stderr
    session = run_of(moved) / "session-0.json"
    session.write_text(json.dumps({**json.loads(session.read_text()), "at_s": time.time() - 4000}))
    again = jackline(moved, "resume", name, "--here")
    assert again.returncode == 0, again.stderr
    assert f"run '{name}' ran in {folder}, which is not here: it continues in {moved}" in again.stderr
    assert "resuming from step-000000" in again.stdout
    assert "final 30 " in again.stdout


def test_a_refusal_ends_a_plain_command_with_its_own_exit_code(folder: Path) -> None:
    """Python's code for an uncaught exception is 1, which reads as a crash that is worth a retry."""
    script = "import jackline\nfrom jackline.errors import CannotResume\n"
    script += "try: jackline.attach(keep_last='many')\nexcept Exception: pass\n"
    script += "raise CannotResume('nothing fits', hint='look at it')"
    plain = {key: value for key, value in settings(folder).items() if key != "capture_output"}
    done = subprocess.run([sys.executable, "-c", script], **plain, stderr=subprocess.PIPE, timeout=HANGS_S)
    assert done.returncode == 3
    assert done.stderr.endswith("CannotResume: error: nothing fits\nhint: look at it\n")
