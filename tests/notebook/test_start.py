"""What a cell means: words, names, errors; and all of it in plain Python."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from jackline import notebook
from jackline.errors import JacklineError, UsageError
from jackline.notebook.command import Ended, as_words, call, environment, read_error
from jackline.notebook.start import choose_folder, meant_by_recipe
from tests.shell import Shell, wait_for


def test_keywords_become_the_words_of_a_command_line() -> None:
    assert as_words({"lr": 3e-4, "quick": True, "full_eval": False, "data": Path("a b"), "mirror": None}) == [
        "--lr=0.0003",
        "--quick",
        "full_eval=false",
        "--data=a b",
    ]


def test_a_recipe_in_a_cell_is_the_run_that_the_command_line_knows(
    clean_environment: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from jackline.cli.commands import train as train_command
    from jackline.rundir.identity import default_name

    monkeypatch.chdir(tmp_path)
    typed = train_command.resolve([sys.executable, "-m", "jackline.trainer"], "demo", ("--quick", "lr=0.5"))
    name = default_name(["demo"], typed["identity"])
    meant, asked = meant_by_recipe("demo", as_words({"quick": True, "lr": 0.5, "restart": 3}))
    assert (meant.run.path, asked) == (clean_environment / name, ["--quick", "--lr=0.5", "--restart=3"])
    notebook.setup(save_to="saved")
    meant, asked = meant_by_recipe("demo", ["--quick", "lr=0.5"])
    assert (meant.run.name, asked[-1], meant.place) == (name, f"mirror={tmp_path / 'saved'}", str(tmp_path / "saved"))
    assert [word for word in meant.argv if "mirror" in word] == [f"mirror={tmp_path / 'saved'}"]  # once
    meant, asked = meant_by_recipe("demo", ["--quick", "lr=0.5", "mirror=other"])
    assert (meant.run.name, asked[-1], meant.place) == (name, "mirror=other", "other")


def test_a_new_run_takes_no_name_that_the_second_place_knows(tmp_path: Path) -> None:
    (tmp_path / "runs" / "demo").mkdir(parents=True)
    (tmp_path / "saved" / "demo-2").mkdir(parents=True)
    chosen = choose_folder(tmp_path / "runs", "demo", str(tmp_path / "saved"), is_new=True)
    assert chosen.name == "demo-3"
    assert choose_folder(tmp_path / "runs", "demo", None, is_new=False).name == "demo"


def test_a_second_place_that_cannot_be_read_is_an_error_and_never_a_start_from_nothing(
    tmp_path: Path, clean_environment: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    notebook.setup(save_to="saved")
    (tmp_path / "saved").rmdir()
    (tmp_path / "saved").symlink_to("saved")  # a folder that answers every question with an error
    with pytest.raises(UsageError) as caught:
        notebook.run(["sleep", "0"], name="nap")
    assert str(caught.value) == (
        f"error: {tmp_path / 'saved'} cannot be read: Too many levels of symbolic links\n"
        "hint: run the setup cell again; it mounts the place or says what is wrong with it"
    )
    assert not (clean_environment / "nap").exists()


def test_an_error_of_a_command_is_raised_as_it_was_written() -> None:
    lines = ["error: it does not fit", "       12 GiB wanted", "       3 GiB there", "hint: a smaller batch"]
    error = read_error(lines, 1, ["plan"])
    assert (str(error).splitlines(), type(error)) == (lines, JacklineError)
    assert type(read_error(lines, 2, ["plan"])) is UsageError
    silent = read_error([], 1, ["doctor"])
    assert isinstance(silent, Ended)
    assert str(silent) == "error: `jackline doctor` ended with code 1; what it found is above"
    with pytest.raises(UsageError, match="there is no command 'runn'"):
        call(["runn"])


def test_the_colours_of_a_cell_do_not_reach_the_log_of_a_run() -> None:
    assert environment({"FORCE_COLOR": "1", "CLICOLOR_FORCE": "1", "HOME": "/"}) == {"HOME": "/"}


@pytest.mark.zoo
def test_in_plain_python_it_starts_watches_and_explains_as_well(person: Shell) -> None:
    person.script("says.py", "print('hello from the run')\n")
    program = """
from jackline import notebook
run = notebook.run("python says.py", name="plain")
run.watch()
print(run.state)
notebook.why()
notebook.run("python -c 'raise SystemExit(3)'", name="bad").watch()
"""
    done = person.call(person.python("cells.py", program))
    assert done.code == 1
    assert "hello from the run\n" in done.out
    assert "\nfinished\n" in done.out
    assert "run 'plain' finished at " in done.out
    assert "jackline.errors.JacklineError: error: run 'bad' exited with code 3: " in done.err
    assert done.err.endswith("hint: run.why() tells more; running its cell again resumes from the last checkpoint\n")


SAVES = """
import pathlib, sys, time
print("begins with", sys.argv[1:], flush=True)
pathlib.Path("out").mkdir(exist_ok=True)
for step in range(1000000):
    pathlib.Path(f"out/step-{step:07d}.txt").write_text(str(step))
    time.sleep(0.5)
"""
OWN_SCRIPT = """
from jackline import notebook
notebook.setup(save_to="saved")
how = dict(checkpoints="out/step-*.txt", resume_arg="--resume {checkpoint}")
notebook.run("python saves.py", name="own", **how)
"""


@pytest.mark.zoo
def test_an_own_script_resumes_from_the_save_folder_after_the_machine_is_lost(person: Shell) -> None:
    person.script("saves.py", SAVES)
    cells = person.python("cells.py", OWN_SCRIPT)
    assert person.call(cells).code == 0
    wait_for(lambda: list((person.work / "out").glob("step-*1.txt")), "its second checkpoint")
    assert person.jackline("stop", "own").code == 0
    saved = person.work / "saved"
    wait_for(lambda: list(saved.glob("own/foreign/*/where.json")), "the upload")
    wait_for(lambda: not person.pids(), "everything to end")
    for folder in (person.runs, person.folder / "state", person.work / "out"):
        shutil.rmtree(folder)
    again = person.call(cells)
    assert again.code == 0, again
    assert f"[jackline] this machine has nothing of run 'own'; its records are back from {saved}\n" in again.out
    wait_for(lambda: "begins with ['--resume', " in person.run_dir("own").log(), "the checkpoint to be given to it")


def test_a_question_about_another_gpu_goes_to_jackline_plan_and_tries_nothing() -> None:
    with pytest.raises(UsageError) as caught:
        notebook.plan("demo", quick=True, gpu="T400")
    assert str(caught.value).startswith("error: there is no GPU 'T400' in the table")
