"""The hang part of watching an attempt: when stacks are taken, the verdict, alarms and incident files.

Owns what supervisor.json says about hangs, and the thread that takes stacks: a slow py-spy never delays output or
signals. What samples mean is decided in `hang`; `stacks` reads stacks.
"""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from jackline.diagnosis.frames import ProcessStack
from jackline.immutable import immutable
from jackline.machine.readings import GpuReading, TreeReading
from jackline.rundir.atomic import write_often
from jackline.rundir.layout import AttemptDir
from jackline.rundir.records.supervisor import IncidentRecord
from jackline.supervisor.events import Events
from jackline.supervisor.hang.deadlock import Deadlock, find_deadlock
from jackline.supervisor.hang.incident import write_incident
from jackline.supervisor.hang.verdict import Judge, Sample, Thresholds, Verdict
from jackline.supervisor.options import SuperviseOptions
from jackline.supervisor.stacks.flight import Flight, ask_recorders
from jackline.supervisor.stacks.standing import Standing, read_standing
from jackline.supervisor.stacks.take import native_text, sample_stacks, with_reports


@immutable
class StackRequest:
    pids: tuple[int, ...]
    native: bool = False
    inside: bool = False  # also ask each Python process who waits for whom
    delay_s: float = 0.0


@immutable
class StackSample:
    """One sample of stacks. `native_text`, `standing` and `flight` are set only when requested."""

    request: StackRequest
    stacks: tuple[ProcessStack, ...]
    native_text: str = ""
    standing: Standing | None = None
    flight: Flight | None = None


class StackSampler:
    """Takes at most one sample at a time; a request while busy is refused, not queued."""

    def __init__(self, stacks_folder: Path) -> None:
        self._folder = stacks_folder
        self._requests: queue.SimpleQueue[StackRequest] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[StackSample] = queue.SimpleQueue()
        self._is_busy = False
        self._thread: threading.Thread | None = None
        self.problem = ""

    def request(
        self, pids: Sequence[int], *, native: bool = False, inside: bool = False, delay_s: float = 0.0
    ) -> bool:
        if self._is_busy or not pids:
            return False
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="jackline-stacks", daemon=True)
            self._thread.start()
        self._is_busy = True
        self._requests.put(StackRequest(tuple(pids), native, inside, delay_s))
        return True

    @property
    def is_busy(self) -> bool:
        return self._is_busy

    def take(self) -> StackSample | None:
        """The finished sample, if there is one; each is returned once."""
        try:
            result = self._results.get_nowait()
        except queue.Empty:
            return None
        self._is_busy = False
        return result

    def _work(self) -> None:
        while True:
            request = self._requests.get()
            time.sleep(request.delay_s)
            stacks: tuple[ProcessStack, ...] = ()
            native = ""
            standing: Standing | None = None
            flight: Flight | None = None
            try:
                stacks = sample_stacks(request.pids, stacks_folder=self._folder)
                native = native_text(request.pids) if request.native else ""
                standing = read_standing(request.pids, self._folder) if request.inside else None
                stacks = with_reports(stacks, standing.reports) if standing else stacks
                flight = ask_recorders(request.pids, self._folder) if request.inside else None
                self.problem = ""
            except Exception as error:  # fail open: having no stacks is better than a crashed watcher
                self.problem = f"{type(error).__name__}: {error}"
            self._results.put(StackSample(request, stacks, native, standing, flight))


STACKS_FIRST_AFTER_S = 0.8
STACKS_FIRST_APART_S = 3.0
STACKS_SILENT_EVERY_S = 5.0
# A program that computes in silence: each stack after half of the silence so far, at most this long.
STACKS_MOVING_SHARE, STACKS_MOVING_EVERY_S = 0.5, 20.0
STACKS_BEFORE_ALARM = 12
STACKS_ALWAYS_EVERY_S = 30.0
STACKS_NONE_YET_S = 2.0
ALARMS = ("STUCK", "SUSPECT")
LONGEST_GAP_S = 60.0
# Verdicts whose samples are kept for `why --save-case`.
KEPT = (*ALARMS, "WAITING")
KEEP_EVERY_S, KEEP_LATER_EVERY_S = 30.0, 240.0  # doubled while nothing changes: writing them takes 15 to 50 ms


