"""When the run is validated and what is best so far.

Owns the two sizes (a quick subset during training, all of it at the end), the best value, which is kept in the
checkpoint and so never replaced by a worse one after a resume, and the checkpoint of the best. The numbers are
evaluate.py's.
"""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np

from jackline.data.build.supply import Data
from jackline.session.off import OffRun
from jackline.session.run import Run
from jackline.trainer.config import TrainConfig
from jackline.trainer.report.console import Console
from jackline.trainer.report.watch import Watch
from jackline.trainer.sentinels.floor import Floor, entropy_floor
from jackline.trainer.task import Task
from jackline.trainer.validate.evaluate import Evaluation, count_windows, evaluate, read_windows, subset_size
from jackline.units import format_duration

Best = tuple[str, float, int]
_FLOOR_TOKENS = 1 << 16


def is_due(step: int, before: int, config: TrainConfig, total_steps: int) -> bool:
    """After every `eval_every` steps and after the last; not twice when a step was skipped."""
    return step != before and ((config.eval_every > 0 and step % config.eval_every == 0) or step == total_steps)


def best_of(run: Run | OffRun | None, config: TrainConfig) -> Best | None:
    if run is None or run.values.get("best_value") is None:
        return None
    return config.metric, float(run.values["best_value"]), int(run.values["best_step"])


class Validation:
    """Of one attempt. Does nothing without validation data."""

    def __init__(self, task: Task, data: Data | None, console: Console, window_s: float = 0.0) -> None:
        self._task, self._data, self._console = task, data, console
        self._window_s = window_s  # by the rehearsal, then by the last validation; 0: nobody knows yet
        self.num_windows = count_windows(data, task.config.seq_len) if data is not None else 0
        self.num_quick = subset_size(self.num_windows, task.config.eval_share) if self.num_windows else 0
        # Of the plan, not what it has shrunk to since: validations must stay comparable.
        self._batch_size = min(task.chosen.micro_batch, max(1, self.num_quick))
        if data is not None and not self.num_windows:
            console.say(
                f"the validation set is shorter than one window of {task.config.seq_len} tokens: no validation; "
                "a larger val_fraction, or split_by=lines for a few long text files",
                "data",
            )

    def floor(self) -> Floor | None:
        """From validation windows: reading training windows here would move the loader."""
        if self._data is None or not self.num_windows:
            return None
        seq_len = self._task.config.seq_len
        wanted = min(self.num_windows, max(1, _FLOOR_TOKENS // seq_len))
        windows = read_windows(self._data, seq_len, min(64, wanted), wanted)
        sample = [tokens[:, :-1].reshape(-1) for tokens in windows]
        return entropy_floor(np.concatenate(sample), self._data.cache.meta.vocab_size)

    @property
    def num_parts(self) -> int:
        """Batches of a full validation."""
        return -(-self.num_windows // self._batch_size) if self.num_windows else 0

    def after_step(self, run: Run | OffRun, watch: Watch, before: int, request: Path) -> None:
        """What is due: the quick one by its interval, the full one when somebody asked for it."""
        if is_due(run.step, before, self._task.config, self._task.total_steps):
            self.quick(run, watch)
        if take_request(request):
            if not self.num_windows:
                self._console.say("a full validation was asked for, and this run has no validation data", "eval")
            self.full(run, watch)

    def quick(self, run: Run | OffRun, watch: Watch) -> None:
        """During training; a new best is saved with this very step."""
        found = self._run(run, watch, "quick validation", self.num_quick)
        if found is None:
            return
        values, metric = run.values, self._task.config.metric
        is_best = values.get("best_value") is None or found.loss < values["best_value"]
        run.log({metric: found.loss})
        watch.after_eval(run.step, metric, found, is_subset=self.num_quick < self.num_windows)
        best = values.get("best_value")
        if is_best:
            text = "new best" + (f" (previous {best:.4f})" if best is not None else "")
        else:
            text = f"not better, best was {best:.4f}"
        self._console.say(f"step {run.step:,}: {metric} {found.loss:.4f}, {text}", "eval")
        if is_best:
            values["best_value"], values["best_step"] = found.loss, run.step
            run.save(**{f"best_{metric}": found.loss})

    def finish(self, run: Run | OffRun, watch: Watch, folder: Path) -> Evaluation | None:
        """After the last step."""
        return self.full(run, watch) if self._task.config.full_eval else None

    def full(self, run: Run | OffRun, watch: Watch) -> Evaluation | None:
        """All of it, at the end or on request."""
        found = self._run(run, watch, "full validation", self.num_windows)
        if found is not None:
            name = f"{self._task.config.metric}_full"
            run.log({name: found.loss})
            watch.after_eval(run.step, name, found, is_subset=False)
            self._console.say(f"{name} {found.loss:.4f} over {found.num_windows:,} windows", "eval")
        return found

    def _run(self, run: Run | OffRun, watch: Watch, name: str, num_windows: int) -> Evaluation | None:
        if self._data is None or not num_windows:
            return None
        data, console = self._data, self._console
        watch.take_in(wait=True)
        expected = f", about {format_duration(self._window_s * num_windows)}" if self._window_s else ""
        text = f"{name}, {num_windows:,} of {self.num_windows:,} windows{expected}"
        began_s = time.monotonic()
        with (
            console.phase("eval", text),
            watch.aside("evaluation"),
            run.phase(name, total=num_windows, unit="windows") as bar,
        ):

            def advance(count: int) -> bool:
                bar.advance(count)
                console.now(f"{name}, {bar.done:,.0f} of {num_windows:,} windows")
                return not run.should_stop

            found = evaluate(self._task, data, num_windows, self._batch_size, advance)
        if found is None:
            console.say(f"{name} given up: somebody asked for the end", "eval")
        else:
            self._window_s = (time.monotonic() - began_s) / num_windows
        return found


def take_request(request: Path) -> bool:
    """Whether it was there; it is gone then. A microsecond when it is not."""
    try:
        request.unlink()
    except OSError:
        return False
    return True
