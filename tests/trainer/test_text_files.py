"""A recipe on text as people have it: one file, another encoding, few steps; and what it says about them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from jackline.cli.commands.train import runs_of_other_length
from jackline.errors import JacklineError, UsageError
from jackline.rundir.layout import RunDir
from jackline.rundir.run_file import RunFile, write_run_file
from jackline.trainer.config import Resolved, identity, resolve, save_config
from jackline.trainer.corpus import open_corpus, settle_split
from jackline.trainer.report.console import Console
from jackline.trainer.validate.evaluate import count_windows
from tests.data.corpora import make_texts


def book(path: Path, num_lines: int, codec: str = "utf-8") -> Path:
    path.write_bytes("".join(f"{line}\n\n" for line in make_texts(num_lines)).encode(codec, "ignore"))
    return path


@pytest.mark.parametrize("recipe", ["demo", "sparsae"])
def test_one_text_file_has_a_validation_set(recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = book(tmp_path / "wiki.txt", 4500)
    assert 1_000_000 < path.stat().st_size < 1_400_000
    words = [f"data={path}", f"data_dir={tmp_path}", "tokenizer=bytes"]
    config = settle_split(resolve(recipe, words), None).config
    assert config.split_by == "lines"
    with Console() as console:
        corpus = open_corpus(config, console)
        assert corpus.validation is not None
        assert count_windows(corpus.validation, config.seq_len) > 10
        corpus.close()
    assert "parts of it are kept for validation, spread over the file" in capsys.readouterr().out


def test_a_file_too_small_to_be_divided_is_refused_with_the_size_it_needs(tmp_path: Path) -> None:
    path = book(tmp_path / "small.txt", 8)
    config = resolve("demo", [f"data={path}", f"data_dir={tmp_path}"]).config
    with Console() as console, pytest.raises(UsageError) as caught:
        open_corpus(config, console)
    lines = str(caught.value).splitlines()
    assert lines[0].startswith(f"error: {path} has 1.8 KiB: ")
    assert lines[0].endswith("too small for validation, val_fraction=0.02")
    assert lines[2].startswith("hint: about 150 KiB are enough")


def test_an_encoding_is_named_on_the_screen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = book(tmp_path / "latin.txt", 3000, "cp1252")
    with Console() as console:
        corpus = open_corpus(resolve("demo", [f"data={path}", f"data_dir={tmp_path}"]).config, console)
        corpus.close()
    assert "not UTF-8: Windows-1252 (Latin-1) (1 file)" in capsys.readouterr().out


def test_a_run_from_before_files_were_divided_resumes_undivided(tmp_path: Path) -> None:
    path = book(tmp_path / "wiki.txt", 100)
    run = RunDir(tmp_path / "run")
    run.path.mkdir()
    resolved = resolve("demo", [f"data={path}"])
    assert settle_split(resolved, run).config.split_by == "lines"
    save_config(run, resolved)
    kept = [line for line in run.config_file.read_text().splitlines() if not line.startswith("split_by")]
    run.config_file.write_text("\n".join(kept) + "\n")
    assert settle_split(resolved, run).config.split_by == "document"
    save_config(run, Resolved(replace(resolved.config, split_by="lines"), resolved.origins))
    assert settle_split(resolved, run).config.split_by == "lines"


def test_settings_that_came_later_do_not_rename_runs() -> None:
    config = resolve("demo", []).config
    assert {"split_by", "encoding", "max_damaged"}.isdisjoint(identity(config))
    assert identity(replace(config, encoding="cp1252"))["encoding"] == "cp1252"


def test_a_recipe_of_ones_own_may_give_few_steps_and_no_warm_up(tmp_path: Path) -> None:
    """It failed with 'warmup_steps=100 takes all of max_steps=30'."""
    path = tmp_path / "mine.py"
    path.write_text(
        "from jackline.trainer.config import TrainConfig\n"
        "def mine():\n    return TrainConfig(data='python-stdlib', max_steps=30)\n"
    )
    found = resolve(f"{path}:mine", [])
    assert (found.config.max_steps, found.config.warmup_steps) == (30, 3)
    assert found.origins["warmup_steps"] == "a tenth of max_steps"


def test_more_steps_without_a_name_say_which_run_there_is_and_how_to_continue_it(tmp_path: Path) -> None:
    settings = {**json.loads(json.dumps(identity(resolve("demo", []).config))), "cwd": "/somewhere"}
    run = RunDir(tmp_path / "demo-1")
    run.path.mkdir()
    write_run_file(run, RunFile("demo-1", "run", ("demo",), "/", settings, {}, 1.0, "here", "boot"))
    longer = identity(resolve("demo", ["max_steps=2000"]).config)
    lines = runs_of_other_length("demo", longer, tmp_path)
    assert lines[0].startswith("run 'demo-1' has these settings with another length (max_steps=1000, now 2000)")
    assert "--name demo-1 --continue-with-changes" in lines[1]
    assert runs_of_other_length("demo", identity(resolve("demo", ["lr=2e-3"]).config), tmp_path) == []


@pytest.mark.parametrize(
    ("names", "files"), [(["a.txt"], "1 file of 0 B matches"), (["a.txt", "b.txt"], "2 files of 0 B match")]
)
def test_empty_data_is_refused_before_anything_is_built(tmp_path: Path, names: list[str], files: str) -> None:
    for name in names:
        (tmp_path / name).write_bytes(b"")
    data = f"{tmp_path}/*.txt"
    config = resolve("demo", [f"data={data}", f"data_dir={tmp_path / 'cache'}", "val_fraction=0"]).config
    with Console() as console, pytest.raises(JacklineError) as found:
        open_corpus(config, console)
    assert str(found.value) == (
        f"error: the data of recipe 'demo' cannot be loaded: {data}\n"
        f"       it is empty: {files} {data}\n"
        "       there: was the download or the export complete?\n"
        "hint: --data SOURCE trains on other data: a path, glob, http(s)://, hf://, or python-stdlib"
    )
    assert not (tmp_path / "cache").exists()
