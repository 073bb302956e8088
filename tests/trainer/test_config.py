"""The config of a training: every way to set a value, where each came from, and every mistake named in full."""

from __future__ import annotations

import re
from dataclasses import asdict
from pathlib import Path

import pytest

from jackline.errors import UsageError
from jackline.rundir.layout import RunDir
from jackline.trainer.config import Resolved, TrainConfig, config_text, identity, resolve, resolve_words, save_config
from jackline.trainer.recipe import RECIPES
from jackline.trainer.report.settings_text import settings_text

OWN_RECIPE = """
from jackline.trainer.config import TrainConfig

def small():
    return TrainConfig(data="corpus/*.txt", lr=2e-4)

def wrong():
    return {"lr": 1}
"""


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    "words",
    [
        ["lr=3e-4", "max_steps=1e3", "recompute=yes"],
        ["--lr", "3e-4", "--max_steps", "1000", "--recompute"],
        ["--lr=0.0003", "--max-steps=1000", "--recompute", "true"],
        ["--learning_rate", "3e-4", "--max-steps", "1_000", "--recompute", "on"],
    ],
)
def test_every_writing_means_the_same(words: list[str]) -> None:
    config = resolve("demo", words).config
    assert (config.lr, config.max_steps, config.recompute) == (3e-4, 1000, True)


def test_a_file_has_numbers_where_yaml_has_words_and_the_command_line_goes_before_it(tmp_path: Path) -> None:
    path = write(tmp_path, "mine.yaml", "lr: 3e-4\ncompile: off\nmax-steps: 2e3\nseed: 7\ntime_limit: 1h30m\n")
    found = resolve_words("demo", ["seed=8", "--config", str(path)])
    config = found.config
    assert (config.lr, config.compile, config.max_steps, config.seed) == (3e-4, "off", 2000, 8)
    assert config.time_limit_s == 5400
    wanted = {"lr": str(path), "seed": "command line", "model": "recipe", "recipe": "command line"}
    assert {name: found.origins[name] for name in wanted} == wanted


def test_quick_is_tiny_says_so_and_gives_way_to_what_was_asked_for() -> None:
    found = resolve("demo", ["--quick", "--data", "my.txt", "max_steps=7", "warmup_steps=2"])
    assert (found.config.data, found.config.max_steps, found.config.model) == ("my.txt", 7, "nano")
    assert (found.origins["data"], found.origins["seq_len"]) == ("command line", "quick")


def test_quick_that_is_typed_goes_before_a_file_and_a_files_own_settings_before_its_own_quick(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "large.yaml",
        "seq_len: 512\nmax_steps: 9000\nlr: 1.0e-5\nmin_lr: 0.0\nsave_every_steps: 7\nseed: 3\n",
    )
    found = resolve("demo", ["--quick", "lr=2e-4"], [path])
    config = found.config
    assert (config.seq_len, config.max_steps, config.save_every_steps) == (64, 100, 20)
    assert (config.lr, config.seed) == (2e-4, 3), "what is typed goes before quick, and quick has no seed"
    assert [found.origins[name] for name in ("seq_len", "lr", "seed")] == ["quick", "command line", str(path)]
    path.write_text(path.read_text() + "quick: true\n")
    found = resolve("demo", [], [path])
    assert (found.config.seq_len, found.config.max_steps, found.config.model) == (512, 9000, "nano")


@pytest.mark.parametrize(("words", "warmup"), [(["max_steps=20"], 2), (["--quick", "max_steps=5"], 0)])
def test_a_short_trial_gets_a_short_warm_up_and_says_so(words: list[str], warmup: int) -> None:
    found = resolve("demo", words)
    assert (found.config.warmup_steps, found.origins["warmup_steps"]) == (warmup, "a tenth of max_steps")


def test_a_recipe_of_ones_own_is_a_function_in_a_file(tmp_path: Path) -> None:
    path = write(tmp_path, "my_recipe_1.py", OWN_RECIPE)
    found = resolve(f"{path}:small", ["batch_size=4"])
    assert (found.config.data, found.config.lr, found.config.batch_size) == ("corpus/*.txt", 2e-4, 4)
    assert found.config.recipe == f"{path}:small"


def test_the_saved_config_starts_the_same_again(tmp_path: Path) -> None:
    found = resolve("demo", ["lr=3e-4", "schedule=wsd", "--time-limit", "90m", "mirror=/mnt/x", "clip=0"])
    save_config(RunDir(tmp_path), found)
    again = resolve("demo", [], [tmp_path / "config.yaml"])
    assert again.config == found.config
    assert "lr: 0.0003                                  # command line" in config_text(found)


