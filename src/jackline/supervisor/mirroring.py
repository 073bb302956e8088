"""The supervisor's side of the mirror: keeps its process running, and ends a run only when its upload is done.

A command that has finished is not a finished run while its newest checkpoint is not in the mirror: the end is
recorded as stopped, with what is missing, and the next attempt only uploads. Owns that wait and its messages. The
session waits for Jackline's own checkpoints itself (session/mirrored.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from jackline.diagnosis.deaths.evidence import Finding
from jackline.errors import EXIT_STOPPED
from jackline.rundir.layout import AttemptDir, RunDir
from jackline.rundir.records.exit import read_exit, write_exit
from jackline.rundir.records.mirror import read_mirror
from jackline.rundir.records.supervisor import ProgressRecord
from jackline.supervisor.attempt.autopsy import Autopsy
from jackline.supervisor.events import Events
from jackline.supervisor.options import SuperviseOptions
from jackline.units import format_duration

if TYPE_CHECKING:
    from jackline.checkpoint.mirror.progress import Left

LOOK_EVERY_S = 0.1
LEFT_EVERY_S = 1.0
TELL_AFTER_S, TELL_EVERY_S = 2.0, 10.0
RECORDS_PATIENCE_S = 30.0  # when only the run's records are missing


class Mirroring:
    """The mirror of one supervised run; does nothing without --mirror."""

    def __init__(self, run: RunDir, options: SuperviseOptions, events: Events) -> None:
        self._run = run
        self._options = options
        self._events = events
        self._trouble: str | None = None
        self._process = None
        if options.mirror is not None:
            from jackline.supervisor.foreign.mirror import mirror_process  # slow to import (archives, stores)

            self._process = mirror_process(run, options)

    def tend(self, now_s: float) -> None:
        """Start the process, restart it when it was killed, and report why uploads fail."""
        if self._process is None:
            return
        why = self._process.tend(now_s)
        if why:
            self._events.emit("mirror_ended", f"the mirror stopped: {why}; starting another")
        trouble = read_mirror(self._run.mirror_file).trouble.why
        if trouble and trouble != self._trouble:
            self._events.emit("mirror_failed", f"the mirror cannot be reached: {trouble}; trying again")
        self._trouble = trouble

    def finish(
        self,
        attempt: AttemptDir,
        autopsy: Autopsy,
        should_leave: Callable[[], bool],
        show: Callable[..., object],
    ) -> Autopsy:
        """The end of the run. Returns the autopsy, changed when the run is not finished because of its mirror."""
        if self._process is None:
            return autopsy
        if autopsy.cause != "finished":
            self._tell_left(autopsy)
            return autopsy
        ended = read_exit(attempt)
        changed = self._unfinished(attempt, autopsy)  # recorded before the wait, because we may be killed meanwhile
        is_up = self._wait(should_leave, show)
        if is_up and changed is not autopsy:
            write_exit(attempt, ended)
        if not is_up:
            changed = self._unfinished(attempt, autopsy)
            if changed is autopsy:
                write_exit(attempt, ended)
                why = read_mirror(self._run.mirror_file).trouble.why or "the mirror does not answer"
                self._events.emit("not_mirrored", f"the run's records are not in the mirror: {why}")
        return autopsy if is_up else changed

    def _unfinished(self, attempt: AttemptDir, autopsy: Autopsy) -> Autopsy:
        """Record what the mirror lacks; the same autopsy when it has the newest checkpoint."""
        from jackline.supervisor.foreign.mirror import read_left

        left = read_left(self._run, self._options.checkpoints)
        if left is None:
            return autopsy
        text = f"the command has finished, but {left.text()}"
        hint = f"`jackline resume {self._run.name}` uploads the rest"
        finding = Finding("stopped", "certain", text, (), hint)
        written = replace(
            read_exit(attempt),
            exit_code=EXIT_STOPPED,
            is_stopped=True,
            cause="stopped",
            text=f"{text}\nhint: {hint}",
            findings=(finding.to_json(),),
            upload_left=left.text(),
        )
        write_exit(attempt, written)
        return replace(
            autopsy, exit_code=EXIT_STOPPED, findings=(finding,), text=f"{text}\nhint: {hint}", summary=text
        )

    def _wait(self, should_leave: Callable[[], bool], show: Callable[..., object]) -> bool:
        """Whether the mirror has everything. False after the patience without a byte uploaded."""
        from jackline.checkpoint.mirror.progress import UploadWait
        from jackline.supervisor.foreign.mirror import read_left

        assert self._process is not None
        began_s = left_s = time.monotonic()
        number, left = time.time_ns() // 1_000_000, read_left(self._run, self._options.checkpoints)
        patience_s = self._options.mirror_patience_s
        wait = UploadWait(number, patience_s if left else min(patience_s, RECORDS_PATIENCE_S), began_s)
        self._process.ask(number)
        tell_s = began_s + TELL_AFTER_S
        while True:
            now_s = time.monotonic()
            state = wait.look(read_mirror(self._run.mirror_file), now_s, pid=self._process.pid)
            if state != "waiting":
                return state == "done"
            self.tend(now_s)
            if should_leave():
                return False
            if now_s - left_s >= LEFT_EVERY_S:
                left_s, left = now_s, read_left(self._run, self._options.checkpoints)
                done, total = (left.done_bytes, left.total_bytes) if left else (None, None)
                show(progress=ProgressRecord("upload", done, total, "bytes", source="mirror"))
            if now_s >= tell_s:
                tell_s = now_s + TELL_EVERY_S
                what = left.text() if left else "the run's records are being uploaded"
                waited = format_duration(now_s - began_s)
                self._events.emit("waits_for_mirror", f"waiting for the mirror, {waited} so far: {what}")
            time.sleep(LOOK_EVERY_S)

    def _tell_left(self, autopsy: Autopsy) -> None:
        """What was not uploaded when the run ended in another way. A session that was stopped told of its own."""
        for left in list_left(self._run, self._options.checkpoints, with_own=autopsy.cause != "stopped"):
            self._events.emit("not_mirrored", f"{left.text()}; its upload continues in the background")


def list_left(run: RunDir, pattern: str | None, *, with_own: bool = True) -> list[Left]:
    """What the mirrors lack: the newest of the command's checkpoints, and of Jackline's. Empty without mirrors."""
    from jackline.checkpoint.mirror.progress import read_left as read_own_left
    from jackline.checkpoint.place import choose_place
    from jackline.supervisor.foreign.mirror import read_left

    own = choose_place(run).folder
    found = [read_left(run, pattern) if run.mirror_file.exists() else None]
    found.append(read_own_left(own) if with_own and (own / "mirror.json").exists() else None)
    return [left for left in found if left is not None]
