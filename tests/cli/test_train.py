"""`jackline train` as a person types it: one road with `jackline run`, the same rules of identity, nothing silent."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from jackline.cli.commands.train import folder_settings
from jackline.trainer.config import TrainConfig
from jackline.trainer.recipe import RECIPES, load_recipe
from jackline.trainer.report.settings_text import help_text
from tests.data.corpora import make_texts
from tests.deadline import HANGS_S
from tests.shell import Shell, wait_for
from tests.zoo import JACKLINE

TINY = ["seq_len=16", "batch_size=4", "warmup_steps=2", "val_fraction=0.2", "full_eval=no", "eval_every=4"]


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    found = Shell(tmp_path)
    found.env.update(JACKLINE_DATA=str(tmp_path / "data"), OMP_NUM_THREADS="1")
    (found.work / "text").mkdir()
    for number, text in enumerate(make_texts(60)):
        (found.work / "text" / f"{number:03d}.txt").write_text(text)
    yield found
    found.close()


def train(*words: str) -> list[str]:
    return ["train", "demo", "--quick", "--data", "text", *TINY, *words]


def test_a_quick_training_says_what_it_does_in_every_phase_and_is_a_run_like_any_other(shell: Shell) -> None:
    done = shell.jackline(*train("max_steps=6", "--name", "first"), env={"COLAB_RELEASE_TAG": "1"})
    assert done.code == 0, done
    typed = shlex.join(train("max_steps=6", "--name", "first"))
    assert done.out.startswith(f"[start] $ jackline {typed}\n")  # with the run's own options
    assert "[start] quick: tiny settings, to see that everything works; data: text\n" in done.out
    assert "[start] this is Colab: without --mirror everything here is lost when the machine is taken" in done.out
    phases = [tag for tag in dict.fromkeys(re.findall(r"^\[(\w+)\]", done.out, re.M)) if tag != "jackline"]
    assert phases == ["start", "data", "model", "plan", "rehearsal", "train", "eval", "end"], done
    assert "[model] nano: 4 x 256, 4 heads, context 16, 3,245,568 parameters, head tied to" in done.out
    assert re.search(r"^\[train\] step 6/6  loss \d.*  mem ", done.out, re.M)
    assert re.search(r"^\[rehearsal\] fits: .*; a step takes about .*, all 6 about ", done.out, re.M)
    assert f"[train] curves: tensorboard --logdir {shell.runs / 'first' / 'tb'} --port 6006\n" in done.out
    config = (shell.runs / "first" / "config.yaml").read_text()
    assert re.search(r"^seq_len: 16 +# command line$", config, re.M)
    assert re.search(r"^model: nano +# quick$", config, re.M)
    again = shell.jackline(*train("max_steps=6", "--name", "first"))
    assert again.code == 2 and "this command has finished already, as run 'first'" in again.err
    other = shell.jackline(*train("max_steps=6", "--name", "first", "seed=1"))
    assert other.code == 2
    assert other.err == (
        "error: run 'first' was started with another command\n"
        "       seed: 0 -> 1\n"
        "hint: --new starts another run, --continue-with-changes continues this one\n"
    )


def test_a_training_that_is_killed_resumes_when_the_same_is_typed_again(shell: Shell) -> None:
    words = train("max_steps=100000", "save_every_steps=5", "eval_every=0", "--name", "killed", "--detach")
    assert shell.jackline(*words).code == 0
    folder = shell.runs / "killed"
    wait_for(lambda: (folder / "checkpoints" / "step-00000005").exists(), "a checkpoint")
    os.kill(shell.run_dir("killed").child_pid(), signal.SIGKILL)
    wait_for(lambda: (folder / "attempts" / "001" / "exit.json").exists(), "its end")
    live = shell.start(*[word for word in words if word != "--detach"])
    live.wait_for("resuming from step-")
    live.wait_for("[train] step ")
    assert shell.jackline("stop", "killed").code == 0
    assert live.wait() == 75
    assert "[end] next      jackline resume killed" in live.text("out")


def test_an_own_recipe_is_trained_and_what_it_prints_does_no_harm(shell: Shell) -> None:
    script = shell.script(
        "mine.py",
        "import atexit, sys\n"
        "from jackline.trainer.config import TrainConfig\n"
        "print('hello from mine')\n"
        "atexit.register(lambda: print('torch', *(name in sys.modules for name in ('torch', 'torch._dynamo'))))\n"
        "def recipe():\n"
        "    return TrainConfig(model='nano', data='text', tokenizer='bytes', max_steps=3, warmup_steps=1)\n",
    )
    done = shell.jackline("train", f"{script}:recipe", *TINY, "--name", "mine", "warmup_steps=1")
    assert done.code == 0, done
    assert "[end] end       finished at step 3 of 3" in done.out
    assert "torch True False\n" in done.out  # what compiles nothing does not wait for the compiler's import


def test_what_cannot_be_meant_starts_nothing(shell: Shell) -> None:
    nothing = shell.jackline("train")
    assert nothing.code == 2
    assert nothing.err == "error: missing recipe\nhint: jackline train demo --quick; recipes are listed above\n"
    assert [line.split()[0] for line in nothing.out.splitlines()] == list(RECIPES)
    wrong = shell.jackline("train", "demo", "--learning_rte", "1")
    assert wrong.code == 2
    assert wrong.err == (
        "error: unknown setting 'learning_rte' for recipe 'demo'\nhint: did you mean 'learning_rate'?\n"
    )
    shown = shell.jackline("train", "demo", "--show", "--max_steps", "3e2")
    assert shown.code == 0
    assert re.search(r"^max_steps +300 +command line +Optimizer steps of the whole training\.$", shown.out, re.M)
    listed = shell.jackline("train", "demo", "--help_settings")
    assert (listed.code, listed.err) == (0, "")
    assert listed.out == help_text("demo", load_recipe("demo", TrainConfig)) + "\n"
    both = shell.jackline("train", "demo", "--help-settings", "lr=3")
    assert (both.code, both.out) == (2, "")
    assert both.err == (
        "error: --help-settings lists the recipe's own settings and takes none\n"
        "hint: jackline train demo --show lr=3 prints the values that follow from these\n"
    )
    assert not shell.runs.exists()


def test_data_that_cannot_be_had_end_it_once_and_for_all(shell: Shell) -> None:
    done = shell.jackline("train", "demo", "--data", "nowhere/*.txt", "--name", "none")
    assert done.code == 1, done
    assert "error: the data of recipe 'demo' cannot be loaded: nowhere/*.txt\n" in done.out
    # Told once, by the program itself; what it cannot know stands below it.
    assert "error: " not in done.err and "hint: " not in done.err
    assert re.search(
        r"^\[jackline\] exited because of the error above; it ran for .*; peak memory .*$", done.err, re.M
    ), done.err
    assert "not restarting: the data of recipe 'demo' cannot be loaded: nowhere/*.txt\n" in done.err
    assert [path.name for path in (shell.runs / "none" / "attempts").iterdir()] == ["001"]


@pytest.mark.parametrize(
    "words",
    [("train", "demo", "--show"), ("train", "demo", "--help-settings"), ("plan", "demo", "--gpu", "T4")],
    ids=["show", "help-settings", "plan"],
)
@pytest.mark.parametrize("is_unbuffered", [False, True])
def test_a_reader_that_has_seen_enough_gets_no_traceback(
    shell: Shell, words: tuple[str, ...], is_unbuffered: bool
) -> None:
    reader, writer = os.pipe()
    os.close(reader)  # as `| head -1` does once it has its line
    try:
        done = subprocess.run(
            [*JACKLINE, *words],
            cwd=shell.work,
            env={**shell.env, "PYTHONUNBUFFERED": "1" if is_unbuffered else ""},
            stdin=subprocess.DEVNULL,
            stdout=writer,
            stderr=subprocess.PIPE,
            timeout=HANGS_S,
        )
    finally:
        os.close(writer)
    talk = [
        line
        for line in done.stderr.decode().splitlines()
        if not line.startswith(("[jackline] tracing on the meta", "[jackline] trace "))
    ]
    assert (done.returncode, talk) == (0, [])


def test_a_setting_that_is_a_path_from_here_binds_the_run_to_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "a.txt").write_text("text")
    (tmp_path / "own.py").write_text("")
    here = {"cwd": str(tmp_path), "files_in": str(tmp_path)}
    assert folder_settings({"data": "corpus/*.txt", "lr": 0.1}) == here
    assert folder_settings({"recipe": "own.py:recipe"}) == here
    assert folder_settings({"data": ["hf://datasets/x/**/*.parquet", "corpus"]}) == here
    elsewhere = {"data": str(tmp_path / "corpus/*.txt"), "recipe": "demo", "model": "", "mirror": "s3://x/y"}
    assert folder_settings(elsewhere) == {"cwd": str(tmp_path)}
