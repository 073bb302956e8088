"""What ExactResume needs to know of transformers' Trainer: its arguments, the loader it iterates, its callbacks.

TrainingArguments decide what is trained on; some settings cannot be resumed exactly and are refused before the first
step. Trainer resumes by discarding the first batches of an epoch: it gets placeholders for those, so no data is read
for them, because the feed has been positioned behind them. It restores callbacks that are `ExportableState` only on
request, and then as new objects: here their attributes are always put back into the same objects. Callbacks of the
user's own without that interface are watched (attributes.py). Those of transformers itself keep nothing for
training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import Enum
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset
from transformers.trainer_callback import ExportableState

from jackline.errors import UsageError
from jackline.session.feeds.feed import END, length_of
from jackline.session.feeds.place import HandedOut
from jackline.session.integrations.attributes import Watched

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
        ("tensor parallelism", bool(getattr(trainer, "is_tp_enabled", False))),
    ):
        if is_used:
            raise UsageError(
                f"ExactResume does not know how to save a model that {word} has divided",
                hint="train in one process, or without ExactResume",
            )


def _plain(value: Any) -> Any:
    value = value.value if isinstance(value, Enum) else value
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


class FedBatches(IterableDataset[Any]):
    """Batches of the epoch that `batches` is at, in this process; the workers are behind the feed."""

    def __init__(self, batches: HandedOut, num_samples: int | None) -> None:
        self.batches = batches
        self.num_samples = num_samples

    def __iter__(self) -> Iterator[Any]:
        for _ in range(self.batches.open(self.batches.epoch)):
            yield None
        while (batch := self.batches.take()) is not END:
            yield batch


class SizedFedBatches(FedBatches):
    """The same, of a feed that knows its length."""

    def __len__(self) -> int:
        return self.batches.feed.num_batches or 0


def make_loader(batches: HandedOut, loader: Any) -> DataLoader[Any]:
    """A loader for Trainer in place of `loader`. Its own generator keeps it from drawing from the global one."""
    kind = FedBatches if batches.feed.num_batches is None else SizedFedBatches
    dataset = kind(batches, length_of(getattr(loader, "dataset", None)))
    return DataLoader(dataset, batch_size=None, collate_fn=_as_it_is, generator=torch.Generator())


def num_samples(loader: Any) -> int | None:
    """The number of samples behind a loader of ours; None for any other."""
    dataset = getattr(loader, "dataset", None)
    return dataset.num_samples if isinstance(dataset, FedBatches) else None


def _as_it_is(batch: Any) -> Any:
    return batch


_SAVEABLE = "keep plain values or tensors in it, or make the callback an ExportableState"


class CallbackStates:
    """The callbacks of a Trainer, as they are after `on_train_begin`."""

    def __init__(self, trainer: Any) -> None:
        known = _ids_saved_elsewhere(trainer)
        self._declared: dict[str, Any] = {}
        self._watched: dict[str, Watched] = {}
        counts: dict[str, int] = {}
        for callback in trainer.callback_handler.callbacks:
            kind = type(callback)
            number = counts[kind.__name__] = counts.get(kind.__name__, 0) + 1
            name = kind.__name__ if number == 1 else f"{kind.__name__}-{number}"
            if isinstance(callback, ExportableState):
                self._declared[name] = callback
            elif not kind.__module__.startswith(("transformers.", "jackline.")):
                self._watched[name] = Watched(f"callback {name}", callback, known=known)

    def read(self, report: Callable[[str], None]) -> dict[str, Any]:
        """Everything to be saved. What changes and cannot be saved is reported once, by name."""
        found: dict[str, Any] = {
            "declared": {name: callback.state().get("attributes", {}) for name, callback in self._declared.items()},
            "watched": {name: watched.changed() for name, watched in self._watched.items()},
        }
        for watched in self._watched.values():
            watched.report_unsaved(report, _SAVEABLE)
        return found

    def put_back(self, kept: dict[str, Any]) -> None:
        for name, attributes in kept.get("declared", {}).items():
            for word, value in attributes.items() if name in self._declared else ():
                setattr(self._declared[name], word, value)
        for name, attributes in kept.get("watched", {}).items():
            if name in self._watched:
                self._watched[name].put_back(attributes)


def _ids_saved_elsewhere(trainer: Any) -> set[int]:
    found = {id(part) for part in (trainer, trainer.args, trainer.state, trainer.control, trainer.accelerator)}
    found |= {id(part) for part in (trainer.optimizer, trainer.lr_scheduler, trainer.model_wrapped)}
    found |= {id(getattr(trainer.optimizer, "optimizer", None)), id(getattr(trainer.lr_scheduler, "scheduler", None))}
    found.discard(id(None))
    model = trainer.model
    return found | ({id(part) for part in model.modules()} if isinstance(model, torch.nn.Module) else set())
