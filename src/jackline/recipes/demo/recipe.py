"""The demo: a nano GPT that learns to write Python from the standard library's own sources, byte by byte.

Owns the recipe's settings. Nothing is downloaded, and two CPU cores are enough: the corpus is on every machine that
can run this.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from jackline.trainer.config import TrainConfig

if TYPE_CHECKING:
    from jackline.memory.plan.gpus import GpuModel
    from jackline.memory.plan.target import Candidate


def recipe() -> TrainConfig:
    return TrainConfig(
        model="nano",
        seq_len=128,
        data="python-stdlib",
        tokenizer="bytes",
        val_fraction=0.02,
        val_tokens=200_000,
        batch_size=16,
        max_steps=1000,
        lr=1e-3,
        min_lr=1e-4,
        warmup_steps=50,
        eval_every=100,
        compile="off",
    )


def candidates(gpu: GpuModel, words: Sequence[str]) -> tuple[Candidate, ...]:
    """For `jackline plan demo`."""
    from jackline.trainer.config import resolve_words
    from jackline.trainer.planning.plan import candidate_of

    return (candidate_of(resolve_words("demo", words).config, gpu),)
