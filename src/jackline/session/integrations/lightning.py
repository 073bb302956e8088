"""Lightning's Trainer, killed at any instant and resumed bit-exactly.

    from jackline.session.integrations.lightning import JacklineCallback, JacklineIO

    io = JacklineIO(name="x")
    trainer = Trainer(plugins=[io], callbacks=[JacklineCallback(io)], max_steps=1000)
    trainer.fit(module, jackline.Loader(data, 32, shuffle=True), ckpt_path=io.resume_path())

Lightning restores its loops and asks the loader for its position, so the loader must have state_dict:
`jackline.Loader`, or any other that has it. The plugin stores what Lightning passes to it; the callback saves at
Jackline's cadence, keeps the RNG states, and turns a stop request into a save. Owns the connection between the two.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.pytorch import Callback
from lightning.pytorch.plugins.io import CheckpointIO, TorchCheckpointIO

from jackline.checkpoint.state.rng import ProcessRandom
from jackline.rundir import atomic
from jackline.session.driver import Driver
from jackline.session.off import is_off

_RNG_STATE = "jackline_random"
_MARK = "jackline_step"


class JacklineIO(CheckpointIO):
    """Stores Lightning's checkpoints in the run's own folder.

    The file at the path that Lightning names is small and says which checkpoint it is.
    """

    def __init__(self, **settings: Any) -> None:
        self.driver = None if is_off() else Driver(**settings)
        self._here = Path() if self.driver is None else self.driver.folder
        self._lightnings_own = TorchCheckpointIO()  # used with JACKLINE=off

    def resume_path(self) -> str | None:
        """The value for `fit(ckpt_path=...)`: the newest checkpoint, None when there is none."""
        whole = None if self.driver is None else self.driver.newest_step()
        if whole is None:
            return None
        path = self._here / "lightning-resume.json"
        atomic.write_json(path, {_MARK: whole})
        return str(path)

    @property
    def scratch_path(self) -> str:
        """The path to which the callback makes Lightning save: the name does not matter."""
        return str(self._here / "lightning-latest.json")

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        if self.driver is None:
            self._lightnings_own.save_checkpoint(checkpoint, path, storage_options)
            return
        step = int(checkpoint["global_step"])
        is_ours = str(path) == self.scratch_path
        self.driver.at_step(step)
        is_saved = self.driver.save({"checkpoint": checkpoint}, {}, is_waited_for=not is_ours)
        if is_saved and not is_ours:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            atomic.write_json(Path(path), {_MARK: step})

    def load_checkpoint(
        self, path: Any, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        if self.driver is None:
            return self._lightnings_own.load_checkpoint(path, map_location, weights_only)
        mark = atomic.read_json(Path(path))
        if not isinstance(mark, dict) or _MARK not in mark:
            raise ValueError(f"{path} was not written by JacklineIO")
        found = self.driver.load_whole(int(mark[_MARK]))
        assert found is not None
        return found

    def remove_checkpoint(self, path: Any) -> None:
        """Delete the file; the run's own rules decide which checkpoints stay."""
        if self.driver is None:
            self._lightnings_own.remove_checkpoint(path)
        else:
            Path(path).unlink(missing_ok=True)

    def teardown(self) -> None:
        pass


class JacklineCallback(Callback):
    """Saves at Jackline's cadence, keeps the RNG states, and obeys a stop request."""

    def __init__(self, io: JacklineIO) -> None:
        self._driver, self._io = io.driver, io
        self._last_step = -1
        self._rng_state: ProcessRandom | None = None
        self._seen: dict[str, Any] = {}  # Lightning's metrics, as last seen
        self._validated: dict[str, float] = {}  # the metrics of the last validation

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        # Not earlier: by now Lightning has installed its own SIGTERM handler, which would leave in mid-accumulation.
        if self._driver is not None:
            self._driver.__enter__()
        self._last_step = trainer.global_step

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if self._rng_state is not None:  # the iterators exist by now
            self._rng_state.reapply()
            self._rng_state = None

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if self._driver is not None:
            self._driver.before_change()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self._driver is None or trainer.global_step == self._last_step:
            return  # Jackline is off, or this is the middle of an accumulation
        self._last_step = trainer.global_step
        total = trainer.max_steps if trainer.max_steps > 0 else None
        # After a validation Lightning creates its values once more; they still belong to that step.
        news = {word: value for word, value in self._take_news(trainer).items() if value != self._validated.get(word)}
        self._driver.log(trainer.global_step, news)
        is_due = self._driver.at_boundary(trainer.global_step, total=total)
        if trainer.is_last_batch:
            return  # Lightning would restart the epoch from a save at its very end; the next step comes soon
        if is_due:
            trainer.save_checkpoint(self._io.scratch_path)
        if self._driver.should_stop:
            trainer.should_stop = True

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Runs before any ModelCheckpoint, which Lightning calls last: so its save includes these values."""
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
        if self._driver is not None:
            checkpoint[_RNG_STATE] = ProcessRandom().state_dict()

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        if self._driver is not None:
            self._rng_state = ProcessRandom()
            self._rng_state.restored = checkpoint[_RNG_STATE]

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        if self._driver is not None:
            self._driver.__exit__(type(exception), exception, exception.__traceback__)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """The last state, unless a save at this step holds it already: a run without it is not finished."""
        driver = self._driver
        if driver is not None and not driver.should_stop and not driver.has_saved(trainer.global_step):
            trainer.save_checkpoint(self._io.scratch_path)

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """Raises Stopped if a stop was requested."""
        if self._driver is not None:
            self._driver.__exit__(None, None, None)
