"""The heartbeat line, which shows that a run without output is alive, and when it is due.

Owns its wording and interval; the viewers and out.log use both. Pure, except for HeartbeatNotes, which writes.
"""

from __future__ import annotations

import time

from jackline.rundir.records.supervisor import SupervisorRecord
from jackline.supervisor.output.reader import LogWriter
from jackline.units import format_bytes, format_duration

FIRST_AFTER_S = 2.0
# A second less than documented (10 s, later 60 s), because the callers check only from time to time.
EVERY_S = 9.0
LATER_EVERY_S = 58.0
LATER_AFTER_S = 600.0
MAX_SOURCE = 80  # characters of a line of code
STALE_S = 30.0  # an older report of progress is shown with its age


def heartbeat_is_due(silent_s: float, last_spoken_silent_s: float | None, *, first_after_s: float) -> bool:
    """`last_spoken_silent_s`: length of this silence at its last heartbeat; None when there was none yet."""
    if last_spoken_silent_s is None:
        return silent_s >= first_after_s
    every_s = LATER_EVERY_S if silent_s > LATER_AFTER_S else EVERY_S
    return silent_s - last_spoken_silent_s >= every_s


def heartbeat_line(state: SupervisorRecord, *, width: int | None = None) -> str:
    """Made from supervisor.json: elapsed time, activity, code line, and figures; cut to `width` if given."""
    now, verdict = state.now, state.verdict
    elapsed_s = (state.at_s or 0.0) - (state.started_at_s or 0.0)
    parts = [
        format_duration(max(0.0, elapsed_s)),
        *_progress_words(state),
        f"{now.what or 'running'}{f' ({now.worker})' if now.worker else ''}",
    ]
    if now.file:
        source = f" `{_cut(now.source)}`" if now.source else ""
        parts.append(f"{now.file.rsplit('/', 1)[-1]}:{now.line}{source}")
    parts += _figures(state)
    if verdict.is_alarm:
        parts.insert(1, f"{verdict.kind} for {format_duration(verdict.for_s or 0.0)}")
    elif verdict.is_pause:
        parts.insert(1, pause_words(state))
    elif verdict.is_waiting:
        parts.append(waiting_words(state))
    line = "  ".join(parts)
    return line if width is None or len(line) <= width else line[: max(0, width - 1)] + "…"


def _cut(source: str) -> str:
    return source if len(source) <= MAX_SOURCE else source[: MAX_SOURCE - 1] + "…"


def waiting_words(state: SupervisorRecord) -> str:
    """'nothing moved for 19 s, STUCK in 41 s if nothing changes'."""
    verdict = state.verdict
    words = f"nothing moved for {format_duration(verdict.for_s or 0.0)}"
    if not verdict.next_kind or verdict.next_in_s is None:
        return words
    return f"{words}, {verdict.next_kind} in {format_duration(verdict.next_in_s)} if nothing changes"


def pause_words(state: SupervisorRecord) -> str:
    """'paused (SIGSTOP) since 14:02:11 UTC, for 3 min'; the text of the verdict begins with how it was paused."""
    for_s = state.verdict.for_s or 0.0
    since = time.strftime("%H:%M:%S UTC", time.gmtime((state.at_s or 0.0) - for_s))
    how = (state.verdict.text or "").partition(":")[0] or "paused"
    return f"{how} since {since}, for {format_duration(for_s)}"


def _progress_words(state: SupervisorRecord) -> list[str]:
    """'train 12 %, 3 min left', of one epoch or bar where only that is known; and the loss that was printed."""
    progress, words = state.progress, []
    if progress.total and progress.done is not None:
        share = 100.0 * progress.done / progress.total
        age_s = max(0.0, (state.at_s or 0.0) - (progress.at_s or state.at_s or 0.0))
        left_s = progress.eta_s - age_s if progress.eta_s is not None and share < 100.0 else None
        left = f", {format_duration(left_s)} left" if left_s is not None and left_s > 0 else ""
        part = f"this {progress.of}" if progress.is_part else "done"
        old = f" ({format_duration(age_s)} ago)" if age_s >= STALE_S else ""
        words.append(f"{progress.phase or part} {share:.0f} %{left}{old}")
    loss = next((entry for entry in state.printed[:1] if "loss" in (entry.name or "")), None)
    if loss is not None and (loss.value is not None or loss.text):
        words.append(f"{loss.name} {loss.text if loss.value is None else format(loss.value, '.4g')}")
    return words


def _figures(state: SupervisorRecord) -> list[str]:
    words = [f"cpu {state.cpu_cores or 0.0:.1f}"]
    memory = state.memory
    # Workers share most of their pages with the process they were forked from, so a sum of RSS would be far too high.
    own = memory.own_bytes or memory.tree_rss_bytes
    if own is not None and memory.limit_bytes is not None:
        words.append(f"ram {format_bytes(own)} of {format_bytes(memory.limit_bytes)}")
    for gpu in state.gpu:
        percent = f" {gpu.utilisation_percent} %" if gpu.utilisation_percent is not None else ""
        used = format_bytes(gpu.used_bytes) if gpu.used_bytes is not None else "?"
        words.append(f"gpu{gpu.index} {used}{percent}")
    for name, rate in (("disk", state.disk_bytes_per_s), ("net", state.net_bytes_per_s)):
        if rate is not None and rate >= 1024:
            words.append(f"{name} {format_bytes(rate)}/s")
    return words


class HeartbeatNotes:
    """Writes heartbeats into out.log, for people who read only that file."""

    def __init__(self, log: LogWriter, *, quiet_after_s: float) -> None:
        self._log = log
        self._first_after_s = quiet_after_s
        self._spoken_silent_s: float | None = None

    def poll(self, state: SupervisorRecord, now_s: float) -> None:
        silent_s = state.silent_s or 0.0
        if self._spoken_silent_s is not None and silent_s < self._spoken_silent_s:
            self._spoken_silent_s = None
        if heartbeat_is_due(silent_s, self._spoken_silent_s, first_after_s=self._first_after_s):
            self._spoken_silent_s = silent_s
            self._log.note(heartbeat_line(state), state.at_s or 0.0)
