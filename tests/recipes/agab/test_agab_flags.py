"""Every flag that the recipe's forerunners had: it works, or it is refused with exit code 2 and what to use."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jackline.errors import EXIT_USAGE, UsageError
from jackline.memory.plan.choose import plan
from jackline.memory.plan.gpus import find_gpu
from jackline.recipes.agab.recipe import AgabConfig, candidates
from jackline.trainer.config import Resolved, config_text, resolve, resolve_words
from tests.recipes.agab.data.planted import write_small
from tests.shell import Shell

DATA = "--data pairs.csv"
# As typed -> what it becomes; never the value it has without the flag.
WORKING: dict[str, dict[str, Any]] = {
    "--epochs 7": {"epochs": 7},
    "--batch_size 8": {"batch_size": 8},
    "--lr 4e-3": {"lr": 4e-3},
    "--weight_decay .05": {"weight_decay": 0.05},
    "--dropout .1": {"dropout": 0.1},
    "--focal_gamma 1": {"focal_gamma": 1.0},
    "--save_every_n_batches 100": {"save_every_steps": 100, "save_every_s": 0.0},
    "--validation_frequency 2": {"full_eval_every": 2},
    "--use_bfloat16 True": {"precision": "bf16"},
    "--use_bfloat16 False --precision bf16": {"precision": "bf16"},
    "--use_early_stopping True": {"early_stopping": True},
    "--use_early_stopping True --use_early_stopping False --epochs 3": {"early_stopping": False, "epochs": 3},
    "--early_stopping_patience 3": {"early_stopping_patience": 3},
    "--early_stopping_min_delta 1e-3": {"early_stopping_min_delta": 1e-3},
    "--max_grad_norm 0.5": {"clip": 0.5},
    "--warmup_epochs 5": {"warmup_epochs": 5.0},
    "--split random": {"split": "random"},
    "--antibody_encoder igt5": {"antibody_encoder": "igt5"},
    "--antigen_encoder esm2-8m": {"antigen_encoder": "esm2-8m"},
    "--antigen_encoder Someone/model@abc": {"antigen_encoder": "Someone/model@abc"},
    "--affinity_type Kd": {"affinity_type": "Kd"},
    "--stratified True": {"stratified": True},
    "--stratified": {"stratified": True},
    "--max_steps 100": {"max_steps": 100, "epochs": 0},
    "--max_steps 100 --epochs 2": {"max_steps": 100, "epochs": 2},
    "--pkd_min -3 --pkd_max 12.5": {"pkd_min": -3.0, "pkd_max": 12.5},
    "--cache_dir there": {"data_dir": "there"},
    "--learning_rate 1e-4": {"lr": 1e-4},
}
WORKERS = "embeddings are computed once and lie in memory or a map: nothing is loaded by workers"
ONCE = "each sequence is encoded once, in batches of like lengths, by frozen encoders; --antibody_encoder chooses"
SAME = "the same command again resumes from the newest good checkpoint; so does `jackline resume`"
REFUSED = {
    "--resume": SAME,
    "--resume outputs/batch_checkpoint_latest.pth": SAME,
    "--accumulation_steps 3": "--batch_size is what one update sees: write batch_size x accumulation_steps there; "
    "--micro_batch N cuts it into slices that fit",
    "--num_workers 4": WORKERS,
    "--prefetch_factor 4": WORKERS,
    "--use_compile False": "the head is too small to gain from a compiler; a step takes a few milliseconds",
    "--use_fused_optimizer True": "AdamW is the fused one on every device",
    "--use_quantization True": ONCE,
    "--use_checkpointing True": "the encoders are frozen, and the head's activations take a few megabytes: "
    "there is nothing to recompute",
    "--use_bucketing True": ONCE,
    "--label_smoothing .05": "labels are numbers, not classes; --focal_gamma 0 weighs large errors less, "
    "--weight_decay and --dropout regularise",
    "--l1_lambda 0": "--weight_decay and --dropout regularise",
}
PLACE = "--output_dir"  # is about the run and not about the training: seen in a real one, below
THEIRS = (
    "data output_dir epochs batch_size lr weight_decay dropout focal_gamma save_every_n_batches resume "
    "accumulation_steps num_workers prefetch_factor validation_frequency use_bfloat16 use_compile "
    "use_fused_optimizer use_quantization use_checkpointing use_bucketing use_early_stopping early_stopping_patience "
    "early_stopping_min_delta max_grad_norm label_smoothing l1_lambda warmup_epochs"
)
WRONG = {
    "--epochs 0": "epochs=0 has no end",
    "--focal_gamma -1": "focal_gamma=-1.0 is too small",
    "--full_eval_every 0": "full_eval_every=0 is too small",
    "--pkd_min 9 --pkd_max 8": "pkd_min=9.0 is not below pkd_max=8.0",
    "--warmup_epochs 50": "warmup_epochs=50 takes all of epochs=50",
    "--antigen_encoder esm3": "there is no encoder 'esm3'",
    "--antibody_encoder ./not/there": "there is no encoder './not/there'",
    "--split rows": "split is one of antigen, random, not 'rows'",
    "--precision half": "precision is one of auto, fp32, bf16, fp16, bf16-weights, not 'half'",
    "--seq_len 512": "'seq_len' means nothing to recipe 'agab'",
    "--tokenizer gpt2": "'tokenizer' means nothing to recipe 'agab'",
    "--focal_gama 2": "unknown setting 'focal_gama' for recipe 'agab'",
    "--dropout 1": "dropout=1.0 is too large",
}


def resolved(text: str) -> Resolved:
    return resolve_words("agab", [*DATA.split(), *text.split()])


def test_no_flag_is_left_out() -> None:
    known = " ".join([*WORKING, *REFUSED, PLACE, DATA])
    assert {f"--{name}" for name in THEIRS.split()} <= set(re.findall(r"--\w+", known))


@pytest.mark.parametrize("typed", WORKING)
def test_a_flag_reaches_the_setting_it_names(typed: str) -> None:
    found, plain = resolved(typed), AgabConfig()
    assert {name: getattr(found.config, name) for name in WORKING[typed]} == WORKING[typed]
    assert any(getattr(plain, name) != value for name, value in WORKING[typed].items())


@pytest.mark.parametrize("typed", REFUSED)
def test_a_flag_that_is_gone_names_what_to_use(typed: str) -> None:
    with pytest.raises(UsageError) as caught:
        resolved(typed)
    name = typed.split()[0].removeprefix("--")
    assert (caught.value.message, caught.value.hint) == (f"'{name}' is not a setting here", REFUSED[typed])
    assert caught.value.exit_code == EXIT_USAGE == 2


def test_all_flags_of_an_old_command_line_that_are_gone_are_named_at_once() -> None:
    with pytest.raises(UsageError) as caught:
        resolved("--use_quantization True --epochs 5 --num_workers 4 --resume last.pth --num_workers 2")
    assert caught.value.message == "3 of these are not settings here"
    assert caught.value.detail == (f"use_quantization: {ONCE}", f"num_workers: {WORKERS}", f"resume: {SAME}")
    assert caught.value.hint == "leave them out"


@pytest.mark.parametrize("typed", WRONG)
def test_a_wrong_value_is_named(typed: str) -> None:
    with pytest.raises(UsageError) as caught:
        resolved(typed)
    assert caught.value.message == WRONG[typed]


def test_the_defaults_are_the_seeds_but_for_the_batch_and_the_interval() -> None:
    config = resolved("").config
    assert isinstance(config, AgabConfig)
    assert (config.epochs, config.lr, config.weight_decay, config.dropout) == (50, 1e-3, 0.01, 0.3)
    assert (config.focal_gamma, config.seed, config.schedule, config.min_lr) == (2.0, 42, "cosine", 0.0)
    assert (config.batch_size, config.save_every_s, config.precision) == (256, 60.0, "fp32")


def test_without_data_it_says_how_to_give_them() -> None:
    with pytest.raises(UsageError, match=r"^error: recipe 'agab' names no data\nhint: --data SOURCE: "):
        resolve("agab", [])


def test_a_saved_config_starts_the_same_again_and_has_nothing_of_text_in_it(tmp_path: Path) -> None:
    made = resolved("--batch_size 8 --use_bfloat16 True")
    path = tmp_path / "config.yaml"
    path.write_text(config_text(made))
    assert "seq_len" not in path.read_text() and "tokenizer" not in path.read_text()
    assert resolve("agab", [], [path]).config == made.config


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    found = Shell(tmp_path)
    found.env.update(JACKLINE_DATA=str(tmp_path / "data"), OMP_NUM_THREADS="1")
    yield found
    found.close()


def skipped_steps(folder: Path) -> set[int]:
    events = [json.loads(line) for line in (folder / "events-0.jsonl").read_text().splitlines()]
    skipped = [event for event in events if event["event"] == "checkpoint_skipped"]
    return {step for event in skipped for step in range(event.get("first_step", event["step"]), event["step"] + 1)}


def test_the_seeds_own_command_trains_saves_every_n_batches_and_status_tells_how_far(shell: Shell) -> None:
    write_small(shell.work / "agab_phase2_full.csv")
    command = (
        "train agab --data agab_phase2_full.csv --epochs 1 --batch_size 8 --save_every_n_batches 20 --output_dir DIR"
    )
    done = shell.jackline(*command.split(), "--name", "seed", "--keep_last", "20")
    assert done.code == 0, done
    folder = shell.work / "DIR" / "seed"
    steps = sorted(int(path.name[5:]) for path in (folder / "checkpoints").glob("step-*"))
    total = int(re.search(r"\[plan\] batch 8 of [\d,]+ training pairs, fp32; ([\d,]+) steps", done.out)[1])  # type: ignore[index]
    assert total == 41
    # A save is skipped, with a word, while the one before is still being written: on a slow disk that may be 40.
    assert {20, 40, total} <= set(steps) | skipped_steps(folder)
    assert {20, 40} & set(steps) and total in steps
    assert json.loads((folder / "test_metrics.json").read_bytes())["num_pairs"] == 81
    told = shell.jackline("status", "seed", "--runs-dir", "DIR")
    assert re.search(r"^  epoch: {6}1 of 1, batch 41 of 41 \(100 %\)$", told.out, re.M), told
    assert re.search(r"^  best: {7}val_spearman -?0\.\d{4} at step \d+$", told.out, re.M), told
    assert re.search(rf"^  saved: {{6}}\S.* ago, at step {total}$", told.out, re.M), told


@pytest.mark.slow
def test_a_first_try_needs_no_data_and_says_that_they_are_made_up(shell: Shell) -> None:
    done = shell.jackline("train", "agab", "--quick", "--max_steps", "9", "--name", "first")
    assert done.code == 0, done
    assert "[start] quick: tiny settings, to see that everything works; data: planted\n" in done.out
    assert "'planted': 2,000 made-up pairs with a rule in them; no such protein exists\n" in done.out
    assert (shell.runs / "first" / "test_predictions.csv").exists()


@pytest.mark.slow
def test_doctor_tries_the_head_on_the_table(shell: Shell) -> None:
    write_small(shell.work / "small.csv")
    done = shell.jackline("doctor", "agab", "--data", "small.csv")
    assert done.code == 0, done
    assert re.search(r"^ok +data +small\.csv: \d+ pairs to train on$", done.out, re.M), done
    assert re.search(r"^ok +step +loss [\d.]+, gradient norm \S+; all 16 weights get a gradient; ", done.out, re.M)
    assert re.search(r"^ok +saving +35\.0 MiB saved, loaded and equal in every bit", done.out, re.M)
    assert re.search(r"^ok +time +\d+ steps of about .* pairs/s\): ", done.out, re.M), done


def test_the_memory_of_the_head_is_planned_without_data() -> None:
    gpu = find_gpu("T4")
    (found,) = candidates(gpu, ["--batch_size", "64"])
    shown = {"inputs": 2304, "parameters": 3_053_057, "batch_size": 64, "precision": "fp32"}
    assert found.shown == shown
    assert plan(found.job, gpu).fit == "fits"
