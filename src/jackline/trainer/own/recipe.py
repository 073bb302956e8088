"""`jackline.Recipe`: a training of one's own in one class, for `jackline train my_recipe.py`.

    class Digits(jackline.Recipe):
        width: int = 64                                   # annotated attributes are settings
        max_steps: int = 500

        def make_model(self): return nn.Linear(64, 10)
        def train_data(self): return images, labels       # tensors, or any dataset with a length
        def loss(self, model, batch): return functional.cross_entropy(model(batch[0]), batch[1])

Owns what a person's class may define, and which settings of every training it has. What becomes of it is task.py and
samples.py. No torch here: settings are read before it is imported.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import Field, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, dataclass_transform, get_type_hints

from jackline.errors import UsageError
from jackline.settings import at_least, setting
from jackline.trainer.config import TrainConfig

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from jackline.trainer.own.task import OwnTask
    from jackline.trainer.report.console import Console

_TEXT_SETTINGS = (
    "model seq_len vocab_size dropout data text_column documents tokenizer val_fraction val_tokens min_chars"
    " max_train_examples max_val_examples max_cache_bytes data_dir num_threads encoding split_by max_damaged"
    " compile compile_cache attention loss_chunk_rows recompute packing label_smoothing chat"
)
_OF_TEXT = frozenset(_TEXT_SETTINGS.split())
_METHODS = "make_model, train_data, val_data, loss, measure, collate, make_optimizer, sample"
GUIDE = "docs/guides/own-recipe.md shows three recipes; `jackline init recipe` writes one"


@dataclass_transform(frozen_default=True)
@dataclass(frozen=True)
class Recipe(TrainConfig):
    """Subclass it and define `make_model`, `train_data` and `loss`. The rest has a default.

    Every subclass is a frozen dataclass, with or without the decorator: its annotated attributes are settings of the
    command line, beside those that every training has (lr, batch_size, max_steps, epochs, seed ...). A setting of
    language models (data, dropout, seq_len ...) is one of yours once your class declares it.
    """

    batch_size: int = setting(32, "Samples in one optimizer step.", unit="samples")
    micro_batch: int = setting(0, "Samples in memory at a time; 0: planned from the memory.", unit="samples")
    epochs: int = setting(0, "Passes over the training data; 0: max_steps decides.")
    lr: float = 1e-3
    min_lr: float = 0.0
    warmup_steps: int = 0
    weight_decay: float = 0.01
    beta2: float = 0.999
    eval_every: int = 100
    metric: str = setting(  # type: ignore[assignment]
        "val_loss",
        "Number that decides which checkpoint is the best: val_loss, or val_NAME of what measure() returns.",
    )
    higher_is_better: bool = setting(False, "Whether a larger metric is a better one.", group="validation")
    num_workers: int = setting(
        0,
        "Processes that read samples ahead; the order and the samples do not depend on it.",
        allowed=at_least(0),
        group="data",
    )

    ALIASES: ClassVar[Mapping[str, str]] = {
        name: to for name, to in TrainConfig.ALIASES.items() if to not in (*_OF_TEXT, "num_workers")
    }
    UNUSED: ClassVar[frozenset[str]] = _OF_TEXT
    QUICK: ClassVar[Mapping[str, Any]] = {}
    LEAST_QUICK: ClassVar[int] = 500

    def __init_subclass__(cls, **words: Any) -> None:
        super().__init_subclass__(**words)
        _adopt(cls)
        declared = {name: value for name, value in vars(cls).items() if isinstance(value, Field)}
        dataclass(frozen=True)(cls)
        own = {one.name for one in fields(cls) if all(one is not known for known in _fields_above(cls))}
        if "UNUSED" not in vars(cls):
            cls.UNUSED = cls.UNUSED - own
        # With @dataclass above the class this happens once more, and Python refuses to freeze what is frozen. The
        # settings of every training stay frozen by TrainConfig; attributes of one's own may be set.
        del cls.__setattr__, cls.__delattr__
        for name, value in declared.items():
            # As written: @dataclass above the class reads it once more, and would lose what setting() declared.
            setattr(cls, name, value)

    # -- what a person's class defines -------------------------------------------------------------------------------

    def make_model(self) -> nn.Module:
        """The model, on the CPU. Generators are seeded with `seed` before. Weights with requires_grad=False stay."""
        raise self._lacks("make_model(self), which returns an nn.Module")

    def train_data(self) -> Any:
        """What is trained on: a tuple or dict of tensors with one row a sample, or an object with len() and [index].

        Generators are seeded with 0 before, so that every attempt makes the same data.
        """
        raise self._lacks("train_data(self), which returns tensors or a dataset")

    def loss(self, model: nn.Module, batch: Any) -> Tensor | tuple[Tensor, Any]:
        """Of a batch on the device: its mean loss, or (summed loss, count) where samples do not weigh the same.

        It may be called for a part of a batch, and more than once for the same part: it must not count anything.
        """
        raise self._lacks("loss(self, model, batch), which returns the mean loss of a batch")

    def val_data(self) -> Any:
        """What is validated on, as for train_data; None: no validation."""
        return None

    def measure(self, model: nn.Module, batch: Any) -> Mapping[str, Any]:
        """Numbers of a validation batch by name, each a mean over its samples. `loss` must be among them."""
        return {"loss": self.loss(model, batch)}

    def collate(self, samples: Sequence[Any]) -> Any:
        """A batch of what [index] returned for each of its samples."""
        from torch.utils.data import default_collate

        return default_collate(list(samples))

    def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer | None:
        """An optimizer of one's own; None: the one of the settings. The schedule sets the learning rates of its
        groups, in proportion to what they have at the start."""
        return None

    def sample(self, model: nn.Module, prompt: str) -> str | Iterable[str]:
        """What `jackline sample RUN PROMPT` prints: a text, or its pieces as they are made."""
        raise UsageError(
            f"recipe '{self.recipe}' cannot be sampled from",
            hint="give its class a method sample(self, model, prompt) that returns text",
        )

    # -- what the trainer asks ---------------------------------------------------------------------------------------

    @property
    def is_language(self) -> bool:
        """Never one of ours, also if the class declares a setting of language models (seq_len)."""
        return False

    @property
    def can_sample(self) -> bool:
        return type(self).sample is not Recipe.sample

    @property
    def IS_HIGH_GOOD(self) -> bool:  # type: ignore[override]  # noqa: N802 - the name that every config has
        return self.higher_is_better

    def quick_settings(self) -> dict[str, Any]:
        """A few steps; the class's own QUICK says what else is smaller then."""
        steps = min(20, self.max_steps)
        return {
            "batch_size": min(8, self.batch_size),
            "micro_batch": 0,
            "max_steps": steps,
            "epochs": 0,
            "warmup_steps": min(self.warmup_steps, steps // 10),
            "decay_steps": 0,
            "eval_every": 10,
            "save_every_steps": 5,
            **self.QUICK,
        }

    def make_task(self, console: Console, folder: Path) -> OwnTask:
        from jackline.trainer.own.task import build_own

        return build_own(self, console)

    def _lacks(self, what: str) -> UsageError:
        return UsageError(f"class {type(self).__name__} of recipe '{self.recipe}' has no {what}", hint=GUIDE)


def _adopt(cls: type) -> None:
    """Give `lr = 3e-4` the type of the setting that it changes: without one it would be silently ignored."""
    known = {one.name for one in _fields_above(cls)}
    written = inspect.get_annotations(cls)
    bare = {name: value for name, value in vars(cls).items() if name in known and name not in written}
    for name, value in bare.items():
        if callable(value) or isinstance(value, property):
            raise UsageError(
                f"'{name}' of class {cls.__name__} is the name of a setting, so it cannot be a method",
                hint=f"the methods are {_METHODS}",
            )
    if bare:
        hints = get_type_hints(cls.__mro__[1])
        cls.__annotations__ = {**written, **{name: hints[name] for name in bare}}


def _fields_above(cls: type) -> list[Any]:
    above = [kind for kind in cls.__mro__[1:] if "__dataclass_fields__" in vars(kind)]
    return [one for kind in above for one in fields(kind)]
