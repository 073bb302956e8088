"""The ranks of a distributed job, for one attempt: which process is which, what each does, and its output file.

Owns attempts/NNN/ranks as far as the supervisor goes: the injected file writes there, this reads it and frees the
beginning of files that become large. Judging who waits for whom is done in `hang.ranks`.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from jackline.diagnosis.deaths.collect import tail_lines
from jackline.diagnosis.deaths.evidence import RankEnd
from jackline.diagnosis.doing import describe, outermost
from jackline.diagnosis.frames import Frame, ProcessStack
from jackline.immutable import immutable
from jackline.machine.readings import GpuReading, ProcessReading, RankPlace
from jackline.rundir import atomic
from jackline.rundir.access.writing import open_own
from jackline.rundir.layout import AttemptDir, RunDir
from jackline.rundir.records.fields import decode, encode
from jackline.rundir.records.ranks import WAITING, RankRecord, machines_of_job
from jackline.supervisor.attempt.stragglers import Stragglers
from jackline.supervisor.events import Events
from jackline.supervisor.hang.ranks import collective_at, find_ranks
from jackline.supervisor.hang.sample import FarRank
from jackline.supervisor.output.room import punch

_MOST_RECORDS = 256
_MOST_TAILS = 16
_TAIL_LINES = 120
_KEPT_BYTES = 64 << 20  # of a rank's output; the same as of raw.out
_ROOM_EVERY_S = 10.0
_FAR_EVERY_S = 5.0  # the folder may be on a network

StackOf = Callable[[int], ProcessStack | None]


@immutable
class Seen:
    """A rank when it was seen last."""

    rank: int
    world_size: int
    pid: int
    what: str = ""
    frame: Frame | None = None
    job: str = ""
    is_gone: bool = False


class RankWatch:
    """Live state of the ranks of one attempt; empty for a job of one process."""

    def __init__(self, attempt: AttemptDir, run: RunDir, events: Events) -> None:
        self._attempt = attempt
        self._events = events
        self._stragglers = Stragglers()
        self._run = run
        self._far: tuple[FarRank, ...] | None = None
        self._next_far_s = 0.0
        self._seen: dict[int, Seen] = {}
        self._places: dict[int, RankPlace] = {}  # by pid, of processes that have left a note
        self._notes_at_ns = 0
        self._files: list[tuple[int, Path]] = []
        self._holes: dict[int, int] = {}
        self._next_room_s = 0.0

    def named(self, processes: tuple[ProcessReading, ...]) -> tuple[ProcessReading, ...]:
        """The readings with the ranks that only the processes themselves know (mp.spawn)."""
        with contextlib.suppress(OSError):
            changed_at_ns = self._attempt.ranks.stat().st_mtime_ns
            if changed_at_ns != self._notes_at_ns:
                self._notes_at_ns = changed_at_ns
                noted = _noted(self._attempt).values()
                self._places = {one.pid: RankPlace(one.rank, one.world_size, one.rank) for one in noted}
        if not self._places:
            return processes
        return tuple(
            replace(one, rank=self._places.get(one.pid)) if one.rank is None and one.is_python else one
            for one in processes
        )

    def note(
        self, processes: tuple[ProcessReading, ...], stack_of: StackOf, gpus: Sequence[GpuReading], *, is_old: bool
    ) -> None:
        """Called once a second with the newest readings. `is_old`: the stacks are older than the newest output."""
        found = look_at_ranks(processes, stack_of, is_old=is_old)
        self._seen.update(found)
        for rank, seen in self._seen.items():
            if rank not in found and not seen.is_gone:
                self._seen[rank] = replace(seen, is_gone=True)
        by_pid = {process.pid: process for process in processes}
        ranks = {rank: by_pid[seen.pid] for rank, seen in found.items()}
        if text := self._stragglers.add(time.monotonic(), ranks, gpus):
            self._events.emit("slow", text)
        if found:
            self._files = [(rank, self._attempt.rank_out(rank)) for rank in self._seen]
            self._make_room()

    def elsewhere(self) -> tuple[FarRank, ...] | None:
        """The ranks of other machines, where all machines share the folder of the job's runs."""
        num_here = sum(1 for seen in self._seen.values() if not seen.is_gone)
        now_s = time.monotonic()
        if num_here and max(seen.world_size for seen in self._seen.values()) > num_here and now_s >= self._next_far_s:
            self._next_far_s = now_s + _FAR_EVERY_S
            self._far = far_ranks(self._run, time.time())
        return self._far

    def output_bytes(self) -> int:
        """Bytes that the ranks with files of their own have written so far."""
        return sum(_size_of(path) for _, path in self._files)

    def records(self) -> tuple[dict[str, Any], ...]:
        """For supervisor.json."""
        return tuple(encode(self._record(seen)) for _, seen in sorted(self._seen.items())[:_MOST_RECORDS])

    def _record(self, seen: Seen) -> RankRecord:
        path = self._attempt.rank_out(seen.rank)
        return replace(rank_record(seen), out=str(path) if _size_of(path) else None)

    def endings(self) -> tuple[RankEnd, ...]:
        """Evidence for the autopsy. A rank that failed within its first second was never seen, but left its note."""
        known = {**_noted(self._attempt), **self._seen}
        if len(known) < 2 and not any(seen.world_size > 1 for seen in known.values()):
            return ()
        ends: list[RankEnd] = []
        for rank, seen in sorted(known.items())[:_MOST_RECORDS]:
            path = self._attempt.rank_out(rank)
            has_file = path.exists()
            tail = tail_lines(path, _TAIL_LINES) if has_file and len(ends) < _MOST_TAILS else ()
            ends.append(RankEnd(rank, seen.world_size, seen.pid, has_file, tail, seen.frame, seen.what))
        return tuple(ends)

    def _make_room(self) -> None:
        """Free the beginning of a large file; what it says last is what matters, and nobody copies it elsewhere."""
        now_s = time.monotonic()
        if now_s < self._next_room_s:
            return
        self._next_room_s = now_s + _ROOM_EVERY_S
        for rank, path in self._files:
            end = _size_of(path) - _KEPT_BYTES
            if end > self._holes.get(rank, 0):
                fd = open_own(path, os.O_WRONLY)
                try:
                    self._holes[rank] = punch(fd, 0, end)
                finally:
                    os.close(fd)


