"""When a session saves, and what it knows about its checkpoints. A thin layer over the checkpoint engine.

Fail open: any error in here is reported once and saving is turned off; training continues. Owns the cadence and the
messages about checkpoints. Does not own what a boundary is (run.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from jackline.checkpoint.engine import FORKED, CheckpointEngine, Wait
from jackline.checkpoint.format.catalogue import BEST, list_names
from jackline.checkpoint.format.manifest import Damage
from jackline.checkpoint.format.verify import read_manifest
from jackline.checkpoint.mirror.progress import LossBounds
from jackline.checkpoint.schedule import Progress, save_is_due
from jackline.checkpoint.ticket import Ticket
from jackline.rundir.access.reading import read_text
from jackline.session.saving.retrained import STATE_EVENT, StateDigest
from jackline.session.settings import Settings
from jackline.units import format_duration

_POLL_EVERY_S = 0.2
_LOOK_EVERY_S = 0.05
FOLD_S = 60.0
Event = Callable[..., None]  # Reporter.event


class Repeats:
    """Folds saves that were skipped or failed for the same reason: the first is told at once, the others are counted.

    A slow disk and a short cadence would otherwise fill the run's events with one line for almost every step.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._key = ("", "")
        self._steps: list[int] = []
        self._told_s = 0.0

    @property
    def kind(self) -> str:
        """Of the series under way: 'skipped', 'failed' or ''."""
        return self._key[0]

    def is_first(self, kind: str, why: str, step: int) -> bool:
        """Whether this one is told by itself."""
        if self._key != (kind, why):
            self._key, self._told_s = (kind, why), self._clock()
            return True
        self._steps.append(step)
        return False

    def take_due(self, *, is_over: bool = False) -> tuple[str, str, dict[str, Any]] | None:
        """The event for those that were counted: kind, text, fields. Once a minute, and when the series is over."""
        kind, why = self._key
        is_due = self._steps and (is_over or self._clock() - self._told_s >= FOLD_S)
        found = None
        if is_due:
            steps, self._steps, self._told_s = self._steps, [], self._clock()
            fields = {"step": steps[-1], "count": len(steps), "first_step": steps[0], "why": why}
            word = "skipped" if kind == "skipped" else "lost"
            where = f"step {steps[0]}" if steps[0] == steps[-1] else f"steps {steps[0]} to {steps[-1]}"
            noun = "1 more save was" if len(steps) == 1 else f"{len(steps)} more saves were"
            found = (f"checkpoint_{kind}", f"{noun} {word} ({where}): {why}", fields)
        if is_over:
            self._key = ("", "")
        return found


