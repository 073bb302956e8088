"""The checkpoint engine, as a training loop uses it.

    engine = CheckpointEngine(run)                     # starts the writer; before the model is built
    receipt = engine.load_newest(state)                # None: there is no checkpoint to resume from
    for ...:
        loss.backward()
        engine.before_change()                       # the one barrier: weights change only after it
        optimizer.step()
        if save_is_due(...): engine.save(state, step=step, metrics={"loss": ...}, overlap=True)
        for event in engine.poll(): ...
    engine.close()

`state` is a dict of everything that makes up the training: modules, optimizers, schedulers, scalers, generators,
tensors, plain values, any object with state_dict and load_state_dict, nested at will.
Owns a save from its start to its end inside the trainer. It never stops training: an error becomes an event and a
failed ticket.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from jackline.checkpoint.format.manifest import Name, is_of_rank
from jackline.checkpoint.machines.holding import Saved
from jackline.checkpoint.mirror.fetch import bring_newer, is_fetched
from jackline.checkpoint.mirror.progress import LossBounds, MirrorWatch, machine_loss
from jackline.checkpoint.place import Place, choose_place
from jackline.checkpoint.staging.area import StagingArea, available_bytes
from jackline.checkpoint.staging.gather import GpuCopies
from jackline.checkpoint.staging.handover import Job
from jackline.checkpoint.staging.layout import Layout
from jackline.checkpoint.staging.link import WriterLink
from jackline.checkpoint.staging.pieces import save_in_pieces, say_pieces
from jackline.checkpoint.state import load
from jackline.checkpoint.state.attributes import Baseline, find_roots
from jackline.checkpoint.state.capture import Captured, capture
from jackline.checkpoint.state.environment import describe_environment
from jackline.checkpoint.state.frozen import FrozenHashes
from jackline.checkpoint.ticket import Event, Ticket
from jackline.checkpoint.writer.parts import Team
from jackline.checkpoint.writer.retention import Keep
from jackline.checkpoint.writer.serve import Options
from jackline.errors import CannotResume
from jackline.rundir.layout import RunDir
from jackline.rundir.process_id import host_name

Wait = Literal["never", "writer", "durable"]  # what a save waits for
FORKED = "this is a forked child of the training process"
MAX_COPIES = 3  # copies of one state, if another thread keeps changing it during the copy


@dataclass(frozen=True)
class EngineSettings:
    """The settings a user may change. `defer`: keys whose loose tensors change only after the barrier (EMA, masks).

    `leave_out_frozen`: parameters that are not trained are recorded by their hash instead of being stored.
    """

    keep: Keep = field(default_factory=Keep)
    place: Place | None = None  # where to commit; None: the run's own folder for checkpoints
    mirror: str | None = None
    mirror_every_s: float = 300.0
    disk_budget: int | None = None  # bytes that the whole run may take
    mirror_patience_s: float = 600.0
    resume_from_mirror: bool = True  # False for a run that must start fresh although its name was used before
    defer: tuple[str, ...] = ()
    leave_out_frozen: bool = False
    is_direct: bool | None = None
    writer_command: tuple[str, ...] = ()  # tests put a writer that injects faults here
    available_memory: Callable[[], int] = available_bytes
    gpu: GpuCopies = field(default_factory=GpuCopies)
    team: Team | None = None  # the ranks that save sharded state together; None: this process saves all of it
    machine: Saved | None = None  # where the machines of a job share no folder
    uploads: bool = True  # to the mirror; what is fetched from there is another matter


class CheckpointEngine:
    """Saves and loads one run's checkpoints.

    One thread of one process uses it; in forked children it does nothing.
    """

    def __init__(self, run: RunDir, settings: EngineSettings | None = None) -> None:
        self.settings = settings or EngineSettings()
        place = self.settings.place or choose_place(run)
        self.folder = place.folder
        is_part = self.settings.team is not None and not self.settings.team.is_first
        uploads = self.settings.uploads and not is_part  # rank 0's mirror takes the whole
        self.mirror = self.settings.mirror or place.mirror if uploads else None
        self.last_saved: tuple[int, float] | None = None  # step, and the monotonic time of its capture
        self.stalled_s = 0.0  # total time that saves have cost the loop so far
        self.run_name = run.name
        self._pid = os.getpid()
        self._link = WriterLink(self._options(run), self.settings.writer_command)
        if place.why:
            self._link.events.append(Event("place", place.why, None, True))
        self._watch = MirrorWatch(self.folder)
        self._area = StagingArea(
            self._link.share, self.settings.available_memory, self.settings.gpu, self._tell_of_gpu
        )
        self._frozen = FrozenHashes()
        self._baseline = Baseline()
        self._unsaved: set[str] = set()
        self._pending: Callable[[], None] | None = None
        self._ticket: Ticket | None = None
        self._number = 0
        self._taken_at_s: dict[int, float] = {}
        self.parent_step: int | None = None
        self.save_number = 0  # of the saves that a team has agreed on: the same on every rank
        self.is_for_mirror = False  # the next save of this machine's parts, as every machine has decided

    @property
    def is_busy(self) -> bool:
        """Whether a save is still being copied or written."""
        return self._link.job is not None

    @property
    def why_off(self) -> str:
        """Why nothing can be saved any more; empty while saving works."""
        return self._link.why_off

    def save(
        self,
        state: Mapping[str, Any],
        *,
        step: int,
        metrics: Mapping[str, float] | None = None,
        overlap: bool = False,
        wait: Wait = "never",
    ) -> Ticket:
        """Capture the state of this instant; the writer makes it durable. The ticket or `poll` reports the outcome.

        The loop may change anything as soon as the call returns. With `overlap` the copy runs during the next forward
        and backward pass, so the loop must call `before_change` before it changes anything in any way.
        `wait`: 'never' skips the save while the writer is busy, 'writer' waits for it, 'durable' also until this save
        is acknowledged or lost.
        """
        began_s = time.perf_counter()
        ticket = Ticket(step, _pump=self._link.pump)
        if os.getpid() != self._pid:
            # Check this before reading anything: the writer's reports are for the parent, which would wait for them
            # for ever.
            return self._refuse(ticket, "failed", FORKED)
        self._link.pump()
        if self.is_busy and wait == "never":
            return self._refuse(ticket, "skipped", "the save before it is still being written")
        while self.is_busy and not self.why_off:
            self._link.pump(0.2)
        if self.why_off:
            return self._refuse(ticket, "failed", self.why_off)
        self.before_change()  # for an earlier save, in case the loop forgot the barrier
        self._ticket = ticket
        drained_s, changed = 0.0, ""
        for _ in range(MAX_COPIES):
            again_s, changed = self._stage(ticket, state, dict(metrics or {}), overlap=overlap)
            drained_s += again_s
            if not changed:
                break
        # Waiting for a GPU that is still computing costs the loop nothing: it would have waited for that sooner or
        # later.
        self._count_stall(ticket, began_s + drained_s)
        if changed:
            why = f"another thread changed {changed} while it was being copied, {MAX_COPIES} times in a row"
            return self._refuse(ticket, "failed", why)
        if wait == "durable":
            ticket.wait()
        return ticket

    def save_again(self, ticket: Ticket) -> Ticket | None:
        """Write a save that failed once more: the same state, from the copy that was made of it then.

        None when that copy is gone. The state in the training process is not read.
        """
        if self.settings.team is not None:
            return Ticket(ticket.step, "failed", ticket.why)  # the parts of the other ranks are gone
        again = Ticket(ticket.step, _pump=self._link.pump, size_bytes=ticket.size_bytes)
        if os.getpid() != self._pid or not self._link.submit_again(again):
            return None
        self._taken_at_s[again.step] = time.monotonic()
        return again

    def before_change(self) -> None:
        """The barrier: call it before the optimizer, the EMA or the masks change.

        It is free when no save is being copied.
        """
        pending, self._pending = self._pending, None
        if pending is None or os.getpid() != self._pid:
            return
        began_s = time.perf_counter()
        pending()
        self._count_stall(self._ticket, began_s)

    def _count_stall(self, ticket: Ticket | None, began_s: float) -> None:
        stalled_s = time.perf_counter() - began_s
        self.stalled_s += stalled_s
        if ticket is not None:
            ticket.stall_s += stalled_s

    def prepare(self, state: Mapping[str, Any]) -> None:
        """Allocate memory during the first steps instead of in the first save. Best called after the first step."""
        if not self.is_busy and not self.why_off and os.getpid() == self._pid:
            self._area.prepare(self._capture(state).sources)

    def give_back_gpu_memory(self) -> int:
        """Free the copy that saves keep on the GPU, for a loop that ran out of GPU memory; return the bytes freed."""
        return self._area.give_back_gpu()

    def poll(self) -> list[Event]:
        """The events since the last call. Call it every step; it costs microseconds."""
        if os.getpid() != self._pid:
            return []
        self._link.pump()
        events = self._link.take_events()
        if self.mirror is not None:
            events += self._watch.look(time.monotonic())
        for event in events:
            if event.kind == "committed" and event.step is not None:
                self.last_saved = (event.step, self._taken_at_s.pop(event.step, time.monotonic()))
                self.parent_step = event.step
        return events

    def load_newest(
        self, into: MutableMapping[str, Any], *, step: int | None = None, only: Name | None = None
    ) -> load.Receipt | None:
        """Fill the objects in `into` from the newest whole checkpoint, or from that of `step`. None: there is none.

        Waits first for a writer that outlived the previous attempt: it may be committing a newer checkpoint.
        """
        self._link.wait_ready()
        self.before_change()
        self.note_program(into)
        mirror = self.mirror if self.settings.resume_from_mirror else None
        if mirror and step is None and only is None:
            for text in bring_newer(mirror, self.run_name, self.folder):
                self._link.events.append(Event("fetched", text, None, True))
        how: dict[str, Any] = {"hash_frozen": self._frozen, "on_refusal": self.refuse}
        how |= {"step": step, "only": only}
        try:
            receipt = load.load_newest(self.folder, into, **how)
        except CannotResume:
            if not mirror or step is not None or not is_fetched(mirror, self.run_name, self.folder):
                raise
            receipt = load.load_newest(self.folder, into, **how)
        if receipt is not None:
            self.parent_step = receipt.step
        return receipt

    def wait_ready(self) -> None:
        """Wait for a writer that outlived the previous attempt: it may be committing a newer checkpoint."""
        self._link.wait_ready()

    def note_program(self, state: Mapping[str, Any]) -> None:
        """Remember attributes as the program made them, before anything is restored into these objects."""
        self._baseline.note_all(find_roots(state))

    def capture(self, state: Mapping[str, Any]) -> Captured:
        """What a save of this instant would hold, with frozen parameters. Nothing is copied."""
        return capture(state, defer=self.settings.defer, baseline=self._baseline)

    def bounds(self) -> LossBounds:
        """How much work would be lost if the process crashed now, and if the machine did."""
        now_s = time.monotonic()
        process_s = None if self.last_saved is None else now_s - self.last_saved[1]
        return LossBounds(process_s, *machine_loss(self._watch.newest, known_s=self._watch.known_s(now_s)))

    def ask_mirror(self, number: int) -> None:
        """Ask the mirror to upload everything now. Ask repeatedly: a restarted writer does not know the request."""
        if self.mirror is not None and os.getpid() == self._pid:
            self._link.send({"op": "mirror", "number": number})

    def close(self, *, timeout_s: float = 3600.0, linger_s: float = 5.0) -> list[Event]:
        """Wait for a save under way, then release the writer; it finishes reading checkpoints back on its own."""
        if os.getpid() != self._pid:
            return []
        self.before_change()
        deadline = time.monotonic() + timeout_s
        while self.is_busy and not self.why_off and time.monotonic() < deadline:
            self._link.pump(0.2)
        events = self.poll()
        self._link.close(linger_s)
        self._area.close()
        return events + self._link.take_events()

    def _options(self, run: RunDir) -> Options:
        wanted = self.settings
        team = wanted.team
        return Options(
            team.folder(self.folder) if team is not None else self.folder,
            self._pid,
            wanted.keep,
            wanted.is_direct,
            str(run.path),
            self.mirror,
            wanted.mirror_every_s,
            wanted.disk_budget,
            wanted.mirror_patience_s,
            team,
        )

    def _capture(self, state: Mapping[str, Any]) -> Captured:
        hash_frozen = self._frozen if self.settings.leave_out_frozen else None
        captured = capture(state, defer=self.settings.defer, hash_frozen=hash_frozen, baseline=self._baseline)
        for what in captured.unsaved:
            name = what.partition(" ")[0]
            if name not in self._unsaved:
                self._unsaved.add(name)
                text = (
                    f"{what} changes during training and is not saved: after a resume it is as the program made it. "
                    "Register it as a buffer, or give it state_dict() and load_state_dict()"
                )
                self._link.events.append(Event("unsaved", text, None, True))
        team = self.settings.team
        if team is not None and not team.is_first:  # what all ranks have alike is in rank 0's part
            return Captured({}, [source for source in captured.sources if is_of_rank(source.key)], captured.unsaved)
        return captured

    def _stage(
        self, ticket: Ticket, state: Mapping[str, Any], metrics: dict[str, float], *, overlap: bool
    ) -> tuple[float, str]:
        """Copy the state once.

        Returns the seconds spent waiting for GPUs and the name of a tensor that changed meanwhile.
        """
        captured = self._capture(state)
        sources = captured.sources
        self._link.refused = None  # its memory is used from here on
        layout = self._area.place(sources)
        has_room = self._area.make_room(layout, sources)
        if not has_room:
            say_pieces(self._link, layout)
            assert self._area.arena is not None
            job = self._new_job(ticket, captured, layout, metrics)
            save_in_pieces(self._link, job, layout, sources, self._area.arena)
            return 0.0, ""
        is_overlapped = overlap and not self._link.is_torn
        staging = self._area.begin(layout, sources, is_overlapped=is_overlapped)
        if staging.is_torn:
            staging.finish()
            return staging.drained_s, staging.changed or ""
        job = self._new_job(ticket, captured, layout, metrics)
        job.staging = staging
        if is_overlapped:
            self._pending = staging.barrier
        self._link.submit(job)
        return staging.drained_s, ""

    def _new_job(self, ticket: Ticket, captured: Captured, layout: Layout, metrics: dict[str, float]) -> Job:
        self._number += 1
        self._taken_at_s[ticket.step] = time.monotonic()
        ticket.size_bytes = layout.payload_bytes
        finite = {name: float(value) for name, value in metrics.items() if math.isfinite(value)}
        odd = {name: str(value) for name, value in metrics.items() if name not in finite}
        facts: dict[str, Any] = {"run": self.run_name, "host": host_name(), "environment": describe_environment()}
        team = self.settings.team
        if team is not None:
            facts |= {"ranks": team.size, "save": self.save_number}
        if (saved := self.settings.machine) is not None:
            number, is_divided = (self.save_number, True) if team is not None else (ticket.step, False)
            facts |= saved.facts(number, is_divided=is_divided, is_for_mirror=self.is_for_mirror)
        body = {
            "op": "save",
            "id": self._number,
            "step": ticket.step,
            "created_at_s": time.time(),
            "parent_step": self.parent_step,
            "metrics": finite,
            "facts": {**facts, "metrics_not_finite": odd} if odd else facts,
            "team": {**asdict(team), "number": self.save_number} if team is not None else None,
            "files": [
                {"name": image.name, "size_bytes": image.size_bytes, "arena_offset": image.arena_offset}
                for image in layout.images
            ],
        }
        return Job(self._number, ticket, body, captured.tree)

    def _tell_of_gpu(self, text: str) -> None:
        self._link.events.append(Event("gpu_memory", text))

    def _refuse(self, ticket: Ticket, outcome: Literal["skipped", "failed"], why: str) -> Ticket:
        ticket.outcome, ticket.why = outcome, why
        self._link.events.append(Event(outcome, f"step {ticket.step} was not saved: {why}", ticket.step, True))
        return ticket

    def refuse(self, refusal: load.Refusal) -> None:
        """Report a checkpoint that is not used, and let the writer set it aside."""
        text = f"{refusal.name} is not whole and was passed over: {refusal.why}"
        self._link.events.append(Event("passed_over", text, refusal.name.step, True, fields={"why": refusal.why}))
        if self.settings.team is None or self.settings.team.is_first:
            self._link.send({"op": "damaged", "name": str(refusal.name), "why": refusal.why})
