"""Every flag and config field that the recipe's forerunner had: it works, or it is refused with its replacement."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jackline.errors import EXIT_USAGE, UsageError
from jackline.recipes.slimpajama.recipe import SLIMPAJAMA, SlimpajamaConfig
from jackline.trainer.config import Resolved, config_text, resolve, resolve_words
from tests.data.corpora import make_texts, write_zst
from tests.deadline import HANGS_S
from tests.session.nursery import Nursery

SCRIPT = Path(__file__).with_name("streaming.py")

# As typed -> what it becomes.
WORKING: dict[str, dict[str, Any]] = {
    "": {
        "seq_len": 512,
        "tokens_per_chunk": 4096,
        "batch_size": 8,
        "max_steps": 153_076_172,
        "data": SLIMPAJAMA,
        "tokenizer": "gpt2",
        "verbose": False,
    },
    "--gpu 0": {"gpu": 0, "device": "auto"},
    "--max-chunks 7": {"max_steps": 7},
    "--tokens-per-chunk 8192": {"tokens_per_chunk": 8192, "batch_size": 16, "max_steps": 76_538_086},
    "--tokens-per-chunk 1000": {"batch_size": 2, "seq_len": 512},
    "--max-seq-length 256": {"seq_len": 256, "batch_size": 16},
    "--test": {
        "max_steps": 5,
        "tokens_per_chunk": 1024,
        "seq_len": 256,
        "batch_size": 4,
        "data": SLIMPAJAMA,
        "warmup_steps": 0,
    },
    "--test --max-chunks 2": {"max_steps": 2, "tokens_per_chunk": 1024, "seq_len": 256},
    "--verbose": {"verbose": True},
    "--verbose false": {"verbose": False},
    "--pretrained-checkpoint some/step-5": {"pretrained_checkpoint": "some/step-5"},
    "--vocab 50264": {"vocab_size": 50264},
    "--max_seq_length 256 --batch_size 16": {"batch_size": 16},
    "--learning_rate 0.001 --min_lr 0": {"lr": 0.001},
    "--num_epochs 2": {"epochs": 2},
    "--max_chunks 100": {"max_steps": 100, "warmup_steps": 10},
    "--log_interval 10": {"log_every": 10},
    "--steps 10000": {"max_steps": 10000},
    "--checkpoint-interval 2000": {"save_every_steps": 2000},
    "--data python-stdlib": {"data": "python-stdlib"},
}
CHECKPOINTS = "saving takes milliseconds and is what a run resumes from; --keep-last 1 keeps the fewest"
PICTURES = "curves are drawn as the run goes: tensorboard --logdir RUN/tb; all numbers are in metrics-0.jsonl"
STREAM = "documents are always streamed; --data SOURCE says from where"
TOKENIZER = "--tokenizer gpt2, bytes, or the path of a tokenizer.json"
NO_VALIDATION = (
    "{}: a stream that is read once has no validation set",
    "the loss of a chunk is of text not seen before; recipe 'demo' with --data SOURCE validates",
)
# As typed -> (error, hint).
REFUSED: dict[str, tuple[str, str]] = {
    "--gpu 1": ("gpu=1 is not chosen here", "CUDA_VISIBLE_DEVICES=1 jackline train slimpajama"),
    "--no-checkpoint": ("'no_checkpoint' is not a setting here", CHECKPOINTS),
    "--save_checkpoint false": ("'save_checkpoint' is not a setting here", CHECKPOINTS),
    "--embedding_dim 768": (
        "'embedding_dim' is not a setting here",
        "--model_size nano, tiny, small or medium decides width and depth",
    ),
    "--temperature 1": ("'temperature' is not a setting here", "nothing is generated while training"),
    "--dataset_name cerebras/SlimPajama-627B": (
        "'dataset_name' is not a setting here",
        "--data hf://datasets/OWNER/NAME/**/*.jsonl.zst, http(s)://..., a folder, a file or a glob",
    ),
    "--dataset_split train": ("'dataset_split' is not a setting here", f"the path names it: --data '{SLIMPAJAMA}'"),
    "--dataset_streaming true": ("'dataset_streaming' is not a setting here", STREAM),
    "--streaming true": ("'streaming' is not a setting here", STREAM),
    "--batch_size 1": (
        "batch_size=1 is not what a chunk of 4,096 tokens holds: 8 sequences of 512",
        "--tokens_per_chunk 512 makes a step of that batch",
    ),
    "--log_dir logs": (
        "'log_dir' is not a setting here",
        "everything of a run lies in its folder: --runs-dir DIR",
    ),
    "--statistics_interval 100": (
        "'statistics_interval' is not a setting here",
        "every line has them; --log_interval N asks for more lines",
    ),
    "--eval_interval 500": (NO_VALIDATION[0].format("eval_every=500"), NO_VALIDATION[1]),
    "--val_fraction 0.1": (NO_VALIDATION[0].format("val_fraction=0.1"), NO_VALIDATION[1]),
    "--viz_dir viz": ("'viz_dir' is not a setting here", PICTURES),
    "--viz-interval 50": ("'viz_interval' is not a setting here", PICTURES),
    "--viz_interval_chunks 5": ("'viz_interval_chunks' is not a setting here", PICTURES),
    "--save_samples_every 1": ("'save_samples_every' is not a setting here", PICTURES),
    "--tokenizer_dir tok": ("'tokenizer_dir' is not a setting here", TOKENIZER),
    "--tokenizer_model tok.model": ("'tokenizer_model' is not a setting here", TOKENIZER),
    "--intensive": (
        "'intensive' is not a setting here",
        "there is no stage of its own for embeddings: they are learned with the rest",
    ),
    "--max_cache_bytes 1G": ("max_cache_bytes: a stream has no cache", "recipe 'demo' with --data SOURCE has one"),
    "--tokens-per-chunk 0": (
        "tokens_per_chunk=0 is too small\n"
        "       tokens_per_chunk: Tokens of one step, rounded up to whole sequences.",
        "it must be 1 or more",
    ),
    "--tokens-per-chunks 1": (
        "unknown setting 'tokens_per_chunks' for recipe 'slimpajama'",
        "did you mean 'tokens_per_chunk'?",
    ),
}


@pytest.mark.parametrize("typed", WORKING)
def test_a_flag_works(typed: str) -> None:
    config = resolve_words("slimpajama", typed.split()).config
    assert {name: getattr(config, name) for name in WORKING[typed]} == WORKING[typed]


@pytest.mark.parametrize("typed", REFUSED)
def test_a_flag_is_refused_with_its_replacement(typed: str) -> None:
    with pytest.raises(UsageError) as caught:
        resolve_words("slimpajama", typed.split())
    error, hint = REFUSED[typed]
    assert str(caught.value) == f"error: {error}\nhint: {hint}"
    assert caught.value.exit_code == EXIT_USAGE == 2


def test_every_flag_at_once_really_trains_and_its_weights_begin_another_run(nursery: Nursery, tmp_path: Path) -> None:
    write_zst(tmp_path / "data" / "chunk1" / "example_train_0.jsonl.zst", make_texts(40))
    typed = "--gpu 0 --max-chunks 3 --tokens-per-chunk 128 --max-seq-length 32 --verbose --learning_rate 1e-3"
    typed += " --min_lr 0 --num_epochs 1 --log_interval 10 --checkpoint-interval 2 --vocab 264 --batch_size 4"
    words = [*typed.split(), f"--data={tmp_path / 'data'}"]
    first = nursery.run(SCRIPT, [str(tmp_path / "runs" / "first"), *words], tmp_path)
    assert first.code == 0, first.output
    assert "[data] one chunk is one step: 128 tokens, 4 sequences of 32; documents are packed" in first.output
    assert "[data] sample 1 of example_train_0.jsonl.zst: " in first.output
    assert "finished at step 3 of 3" in first.output
    last_loss = float(re.findall(r"chunk 3: .*; loss ([\d.]+),", first.output)[0])

    start = ["--pretrained-checkpoint", str(tmp_path / "runs" / "first" / "checkpoints" / "step-00000003")]
    second = nursery.run(SCRIPT, [str(tmp_path / "runs" / "second"), *words, *start], tmp_path)
    assert second.code == 0, second.output
    assert float(re.findall(r"chunk 1: .*; loss ([\d.]+),", second.output)[0]) < last_loss

    start = ["--pretrained-checkpoint", str(tmp_path / "none")]
    third = nursery.run(SCRIPT, [str(tmp_path / "runs" / "third"), *words, *start], tmp_path)
    assert third.code == EXIT_USAGE
    assert third.output.splitlines()[-1] == (
        "hint: give a folder checkpoints/step-N of a run, or its model.safetensors"
    )


def test_the_command_line_refuses_with_code_2_before_anything_is_started(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "from jackline.cli.main import main; main()", "train", "slimpajama"]
    done = subprocess.run(
        [*command, "--checkpoint_dir", str(tmp_path / "runs"), "--no-checkpoint"],
        capture_output=True,
        text=True,
        timeout=HANGS_S,
        env={**os.environ, "XDG_STATE_HOME": str(tmp_path)},
    )
    assert done.returncode == EXIT_USAGE
    assert done.stderr == f"error: 'no_checkpoint' is not a setting here\nhint: {CHECKPOINTS}\n"
    assert not (tmp_path / "runs").exists()


def test_the_config_of_a_run_starts_the_same_again(tmp_path: Path) -> None:
    for words in (["--test"], ["--quick"], ["--tokens-per-chunk=1000"], []):
        before = resolve("slimpajama", words).config
        path = tmp_path / "config.yaml"
        path.write_text(config_text(Resolved(before)))
        assert resolve("slimpajama", [], [path]).config == before


def test_how_long_it_will_take_is_known_for_the_data_set_and_with_a_limit_only() -> None:
    known = {"": True, "--max-chunks=9": True, "--data=x": False, "--data=x --test": True, "--quick": True}
    for words, is_known in known.items():
        config = resolve("slimpajama", words.split()).config
        assert isinstance(config, SlimpajamaConfig)
        assert config.has_known_end is is_known, words


def test_every_flag_the_guide_names_is_known_here() -> None:
    guide = (Path(__file__).parents[3] / "docs" / "recipes" / "slimpajama.md").read_text(encoding="utf-8")
    named = {word.replace("-", "_") for word in re.findall(r"`--([a-z][a-z_-]+)", guide)}
    typed = " ".join([*WORKING, *REFUSED])
    known = {word.replace("-", "_") for word in re.findall(r"--([a-z][a-z_-]+)", typed)}
    assert named - known - {"checkpoint_dir", "model_size"} == set()


def test_what_follows_from_a_flag_does_not_claim_to_be_the_recipes_own() -> None:
    origins = resolve("slimpajama", ["--test", "--max-chunks=2"]).origins
    assert {origins[name] for name in ("seq_len", "tokens_per_chunk", "batch_size")} == {"follows from others"}
    assert (origins["max_steps"], origins["lr"]) == ("command line", "recipe")
