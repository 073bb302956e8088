"""When the run is validated and what is best so far.

Owns the two sizes (a quick subset during training, all of it at the end), the best value, which is kept in the
checkpoint and so never replaced by a worse one after a resume, and the checkpoint of the best. The numbers are
evaluate.py's.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from jackline.session.off import OffRun
from jackline.session.run import Run
from jackline.trainer.config import TrainConfig
from jackline.trainer.report.console import Console
from jackline.trainer.report.watch import Watch
from jackline.trainer.sentinels.floor import Floor
from jackline.trainer.startup.parallel import world_size
from jackline.trainer.task import Task
from jackline.trainer.validate.evaluate import Evaluation, ValidationSet, evaluate, subset_size
from jackline.units import format_duration

Best = tuple[str, float, int]


def is_due(step: int, before: int, config: TrainConfig, total_steps: int) -> bool:
    """After every `eval_every` steps and after the last; not twice when a step was skipped."""
    return step != before and ((config.eval_every > 0 and step % config.eval_every == 0) or step == total_steps)


def best_of(run: Run | OffRun | None, config: TrainConfig) -> Best | None:
    if run is None or run.values.get("best_value") is None:
        return None
    return config.metric, float(run.values["best_value"]), int(run.values["best_step"])


class Validation:
    """Of one attempt. Does nothing without validation data."""

    def __init__(self, task: Task, data: ValidationSet | None, console: Console, window_s: float = 0.0) -> None:
        self._task, self._data, self._console = task, data, console
        self._unit = data.unit if data is not None else "windows"
        self._window_s = window_s  # by the rehearsal, then by the last validation; 0: nobody knows yet
        self.num_windows = data.num_windows if data is not None else 0
        share = subset_size(self.num_windows, task.config.eval_share) if self.num_windows else 0
        self.num_quick = max(share, min(task.config.LEAST_QUICK, self.num_windows))
        # Of the plan, not what it has shrunk to since: validations must stay comparable.
        self._batch_size = min(task.chosen.micro_batch, max(1, self.num_quick))
        if data is not None and not self.num_windows:
            console.say(data.why_empty, "data")

    def floor(self) -> Floor | None:
        return self._data.floor() if self._data is not None and self.num_windows else None

    @property
    def num_parts(self) -> int:
        """Batches of a full validation."""
        return -(-self.num_windows // self._batch_size) if self.num_windows else 0

    def after_step(self, run: Run | OffRun, watch: Watch, before: int, request: Path) -> None:
        """What is due: the quick one by its interval, the full one when somebody asked for it."""
        if is_due(run.step, before, self._task.config, self._task.total_steps):
            self.quick(run, watch)
        if world_size() == 1 and take_request(request):  # ranks might see it in different steps
            if not self.num_windows:
                self._console.say("a full validation was asked for, and this run has no validation data", "eval")
            self.full(run, watch)

    def quick(self, run: Run | OffRun, watch: Watch) -> None:
        """During training; a new best is saved with this very step."""
        found = self._run(run, watch, "quick validation", self.num_quick)
        if found is None:
            return
        values, metric = run.values, self._task.config.metric
        value, best = self._numbers(found)[metric], values.get("best_value")
        is_best = best is None or (value > best if self._task.config.IS_HIGH_GOOD else value < best)
        run.log(self._numbers(found))
        self._tell(run, watch, found, is_subset=self.num_quick < self.num_windows)
        if is_best:
            text = "new best" + (f" (previous {best:.4f})" if best is not None else "")
        else:
            text = f"not better, best was {best:.4f}"
        self._console.say(f"step {run.step:,}: {metric} {value:.4f}, {text}{self._others(found)}", "eval")
        if is_best:
            values["best_value"], values["best_step"] = value, run.step
            run.save(**{f"best_{metric}": value})
        self._judge_patience(run, value)

    def _judge_patience(self, run: Run | OffRun, value: float) -> None:
        """End the training after `patience` validations without a gain; small gains add up to one. Both numbers are
        in the checkpoint, so a resumed run counts from there."""
        config, values = self._task.config, run.values
        if not config.patience:
            return
        before = values.get("gained_value")
        gain = 0.0 if before is None else (value - before if config.IS_HIGH_GOOD else before - value)
        if before is None or gain > config.min_gain:
            values["gained_value"], values["num_stale"] = value, 0
            return
        values["num_stale"] = values.get("num_stale", 0) + 1
        if values["num_stale"] >= config.patience:
            loader: Any = self._task.loader
            loader.end_here()
            text = f"no gain above {config.min_gain:g} in {values['num_stale']} validations: the end (patience)"
            self._console.say(text, "eval")

    def finish(self, run: Run | OffRun, watch: Watch, folder: Path) -> Evaluation | None:
        """After the last step."""
        return self.full(run, watch) if self._task.config.full_eval else None

    def full(self, run: Run | OffRun, watch: Watch) -> Evaluation | None:
        """All of it, at the end or on request."""
        found = self._run(run, watch, "full validation", self.num_windows)
        if found is not None:
            name = self._task.config.metric
            run.log({f"{other}_full": value for other, value in self._numbers(found).items()})
            self._tell(run, watch, found, is_subset=False, ending="_full")
            text = f"{name}_full {self._numbers(found)[name]:.4f} over {found.num_windows:,} {self._unit}"
            self._console.say(f"{text}{self._others(found)}", "eval")
        return found

    def _numbers(self, found: Evaluation) -> dict[str, float]:
        """As they are logged."""
        return {"val_loss": found.loss, **{f"val_{name}": value for name, value in found.more.items()}}

    def _others(self, found: Evaluation) -> str:
        """What was measured beside the metric, for people."""
        metric = self._task.config.metric
        return "".join(f", {name} {value:.4f}" for name, value in self._numbers(found).items() if name != metric)

    def _tell(self, run: Run | OffRun, watch: Watch, found: Evaluation, *, is_subset: bool, ending: str = "") -> None:
        watch.after_eval(run.step, f"val_loss{ending}", found, is_subset=is_subset)
        watch.add_curves(run.step, {f"val_{name}{ending}": value for name, value in found.more.items()})

    def _run(self, run: Run | OffRun, watch: Watch, name: str, num_windows: int) -> Evaluation | None:
        if self._data is None or not num_windows:
            return None
        data, console = self._data, self._console
        watch.take_in(wait=True)
        expected = f", about {format_duration(self._window_s * num_windows)}" if self._window_s else ""
        text = f"{name}, {num_windows:,} of {self.num_windows:,} {self._unit}{expected}"
        began_s = time.monotonic()
        with (
            console.phase("eval", text),
            watch.aside("evaluation"),
            run.phase(name, total=num_windows, unit=self._unit) as bar,
        ):

            def advance(count: int) -> bool:
                bar.advance(count)
                console.now(f"{name}, {bar.done:,.0f} of {num_windows:,} {self._unit}")
                return not run.should_stop

            found = evaluate(_judged(self._task), data, num_windows, self._batch_size, advance)
        if found is None:
            console.say(f"{name} given up: somebody asked for the end", "eval")
        else:
            self._window_s = (time.monotonic() - began_s) / num_windows
        return found


def _judged(task: Any) -> Task:
    """The same task with the average of the weights, where there is one."""
    if task.learner.average is None:
        return cast(Task, task)
    return cast(Task, replace(task, learner=task.learner.judged()))


def take_request(request: Path) -> bool:
    """Whether it was there; it is gone then. A microsecond when it is not."""
    try:
        request.unlink()
    except OSError:
        return False
    return True