def look_at_ranks(
    processes: tuple[ProcessReading, ...], stack_of: StackOf, *, is_old: bool = False
) -> dict[int, Seen]:
    """What each rank does now; empty for a job of one process. Of old stacks only the outermost line is right."""
    found = find_ranks(processes, stack_of)
    seen = {}
    for rank, process in found.items():
        stack = outermost(stack_of(process.pid)) if is_old else stack_of(process.pid)
        doing = describe(stack, process.wait, process.comm)
        collective = collective_at(stack, process.wait)
        is_waiting = collective and process.wait.kind not in ("stopped", "zombie")
        what = f"{WAITING} ({collective})" if is_waiting else doing.what
        world_size = process.rank.world_size if process.rank else len(found)
        job = process.rank.job if process.rank else ""
        seen[rank] = Seen(rank, world_size, process.pid, what, doing.frame, job)
    return seen


def far_ranks(run: RunDir, now_s: float) -> tuple[FarRank, ...] | None:
    """None where this run is not one of a job of several machines."""
    machines = [one for one in machines_of_job(run.path) if one[0] != run.name]
    if not machines:
        return None
    found = []
    for name, at_s, ranks in machines:
        for record in (decode(RankRecord, one) for one in ranks):
            if record.rank is not None and not record.is_gone:
                place = f"{record.file}:{record.line}" if record.file and record.line is not None else ""
                what = record.what or "running"
                age_s = max(0.0, now_s - at_s)
                found.append(FarRank(record.rank, name, what, place, what.startswith(WAITING), age_s))
    return tuple(found)


def rank_record(seen: Seen) -> RankRecord:
    frame = None if seen.is_gone else seen.frame
    return RankRecord(
        rank=seen.rank,
        world_size=seen.world_size,
        pid=seen.pid,
        what="ended" if seen.is_gone else seen.what,
        file=frame.file if frame else None,
        line=frame.line if frame else None,
        source=frame.source.strip() if frame else None,
        is_gone=True if seen.is_gone else None,
        job=seen.job if seen.job and not seen.is_gone else None,
    )


def _noted(attempt: AttemptDir) -> Mapping[int, Seen]:
    """What the processes themselves noted at their start."""
    found = {}
    for path in attempt.rank_notes():
        note = decode(RankRecord, atomic.read_json(path))
        if note.rank is not None and note.pid is not None:
            found[note.rank] = Seen(note.rank, note.world_size or 0, note.pid)
    return found


def _size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