class AskedBefore:
    """When to ask processes who waits for whom: after a standstill of some seconds, then ever more rarely, because
    the question wakes up their main threads."""

    def __init__(self, stuck_after_s: float) -> None:
        self._first_after_s = min(5.0, stuck_after_s / 3)
        self._gap_s = self._first_gap_s = min(10.0, stuck_after_s / 3)
        self._at_s = float("-inf")

    def is_due(self, now_s: float, stands_since_s: float | None) -> bool:
        if stands_since_s is None or now_s - stands_since_s < self._first_after_s:
            self._gap_s = self._first_gap_s
            return False
        return now_s - self._at_s >= self._gap_s

    def note(self, now_s: float) -> None:
        self._gap_s = min(LONGEST_GAP_S, 1.5 * self._gap_s)
        self._at_s = now_s


def silent_stacks_every_s(silent_s: float, verdict: Verdict | None) -> float:
    """A stack costs 10 to 40 ms of CPU. A program that has computed in silence for long is looked at more rarely; one
    that stands still a dozen times before the next alarm, so that what its threads do in turn is not missed."""
    most_s = STACKS_SILENT_EVERY_S
    if verdict is not None and verdict.kind in ("PROGRESS", "BUSY"):
        most_s = STACKS_MOVING_SHARE * silent_s
    elif verdict is not None and verdict.next_in_s is not None:
        most_s = verdict.next_in_s / STACKS_BEFORE_ALARM
    return min(STACKS_MOVING_EVERY_S, max(STACKS_SILENT_EVERY_S, most_s))


