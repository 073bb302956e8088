"""A training loop's run: what `jackline.attach` returns.

    with jackline.attach(model=model, optimizer=optimizer, loader=loader) as run:
        for batch in run.steps(total=10_000):
            ...
            run.log(loss=loss)

Read `steps` first: take a batch, yield it, and the loop returns for the next one. When it returns after a whole step,
that is a boundary: the only place where a state is saved, because every part of it has been updated by then. Owns
what a boundary is and how the block is left. The rest is in its parts (attachment.py).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any, Literal

from jackline.checkpoint.mirror.progress import LossBounds
from jackline.errors import UsageError
from jackline.memory.guard.safe_step import Slicing, StepResult
from jackline.session.attachment import Attachment
from jackline.session.counting import DRAWN_AHEAD, OWN_BATCHES, OWN_EPOCHS, find_enumerate
from jackline.session.feeds.feed import END
from jackline.session.mirrored import wait_mirrored
from jackline.session.phase import Phase, phase
from jackline.session.ranks import agree, wait_for_all
from jackline.session.saving.rng import RngState
from jackline.session.stopping import NoMoreWaiting, Stopped

Passes = Literal["", "epochs", "total", "single"]


class Run:
    """One attempt's training. `step`: whole steps done. `values`: plain values to be saved, by name."""

    def __init__(self, attached: Attachment) -> None:
        self._attached = attached
        self._is_entered = False
        self._passes: Passes = ""
        self._num_calls = 0  # calls of `steps`, when the loop counts its epochs itself
        self._total: int | None = None
        self._in_body = False
        self._pending = 0  # batches consumed since the last boundary
        self._num_unsaved = 0  # of those between which nothing was under way, since the last save
        self._drawn = RngState().mark()
        self._is_save_wanted = False
        self._has_begun = False
        self._is_complete = False

    # -- what a loop uses --------------------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        return self._attached.stepper.steps_done

    @property
    def epoch(self) -> int:
        return self._attached.position.epoch

    @property
    def batch(self) -> int:
        """Batches consumed in the whole run, in all attempts: the number of the batch in hand, counted from 0."""
        return self._attached.position.batches

    @property
    def name(self) -> str:
        return self._attached.name

    @property
    def values(self) -> dict[str, Any]:
        return self._attached.values

    @property
    def should_stop(self) -> bool:
        """Whether a stop was requested. `steps` handles it by itself; long work inside a step may check this."""
        return self._attached.stop.is_made

    @property
    def doing(self) -> str:
        """The part of a step that is under way, as far as it is visible from here: 'fetch', 'backward 2 of 16' ..."""
        return self._attached.pulse.doing

    @property
    def saving_s(self) -> float:
        """Seconds that saves have cost this loop so far; writing runs in parallel and is not included."""
        return self._attached.saver.engine.stalled_s

    @property
    def at_risk(self) -> LossBounds | None:
        """How much work would be lost if the process crashed now, and if the machine did. None: with JACKLINE=off."""
        return self._attached.saver.at_risk()

    @property
    def newest_checkpoint(self) -> str | None:
        """The path of the newest durable checkpoint."""
        newest = self._attached.saver.look_at_disk()
        return newest["path"] if newest else None

    def steps(self, total: int | None = None) -> Iterator[Any]:
        """Batches, until `total` steps are done. Without `total`: one epoch, or what is left of it."""
        position = self._attached.position
        if not self._open(total):
            return
        while not self._is_total_reached():
            try:
                batch = self._attached.take()
            except NoMoreWaiting:
                self._stop()
                raise
            if batch is END:
                if self._passes != "total" or self._attached.is_exhausted:
                    break
                self._attached.open_next_epoch()
                continue
            self._in_body = True
            yield batch
            self._in_body = False
            position.advance()
            self._pending += 1
            self._after_batch()
        self._attached.between_passes()
        if self._passes == "total" or (self._passes == "epochs" and self._is_total_reached()):
            self._complete()

    def epochs(self, count: int) -> Iterator[int]:
        """Epoch numbers, from the run's position. `for epoch in run.epochs(90): for batch in run.steps(): ...`"""
        self._require_entered()
        self._passes = "epochs"
        self._attached.note_schedule(epochs=count)
        position = self._attached.position
        while position.epoch < count and not self._is_total_reached():
            yield position.epoch
            is_clean = self._pending == 0 and (not self._in_body or self._attached.stepper.after_batch() == "step")
            self._in_body = False
            self._attached.next_epoch()
            if is_clean:
                self._at_boundary()
        self._complete()

    def log(self, values: Mapping[str, Any] | None = None, /, **more: Any) -> None:
        """Numbers of this step: floats or one-element tensors. Costs microseconds and never waits for a GPU."""
        if values:
            more = {**values, **more}
        self._attached.scalars.log(self._attached.label, more)
        if (name := self._attached.best.name) in more:
            self._take_measured(more[str(name)])

    def logged(self, *, wait: bool = False) -> list[tuple[int, dict[str, float]]]:
        """Read back what was logged since the first call: (step, values), in order, each once.

        Values of a GPU come when they have arrived, a step or two later. `wait`: all of them, now.
        """
        return [(step, values) for step, _, values in self._attached.scalars.take(wait=wait)]

    def event(self, kind: str, text: str, **fields: Any) -> None:
        """Write an event of your own into the run's events."""
        self._attached.reporter.event(kind, text, **fields)

    def safe_step(
        self,
        fn: Callable[[Any], Any],
        batch: Any,
        *,
        micro_batch: int | None = None,
        weight: Callable[[Any], float] | None = None,
        count: float | None = None,
    ) -> StepResult:
        """Compute this batch's gradients, in smaller slices if GPU memory runs out; you call `optimizer.step()`.

        `fn(slice)` returns (loss_sum, count), or a mean with `weight=`; it may run twice for the same samples. The
        slice size is `micro_batch` at first, the whole batch by default; a size it shrank to is kept in checkpoints.
        """
        self._require_entered()
        return self._attached.gpu.step(fn, batch, Slicing(micro_batch, weight, count), step=self._attached.label)

    def save(self, **metrics: float) -> None:
        """Save at the next boundary: immediately between epochs and after the loop, else when this step ends.

        `metrics` go with this checkpoint and no other: `run.save(best_loss=...)` with attach(keep_best="best_loss").
        """
        self._require_entered()
        attached = self._attached
        step = self._weights_step()
        attached.marks = (self.step if step is None else step, metrics)
        is_measured = attached.best.name in metrics
        if is_measured:
            attached.best.was_seen = True
        if is_measured and self._in_body and step == attached.label - 1 and self._save_marked():
            return  # the optimizers have not stepped yet: the metrics belong to the previous step
        if self._in_body or self._pending or attached.ranks is not None:
            self._is_save_wanted = True
        else:
            attached.save(overlap=False, wait="writer", again=True)

    def before_change(self) -> None:
        """With attach(overlap=True): call it before a step changes saved state outside `optimizer.step()`."""
        self._attached.saver.before_change()

    def phase(self, name: str, items: Any = None, *, total: float | None = None, unit: str = "") -> Phase:
        """`jackline.phase`, under this run: `with run.phase("evaluate", total=len(test)) as progress: ...`"""
        return self._attached.pulse.inside(phase(name, items, total=total, unit=unit))

    # -- the block ---------------------------------------------------------------------------------------------------

    def __enter__(self) -> Run:
        self._attached.start()
        self._is_entered = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._attached.trial is not None:
            self._attached.trial.leave(error)
        if os.getpid() != self._attached.pid:
            return  # this is a forked child; the run belongs to its parent
        self._is_entered = False
        text = self._leave(error)
        unsaved = self._attached.find_unsaved(error, self._save_last if self._is_complete else None)
        if unsaved is not None:
            self._attached.end(unsaved, unsaved.text, is_complete=False)
            if unsaved.is_ours:
                return
            raise unsaved
        left = wait_mirrored(self._attached, error)
        if left is not None and left is not error:
            self._attached.end(left, str(left), is_complete=False)
            raise left
        self._attached.end(error, text, is_complete=self._is_complete)
        if isinstance(error, Stopped):
            wait_for_all(self._attached.ranks)  # the end of rank 0 is written down by now

    # -- private -----------------------------------------------------------------------------------------------------

    def _open(self, total: int | None) -> bool:
        """Prepare a pass; False when an earlier attempt completed this one."""
        self._require_entered()
        if self._passes != "epochs":
            self._passes = "total" if total is not None else "single"
        self._total = total if total is not None else self._total
        self._attached.note_schedule(total=total)
        if self._passes == "single":
            number, self._num_calls = self._num_calls, self._num_calls + 1
            if number == 1:
                self._attached.reporter.event("own_count", OWN_EPOCHS, is_loud=True)
            if number < self._attached.position.epoch:
                self._attached.pass_over(number)
                return False
            while self._attached.position.epoch < number:
                self._attached.next_epoch()
        if not self._has_begun:
            self._look_at_loop()
        self._attached.open()
        self._has_begun = True
        if not self._pending and agree(self._attached, is_save_due=self._attached.best.wants_save(self.step)):
            self._attached.save(wait="writer")
        if self.should_stop and not self._pending:
            self._stop()
        return True

    def _look_at_loop(self) -> None:
        """Before the first batch: what the loop does that a resume cannot repeat."""
        event = self._attached.reporter.event
        if place := find_enumerate():
            event("own_count", f"{place} {OWN_BATCHES}", is_loud=True)
        if self._attached.feed.kind == "none" and RngState().changed(self._drawn):
            event("drawn_ahead", DRAWN_AHEAD, is_loud=True)

    def _take_measured(self, value: Any) -> None:
        """The `keep_best` metric was logged: find the step it belongs to and whether to save immediately.

        A value measured after the optimizer's step waits for the boundary, and one measured after an epoch waits for
        the next one: the loop may have other weights in its model right now (an EMA), and restores its own by then.
        """
        attached, best = self._attached, self._attached.best
        step = self._weights_step()
        best.measure(value, step, is_rare=None if self._in_body else True)
        is_at_rest = not self._in_body and not self._pending and not self._is_complete
        if step is None:
            best.refuse(self.step, "some optimizers had stepped and others had not", attached.reporter.event)
        elif is_at_rest or (self._in_body and step == attached.label):
            best.mark_no_longer()
        elif (best.is_rare or attached.saver.asked_step == step) and best.is_better(step):
            self._save_marked()

    def _weights_step(self) -> int | None:
        """The step whose weights the model has now. None: they belong to no whole step."""
        return self._attached.stepper.weights_step(self._attached.label) if self._in_body else self.step

    def _save_marked(self) -> bool:
        """Save the state of the last boundary if it is still available; otherwise report why not."""
        why = "it was measured between the batches of one step"
        if self._attached.ranks is not None:
            why = "with several ranks it must be logged after the optimizer's step"
        elif not self._pending:
            return self._attached.save_marked(takes_back=self._in_body)
        self._attached.best.refuse(self.step, why, self._attached.reporter.event)
        return False

    def _is_total_reached(self) -> bool:
        return self._total is not None and self.step >= self._total

    def _after_batch(self) -> None:
        outcome = self._attached.stepper.after_batch()
        if outcome == "step":
            self._at_boundary()
        elif outcome == "rest" and self._attached.ranks is None:  # ranks meet at the ends of steps only
            self._at_rest()
        elif self.should_stop and self._attached.stepper.uncounted.is_overdue:
            self._attached.saver.wait()
            left = self._attached.saver.what_stands(self.step)
            count = self._attached.stepper.uncounted.count
            raise Stopped(
                f"{self._attached.stop.by}: stopped after {count} batches without a step, not saved; {left}"
            )

    def _at_rest(self) -> None:
        """No step has ended for many batches and none is under way: save by batches and by time, and stop here."""
        attached = self._attached
        self._pending = 0
        now_s = attached.come_round()
        if self.should_stop:
            self._stop(again=True)
        self._num_unsaved += 1
        is_wanted, self._is_save_wanted = self._is_save_wanted, False
        if is_wanted or attached.saver.why_due(attached.saver.asked_step + self._num_unsaved, now_s):
            self._num_unsaved = 0
            attached.save(wait="writer" if is_wanted else "never", again=True)

    def _at_boundary(self) -> None:
        attached = self._attached
        is_end_of_epoch = attached.position.batch == attached.feed.num_batches
        attached.lengths.ended(self._pending, is_end_of_epoch=is_end_of_epoch)
        self._pending = self._num_unsaved = 0
        now_s = attached.come_round()
        is_wanted = self._is_save_wanted or attached.best.wants_save(self.step)
        is_due = agree(attached, is_save_due=bool(is_wanted or attached.saver.why_due(self.step, now_s)))
        if attached.stop.is_made:
            self._stop()
        if self._is_total_reached():
            return  # the last save follows immediately
        if is_due:
            attached.save(wait="writer" if is_wanted else "never")  # a requested save is not skipped
            self._is_save_wanted = False

    def _stop(self, *, again: bool = False) -> None:
        """A stop was requested and this is a boundary: save and raise Stopped."""
        is_saved = self._attached.save(overlap=False, wait="durable", again=again)
        wait_for_all(self._attached.ranks)  # a launcher ends the others as soon as the first one exits
        by = self._attached.stop.by
        text = f"{by}: stopped at step {self.step}"
        text += ", saved" if is_saved else f", not saved; {self._attached.saver.what_stands(self.step)}"
        raise Stopped(text)

    def _complete(self) -> None:
        if self._is_complete:
            return
        self._is_complete = True
        if self._attached.restored is not None and self.step == self._attached.restored["step"]:
            text = f"run '{self.name}' is complete: all {self.step} steps were trained before, none is left"
            self._attached.reporter.event("was_complete", text, is_loud=True, step=self.step)
        if self._has_begun:
            # After the end of the last epoch (scheduler, EMA) the state differs from that after its last step.
            self._attached.save(overlap=False, wait="writer", again=self._passes == "epochs")

    def _save_last(self) -> None:
        if self._has_begun:
            self._attached.save(overlap=False, wait="durable", again=True, alone=True)

    def _leave(self, error: BaseException | None) -> str:
        """Save what may be saved while leaving; return text about it."""
        if isinstance(error, Stopped):
            return error.text
        if self._is_complete or not self._has_begun:
            return ""
        if error is None and not self._in_body and not self._pending:
            self._complete()  # the end of one or several passes
            return ""
        attached = self._attached
        is_at_rest = (
            attached.ranks is None and self._pending == 0 and (not self._in_body or attached.feed.can_take_back)
        )
        if is_at_rest and not attached.stepper.has_moved():
            attached.save(overlap=False, wait="writer", takes_back=self._in_body)
            return f"left between two steps, after step {self.step}: saved"
        attached.saver.wait()  # a save may be under way, and that is the one to resume from
        return f"left in the middle of a step: not saved; {attached.saver.what_stands(self.step)}"

    def _require_entered(self) -> None:
        if os.getpid() != self._attached.pid:
            raise UsageError(
                f"this process was forked from the one that is attached to run '{self.name}'",
                hint="fork first, and attach() in the process that trains",
            )
        if not self._is_entered:
            raise UsageError(
                "this run is not open", hint="with jackline.attach(...) as run: ... and use `run` inside the block"
            )
