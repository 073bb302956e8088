"""What the first users of these trainings asked for and no other test shows: first words, waits, known names."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from jackline.trainer.config import resolve
from jackline.trainer.corpus import open_corpus
from jackline.trainer.report.console import Console
from jackline.trainer.validate.evaluate import count_windows, read_windows, subset_size
from tests.data.corpora import jsonl_bytes, make_texts
from tests.data.far_end import FarEnd, serving
from tests.deadline import HANGS_S
from tests.shell import Shell

FAKE_TORCH = "import sys; print('torch by', sys.executable, flush=True); raise SystemExit(9)\n"


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    found = Shell(tmp_path)
    yield found
    found.close()


def test_the_first_words_come_before_torch_and_from_the_interpreter_that_was_typed(shell: Shell) -> None:
    """Whatever an import does, the command and what is being imported were said before it."""
    shell.script("torch.py", FAKE_TORCH)
    words = ["train", "demo", "--quick", "--name", "early", "--restart", "0", "--when-done", "echo over"]
    done = shell.jackline(*words, env={"PYTHONPATH": str(shell.work)})
    assert done.code == 9, done
    lines = done.out.splitlines()
    assert lines[0] == "[start] $ jackline train demo --quick --name early --restart 0 --when-done 'echo over'"
    assert re.fullmatch(rf"\[start\] process \d+, Python [\d.]+, run {shell.runs / 'early'}", lines[1])
    told = [line for line in lines if not line.endswith(" so far")]  # signs of life, on a slow machine
    assert told[-2:] == ["[start] importing torch, usually 2 to 20 s", f"torch by {sys.executable}"]


def test_a_training_imports_neither_datasets_nor_transformers() -> None:
    code = "import sys, jackline.trainer.loop; print({'torch', 'datasets', 'transformers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=HANGS_S)
    assert (done.stdout, done.returncode) == ("{'torch'}\n", 0), done.stderr


def test_a_phase_that_takes_long_says_so_again_and_again(capsys: pytest.CaptureFixture[str]) -> None:
    """Two signs of life: one could be the phase's own first word."""
    told = ""
    deadline_s = time.monotonic() + HANGS_S
    with Console() as console, console.phase("data", "training data"):
        console.now("training data: tokenise 12.0 MiB of 48.0 MiB (25 %), 12 s to go")
        while told.count(" so far\n") < 2 and time.monotonic() < deadline_s:
            time.sleep(0.05)
            told += capsys.readouterr().out
    lines = told.splitlines()
    assert lines[0] == "[data] training data"
    sign = r"\[data\] \.\.\. training data: tokenise 12\.0 MiB of 48\.0 MiB \(25 %\), 12 s to go, ([\d.]+) s so far"
    first, second = (re.fullmatch(sign, line) for line in lines[1:3])
    assert first and second, told
    assert 0 < float(first[1]) < float(second[1])


def test_a_source_that_makes_the_training_wait_is_named_while_it_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(FarEnd({"a.jsonl": jsonl_bytes(make_texts(50))})) as far_end, Console() as console:
        far_end.faults = ["503"] * 3
        words = [f"data={far_end.address('a.jsonl')}", "text_column=text", "tokenizer=bytes", "val_fraction=0"]
        corpus = open_corpus(resolve("demo", [*words, f"data_dir={tmp_path}"]).config, console)
        corpus.close()
        host = far_end.url.removeprefix("http://")
    told = capsys.readouterr().out
    assert told.startswith("[data] training data\n")
    assert re.search(
        rf"^\[data\] \.\.\. training data: .*{host}: HTTP 503 Service Unavailable; trying again in .* s so far$",
        told,
        re.M,
    ), told


def test_a_quick_validation_is_a_tenth_and_always_the_same_windows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text").mkdir()
    for number, text in enumerate(make_texts(60)):
        (tmp_path / "text" / f"{number:03d}.txt").write_text(text)
    words = [f"data={tmp_path / 'text'}", "tokenizer=bytes", "val_fraction=0.3", f"data_dir={tmp_path / 'data'}"]
    config = resolve("demo", [*words, "seq_len=16"]).config
    with Console() as console:
        corpus = open_corpus(config, console)
    assert corpus.validation is not None
    num_windows = count_windows(corpus.validation, 16)
    num_quick = subset_size(num_windows, config.eval_share)
    assert num_quick == -(-num_windows // 10) > 1
    said = capsys.readouterr().out  # documents, tokens and windows of both sets
    counted = r"\[data\] {} data: (\d+) documents? read, [\d,]+ tokens, ([\d,]+) windows of 16"
    train, held_out = (re.search(counted.format(name), said) for name in ("training", "validation"))
    assert train and held_out, said
    assert held_out[2].replace(",", "") == str(num_windows)
    assert int(train[1]) + int(held_out[1]) <= 60

    def read(batch_size: int, count: int) -> list[list[int]]:
        assert corpus.validation is not None
        return np.concatenate(list(read_windows(corpus.validation, 16, batch_size, count))).tolist()

    quick, whole = read(4, num_quick), read(7, num_windows)
    assert (len(quick), len(whole)) == (num_quick, num_windows)
    assert read(3, num_quick) == quick == whole[:num_quick]
    corpus.close()


def test_the_flags_of_the_notebook_on_affinity_are_known() -> None:
    words = "--data pairs.jsonl --epochs 50 --batch_size 8 --save_every_n_batches 100 --max_grad_norm 1 --lr 1e-3"
    config = resolve("demo", words.split()).config
    assert (config.data, config.epochs, config.batch_size, config.save_every_steps) == ("pairs.jsonl", 50, 8, 100)
    assert (config.clip, config.lr) == (1.0, 1e-3)