class HangWatch:
    """Live state of the hang detection of one attempt."""

    def __init__(self, attempt: AttemptDir, options: SuperviseOptions, events: Events) -> None:
        self._attempt = attempt
        self._options = options
        self._events = events
        after_s = options.stuck_after_s
        limits = Thresholds(2 * after_s, after_s, proved_after_s=after_s, can_type=options.tty)
        self.judge = Judge(limits)
        self.sampler = StackSampler(attempt.stacks)
        self.verdict: Verdict | None = None
        self.stuck: Verdict | None = None  # the last alarm of this sort
        self.incidents: list[IncidentRecord] = []
        self.stacks: tuple[ProcessStack, ...] = ()
        self.stacks_at_s = float("-inf")
        self.requested_at_s = self._silent_at_s = float("-inf")
        self._fresh: tuple[ProcessStack, ...] | None = None
        self._disturbed: frozenset[int] = frozenset()
        self._sampled_at_s = float("-inf")
        self._asked = AskedBefore(options.stuck_after_s)
        self._proof: tuple[Deadlock | None] | None = None  # of the newest answers, not judged yet
        self._flight: Flight | None = None
        self._began_s = time.monotonic()
        self._alarm = ""
        self._kept_at_s, self._keep_every_s = float("-inf"), KEEP_EVERY_S
        self._pending: Verdict | None = None

    def judge_sample(self, sample: Sample) -> Verdict:
        before, self.verdict = self.verdict, self.judge.add(sample)
        self._raise_alarm(self.verdict)
        is_new = before is None or before.kind != self.verdict.kind
        self._keep_every_s = KEEP_EVERY_S if is_new else self._keep_every_s
        if self.verdict.kind in KEPT and (is_new or sample.at_s - self._kept_at_s >= self._keep_every_s):
            self._kept_at_s = sample.at_s
            self._keep_every_s = min(KEEP_LATER_EVERY_S, 2 * self._keep_every_s)
            write_often(self._attempt.case_file, self.judge.case(self.verdict))
        return self.verdict

    def make_sample(
        self, now_s: float, late_s: float, tree: TreeReading, gpus: tuple[GpuReading, ...], counts: tuple[int, int]
    ) -> Sample:
        """`counts` are bytes of output and marks of progress so far."""
        self._sampled_at_s = now_s
        stacks, self._fresh = self._fresh, None
        disturbed, self._disturbed = self._disturbed, self._disturbed if self.sampler.is_busy else frozenset()
        proof, self._proof = self._proof, None
        deadlock = proof[0] if proof else None
        flight, self._flight = self._flight, None
        return Sample(
            now_s, max(0.0, late_s), tree, gpus, *counts, stacks, disturbed, proof is not None, deadlock, flight
        )

    @property
    def is_sample_due(self) -> bool:
        """Whether the processes have been disturbed and are left alone again. What they do from now on is their own,
        so the time in which nothing is known about them ends here."""
        return bool(self._disturbed) and not self.sampler.is_busy

    def _raise_alarm(self, verdict: Verdict) -> None:
        if verdict.kind == self._alarm:
            return
        if verdict.kind == "PAUSED":
            self._alarm = verdict.kind
            self._events.emit("verdict", verdict.text, verdict=verdict.kind, label=verdict.label)
            return
        if verdict.kind in ALARMS:
            self._alarm = verdict.kind
            self._pending = verdict
            event = "stuck" if verdict.kind == "STUCK" else "verdict"
            self.stuck = verdict if verdict.kind == "STUCK" else self.stuck
            self._events.emit(event, f"{verdict.kind}: {verdict.text}", verdict=verdict.kind, label=verdict.label)
        elif self._alarm:
            self._alarm = ""
            if verdict.label not in ("ENDED", "ZOMBIE"):  # that is told as an end
                text = f"it moves again: {verdict.text}"
                self._events.emit("verdict", text, verdict=verdict.kind, label=verdict.label)

    def request_stacks(self, now_s: float, last_output_s: float, pids: Sequence[int]) -> None:
        """Take stacks if they are due."""
        if self._pending is not None:
            # Native stacks stop each process for a moment, which would look like movement of its own.
            if self.sampler.request(pids, native=True):
                self._disturbed = frozenset(pids)
            return
        if now_s - self._began_s < STACKS_FIRST_AFTER_S:
            return  # an interpreter that is still starting has no stack to read
        is_silent = now_s - last_output_s >= min(STACKS_FIRST_AFTER_S, self._options.quiet_after_s)
        # The first heartbeat of a silence must already name the line, so take a stack when a silence seems to begin.
        # But a program that prints every two seconds must not cost a stack each time.
        since_stacks_s = now_s - self.requested_at_s
        is_first = is_silent and self.requested_at_s < last_output_s
        is_first = is_first and now_s - self._silent_at_s > STACKS_FIRST_APART_S
        # Half of --stuck-after, so that an alarm always has a line to name, even if the program prints often.
        always_every_s = min(STACKS_ALWAYS_EVERY_S, self._options.stuck_after_s / 2)
        if math.isinf(self.requested_at_s):
            always_every_s = STACKS_NONE_YET_S  # a program that prints all the time has a line to show soon, too
        is_due = now_s - max(self.requested_at_s, self._began_s) >= always_every_s
        # In a proved deadlock nothing will change, so looking often would only cost CPU.
        is_proved = self.judge.has_proof()
        silent_every_s = silent_stacks_every_s(now_s - last_output_s, self.verdict)
        is_due = is_due or (is_silent and not is_proved and since_stacks_s >= silent_every_s)
        if is_first or is_due:
            self._silent_at_s = now_s if is_first else self._silent_at_s
            self.ask(now_s, pids)

    def ask(self, now_s: float, pids: Sequence[int], *, delay_s: float = 0.0) -> None:
        """Take stacks; also ask the processes who waits for whom, if they stand still and nothing is proved yet. Such
        a question is asked only right after a sample, because what they do until the next one counts as caused by us.
        """
        inside = self._options.inject and not self.judge.has_proof()
        inside = inside and self._asked.is_due(now_s, self.judge.stands_since_s())
        if inside and now_s != self._sampled_at_s:
            return
        if self.sampler.request(pids, inside=inside, delay_s=0.0 if inside else delay_s):
            self.requested_at_s = now_s
            if inside:
                self._asked.note(now_s)
                self._disturbed = frozenset(pids)

    def collect(self, tree: TreeReading) -> StackSample | None:
        """The finished sample of stacks, if there is one; an incident is written with it where one is due."""
        taken = self.sampler.take()
        if taken is None:
            return None
        self.stacks = self._fresh = taken.stacks
        self.stacks_at_s = self.requested_at_s  # time of the request: what the stack shows may be that old
        if taken.standing is not None:
            leader = self.judge.leader_pid or taken.request.pids[0]
            ran = self.judge.ran_since(time.monotonic() - self._options.stuck_after_s)
            self._proof = (find_deadlock(taken.standing, leader, ran),)
            self._flight = taken.flight
        if taken.request.native:
            self._write_incident(taken, tree)
        return taken

    def _write_incident(self, taken: StackSample, tree: TreeReading) -> None:
        verdict = self._pending or self.verdict
        if verdict is None:
            return
        self._pending = None
        number = len(self.incidents) + 1
        path: Path = self._attempt.incident(number)
        write_incident(
            path, verdict=verdict, stacks=taken.stacks, native_text=taken.native_text, tree=tree, now_s=time.time()
        )
        self.incidents.append(IncidentRecord(number, str(path), time.time(), verdict.text))
        self._events.emit("incident", f"stacks of every process are in {path}", path=str(path))
