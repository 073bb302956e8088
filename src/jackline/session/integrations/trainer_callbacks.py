"""What the callbacks of transformers' Trainer keep from step to step, saved and put back into the same objects.

Trainer saves callbacks that are `ExportableState` but restores them only on request, and then as new objects. Here
their attributes are always put back. Callbacks of the user's own without that interface are watched
(attributes.py). Those of transformers itself show progress or report to services and keep nothing for training.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers.trainer_callback import ExportableState

from jackline.session.integrations.attributes import Watched

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
