"""transformers' Trainer, killed at any instant and resumed bit-exactly.

    from jackline.session.integrations.transformers import ExactResume

    class MyTrainer(ExactResume, Trainer): ...      # or: MyTrainer = exact(Trainer)
    MyTrainer(model=model, args=args, train_dataset=data).train()

This is a mixin and not a callback, because a callback can neither position the data nor restore what Trainer loads.
Saves go to the run's checkpoints at Jackline's own cadence, in addition to whatever `save_strategy` writes to
`output_dir`. A save is made at the end of a step, after its evaluation; an epoch's end that was not reached is run at
the resume. Batches come from the same feeds as in `attach`. Owns the connection; Trainer's own loop is unchanged, and
trainer_state.py owns what callbacks keep.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from transformers import TrainerCallback
from transformers.trainer_utils import get_last_checkpoint

from jackline.data.loader.order import mix
from jackline.rundir import atomic
from jackline.rundir.access.writing import folder_inside
from jackline.session.driver import Driver
from jackline.session.feeds.choose import feed_of_prepared
from jackline.session.feeds.place import HandedOut, Place
from jackline.session.integrations.trainer_state import (
    CallbackStates,
    describe_arguments,
    make_loader,
    num_samples,
    refuse_unsupported,
)
from jackline.session.off import is_off
from jackline.session.settings import Settings

_STATE = "trainer_state.json"
_RESUME = "transformers-resume"  # a folder in the run's: Trainer reads its step and epoch from a file
_COUNTERS = ("_globalstep_last_logged", "current_flos")  # of Trainer, for what it logs


class ExactResume:
    """List it before Trainer in the bases. `jackline` holds the settings of `attach`: name, mirror ..."""

    jackline: dict[str, Any] = {}  # noqa: RUF012 - meant to be overridden in a class body
    _jackline_link: Link | None = None  # while `train` runs

    def train(self, resume_from_checkpoint: Any = None, *more: Any, **options: Any) -> Any:
        if is_off():
            return super().train(resume_from_checkpoint, *more, **options)  # type: ignore[misc]
        trainer: Any = self
        refuse_unsupported(trainer, more, options)
        driver = Driver(**self.jackline)
        link = self._jackline_link = Link(trainer, driver)
        evaluates_first = trainer.args.eval_on_start
        with driver:
            trainer.add_callback(link)
            try:
                folder = link.find_start(resume_from_checkpoint)
                if link.resumed_from:
                    trainer.args.eval_on_start = False  # it was done when this run started
                return super().train(folder, *more, **options)  # type: ignore[misc]
            finally:
                trainer.args.eval_on_start = evaluates_first
                trainer.remove_callback(link)
                self._jackline_link = None

    # -- data --------------------------------------------------------------------------------------------------------

    def get_train_dataloader(self) -> Any:
        loader = super().get_train_dataloader()  # type: ignore[misc]
        link = self._jackline_link
        return loader if link is None else link.make_loader(loader)

    def get_eval_dataloader(self, *more: Any, **options: Any) -> Any:
        """Random evaluation data depend on the step alone, not on workers or on what was drawn before."""
        if self._jackline_link is None:
            return super().get_eval_dataloader(*more, **options)  # type: ignore[misc]
        args = self.args  # type: ignore[attr-defined]
        is_persistent = args.dataloader_persistent_workers
        args.dataloader_persistent_workers = False  # such workers would keep RNG states that no checkpoint holds
        try:
            loader = super().get_eval_dataloader(*more, **options)  # type: ignore[misc]
        finally:
            args.dataloader_persistent_workers = is_persistent
        return self._jackline_link.make_evaluation_loader(loader)

    def num_examples(self, dataloader: Any) -> int:
        found = num_samples(dataloader)
        return super().num_examples(dataloader) if found is None else found  # type: ignore[misc]

    # -- resuming: what Trainer would load from its own folder comes from the run's checkpoint -----------------------

    def _init_training_state(self, *more: Any, **options: Any) -> tuple[int, int]:
        """Trainer computes the position from the step; the saved one also holds for epochs that ended early."""
        found: tuple[int, int] = super()._init_training_state(*more, **options)  # type: ignore[misc]
        link = self._jackline_link
        return found if link is None else link.find_position(found)

    def _load_callback_state(self) -> None:
        if self._jackline_link is None or not self._jackline_link.resumed_from:
            super()._load_callback_state()  # type: ignore[misc]

    def _load_from_checkpoint(self, folder: str, model: Any = None) -> Any:
        if self._is_jacklines(folder):
            return None  # it is loaded with all the rest, once the optimizer exists
        return super()._load_from_checkpoint(folder, model)  # type: ignore[misc]

    def _load_optimizer_and_scheduler(self, folder: Any) -> Any:
        if self._jackline_link is not None and self._is_jacklines(folder):
            return self._jackline_link.load()
        return super()._load_optimizer_and_scheduler(folder)  # type: ignore[misc]

    def _load_scaler(self, folder: Any) -> Any:
        return None if self._is_jacklines(folder) else super()._load_scaler(folder)  # type: ignore[misc]

    def _load_rng_state(self, folder: Any) -> Any:
        """`Link.put_back` does it, at the instant at which it was saved."""
        return None if self._is_jacklines(folder) else super()._load_rng_state(folder)  # type: ignore[misc]

    def _is_jacklines(self, folder: Any) -> bool:
        return self._jackline_link is not None and bool(folder) and folder == self._jackline_link.resumed_from

    # -- the loop ----------------------------------------------------------------------------------------------------

    def _run_epoch(self, *more: Any, **options: Any) -> Any:
        link = self._jackline_link
        if link is None:
            return super()._run_epoch(*more, **options)  # type: ignore[misc]
        link.before_epoch(options["epoch"] if "epoch" in options else more[1])
        found = super()._run_epoch(*more, **options)  # type: ignore[misc]
        link.after_epoch()
        return found

    def _maybe_log_save_evaluate(self, *more: Any, **options: Any) -> Any:
        found = super()._maybe_log_save_evaluate(*more, **options)  # type: ignore[misc]
        if self._jackline_link is not None:
            self._jackline_link.after_step()
        return found

    def log(self, logs: dict[str, float], *more: Any, **options: Any) -> Any:
        if self._jackline_link is not None:
            self._jackline_link.log(logs)
        return super().log(logs, *more, **options)  # type: ignore[misc]


class Link(TrainerCallback):  # type: ignore[misc]  # an unfollowed import
    """Between one call of `train` and the driver. A callback, to hear of the beginning and of each step."""

    def __init__(self, trainer: Any, driver: Driver) -> None:
        self.resumed_from = ""  # the folder that Trainer is given, when this attempt resumes
        self._trainer = trainer
        self._driver = driver
        self._notes: dict[str, Any] = {}  # of the checkpoint that this attempt resumes from
        self._kept: dict[str, Any] | None = None  # what is put back when training begins
        self._batches: HandedOut | None = None
        self._callbacks: CallbackStates | None = None
        self._is_done = False  # nothing is left to train
        self._is_due = False
        self._is_step_over = False  # Trainer logs, evaluates and saves for a step, not for an epoch

    # -- before the first step ---------------------------------------------------------------------------------------

    def find_start(self, wish: Any) -> str | None:
        """The folder for Trainer to resume from: ours, or the one that the script wishes if that is newer."""
        driver, notes = self._driver, self._driver.peek()
        theirs = get_last_checkpoint(self._trainer.args.output_dir) if wish is True else wish
        if theirs:
            state, ours = atomic.read_json(Path(theirs) / _STATE), driver.newest_step
            step = state.get("global_step") if isinstance(state, dict) else None
            if ours is None or not isinstance(step, int) or step > ours:
                driver.report(f"Trainer resumes from {theirs} by itself: up to here this resume is not bit-exact")
                return str(theirs)
            driver.report(f"{theirs} is of step {step}: resuming from the run's own checkpoint of step {ours}")
        if notes is None:
            return None
        self._notes = notes
        if driver.is_first:
            folder = folder_inside(driver.folder / _RESUME, only=_STATE)  # Trainer would unpickle what is in it
            atomic.write_json(folder / _STATE, notes["trainer"])
        driver.of_all_ranks(None)  # the others read what rank 0 has written
        self.resumed_from = str(driver.folder / _RESUME)
        return self.resumed_from

    def make_loader(self, loader: Any) -> Any:
        args = self._trainer.args
        feed = self._driver.choose(loader, seed=args.seed if args.data_seed is None else args.data_seed)
        self._batches = HandedOut(feed)
        return make_loader(self._batches, loader)

    def make_evaluation_loader(self, loader: Any) -> Any:
        trainer = self._trainer
        seed = mix(trainer.args.seed, trainer.state.global_step)
        is_alone = self._driver.num_ranks == 1  # else accelerate has divided it, and the RNG states decide
        is_ours = is_alone and hasattr(loader, "base_dataloader")
        feed = feed_of_prepared(loader, Settings(seed=seed)) if is_ours else None
        return loader if feed is None else trainer.accelerator.prepare_data_loader(feed.loader)

    def find_position(self, found: tuple[int, int]) -> tuple[int, int]:
        """(epoch, batches of it that were trained on); `found` is what Trainer computed."""
        driver, state = self._driver, self._trainer.state
        driver.compare(**describe_arguments(self._trainer))
        if not self.resumed_from or driver.place is None or self._batches is None:
            return found
        self._batches.restore(driver.place)
        self._is_done = driver.is_complete(state.max_steps)
        return (state.num_train_epochs, 0) if self._is_done else (driver.place.epoch, driver.place.batch)

    def load(self) -> None:
        self._driver.exchanges_by(self._trainer.model_wrapped)
        kept = (self._driver.load({**self._parts(), "callbacks": None}) or {}).get("callbacks")
        self._kept = self._driver.own_of(kept["ranks"]) if isinstance(kept, dict) and "ranks" in kept else kept

    def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """The last callback: all others have seen the beginning of training."""
        self._driver.exchanges_by(self._trainer.model_wrapped)
        self._callbacks = CallbackStates(self._trainer)
        if self._is_done:
            self._driver.report_complete(state.global_step)
        place = self._driver.place
        if self._is_done or place is None or not place.batch:
            self.put_back()

    def put_back(self) -> None:
        """Put everything back that the start of Trainer has changed since the checkpoint was loaded."""
        trainer = self._trainer
        kept, self._kept = self._kept, None
        if kept is None or self._callbacks is None:
            return
        self._callbacks.put_back(kept)
        for word, value in self._notes["control"].items():
            setattr(trainer.control, word, value)
        for word, value in self._notes["counters"].items():
            setattr(trainer, word, value)
        trainer._tr_loss = kept["tr_loss"].to(trainer.args.device)
        self._driver.reapply_rng_state()

    # -- the loop ----------------------------------------------------------------------------------------------------

    def before_epoch(self, epoch: int) -> None:
        if self._batches is not None:
            self._batches.epoch = epoch
            self.put_back()  # after a resume inside an epoch: callbacks have just seen its beginning once more
            self._batches.is_closed = self._trainer.control.should_training_stop

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self._driver.before_change()

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self._is_due |= self._driver.at_boundary(state.global_step, total=state.max_steps)
        self._is_step_over = True

    def after_step(self) -> None:
        """The step was logged, evaluated, and saved by Trainer if it wanted to."""
        if not self._is_step_over or self._batches is None:
            return
        self._is_step_over = False
        if self._trainer.control.should_epoch_stop:
            return  # a callback ends the epoch here: what is due is saved behind it, and not in the middle of it
        if self._is_due or self._is_wanted():
            self._is_due = False
            self._save(self._batches.place)
            self._leave_if_asked()

    def after_epoch(self) -> None:
        if self._batches is None:
            return
        state, control = self._trainer.state, self._trainer.control
        if control.should_training_stop or self._batches.epoch + 1 >= state.num_train_epochs:
            self._save(self._batches.next_place, complete={"total": state.max_steps})
        elif self._is_due or self._is_wanted():
            self._is_due = False
            if control.should_epoch_stop:
                self._batches.leave_epoch()
            self._save(self._batches.next_place)
            self._leave_if_asked()

    def log(self, logs: dict[str, float]) -> None:
        self._driver.log(self._trainer.state.global_step, logs)

    def _is_wanted(self) -> bool:
        return self._driver.should_stop or self._driver.wants_best_saved(self._trainer.state.global_step)

    def _leave_if_asked(self) -> None:
        if self._driver.should_stop and not self._trainer.control.should_training_stop:
            self._driver.leave()

    def _save(self, place: Place, complete: dict[str, Any] | None = None) -> None:
        trainer, driver = self._trainer, self._driver
        assert self._callbacks is not None
        kept = {**self._callbacks.read(driver.report), "tr_loss": trainer._tr_loss.detach().clone()}
        notes = {
            "trainer": json.loads(json.dumps(dataclasses.asdict(trainer.state))),
            "control": dataclasses.asdict(trainer.control),
            "counters": {word: getattr(trainer, word) for word in _COUNTERS if hasattr(trainer, word)},
        }
        if driver.num_ranks > 1:  # each rank adds up its own losses
            kept = {"ranks": driver.of_all_ranks(kept)}
        parts = {**self._parts(), "callbacks": kept}
        driver.save(parts, notes, place, wait="never" if complete is None else "durable", complete=complete)

    def _parts(self) -> dict[str, Any]:
        """The contents of a checkpoint, without accelerate's wrappers."""
        trainer = self._trainer
        optimizer, scheduler = trainer.optimizer, trainer.lr_scheduler
        found = {
            "model": trainer.model,
            "optimizer": optimizer.optimizer if type(optimizer).__name__ == "AcceleratedOptimizer" else optimizer,
            "scheduler": scheduler.scheduler if type(scheduler).__name__ == "AcceleratedScheduler" else scheduler,
        }
        scaler = getattr(trainer.accelerator, "scaler", None)
        return found if scaler is None else {**found, "scaler": scaler}


def exact(trainer: type) -> Any:
    """`exact(Trainer)`: the class with the mixin, for users who have no class of their own."""
    return type(f"Exact{trainer.__name__}", (ExactResume, trainer), {})
