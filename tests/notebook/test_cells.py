"""Cells as a person runs them: the run outlives the cell and the kernel, and is never started twice."""

from __future__ import annotations

import io
import json
import re
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from jackline.rundir.process_id import host_name
from tests.notebook.kernel import Cell, Kernel
from tests.shell import Shell, is_running, wait_for

pytestmark = pytest.mark.zoo

COUNTS_UNTIL_GO = """
import os, time
number = 0
while not os.path.exists("go"):
    number += 1
    print(f"step {number}/100000", flush=True)
    time.sleep(0.02)
print("continued")
"""
CELL = """
from jackline import notebook
run = notebook.run(["python", "count.py"], name="counting")
run.watch()
"""


@pytest.fixture
def kernel(person: Shell, open_kernel: Callable[[], Kernel]) -> Kernel:
    person.script("count.py", COUNTS_UNTIL_GO)
    return open_kernel()


def shows(cell: Cell, text: str) -> Callable[[], bool]:
    return lambda: text in cell.text


def test_a_stopped_cell_and_a_restarted_kernel_leave_the_run_alive_and_the_same_cell_attaches_to_it_again(
    person: Shell, kernel: Kernel
) -> None:
    first = kernel.start(CELL)
    kernel.wait(first, lambda: "step " in first.text, "lines of the run")
    kernel.wait(first, lambda: len(first.blocks) >= 3, "the block to be replaced")
    assert not first.is_idle, "the cell must stay busy while the run continues"
    kernel.interrupt()
    kernel.wait(first, lambda: first.is_idle, "the cell to end")
    assert first.error == []
    assert first.printed.endswith(
        "[jackline] watching run 'counting'; stopping this cell or restarting the kernel does not stop it\n"
        "[jackline] the cell was stopped; run 'counting' continues\n"
        "[jackline] run the cell again to watch it; `run.stop()` or `!jackline stop counting` ends it\n"
    )
    # However long it is watched, there is one block and not a line for every step.
    assert first.num_displays == 1
    assert all(len(block.splitlines()) < 30 for block in first.blocks)
    # Each state of it is HTML too, without widgets and scripts.
    assert len(first.pages) == len(first.blocks)
    assert all('<div class="jackline"' in page and "<script" not in page for page in first.pages)
    pid = person.run_dir("counting").child_pid()
    assert is_running(pid)

    kernel.restart()
    assert is_running(pid)
    second = kernel.start(CELL)
    kernel.wait(second, shows(second, "counting: alive, attempt 1"), "the same run")
    assert f"[jackline] run 'counting' is alive already: {person.runs / 'counting'}\n" in second.printed
    (person.work / "go").touch()
    kernel.wait(second, lambda: second.is_idle, "the cell to end")
    assert second.printed.endswith("[jackline] run 'counting' has finished\n")
    assert "continued" in second.blocks[-1].splitlines()
    assert [path.name for path in (person.runs / "counting" / "attempts").iterdir()] == ["001"]

    third = kernel.run(CELL)
    assert "this command has finished already, as run 'counting'" in third.printed
    assert "[jackline] in a cell --new is new=True\n" in third.printed
    assert third.error == []


def test_errors_are_our_own_text_and_a_death_fails_the_cell(person: Shell, kernel: Kernel) -> None:
    begin = kernel.run("from jackline import notebook")
    assert begin.error == []
    wrong = kernel.run("notebook.train('demo', 'quick', learning_rte=1)")
    assert wrong.error == [
        "error: 'quick' is not a setting of recipe 'demo'",
        "hint: write key=value or --key value",
    ]
    misspelt = kernel.run("notebook.train('demo', learning_rte=1)")
    assert misspelt.error == [
        "error: unknown setting 'learning_rte' for recipe 'demo'",
        "hint: did you mean 'learning_rate'?",
    ]
    gone = kernel.run("notebook.run('no-such-program --x')")
    assert gone.error == [
        "error: there is no command 'no-such-program'",
        "hint: check the spelling and the active environment",
    ]
    nobody = kernel.run("notebook.watch('nobody')")
    assert nobody.error == [
        f"error: there is no run 'nobody' in {person.runs}",
        "hint: `jackline runs` lists the runs that can be found",
    ]
    assert not person.runs.exists()
    person.script("dies.py", "print('before'); raise RuntimeError('the end')\n")
    died = kernel.run("run = notebook.run('python dies.py', name='dying'); run.watch()")
    assert died.error[0].startswith("error: run 'dying' crashed: ")
    assert "RuntimeError: the end" in "\n".join(died.error)
    assert died.error[-1] == ("hint: run.why() tells more; running its cell again resumes from the last checkpoint")
    assert "before" in died.blocks[-1]
    why = kernel.run("run.why()")
    assert why.error == [] and "RuntimeError: the end" in why.printed
    page = kernel.run("path = notebook.report(run); print(path.read_text().count('Post-mortem'))")
    assert page.error == [] and page.num_displays == 1
    assert page.printed == "[jackline] the report of run 'dying' is in dying-report.html\n1\n"


