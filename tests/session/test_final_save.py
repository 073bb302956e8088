"""A run is finished only when its last state is saved: on a disk that is full, then on one that has room again."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.deadline import HANGS_S
from tests.places import Unavailable, fill_inodes, make_room, small_disk
from tests.session.nursery import EVERY_SAVE, ROOT, Child, Nursery

LOOP = """
import os, sys, time
import torch
import jackline

torch.manual_seed(0)
data = torch.utils.data.TensorDataset(torch.randn(200, 4))
loader = torch.utils.data.DataLoader(data, batch_size=10, shuffle=True)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
ballast = os.path.join(os.environ["JACKLINE_RUNS"], "ballast")

def fill():
    with open(ballast, "wb", buffering=0) as file:  # closing it has nothing left to write
        try:
            while True: file.write(bytes(1 << 16))
        except OSError:
            pass

with jackline.attach(
    model=model, optimizer=optimizer, loader=loader, name="x", save_every_steps=10,
    wait_for_disk_s=float(os.environ["WAIT"]),
) as run:
    for batch in run.steps(total=40):
        loss = model(batch[0]).square().mean()
        optimizer.zero_grad(); loss.backward(); optimizer.step()
        run.log(loss=loss)
        if run.step == 25 and os.environ.get("FILL"):
            while run._attached.saver.engine.is_busy: run._attached.saver.engine._link.pump(0.05)
            fill()
    print("after the loop", flush=True)
