"""Saves the state of this process as a verified checkpoint, though its script never asked for one.

Runs in the user's process (`supervisor/child/inside/rescue` calls it), in the training's own thread between two steps
where one comes, else in a thread of ours. Owns what is saved and the record of it. Changes nothing of the training:
it reads tensors and calls `state_dict()`, and leaves every RNG as it was.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jackline.checkpoint.engine import CheckpointEngine, EngineSettings
from jackline.checkpoint.place import rescue_place
from jackline.checkpoint.rescue.live import CannotRescue, Found, Part, find_state, live_objects
from jackline.checkpoint.rescue.names import Scope
from jackline.checkpoint.rescue.places import list_places
from jackline.checkpoint.state.capture import capture
from jackline.checkpoint.state.rng import ProcessRandom
from jackline.checkpoint.ticket import Ticket
from jackline.checkpoint.writer.retention import Keep
from jackline.errors import JacklineError
from jackline.machine.disk import read_disk
from jackline.rundir.layout import DISK_BUDGET_VARIABLE, AttemptDir, RunDir
from jackline.rundir.records.rescue import RescueRecord, write_rescue
from jackline.units import format_bytes, format_duration

KEEP = Keep(last=2)
SMALL_BYTES = 64 << 20  # rescued without asking, however short the training was
BYTES_PER_TRAINED_S = 20 << 20  # above it: 1.5 GB after 75 s of training
LEAST_TRAINED_S = 10.0  # after which gradients without an optimizer are taken for a training
MAX_SHARE_OF_DISK = 0.25  # of the free space, for a rescue that nobody asked for
NOT_AT_BOUNDARY = "not at a step boundary"


@dataclass(frozen=True)
class Moment:
    """When and why. `num_steps` were counted in this process, the first of them `trained_s` ago."""

    id: str
    cause: str
    text: str
    is_boundary: bool
    num_steps: int
    trained_s: float
    is_asked: bool = False  # by a person: then it may cost what it costs
    is_counted: bool = True  # False: no optimizer of torch has stepped


def too_dear(size_bytes: int, free_bytes: int | None, trained_s: float) -> str:
    """Why a rescue that nobody asked for is not worth its space; '' when it is."""
    if free_bytes is not None and size_bytes > MAX_SHARE_OF_DISK * free_bytes:
        return f"the state has {format_bytes(size_bytes)} and the disk has {format_bytes(free_bytes)} left"
    if size_bytes > max(SMALL_BYTES, BYTES_PER_TRAINED_S * trained_s):
        return f"the state has {format_bytes(size_bytes)} and only {format_duration(trained_s)} were trained"
    return ""


class Rescuer:
    """Rescues of one process, one after another. A used one is closed; a periodic one keeps its memory."""

    def __init__(self, run: str | Path, attempt: str | Path, python: str | None = None) -> None:
        self._run, self._attempt = RunDir(Path(run)), AttemptDir(Path(attempt))
        self._python = python  # the interpreter that has Jackline and writes
        self._is_uncounted = False
        self._random = ProcessRandom()
        self._engine: CheckpointEngine | None = None
        self._live: dict[str, list[Any]] | None = None
        self._ticket: Ticket | None = None
        self._record = RescueRecord()

    def look(self) -> None:
        """Find the objects, start the writer and allocate memory while the training runs. Errors come with `save`."""
        try:
            self._live = live_objects()
            self._open().prepare(find_state((), self._live).state)
        except Exception:
            self.close()

    def meet_late(self) -> tuple[set[int], int]:
        """Of a training that began without us: the identities of its optimizers, and the steps they have counted."""
        optimizers = live_objects()["optimizer"]
        counts = [count for one in optimizers if (count := _steps_in_state(one))]
        self._is_uncounted = not counts
        return {id(one) for one in optimizers}, min(counts, default=0)

    def note_random(self) -> None:
        """Read the RNG states now: what is saved later has these, before the next batch was drawn."""
        self._random.held = self._random.state_dict()

    def save_plain(self, scopes: Sequence[tuple[Any, ...]], moment: dict[str, Any]) -> bool:
        """`save` for the injected code, which has no types of ours."""
        return self.save([Scope(*scope) for scope in scopes], Moment(**moment))

    def save(self, scopes: Sequence[Scope], moment: Moment) -> bool:
        """Copy the state of this instant. False when it was refused; the record then says why."""
        live, self._live = self._live, None
        self._record = RescueRecord(
            moment.id,
            os.getpid(),
            moment.cause,
            moment=moment.text,
            is_boundary=moment.is_boundary,
            at_s=time.time(),
        )
        try:
            self._refuse_other_ranks()
            found = find_state(scopes, live)
            self._drop_what_fails(found)
            self._start(found, moment, list_places(scopes, found.parts))
        except JacklineError as problem:
            self._end("refused", " ".join(str(problem).removeprefix("error: ").split()))
        except Exception as problem:
            self._end("failed", _words(problem))
        finally:
            self._random.held = None
        return not self._record.outcome

    def finish(self, wait_s: float, *, is_last: bool = True) -> RescueRecord:
        """Wait until the copy is on the disk, and write the record. The writer finishes even if this process ends."""
        ticket, self._ticket = self._ticket, None
        if ticket is not None and self._engine is not None:
            ticket.wait(wait_s)
            name = ticket.name or f"step-{ticket.step:08d}"
            self._record = replace(
                self._record,
                name=name,
                path=str(self._engine.folder / name),
                stall_s=round(ticket.stall_s, 4),
                write_s=round(ticket.write_s, 3),
                size_bytes=ticket.size_bytes,
            )
            outcome = {"committed": "saved", "failed": "failed", "skipped": "failed"}.get(ticket.outcome, "writing")
            self._end(outcome, ticket.why + ticket.room)
        if is_last:
            self.close()
        return self._record

    def close(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.close(timeout_s=0.0, linger_s=0.0)

    def _open(self) -> CheckpointEngine:
        if self._engine is None:
            command = (self._python, "-P", "-m", "jackline.checkpoint.writer.serve") if self._python else ()
            budget = os.environ.get(DISK_BUDGET_VARIABLE) or ""
            settings = EngineSettings(
                keep=KEEP,
                place=rescue_place(self._run),
                disk_budget=int(budget) if budget.isdigit() else None,
                writer_command=command,
            )
            self._engine = CheckpointEngine(self._run, settings)
        return self._engine

    def _start(self, found: Found, moment: Moment, places: list[dict[str, Any]]) -> None:
        state: dict[str, Any] = {**found.state, "random": self._random}
        size = sum(source.tensor.numel() * source.tensor.element_size() for source in capture(state).sources)
        disk = read_disk(self._run.path)
        why = "" if moment.is_asked else too_dear(size, disk.free_bytes if disk else None, moment.trained_s)
        if not (moment.is_asked or moment.is_counted) and moment.trained_s < LEAST_TRAINED_S:
            why = (
                f"its first backward() was {format_duration(moment.trained_s)} ago, and without an optimizer of "
                f"torch it counts as a training after {format_duration(LEAST_TRAINED_S)}"
            )
        if why:
            raise CannotRescue(f"{why}; asked while it runs, `jackline rescue {self._run.name}` saves it")
        # In a round of several optimizers (a critic that steps five times) the one that steps least counts rounds.
        counts = [count for one in found.of("optimizer") if (count := _steps_in_state(one))]
        step = min(counts, default=moment.num_steps)
        if not moment.is_counted:
            why = "this script updates its weights without an optimizer of torch"
            why = "its optimizer has not stepped yet" if found.of("optimizer") else why
            found.missing.append(f"the number of steps: {why}")
        elif self._is_uncounted:
            found.missing.append("the number of steps before Jackline came: its optimizers do not count them")
        place = found.place
        self._record = replace(
            self._record,
            step=step if moment.is_counted else None,
            parts=tuple(part.to_json() for part in found.parts),
            missing=tuple(found.missing),
            values=found.values,
            file=place.file if place else "",
            function=place.function if place else "",
            line=place.line if place else None,
            places=tuple(places),
        )
        state["rescue"] = {**self._record.to_json(), "num_steps_counted": moment.num_steps}
        engine = self._open()
        self._ticket = engine.save(state, step=step, wait="writer")
        if self._ticket.outcome in ("failed", "skipped"):
            why, self._ticket = self._ticket.why, None
            self._end("failed", why)

    def _drop_what_fails(self, found: Found) -> None:
        """What is not a module or an optimizer may have a state that cannot be written down: say so and save the
        rest."""
        for part in list(found.parts):
            if part.kind not in ("module", "optimizer") and (why := _cannot_capture(part)):
                found.parts.remove(part)
                found.missing.append(f"{part.expression or part.key} ({why})")

    def _refuse_other_ranks(self) -> None:
        rank, size = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
        if rank.isdigit() and size.isdigit() and int(rank) > 0:
            raise CannotRescue(f"this is rank {rank} of {size}: rank 0 is asked to save the weights they share")

    def _end(self, outcome: str, why: str) -> None:
        self._record = replace(self._record, outcome=outcome, why=why)
        write_rescue(self._attempt, self._record)


def _cannot_capture(part: Part) -> str:
    try:
        capture({part.key: part.value})
    except Exception as problem:
        return _words(problem)
    return ""


def _words(problem: Exception) -> str:
    text = " ".join(str(problem).removeprefix("error: ").split())[:300]
    is_context = "CUDA error" in text or "device-side assert" in text
    more = ": the GPU's context is broken, and nothing on it can be read any more" if is_context else ""
    return f"{type(problem).__name__}: {text}{more}"


def _steps_in_state(optimizer: Any) -> int:
    """The steps that the optimizer itself has counted, also before a resume: Adam and its relatives do."""
    for values in (optimizer.__dict__.get("state") or {}).values():
        count = values.get("step") if isinstance(values, dict) else None
        try:
            return int(count) if count is not None else 0
        except (TypeError, ValueError):
            return 0
    return 0