def test_how_a_run_is_watched_does_not_make_it_another_run() -> None:
    one, other = (resolve("demo", words).config for words in ([], ["--verbose", "time_limit=5m", "num_threads=3"]))
    assert identity(one) == identity(other)
    assert identity(one) != identity(resolve("demo", ["seed=1"]).config)


def test_show_lists_every_value_with_its_origin_and_what_follows_from_them() -> None:
    text = settings_text(resolve("demo", ["--quick", "lr=3e-4", "device=cpu"]))
    rows = {line.split("  ")[0].strip(): line for line in text.splitlines()}
    assert set(asdict(TrainConfig())) < set(rows)
    wide = f"{'lr':<18}  {'0.0003':<24}  command line    Highest learning rate of the schedule."
    assert rows["lr"] == wide
    assert re.split(r"  +", rows["seq_len"]) == ["seq_len", "64", "quick", "Length of a sequence. [tokens]"]
    assert re.split(r"  +", rows["beta2"]) == [
        "beta2",
        "0.95",
        "recipe",
        "Decay of the second moment; lion: of the first.",
    ]
    assert re.split(r"  +", rows["recompute"])[:3] == ["recompute", "false", "recipe"]
    headings = [line for line in text.splitlines() if line.endswith(":") and "  " not in line]
    wanted = "model, data, source files, length and batch, optimizer, fine-tuning, "
    wanted += "averaging and smoothing, compute, validation, checkpoints, run, on this machine"
    assert headings == [f"{group}:" for group in wanted.split(", ")]
    assert rows["-> batch"].endswith("chosen by plan") and "8 x 64 tokens" in rows["-> batch"]
    assert "8 (the whole batch: no GPU here)" in rows["-> micro-batch"]
    assert rows["-> accumulation"].split()[2] == "1"
    assert rows["-> precision"].split()[2] == "fp32"


KNOWN = "known settings: " + ", ".join(asdict(TrainConfig()))
MISTAKES = {
    "learning_rte=1": "error: unknown setting 'learning_rte' for recipe 'demo'\nhint: did you mean 'learning_rate'?",
    "batchsize=1": "error: unknown setting 'batchsize' for recipe 'demo'\nhint: did you mean 'batch_size'?",
    "zzz=1": f"error: unknown setting 'zzz' for recipe 'demo'\nhint: {KNOWN}",
    "big": "error: 'big' is not a setting of recipe 'demo'\nhint: write key=value or --key value",
    "--lr": "error: --lr needs a value",
    "--config": "error: --config needs a file\nhint: --config settings.yaml",
    "batch_size=many": "error: batch_size=many is not a whole number",
    "batch_size=1.5": "error: batch_size=1.5 is not a whole number",
    "lr=fast": "error: lr=fast is not a number",
    "lr=nan": "error: lr=nan is not a number",
    "recompute=maybe": "error: recompute=maybe is not true or false",
    "schedule=cosin": "error: schedule is one of cosine, constant, wsd, one-cycle, not 'cosin'\n"
    "hint: did you mean 'cosine'?",
    "model=xyz": "error: model is one of nano, tiny, small, medium, xl, not 'xyz'",
    "time_limit=soon": "error: 'soon' is not a duration\nhint: write 90, 90s, 15m, 1h30m or 2d",
    "max_cache_bytes=lots": "error: 'lots' is not a size\nhint: write 512, 300M, 20G or 1.5GiB",
    "recipe=other": "error: 'recipe' cannot be set\nhint: the recipe is the word behind train: demo",
    "batch_size=0": "error: batch_size=0 is too small\n"
    "       batch_size: Sequences in one optimizer step, however much memory there is.\n"
    "hint: it must be 1 or more",
    "eval_every=-1": "error: eval_every=-1 is too small\n"
    "       eval_every: Steps between validations; 0: none on the way.\n"
    "hint: it must be 0 or more",
    "dropout=1": "error: dropout=1.0 is too large\n       dropout: Share of activations set to zero while training.\n"
    "hint: it must be from 0 to below 1",
    "eval_share=1.5": "error: eval_share=1.5 is too large\n"
    "       eval_share: Share of the validation set that a validation on the way reads.\n"
    "hint: it must be from 0 to 1",
    "lr=0": "error: lr=0.0 is too small\n       lr: Highest learning rate of the schedule.\nhint: it must be above 0",
    "min_lr=1": "error: min_lr=1.0 is above lr=0.001\nhint: min_lr is the floor the schedule ends at",
    "warmup_steps=1000": "error: warmup_steps=1000 takes all of max_steps=1000\n"
    "hint: the learning rate would never come down; a tenth is usual",
    "micro_batch=64": "error: micro_batch=64 is above batch_size=16\n"
    "hint: batch_size is what one update sees; micro_batch is how much of it is in memory at a time",
    "data=": "error: recipe 'demo' names no data\nhint: --data SOURCE: a path, glob, http(s)://, hf://...",
    "vocab_size=50257": "error: vocab_size=50257 is not a multiple of 8\nhint: 0 takes the tokenizer's, rounded up",
}


