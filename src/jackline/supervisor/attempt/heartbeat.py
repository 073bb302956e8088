"""The one line that says a silent run is alive, and when it is due.

Owns wording and cadence; both the viewers and out.log use them. Pure, except for HeartbeatNotes, which writes.
"""

from __future__ import annotations

from typing import Any

from jackline.supervisor.output.reader import LogWriter
from jackline.units import format_bytes, format_duration

FIRST_AFTER_S = 2.0
# A second less than promised (10 s, later 60 s): those who speak look only now and then.
EVERY_S = 9.0
LATER_EVERY_S = 58.0
LATER_AFTER_S = 600.0


def heartbeat_is_due(silent_s: float, last_spoken_silent_s: float | None, *, first_after_s: float) -> bool:
    """`last_spoken_silent_s` is how long the silence had lasted when we last spoke in it, None when we have not."""
    if last_spoken_silent_s is None:
        return silent_s >= first_after_s
    every_s = LATER_EVERY_S if silent_s > LATER_AFTER_S else EVERY_S
    return silent_s - last_spoken_silent_s >= every_s


def heartbeat_line(state: dict[str, Any], *, width: int | None = None) -> str:
    """From supervisor.json: elapsed, what, where, and the figures; cut to `width` if given."""
    now = state.get("now") or {}
    elapsed_s = float(state.get("at_s") or 0) - float(state.get("started_at_s") or 0)
    parts = [format_duration(max(0.0, elapsed_s)), *_progress_words(state), str(now.get("what") or "running")]
    if now.get("file"):
        source = f" `{now['source']}`" if now.get("source") else ""
        parts.append(f"{now['file'].rsplit('/', 1)[-1]}:{now.get('line')}{source}")
    parts += _figures(state)
    verdict = state.get("verdict") or {}
    if verdict.get("kind") in ("SUSPECT", "STUCK"):
        parts.insert(1, f"{verdict['kind']} for {format_duration(float(verdict.get('for_s') or 0))}")
    line = "  ".join(parts)
    return line if width is None or len(line) <= width else line[: max(0, width - 1)] + "…"


def _progress_words(state: dict[str, Any]) -> list[str]:
    progress = state.get("progress")
    if not progress or not progress.get("total"):
        return []
    share = 100.0 * float(progress["done"]) / float(progress["total"])
    eta_s = progress.get("eta_s")
    left = f", {format_duration(eta_s)} left" if isinstance(eta_s, int | float) and share < 100.0 else ""
    name = progress.get("phase") or "done"
    return [f"{name} {share:.0f} %{left}"]


def _figures(state: dict[str, Any]) -> list[str]:
    words = [f"cpu {float(state.get('cpu_cores') or 0):.1f}"]
    memory = state.get("memory")
    if memory:
        # Workers share most of their pages with the process they were forked from: a sum of RSS would frighten.
        own = memory.get("own_bytes") or memory["tree_rss_bytes"]
        words.append(f"ram {format_bytes(own)} of {format_bytes(memory['limit_bytes'])}")
    for gpu in state.get("gpu") or []:
        busy = gpu.get("utilisation_percent")
        percent = f" {busy} %" if busy is not None else ""
        words.append(f"gpu{gpu['index']} {format_bytes(gpu['used_bytes'])}{percent}")
    for name, key in (("disk", "disk_bytes_per_s"), ("net", "net_bytes_per_s")):
        rate = float(state.get(key) or 0)
        if rate >= 1024:
            words.append(f"{name} {format_bytes(rate)}/s")
    return words


class HeartbeatNotes:
    """Signs of life in out.log, for those who read only that file."""

    def __init__(self, log: LogWriter, *, quiet_after_s: float) -> None:
        self._log = log
        self._first_after_s = quiet_after_s
        self._spoken_silent_s: float | None = None

    def poll(self, state: dict[str, Any], now_s: float) -> None:
        silent_s = float(state.get("silent_s") or 0)
        if self._spoken_silent_s is not None and silent_s < self._spoken_silent_s:
            self._spoken_silent_s = None
        if heartbeat_is_due(silent_s, self._spoken_silent_s, first_after_s=self._first_after_s):
            self._spoken_silent_s = silent_s
            self._log.note(heartbeat_line(state), float(state["at_s"]))
