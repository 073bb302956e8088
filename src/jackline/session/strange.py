"""A strange loss: a step that is done again (`replay_every=`), and going back behind a spike (`on_spike="rewind"`).

A replay needs the step as a function, so it watches `run.safe_step(fn, batch)`, which recipes use too; a loop that
calls backward() itself cannot be redone from outside, which is said. `on_spike` needs the logged `loss` alone: at the
boundary after a spike the attempt leaves, goes back to a checkpoint before it, takes the batches that led to it out
of the run, and asks to be started again. At most three times, and each is an event, a line of the receipt, and in
`skipped-batches.json`. The rewind is written before the batches are taken out: a kill between the two meets the same
spike again. Owns which batch is named and what is left out. Does not own what is strange (memory/guard/replay).
"""

from __future__ import annotations

import copy
from collections import deque
from typing import TYPE_CHECKING, Any

from jackline.checkpoint.format.catalogue import list_names
from jackline.checkpoint.place import choose_place
from jackline.checkpoint.rewind import go_back_before
from jackline.errors import JacklineError
from jackline.memory.guard.replay import Replay, Replayed, UsualLoss
from jackline.rundir.layout import RunDir
from jackline.rundir.records.seen import Skip, add_skip, batches_in, read_skipped
from jackline.session.stopping import Stopped

if TYPE_CHECKING:
    from jackline.session.attachment import Attachment

MAX_REWINDS = 3
LEFT_OUT = 10  # batches: the spike's own and those before it that the checkpoint has not seen
_REMEMBERED = 4096  # steps: a GPU's losses are known a moment later
_SHOWN = 8


class Rewinding(Stopped):
    """The loss jumped, and `on_spike="rewind"`: the attempt leaves to be started again before it."""

    def __init__(self, step: int, batch: int, why: str) -> None:
        super().__init__(f"{why}; going back (on_spike=rewind)")
        self.step, self.batch, self.why = step, batch, why
        self.is_done = False


class Strange:
    """The losses of one session. Does nothing unless one of the two settings is set."""

    def __init__(self, replay_every: int | None = None, on_spike: str = "continue") -> None:
        self._every = replay_every
        self.is_rewinding = on_spike == "rewind"
        self._usual = UsualLoss()
        self._ends: deque[tuple[int, int]] = deque(maxlen=_REMEMBERED)  # step, and batches consumed when it ended
        self._samples: Any = None
        self._num_boundaries = 0
        self._has_told = self._has_told_spike = False

    def begin(self, attached: Attachment) -> None:
        """Connect it with the parts, or say why it cannot be."""
        tell = attached.reporter.event
        if attached.ranks is not None and (self._every or self.is_rewinding):
            self._every, self.is_rewinding = None, False
            text = "replay_every and on_spike are for a training of one process: not with several ranks"
            tell("protection_off", text, is_loud=attached.ranks.is_first, protection="replay")
        if self._every:
            attached.gpu.replay = Replay(self._every, lambda found: self._tell(attached, found))
        if self.is_rewinding:
            attached.scalars.hear("loss")

    def take(self, batch: Any) -> None:
        """The batch in hand: a recipe's batches know their samples."""
        self._samples = getattr(batch, "windows", None)

    def look(self, attached: Attachment) -> None:
        """At a boundary. Raises Rewinding after a spike."""
        if self._every:
            self._mind_loop(attached)
        if not self.is_rewinding:
            return
        self._ends.append((attached.stepper.steps_done, attached.position.batches))
        for step, loss in attached.scalars.heard():
            middle, why = self._usual.middle, self._usual.why_strange(loss)
            self._usual.add(loss, why)
            end = next((batches for done, batches in self._ends if done == step), None)
            if why and end is not None:
                self._may_rewind(attached, step, end - 1, _spike_text(step, loss, middle))

    def state(self) -> dict[str, Any]:
        return {"strange": self._usual.state()} if self.is_rewinding else {}

    def restore(self, session: dict[str, Any]) -> None:
        self._usual.load(session.get("strange"))

    # -- replay ------------------------------------------------------------------------------------------------------

    def _mind_loop(self, attached: Attachment) -> None:
        """Say once that a loop which calls backward() itself cannot be redone."""
        self._num_boundaries += 1
        if self._num_boundaries < 3 or self._has_told:
            return
        self._has_told = True
        if not attached.gpu.is_stepping:
            text = (
                f"replay_every={self._every}: no step is done again, because this loop calls backward() itself. "
                "run.safe_step(fn, batch) in its place gives Jackline the step as a function"
            )
            attached.reporter.event("protection_off", text, is_loud=True, protection="replay")

    def _tell(self, attached: Attachment, found: Replayed) -> None:
        text = f"step {found.step:,}: {found.text}"
        number = attached.position.batches
        if found.is_of_batch:
            text += f": {self._batch_text(attached)}"
        fields = {"step": found.step, "verdict": found.verdict, "why": found.why, "batch": number}
        is_alarm = found.why != "due" or found.verdict == "hardware or race"
        attached.reporter.event("alarm" if is_alarm else "replay", text, is_loud=True, alarm="replay", **fields)

    def _batch_text(self, attached: Attachment) -> str:
        number = attached.position.batches
        samples = self._samples if self._samples is not None else _indices(attached)
        named = f", samples {_listed(samples)}" if samples is not None and len(samples) else ""
        return (
            f"batch {number} of the run{named}. `jackline resume {attached.name} --step N --skip-batches "
            f"{number}:{number + 1}` goes back and leaves it out"
        )

    # -- rewind ------------------------------------------------------------------------------------------------------

    def _may_rewind(self, attached: Attachment, step: int, batch: int, why: str) -> None:
        if not (text := why_not_back(attached.home.run, step)):
            raise Rewinding(step, batch, why)
        if not self._has_told_spike:
            self._has_told_spike = True
            attached.reporter.event("alarm", f"{why}; {text}", is_loud=True, alarm="spike", step=step)


