"""Every flag the sparse trainer's first users knew: it does what its name says, or exit code 2 names what to use."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from jackline.errors import UsageError
from jackline.recipes.sparsae.recipe import SparsaeConfig
from tests.data.corpora import make_texts
from tests.shell import Shell

# flag, value typed, our setting, and how --show prints it; never the value it has without the flag.
WORKING = [
    ("--model_size", "medium", "model", "medium"),
    ("--batch_size", "6", "batch_size", "6"),
    ("--seq_len", "128", "seq_len", "128"),
    ("--max_steps", "500", "max_steps", "500"),
    ("--lr", "1e-3", "lr", "0.001"),
    ("--weight_decay", "0.05", "weight_decay", "0.05"),
    ("--max_train_examples", "777", "max_train_examples", "777"),
    ("--max_val_examples", "77", "max_val_examples", "77"),
    ("--num_workers", "0", "num_threads", "0"),
    ("--sparsity", "0.9", "sparsity", "0.9"),
    ("--lambda_", "5", "num_mutants", "5"),
    ("--mask_opt_every", "70", "mask_opt_every", "70"),
    ("--checkpoint_interval", "100", "save_every_steps", "100"),
    ("--eval_interval", "20", "eval_every", "20"),
    ("--log_interval", "5", "log_every", "5"),
]
REFUSED = [
    (
        ["--resume_from", "checkpoints/checkpoint_step_9000.pt"],
        "error: 'resume_from' is not a setting here\n"
        "hint: the same command again resumes from the newest good checkpoint; so does `jackline resume`\n",
    ),
    (
        ["--use_synthetic"],
        "error: 'use_synthetic' is not a setting here\n"
        "hint: nothing is substituted silently; --data python-stdlib is real text on every machine\n",
    ),
]
PLACE = "--checkpoint_dir"  # is about the run and not about the training: seen in a real one, below
THEIRS = (
    "model_size batch_size seq_len max_steps lr weight_decay max_train_examples max_val_examples num_workers "
    "use_synthetic sparsity lambda_ mask_opt_every checkpoint_dir checkpoint_interval resume_from eval_interval "
    "log_interval"
)
# The seed's own quick test, with every other working flag behind it; windows and texts are small to be quick.
QUICK_TEST = (
    "train sparsae --model_size tiny --batch_size 2 --max_steps 20 --sparsity 0.8 --checkpoint_dir DIR "
    "--checkpoint_interval 10 --eval_interval 10"
)
REST = (
    "--seq_len 16 --lr 3e-4 --weight_decay 0.1 --max_train_examples 40 --max_val_examples 9 --num_workers 0 "
    "--lambda_ 2 --mask_opt_every 10 --log_interval 4 --data text --tokenizer bytes --name quick"
)
PLAN = r"^\[plan\] batch 2 .*, 0 loader threads, fp32; 20 steps of 32 tokens, 640 in all$"


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    found = Shell(tmp_path)
    found.env.update(JACKLINE_DATA=str(tmp_path / "data"), OMP_NUM_THREADS="1")
    yield found
    found.close()


def test_no_flag_is_left_out() -> None:
    flags = [flag for flag, *_ in WORKING] + [words[0] for words, _ in REFUSED] + [PLACE]
    assert sorted(flags) == sorted(f"--{name}" for name in THEIRS.split())


@pytest.mark.parametrize(("flag", "value", "setting", "shown"), WORKING)
def test_a_flag_reaches_the_setting_it_names(flag: str, value: str, setting: str, shown: str, shell: Shell) -> None:
    done = shell.jackline("train", "sparsae", flag, value, "--show")
    assert done.code == 0, done
    assert re.search(rf"^{setting} +{re.escape(shown)} +command line  ", done.out, re.M), done
    assert shown != str(getattr(SparsaeConfig(), setting))
    assert not shell.runs.exists()


@pytest.mark.parametrize(("words", "text"), REFUSED)
def test_a_flag_that_is_gone_names_what_to_use_and_starts_nothing(words: list[str], text: str, shell: Shell) -> None:
    done = shell.jackline("train", "sparsae", *words)
    assert (done.code, done.out, done.err) == (2, "", text)
    assert not shell.runs.exists()


@pytest.mark.slow
def test_the_seeds_quick_test_saves_at_10_and_20_in_the_folder_it_names(shell: Shell) -> None:
    (shell.work / "text").mkdir()
    for number, text in enumerate(make_texts(60)):
        (shell.work / "text" / f"{number:03d}.txt").write_text(text)
    done = shell.jackline(*QUICK_TEST.split(), *REST.split())
    assert done.code == 0, done
    folder = shell.work / "DIR" / "quick"
    assert {"step-00000010", "step-00000020"} <= {path.name for path in (folder / "checkpoints").glob("step-*")}
    assert [int(step) for step in re.findall(r"^\[eval\] step (\d+): val_loss ", done.out, re.M)] == [10, 20]
    windows = int(re.findall(r"^\[data\] validation data: .* (\d+) windows of 16$", done.out, re.M)[0])
    quick = f"[eval] quick validation, {math.ceil(windows / 10)} of {windows} windows"  # a tenth
    assert done.out.count(quick) >= 2, done  # signs of life repeat it
    assert f"[eval] full validation, {windows} of {windows} windows" in done.out
    assert {"4", "8", "12", "16", "20"} <= set(re.findall(r"^\[train\] step (\d+)/20 ", done.out, re.M))
    assert re.search(r"^\[start\] importing torch.*\n(.*so far\n)*\[start\] device CPU, .*, torch \d", done.out, re.M)
    assert "[model] tiny: 6 x 384, 6 heads, context 16, 10,851,329 parameters, head not tied\n" in done.out
    assert re.search(PLAN, done.out, re.M), done
    records = [json.loads(line) for line in (folder / "masks.jsonl").read_text().splitlines()]
    assert [record["update"] for record in records] == [0, 0, 0, 1, 1, 1]  # what there was, and two mutants of it
    assert "[end] end       finished at step 20 of 20" in done.out


def test_a_vocabulary_is_taken_as_it_is_for_the_seeds_true_counts() -> None:
    assert SparsaeConfig(vocab_size=50_257).vocab_size == 50_257
    with pytest.raises(UsageError) as refused:
        SparsaeConfig(vocab_size=-1)
    assert str(refused.value) == (
        "error: vocab_size=-1 is too small\n"
        "       vocab_size: Rows of the embedding; 0: the tokenizer's.\n"
        "hint: it must be 0 or more"
    )
