"""Watches one attempt: output, memory, stacks, verdict, incidents.

Owns the order in which the parts run and what supervisor.json says about the attempt. Each part fails open: an
error inside it is reported once, that protection is shown as off, and watching continues.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from jackline.diagnosis.doing import Doing, describe
from jackline.diagnosis.frames import Frame, ProcessStack
from jackline.machine.gpu.watch import read_gpus
from jackline.machine.memory import read_oom_counters
from jackline.machine.net import tree_tcp_bytes
from jackline.machine.readings import GpuReading, OomCounters, ProcessReading, Rates, TreeReading, Wait, rates_between
from jackline.rundir.layout import AttemptDir, RunDir
from jackline.rundir.process_id import read_state
from jackline.rundir.records.supervisor import IncidentRecord, OomCountersRecord, OutputRecord, SupervisorRecord
from jackline.supervisor.attempt.memory_watch import GrowthPlaces, MemoryWatch
from jackline.supervisor.attempt.stopping import Target
from jackline.supervisor.child.process import Command
from jackline.supervisor.events import Events
from jackline.supervisor.hang.incident import write_incident
from jackline.supervisor.hang.verdict import Judge, Sample, Thresholds, Verdict
from jackline.supervisor.options import SuperviseOptions
from jackline.supervisor.output.progress import Progress, is_later_step
from jackline.supervisor.output.reader import LogWriter, OutputTail
from jackline.supervisor.output.room import BudgetWatch
from jackline.supervisor.output.told import Told
from jackline.supervisor.stacks.sampler import StackSample, StackSampler
from jackline.supervisor.stacks.take import forget_dead
from jackline.supervisor.state_record import (
    gpu_records,
    memory_record,
    now_record,
    other_user_records,
    progress_record,
    verdict_record,
)

SAMPLE_EVERY_S = 1.0
STACKS_FIRST_AFTER_S = 0.8
STACKS_FIRST_APART_S = 3.0
STACKS_SILENT_EVERY_S = 5.0
STACKS_ALWAYS_EVERY_S = 30.0
STACKS_RISING_EVERY_S = 0.3
ALARMS = ("STUCK", "SUSPECT")


class AttemptWatch:
    """Live state of one attempt. `tick` is called ten times a second."""

    def __init__(
        self,
        run: RunDir,
        command: Command,
        options: SuperviseOptions,
        *,
        log: LogWriter,
        events: Events,
        consumed: dict[str, int] | None = None,
    ) -> None:
        self.run = run
        self.command = command
        self.options = options
        self.events = events
        self.log = log
        self.protections_off: dict[str, str] = {}
        self.oom_before: OomCounters = read_oom_counters(command.child.pid)
        self.told = Told(run)
        self.tails = self._open_tails(command.attempt, consumed or {})
        self.memory = MemoryWatch(command.child.pid)
        self.sampler = StackSampler(command.attempt.stacks)
        self.judge = Judge(Thresholds(suspect_after_s=2 * options.stuck_after_s, stuck_after_s=options.stuck_after_s))
        self.verdict: Verdict | None = None
        self.tree = TreeReading(0.0)
        self.rates = Rates()
        self.gpus: tuple[GpuReading, ...] = ()
        self.doing: Doing | None = None
        self.progress: Progress | None = None
        self.growth_places = GrowthPlaces()
        self.incidents: list[IncidentRecord] = []
        self.pids_seen: set[int] = {command.child.pid}
        self.resumed_from: str | None = None
        self.has_trained = False  # its output has counted training steps, not only loaded files
        self.are_survivors_named = False
        self.last_output_s = time.monotonic()
        self.last_line = ""
        self.num_lines = 0
        self.marks = 0
        self._began_s = time.monotonic()
        self._stacks: tuple[ProcessStack, ...] = ()
        self._stacks_at_s = float("-inf")
        self._fresh_stacks: tuple[ProcessStack, ...] | None = None
        self._last_sample_s = time.monotonic() - SAMPLE_EVERY_S
        self._last_stacks_s = float("-inf")
        self._alarm = ""
        self._budget = BudgetWatch(run.path, options.disk_budget)
        self._is_budget_used_up = False
        self._pending_incident: Verdict | None = None

    # -- called by the loop -----------------------------------------------------------------------------------------

    def tick(self, now_s: float) -> None:
        self._guard("disk budget", lambda: self._mind_budget(now_s))
        self._guard("output", lambda: self._read_output(now_s))
        self._guard("memory", lambda: self._watch_memory(now_s))
        self._guard("stacks", lambda: self._collect_stacks(now_s))
        self._guard("stacks", lambda: self._request_stacks(now_s))
        if now_s - self._last_sample_s >= SAMPLE_EVERY_S:
            late_s = now_s - self._last_sample_s - SAMPLE_EVERY_S
            self._last_sample_s = now_s
            self._guard("processes", self._read_tree)
            self._guard("gpu", self._read_gpus)
            self._guard("verdict", lambda: self._judge(now_s, late_s))

    def is_short_of_space(self) -> bool:
        """The disk is full but for the blocks reserved ahead of the output file: poll more often."""
        return any(tail.is_short_of_space for tail in self.tails.values())

    def silent_s(self, now_s: float) -> float:
        return now_s - self.last_output_s

    def note_mark(self) -> None:
        """A sign of progress that did not come through the output, such as a new checkpoint."""
        self.marks += 1
        self.last_output_s = time.monotonic()

    def send(self, number: int, target: Target) -> None:
        """Signal the command, and report a pause that this ends or that keeps it from obeying."""
        continued = self.command.send(number, target)
        if continued:
            noun = "process" if len(continued) == 1 else "processes"
            pids = ", ".join(map(str, continued[:4])) + (", ..." if len(continued) > 4 else "")
            self.events.emit("note", f"it was paused: continued {noun} {pids} (SIGCONT), so that it can obey")
        if read_state(self.command.child.pid) == "t":
            self.events.emit("note", "a debugger holds the main process: it can obey only once that has detached")

    def recall(self, state: SupervisorRecord) -> None:
        """Restore what the previous supervisor had recorded about this attempt."""
        if state.attempt == self.command.attempt.number:
            former = state.oom_before
            self.oom_before = OomCounters(former.cgroup_kills, former.cgroup, former.machine_kills)
            self.resumed_from = state.resumed_from
            self.incidents = list(state.incidents)
            self.memory.peak_bytes = state.memory.peak_bytes or 0
            self.num_lines = state.output.num_lines or 0

    def close(self) -> None:
        """After its end: end the processes it left behind if nobody else does, and read the rest of its output."""
        self._guard("processes", self._end_survivors)
        self._guard("output", lambda: self._read_output(time.monotonic()))
        for tail in self.tails.values():
            self._guard("output", tail.close)
        self.progress = self.told.progress or self.progress
        self._guard("output", self.told.close)
        # A run with many short Python children leaves an empty dump file for each.
        self._guard("stacks", lambda: forget_dead(self.command.attempt.stacks))

    def _end_survivors(self) -> None:
        for pid in self.command.end_survivors():
            self.events.emit("note", f"ended process {pid}, which outlived the command and its keeper")

    def state(self, now_s: float) -> SupervisorRecord:
        """This attempt's part of supervisor.json."""
        raw, raw_err = self.tails["raw"], self.tails.get("raw_err")
        return SupervisorRecord(
            attempt=self.command.attempt.number,
            child=self.command.child,
            keeper=self.command.keeper,
            started_at_s=self.command.started_at_s,
            silent_s=round(self.silent_s(now_s), 1),
            verdict=verdict_record(self.verdict, now_s),
            now=now_record(self.doing),
            cpu_cores=round(self.rates.cpu_cores, 2),
            disk_bytes_per_s=round(self.rates.disk_bytes_per_s),
            net_bytes_per_s=round(self.rates.net_bytes_per_s),
            num_processes=len(self.tree.processes),
            memory=memory_record(self.memory, self.growth_places.likely()),
            gpu=gpu_records(self.gpus),
            gpu_others=other_user_records(self.gpus, self.pids_seen),
            progress=progress_record(self.progress),
            printed=self.told.latest,
            output=OutputRecord(
                raw_consumed_bytes=raw.consumed_bytes,
                raw_err_consumed_bytes=raw_err.consumed_bytes if raw_err is not None else None,
                out_log_bytes=self.log.size_bytes,
                num_lines=self.num_lines,
                last_line=self.last_line[:500],
            ),
            oom_before=OomCountersRecord(**asdict(self.oom_before)),
            resumed_from=self.resumed_from,
            incidents=tuple(self.incidents[-20:]),
            protections_off=tuple(f"{name}: {why}" for name, why in self.protections_off.items()),
        )

    # -- parts ------------------------------------------------------------------------------------------------------

    def _open_tails(self, attempt: AttemptDir, consumed: dict[str, int]) -> dict[str, OutputTail]:
        tails = {"raw": OutputTail(attempt.raw_out, self.log, consumed_bytes=consumed.get("raw", 0), told=self.told)}
        if self.options.split_streams:
            start = consumed.get("raw_err", 0)
            tails["raw_err"] = OutputTail(
                attempt.raw_err, self.log, consumed_bytes=start, stream="err", told=self.told
            )
        return tails

    def _read_output(self, now_s: float) -> None:
        for tail in self.tails.values():
            self._take(tail.poll(time.time()), now_s)
            if tail.problem:
                self._switch_off("log", tail.problem)
            else:
                self.protections_off.pop("log", None)

    def _mind_budget(self, now_s: float) -> None:
        is_used_up = self._budget.poll(now_s)
        if is_used_up and not self._is_budget_used_up:
            self.log.pause("the run's disk budget is used up")
            self.events.emit("note", "the run's disk budget is used up: its output is not logged until there is room")
        elif is_used_up is False and self._is_budget_used_up:
            self.log.resume()
        self._is_budget_used_up = self._is_budget_used_up if is_used_up is None else is_used_up

    def _take(self, news: Any, now_s: float) -> None:
        if news.num_bytes:
            self.last_output_s = now_s
            self.num_lines += news.num_lines
            self.last_line = news.last_text or self.last_line
        if news.progress is not None:
            if self.progress is None or news.progress.done != self.progress.done:
                self.marks += 1
            self.has_trained = self.has_trained or is_later_step(self.progress, news.progress)
            self.progress = news.progress

    def _watch_memory(self, now_s: float) -> None:
        pids = [process.pid for process in self.tree.processes] or [self.command.child.pid]
        if not self.memory.poll(now_s, pids):
            return
        if self.memory.is_rising():
            if now_s - self._last_stacks_s > STACKS_RISING_EVERY_S:
                self._ask_for_stacks(now_s)
        elif self.memory.share() < 0.5:
            self.growth_places.clear()
        warning = self.memory.warning(now_s, self.growth_places.likely())
        if warning:
            self.events.emit("memory", warning, seconds_to_limit=self.memory.seconds_left())

    def _read_tree(self) -> None:
        tree = self.command.read_tree()
        pids = [process.pid for process in tree.processes]
        tree = TreeReading(tree.at_s, tree.processes, tree_tcp_bytes(pids))
        self.rates = rates_between(self.tree if self.tree.processes else None, tree)
        self.tree = tree
        self.pids_seen.update(pids[:1000])

    def _read_gpus(self) -> None:
        self.gpus = read_gpus()

    def _judge(self, now_s: float, late_s: float) -> None:
        output_bytes = sum(tail.num_read_bytes for tail in self.tails.values())
        stacks, self._fresh_stacks = self._fresh_stacks, None
        sample = Sample(
            at_s=now_s,
            late_s=max(0.0, late_s),
            tree=self.tree,
            gpus=self.gpus,
            output_bytes=output_bytes,
            marks=self.marks,
            stacks=stacks,
        )
        self.verdict = self.judge.add(sample)
        self._describe()
        self._raise_alarm(self.verdict)

    def _raise_alarm(self, verdict: Verdict) -> None:
        if verdict.kind == self._alarm:
            return
        if verdict.kind == "PAUSED":
            self._alarm = verdict.kind
            self.events.emit("verdict", verdict.text, verdict=verdict.kind, label=verdict.label)
            return
        if verdict.kind in ALARMS:
            self._alarm = verdict.kind
            self._pending_incident = verdict
            event = "stuck" if verdict.kind == "STUCK" else "verdict"
            self.events.emit(event, f"{verdict.kind}: {verdict.text}", verdict=verdict.kind, label=verdict.label)
        elif self._alarm:
            self.events.emit("verdict", f"it moves again: {verdict.text}", verdict=verdict.kind, label=verdict.label)
            self._alarm = ""

    def _request_stacks(self, now_s: float) -> None:
        if self._pending_incident is not None:
            self.sampler.request(self._python_pids(), native=True)
            return
        if now_s - self._began_s < STACKS_FIRST_AFTER_S:
            return  # an interpreter that is still starting has no stack to read
        is_silent = self.silent_s(now_s) >= min(STACKS_FIRST_AFTER_S, self.options.quiet_after_s)
        # The first heartbeat of a silence must already name the line, so take a stack when a silence seems to begin.
        # But a program that prints every two seconds must not cost a stack each time.
        since_stacks_s = now_s - self._last_stacks_s
        is_first = is_silent and self._last_stacks_s < self.last_output_s and since_stacks_s > STACKS_FIRST_APART_S
        # Half of --stuck-after, so that an alarm always has a line to name, even if the program prints often.
        always_every_s = min(STACKS_ALWAYS_EVERY_S, self.options.stuck_after_s / 2)
        # Counted from the start of the attempt, not from minus infinity: otherwise the first stack would be taken
        # right after the first print, and none would be due a second later, when the program falls silent.
        is_due = now_s - max(self._last_stacks_s, self._began_s) >= always_every_s
        is_due = is_due or (is_silent and since_stacks_s >= STACKS_SILENT_EVERY_S)
        if is_first or is_due:
            self._ask_for_stacks(now_s)

    def _ask_for_stacks(self, now_s: float) -> None:
        if self.sampler.request(self._python_pids()):
            self._last_stacks_s = now_s

    def _collect_stacks(self, now_s: float) -> None:
        taken = self.sampler.take()
        if self.sampler.problem:
            self._switch_off("stacks", self.sampler.problem)
        if taken is None:
            return
        self._stacks = self._fresh_stacks = taken.stacks
        self._stacks_at_s = self._last_stacks_s  # time of the request: what the stack shows may be that old
        if self.memory.is_rising() and self.tree.processes:
            largest = max(self.tree.processes, key=lambda process: process.rss_bytes)
            self.growth_places.add(self._stack_of(largest.pid))
        if taken.request.native:
            self._write_incident(taken)
        self._describe()

    def _write_incident(self, taken: StackSample) -> None:
        verdict = self._pending_incident or self.verdict
        if verdict is None:
            return
        self._pending_incident = None
        number = len(self.incidents) + 1
        path = self.command.attempt.incident(number)
        write_incident(
            path,
            verdict=verdict,
            stacks=taken.stacks,
            native_text=taken.native_text,
            tree=self.tree,
            now_s=time.time(),
        )
        self.incidents.append(IncidentRecord(number, str(path), time.time(), verdict.text))
        self.events.emit("incident", f"stacks of every process are in {path}", path=str(path))

    # -- small readings ----------------------------------------------------------------------------------------------

    def _python_pids(self) -> list[int]:
        """Pids with Python processes first, since only they have source lines to name."""
        pythons = [process.pid for process in self.tree.processes if process.is_python]
        others = [process.pid for process in self.tree.processes if not process.is_python]
        return (pythons + others) or [self.command.child.pid]

    def _leading_process(self) -> ProcessReading | None:
        """The process whose activity describes the run: the outermost Python process, else the command itself."""
        pythons = (process for process in self.tree.processes if process.is_python)
        return next(pythons, self.tree.processes[0] if self.tree.processes else None)

    def _leading_stack(self) -> ProcessStack | None:
        leader = self._leading_process()
        return self._stack_of(leader.pid) if leader else None

    def _stack_of(self, pid: int) -> ProcessStack | None:
        return next((stack for stack in self._stacks if stack.pid == pid), None)

    def _describe(self) -> None:
        leader = self._leading_process()
        if leader is not None:
            # A stack taken before the last output does not show what the program does now.
            stack = self._leading_stack() if self._stacks_at_s >= self.last_output_s else None
            self.doing = describe(stack, leader.wait or Wait("unknown"), leader.comm)

    def last_frame(self) -> Frame | None:
        """The line where it was seen last; on a busy machine only the verdict may have it."""
        if self.doing is not None and self.doing.frame is not None:
            return self.doing.frame
        return self.verdict.frame if self.verdict else None

    def _guard(self, name: str, part: Callable[[], object]) -> None:
        """Run `part` and fail open. The next tick tries again: a disk that was full may have room by then."""
        try:
            part()
        except Exception as error:
            self._switch_off(name, f"{type(error).__name__}: {error}")
        else:
            self.protections_off.pop(name, None)

    def _switch_off(self, name: str, why: str) -> None:
        if name not in self.protections_off:
            self.protections_off[name] = why
            self.events.emit("note", f"protection '{name}' is off: {why}", protection=name)
