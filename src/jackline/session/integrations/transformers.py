"""transformers' Trainer, killed at any instant and resumed bit-exactly.

    from jackline.session.integrations.transformers import ExactResume

    class MyTrainer(ExactResume, Trainer): ...      # or: MyTrainer = exact(Trainer)
    MyTrainer(model=model, args=args, train_dataset=data).train()

This is a mixin and not a callback, because a callback can neither position the data nor restore what Trainer loads.
Saves go to the run's checkpoints at Jackline's own cadence, in addition to whatever `save_strategy` writes to
`output_dir`. The order is Jackline's keyed shuffle where Trainer would use its standard one; the indices of any other
sampler are replayed. Resuming skips indices, not data. Owns the connection; Trainer's own loop is unchanged.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from jackline.rundir import atomic
from jackline.session.driver import Driver
from jackline.session.feeds.batches import ReplayedBatches
from jackline.session.feeds.choose import feed_of_prepared
from jackline.session.off import is_off
from jackline.session.settings import Settings

_STATE = "trainer_state.json"


class ExactResume:
    """List it before Trainer in the bases. `jackline` holds the settings of `attach`: name, mirror ..."""

    jackline: dict[str, Any] = {}  # noqa: RUF012 - meant to be overridden in a class body
    _driver: Driver | None = None
    _is_ours: bool = False  # Jackline asked for the save that is due
    _is_theirs: bool = False  # Trainer's own settings asked for it
    _resumed_from: str = ""
    _replayed: ReplayedBatches | None = None  # the order of a sampler that is not replaced
    _expected: list[int] | None = None  # the trace of its indices up to the checkpoint

    def train(self, resume_from_checkpoint: Any = None, *more: Any, **options: Any) -> Any:
        if is_off() or resume_from_checkpoint:
            return super().train(resume_from_checkpoint, *more, **options)  # type: ignore[misc]
        self._driver = Driver(**self.jackline)
        notes = self._driver.peek()
        with tempfile.TemporaryDirectory(prefix="jackline-resume-") as folder, self._driver:
            seam = _Seam(self)
            self.add_callback(seam)  # type: ignore[attr-defined]
            try:
                if notes is not None:
                    # Trainer reads its step and epoch from a file, before model and optimizer exist.
                    atomic.write_json(Path(folder) / _STATE, notes["trainer"])
                    self._resumed_from = folder
                    self._expected = notes.get("indices")
                return super().train(self._resumed_from or None, *more, **options)  # type: ignore[misc]
            finally:
                self.remove_callback(seam)  # type: ignore[attr-defined]

    def get_train_dataloader(self) -> Any:
        loader = super().get_train_dataloader()  # type: ignore[misc]
        if self._driver is None:
            return loader
        trainer: Any = self
        feed = feed_of_prepared(loader, Settings(seed=trainer.args.data_seed or trainer.args.seed))
        if feed is None:
            return loader
        if isinstance(feed.batches, ReplayedBatches):
            self._replayed = feed.batches
            if self._expected is not None:
                feed.batches.expect(self._expected)
        return trainer.accelerator.prepare_data_loader(feed.loader)

    def _save_checkpoint(self, model: Any, trial: Any, *more: Any, **options: Any) -> Any:
        is_ours, is_theirs = self._is_ours, self._is_theirs
        self._is_ours = self._is_theirs = False
        if self._driver is not None and is_ours:
            notes = {"trainer": self._read_state(), "indices": self._replayed.trace() if self._replayed else None}
            self._driver.save(self._parts(), notes)
            if not is_theirs:
                return None
        return super()._save_checkpoint(model, trial, *more, **options)  # type: ignore[misc]

    def _load_from_checkpoint(self, folder: str, model: Any = None) -> Any:
        if folder == self._resumed_from and folder:
            return None  # it is loaded with all the rest, once the optimizer exists
        return super()._load_from_checkpoint(folder, model)  # type: ignore[misc]

    def _load_optimizer_and_scheduler(self, folder: Any) -> Any:
        if folder == self._resumed_from and folder and self._driver is not None:
            return self._driver.load(self._parts())
        return super()._load_optimizer_and_scheduler(folder)  # type: ignore[misc]

    def _load_scaler(self, folder: Any) -> Any:
        if folder == self._resumed_from and folder:
            return None
        return super()._load_scaler(folder)  # type: ignore[misc]

    def _load_rng_state(self, folder: Any) -> Any:
        if folder == self._resumed_from and folder and self._driver is not None:
            return self._driver.reapply_rng_state()
        return super()._load_rng_state(folder)  # type: ignore[misc]

    def log(self, logs: dict[str, float], *more: Any, **options: Any) -> Any:
        if self._driver is not None:
            trainer: Any = self
            self._driver.log(trainer.state.global_step, logs)
        return super().log(logs, *more, **options)  # type: ignore[misc]

    def _parts(self) -> dict[str, Any]:
        """The contents of a checkpoint, without accelerate's wrappers."""
        trainer: Any = self
        found = {
            "model": trainer.model,
            "optimizer": getattr(trainer.optimizer, "optimizer", trainer.optimizer),
            "scheduler": getattr(trainer.lr_scheduler, "scheduler", trainer.lr_scheduler),
        }
        scaler = getattr(trainer.accelerator, "scaler", None)
        return found if scaler is None else {**found, "scaler": scaler}

    def _read_state(self) -> Any:
        """TrainerState as Trainer itself would write it, callbacks included."""
        trainer: Any = self
        for callback in [*trainer.callback_handler.callbacks, trainer.control]:
            if isinstance(callback, ExportableState):
                trainer.state.stateful_callbacks[type(callback).__name__] = callback.state()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / _STATE
            trainer.state.save_to_json(str(path))
            return atomic.read_json(path)


class _Seam(TrainerCallback):
    """Tells Trainer at the end of each step whether Jackline wants a save or a stop."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self._trainer._driver.before_change()

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        driver = self._trainer._driver
        is_due = driver.at_boundary(state.global_step, total=state.max_steps)
        if driver.should_stop:
            control.should_training_stop = True
        self._trainer._is_theirs = control.should_save
        if is_due:
            self._trainer._is_ours = control.should_save = True

    def on_epoch_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self._trainer._is_theirs = control.should_save

    def on_evaluate(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        if self._trainer._driver.wants_best_saved(state.global_step) and not self._trainer._is_ours:
            self._trainer._is_theirs = control.should_save
            self._trainer._is_ours = control.should_save = True


def exact(trainer: type) -> Any:
    """`exact(Trainer)`: the class with the mixin, for users who have no class of their own."""
    return type(f"Exact{trainer.__name__}", (ExactResume, trainer), {})
