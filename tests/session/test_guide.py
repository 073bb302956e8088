"""The guide to own loops: every program, command and setting in it is real."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from jackline.session.settings import DEFAULT_VERDICTS, VERDICTS, Settings
from tests.deadline import HANGS_S
from tests.session.guide import TEXT, before_and_after, find_block
from tests.session.nursery import ROOT, Nursery

KILLED = "run.log(loss=loss); import os, signal; "
KILLED += 'os.environ.get("DIE") == str(run.step) and os.kill(os.getpid(), signal.SIGKILL)'
# Before 120 too: where the save of step 60 is not done by then, on a busy machine, the next one is of a later step.
SETTLED = (
    "while run.step in (119, 122) and run._attached.saver.engine.is_busy: run._attached.saver.engine._link.pump(0.05)"
)
# A kill before the loss of step 121 is on the disk leaves nothing to compare the next attempt's first one with.
WRITTEN = "while run.step == 122 and '\"step\":121' not in run._attached.home.run.metrics(0).read_text(): "
WRITTEN += "run._attached.scalars.send(float('inf'))"


def test_the_ordinary_loop_runs_and_ours_resumes_after_a_kill_as_the_guide_shows(
    nursery: Nursery, tmp_path: Path
) -> None:
    before, after = before_and_after()
    assert "jackline" not in before
    assert nursery.run(before, [], tmp_path).code == 0
    program = after.replace("loader=loader)", "loader=loader, save_every_steps=60)")
    program = program.replace("run.log(loss=loss)", f"{KILLED}\n            {SETTLED}\n            {WRITTEN}")
    program += "print('final', [tensor.double().sum().item().hex() for tensor in model.state_dict().values()])\n"
    assert nursery.run(program, [], tmp_path, {"DIE": "125"}).code == -9
    again = nursery.run(program, [], tmp_path)
    (tmp_path / "whole").mkdir()
    whole = nursery.run(program, [], tmp_path / "whole")
    assert (again.code, whole.code) == (0, 0), again.output
    assert again.output.splitlines()[-1] == whole.output.splitlines()[-1]
    assert shape_of(find_block("", r"\[jackline\] resuming")) in shape_of(again.output)


def shape_of(text: str) -> str:
    """Sizes, times and losses differ from machine to machine; words, steps and positions do not."""
    return re.sub(r"\b[\d.]+( KiB| s\b| at step)", r"N\1", text)


@pytest.mark.slow
def test_every_command_of_the_guide_works(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(before_and_after()[1])
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    env["PYTHONPATH"] = str(ROOT / "src")
    commands = find_block("", "jackline run").splitlines()
    outputs = []
    for command in commands:
        done = subprocess.run(
            command, shell=True, cwd=tmp_path, env=env, text=True, capture_output=True, timeout=HANGS_S
        )
        assert done.returncode == 0, f"{command}: {done.stderr}"
        outputs.append(done.stdout + done.stderr)
    assert "finished" in outputs[1]
    assert "00000315" in outputs[2]
    assert "resuming from step-00000315" in outputs[3]
    assert "[jackline]" not in outputs[4]
    assert (tmp_path / "model.pt").exists()


def test_the_page_that_the_guide_refers_to_lists_every_setting() -> None:
    (link,) = re.findall(r"\]\((\.\./reference/[\w.]+)#jacklineattach\)", TEXT)
    page = (ROOT / "docs" / "guides" / link).read_text(encoding="utf-8")
    section = page[page.index("## `jackline.attach`\n") : page.index("## Settings of your own\n")]
    named = re.findall(r"^\| `(\w+)`", section, re.MULTILINE)
    assert sorted(named) == sorted(field.name for field in dataclasses.fields(Settings))
    assert not Settings().overlap  # a promise that nobody has given
    assert Settings().keep_last == 3 and "keeps three [checkpoints]" in TEXT


def test_the_verdicts_of_the_guide_are_those_of_the_program(nursery: Nursery, tmp_path: Path) -> None:
    words = ", ".join(f'`"{verdict}"`' for verdict in VERDICTS[:-1]) + f' or `"{VERDICTS[-1]}"`'
    assert f"`on_change` is {words}, for all or by kind." in TEXT
    assert {kind for kind, verdict in DEFAULT_VERDICTS.items() if verdict == "refuse"} == {"data", "arguments"}
    program = before_and_after()[1]
    program = program.replace("with jackline", "jackline").partition("jackline.attach(")[0]
    ended = nursery.run(program + find_block("python", r"jackline\.attach"), [], tmp_path)
    assert ended.code == 0, ended.output


def test_the_examples_the_guide_names_exist() -> None:
    named = re.findall(r"`(examples/\w+\.py)`", TEXT)
    assert len(named) == 3
    assert all((ROOT / name).exists() for name in named)


def test_the_accumulation_of_the_guide_resumes_after_a_stop(nursery: Nursery, tmp_path: Path) -> None:
    """In the middle of an epoch, where a count that starts again would shift the steps."""
    head = before_and_after()[0].partition("for epoch")[0].replace("2000, 16", "400, 16")
    stop = "import os, signal; os.environ.get('DIE') and run.step == 5 and os.kill(os.getpid(), signal.SIGTERM)"
    loop = find_block("python", "# accumulation").replace("run.log(loss=loss)", f"run.log(loss=loss); {stop}")
    program = head + "import jackline\n" + loop
    program += "print('final', run.values, [p.double().sum().item().hex() for p in model.parameters()])\n"
    (tmp_path / "whole").mkdir()
    whole = nursery.run(program, [], tmp_path / "whole")
    stopped = nursery.run(program, [], tmp_path, {"DIE": "1"})
    again = nursery.run(program, [], tmp_path, {"DIE": ""})
    assert (whole.code, stopped.code, again.code) == (0, 75, 0), whole.output + again.output
    assert again.output.splitlines()[-1] == whole.output.splitlines()[-1]
