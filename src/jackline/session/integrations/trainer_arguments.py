"""TrainingArguments: which of them decide what is trained on, and which settings cannot be resumed exactly.

Owns the two lists and the refusals. Everything here is decided before the first step.
"""

from __future__ import annotations

from enum import Enum
from typing import Any

from jackline.errors import UsageError

# With another value of these, the position in the data has another meaning.
_DATA = (
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "train_sampling_strategy",
    "group_by_length",
    "dataloader_drop_last",
)
_SCHEDULE = (
    "num_train_epochs",
    "max_steps",
    "learning_rate",
    "weight_decay",
    "adam_beta1",
    "adam_beta2",
    "adam_epsilon",
    "max_grad_norm",
    "optim",
    "lr_scheduler_type",
    "warmup_steps",
    "warmup_ratio",
    "label_smoothing_factor",
    "neftune_noise_alpha",
    "seed",
    "data_seed",
    "bf16",
    "fp16",
    "eval_strategy",
    "eval_steps",
    "metric_for_best_model",
    "logging_steps",
)


def describe_arguments(trainer: Any) -> dict[str, dict[str, Any]]:
    """For `Driver.compare`: by kind of change."""
    args = trainer.args
    return {
        "data": {word: _plain(getattr(args, word)) for word in _DATA if hasattr(args, word)},
        "schedule": {word: _plain(getattr(args, word)) for word in _SCHEDULE if hasattr(args, word)},
    }


def refuse_unsupported(trainer: Any, more: tuple[Any, ...], options: dict[str, Any]) -> None:
    """Raise UsageError for what could not be resumed exactly, by the name the user knows."""
    args = trainer.args
    if not hasattr(trainer, "_run_epoch") or not hasattr(trainer, "_init_training_state"):
        raise UsageError(
            "this version of transformers has another training loop",
            hint="ExactResume needs transformers 5.22 or newer",
        )
    if options.get("trial") is not None or (more and more[0] is not None):
        raise UsageError(
            "a trial of hyperparameter_search() is not a run of its own",
            hint="use a Trainer without ExactResume for the search",
        )
    refused = {
        "auto_find_batch_size": "it restarts the training with another batch size",
        "ignore_data_skip": "a resumed epoch would train on the same samples twice",
        "enable_jit_checkpoint": "it replaces the handler of SIGTERM; Jackline saves on SIGTERM itself",
    }
    for word, why in refused.items():
        if getattr(args, word, False):
            raise UsageError(f"{word}=True cannot be used with ExactResume: {why}", hint="remove it")
    for word, is_used in (
        ("deepspeed", bool(getattr(trainer, "is_deepspeed_enabled", False))),
        ("fsdp", bool(getattr(trainer, "is_fsdp_enabled", False))),
    ):
        if is_used:
            raise UsageError(
                f"ExactResume does not know how to save a model that {word} has divided",
                hint="train in one process, or without ExactResume",
            )


def _plain(value: Any) -> Any:
    value = value.value if isinstance(value, Enum) else value
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)
