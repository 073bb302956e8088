"""The parts of a session, and the actions of its run: take a batch, reach a boundary, save, begin, end.

The parts do not know one another; this module connects them. Owns the state that goes into a checkpoint and its
position. run.py owns what a step or a boundary is, and in which order things happen.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from jackline.checkpoint.engine import Wait
from jackline.checkpoint.state.rng import ProcessRandom
from jackline.errors import JacklineError, UsageError
from jackline.memory.guard.safe_step import OutOfMemory
from jackline.rundir.intent import write_intent
from jackline.rundir.records.seen import SkippedBatches
from jackline.session.counting import StepLengths
from jackline.session.feeds.compared import SeenBatches, rehearse
from jackline.session.feeds.feed import END, Feed, Position, take_wanted
from jackline.session.home import Home, exit_as_unsaved, write_ending
from jackline.session.memory.gpu import GpuMemory
from jackline.session.memory.host import HostMemory, SaveCost
from jackline.session.metrics.pulse import Pulse
from jackline.session.metrics.reporting import Reporter, say
from jackline.session.metrics.scalars import Scalars
from jackline.session.phase import phase
from jackline.session.ranks import Ranks, all_of, describe_ranks, is_same_size, save_together
from jackline.session.saving import roundtrip
from jackline.session.saving.best import BestKeeper
from jackline.session.saving.changes import Fingerprint
from jackline.session.saving.finishing import Finish
from jackline.session.saving.loose import Loose
from jackline.session.saving.saver import Saver
from jackline.session.saving.trial import Trial
from jackline.session.settings import Settings
from jackline.session.stepping import Stepper, describe_grown, find_sizes
from jackline.session.stopping import Stopped, StopRequest, Unsaved, cause_of
from jackline.session.strange import Rewinding, Strange, go_back


@dataclass
class Attachment:
    """All parts of one session. Created by attach.py."""

    home: Home
    settings: Settings
    stepper: Stepper
    feed: Feed
    saver: Saver
    scalars: Scalars
    reporter: Reporter
    stop: StopRequest
    rng_state: ProcessRandom
    fingerprint: Fingerprint
    values: dict[str, Any]
    gpu: GpuMemory
    best: BestKeeper
    finish: Finish
    seen: SeenBatches
    position: Position = field(default_factory=Position)
    skipped: SkippedBatches = field(default_factory=SkippedBatches)
    lengths: StepLengths = field(default_factory=StepLengths)
    restored: dict[str, Any] | None = None
    label: int = 1  # step of what is logged now: the step under way, or the last one after it has ended
    pulse: Pulse = field(default_factory=Pulse)
    host: HostMemory | None = None  # None: host memory is not guarded
    marks: tuple[int, dict[str, float]] = (-1, {})  # metrics for the checkpoint of one step only
    trial: Trial | None = None  # the first two steps of a new run, trained twice
    loose: Loose | None = None  # state of the loop that no checkpoint holds, during the first epoch of a new run
    ranks: Ranks | None = None  # None: a training of one process
    strange: Strange = field(default_factory=Strange)
    of_ranks: dict[str, Any] = field(default_factory=dict)  # of all ranks, for the save under way
    is_over: bool = False
    pid: int = field(default_factory=os.getpid)
    _is_opened: bool = False
    _is_prepared: bool = False
    _sizes: dict[str, str] = field(default_factory=dict)  # at the last save, or when training began
    _is_behind: bool = False  # passes of earlier attempts were skipped without training

    @property
    def name(self) -> str:
        return self.home.run.name

    @property
    def is_exhausted(self) -> bool:  # a stream that is read once: no further epoch will come
        return bool(getattr(self.feed, "is_exhausted", False))

    # -- progress ----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        self.stop.listen()
        if callable(listen := getattr(self.feed, "stop_when", None)):
            listen(lambda: self.stop.is_made)
        if self.stop.why_deaf:
            self.reporter.event("protection_off", self.stop.why_deaf, is_loud=True, protection="signals")
        self.reporter.start()
        if self.settings.memory_guard:
            self.host = HostMemory(self.feed, self.reporter.event, self.reopen)
            self.host.start()

    def open(self) -> None:
        """Before a pass: verify saving once, seek to the position, and only then restore the RNG states."""
        is_first, self._is_opened = not self._is_opened, True
        if is_first:
            self.stepper.refuse_moved()
            self._begin()
            if self.restored is None and self.settings.verify and (text := rehearse(self.feed)):
                self.reporter.event("data_unverified", text, is_loud=True)
            is_same = is_same_size(self.ranks, self.restored)
            self.seen.start(self.position.batches, is_resumed=is_same, until=self.skipped.first)
            self.pulse.name = "train"
        if self._is_behind:
            self._is_behind = False
            self.saver.engine.load_newest(self.saver.state, step=(self.restored or {}).get("step"))
            is_first = True
        self.feed.open(self.position.epoch, self.position.batch)
        if is_first:
            self.rng_state.reapply()  # creating an iterator may have drawn random numbers
            self.stepper.uncounted.begin()
        self.come_round()
        if is_first and self.trial is not None:
            self.trial.begin(self)

    def reopen(self) -> None:
        """Open the feed again at the same position, with its current settings."""
        if self._is_opened:
            self.feed.open(self.position.epoch, self.position.batch)

    def take(self) -> Any:
        self.pulse.now("fetch")
        if self.trial is not None:
            self.trial.before_take()
        batch = take_wanted(self.feed, self.position, self.skipped, self.reporter.event)
        self.pulse.now("")
        self.gpu.look_at(batch)
        if self.trial is not None:
            self.trial.record(batch)
        if batch is not END:
            self.strange.take(batch)
            self.seen.look(self.position.batches, self.stepper.steps_done, batch)
        return batch

    def between_passes(self) -> None:
        """What is logged now (a validation after the loop) belongs to the previous step: it may be the last one."""
        if self.trial is not None:
            self.trial.pass_ended()
        self.label = self.stepper.steps_done
        self.best.mark(self.stepper.steps_done, self.values, self.stepper.tensors, is_asked=True)

    def next_epoch(self) -> None:
        self.position.epoch += 1
        self.position.batch = 0

    def open_next_epoch(self) -> None:
        """The same pass continues with the next epoch."""
        if self.position.batch == 0:
            raise UsageError(
                f"the data gave no batch in epoch {self.position.epoch}, at step {self.stepper.steps_done}",
                hint="data that can be read once only (a generator) cannot be read again; ask for fewer steps",
            )
        self.next_epoch()
        self.feed.open(self.position.epoch, 0)

    def pass_over(self, number: int) -> None:
        """The loop counts its epochs itself and has reached one that an earlier attempt completed."""
        if not self._is_behind:
            text = f"epoch {number} was done before; `for epoch in run.epochs(...)` would continue at once"
            self.reporter.event("passed_over", text, is_loud=True)
        self._is_behind = True

    def come_round(self) -> float:
        """Do the work of a boundary. Returns the time."""
        now_s = time.monotonic()
        self.pulse.now("")
        self.saver.poll(now_s)
        if self.stepper.steps_done == self.saver.asked_step + 1:
            # A resumed run compares itself with these losses, so they should be on disk soon.
            self.scalars.send(float("inf"))
            self.saver.note_state(self.stepper.steps_done)
            self.reporter.hurry()
        else:
            self.scalars.send(now_s)
        self.stepper.mark()
        self.best.mark(self.stepper.steps_done, self.values, self.stepper.tensors, is_asked=False)
        self.label = self.stepper.steps_done + 1
        if not self._is_prepared and self.stepper.steps_done > self.saver.asked_step:
            self._is_prepared = True
            self.saver.prepare()
        self._mind_memory(now_s)
        self.strange.look(self)
        if self.trial is not None:
            self.trial.at_boundary(self)
        if self.loose is not None:
            self.loose.look(self.stepper.steps_done, self.position.epoch, self.saver.state)
        return now_s

    def save(
        self,
        *,
        overlap: bool = True,
        wait: Wait = "never",
        again: bool = False,
        takes_back: bool = False,
        alone: bool = False,
    ) -> bool:
        """Save the current state. False when that failed or, with wait='durable', when it was not acknowledged.

        `overlap` and `wait` as in the engine. `again`: save even if this step is saved already. All ranks call this
        at the same boundary, unless `alone`: then the RNG states of the last common save are used.
        """
        save = partial(self._save, overlap=overlap, takes_back=takes_back)
        return save_together(self, save, wait=wait, again=again, alone=alone)

    def _save(self, wait: Wait, again: bool, *, overlap: bool, takes_back: bool) -> bool:
        step = self.stepper.steps_done
        again = again or self.best.wants_save(step)
        if self.saver.last_step == step and not self.saver.engine.is_busy and not again:
            return True
        try:
            self._tell_grown()
            self.saver.state["session"] = self._session_state(takes_back=takes_back)
            held = self.best.held_values
            self.saver.state["values"] = dict(self.values if held is None else held)
        except Exception as problem:
            self.saver.turn_off(f"{type(problem).__name__}: {problem}")
            return False
        self.pulse.now("save")
        marks = self.marks[1] if self.marks[0] == step else {}
        metrics = {**self.best.label(self.scalars.known_at(step), step), **marks}
        ticket = self.saver.save(step, metrics=metrics, overlap=overlap, wait=wait)
        if ticket is None:
            return False
        self.best.carried(ticket, metrics)
        self.reporter.hurry()
        is_saved = self.saver.wait() if wait == "durable" else ticket.outcome not in ("failed", "skipped")
        self.pulse.now("")
        return is_saved

    def save_marked(self, *, takes_back: bool) -> bool:
        """Save the state of the last boundary later: a value measured since then belongs to it and is a new best."""
        step = self.stepper.steps_done
        why = ""
        if takes_back and not self.feed.can_take_back:
            why = "its batch was taken from the data already, which cannot take it back"
        elif self.stepper.has_changed() or not self.best.is_marked(step, self.stepper.tensors):
            why = "the weights have been written to since the end of that step"
        if why:
            self.best.refuse(step, why, self.reporter.event)
            return False
        with self.best.as_marked(self.rng_state):
            return self.save(overlap=False, wait="writer", again=True, takes_back=takes_back)

    def note_schedule(self, **words: Any) -> None:
        """Record `total` or `epochs` as the loop requests them, and compare them with the saved ones."""
        for word, value in words.items():
            before = ((self.restored or {}).get("fingerprint") or {}).get("schedule", {}).get(word)
            if word == "total" and value is not None:
                self.pulse.total = value
            if value is not None and self.fingerprint["schedule"].get(word) != value:
                self.fingerprint["schedule"][word] = value
                if before is not None and before != value:
                    self._judge_schedule(f"{word}: {before} -> {value}")

    def find_unsaved(self, error: BaseException | None, save_last: Callable[[], Any] | None) -> Unsaved | None:
        """When leaving by `error` would count as finished: wait for the last save; what to raise if that fails.

        `save_last` saves the state at the end once more, if saving was off; None where there is no such state.
        """
        if cause_of(error)[0] != "finished":
            return None
        if self.saver.is_owed and save_last is not None:
            self.saver.turn_on_again()
            save_last()
        if not (why := self.finish.keep()):
            return None
        is_ours = bool(self.saver.why_off) and not self.saver.engine.why_off
        return Unsaved(f"{why}; {self.saver.what_stands(self.stepper.steps_done)}", is_ours=is_ours)

    def end(self, error: BaseException | None, text: str, *, is_complete: bool) -> None:
        """The block is left, in whatever way. A failure to write the end is not raised: training is over."""
        turns: tuple[Any, ...] = (self.ranks.turns,) if self.ranks is not None else ()
        for part in (self.saver, self.stepper, self.seen, *turns):
            part.close()
        try:
            go_back(self, error)
            self._write_end(error, text, is_complete=is_complete)
        except Exception as problem:  # the folder was deleted, or the disk is full
            say(f"the end of this run cannot be written down ({type(problem).__name__}: {problem})")
        finally:
            self.stop.stop_listening()
            self.is_over = True
        if isinstance(error, Unsaved) and error.is_ours:
            exit_as_unsaved(self.home, text, say)

    def _write_end(self, error: BaseException | None, text: str, *, is_complete: bool) -> None:
        step = self.stepper.steps_done
        if text:
            self.reporter.event("left", text, is_loud=True, step=step)
        if is_complete:
            self.reporter.event("complete", f"complete at step {step}", step=step)
            self.best.tell_unseen(self.scalars.known(), self.reporter.event)
        cause, code = cause_of(error)
        needs_new_process = self.gpu.note_error(error, self.label)
        if self.host is not None:
            self.host.stop()
        if isinstance(error, Stopped):
            leaving = self.host.leaving if self.host is not None else None
            settings = leaving.settings if leaving else {}
            is_unsaved = isinstance(error, Unsaved)
            again = leaving is not None or (isinstance(error, Rewinding) and error.is_done)
            write_intent(self.home.attempt, restart=again, why=text, settings=settings, is_unsaved=is_unsaved)
        elif needs_new_process and isinstance(error, OutOfMemory):
            write_intent(self.home.attempt, restart=True, why=f"{error.message}; a new process has it all back")
        self.pulse.end(cause)
        self.reporter.close()
        write_ending(self.home, exit_code=code, cause=cause, text=text or f"complete at step {step}")

    # -- private -----------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        self.saver.begin(self.stepper.steps_done)
        self._sizes = find_sizes(self.saver.state)
        if self.restored is not None:
            return
        if self.ranks is not None:  # a resume may begin with what is saved here
            self.of_ranks = describe_ranks(self.ranks, self.rng_state)
        self.saver.state["session"] = self._session_state()
        self.saver.state["values"] = dict(self.values)
        if not self.settings.verify or self.saver.why_off:
            return
        with phase("verify that saving works"):
            try:
                together = partial(all_of, self.ranks)
                roundtrip.verify(self.saver.engine, self.saver.state, self.stepper.steps_done, together)
                if text := roundtrip.find_unattached(self.saver.engine, self.saver.state):
                    self.reporter.event("unattached", text, is_loud=True)
            except JacklineError:
                raise
            except Exception as problem:
                text = f"saving could not be verified ({type(problem).__name__}: {problem}); training continues"
                self.reporter.event("unverified", text, is_loud=True)
        if self.settings.trial and not self.stepper.steps_done:
            self.trial = Trial(self.saver.engine, self.reporter.event)
            self.loose = Loose(self.reporter.event)
        self.saver.poll(time.monotonic(), is_urgent=True)
        self.saver.begin(self.stepper.steps_done)

    def _tell_grown(self) -> None:
        """Models and optimizers that grow during training: a resume needs them at their size."""
        before, self._sizes = self._sizes, find_sizes(self.saver.state)
        for text in describe_grown(before, self._sizes, self.name):
            self.reporter.event("grown", text, is_loud=True)

    def _session_state(self, *, takes_back: bool = False) -> dict[str, Any]:
        return {
            **self.of_ranks,
            "step": self.stepper.steps_done,
            "epoch": self.position.epoch,
            "batch": self.position.batch,
            "batches": self.position.batches,
            "counting": {**self.stepper.state(), "lengths": self.lengths.state()},
            "feed": {"kind": self.feed.kind, "state": self.feed.state(takes_back=takes_back)},
            "fingerprint": self.fingerprint,
            "safe_step": self.gpu.state(),
            **self.strange.state(),
        }

    def _mind_memory(self, now_s: float) -> None:
        """At a boundary: if the host's memory is not enough for another step, end here."""
        if self.host is None or self.stop.is_made:
            return
        try:
            leave = self.host.mind(now_s, self._save_cost)
        except Exception as problem:
            self.host.stop()
            self.host = None
            text = f"host memory is not guarded: {type(problem).__name__}: {problem}"
            self.reporter.event("protection_off", text, is_loud=True, protection="host memory")
            return
        if leave is None or self.saver.why_off:
            return  # without a checkpoint, leaving would only lose the work sooner
        write_intent(self.home.attempt, restart=True, why=leave.why, settings=leave.settings)
        self.stop.ask(leave.why)

    def _save_cost(self) -> SaveCost:
        state_bytes = self.gpu.state_bytes()
        # The first save allocates host memory; later ones reuse it.
        return SaveCost(self.saver.expected_s(state_bytes), state_bytes if self.saver.last_step is None else 0)

    def _judge_schedule(self, text: str) -> None:
        verdict = self.settings.verdicts()["schedule"]
        if verdict == "refuse":
            raise UsageError(f"the schedule has changed: {text}", hint="on_change={'schedule': 'warn'} continues")
        if verdict == "warn":
            self.reporter.event("changed", f"the schedule has changed since it was saved: {text}", is_loud=True)
