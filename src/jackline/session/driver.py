"""A session for a framework that owns its loop: transformers, Lightning. The framework reports its boundaries.

    driver = Driver(name="x")                   # finds the run, starts the writer
    notes = driver.peek()                       # the framework's own notes in the newest checkpoint, or None
    feed = driver.choose(loader)                # where its batches come from
    driver.load({"model": model, ...})          # restores everything
    driver.compare(data=..., schedule=...)      # refuses or reports what has changed since the checkpoint
    with driver:
        ...
        if driver.at_boundary(step, total=1000): driver.save(state, notes, place)
        if driver.should_stop: driver.leave()     # after a save: raises Stopped

Uses the same files, signals, cadence, feeds and receipts as `attach`; the framework reports where it is (`Place`).
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from jackline.checkpoint.engine import Wait
from jackline.checkpoint.state.load import Receipt
from jackline.errors import CannotResume, UsageError
from jackline.rundir.records.seen import read_skipped
from jackline.session.attach import join, judge_changes, report_resumed
from jackline.session.feeds.choose import choose_feed, divide_prepared, feed_of_prepared
from jackline.session.feeds.feed import Feed
from jackline.session.feeds.place import Place
from jackline.session.home import command_line, refuse_to_begin_anew
from jackline.session.metrics.reporting import say
from jackline.session.mirrored import wait_mirrored
from jackline.session.ranks import (
    agree,
    describe_ranks,
    load_together,
    restore_rank,
    unwrapped,
    wait_for_all,
)
from jackline.session.saving.changes import describe_program
from jackline.session.saving.replicas import gather_objects, restore_replica
from jackline.session.settings import split
from jackline.session.stopping import Stopped, Unsaved


def _ranks(count: int) -> str:
    return f"{count} rank{'s' * (count > 1)}"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) or (isinstance(value, torch.Tensor) and value.numel() == 1)


class Driver:
    """One attempt. `load` and `save` take `state`, objects by name; plain notes go with each save."""

    def __init__(self, **given: Any) -> None:
        settings, rest = split(given)
        if rest:
            raise TypeError(f"unknown settings: {', '.join(rest)}")
        if settings.replay_every or settings.on_spike == "rewind":
            raise UsageError(
                "replay_every and on_spike need a loop whose steps and batches Jackline hands out",
                hint="they are for own loops (run.steps(), run.safe_step()) and recipes; leave them out here",
            )
        self._keeps_best = settings.keep_best is not None  # on rank 0; the others do not measure
        self._attached = join(settings, {}, {}, None)
        self._attached.fingerprint = {"schedule": {}}
        self._receipt: Receipt | None = None
        self._session: dict[str, Any] = {}  # of the checkpoint that this attempt resumes from
        self._program: dict[str, Any] = {"schedule": {}}
        self._is_over = False  # training is complete

    @property
    def name(self) -> str:
        return self._attached.name

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return self._attached.home.run.path

    @property
    def num_ranks(self) -> int:
        ranks = self._attached.ranks
        return 1 if ranks is None else ranks.size

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, or the only process."""
        ranks = self._attached.ranks
        return ranks is None or ranks.is_first

    @property
    def should_stop(self) -> bool:
        return self._attached.stop.is_made

    # -- what an earlier attempt saved -------------------------------------------------------------------------------

    def peek(self) -> dict[str, Any] | None:
        """The notes of the newest whole checkpoint, None when there is none; changes nothing else."""
        if (skipped := read_skipped(self._attached.home.run)).ranges:
            raise CannotResume(
                f"the batches {skipped} cannot be left out: the framework hands out its batches itself",
                hint="--skip-batches is for own loops (run.steps()) and recipes",
            )
        into: dict[str, Any] = {"session": None}
        self._receipt = self._load(into)
        if self._receipt is None or not isinstance(into["session"], dict):
            return None
        self._session = into["session"]
        self._refuse_other_ranks()
        return dict(self._session.get("notes") or {})

    def _refuse_other_ranks(self) -> None:
        saved = self._session.get("ranks")
        before, now = len(saved) if isinstance(saved, list) else 1, self.num_ranks
        if before != now:
            raise CannotResume(
                f"it was saved with {_ranks(before)} and would resume with {_ranks(now)}: a framework's batch size "
                "is that of one rank, so the batches would be others",
                hint=f"start it with {_ranks(before)}; own loops (jackline.attach) and recipes take any number",
            )

    @property
    def newest_step(self) -> int | None:
        """The step of the checkpoint that `peek` found."""
        return None if self._receipt is None else self._receipt.step

    @property
    def place(self) -> Place | None:
        """The position in the data that `peek` found."""
        return None if self._receipt is None else Place.of(self._session)

    def is_complete(self, total: Any) -> bool:
        """Whether an earlier attempt reached its end, which was at `total` then too."""
        found = self._session.get("complete")
        return isinstance(found, dict) and found.get("total") == total

    def choose(self, loader: Any, *, seed: int | None = None) -> Feed:
        """The feed for a loader, as `attach` would choose it."""
        settings = self._attached.settings
        if settings.seed is None and seed is not None:
            settings = dataclasses.replace(settings, seed=seed)
        wrapped = getattr(loader, "base_dataloader", None)  # accelerate's loaders
        feed: Feed | None = None
        ranks = self._attached.ranks
        if wrapped is not None:
            feed = feed_of_prepared(loader, settings) if ranks is None else divide_prepared(loader, settings, ranks)
        if feed is None:
            feed = choose_feed(loader if wrapped is None else wrapped, settings, say, ranks, is_per_rank=True)
        self._attached.feed = feed
        self._program = describe_program({}, loader, command_line(), {})
        return feed

    def load(self, state: Mapping[str, Any]) -> dict[str, Any] | None:
        """Fill the objects in `state` from the checkpoint that `peek` found; returns what else it holds, by key.

        `reapply_rng_state` restores the RNG states, once the framework has created its iterators.
        """
        if self._receipt is None:
            return None
        attached = self._attached
        whole: dict[str, Any] = {**state, "random": attached.rng_state, "session": None, "values": {}}
        attached.saver.state = whole
        receipt = self._load(whole, step=self._receipt.step)
        assert receipt is not None
        attached.restored = self._session = whole["session"]
        if attached.ranks is not None:
            restore_rank(attached.ranks, attached.rng_state, self._session, receipt.step)
        report_resumed(attached, receipt, self._session)
        return whole

    def load_whole(self, step: int | None = None) -> dict[str, Any] | None:
        """The newest checkpoint (or that of `step`) as new values, for a framework that distributes them itself."""
        into: dict[str, Any] = {"checkpoint": None, "session": None}
        receipt = self._load(into, step=step)
        if receipt is None:
            return None
        self._receipt = receipt
        self._session = into["session"] if isinstance(into["session"], dict) else {}
        report_resumed(self._attached, receipt, self._session)
        found: dict[str, Any] = into["checkpoint"]
        return found

    def compare(self, *, data: Mapping[str, Any], schedule: Mapping[str, Any]) -> None:
        """Note what this program trains with, and judge what differs from the checkpoint; may raise CannotResume."""
        program = self._program
        program["data"] = {**program.get("data", {}), **data}
        program["schedule"] = {**program["schedule"], **schedule}
        attached = self._attached
        attached.fingerprint = program
        if self._receipt is None:
            return
        place = self.place
        judge_changes(attached, self._receipt, self._session, None if place is None else place.kind)

    def report_complete(self, step: int) -> None:
        """The run was complete before this attempt began."""
        text = f"run '{self.name}' is complete: all {step} steps were trained before, none is left"
        self._attached.reporter.event("was_complete", text, is_loud=True, step=step)

    def report(self, text: str) -> None:
        """One line for the user."""
        self._attached.reporter.event("note", text, is_loud=True)

    # -- the loop ----------------------------------------------------------------------------------------------------

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
        is_due = agree(attached, is_save_due=bool(attached.saver.why_due(step, now_s)))
        return is_due or self.should_stop or step == total

    def gather(self) -> None:
        """All ranks: collect what each of them has for the next save, which rank 0 may make alone."""
        attached = self._attached
        if attached.ranks is not None:
            attached.of_ranks = describe_ranks(attached.ranks, attached.rng_state)

    def exchanges_by(self, wrapper: Any) -> None:
        """Tell which DistributedDataParallel adds up the gradients, once `peek` has found a checkpoint or none."""
        ranks = self._attached.ranks
        if ranks is not None and unwrapped(wrapper) is not wrapper and wrapper not in ranks.wrappers:
            ranks.wrappers.append(wrapper)
            restore_replica(ranks, self._session)

    def of_all_ranks(self, value: Any) -> list[Any]:
        """What each rank gives here: plain values and tensors. All ranks call it."""
        ranks = self._attached.ranks
        return [value] if ranks is None else gather_objects(ranks, value)

    def own_of(self, values: list[Any]) -> Any:
        """This rank's, of what `of_all_ranks` has returned."""
        ranks = self._attached.ranks
        return values[0 if ranks is None else ranks.rank]

    def save(
        self,
        state: Mapping[str, Any],
        notes: Mapping[str, Any],
        place: Place,
        *,
        wait: Wait = "never",
        complete: Mapping[str, Any] | None = None,
    ) -> bool:
        """Save the current state; blocks only for the copy. `complete`: training is over, with this `total`."""
        attached = self._attached
        step = attached.stepper.steps_done
        attached.position.epoch, attached.position.batch = place.epoch, place.batch
        session = {"step": step, **place.to_json(), "notes": dict(notes), "fingerprint": attached.fingerprint}
        session["complete"] = None if complete is None else dict(complete)
        if attached.ranks is not None:
            if not attached.of_ranks:
                self.gather()
            session |= attached.of_ranks
            attached.of_ranks = {}
        self._is_over = complete is not None
        attached.saver.state = {**state, "random": attached.rng_state, "session": session, "values": {}}
        metrics = attached.best.label(attached.scalars.known_at(step), step)
        if self.should_stop:
            wait = "durable"
        elif wait == "never" and attached.best.wants_save(step):
            wait = "writer"
        ticket = attached.saver.save(step, metrics=metrics, overlap=wait != "durable", wait=wait)
        if ticket is None:
            return False
        attached.best.carried(ticket, metrics)
        return attached.saver.wait() if wait == "durable" else ticket.outcome not in ("failed", "skipped")

    def leave(self) -> None:
        """End this attempt because a stop was requested: raises Stopped."""
        attached = self._attached
        step = attached.stepper.steps_done
        attached.saver.wait()  # the save under way is the one to resume from
        wait_for_all(attached.ranks)  # a launcher ends the others as soon as the first one exits
        is_saved = attached.saver.last_step == step
        what = "saved" if is_saved else f"not saved; {attached.saver.what_stands(step)}"
        raise Stopped(f"{attached.stop.by}: stopped at step {step}, {what}")

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
        """Whether the `keep_best` metric was measured with this step's weights and is the best so far (on rank 0)."""
        ranks, is_wanted = self._attached.ranks, self._attached.best.wants_save(step)
        return is_wanted if ranks is None or not self._keeps_best else ranks.agree(is_wanted)[0]

    def _save_last(self) -> None:
        """Save again what the framework gave last."""
        step = self._attached.stepper.steps_done
        metrics = self._attached.best.label(self._attached.scalars.known_at(step), step)
        self._attached.saver.save(step, metrics=metrics, overlap=False, wait="durable")

    def _load(self, into: dict[str, Any], *, step: int | None = None) -> Receipt | None:
        ranks, engine = self._attached.ranks, self._attached.saver.engine
        receipt = load_together(ranks, engine, into, step=step)
        if receipt is None:
            refuse_to_begin_anew(self._attached.home, os.environ)
        return receipt

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
        if error is None and self.should_stop and not self._is_over:
            try:
                self.leave()
            except Stopped as stopped:
                error = stopped
        error = attached.find_unsaved(error, self._save_last) or error
        text = error.text if isinstance(error, Stopped) else ""
        if error is not None and not text:
            attached.saver.wait()
            text = f"left after step {step}; {attached.saver.what_stands(step)}"
        error = wait_mirrored(attached, error)
        text = error.text if isinstance(error, Stopped) else text
        attached.end(error, text, is_complete=error is None)
        if isinstance(error, Stopped) and not isinstance(error, Unsaved):
            wait_for_all(attached.ranks)  # the end of rank 0 is written down by now
        is_ours = isinstance(error, Unsaved) and error.is_ours
        if error is not None and kind is None and not is_ours:
            raise error
