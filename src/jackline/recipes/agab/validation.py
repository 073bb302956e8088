"""When the affinity head is validated, what is best so far, and the test set at the end.

    quick   twice an epoch, on a fixed tenth of the validation pairs; compared pair by pair with the best so far, and
            only what is better beyond noise is worth a full one
    full    at the end of an epoch, after such a quick one, at the end, and on request; decides the best by Spearman
    test    once, at the end, by the best head; predictions go to test_predictions.csv

Owns these times, the best and early stopping. The contract is `trainer.task.Validating`. Numbers are metrics.py.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from jackline.data.loader.order import Permutation
from jackline.recipes.agab.final import PREDICTIONS, examine_test
from jackline.recipes.agab.head import focal_loss
from jackline.recipes.agab.metrics import Gain, Metrics, compare, interval, measure
from jackline.recipes.agab.parts import AffinityParts
from jackline.session.off import OffRun
from jackline.session.run import Run
from jackline.trainer.report.console import Console
from jackline.trainer.report.watch import Watch
from jackline.trainer.sentinels.watch import PairFacts
from jackline.trainer.validate.evaluate import Evaluation, subset_size
from jackline.trainer.validate.validation import take_request

Rows = NDArray[np.int64]
PREDICT_AT_A_TIME = 4096
LEAST_QUICK = 500  # pairs: fewer tell nothing apart, and cost nothing
STOP_AFTER_S = 5.0  # of a validation, once somebody asked for the end; those who kill wait for 10 s or more
_SEED = 1  # of the quick pairs: never the run's own, so that two runs are validated alike
_PARTS = 64  # losses of a full validation that the sentinels see


@dataclass(frozen=True)
class Found:
    """One validation. `parts` are mean losses of equal shares of the pairs, in their fixed order."""

    metrics: Metrics
    predicted: NDArray[np.float64]
    loss: float
    parts: tuple[float, ...]


class AffinityValidation:
    """Of one attempt."""

    def __init__(self, parts: AffinityParts, console: Console) -> None:
        self._parts, self._console, self._config = parts, console, parts.config
        rows = parts.pairs.data.parts
        self._all: Rows = np.asarray(rows["validation"], np.int64)
        self.num_windows = len(self._all)
        self.num_quick = max(
            subset_size(self.num_windows, parts.config.eval_share), min(LEAST_QUICK, self.num_windows)
        )
        self._quick_places = quick_places(self.num_windows, self.num_quick)
        train: Rows = np.asarray(rows["train"], np.int64)
        self._train = train[quick_places(len(train), min(len(train), self.num_quick))]
        self._full_step = -1  # at which the last full one was done: not twice at the end of an epoch

    def floor(self) -> None:
        """A loss of numbers may be as low as 0."""

    @property
    def num_parts(self) -> int:
        """Parts of a full validation as the sentinels count them."""
        return min(_PARTS, self.num_windows)

    # -- when --------------------------------------------------------------------------------------------------------

    def after_step(self, run: Run | OffRun, watch: Watch, before: int, request: Path) -> None:
        step = run.step
        if step != before:
            if self._is_epoch_end(step):
                self.full(run, watch, is_epoch_end=True)
            elif self._is_quick_due(step):
                self.quick(run, watch)
        if take_request(request):
            self._full_step = -1
            self.full(run, watch)

    def _is_quick_due(self, step: int) -> bool:
        if step == self._parts.total_steps:
            return True
        if self._config.eval_every:
            return step % self._config.eval_every == 0
        each = self._parts.loader.steps_per_epoch
        return each > 1 and step % each == each // 2  # the epoch's end has a full one

    def _is_epoch_end(self, step: int) -> bool:
        return step % (self._parts.loader.steps_per_epoch * self._config.full_eval_every) == 0

    # -- what --------------------------------------------------------------------------------------------------------

    def quick(self, run: Run | OffRun, watch: Watch) -> None:
        if self.num_quick == self.num_windows:
            self.full(run, watch)  # so few that it is the same
            return
        found = self._examine(run, watch, "quick validation", self._all[self._quick_places])
        if found is None:
            return
        text = metrics_text(found.metrics)
        run.log({f"quick_{name}": value for name, value in found.metrics.numbers().items()})
        self._tell_sentinels(run, watch, "quick_loss", found, is_subset=True)
        gain = self._gain(found)
        worth, words = worth_a_full(found.metrics, gain, has_best=bool(len(self._parts.best.predicted)))
        self._console.say(f"step {run.step:,}: quick {text}; {words}", "eval")
        if worth:
            self.full(run, watch)

    def full(self, run: Run | OffRun, watch: Watch, *, is_epoch_end: bool = False) -> Evaluation | None:
        """All validation pairs; a new best is saved with this very step. Done already at this step: nothing."""
        if self._full_step == run.step:
            return None
        found = self._examine(run, watch, "full validation", self._all)
        if found is None:
            return None
        self._full_step = run.step
        run.log({**{f"val_{name}": value for name, value in found.metrics.numbers().items()}, "val_loss": found.loss})
        self._tell_sentinels(run, watch, "val_loss", found, is_subset=False)
        watch.add_curves(run.step, {f"val_{name}": value for name, value in found.metrics.numbers().items()})
        self._judge(run, found, is_epoch_end)
        return Evaluation(found.loss, found.parts, self.num_windows, max(1, self.num_windows // len(found.parts)))

    def finish(self, run: Run | OffRun, watch: Watch, folder: Path) -> Evaluation | None:
        """The last full validation, and the test set by the best head."""
        done = self.full(run, watch) if self._config.full_eval else None
        num_test = len(self._parts.pairs.data.parts["test"])
        with watch.aside("test"), self._console.phase("test", f"{num_test:,} pairs that were never looked at"):
            found, who = examine_test(self._parts, run, folder, self._console, self.predict)
        text = f"{metrics_text(found)}; by {who}"
        where = f"; every prediction is in {folder / PREDICTIONS}" if (folder / PREDICTIONS).exists() else ""
        self._console.say(f"{text}{where}", "test")
        self._parts.totals["test"] = text
        self._parts.mirror.wait()
        return done

    # -- inside ------------------------------------------------------------------------------------------------------

    def _judge(self, run: Run | OffRun, found: Found, is_epoch_end: bool) -> None:
        values, best, now = run.values, self._parts.best, found.metrics.spearman
        config, before = self._config, values.get("best_value")
        best.count(now, config.early_stopping_min_delta, is_epoch_end=is_epoch_end)
        is_over = config.early_stopping and best.num_stale >= config.early_stopping_patience
        if is_over:
            self._parts.loader.end_here()  # before the save below: a death right after it changes nothing
        text = f"step {run.step:,}: {metrics_text(found.metrics)}"
        if now is None:
            self._console.say(f"{text}; never a best", "eval")
        elif before is not None and now <= before:
            self._console.say(f"{text}; not better, best was {before:.4f} at step {values['best_step']:,}", "eval")
        else:
            was = f" (previous {before:.4f})" if before is not None else ""
            self._console.say(f"{text}; new best{was}", "eval")
            values["best_value"], values["best_step"] = now, run.step
            best.predicted = torch.from_numpy(found.predicted[self._quick_places].astype(np.float32))
            run.save(**{f"best_{config.metric}": now})
        if is_over:
            gain, count = f"{config.early_stopping_min_delta:g}", best.num_stale
            self._console.say(f"no gain above {gain} in {count} full validations at ends of epochs: the end", "eval")

    def _gain(self, found: Found) -> Gain | None:
        """Of the quick pairs over the best so far; the resampling is done only where there is something to gain."""
        before, now = self._parts.best.predicted, found.metrics.spearman
        if len(before) != len(found.predicted) or now is None:
            return None
        wanted = self._parts.pairs.data.pkd[self._all[self._quick_places]]
        old = measure(before.numpy(), wanted).spearman
        if old is not None and now <= old:
            return Gain(now - old, now - old, now - old)
        return compare(before.numpy(), found.predicted, wanted)

    def _tell_sentinels(self, run: Run | OffRun, watch: Watch, name: str, found: Found, *, is_subset: bool) -> None:
        size = max(1, found.metrics.num_rows // len(found.parts))
        evaluation = Evaluation(found.loss, found.parts, found.metrics.num_rows, size)
        metrics = found.metrics
        pairs = PairFacts(
            num_rows=metrics.num_rows,
            num_distinct=metrics.num_distinct,
            spread=metrics.spread,
            wanted_spread=metrics.wanted_spread,
            loss=found.loss,
            train_loss=self._train_loss(),
        )
        watch.after_eval(run.step, name, evaluation, is_subset=is_subset, pairs=pairs)

    def _train_loss(self) -> float:
        """Of as many training pairs as a quick validation has, the same ones each time, without dropout."""
        return float(np.mean(self._losses(self.predict(self._train), self._train)))

    def _examine(self, run: Run | OffRun, watch: Watch, name: str, rows: Rows) -> Found | None:
        watch.take_in(wait=True)
        text = f"{name}, {len(rows):,} of {self.num_windows:,} pairs"
        is_long = len(rows) > PREDICT_AT_A_TIME  # else it is over before its beginning has been read
        with (
            self._console.phase("eval", text) if is_long else contextlib.nullcontext(),
            watch.aside("evaluation"),
            run.phase(name, total=len(rows), unit="pairs") as bar,
        ):
            begun_s = time.monotonic()

            def advance(count: int) -> bool:
                bar.advance(count)
                return not gives_up(run.should_stop, time.monotonic() - begun_s)

            predicted = self.predict(rows, advance)
        if predicted is None:
            self._console.say(f"{name} given up: somebody asked for the end", "eval")
            return None
        losses = self._losses(predicted, rows)
        shares = np.array_split(losses, min(_PARTS, len(rows)))
        wanted = self._parts.pairs.data.pkd[rows]
        return Found(
            metrics=measure(predicted, wanted),
            predicted=predicted,
            loss=float(losses.mean()),
            parts=tuple(float(share.mean()) for share in shares),
        )

    def _losses(self, predicted: NDArray[np.float64] | None, rows: Rows) -> NDArray[np.float64]:
        wanted = torch.from_numpy(np.array(self._parts.pairs.data.pkd[rows]))
        made: NDArray[np.float64] = focal_loss(torch.from_numpy(predicted), wanted, self._config.focal_gamma).numpy()
        return made

    def predict(self, rows: Rows, advance: Any = lambda count: True) -> NDArray[np.float64] | None:
        """pKd of these pairs, without a trace in the training; None when `advance` says to give up."""
        model, found = self._parts.learner.model, []
        was_training = model.training
        model.eval()
        try:
            with torch.no_grad():
                for begin in range(0, len(rows), PREDICT_AT_A_TIME):
                    chosen = torch.from_numpy(rows[begin : begin + PREDICT_AT_A_TIME]).to(self._parts.learner.device)
                    found.append(self._parts.predict(chosen))
                    if not advance(len(chosen)):
                        return None
        finally:
            model.train(was_training)
        return joined(found)


def gives_up(is_asked_to_stop: bool, spent_s: float) -> bool:
    """A short one is done to its end: the run continues behind this step, where nobody would make up for it."""
    return is_asked_to_stop and spent_s > STOP_AFTER_S


def joined(found: list[Tensor]) -> NDArray[np.float64]:
    made: NDArray[np.float64] = torch.cat(found).double().cpu().numpy()
    return made


def quick_places(count: int, wanted: int) -> Rows:
    """The same places every time, spread over all by a fixed shuffle."""
    return np.sort(Permutation(count, _SEED).take(0, wanted)).astype(np.int64)


def worth_a_full(metrics: Metrics, gain: Gain | None, *, has_best: bool) -> tuple[bool, str]:
    """Whether a quick validation asks for a full one, and why, in words."""
    if metrics.spearman is None:
        return False, "never a best"
    if not has_best or gain is None:
        return True, "the first"
    if gain.value <= 0:
        return False, f"not better than the best so far ({gain.value:+.4f})"
    width = (gain.high - gain.low) / 2
    if gain.is_beyond_noise:
        return True, f"better than the best so far by {gain.value:.4f} ± {width:.4f}, beyond noise"
    return False, f"{gain.value:+.4f} ± {width:.4f} to the best so far is within noise"


def metrics_text(metrics: Metrics) -> str:
    """'Spearman 0.6213 (0.5954 to 0.6459), Pearson 0.61, RMSE 0.84, recall@9 41 %, 2,391 distinct of 2,396'."""
    words = []
    if metrics.spearman is None:
        words.append(f"Spearman is not defined: {metrics.why}")
    else:
        ends = interval(metrics.spearman, metrics.num_rows)
        shown = f" ({ends[0]:.4f} to {ends[1]:.4f})" if ends else ""
        words.append(f"Spearman {metrics.spearman:.4f}{shown}")
    if metrics.pearson is not None:
        words.append(f"Pearson {metrics.pearson:.4f}")
    words.append(f"RMSE {metrics.rmse:.4f}")
    if metrics.recall is not None:
        words.append(f"recall@9 {100 * metrics.recall:.0f} %")
    words.append(f"{metrics.num_distinct:,} distinct of {metrics.num_rows:,}")
    return ", ".join(words)