print("behind the block", [p.sum().item().hex() for p in model.parameters()], flush=True)
"""


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "runs").mkdir()
    try:
        with small_disk(tmp_path / "runs", "160M") as path:
            yield path
    except Unavailable as reason:
        pytest.skip(str(reason))


def behind(output: str) -> list[str]:
    return [line for line in output.splitlines() if line.startswith("behind the block")]


def command(tmp_path: Path, *words: str) -> subprocess.CompletedProcess[str]:
    code = "from jackline.cli.main import main; main()"
    env = {**os.environ, "JACKLINE_RUNS": str(tmp_path / "runs"), "XDG_STATE_HOME": str(tmp_path / "state")}
    return subprocess.run(
        [sys.executable, "-c", code, *words], capture_output=True, text=True, cwd=tmp_path, env=env, timeout=HANGS_S
    )


def start_full(nursery: Nursery, tmp_path: Path, wait: str) -> Child:
    return nursery.start(LOOP, [], tmp_path, {"WAIT": wait, "FILL": "1"})


def test_a_last_save_that_a_full_disk_refuses_ends_resumable_and_the_next_start_finishes(
    nursery: Nursery, tmp_path: Path, disk: Path
) -> None:
    whole = tmp_path / "whole"
    whole.mkdir()
    wanted = behind(nursery.run(LOOP, [], whole, {"WAIT": "1"}).output)
    ended = start_full(nursery, tmp_path, "0.5").wait()
    assert ended.code == 75, ended.output
    assert not behind(ended.output)
    assert "step 40 is not saved: the disk is full" in ended.output
    exit_file = json.loads((disk / "x" / "attempts" / "001" / "exit.json").read_text())
    assert exit_file["exit_code"] == 75 and "not saved" in exit_file["text"]
    shown = command(tmp_path, "status", "x")
    assert shown.returncode == 0 and "stopped" in shown.stdout and "the disk is full" in shown.stdout, shown
    (disk / "ballast").unlink()
    again = nursery.run(LOOP, [], tmp_path, {"WAIT": "1"})
    assert again.code == 0, again.output
    assert behind(again.output) == wanted
    assert json.loads((disk / "x" / "attempts" / "002" / "exit.json").read_text())["cause"] == "finished"


def test_a_last_save_waits_for_room_counts_down_and_finishes_when_there_is_some(
    nursery: Nursery, tmp_path: Path, disk: Path
) -> None:
    child = start_full(nursery, tmp_path, "600")
    child.wait_for("waiting for room")
    assert re.search(r"step 40 is not saved: the disk is full.*; waiting for room, \S+ min.* left", child.output)
    (disk / "ballast").unlink()
    ended = child.wait()
    assert ended.code == 0, ended.output
    assert behind(ended.output) and "there was room again: everything is saved" in ended.output
    assert json.loads((disk / "x" / "attempts" / "001" / "exit.json").read_text())["cause"] == "finished"


def test_a_stop_ends_the_wait_for_room(nursery: Nursery, tmp_path: Path, disk: Path) -> None:
    child = start_full(nursery, tmp_path, "600")
    child.wait_for("waiting for room")
    child.signal(signal.SIGTERM)
    ended = child.wait()
    assert ended.code == 75 and not behind(ended.output), ended.output


def test_without_room_a_supervised_run_is_not_done_and_its_hook_does_not_run(tmp_path: Path, disk: Path) -> None:
    (tmp_path / "loop.py").write_text(LOOP)
    env = {"WAIT": "0.5", "FILL": "1", "OMP_NUM_THREADS": "1"}
    with changed(os.environ, env):
        ended = command(tmp_path, "run", "--name", "x", "--when-done", f"touch {tmp_path}/done", "--", *LOOP_COMMAND)
        assert ended.returncode == 75, ended
        assert not (tmp_path / "done").exists()
        why = command(tmp_path, "why", "x")
        assert why.returncode == 0 and "the disk is full" in why.stdout, why
        assert "Traceback" not in why.stdout + why.stderr
        (disk / "ballast").unlink()
        os.environ["FILL"] = ""
        again = command(tmp_path, "resume", "x")
    assert again.returncode == 0, again
    assert (tmp_path / "done").exists()


LOOP_COMMAND = (sys.executable, "loop.py")


@contextlib.contextmanager
def changed(environment: os._Environ[str], more: dict[str, str]) -> Iterator[None]:
    before = {word: environment.get(word) for word in more}
    environment.update(more)
    try:
        yield
    finally:
        for word, value in before.items():
            environment.pop(word, None) if value is None else environment.update({word: value})


def test_an_attempt_on_a_disk_without_inodes_is_refused_with_the_cause_and_resumes_later(
    nursery: Nursery, tmp_path: Path
) -> None:
    (tmp_path / "runs").mkdir()
    try:
        with small_disk(tmp_path / "runs", "160M", inodes=60) as disk:
            fill_inodes(disk)
            for path in list((disk / "many").iterdir())[:12]:
                path.unlink()  # enough for the attempt's own records, and for no more
            ended = nursery.run(LOOP, [], tmp_path, {"WAIT": "1"})
            assert ended.code != 0 and "no inodes left" in ended.output, ended.output
            make_room(disk)
            again = nursery.run(LOOP, [], tmp_path, {"WAIT": "1"})
            assert again.code == 0 and behind(again.output), again.output
    except Unavailable as reason:
        pytest.skip(str(reason))


FRAMEWORK = """
import os, torch
from pathlib import Path
from jackline.session.driver import Driver
from jackline.session.feeds.place import Place
from tests.places import fill_bytes

model = torch.nn.Linear(4, 1)
driver = Driver(name="x", save_every_steps=10, wait_for_disk_s=0.5)
first = ((driver.peek() and driver.newest_step) or 0) + 1
with driver:
    for step in range(first, 36):
        if step == 25 and os.environ.get("FILL"):
            fill_bytes(Path(os.environ["JACKLINE_RUNS"]))
        if driver.at_boundary(step, total=35):
            driver.save({"model": model}, {}, Place())
print("behind the block", flush=True)
"""


def test_a_framework_whose_last_step_is_not_saved_is_not_finished(
    nursery: Nursery, tmp_path: Path, disk: Path
) -> None:
    script = f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{FRAMEWORK}"
    ended = nursery.run(script, [], tmp_path, {**EVERY_SAVE, "FILL": "1"})
    assert ended.code == 75 and not behind(ended.output), ended.output
    assert "step 35 is not saved: the disk is full" in ended.output
    make_room(disk)
    again = nursery.run(script, [], tmp_path, {**EVERY_SAVE, "FILL": ""})
    assert again.code == 0 and behind(again.output), again.output
    assert (disk / "x" / "checkpoints" / "step-00000035").exists()  # the last step, whatever the cadence


BROKEN = """
import json, os, torch
import jackline
class Meter:
    def state_dict(self):
        if 25 <= run.step < int(os.environ["UNTIL"]): raise RuntimeError("this meter is broken")
        return {"count": 1}
    def load_state_dict(self, state): pass
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run = jackline.attach(model=model, optimizer=optimizer, meter=Meter(), name="x", save_every_steps=10, verify=False)
with run:
    for _ in run.steps(total=40):
        loss = model(torch.randn(2, 4)).square().mean()
        optimizer.zero_grad(); loss.backward(); optimizer.step()
