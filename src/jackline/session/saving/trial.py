"""The first two steps, trained twice: from the same state they must give the same state, or something is not saved.

After step 2 the process is forked. The copy returns everything that is attached to the state before step 1 and lets
the loop continue: it trains the two steps again, with the same batches, and compares every value after each. State
that lives in a closure, a global variable or an object inside an object is not returned, so it shows. The training
process waits for the copy and is not touched by it. Owns the recording, the copy and the verdict; sandbox.py confines
the copy.
"""

from __future__ import annotations

import copy
import json
import os
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from jackline.checkpoint.engine import CheckpointEngine
from jackline.checkpoint.state.rng import ProcessRandom
from jackline.checkpoint.state.snapshot import Snapshot, return_to, take_snapshot
from jackline.machine.memory import effective_limit, used_against
from jackline.session.saving.roundtrip import OURS, Unverified, compare, fingerprint
from jackline.session.saving.sandbox import confine, release_threads, wait_for_copy, why_not_forked
from jackline.session.saving.suspects import Summaries, name_changed, read_variables, starts_from_run
from jackline.units import format_bytes, format_duration

NUM_STEPS = 2
MAX_STATE_BYTES = 2 << 30
_MAX_BATCH_BYTES = 256 << 20
_MAX_BATCHES = 64
_MAX_S = 300.0  # for the two steps
_LEAST_WAIT_S = 20.0
_BATCHES = "batches until its end"
HINT = "attach what your loop changes (attach(name=object), run.values); attach(trial=False) continues regardless"


class Loop(Protocol):
    """What the trial needs of an attachment (attachment.py)."""

    saver: Any
    values: dict[str, Any]
    stepper: Any
    position: Any
    stop: Any
    reporter: Any
    feed: Any
    host: Any
    label: int
    pid: int


class _Silent:
    """A reporter for the copy: the real one's locks may be held by a thread that the copy does not have."""

    def event(self, kind: str, text: str, *, is_loud: bool = False, **fields: Any) -> None:
        pass

    def hurry(self) -> None:
        pass


class Recorded(NamedTuple):
    """A batch of the first steps, and the RNG states before and after it was read."""

    batch: Any
    before: dict[str, Any]
    after: dict[str, Any]


@dataclass
class Replay:
    """A feed that gives the recorded batches again, with the RNG states as they were after each."""

    batches: list[Recorded]
    finish: Callable[[str], None]
    run_out: Callable[[], None]  # the loop wants more batches than the first time
    kept: Any = None  # the real feed: its worker processes must not be ended by this copy
    kind: str = "trial"
    num_batches: int | None = None
    can_take_back: bool = True

    def open(self, epoch: int, start: int) -> None:
        self.finish("the loop began another pass over its data within the two steps")

    def take(self) -> Any:
        if not self.batches:
            self.run_out()
        recorded = self.batches.pop(0)
        if ProcessRandom().state_dict() == recorded.before:
            ProcessRandom().load_state_dict(recorded.after)  # what reading the data had drawn
        return recorded.batch

    def state(self, *, takes_back: bool = False) -> dict[str, Any]:
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        pass

    def describe(self) -> list[str]:
        return []


