"""Lightning's Trainer, killed at any instant and resumed bit-exactly.

    from jackline.session.integrations.lightning import JacklineCallback, JacklineIO

    io = JacklineIO(name="x")
    trainer = Trainer(plugins=[io], callbacks=[JacklineCallback(io)], max_steps=1000)
    trainer.fit(module, train_loader, ckpt_path=io.resume_path())

The training loader (a torch DataLoader, `jackline.Loader`, any loader that `attach` takes) is put behind one of
Jackline's feeds. When Lightning asks it for the next batch after an optimizer step, that step is over: its validation
has run and its schedulers have stepped. The state is saved there and nowhere else. What Lightning's own checkpoint
leaves out is in lightning_state.py. Files at paths that Lightning names (ModelCheckpoint) are ordinary `.ckpt` files.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback
from lightning.pytorch.plugins.io import CheckpointIO, TorchCheckpointIO

from jackline.checkpoint.state.ckpt import write_ckpt
from jackline.errors import UsageError
from jackline.rundir import atomic
from jackline.session.driver import Driver
from jackline.session.feeds.place import HandedOut, Place
from jackline.session.integrations.lightning_state import (
    FedLoader,
    LeftOut,
    choose_batches,
    describe_trainer,
    join_early,
    limits_of,
    refuse_unsupported,
)
from jackline.session.off import is_off

_OURS = "jackline"  # the key of our own part in Lightning's checkpoint
_MARK = "jackline_step"


class JacklineIO(CheckpointIO):
    """Stores the checkpoints that Jackline asks for in the run's own folder, and all others where Lightning wants."""

    def __init__(self, **settings: Any) -> None:
        if not is_off():
            join_early(os.environ)
        self.driver = None if is_off() else Driver(**settings)
        self.next_save: tuple[Place, dict[str, Any] | None] = (Place(), None)  # position; what `complete` means
        self._here = Path() if self.driver is None else self.driver.folder
        self._lightnings_own = TorchCheckpointIO()

    def resume_path(self) -> str | None:
        """The value for `fit(ckpt_path=...)`: the newest checkpoint, None when there is none."""
        if self.driver is None or self.driver.peek() is None:
            return None
        path = self._here / "lightning-resume.json"
        if self.driver.is_first:
            atomic.write_json(path, {_MARK: self.driver.newest_step})
        self.driver.of_all_ranks(None)  # the others read what rank 0 has written
        return str(path)

    @property
    def scratch_path(self) -> str:
        """The path to which the callback makes Lightning save: the name does not matter."""
        return str(self._here / "lightning-latest.json")

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        if self.driver is None or str(path) != self.scratch_path:
            if "://" in str(path) or self.driver is None:
                self._lightnings_own.save_checkpoint(checkpoint, path, storage_options)
            else:
                write_ckpt(checkpoint, Path(path))
            return
        place, complete = self.next_save
        self.driver.at_step(int(checkpoint["global_step"]))
        waits = complete is not None
        self.driver.save(
            {"checkpoint": checkpoint}, {}, place, wait="durable" if waits else "never", complete=complete
        )

    def load_checkpoint(
        self, path: Any, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        mark = atomic.read_json(Path(path)) if str(path).endswith(".json") else None
        if self.driver is None or not isinstance(mark, dict) or _MARK not in mark:
            return self._lightnings_own.load_checkpoint(path, map_location, weights_only)
        found = self.driver.load_whole(int(mark[_MARK]))
        assert found is not None
        return found

    def remove_checkpoint(self, path: Any) -> None:
        self._lightnings_own.remove_checkpoint(path)

    def teardown(self) -> None:
        pass


class JacklineCallback(Callback):
    """Saves at Jackline's cadence, puts back what Lightning does not, and obeys a stop request."""

    def __init__(self, io: JacklineIO) -> None:
        self._driver, self._io = io.driver, io
        self._batches: HandedOut | None = None
        self._left_out: LeftOut | None = None
        self._restored: dict[str, Any] | None = None  # our part of the checkpoint that Lightning has loaded
        self._to_put_back: dict[str, Any] | None = None
        self._num_asks = 0  # for batches, since training began
        self._last_step = -1
        self._seen: dict[str, Any] = {}  # Lightning's metrics, as last seen
        self._validated: dict[str, float] = {}  # the metrics of the last validation

    # -- before the first step ---------------------------------------------------------------------------------------

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if self._driver is None or stage != "fit":
            return
        refuse_unsupported(trainer, pl_module, self._driver.num_ranks)
        self._left_out = None
        source = trainer.fit_loop._data_source
        source.dataloader = functools.partial(self._make_loader, trainer, source)

    def _make_loader(self, trainer: Any, source: Any) -> FedLoader:
        """In place of the loader that the user gave or that a `train_dataloader` method returns."""
        assert self._driver is not None
        loader = type(source).dataloader(source)
        self._batches = choose_batches(self._driver, loader)
        return FedLoader(self._batches, loader, lambda: self._on_ask(trainer), lambda: int(trainer.current_epoch))

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        if self._driver is None or not trainer.training:
            return
        found = checkpoint.get(_OURS, {})
        self._restored = self._driver.own_of(found["ranks"]) if "ranks" in found else found
        if self._driver.is_complete(limits_of(trainer)) and self._restored.get("is_boundary"):
            self._driver.report_complete(int(checkpoint["global_step"]))
            trainer.should_stop = True

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        # Not earlier: by now Lightning has installed its own SIGTERM handler, which would leave in mid-accumulation.
        if self._driver is None or self._batches is None:
            return
        driver, restored = self._driver, self._restored
        if restored is None and driver.peek() is not None:
            raise UsageError(
                f"run '{driver.name}' has a checkpoint of step {driver.newest_step}, but fit() starts at step 0",
                hint="trainer.fit(..., ckpt_path=io.resume_path()), or JacklineIO(new=True) for another run",
            )
        driver.exchanges_by(trainer.strategy.model)
        driver.compare(**describe_trainer(trainer))
        driver.__enter__()
        self._left_out = LeftOut(trainer, pl_module)
        self._last_step, self._num_asks = trainer.global_step, 0
        if restored and restored.get("place"):
            self._to_put_back = restored
            self._batches.restore(Place.of(restored["place"]))
            # It may have been asked for batches before the position was known (`estimated_stepping_batches`).
            iter(trainer.fit_loop._data_fetcher)
            if restored.get("is_boundary"):
                _skip_first_look(trainer.fit_loop.epoch_loop)

    # -- the loop ----------------------------------------------------------------------------------------------------

    def _on_ask(self, trainer: Any) -> None:
        """Lightning asks for a batch. After an optimizer step this is the boundary."""
        if self._left_out is None or self._batches is None or self._driver is None:
            return  # training has not begun
        self._num_asks += 1
        if self._to_put_back is not None:
            if self._num_asks > self._batches.num_ahead:
                self._left_out.put_back(self._to_put_back)
                # Else it would not step plateau schedulers at this epoch's end: it believes their values to be lost.
                trainer.fit_loop._restarting = False
                self._to_put_back = None
            return
        step = trainer.global_step
        if step == self._last_step:
            return  # the middle of an accumulation
        self._last_step = step
        # After a validation Lightning creates its values once more; they still belong to that step.
        news = {word: value for word, value in self._take_news(trainer).items() if value != self._validated.get(word)}
        self._driver.log(step, news)
        total = trainer.max_steps if trainer.max_steps > 0 else None
        if self._driver.at_boundary(step, total=total) or self._driver.wants_best_saved(step):
            self._save(trainer, self._batches.place)
        if self._driver.should_stop:
            self._driver.leave()

    def _save(self, trainer: Any, place: Place, complete: dict[str, Any] | None = None) -> None:
        assert self._driver is not None
        self._io.next_save = (place, complete)
        self._is_boundary = True
        self._driver.gather()  # Lightning lets rank 0 alone store what all ranks have made
        try:
            trainer.save_checkpoint(self._io.scratch_path)
            if not self._driver.is_first:
                self._driver.save({}, {}, place, complete=complete)
        finally:
            self._is_boundary = False

    _is_boundary: bool = False  # the save under way is our own, made between two steps

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if self._driver is not None:
            self._driver.before_change()

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if self._driver is not None and not trainer.sanity_checking:
            self._validated = self._take_news(trainer)
            self._driver.log(trainer.global_step, self._validated)

    def _take_news(self, trainer: Any) -> dict[str, float]:
        """The metrics that are new: Lightning keeps the old ones in its dict, as the same objects."""
        now = dict(trainer.callback_metrics)
        news = {name: float(value) for name, value in now.items() if value is not self._seen.get(name)}
        self._seen = now
        return news

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        if self._driver is not None and self._left_out is not None and self._batches is not None:
            part = {**self._left_out.read(self._driver.report), "place": self._batches.place.to_json()}
            part = {**part, "is_boundary": self._is_boundary}
            checkpoint[_OURS] = part if self._driver.num_ranks == 1 else {"ranks": self._driver.of_all_ranks(part)}
            # Lightning alone would look for a loader with a state to put this into.
            checkpoint["loops"]["fit_loop"]["state_dict"].pop("combined_loader", None)

    # -- the end -----------------------------------------------------------------------------------------------------

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if self._driver is not None and self._batches is not None and self._left_out is not None:
            self._driver.log(trainer.global_step, self._take_news(trainer))
            self._driver.at_step(trainer.global_step)
            self._save(trainer, self._batches.next_place, {"total": limits_of(trainer)})

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        if self._driver is not None:
            self._driver.__exit__(type(exception), exception, exception.__traceback__)

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """Raises Stopped if a stop was requested."""
        self._left_out = None
        if self._driver is not None:
            self._driver.__exit__(None, None, None)


def _skip_first_look(epoch_loop: Any) -> None:
    """After a restart Lightning looks whether a validation is due for the last step: it was done before the save."""
    whether_to_validate = epoch_loop._should_check_val_fx

    def look(fetcher: Any) -> bool:
        del epoch_loop._should_check_val_fx
        return False if epoch_loop.restarting else bool(whether_to_validate(fetcher))

    epoch_loop._should_check_val_fx = look
