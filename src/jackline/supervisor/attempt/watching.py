"""Watches one attempt: output, memory, stacks, verdict, incidents.

Owns the order in which the parts run and what supervisor.json says about the attempt. Each part fails open: an
error inside it is reported once, that protection is shown as off, and watching continues.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

from jackline.diagnosis.doing import Doing, describe, outermost
from jackline.diagnosis.frames import Frame, ProcessStack
from jackline.diagnosis.waiting import effective_wait
from jackline.machine.gpu.watch import GpuUse, read_gpus
from jackline.machine.memory import read_oom_counters
from jackline.machine.net import look_at_sockets
from jackline.machine.readings import GpuReading, OomCounters, ProcessReading, Rates, TreeReading, Wait, rates_between
from jackline.rundir.layout import AttemptDir, RunDir
from jackline.rundir.process_id import read_state
from jackline.rundir.records.supervisor import IncidentRecord, OomCountersRecord, OutputRecord, SupervisorRecord
from jackline.supervisor.attempt.gpu_creep import GpuCreep
from jackline.supervisor.attempt.hang_watch import HangWatch
from jackline.supervisor.attempt.memory_watch import ARMED_SHARE, GrowthPlaces, MemoryWatch
from jackline.supervisor.attempt.rank_watch import RankWatch
from jackline.supervisor.attempt.rescuing import Rescuing
from jackline.supervisor.attempt.slowness import Slowness
from jackline.supervisor.attempt.stopping import Target
from jackline.supervisor.attempt.written import WrittenFiles
from jackline.supervisor.child.process import Command
from jackline.supervisor.child.waking import Waker
from jackline.supervisor.events import Events
from jackline.supervisor.hang.totals import LAUNCHER_COMMS
from jackline.supervisor.hang.verdict import Verdict
from jackline.supervisor.options import SuperviseOptions
from jackline.supervisor.output.progress import Progress, is_later_step
from jackline.supervisor.output.reader import LogWriter, OutputTail
from jackline.supervisor.output.room import BudgetWatch
from jackline.supervisor.output.told import Told
from jackline.supervisor.stacks.take import forget_dead
from jackline.supervisor.state_record import (
    around_of,
    gpu_records,
    memory_record,
    now_record,
    other_user_records,
    progress_record,
    verdict_record,
)

SAMPLE_EVERY_S = 1.0
TICK_S, CALM_TICK_S, SHORT_TICK_S = 0.1, 0.5, 0.02
CALM_AFTER_S = 10.0
QUIET_AFTER_S = 3.0  # by then the first heartbeat of a silence has named the line
STACKS_RISING_EVERY_S = 0.3


class AttemptWatch:
    """Live state of one attempt. `tick` is called when it prints, at most ten times a second, else once a second."""

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
        self._waker = Waker([tail.path for tail in self.tails.values()], command.ends)
        self.memory = MemoryWatch(command.child.pid)
        self.hang = HangWatch(command.attempt, options, events)
        self.ranks = RankWatch(command.attempt, run, events)
        self.tree = TreeReading(0.0)
        self.rates = Rates()
        self.gpus: tuple[GpuReading, ...] = ()
        self.doing: Doing | None = None
        self.progress: Progress | None = None
        self.growth_places = GrowthPlaces()
        self.written = WrittenFiles(run)
        self.gpu_use = GpuUse()
        self.rescuing = Rescuing(command.attempt, options, events)
        self.gpu_creep = GpuCreep(command.attempt, events, is_injected=options.inject)
        self.slowness = None if options.typed else Slowness(events)  # recipes watch their speed themselves
        self.gpu_points: deque[tuple[float, int]] = deque(maxlen=900)
        self.alive_at_s: float | None = None
        self.pids_seen: set[int] = {command.child.pid}
        self.resumed_from: str | None = None
        self.has_trained = False  # its output has counted training steps, not only loaded files
        self.are_survivors_named = False
        self.last_output_s = time.monotonic()
        self.last_line = ""
        self.num_lines = 0
        self.marks = 0
        self._began_s = time.monotonic()
        self._last_sample_s = self._began_s - SAMPLE_EVERY_S
        self._budget = BudgetWatch(run.path, options.disk_budget)
        self._is_budget_used_up = False

    # -- called by the loop -----------------------------------------------------------------------------------------

    def tick(self, now_s: float) -> None:
        self._guard("disk budget", lambda: self._mind_budget(now_s))
        self._guard("output", lambda: self._read_output(now_s))
        self._guard("memory", lambda: self._watch_memory(now_s))
        self._guard("stacks", lambda: self._collect_stacks(now_s))
        if now_s - self._last_sample_s >= SAMPLE_EVERY_S or self.hang.is_sample_due:
            late_s = now_s - self._last_sample_s - SAMPLE_EVERY_S
            self._last_sample_s = now_s
            self._guard("processes", self._read_tree)
            self._guard("files", lambda: self.written.poll(now_s, self._python_pids()))
            self._guard("gpu", self._read_gpus)
            self._guard("gpu memory", lambda: self.gpu_creep.poll(now_s, self.gpus, self._python_pids()))
            self._guard("ranks", self._look_at_ranks)
            self._guard("speed", lambda: self._mind_speed(now_s))
            self._guard("verdict", lambda: self._judge(now_s, late_s))
            self._guard("rescue", lambda: self._tend_rescue(now_s))
        self._guard("stacks", lambda: self.hang.request_stacks(now_s, self.last_output_s, self._python_pids()))

    @property
    def verdict(self) -> Verdict | None:
        return self.hang.verdict

    @property
    def incidents(self) -> list[IncidentRecord]:
        return self.hang.incidents

    def sleep(self, now_s: float, *, is_stopping: bool) -> None:
        """Sleep until the next `tick`, shortest when the disk is full but for the blocks reserved ahead of the output
        file. A silence that is described already lasts until something happens. `now_s`: of the last `tick`."""
        is_calm = now_s - self._began_s > CALM_AFTER_S and self.memory.share() < ARMED_SHARE
        is_calm = is_calm and not is_stopping and not self.memory.is_rising()
        least_s = most_s = CALM_TICK_S if is_calm else TICK_S
        if any(tail.is_short_of_space for tail in self.tails.values()):
            least_s = most_s = SHORT_TICK_S
        elif is_calm and self.silent_s(now_s) > QUIET_AFTER_S and not self.hang.sampler.is_busy:
            most_s = self._last_sample_s + SAMPLE_EVERY_S - now_s
        passed_s = time.monotonic() - now_s
        self._waker.sleep(least_s - passed_s, most_s - passed_s)

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
            self.alive_at_s = state.at_s
            self.hang.incidents = list(state.incidents)
            self.memory.peak_bytes = state.memory.peak_bytes or 0
            self.num_lines = state.output.num_lines or 0

    def close(self) -> None:
        """After its end: end the processes it left behind if nobody else does, and read the rest of its output."""
        self._guard("processes", self._end_survivors)
        self._guard("rescue", self.rescuing.close)
        self._guard("gpu memory", self.gpu_creep.close)
        self._guard("output", lambda: self._read_output(time.monotonic()))
        for tail in self.tails.values():
            self._guard("output", tail.close)
        self._waker.close()
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
            now=now_record(self.doing, self.hang.judge.at_work()),
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
            ranks=self.ranks.records(),
            protections_off=tuple(f"{name}: {why}" for name, why in self.protections_off.items()),
            evidence=self.hang.judge.evidence(),
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
            if now_s - self.hang.requested_at_s > STACKS_RISING_EVERY_S:
                self.hang.ask(now_s, self._python_pids())
        elif self.memory.share() < 0.5:
            self.growth_places.clear(now_s)
        warning = self.memory.warning(now_s, self.growth_places.likely())
        if warning:
            self.events.emit("memory", warning, seconds_to_limit=self.memory.seconds_left())

    def _read_tree(self) -> None:
        tree = self.command.read_tree()
        pids = [process.pid for process in tree.processes]
        working = [process.pid for process in tree.processes if process.comm not in LAUNCHER_COMMS]
        tree = TreeReading(tree.at_s, self.ranks.named(tree.processes), *look_at_sockets(working))
        self.rates = rates_between(self.tree if self.tree.processes else None, tree)
        self.tree = tree
        self.pids_seen.update(pids[:1000])
        self.alive_at_s = time.time() if pids else self.alive_at_s
        self.growth_places.bury(pids, time.monotonic())

    def _look_at_ranks(self) -> None:
        is_old = self.hang.stacks_at_s < self.last_output_s
        self.ranks.note(self.tree.processes, self._newest_stack, self.gpus, is_old=is_old)

    def _read_gpus(self) -> None:
        pids = [process.pid for process in self.tree.processes]
        self.gpus = self.gpu_use.mark(read_gpus(), pids, time.monotonic())
        if self.gpus:
            own = [user.used_bytes or 0 for gpu in self.gpus for user in gpu.processes if user.pid in self.pids_seen]
            self.gpu_points.append(
                (time.monotonic(), sum(own) or max((gpu.used_bytes for gpu in self.gpus if gpu.is_ours), default=0))
            )

    def _mind_speed(self, now_s: float) -> None:
        slowness, told = self.slowness, (self.told.progress_s, self.told.step)
        if slowness is not None and slowness.look(now_s, told, self.gpus, self.tree.processes):
            self.hang.ask(now_s, self._python_pids(), delay_s=slowness.delay_s)

    def _judge(self, now_s: float, late_s: float) -> None:
        output_bytes = sum(tail.num_read_bytes for tail in self.tails.values()) + self.ranks.output_bytes()
        sample = self.hang.make_sample(now_s, late_s, self.tree, self.gpus, (output_bytes, self.marks))
        sample = replace(sample, elsewhere=self.ranks.elsewhere(), rescued=self.rescuing.take_stuck())
        self.hang.judge_sample(sample)
        self._describe()

    def _tend_rescue(self, now_s: float) -> None:
        is_stuck = self.verdict is not None and self.verdict.kind == "STUCK"
        left_s = self.memory.seconds_left() if self.memory.is_own_growth() else None
        self.rescuing.tend(now_s, is_stuck=is_stuck, memory_left_s=left_s)

    def _collect_stacks(self, now_s: float) -> None:
        taken = self.hang.collect(self.tree)
        if self.hang.sampler.problem:
            self._switch_off("stacks", self.hang.sampler.problem)
        if taken is None:
            return
        if self.memory.is_rising() and self.tree.processes:
            self.growth_places.add(self._stack_of(self.growth_places.grower(self.tree.processes)))
        if self.slowness is not None:
            self.slowness.note_stack(self._leading_stack())
        self._describe()

    # -- small readings ----------------------------------------------------------------------------------------------

    def _python_pids(self) -> list[int]:
        """Pids with Python processes first, since only they have source lines to name."""
        pythons = [process.pid for process in self.tree.processes if process.is_python]
        others = [process.pid for process in self.tree.processes if not process.is_python]
        return (pythons + others) or [self.command.child.pid]

    def _leading_process(self) -> ProcessReading | None:
        """The process whose activity describes the run: the outermost Python process, else the command itself."""
        by_pid = {process.pid: process for process in self.tree.processes}
        if (leader := by_pid.get(self.hang.judge.leader_pid or 0)) is not None:
            return leader
        pythons = (process for process in self.tree.processes if process.is_python)
        return next(pythons, self.tree.processes[0] if self.tree.processes else None)

    def _leading_stack(self) -> ProcessStack | None:
        leader = self._leading_process()
        return self._newest_stack(leader.pid) if leader else None

    def _newest_stack(self, pid: int) -> ProcessStack | None:
        return self.hang.judge.stack_of(pid) or self._stack_of(pid)

    def _stack_of(self, pid: int | None) -> ProcessStack | None:
        return next((stack for stack in self.hang.stacks if stack.pid == pid), None)

    def _describe(self) -> None:
        leader = self._leading_process()
        is_held_by_us = leader is not None and leader.state == "t" and not self._is_paused()
        if leader is not None and not is_held_by_us:  # py-spy holds a process for a moment to read native stacks
            stack, around = self._leading_stack(), around_of(leader, self.tree, self.rates, self.gpus)
            if self.hang.stacks_at_s < self.last_output_s:
                stack = outermost(stack)
            wait = effective_wait(stack, leader.wait or Wait("unknown"))
            self.doing = describe(stack, wait, leader.comm, around)

    def _is_paused(self) -> bool:
        return self.verdict is not None and self.verdict.kind == "PAUSED"

    def last_frame(self) -> Frame | None:
        """The line where it was seen last; on a busy machine only the verdict may have it."""
        doing = self.doing.frame if self.doing is not None else None
        if doing is not None and doing.source:
            return doing
        return (self.verdict.frame if self.verdict else None) or doing

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