SETUP_AND_TRAIN = """
from jackline import notebook
notebook.setup(save_to="saved")
settings = dict(seq_len=16, batch_size=4, max_steps=100000, save_every_steps=10, eval_every=0, rehearse=False)
run = notebook.train("demo", quick=True, name="lost", **settings)
"""


def test_after_the_machine_is_lost_the_same_cells_go_on_from_the_save_folder(
    person: Shell, open_kernel: Callable[[], Kernel]
) -> None:
    kernel = open_kernel()
    first = kernel.run(SETUP_AND_TRAIN)
    assert first.error == [], first.text
    run, saved = person.runs / "lost", person.work / "saved"
    wait_for(lambda: newest(run) >= 10, "a checkpoint")
    stopped = kernel.run("run.stop()")
    assert stopped.printed.endswith("[jackline] run 'lost' has ended; `jackline resume lost` continues it\n")
    kernel.close()
    # The upload continues after the end: which checkpoint is the newest there is known when its process is gone.
    wait_for(lambda: not person.pids(), "everything to end, the upload too")
    before, step = logged_steps(run), newest(saved / "lost")
    assert step >= 10

    make_strange(saved / "lost")
    shutil.rmtree(person.runs)
    shutil.rmtree(person.folder / "state")
    kernel = open_kernel()
    second = kernel.run(SETUP_AND_TRAIN)
    assert second.error == [], second.text
    back = f"[jackline] this machine has nothing of run 'lost'; its records are back from {saved}\n"
    assert back in second.printed
    assert f"[jackline] run 'lost' started (attempt 2): {run}\n" in second.printed
    wait_for(lambda: f"resuming from step-{step:08d}" in person.run_dir("lost").log(), "the checkpoint to be used")
    wait_for(lambda: logged_steps(run)[-1] > step, "further steps")
    assert "changed since it was saved" not in person.run_dir("lost").log()
    assert logged_steps(run)[: len(before) // 2] == before[: len(before) // 2], "the numbers from before are kept"
    beside = kernel.run("notebook.plan('demo', quick=True, name='lost', **settings)")
    assert beside.printed == "[jackline] run 'lost' is alive: nothing is tried beside it, run.watch() shows it\n"
    assert kernel.run("run.stop()").error == []
    assert kernel.run("print(run.state)").printed == "stopped\n"


def make_strange(saved: Path) -> None:
    """The records as a machine with another name leaves them when it is taken away in the middle."""
    for path in saved.glob("run-*.tar.gz"):
        with tarfile.open(path) as archive:
            files = {entry.name: archive.extractfile(entry) for entry in archive}
            texts = {name: file.read() for name, file in files.items() if file and not name.endswith("exit.json")}
        assert any(f'"{host_name()}"'.encode() in text for text in texts.values())
        with tarfile.open(path, "w:gz") as archive:
            for name, text in texts.items():
                data = text.replace(f'"{host_name()}"'.encode(), b'"another-machine"')
                entry = tarfile.TarInfo(name)
                entry.size = len(data)
                archive.addfile(entry, io.BytesIO(data))


def newest(folder: Path) -> int:
    """The step of the newest whole checkpoint of a run, here or where it was uploaded to."""
    whole = [path.parent.name for path in folder.glob("checkpoints/*/manifest.json")]
    return max((int(re.findall(r"step-(\d+)", name)[0]) for name in whole), default=-1)


def logged_steps(run: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (run / "metrics-0.jsonl").read_text().splitlines()]
