"""Settings of a recipe: every writing understood, every mistake named."""

from __future__ import annotations

import pytest

from jackline.errors import UsageError
from jackline.memory.plan.gpus import GPU_MODELS
from jackline.recipes.sparsae.recipe import SparsaeConfig, candidates
from jackline.trainer.config import resolve
from jackline.trainer.overrides import parse_settings
from jackline.trainer.recipe import RECIPES, find_recipe


@pytest.mark.parametrize(
    "words",
    [
        ["batch_size=12", "recompute=yes"],
        ["--batch_size", "12", "--recompute"],
        ["--batch-size=12", "--recompute", "true"],
        ["--recompute", "--batch-size", "12"],
    ],
)
def test_every_writing_means_the_same(words: list[str]) -> None:
    assert parse_settings(SparsaeConfig, words, "sparsae") == SparsaeConfig(batch_size=12, recompute=True)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (
            ["learning_rte=1"],
            "error: unknown setting 'learning_rte' for recipe 'sparsae'\nhint: did you mean 'learning_rate'?",
        ),
        (
            ["batchsize=1"],
            "error: unknown setting 'batchsize' for recipe 'sparsae'\nhint: did you mean 'batch_size'?",
        ),
        (["batch_size=many"], "error: batch_size=many is not a whole number"),
        (["--batch_size"], "error: --batch_size needs a value"),
        (["big"], "error: 'big' is not a setting of recipe 'sparsae'\nhint: write key=value or --key value"),
        (
            ["model_size=smal"],
            "error: model is one of auto, tiny, small, medium, not 'smal'\nhint: did you mean 'small'?",
        ),
        (
            ["sparsity=1.5"],
            "error: sparsity=1.5 is too large\n       sparsity: Share of the matrix weights that are switched off; "
            "0: dense.\nhint: it must be from 0 to below 1",
        ),
        (["recompute=maybe"], "error: recompute=maybe is not true or false"),
        (
            ["mask_opt_every=0"],
            "error: mask_opt_every=0 is too small\n       mask_opt_every: Steps between updates of the mask.\n"
            "hint: it must be 1 or more",
        ),
        (
            ["val_fraction=0"],
            "error: val_fraction=0.0 is too small\n       val_fraction: Share of the documents kept for validation, "
            "chosen by their contents; masks are judged on them.\nhint: it must be above 0 and below 1",
        ),
        (
            ["--resume_from", "x.pt"],
            "error: 'resume_from' is not a setting here\nhint: the same command again resumes from the newest good "
            "checkpoint; so does `jackline resume`",
        ),
        (
            ["--use_synthetic"],
            "error: 'use_synthetic' is not a setting here\nhint: nothing is substituted silently; --data "
            "python-stdlib is real text on every machine",
        ),
    ],
)
def test_a_mistake_is_named(words: list[str], text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_settings(SparsaeConfig, words, "sparsae")
    assert str(caught.value).startswith(text)


def test_a_recipe_nobody_knows_is_an_error_with_the_known_ones() -> None:
    assert find_recipe("sparsae") == "jackline.recipes.sparsae.recipe"
    with pytest.raises(UsageError) as caught:
        find_recipe("sparse")
    assert str(caught.value) == (
        f"error: there is no recipe 'sparse'\n       known recipes: {', '.join(RECIPES)}\n"
        "hint: did you mean 'sparsae'?"
    )


def test_the_seeds_own_flags_are_understood() -> None:
    words = (
        "--model_size tiny --batch_size 2 --max_steps 20 --sparsity 0.8 --checkpoint_interval 10 --eval_interval 10"
    )
    more = (
        " --seq_len 128 --lr 3e-4 --weight_decay 0.1 --num_workers 0 --lambda_ 5 --mask_opt_every 7 --log_interval 5"
    )
    config = resolve("sparsae", [*words.split(), *more.split()]).config
    assert isinstance(config, SparsaeConfig)
    assert (config.model, config.batch_size, config.max_steps, config.save_every_steps) == ("tiny", 2, 20, 10)
    assert (config.num_mutants, config.mask_opt_every, config.num_threads, config.log_every) == (5, 7, 0, 5)
    assert (config.max_train_examples, config.max_val_examples) == (30_000, 3_000)  # the size's own


def test_an_explicit_size_is_the_only_candidate_and_auto_tries_the_largest_first() -> None:
    gpu = GPU_MODELS["T4"]
    assert [c.shown["model_size"] for c in candidates(gpu, ["model_size=tiny"])] == ["tiny"]
    found = candidates(gpu, ["model_size=auto"])
    assert [c.shown["model_size"] for c in found] == ["medium", "small", "tiny"]
    assert [c.shown["max_train_examples"] for c in found] == [100_000, 50_000, 30_000]
    assert [c.job.global_batch for c in found] == [16, 8, 4]


def test_old_gpus_get_fp16_and_new_ones_bf16_unless_asked_otherwise() -> None:
    assert candidates(GPU_MODELS["T4"], [])[0].job.options.precision == "fp16"
    assert candidates(GPU_MODELS["L4"], [])[0].job.options.precision == "bf16-weights"  # as the trainer takes there
    assert candidates(GPU_MODELS["L4"], ["precision=fp32"])[0].job.options.precision == "fp32"