@dataclass
class Trial:
    """One trial. `event` reports; `engine` says what a save would hold. Over when `is_over`."""

    engine: CheckpointEngine
    event: Callable[..., None]
    is_over: bool = False
    is_copy: bool = False
    _start: Snapshot | None = None
    _random: dict[str, Any] = field(default_factory=dict)
    _place: Any = None
    _batches: list[Recorded] = field(default_factory=list)
    _before: dict[str, Any] = field(default_factory=dict)
    _after: dict[int, dict[str, Any]] = field(default_factory=dict)
    _differences: dict[int, list[str]] = field(default_factory=dict)
    _variables: Summaries = field(default_factory=dict)
    _has_shared: bool = False  # a batch came from a DataLoader's worker, through memory that both share
    _began_s: float = 0.0
    _report_fd: int = -1

    # -- the training process ----------------------------------------------------------------------------------------

    def begin(self, loop: Loop) -> None:
        """At the boundary before step 1, with the data open."""
        self._guard(self._begin, loop)

    def before_take(self) -> None:
        if not self.is_over and not self.is_copy and self._start is not None:
            self._before = ProcessRandom().state_dict()

    def record(self, batch: Any) -> None:
        """A batch was taken from the data and goes to the loop now."""
        if self.is_over or self.is_copy or self._start is None:
            return
        try:
            kept = copy.deepcopy(batch)
            self._has_shared |= any(map(_is_shared, _leaves(batch)))
            size = sum(map(_size_of, _leaves([kept, [one.batch for one in self._batches]])))
        except Exception as problem:
            self._give_up(f"a batch cannot be copied ({type(problem).__name__})")
            return
        self._batches.append(Recorded(kept, self._before, ProcessRandom().state_dict()))
        if len(self._batches) > _MAX_BATCHES:
            self._give_up(f"its first two steps have more than {_MAX_BATCHES} batches")
        elif size > _MAX_BATCH_BYTES:
            self._give_up(f"batches of {format_bytes(size)} are not kept for it")

    def at_boundary(self, loop: Loop) -> None:
        """A step has ended, in the training process or in the copy. Raises Unverified."""
        if self.is_over or self._start is None:
            return
        step = loop.stepper.steps_done
        if self.is_copy:
            self._compare(loop, step)
        elif loop.stepper.uncounted.by_batch or loop.stepper.uncounted.idle:
            self._give_up("not every attached optimizer reports its steps")
        elif step <= NUM_STEPS and not loop.stop.is_made:
            self._guard(self._look, loop)
            if step == NUM_STEPS and not self.is_over:
                self._decide(loop)
        else:
            self._give_up("the loop did not stop at the end of its second step")

    def pass_ended(self) -> None:
        """The data ended before the two steps did: what a loop does after a pass is not trained twice."""
        if self.is_copy:
            self._finish("the data ended earlier than the first time")
        elif not self.is_over and self._start is not None:
            self._give_up("one pass over the data has fewer than three steps")

    def leave(self, error: BaseException | None) -> None:
        """The loop's block is left. The copy goes no further: the code behind it is the training's."""
        if self.is_copy:
            what = "" if error is None else f": {type(error).__name__}: {error}"
            self._finish(f"the loop was left within the two steps{what}"[:300])

    # -- private -----------------------------------------------------------------------------------------------------

    def _guard(self, action: Callable[[Loop], None], loop: Loop) -> None:
        try:
            action(loop)
        except Exception as problem:
            self._give_up(f"{type(problem).__name__}: {problem}"[:200])

    def _begin(self, loop: Loop) -> None:
        state = _state_of(loop)
        size = sum(source.tensor.nbytes for source in self.engine.capture(state).sources)
        why = why_not_forked(has_batches=False) or _why_too_large(size)
        if why:
            self._give_up(why)
            return
        self._random = ProcessRandom().state_dict()
        self._place = replace(loop.position)
        self._start = take_snapshot({**state, "random": ProcessRandom()})
        self._began_s = time.monotonic()

    def _look(self, loop: Loop) -> None:
        self._after[loop.stepper.steps_done] = self._read(loop) | {_BATCHES: len(self._batches)}
        if loop.stepper.steps_done < NUM_STEPS:
            self._variables = read_variables(_state_of(loop))  # now the loop's own variables exist

    def _read(self, loop: Loop) -> dict[str, Any]:
        return fingerprint(self.engine, {**_state_of(loop), "random": ProcessRandom()})

    def _decide(self, loop: Loop) -> None:
        self.is_over = True
        try:
            self._judge(loop)
        except Unverified:
            raise
        except Exception as problem:  # no memory or no process left
            self._give_up(f"{type(problem).__name__}: {problem}"[:200])
        finally:
            if not self.is_copy:
                self._forget()

    def _forget(self) -> None:
        self._start = None
        self._batches, self._after, self._variables = [], {}, {}

    def _judge(self, loop: Loop) -> None:
        took_s = time.monotonic() - self._began_s
        why = why_not_forked(has_batches=self._has_shared)
        if not why and took_s > _MAX_S:
            why = f"two steps take {format_duration(took_s)}"
        first: dict[str, Any] = {"why": why} if why else self._fork(loop, took_s)
        if self.is_copy:
            return
        if first.get("why"):
            self._give_up(str(first["why"]))
            return
        if not first["differences"]:
            self.event("verified", "steps 1 and 2, trained again from the restored state, gave the same bits")
            return
        second = self._fork(loop, took_s)
        if self.is_copy:
            return
        self._refuse(loop, first["differences"], is_repeatable=second.get("differences") == first["differences"])

    def _refuse(self, loop: Loop, differences: dict[str, list[str]], *, is_repeatable: bool) -> None:
        step = min(differences, key=int)
        names = [line.partition(":")[0] for line in differences[step]]
        shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
        changed = name_changed(self._variables, read_variables(_state_of(loop)))
        lines = [f"different after step {step}: {shown}"]
        if not changed and any(has_gradients(value) for value in _state_of(loop).values()):
            lines.append("gradients are not saved: does a step add to those of the step before it (no zero_grad())?")
        if changed:
            lines.append(f"changed by these steps and not attached: {', '.join(changed)}")
        if is_repeatable and starts_from_run():
            text = (
                "steps 1 and 2 give another result when they are trained again from the saved state, unless a "
                f"counter of the loop that starts from run.step explains it; {'; '.join(lines)}. If it does, "
                "attach(trial=False) leaves this out"
            )
            self.event("unverified", text, is_loud=True)
            return
        if is_repeatable:
            raise Unverified(
                "steps 1 and 2 give another result when they are trained again from the saved state: they depend on "
                "something that is not saved",
                detail=tuple(lines),
                hint=HINT,
            )
        text = (
            "steps 1 and 2 give another result each time they are trained from the same state, so a resume cannot be "
            f"bit-exact (time, threads, generators without a seed?); {lines[0]}"
        )
        self.event("unrepeatable", text, is_loud=True)

    def _give_up(self, why: str) -> None:
        if self.is_copy:
            self._finish(why)
        self.is_over = True
        self._forget()
        self.event("unverified", f"not verified by training two steps twice: {why}", is_loud=True, why=why)

    def _fork(self, loop: Loop, took_s: float) -> dict[str, Any]:
        """Fork, and wait for what the copy reports. In the copy it returns at once, and the loop continues."""
        release_threads()
        read_fd, write_fd = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python 3.12 warns of threads: why_not_forked has looked at them
            pid = os.fork()
        if pid == 0:
            self._become_copy(loop, write_fd)
            return {}
        os.close(write_fd)
        return wait_for_copy(pid, read_fd, max(_LEAST_WAIT_S, 10 * took_s), lambda: loop.stop.is_made)

    # -- the copy ----------------------------------------------------------------------------------------------------

    def _become_copy(self, loop: Loop, report_fd: int) -> None:
        self.is_copy, self.is_over, self._report_fd = True, False, report_fd
        try:
            confine(report_fd, lambda what: self._finish(f"the loop does this within its first two steps: {what}"))
            assert self._start is not None
            self._take_over(loop)
            return_to(self._start, {**_state_of(loop), "random": ProcessRandom()})
            ProcessRandom().load_state_dict(self._random)
        except BaseException as problem:
            self._finish(f"{type(problem).__name__}: {problem}"[:300])

    def _take_over(self, loop: Loop) -> None:
        loop.pid = os.getpid()

        def run_out() -> None:
            step = loop.stepper.steps_done + 1
            self._differences[step] = [f"{_BATCHES}: {self._after[step][_BATCHES]} -> more"]
            self._finish("")

        loop.feed = Replay(list(self._batches), self._finish, run_out, kept=(loop.feed, loop.reporter))
        loop.reporter, loop.host = _Silent(), None
        loop.saver.why_off = "this is a copy of the training process"
        loop.stepper.go_on_from(0)
        vars(loop.position).update(vars(self._place))
        loop.label = 1

    def _compare(self, loop: Loop, step: int) -> None:
        try:
            now = self._read(loop) | {_BATCHES: len(self._batches) - len(loop.feed.batches)}
            found = compare(self._after[step], now)
            if found:
                self._differences[step] = found[:50]
        except BaseException as problem:
            self._finish(f"{type(problem).__name__}: {problem}"[:300])
        if step >= NUM_STEPS:
            self._finish("")

    def _finish(self, why: str) -> None:
        """End the copy. Nothing of the training may run here: no exit functions, no finalizers."""
        body = json.dumps({"why": why, "differences": self._differences}).encode()
        try:
            os.write(self._report_fd, body[:60_000])
        finally:
            os._exit(0)


