"""SparsAE: a language model with a fixed share of its weights switched off, taught also by an average of itself.

Owns the recipe's sizes and settings. What a step does is method.py, what it needs memory.py, the search for masks
mask_search.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from jackline.settings import FRACTION, Range, at_least, between, setting
from jackline.trainer.config import TrainConfig, resolve_words

if TYPE_CHECKING:
    from torch import nn

    from jackline.memory.plan.gpus import GpuModel, Precision
    from jackline.memory.plan.target import Candidate
    from jackline.memory.predict.job import Job
    from jackline.recipes.sparsae.mask_search import SearchSettings
    from jackline.recipes.sparsae.method import SparseAdditions
    from jackline.trainer.network import Shape

DISTILL_WEIGHT = 0.5
WIKITEXT = "hf://datasets/Salesforce/wikitext/wikitext-103-v1/train-*.parquet"


@dataclass(frozen=True)
class Size:
    """What goes with a size unless a person says otherwise: larger models get more data and a larger batch."""

    batch_size: int
    max_train_examples: int
    max_val_examples: int


SIZES = {
    "medium": Size(16, 100_000, 10_000),
    "small": Size(8, 50_000, 5_000),
    "tiny": Size(4, 30_000, 3_000),
}


@dataclass(frozen=True)
class SparsaeConfig(TrainConfig):
    """The seeds' settings under their names; those of every training under ours."""

    GROUP: ClassVar[str] = "sparse masks"

    model: Literal["auto", "tiny", "small", "medium"] = setting(  # type: ignore[assignment]
        "small", "Size of the model; auto: the largest that fits."
    )
    seq_len: int = 256
    vocab_size: int = setting(0, "Rows of the embedding; 0: the tokenizer's.")
    dropout: float = 0.1
    data: str = WIKITEXT
    min_chars: int = 50
    max_train_examples: int = 50_000
    max_val_examples: int = 5_000
    val_fraction: float = setting(
        0.05,
        "Share of the documents kept for validation, chosen by their contents; masks are judged on them.",
        allowed=Range(0, 1, has_low=False, has_high=False),
    )
    batch_size: int = 8
    max_steps: int = 10_000
    lr: float = 3e-4
    min_lr: float = 3e-4
    warmup_steps: int = 0
    schedule: Literal["cosine", "constant", "wsd"] = "constant"
    beta2: float = 0.999
    clip: float = 0.0

    sparsity: float = setting(0.8, "Share of the matrix weights that are switched off; 0: dense.", allowed=FRACTION)
    mask_update: Literal["es", "rigl", "set", "static"] = setting(
        "es", "How the mask changes: evolution strategy, by gradient, at random, never."
    )
    num_mutants: int = setting(3, "Masks that es compares with the present one.", allowed=at_least(1))
    mask_opt_every: int = setting(1000, "Steps between updates of the mask.", unit="steps", allowed=at_least(1))
    distill_warmup: int = setting(500, "Steps before the teacher's loss counts.", unit="steps", allowed=at_least(0))
    distill_first: float = setting(
        DISTILL_WEIGHT, "Weight of the teacher's loss after distill_warmup.", allowed=between(0, 1)
    )
    distill_last: float = setting(0.1, "Weight of the teacher's loss at the end.", allowed=between(0, 1))
    ema_decay: float = setting(0.999, "Decay of the average that is the teacher.", allowed=between(0, 1))
    burn_in_steps: int = setting(
        5, "Updates of a new connection that are stretched.", unit="steps", allowed=at_least(0)
    )
    burn_in_most: float = setting(1.5, "How far they are stretched, at most.", allowed=at_least(1))

    ALIASES: ClassVar[Mapping[str, str]] = {**TrainConfig.ALIASES, "lambda_": "num_mutants", "lambda": "num_mutants"}
    # The loss and the average are the method's own; frozen weights would have no mask.
    UNUSED: ClassVar[frozenset[str]] = frozenset({"ema", "label_smoothing", "frozen", "packing", "chat"})
    QUICK: ClassVar[Mapping[str, Any]] = {
        "model": "tiny",
        "min_chars": 0,
        "mask_opt_every": 20,
        "distill_warmup": 30,
        "max_steps": 60,
        "eval_every": 20,
    }
    AUTO_SIZES: ClassVar[Sequence[str]] = tuple(SIZES)  # what model=auto chooses from, largest first
    VOCAB_MULTIPLE: ClassVar[int] = 1  # the seeds' true counts

    @property
    def shape_name(self) -> str:
        return f"sparsae-{self.model}"

    def settle(self, origins: Mapping[str, str]) -> SparsaeConfig:
        """A size brings its batch and amount of data with it, unless they were asked for."""
        size = SIZES.get(self.model)
        if size is None or self.quick:
            return self
        wanted = {"batch_size", "max_train_examples", "max_val_examples"}
        return replace(self, **{name: getattr(size, name) for name in wanted if origins.get(name) == "recipe"})

    def search_settings(self) -> SearchSettings:
        from jackline.recipes.sparsae.mask_search import SearchSettings

        return SearchSettings(method=self.mask_update, num_mutants=self.num_mutants)

    def make_additions(self, model: nn.Module) -> SparseAdditions:
        from jackline.recipes.sparsae.method import SparseAdditions

        return SparseAdditions(model, self)

    def memory_job(self, shape: Shape, precision: Precision) -> Job:
        """The memory of a step with its teacher and masks."""
        from jackline.models.shapes import GPTShape
        from jackline.recipes.sparsae.memory import sparse_job

        assert isinstance(shape, GPTShape)
        return sparse_job(self.model, shape, self.batch_size, precision, is_recomputing=self.recompute)


def recipe() -> SparsaeConfig:
    return SparsaeConfig()


def candidates(gpu: GpuModel, words: Sequence[str]) -> tuple[Candidate, ...]:
    """What could be trained on this GPU, largest first; one unless model_size=auto. An explicit size is kept."""
    resolved = resolve_words("sparsae", words)
    config, origins = resolved.config, resolved.origins
    assert isinstance(config, SparsaeConfig)
    if config.model != "auto":
        return (_candidate(config, gpu),)
    return tuple(_candidate(replace(config, model=name).settle(origins), gpu) for name in SIZES)  # type: ignore[arg-type]


def _candidate(config: SparsaeConfig, gpu: GpuModel) -> Candidate:
    from jackline.memory.plan.target import Candidate
    from jackline.models.shapes import GPT2_VOCAB, count_parameters, find_shape

    shape = replace(
        find_shape(config.shape_name),
        context=config.seq_len,
        vocab_size=config.vocab_size or GPT2_VOCAB,
        dropout=config.dropout,
    )
    wanted: Precision = "bf16-weights" if gpu.has_bf16 else "fp16"  # as the trainer chooses on such a GPU
    precision = wanted if config.precision == "auto" else config.precision
    job = config.memory_job(shape, precision)
    shown = {
        "model_size": config.model,
        "parameters": count_parameters(shape),
        "is_head_tied": shape.is_tied,
        "batch_size": config.batch_size,
        "seq_len": config.seq_len,
        "max_train_examples": config.max_train_examples,
        "max_val_examples": config.max_val_examples,
        "num_workers": config.num_threads,
        "sparsity": config.sparsity,
    }
    return Candidate(job, shown)