def last_good(step: int) -> int:
    """The last step whose weights are surely from before a spike at `step`: the update of the step before it may be
    what made the loss jump."""
    return step - 2


def why_not_back(run: RunDir, step: int) -> str:
    """Why a run cannot go back behind a spike at `step`; '' when it can."""
    if len(read_skipped(run).rewinds) >= MAX_REWINDS:
        return f"on_spike=rewind has gone back {MAX_REWINDS} times and does not again"
    if not any(name.step <= last_good(step) for name in list_names(choose_place(run).folder)):
        return "there is no checkpoint before it to go back to"
    return ""


def go_back(attached: Attachment, error: BaseException | None) -> None:
    """The attempt leaves by `error`, and its writer has ended: where that is a Rewinding, do what it says."""
    if not isinstance(error, Rewinding):
        return
    run, tell = attached.home.run, attached.reporter.event

    def say(text: str) -> None:
        tell("rewound", text, is_loud=True, step=error.step)

    try:
        chosen = go_back_before(run, last_good(error.step) + 1, say=say)
    except (JacklineError, OSError) as problem:
        say(f"{error.why}; cannot go back: {problem}")
        return
    if chosen is None:
        say(f"{error.why}; there is no checkpoint before it to go back to")
        return
    folder = attached.saver.engine.folder / str(chosen)
    skip = Skip(max(error.batch - LEFT_OUT + 1, batches_in(folder) or 0), error.batch + 1, why=error.why)
    number = len(add_skip(run, skip, str(chosen)).rewinds)
    error.is_done = True
    say(
        f"{error.why}: back to {chosen}, and the batches {skip} of the run are left out from now on "
        f"(on_spike=rewind, {number} of at most {MAX_REWINDS})"
    )


def _spike_text(step: int, loss: float, usual: float | None) -> str:
    return f"loss {loss:.4g} at step {step}" + (f", usually {usual:.4g}" if usual is not None else "")


def _indices(attached: Attachment) -> list[int] | None:
    """The samples of the batch in hand, where the order is ours."""
    batches = getattr(attached.feed, "batches", None)
    if attached.feed.kind != "seekable" or batches is None:
        return None
    try:
        own = copy.copy(batches)
        own.seek(attached.position.epoch, attached.position.batch)
        found = next(iter(own))[1]
    except Exception:  # a dataset that has changed its length: the batch's number must do
        return None
    return found if isinstance(found, list) else [found]


def _listed(samples: Any) -> str:
    shown = ", ".join(str(int(one)) for one in samples[:_SHOWN])
    return shown if len(samples) <= _SHOWN else f"{shown}, ... ({len(samples)} in all)"