def has_gradients(value: Any) -> bool:
    return isinstance(value, nn.Module) and any(one.grad is not None for one in value.parameters())


def _state_of(loop: Loop) -> dict[str, Any]:
    """The person's objects, and `run.values` itself."""
    return {word: part for word, part in loop.saver.state.items() if word not in OURS} | {"values": loop.values}


def _why_too_large(state_bytes: int) -> str:
    if state_bytes > MAX_STATE_BYTES:
        return f"the state is {format_bytes(state_bytes)}, and it is done up to {format_bytes(MAX_STATE_BYTES)}"
    limit = effective_limit()
    free = limit.limit_bytes - used_against(limit, [os.getpid()])
    needed = 3 * state_bytes + _own_bytes()
    if needed > free:
        return f"a copy of the process may need {format_bytes(needed)}, and {format_bytes(max(0, free))} are free"
    return ""


def _own_bytes() -> int:
    """Anonymous memory of this process: what a copy could come to need."""
    try:
        with open("/proc/self/status", encoding="ascii") as lines:
            return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))
    except (OSError, StopIteration, ValueError):
        return 0


def _leaves(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        return _leaves(list(value.values()))
    if isinstance(value, list | tuple):
        return [leaf for part in value for leaf in _leaves(part)]
    return [value]


def _is_shared(value: Any) -> bool:
    is_strided = isinstance(value, torch.Tensor) and value.layout is torch.strided
    return is_strided and bool(value.untyped_storage().is_shared())


def _size_of(value: Any) -> int:
    return int(value.nbytes) if isinstance(value, torch.Tensor) or hasattr(value, "nbytes") else 64