@pytest.mark.parametrize("word", MISTAKES)
def test_a_mistake_on_the_command_line_is_named_in_full(word: str) -> None:
    with pytest.raises(UsageError) as caught:
        resolve_words("demo", [word])
    assert str(caught.value) == MISTAKES[word]


FILES = {
    "learning_rte: 1": "error: unknown setting 'learning_rte' for recipe 'demo', in {path}\n"
    "hint: did you mean 'learning_rate'?",
    "lr: [1, 2]": "error: lr in {path} is a list\nhint: write `lr: value`",
    "- lr": "error: {path} is not a list of settings\nhint: write one `key: value` a line",
    "lr: fast": "error: lr=fast is not a number",
}


@pytest.mark.parametrize("contents", FILES)
def test_a_mistake_in_a_file_is_named_in_full(contents: str, tmp_path: Path) -> None:
    path = write(tmp_path, "mine.yaml", contents)
    with pytest.raises(UsageError) as caught:
        resolve("demo", [], [path])
    assert str(caught.value) == FILES[contents].format(path=path)


def test_typed_steps_go_before_the_warm_up_of_a_file(tmp_path: Path) -> None:
    path = write(tmp_path, "long.yaml", "max_steps: 50000\nwarmup_steps: 2000\n")

    short = resolve("demo", ["max_steps=50"], [path])
    assert (short.config.warmup_steps, short.origins["warmup_steps"]) == (5, "a tenth of max_steps")
    assert resolve("demo", [], [path]).config.warmup_steps == 2000
    with pytest.raises(UsageError):
        resolve("demo", ["max_steps=50", "warmup_steps=2000"], [path])


@pytest.mark.parametrize("contents", ["lr: 1e-3\nseed: 1\nlr: 2e-3\n", "lr: 1e-3\nlearning_rate: 2e-3\n"])
def test_a_setting_that_a_file_has_twice_is_an_error(tmp_path: Path, contents: str) -> None:
    path = write(tmp_path, "twice.yaml", contents)
    with pytest.raises(UsageError) as caught:
        resolve("demo", [], [path])
    assert str(caught.value) == f"error: lr is set twice in {path}\nhint: keep one of the two lines"


def test_a_file_that_is_not_yaml_or_not_there_is_named(tmp_path: Path) -> None:
    path = write(tmp_path, "mine.yaml", "lr: 'open\n")
    with pytest.raises(UsageError) as caught:
        resolve("demo", [], [path])
    assert str(caught.value).startswith(f"error: {path} is not YAML: while scanning a quoted scalar")
    with pytest.raises(UsageError) as caught:
        resolve("demo", [], [tmp_path / "none.yaml"])
    assert str(caught.value) == f"error: cannot read {tmp_path / 'none.yaml'}: No such file or directory"


def test_a_recipe_that_cannot_be_trained_is_named(tmp_path: Path) -> None:
    path = write(tmp_path, "my_recipe_2.py", OWN_RECIPE)
    known = ", ".join(RECIPES)
    mistakes = {
        "dmo": f"error: there is no recipe 'dmo'\n       known recipes: {known}\nhint: did you mean 'demo'?",
        str(path): f"error: {path} has no recipe: no subclass of jackline.Recipe and no function recipe()\n"
        f"hint: your own script: jackline run -- python {path}; a recipe to start from: jackline init recipe",
        f"{path}:none": f"error: {path} has no function 'none' that could be trained\n"
        "hint: it takes nothing and returns a jackline.trainer.config.TrainConfig",
        f"{path}:wrong": f"error: {path}:wrong returned dict, not a TrainConfig\n"
        "hint: from jackline.trainer.config import TrainConfig; return TrainConfig(data=..., lr=3e-4)",
        "none.py:f": "error: there is no file 'none.py'\nhint: jackline train path/to/file.py",
    }
    for target, text in mistakes.items():
        with pytest.raises(UsageError) as caught:
            resolve(target)
        assert str(caught.value) == text


def test_a_config_without_origins_is_one_of_a_program() -> None:
    assert "lr: 0.0006" in config_text(Resolved(TrainConfig(data="x")))
