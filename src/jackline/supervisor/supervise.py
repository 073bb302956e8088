"""The supervisor: runs attempts, one after another, until the command is done or must not be restarted.

Read top to bottom: start or adopt, watch it closely, examine the end, decide, wait, restart. Decisions are
made in policy.py, stopping.py and verdict.py; this loop feeds them and acts.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from jackline.checkpoint.place import join_job
from jackline.diagnosis.deaths.evidence import SentSignal
from jackline.errors import JacklineError, UsageError
from jackline.machine.disk import explain_refusal
from jackline.rundir.atomic import remove_tree
from jackline.rundir.intent import read_intent
from jackline.rundir.layout import RunDir
from jackline.rundir.lock import RunLock, acquire_after_finished
from jackline.rundir.process_id import identify
from jackline.rundir.records.supervisor import (
    CheckpointRecord,
    OutputRecord,
    SupervisorRecord,
    read_supervisor,
    write_supervisor,
)
from jackline.rundir.registry import register
from jackline.rundir.reserves import release_records, reserve_records
from jackline.rundir.run_file import read_run_file
from jackline.supervisor.attempt.autopsy import Autopsy, examine, is_over
from jackline.supervisor.attempt.heartbeat import HeartbeatNotes
from jackline.supervisor.attempt.reaction import step_words, taken_over_text
from jackline.supervisor.attempt.stopping import (
    Asked,
    LimitWatch,
    Stopping,
    StuckWatch,
    next_step,
    press,
    stop_asked_for,
)
from jackline.supervisor.attempt.watching import AttemptWatch
from jackline.supervisor.child.environment import attempt_environment
from jackline.supervisor.child.process import Command, Ending, adopt_command, start_command
from jackline.supervisor.events import Events
from jackline.supervisor.foreign.resuming import Resuming
from jackline.supervisor.foreign.seen import CheckpointsSeen, own_newest
from jackline.supervisor.mirroring import Mirroring
from jackline.supervisor.options import SuperviseOptions
from jackline.supervisor.output.reader import LogWriter, begin_output, make_reserve, release_reserve
from jackline.supervisor.policy import AttemptSummary, Restart, Stop, decide
from jackline.supervisor.timeline import Timeline
from jackline.units import format_duration

TICK_S = 0.1
STATE_EVERY_S, STATE_MAY_BE_EARLY_S = 1.0, 0.2  # early with a sample, so that there is one wake-up a second
STUCK_GRACE_S = 10.0
SIGTERM_MAY_LAG_S = 1.0
RESERVE_BYTES = 16 << 20
PR_SET_CHILD_SUBREAPER = 36
_MAKE_ROOM = "make room there (df -h, df -i), then start it again: jackline resume"


class Supervisor:
    """One run's supervisor: holds the lock from start to exit."""

    def __init__(
        self,
        run: RunDir,
        options: SuperviseOptions,
        *,
        on_started: Callable[[], None],
        on_said: Callable[[str], None],
        lock_fd: int | None = None,
    ) -> None:
        """`on_said` sends text to the process that starts us, while that waits for `on_started`."""
        self.run = run
        self.options = options
        self.on_started = on_started
        self.on_said = on_said
        self.lock = RunLock(run.lock, lock_fd)
        if not acquire_after_finished(self.lock, run):
            raise UsageError(
                f"run '{run.name}' already has a supervisor", hint=f"watch it: jackline watch {run.name}"
            )
        self.contents = read_run_file(run)
        self.me = identify(os.getpid())
        self.summaries, self.limit = list[AttemptSummary](), LimitWatch(options)
        self.stopping: Stopping | None = None
        self.stop_requested_by, self.sent = "", list[SentSignal]()
        self.asked, self.stuck = Asked(), StuckWatch()
        self.last_autopsy: Autopsy | None = None
        cwd, since_s = Path(self.contents.cwd), self.contents.created_at_s
        self.checkpoints = CheckpointsSeen(run, options.checkpoints, cwd=cwd, since_s=since_s)

    def start(self) -> int:
        """Start a new attempt. An earlier one whose end was not recorded is examined first."""
        self._open_console(None)
        former = self._adopted_watch()
        if former is not None:
            if former.command.ending() is None:
                raise UsageError(
                    f"run '{self.run.name}' is alive but unwatched", hint=f"jackline watch {self.run.name}"
                )
            self._watch_to_end(former)
        return self._attempts(None)

    def adopt(self) -> int:
        """Take over a command whose supervisor has exited, or record how it ended."""
        state = read_supervisor(self.run)
        self._open_console(state.output.out_log_bytes)
        watch = self._adopted_watch()
        if watch is None:
            raise UsageError(f"run '{self.run.name}' has nothing to take over", hint="start it: jackline resume")
        self.events.emit("taken_over", taken_over_text(watch.command, state.at_s))
        self.limit.recall(state.time_limit)
        self._write_state(watch)
        self.on_started()
        return self._attempts(watch)

    def _attempts(self, watch: AttemptWatch | None) -> int:
        last: tuple[AttemptWatch, Autopsy] | None = None
        while True:
            try:
                watch = watch or self._begin_attempt()
            except JacklineError as error:
                if last is None:
                    raise
                return self._finish(*last, Stop(error.message))
            autopsy = self._watch_to_end(watch)
            decision = self._decide(watch)
            if isinstance(decision, Stop):
                return self._finish(watch, autopsy, decision)
            self._announce_end(autopsy)
            if not self._wait_to_restart(watch, decision):
                return self._finish(watch, autopsy, Stop("stopped while waiting to restart", is_crash_loop=False))
            last, watch = (watch, autopsy), None

    def _begin_attempt(self) -> AttemptWatch:
        former = self.run.last_attempt()
        attempt = self.run.attempt(former.number + 1 if former else 1)
        start = self._resuming().prepare(self.contents.argv, attempt.number, is_first=former is None)
        # These options apply to the attempt that the user started, not to later automatic restarts.
        options, self.options = self.options, replace(self.options, start_from=None, from_scratch=False)
        try:
            attempt.stacks.mkdir(parents=True)
        except OSError as error:
            why = explain_refusal(error, self.run.path)
            raise JacklineError(f"cannot write to {self.run.path}: {why}", hint=_MAKE_ROOM) from None
        reserve_records(self.run, attempt, is_supervised=True)
        make_reserve(attempt.reserve, RESERVE_BYTES)
        begin_output(attempt.raw_out, *[attempt.raw_err] * self.options.split_streams)
        join_job(self.run, options.job)
        try:
            command = start_command(
                attempt,
                start.argv,
                cwd=self.contents.cwd,
                env=attempt_environment(self.run, attempt, options),
                options=self.options,
                lock_fd=self.lock.fd,
            )
        except BaseException:
            remove_tree(attempt.path)
            raise
        watch = self._watch(command)
        watch.resumed_from = start.resumed_from
        words = f"attempt {attempt.number}" + (f": {self.contents.command}" if former is None else " has started")
        self.events.emit("started", words, attempt=attempt.number, argv=start.argv, pid=command.child.pid)
        self._write_state(watch)
        self.on_started()
        return watch

    def _resuming(self) -> Resuming:
        return Resuming(self.run, self.options, self.checkpoints, self._say_of_checkpoint)

    def _say_of_checkpoint(self, event: str, text: str, checkpoint: str | None) -> None:
        self.events.emit(event, text, checkpoint=checkpoint)
        self.on_said(text)

    def _watch_to_end(self, watch: AttemptWatch) -> Autopsy:
        heartbeat, timeline = HeartbeatNotes(self.log, quiet_after_s=self.options.quiet_after_s), Timeline(self.run)
        next_state_s = 0.0
        while True:
            now_s = time.monotonic()
            watch.tick(now_s)
            self._mind_stop(watch, now_s)
            self._mind_stuck(watch, now_s)
            self._mind_memory(watch)
            if self.checkpoints.look(now_s, watch.tree):
                watch.note_mark()
            if now_s >= next_state_s - STATE_MAY_BE_EARLY_S:
                next_state_s = max(now_s, next_state_s) + STATE_EVERY_S
                state = self._write_state(watch)
                heartbeat.poll(state, now_s)
                timeline.note(state)
                self.events.tend_hooks()
                self.mirroring.tend(now_s)
            ending = watch.command.ending()
            if ending is not None and is_over(watch, ending, self.events):
                break
            watch.sleep(now_s, is_stopping=self.stopping is not None)
        watch.close()
        timeline.note(self._write_state(watch), is_last=True)
        release_reserve(watch.command.attempt.reserve)
        return self._examine(watch, ending)

    def _examine(self, watch: AttemptWatch, ending: Ending) -> Autopsy:
        self._hear_late_sigterm(ending)
        attempt = watch.command.attempt.number
        after, has_more = self.checkpoints.end_attempt(attempt)
        if self.options.checkpoints is None:
            after = own_newest(self.run)
            has_more = after is not None and after != watch.resumed_from
        autopsy = examine(
            watch,
            ending,
            sent=tuple(self.sent),
            stop_requested_by=self.stop_requested_by,
            checkpoint_after=after,
            made_progress=has_more,
        )
        self.checkpoints.judge_load(attempt, autopsy.as_ending_of_load(watch))
        for orphan in ending.orphans:
            self.events.emit("note", f"ended a process that outlived it: pid {orphan['pid']} {orphan['command']}")
        self.summaries.append(autopsy.summarise(watch))
        self.last_autopsy = autopsy
        return autopsy

    @property
    def _chosen(self) -> SuperviseOptions:
        """The options in force: those asked for, or the defaults for a script that has attached."""
        return self.options.for_session(self.run.was_attached)

    def _decide(self, watch: AttemptWatch) -> Restart | Stop:
        decision = decide(
            self.summaries,
            max_restarts=self._chosen.restart,
            is_stop_requested=bool(self.stop_requested_by),
            intent=read_intent(watch.command.attempt),
        )
        refusal = self._resuming().refusal() if isinstance(decision, Restart) else None
        return Stop(str(refusal).removeprefix("error: ")) if refusal else decision

    def _announce_end(self, autopsy: Autopsy) -> None:
        event = {"finished": "finished", "stopped": "stopped", "time_limit": "stopped"}.get(autopsy.cause, "died")
        self.events.emit(event, autopsy.text, cause=autopsy.cause, exit_code=autopsy.exit_code)

    def _wait_to_restart(self, watch: AttemptWatch, decision: Restart) -> bool:
        """False when a stop was requested meanwhile."""
        until_s = time.monotonic() + decision.delay_s
        restart_at_s = time.time() + decision.delay_s
        self.events.emit("restart", f"restarting in {format_duration(decision.delay_s)}: {decision.why}")
        self.stopping, self.sent = None, []
        while time.monotonic() < until_s:
            if self.asked.is_interrupted:
                return False
            self._write_state(watch, is_restarting=True, restart_at_s=restart_at_s)
            self.events.tend_hooks()
            self.mirroring.tend(time.monotonic())
            time.sleep(min(0.5, max(0.0, until_s - time.monotonic())))
        return True

    def _finish(self, watch: AttemptWatch, autopsy: Autopsy, decision: Stop) -> int:
        show = partial(self._write_state, watch)
        autopsy = self.mirroring.finish(watch.command.attempt, autopsy, lambda: self.asked.is_interrupted, show)
        self._announce_end(autopsy)
        if decision.why and self._chosen.restart and autopsy.cause != "finished":
            self.events.emit("note", f"not restarting: {decision.why}")
        if self.options.when_done and autopsy.is_given_up:
            self.events.emit("note", "the --when-done command is not run: the last state of this run is not saved")
        elif self.options.when_done:
            self.events.run_hook(self.options.when_done, "done", autopsy.summary, exit_code=autopsy.exit_code)
        self._write_state(watch, is_finished=True, durable=True)
        release_records(self.run, watch.command.attempt)
        self.events.wait_hooks()
        return autopsy.exit_code

    # -- stopping ----------------------------------------------------------------------------------------------------

    def _mind_stop(self, watch: AttemptWatch, now_s: float) -> None:
        if self.asked.presses > self.asked.presses_taken:
            self.asked.presses_taken += 1
            self.stopping = press(self.stopping, grace_s=self.options.grace_s)
            self.stop_requested_by = self.stop_requested_by or "Ctrl-C"
        if self.stopping is None and self.asked.is_terminated:
            self.stopping = self._stop_asked_for()
        heeded = self.asked.heed(watch.tree, self.options.grace_s, now_s) if self.stopping is None else None
        if heeded is not None:
            self.stopping, text = heeded
            self.stop_requested_by = "SIGUSR1" if self.stopping else ""
            self.events.emit("note", text)
        if self.stopping is None and (words := self.limit.reached(now_s)):
            self.stop_requested_by = "time limit"
            self.stopping = Stopping("time-limit", self.options.grace_s)
            self.events.emit("note", words)
        if self.stopping is None or watch.rescuing.holds(self.stopping, now_s):
            return
        self.stopping, step = next_step(self.stopping, now_s)
        if step is not None:
            self.sent.append(SentSignal(time.time(), int(step.signal), self.stopping.why))
            self.events.emit("note", step_words(self.run, watch.command, step, self.stopping.stage))
            watch.send(step.signal, step.target)

    def _stop_asked_for(self) -> Stopping:
        stopping, self.stop_requested_by = stop_asked_for(self.run, self.options.grace_s)
        return stopping

    def _hear_late_sigterm(self, ending: Ending) -> None:
        """A shutdown signals all processes in any order, so the command may have exited before we got our signal."""
        until_s = time.monotonic() + SIGTERM_MAY_LAG_S
        while ending.signal == signal.SIGTERM and not self.sent and not self.asked.is_terminated:
            if time.monotonic() > until_s:
                return
            time.sleep(TICK_S)
        if self.asked.is_terminated and not self.stop_requested_by:
            self._stop_asked_for()

    def _mind_stuck(self, watch: AttemptWatch, now_s: float) -> None:
        if self.stopping is not None or not watch.incidents:
            return
        action, text = self.stuck.judge(watch.verdict, self._chosen, now_s)
        if text:
            self.events.emit("note", text)
        if action != "report":
            self.stop_requested_by = "--on-stuck stop" if action == "stop" else self.stop_requested_by
            self.stopping = Stopping("stuck", min(STUCK_GRACE_S, self.options.grace_s))

    def _mind_memory(self, watch: AttemptWatch) -> None:
        """If no boundary came in time, end the command just before the kernel kills it, because we can say why. Do so
        only if it can resume from a checkpoint: a user's own script might still succeed."""
        if self.stopping is not None or not watch.memory.must_end():
            return
        checkpoint = self.checkpoints.newest_path()
        # An intent: it reached a boundary, is saving and does not use more memory.
        if checkpoint is None or read_intent(watch.command.attempt) is not None:
            return
        self.sent.append(SentSignal(time.time(), int(signal.SIGKILL), "memory"))
        # Signal the group, not the tree: the checkpoint writer has a group of its own and can finish.
        watch.command.send(signal.SIGKILL, "group")
        self.stopping = Stopping("memory", 0.0, stage=2, last_step_at_s=time.monotonic())
        text = f"host memory is full in a moment and no step ends: ended before the kernel kills; {checkpoint} stands"
        self.events.emit("memory", text, checkpoint=checkpoint)

    # -- plumbing ----------------------------------------------------------------------------------------------------

    def _open_console(self, log_bytes: int | None) -> None:
        self.log = LogWriter(self.run.out_log, size_bytes=log_bytes)
        self.events = Events(self.run, self.log, self.options.on_event)
        register(self.run, vouched=False)  # whoever started us has vouched for it
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self.mirroring = Mirroring(self.run, self.options, self.events)
        self.asked.listen()

    def _adopted_watch(self) -> AttemptWatch | None:
        """The last attempt, if it was started and its end was not recorded."""
        attempt = self.run.last_attempt()
        if attempt is None or attempt.exit_file.exists():
            return None
        command = adopt_command(attempt)
        if command is None:
            return None
        state = read_supervisor(self.run)
        output = state.output if state.attempt == attempt.number else OutputRecord()
        consumed = {"raw": output.raw_consumed_bytes or 0, "raw_err": output.raw_err_consumed_bytes or 0}
        watch = self._watch(command, consumed)
        watch.recall(state)
        return watch

    def _watch(self, command: Command, consumed: dict[str, int] | None = None) -> AttemptWatch:
        return AttemptWatch(self.run, command, self.options, log=self.log, events=self.events, consumed=consumed)

    def _write_state(self, watch: AttemptWatch, *, durable: bool = False, **more: Any) -> SupervisorRecord:
        newest = self.checkpoints.newest
        state = replace(
            watch.state(time.monotonic()),
            at_s=time.time(),
            time_limit=self.limit.record(),
            supervisor=self.me,
            options=self.options.to_stored(),
            checkpoint=CheckpointRecord(str(newest.path), newest.mtime_s) if newest else CheckpointRecord(),
            **more,
        )
        with contextlib.suppress(OSError):
            write_supervisor(self.run, state, durable=durable)
        return state
