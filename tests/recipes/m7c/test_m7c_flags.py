"""Every flag and variable the sparse-attention trainer's first users knew: it works, or it is refused by name."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jackline.errors import EXIT_USAGE, UsageError
from jackline.recipes.m7c.recipe import FINEWEB_EDU, OLD_ENVIRONMENT, M7cConfig
from jackline.trainer.__main__ import first_screen
from jackline.trainer.config import Resolved, config_text, identity, resolve, resolve_words
from tests.shell import Shell

ROOT = Path(__file__).parents[3]
# Section by section, as the forerunner's help had them.
THEIRS = (
    "dataset save ddp resume loader-timeout fwe-report-docs synthetic-on-fail local-path steps seq-len batch-size "
    "accum-batches no-gc"
)
# As typed -> what it becomes.
WORKING: dict[str, dict[str, Any]] = {
    "": {
        "model": "125m",
        "data": FINEWEB_EDU,
        "tokenizer": "gpt2",
        "seq_len": 1024,
        "batch_size": 16,
        "max_steps": 50_000,
        "lr": 2e-4,
        "warmup_steps": 2000,
        "schedule": "cosine",
        "clip": 1.0,
        "weight_decay": 0.01,
        "seed": 1337,
        "recompute": False,
    },
    "--dataset fineweb_edu": {"data": FINEWEB_EDU},
    "--dataset fineweb_edu_local --local-path some/shards": {"data": "some/shards"},
    "--local-path some/shards": {"data": "some/shards"},
    "--data mine/*.parquet": {"data": "mine/*.parquet", "dataset": ""},
    "--ddp -1": {"ddp": -1},
    "--ddp 0": {"ddp": 0},
    "--ddp 1": {"ddp": 1},
    "--steps 300": {"max_steps": 300, "warmup_steps": 30},
    "--seq-len 2048": {"seq_len": 2048},
    "--batch-size 2": {"batch_size": 2},
    "--batch-size 2 --accum-batches 8": {"batch_size": 16, "accum_batches": 0},
    "--accum-batches 4": {"batch_size": 4},
    "--no-gc": {"no_gc": True, "recompute": False},
    "--stats-every 0": {"stats_every": 0},
    "--model toy": {"model": "toy"},
    "--quick": {"model": "toy", "data": "python-stdlib", "seq_len": 128, "max_steps": 100},
    "--quick --dataset fineweb_edu": {"model": "toy", "data": FINEWEB_EDU},
    "--config configs/m7c_125m_fast_log.yaml --local-path here": {"data": "here", "dataset": "fineweb_edu_local"},
    "--config configs/m7c_125m.yaml --data there": {"data": "there", "dataset": ""},
    "--config configs/m7c_125m.yaml --accum-batches 8": {"batch_size": 8},
    "--attention auto": {"attention": "auto"},
    "--attention dense": {"attention": "dense"},
}
RESUME = "the same command again resumes from the newest good checkpoint; so does `jackline resume`"
SAVED = (
    "a run keeps its checkpoints: --runs-dir DIR says where, `jackline checkpoints export RUN` takes the weights out"
)
# As typed -> (error, hint).
REFUSED: dict[str, tuple[str, str]] = {
    "--save artifacts/model.pt": ("'save' is not a setting here", SAVED),
    "--resume artifacts/model.pt": ("'resume' is not a setting here", RESUME),
    "--loader-timeout 60": (
        "'loader_timeout' is not a setting here",
        "a source is waited for 45 s before the first batch and 15 min later, with a word every 2 s; "
        "`jackline doctor m7c` tries it for 20 s",
    ),
    "--fwe-report-docs 1000": (
        "'fwe_report_docs' is not a setting here",
        "documents, tokens and their rate are told at least every 2 s while data is read",
    ),
    "--synthetic-on-fail": (
        "'synthetic_on_fail' is not a setting here",
        "data that cannot be loaded is an error and never replaced by noise; `jackline doctor m7c` tries it first",
    ),
    "--dataset synthetic": (
        "dataset=synthetic: nothing can be learnt from noise, and nothing is trained on it here",
        "--quick trains a tiny model on real text that every machine has; --data SOURCE on your own",
    ),
    "--dataset fineweb_edu_local": (
        "dataset=fineweb_edu_local does not say where it lies",
        "--local-path FOLDER with *.parquet, or a file or glob",
    ),
    "--dataset fineweb_edu --local-path x": (
        "dataset=fineweb_edu is read from the hub, local_path=x is not",
        "--dataset fineweb_edu_local --local-path PATH",
    ),
    "--local-path x --data y": ("data=y and x are both asked for", "--data SOURCE alone is enough"),
    "--ddp 2": ("ddp=2 is too large", "it must be from -1 to 1"),
    "--no-gc --recompute": (
        "no_gc says that nothing is computed twice, recompute that it is",
        "give one of the two",
    ),
    "--dropout 0.1": ("dropout=0.1: this model has none", "weight_decay is what it has"),
    "--attention flash": ("attention is one of auto, sparse, dense, not 'flash'", ""),
    "--dataset fineweb": (
        "dataset is one of fineweb_edu, fineweb_edu_local, not 'fineweb'",
        "--dataset fineweb_edu; any other source: --data SOURCE",
    ),
    "--stats-every -1": ("stats_every=-1 is too small", "it must be 0 or more"),
    "--accum-batches -3": ("accum_batches=-3 is too small", "it must be 0 or more"),
    "--precision fp8": ("precision is one of auto, fp32, bf16, fp16, bf16-weights, not 'fp8'", ""),
    "--fwe-report-doc 9": ("unknown setting 'fwe_report_doc' for recipe 'm7c'", ""),
}


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    found = Shell(tmp_path)
    yield found
    found.close()


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def test_no_flag_is_left_out() -> None:
    typed = " ".join([*WORKING, *REFUSED])
    assert {f"--{name}" for name in THEIRS.split()} <= set(re.findall(r"--[a-z-]+", typed))


@pytest.mark.parametrize("typed", WORKING)
def test_a_flag_works(typed: str) -> None:
    config = resolve_words("m7c", typed.split()).config
    assert {name: getattr(config, name) for name in WORKING[typed]} == WORKING[typed]


@pytest.mark.parametrize("typed", REFUSED)
def test_a_flag_is_refused_with_its_replacement(typed: str) -> None:
    with pytest.raises(UsageError) as caught:
        resolve_words("m7c", typed.split())
    error, hint = REFUSED[typed]
    assert (caught.value.message, caught.value.exit_code) == (error, EXIT_USAGE)
    assert not hint or caught.value.hint == hint


def test_ddp_is_held_against_the_ranks_there_are() -> None:
    for words, size, text in ((["--ddp", "1"], 1, "ddp=1, but this is one process"), (["--ddp", "0"], 2, "2 ranks")):
        config = resolve_words("m7c", words).config
        config.check_ranks(3 - size)
        with pytest.raises(UsageError, match=text):
            config.check_ranks(size)


def test_the_command_line_takes_a_minus_one_and_refuses_with_code_2_before_anything_is_started(shell: Shell) -> None:
    shown = shell.jackline("train", "m7c", "--ddp", "-1", "--show")
    assert re.search(r"^ddp +-1 +command line  ", shown.out, re.M), shown
    done = shell.jackline("train", "m7c", "--dataset", "fineweb_edu", "--local-path", "x")
    error, hint = REFUSED["--dataset fineweb_edu --local-path x"]
    assert (done.code, done.out, done.err) == (EXIT_USAGE, "", f"error: {error}\nhint: {hint}\n")
    assert not shell.runs.exists()


def test_both_names_of_the_settings_are_the_same_file_and_came_with_the_package() -> None:
    files = [
        folder / f"{name}.yaml"
        for folder in (ROOT / "configs", ROOT / "src/jackline/recipes/m7c/configs")
        for name in ("m7c_125m", "m7c_125m_fast_log")
    ]
    assert len({path.read_text() for path in files}) == 1
    plain = resolve("m7c").config
    for word in ("m7c_125m", "m7c_125m_fast_log", "configs/m7c_125m.yaml"):
        found = resolve_words("m7c", ["--config", word]).config
        assert vars(found) == {**vars(plain), "dataset": "fineweb_edu"}


def test_the_recipe_is_what_its_file_of_settings_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    resolved = resolve_words("m7c", ["--config", "configs/m7c_125m_fast_log.yaml"])
    in_file = [name for name, origin in resolved.origins.items() if origin.startswith("configs")]
    assert {"lr", "warmup_steps", "schedule", "max_steps", "seq_len", "batch_size", "clip", "log_every"} <= set(
        in_file
    )
    for name in set(in_file) - {"dataset"}:
        assert getattr(resolved.config, name) == getattr(M7cConfig(), name), name
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError) as caught:
        resolve_words("m7c", ["--config=configs/m7c_125m_fast_log.yaml"])
    assert str(caught.value) == (
        "error: cannot read configs/m7c_125m_fast_log.yaml: No such file or directory\n"
        "hint: --config m7c_125m_fast_log is one that came with the package"
    )


def test_a_batch_size_that_is_typed_is_one_of_so_many_that_a_file_accumulates(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("batch_size: 1\naccum_batches: 16\n")
    for typed, batch_size in (("", 16), ("--batch-size 2", 32), ("--accum-batches 8", 8)):
        assert resolve("m7c", typed.split(), [path]).config.batch_size == batch_size, typed


def test_a_name_of_settings_is_found_beside_a_folder_of_that_name_and_when_nearly_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m7c_125m").mkdir()  # where the forerunner kept its run
    assert resolve_words("m7c", ["--config", "m7c_125m"]).config.dataset == "fineweb_edu"
    for word in ("m7c_125m_fastlog", "configs/m7c_125m_fastlog.yml"):
        with pytest.raises(UsageError) as caught:
            resolve_words("m7c", ["--config", word])
        assert str(caught.value) == (
            f"error: cannot read {word}: No such file or directory\n"
            "hint: --config m7c_125m_fast_log is one that came with the package"
        )
    with pytest.raises(UsageError) as caught:
        resolve_words("m7c", ["--config", "mine.yaml"])
    assert str(caught.value) == "error: cannot read mine.yaml: No such file or directory"


def test_quick_that_is_typed_takes_neither_data_nor_batch_from_a_file_under_their_older_names(tmp_path: Path) -> None:
    path = tmp_path / "large.yaml"
    path.write_text("dataset: fineweb_edu\nbatch_size: 2\naccum_batches: 16\n")
    found = resolve("m7c", ["--quick"], [path]).config
    assert (found.data, found.dataset, found.batch_size) == ("python-stdlib", "", 8)
    assert resolve("m7c", ["--quick", "--dataset", "fineweb_edu"], [path]).config.data == FINEWEB_EDU


def test_what_means_the_same_is_the_same_run() -> None:
    wanted = identity(resolve_words("m7c", []).config)
    assert [identity(resolve_words("m7c", ["--ddp", number]).config) for number in ("0", "-1")] == [wanted, wanted]
    assert identity(resolve_words("m7c", ["--seed", "7"]).config) != wanted


def test_the_config_of_a_run_starts_the_same_again(tmp_path: Path) -> None:
    for typed in ("--quick", "--batch-size 2 --accum-batches 8", "--local-path x --no-gc", "--config m7c_125m"):
        before = resolve_words("m7c", typed.split()).config
        path = tmp_path / "config.yaml"
        path.write_text(config_text(Resolved(before)))
        assert resolve("m7c", [], [path]).config == before


def test_variables_that_decided_once_are_named_with_what_decides_now() -> None:
    environ = {
        "CONFIG": "configs/train_showcase.yaml",
        "NSA_LR": "1e-3",
        "NSA_SEQ_LEN": "64",
        "NSA_FWE_Q": "8",
        "NSA_SDPA_NO_FLASH": "1",
        "NSA_USE_SEL_MASK": "1",
        "HOME": "/root",
    }
    road = "nothing to choose: kernels where they are verified on this GPU, plain torch elsewhere, tested equal"
    assert first_screen(M7cConfig(recipe="m7c"), environ) == [
        "$CONFIG=configs/train_showcase.yaml is not read: --config FILE",
        "$NSA_FWE_Q=8 is not read: data is read and tokenised ahead by a process of its own",
        "$NSA_LR=1e-3 is not read: --lr X",
        f"$NSA_SDPA_NO_FLASH=1 is not read: {road}",
        "$NSA_SEQ_LEN=64 is not read: --seq-len N",
        f"$NSA_USE_SEL_MASK=1 is not read: {road}",
    ]
    assert first_screen(resolve("demo").config, environ) == []  # a recipe that never had any


def test_a_variable_changes_no_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    before = resolve("m7c").config
    for name in OLD_ENVIRONMENT:
        monkeypatch.setenv(name, "7")
    assert resolve("m7c").config == before


def test_every_flag_the_guide_names_is_known_here() -> None:
    guide = (ROOT / "docs" / "recipes" / "m7c.md").read_text(encoding="utf-8")
    named = {word.replace("-", "_") for word in re.findall(r"`--([a-z][a-z_-]+)", guide)}
    typed = " ".join([*WORKING, *REFUSED])
    known = {word.replace("-", "_") for word in re.findall(r"--([a-z][a-z_-]+)", typed)}
    elsewhere = {
        "mirror",
        "runs_dir",
        "gpu",
        "explain",
        "only",
        "tune",
        "lr",
        "name",
        "nproc",
        "tokenizer",
        "vocab_size",
    }
    assert named - known - elsewhere == set()
    assert {name.replace("-", "_") for name in THEIRS.split()} <= named
