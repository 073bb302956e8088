"""AgAb: how strongly an antibody binds an antigen, learnt by a small head over embeddings that are computed once.

Owns the recipe's settings and the names that its forerunners had for them. Reading and embedding is data/, the head
head.py, what a step is task.py, when it is validated validation.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from jackline.errors import UsageError
from jackline.settings import at_least, setting
from jackline.trainer.config import TrainConfig, resolve_words

if TYPE_CHECKING:
    from jackline.memory.plan.gpus import GpuModel
    from jackline.memory.plan.target import Candidate
    from jackline.recipes.agab.data.prepared import AffinitySettings
    from jackline.recipes.agab.task import AffinityTask
    from jackline.trainer.report.console import Console

NO_LIMIT = 1_000_000_000  # of max_steps: epochs decide
EMBEDDED_INPUTS = 2304  # what IgT5 and ESM-2 650M give together; for plans without data
_WORKERS = "embeddings are computed once and lie in memory or a map: nothing is loaded by workers"
_ONCE = "each sequence is encoded once, in batches of like lengths, by frozen encoders; --antibody_encoder chooses"
_LANGUAGE = (
    "model seq_len vocab_size text_column documents tokenizer val_fraction val_tokens min_chars max_train_examples"
    " max_val_examples max_cache_bytes compile attention loss_chunk_rows recompute num_threads patience min_gain"
    " packing init_from init_partial frozen ema label_smoothing chat max_gpu_bytes"
)
_OTHER_NAMES = ("num_workers", "model_size", "early_stopping_patience")
_UNUSED = frozenset(_LANGUAGE.split())  # of text, or of models that are compiled and planned
_TABLE, _HEAD = "affinity table", "affinity training"  # groups of settings
_SAME = "the same command again resumes from the newest good checkpoint; so does `jackline resume`"


def _on_off(chosen: Mapping[bool, str]) -> Callable[[str], str]:
    """Flags that were true or false, for settings that are a choice: other words pass and are checked as usual."""

    def read(text: str) -> str:
        words = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False}
        return chosen[words[text.lower()]] if text.lower() in words else text

    return read


@dataclass(frozen=True)
class AgabConfig(TrainConfig):
    """The seeds' settings under their names. `batch_size` is 256 and not their 8: see docs/recipes/agab.md."""

    data: str = setting("", "Table of pairs: a CSV or parquet file, folder or glob; planted: made-up pairs.")
    data_dir: str = setting(
        "", "Folder of the cache of embeddings; empty: $JACKLINE_DATA or the user's cache folder."
    )
    dropout: float = 0.3
    batch_size: int = setting(256, "Pairs in one optimizer step.", unit="pairs")
    micro_batch: int = setting(0, "Pairs in memory at a time; 0: the whole batch.", unit="pairs")
    max_steps: int = setting(NO_LIMIT, f"Most optimizer steps; {NO_LIMIT}: epochs decide.")
    epochs: int = setting(50, "Passes over the training pairs; 0: max_steps decides.")
    lr: float = 1e-3
    min_lr: float = 0.0
    warmup_steps: int = 0
    weight_decay: float = 0.01
    beta2: float = 0.999
    # bf16 rounds a pKd around 9 to steps of 0.06; the head does so in its last layer only, but gains nothing either.
    precision: Literal["auto", "fp32", "bf16", "fp16", "bf16-weights"] = setting(
        "fp32", read=_on_off({True: "bf16", False: "fp32"})
    )
    compile: Literal["auto", "on", "off"] = "off"
    seed: int = 42
    eval_every: int = setting(0, "Steps between quick validations; 0: twice an epoch.")
    metric: Literal["val_spearman"] = "val_spearman"  # type: ignore[assignment]
    save_every_s: float = 60.0

    antibody_encoder: str = setting(
        "embedded", "embedded (no download), igt5, esm2-650m, OWNER/NAME[@REVISION] or a folder.", group=_TABLE
    )
    antigen_encoder: str = setting("embedded", "The same for antigens.", group=_TABLE)
    split: Literal["antigen", "random"] = setting(
        "antigen", "Split into parts for training, validation and test by antigen, or row by row.", group=_TABLE
    )
    pkd_min: float = setting(4.0, "Rows with a smaller pKd are left out.", group=_TABLE)
    pkd_max: float = setting(14.0, "Rows with a larger pKd are left out.", group=_TABLE)
    affinity_type: str = setting("", "Take rows with this affinity_type only; empty: all.", group=_TABLE)
    focal_gamma: float = setting(
        2.0, "Exponent that weighs large errors more; 0: squared error.", allowed=at_least(0), group=_HEAD
    )
    stratified: bool = setting(False, "Spread the pairs of each pKd bin evenly over the epoch.", group=_HEAD)
    warmup_epochs: float = setting(
        0.0, "Epochs of warm-up; 0: warmup_steps decides.", unit="epochs", allowed=at_least(0), group=_HEAD
    )
    full_eval_every: int = setting(
        1, "Epochs between full validations.", unit="epochs", allowed=at_least(1), group=_HEAD
    )
    early_stopping: bool = setting(False, "End when full validations bring no gain any more.", group=_HEAD)
    early_stopping_patience: int = setting(
        10, "Full validations without a gain before the end.", allowed=at_least(1), group=_HEAD
    )
    early_stopping_min_delta: float = setting(
        1e-4, "Smallest difference that counts as a gain.", allowed=at_least(0), group=_HEAD
    )

    ALIASES: ClassVar[Mapping[str, str]] = {
        **{name: to for name, to in TrainConfig.ALIASES.items() if name not in _OTHER_NAMES},
        "cache_dir": "data_dir",
        "num_epochs": "epochs",
        "use_early_stopping": "early_stopping",
        "use_bfloat16": "precision",
        "validation_frequency": "full_eval_every",
    }
    REPLACED: ClassVar[Mapping[str, str]] = {
        "resume_from": TrainConfig.REPLACED["resume_from"],
        "resume": _SAME,
        "accumulation_steps": "--batch_size is what one update sees: write batch_size x accumulation_steps there; "
        "--micro_batch N cuts it into slices that fit",
        "num_workers": _WORKERS,
        "prefetch_factor": _WORKERS,
        "use_compile": "the head is too small to gain from a compiler; a step takes a few milliseconds",
        "use_fused_optimizer": "AdamW is the fused one on every device",
        "use_quantization": _ONCE,
        "use_checkpointing": "the encoders are frozen, and the head's activations take a few megabytes: "
        "there is nothing to recompute",
        "use_bucketing": _ONCE,
        "label_smoothing": "labels are numbers, not classes; --focal_gamma 0 weighs large errors less, "
        "--weight_decay and --dropout regularise",
        "l1_lambda": "--weight_decay and --dropout regularise",
    }
    UNUSED: ClassVar[frozenset[str]] = _UNUSED
    QUICK: ClassVar[Mapping[str, Any]] = {
        "data": "planted",
        "epochs": 4,
        "batch_size": 32,
        "max_steps": NO_LIMIT,
        "min_lr": 0.0,
        "warmup_steps": 0,
        "eval_every": 0,
        "save_every_steps": 50,
    }
    IS_HIGH_GOOD: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_encoders()
        if self.pkd_min >= self.pkd_max:
            raise UsageError(f"pkd_min={self.pkd_min} is not below pkd_max={self.pkd_max}")
        if self.warmup_epochs and self.epochs and self.warmup_epochs >= self.epochs:
            raise UsageError(
                f"warmup_epochs={self.warmup_epochs:g} takes all of epochs={self.epochs}",
                hint="the learning rate would never come down; a tenth is usual",
            )

    def _check_encoders(self) -> None:
        chosen = {self.antibody_encoder, self.antigen_encoder} - {"embedded"}
        if chosen:
            from jackline.recipes.agab.data.weights import check_name  # needs the data engine: not for every start

            for name in sorted(chosen):
                check_name(name)

    def settle(self, origins: Mapping[str, str]) -> AgabConfig:
        """An interval in batches takes the place of the one in time; `max_steps` alone that of epochs."""
        made = self
        asked = {name for name, who in origins.items() if who not in ("recipe", "quick")}
        if self.save_every_steps and "save_every_s" not in asked:
            made = replace(made, save_every_s=0.0)
        if "max_steps" in asked and "epochs" not in asked:
            made = replace(made, epochs=0)
        if not made.epochs and made.max_steps == NO_LIMIT:
            raise UsageError("epochs=0 has no end", hint="--epochs 50, or --max_steps N")
        return made

    def make_task(self, console: Console, folder: Path) -> AffinityTask:
        from jackline.recipes.agab.build import build_task

        return build_task(self, console, folder)

    def affinity_settings(self, device: str) -> AffinitySettings:
        from jackline.recipes.agab.data.prepared import AffinitySettings
        from jackline.recipes.agab.data.sample import NAME, planted_table

        root = Path(self.data_dir).expanduser() if self.data_dir else None
        return AffinitySettings(
            path=str(planted_table(root)) if self.data == NAME else self.data,
            antibody_encoder=self.antibody_encoder,
            antigen_encoder=self.antigen_encoder,
            cache_dir=root,
            split=self.split,
            seed=self.seed,
            pkd_range=(self.pkd_min, self.pkd_max),
            affinity_type=self.affinity_type or None,
            device=device,
        )


def recipe() -> AgabConfig:
    return AgabConfig()


def candidates(gpu: GpuModel, words: Sequence[str]) -> tuple[Candidate, ...]:
    """For `jackline plan agab`: no data is opened, so the head is that over IgT5 and ESM-2 650M."""
    from jackline.memory.plan.target import Candidate
    from jackline.recipes.agab.head import count_parameters, head_job

    config = resolve_words("agab", ["data=none", *words]).config
    precision = "fp32" if config.precision == "auto" else config.precision
    shown: dict[str, object] = {
        "inputs": EMBEDDED_INPUTS,
        "parameters": count_parameters(EMBEDDED_INPUTS),
        "batch_size": config.batch_size,
        "precision": precision,
    }
    return (Candidate(head_job(config, EMBEDDED_INPUTS, precision), shown),)
