"""A session for a framework that owns its loop: transformers, Lightning. The framework reports its boundaries.

    driver = Driver(name="x")                   # finds the run, starts the writer
    notes = driver.peek()                       # the framework's own notes in the newest checkpoint, or None
    driver.load({"model": model, ...})          # restores everything
    with driver:
        ...
        if driver.at_boundary(step, total=1000): driver.save(notes)
        if driver.should_stop: leave the loop     # the block then ends with Stopped

Uses the same files, signals, cadence and receipts as `attach`; only the framework handles the position in the data.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from jackline.checkpoint.state.load import Receipt
from jackline.session.attach import join
from jackline.session.home import refuse_to_begin_anew
from jackline.session.mirrored import wait_mirrored
from jackline.session.saving.receipt import receipt_lines
from jackline.session.saving.retrained import Retrained
from jackline.session.settings import split
from jackline.session.stopping import Stopped


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) or (isinstance(value, torch.Tensor) and value.numel() == 1)


class Driver:
    """One attempt. `load` and `save` take `state`, objects by name; plain notes go with each save."""

    def __init__(self, **given: Any) -> None:
        settings, rest = split(given)
        if rest:
            raise TypeError(f"unknown settings: {', '.join(rest)}")
        self._attached = join(settings, {}, {}, None)
        self._attached.fingerprint = {"schedule": {}}
        self._receipt: Receipt | None = None
        self._notes: dict[str, Any] = {}

    @property
    def name(self) -> str:
        return self._attached.name

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return self._attached.home.run.path

    def newest_step(self) -> int | None:
        """The step of the newest whole checkpoint."""
        receipt = self._load({})
        return None if receipt is None else receipt.step

    @property
    def should_stop(self) -> bool:
        return self._attached.stop.is_made

    def peek(self) -> dict[str, Any] | None:
        """The notes of the last save; changes nothing else."""
        into: dict[str, Any] = {"session": None}
        self._receipt = self._load(into)
        session = into["session"]
        return session.get("notes") if self._receipt is not None and isinstance(session, dict) else None

    def load(self, state: Mapping[str, Any]) -> bool:
        """Fill the objects in `state` from the newest checkpoint; False when there is none.

        `reapply_rng_state` restores the RNG states, once the framework has created its iterators.
        """
        attached = self._attached
        whole = {**state, "random": attached.rng_state, "session": None, "values": {}}
        attached.saver.state = whole
        receipt = self._load(whole)
        if receipt is None:
            return False
        attached.restored = whole["session"]
        self._tell(receipt)
        return True

    def load_whole(self, step: int | None = None) -> dict[str, Any] | None:
        """The newest checkpoint (or that of `step`) as new values, for a framework that distributes them itself."""
        into: dict[str, Any] = {"checkpoint": None}
        receipt = self._load(into, step=step)
        if receipt is None:
            return None
        self._tell(receipt)
        found: dict[str, Any] = into["checkpoint"]
        return found

    def reapply_rng_state(self) -> None:
        self._attached.rng_state.reapply()

    def before_change(self) -> None:
        """Call it before an optimizer steps, when copies may overlap."""
        self._attached.saver.before_change()

    def at_boundary(self, step: int, *, total: int | None = None) -> bool:
        """Call it after `step` is complete. Returns whether the state should be saved now: also at the last step."""
        attached = self._attached
        attached.stepper.go_on_from(step)
        attached.pulse.name, attached.pulse.total = "train", total
        now_s = attached.come_round()
        return bool(attached.saver.why_due(step, now_s)) or self.should_stop or step == total

    def save(self, state: Mapping[str, Any], notes: Mapping[str, Any], *, is_waited_for: bool = False) -> bool:
        """Save the current state; blocks only for the copy."""
        attached = self._attached
        step = attached.stepper.steps_done
        session = {"step": step, "epoch": 0, "batch": 0, "feed": {"kind": "none", "state": {}}, "notes": dict(notes)}
        attached.saver.state = {**state, "random": attached.rng_state, "session": session, "values": {}}
        is_last = is_waited_for or self.should_stop
        metrics = attached.best.label(attached.scalars.known_at(step), step)
        is_best = attached.best.wants_save(step)
        ticket = attached.saver.save(step, metrics=metrics, is_last=is_last, is_wanted=is_best)
        if ticket is None:
            return False
        attached.best.carried(ticket, metrics)
        return attached.saver.wait() if is_last else ticket.outcome not in ("failed", "skipped")

    def has_saved(self, step: int) -> bool:
        """Whether a save of this step was made or is under way."""
        return self._attached.saver.asked_step == step

    def at_step(self, step: int) -> None:
        """Set the step that the next save belongs to."""
        self._attached.stepper.go_on_from(step)

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Log those values that are numbers; does not wait for a device."""
        numbers = {name: value for name, value in values.items() if _is_number(value)}
        attached = self._attached
        attached.scalars.log(step, numbers)
        attached.scalars.send(time.monotonic())
        if (name := attached.best.name) in numbers:
            attached.best.measure(numbers[str(name)], step)

    def wants_best_saved(self, step: int) -> bool:
        """Whether the `keep_best` metric was measured with this step's weights and is the best so far."""
        return self._attached.best.wants_save(step)

    def _load(self, into: dict[str, Any], *, step: int | None = None) -> Receipt | None:
        receipt = self._attached.saver.engine.load_newest(into, step=step)
        if receipt is None:
            refuse_to_begin_anew(self._attached.home, os.environ)
        return receipt

    def _tell(self, receipt: Receipt) -> None:
        attached = self._attached
        attached.stepper.go_on_from(receipt.step)
        attached.saver.last_step = receipt.step
        attached.saver.last_at_s = receipt.restored.manifest.created_at_s
        for line in receipt_lines(receipt, attached.feed, {}):
            attached.reporter.event("resumed", line, is_loud=True, step=receipt.step)
        retrained = Retrained(attached.home.run, 0, receipt.step, attached.reporter.event)
        attached.reporter.on_lines.append(retrained.look)
        attached.saver.on_state = retrained.look_at_state

    def __enter__(self) -> Driver:
        self._attached.start()
        self._attached.saver.begin(self._attached.stepper.steps_done)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Raises Stopped if a stop was requested: the code behind the block is for trainings that are complete."""
        attached = self._attached
        if attached.is_over:
            return
        step = attached.stepper.steps_done
        if error is None and self.should_stop:
            attached.saver.wait()  # the save under way is the one to resume from
            is_saved = attached.saver.last_step == step
            what = "saved" if is_saved else f"not saved; {attached.saver.what_stands(step)}"
            error = Stopped(f"{attached.stop.by}: stopped at step {step}, {what}")
        error = attached.find_unsaved(error) or error
        text = error.text if isinstance(error, Stopped) else ""
        if error is not None and not text:
            attached.saver.wait()
            text = f"left after step {step}; {attached.saver.what_stands(step)}"
        error = wait_mirrored(attached, error)
        text = error.text if isinstance(error, Stopped) else text
        attached.end(error, text, is_complete=error is None)
        if error is not None and kind is None:
            raise error