print("behind the block", flush=True)
"""


@pytest.mark.parametrize("until", [40, 99])
def test_a_run_whose_saves_were_switched_off_by_an_error_is_finished_only_when_its_end_is_saved(
    until: int, nursery: Nursery, tmp_path: Path
) -> None:
    ended = nursery.run(BROKEN, [], tmp_path, {**EVERY_SAVE, "UNTIL": str(until)})
    assert "checkpoints are off: RuntimeError: this meter is broken" in ended.output
    assert ended.code == 0 and behind(ended.output), "an error inside Jackline does not stop the program"
    run = tmp_path / "runs" / "x"
    exit_file = json.loads((run / "attempts" / "001" / "exit.json").read_text())
    if until == 40:
        assert exit_file["cause"] == "finished" and (run / "checkpoints" / "step-00000040").exists()
        return
    assert (exit_file["cause"], exit_file["exit_code"]) == ("stopped", 75)
    broken = "RuntimeError: this meter is broken; the checkpoint of step 20"
    said = f"the last state is not saved: checkpoints are off: {broken}"
    assert said in ended.output and said in exit_file["text"]
    shown = command(tmp_path, "status", "x")
    assert "stopped" in shown.stdout and "finished" not in shown.stdout, shown.stdout


def test_a_program_whose_saves_were_switched_off_exits_with_75_after_all_of_its_own_code(tmp_path: Path) -> None:
    """It exited with 0 and "behind the block" was its last line: a script around it took the training for saved."""
    (tmp_path / "loop.py").write_text(
        "import atexit; atexit.register(lambda: print('its own handler', flush=True))\n" + BROKEN
    )
    env = {"JACKLINE_RUNS": str(tmp_path / "runs"), "XDG_STATE_HOME": str(tmp_path / "state"), "UNTIL": "99"}
    ended = subprocess.run(
        [sys.executable, "loop.py"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, **env, "OMP_NUM_THREADS": "1"},
        timeout=HANGS_S,
    )
    assert ended.returncode == 75, ended
    assert ended.stdout.splitlines() == ["behind the block", "its own handler"]
    *_, unfinished, code = ended.stderr.strip().replace("\n  ", " ").split("[jackline] ")
    assert unfinished.startswith("run 'x' is NOT finished: the last state is not saved: checkpoints are off: Runtime")
    assert code == "this program exits with code 75; started again, it resumes from there"


ENDING = """
import sys
from pathlib import Path
from jackline.rundir.layout import RunDir
from jackline.rundir.records.exit import ExitRecord, write_exit
from jackline.session.home import Home, exit_as_unsaved
run = RunDir(Path("runs") / "x")
for number in (1, 2):
    (run.path / "attempts" / f"00{number}").mkdir(parents=True)
say = lambda text: print(text, file=sys.stderr)
exit_as_unsaved(Home(run, run.attempt(1), False, False), "the last state is not saved", say)
"""


@pytest.mark.parametrize(
    ("end", "code", "is_said"),
    [
        ("", 75, True),
        ("sys.exit(0)", 75, True),
        ("raise ValueError('its own')", 1, True),
        ("write_exit(run.attempt(2), ExitRecord(cause='finished', exit_code=0))", 0, False),
        ("import os; os.fork() or sys.exit(0); sys.exit(os.WEXITSTATUS(os.wait()[1]))", 75, True),
    ],
    ids=["falls off its end", "exits", "crashes", "has saved it since", "forks"],
)
def test_the_exit_code_of_a_program_without_a_last_save(tmp_path: Path, end: str, code: int, is_said: bool) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", ENDING + end], capture_output=True, text=True, cwd=tmp_path, timeout=HANGS_S
    )
    assert ended.returncode == code, ended
    assert ended.stderr.count("run 'x' is NOT finished: the last state is not saved") == is_said
