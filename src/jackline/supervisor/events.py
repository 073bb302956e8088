"""The supervisor's events: recorded, printed into out.log, and passed to the user's --on-event command.

Owns events-supervisor.jsonl, the [jackline] lines in out.log and the --on-event command. Fails open: an event that
cannot be written is lost, but the run continues.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from typing import Any

from jackline.rundir.jsonl import JsonlWriter
from jackline.rundir.layout import RunDir
from jackline.rundir.records.event import EventRecord
from jackline.supervisor.output.reader import LogWriter

HOOK_LIMIT_S = 60.0
# The names of the events that --on-event knows; other events are only recorded.
HOOKED = {"stuck": "stuck", "died": "crashed", "finished": "done", "memory": "memory"}


class Events:
    """Records and reports the events of one run's supervisor."""

    def __init__(self, run: RunDir, log: LogWriter, on_event: str | None) -> None:
        self._run = run
        self._log = log
        self._on_event = on_event
        self._writer = JsonlWriter(run.supervisor_events)
        self._hooks: list[tuple[subprocess.Popen[bytes], float]] = []

    def emit(self, event: str, text: str, **facts: Any) -> None:
        now_s = time.time()
        with contextlib.suppress(OSError, ValueError, TypeError):
            self._writer.append(EventRecord(round(now_s, 3), event, text, facts).to_json())
        for line in text.splitlines():
            self._log.note(line, now_s)
        if self._on_event and event in HOOKED:
            self.run_hook(self._on_event, HOOKED[event], text)

    def run_hook(self, command: str, event: str, text: str, *, exit_code: int | None = None) -> None:
        """Start the user's command. It may take a minute; its failure is only recorded."""
        env = {
            **os.environ,
            "JACKLINE_EVENT": event,
            "JACKLINE_TEXT": text,
            "JACKLINE_RUN": self._run.name,
            "JACKLINE_RUN_DIR": str(self._run.path),
        }
        env.pop("JACKLINE_ATTEMPT", None)  # it marks processes of a command; a hook may outlive that
        if exit_code is not None:
            env["JACKLINE_EXIT_CODE"] = str(exit_code)
        try:
            hook = subprocess.Popen(
                ["/bin/sh", "-c", command], env=env, stdin=subprocess.DEVNULL, start_new_session=True
            )
        except OSError as error:
            self._log.note(f"could not start the {event} command: {error}", time.time())
            return
        self._hooks.append((hook, time.monotonic()))

    def tend_hooks(self) -> None:
        """Reap commands that have exited and kill those that take too long."""
        for entry in list(self._hooks):
            hook, started_s = entry
            code = hook.poll()
            if code is None and time.monotonic() - started_s < HOOK_LIMIT_S:
                continue
            self._hooks.remove(entry)
            if code is None:
                with contextlib.suppress(OSError):
                    os.killpg(hook.pid, signal.SIGKILL)
                hook.wait()
                self._log.note(f"an --on-event command was ended after {HOOK_LIMIT_S:.0f} s", time.time())
            elif code != 0:
                self._log.note(f"an --on-event command failed with exit code {code}", time.time())

    def wait_hooks(self) -> None:
        while self._hooks:
            self.tend_hooks()
            time.sleep(0.05)