class Saver:
    """`state` is the dict that is saved: the user's objects, 'session' and 'random'."""

    def __init__(self, engine: CheckpointEngine, state: dict[str, Any], settings: Settings) -> None:
        self.engine = engine
        self.state = state
        self.why_off = ""
        self._told_off = ""
        self.is_owed = False  # saving was off when the newest state should have been saved
        self.last_step: int | None = None  # step of the newest acknowledged checkpoint
        self.last_at_s: float | None = None
        self._settings = settings
        self._cadence = settings.cadence()
        self._event: Event = lambda *_, **__: None
        self._ticket: Ticket | None = None
        self._metrics: dict[str, float] = {}  # of the last save
        self._is_first = True
        self.asked_step = 0  # step of the last save, acknowledged or not
        self._asked_at_s = time.monotonic()
        self._asked_wall_s = time.time()
        self._stall_s = self._write_s = 0.0
        self._polled_s = self._looked_s = 0.0
        self._best_name, self._best = "", dict[str, Any]()
        self._repeats = Repeats()
        self._digest = StateDigest()
        self.takes_digests = False  # frameworks give their state only when it is saved
        self.on_state: Callable[[int, str], None] = lambda step, digest: None

    def report_to(self, event: Event) -> None:
        self._event = event

    @property
    def ticket(self) -> Ticket | None:
        """Of the last save, under way or over."""
        return self._ticket

    @property
    def has_failed(self) -> bool:
        """Whether the last save was lost."""
        return self._ticket is not None and self._ticket.outcome == "failed"

    def begin(self, step: int) -> None:
        """Training starts or resumes at `step`, which is saved or needs no saving."""
        self.asked_step, self._asked_at_s = step, time.monotonic()

    def why_due(self, step: int, now_s: float) -> str | None:
        if self.why_off or (self._cadence.every_steps is None and now_s - self._looked_s < _LOOK_EVERY_S):
            return None
        self._looked_s = now_s
        progress = Progress(
            now_s, step, self._asked_at_s, self.asked_step, self._stall_s, self._write_s, self._is_first
        )
        return save_is_due(progress, self._cadence)

    def expected_s(self, state_bytes: int) -> float:
        """How long a save takes until it is acknowledged: as long as the last one, or as on a slow disk."""
        return (self._stall_s + self._write_s) or 0.5 + state_bytes / 100e6

    def save(
        self, step: int, *, metrics: dict[str, float], overlap: bool = True, wait: Wait = "never"
    ) -> Ticket | None:
        """Save the current state. `overlap` where the loop's settings allow it; `wait` as in the engine."""
        if self.why_off:
            self.is_owed = True
            return None
        try:
            overlap = overlap and self._settings.overlap
            ticket = self.engine.save(self.state, step=step, metrics=metrics, overlap=overlap, wait=wait)
        except Exception as problem:
            self.turn_off(f"{type(problem).__name__}: {problem}")
            return None
        if ticket.why == FORKED:
            self.turn_off(FORKED)
            return None
        self._metrics = metrics
        self._note(ticket, step)
        self.poll(time.monotonic(), is_urgent=True)  # what was found while the state was read is news for people
        return ticket

    def skip(self, step: int) -> None:
        """Not now: a writer, perhaps of another rank, is still busy with the save before."""
        self._note(Ticket(step, "skipped"), step)

    def prepare(self) -> None:
        """After the first step, when optimizer state exists: allocate room for it during the next steps."""
        try:
            self.engine.prepare(self.state)
        except Exception as problem:
            self.turn_off(f"{type(problem).__name__}: {problem}")

    def note_state(self, step: int) -> None:
        """After the first step that follows a save: record a digest, for an attempt that trains this step again."""
        if self.why_off or not self.takes_digests:
            return
        try:
            found = self._digest.read(self.engine.capture(self.state).sources)
        except Exception as problem:
            self.turn_off(f"{type(problem).__name__}: {problem}")
            return
        if found:
            self.on_state(step, found)
            self._event(STATE_EVENT, "", step=step, digest=found)

    def before_change(self) -> None:
        """The barrier, called by the optimizers' hooks: free unless a copy is under way."""
        self.engine.before_change()

    def poll(self, now_s: float, *, is_urgent: bool = False) -> None:
        """Process the writer's reports, a few times a second."""
        if now_s - self._polled_s < _POLL_EVERY_S and not is_urgent:
            return
        self._polled_s = now_s
        try:
            for event in self.engine.poll():
                self._tell(event)
            self._tell_repeats()
        except Exception as problem:
            self.turn_off(f"{type(problem).__name__}: {problem}")

    def wait(self, timeout_s: float = 3600.0) -> bool:
        """Wait until the save under way is acknowledged or lost; return whether it was acknowledged."""
        ticket = self._ticket
        is_committed = ticket is not None and ticket.wait(timeout_s)
        self.poll(time.monotonic(), is_urgent=True)
        return is_committed

    def turn_on_again(self) -> None:
        """At the end of a run: what turned saving off may be over by now."""
        if not self.engine.why_off:
            self.why_off = ""

    def settle_last(self) -> str:
        """Wait for the last save, and try it again if it has failed. Returns why it is not saved; '' when it is.

        Where no save was asked for, nothing is owed.
        """
        if self.is_owed and self.why_off:
            self.wait()  # an earlier one may be under way, and that is the one to resume from
            return f"the last state is not saved: checkpoints are off: {self.why_off}"
        ticket = self._ticket
        if ticket is None or self.wait():
            return ""
        if self.engine.why_off:
            return f"step {ticket.step} is not saved: {self.engine.why_off}"
        if ticket.is_over:
            again = self._save_again(ticket)
            if again is None or again.wait():
                self.poll(time.monotonic(), is_urgent=True)
                return ""
            ticket = again
        self.poll(time.monotonic(), is_urgent=True)
        return f"step {ticket.step} is not saved: {ticket.why or 'it is still being written'}{ticket.room}"

    def _save_again(self, ticket: Ticket) -> Ticket | None:
        """From the copy in memory; where there was no room for a copy, from the objects themselves."""
        again = self.engine.save_again(ticket)
        if again is None:
            return self.save(ticket.step, metrics=self._metrics, overlap=False, wait="writer")
        self._ticket = again
        return again

    def close(self) -> None:
        try:
            for event in self.engine.close():
                self._tell(event)
            self._tell_repeats(is_over=True)
        except Exception as problem:
            self.turn_off(f"{type(problem).__name__}: {problem}")

    def turn_off(self, why: str) -> None:
        if self.why_off:
            return
        self.why_off, self.is_owed = why, True
        if self._told_off != why:
            self._told_off = why
            self._event("protection_off", f"checkpoints are off: {why}", is_loud=True, protection="checkpoints")

    def look_at_disk(self) -> dict[str, Any] | None:
        """The newest acknowledged checkpoint, for the reporting thread: a loop in a long step does not poll."""
        names = list_names(self.engine.folder)
        if not names:
            return None
        step, at_s = names[0].step, self.last_at_s
        if step == self.asked_step and step != self.last_step:
            at_s = self._asked_wall_s
        return {"step": step, "at_s": at_s, "path": str(self.engine.folder / str(names[0]))}

    def best(self) -> dict[str, Any] | None:
        """The best checkpoint by `keep_best`: name of the metric, value and step."""
        if self._settings.keep_best is None:
            return None
        name = self._settings.keep_best.removeprefix("+")
        try:
            pointed = read_text(self.engine.folder / BEST, 200).strip()
            if pointed != self._best_name:
                manifest = read_manifest(self.engine.folder / pointed)
                self._best = {"step": manifest.step, "value": manifest.metrics[name]}
                self._best_name = pointed
        except (OSError, Damage, KeyError):
            return None
        return {"name": name.removeprefix("best_"), **self._best}

    def bounds(self, newest: dict[str, Any] | None) -> dict[str, Any]:
        """How much work is lost if the process crashes now, and if the machine does."""
        bounds = self._bounds(newest)
        found = {"process_s": bounds.process_s, "machine_s": bounds.machine_s, "text": bounds.text()}
        note = "last upload, confirmed" if bounds.mirror_state == "confirmed" else "last upload, unconfirmed"
        return found if bounds.machine_s is None else {**found, "note": note}

    def at_risk(self) -> LossBounds:
        return self._bounds(self.look_at_disk())

    def _bounds(self, newest: dict[str, Any] | None) -> LossBounds:
        known = self.engine.bounds()
        at_s = newest["at_s"] if newest else None
        process_s = None if at_s is None else max(0.0, time.time() - at_s)
        return LossBounds(process_s, known.machine_s, known.mirror_state)

    def what_stands(self, step: int) -> str:
        """What a run that ended at `step` without a save resumes from."""
        if self.last_step is None:
            return "there is no checkpoint: it starts over"
        if step <= self.last_step:
            return f"the checkpoint of step {self.last_step} stands"
        age = "" if self.last_at_s is None else f" of {format_duration(max(0.0, time.time() - self.last_at_s))} ago"
        count = step - self.last_step
        return (
            f"the checkpoint of step {self.last_step}{age} stands; {count} step{'s' * (count > 1)} will be repeated"
        )

    def _note(self, ticket: Ticket, step: int) -> None:
        if ticket.outcome == "skipped":
            # Try again soon, but not at every step.
            self._asked_at_s = max(self._asked_at_s, time.monotonic() - 1.0)
            return
        self._ticket, self.asked_step, self._asked_at_s = ticket, step, time.monotonic()
        self.is_owed = False
        self._asked_wall_s = time.time()
        self._is_first = False

    def _tell(self, event: Any) -> None:
        if event.kind == "committed" and event.step is not None:
            is_ours = self._ticket is not None and self._ticket.step == event.step
            self.last_step, self.last_at_s = event.step, self._asked_wall_s if is_ours else event.at_s
            if self._ticket is not None and is_ours:
                self._stall_s = max(self._ticket.stall_s, self._stall_s / 2)
                self._write_s = self._ticket.write_s
        if self._is_folded(event):
            return
        record = event.to_json()
        is_loud = event.is_loud and event.kind != "skipped"  # a busy writer is no news: the next save comes soon
        self._event(record.pop("kind"), record.pop("text"), is_loud=is_loud, **_without(record, "at_s"))
        if event.kind == "off":
            self.turn_off(self.engine.why_off)

    def _is_folded(self, event: Any) -> bool:
        """Whether it is one more of a series that was told already; ends a series of failures when a save works."""
        if event.kind == "committed" and self._repeats.kind == "failed":
            self._tell_repeats(is_over=True)
            self._event("checkpoint_works", f"saving works again: step {event.step} is saved", is_loud=True)
        if event.kind not in ("skipped", "failed"):
            return False
        if self._repeats.kind != event.kind:
            self._tell_repeats(is_over=True)
        why = str(event.fields.get("why") or event.text.partition(": ")[2])
        return not self._repeats.is_first(event.kind, why, event.step or 0)

    def _tell_repeats(self, *, is_over: bool = False) -> None:
        if (found := self._repeats.take_due(is_over=is_over)) is not None:
            kind, text, fields = found
            self._event(kind, text, is_loud=kind == "checkpoint_failed", **fields)


def _without(record: dict[str, Any], *names: str) -> dict[str, Any]:
    return {word: value for word, value in record.items() if word not in (*names, "event")}
