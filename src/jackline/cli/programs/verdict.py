"""One run in a few hundred bytes of JSON, for programs: schema `jackline.wait/1` of docs/reference/json.md.

Owns the fields, their bounds and the exit codes of `jackline wait`. Reading files is `look`; the rest is pure.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping
from typing import Any

from jackline.cli.programs.conditions import OVER, Condition, Facts
from jackline.cli.text.safety import safe_text
from jackline.immutable import immutable
from jackline.rundir import atomic
from jackline.rundir.layout import RunDir
from jackline.rundir.records.session import SessionRecord
from jackline.rundir.status import RunStatus, read_status

SCHEMA = "jackline.wait/1"
EXIT_DIED = 1
EXIT_STUCK = 3
EXIT_ENDED_EARLIER = 4
EXIT_UNKNOWN = 5
EXIT_TIMEOUT = 124
MAX_TEXT = 300
MAX_METRICS = 8
MAX_NAME = 60


@immutable
class Look:
    """A run as its small files describe it now."""

    run: RunDir
    status: RunStatus
    session: SessionRecord

    @property
    def is_over(self) -> bool:
        return self.status.state in OVER

    @property
    def is_reporting(self) -> bool:
        """Whether a supervisor reports what it does, here or on another machine."""
        return self.status.state == "alive" or self.status.is_heard_afar

    def facts(self, metrics: Mapping[str, list[float]]) -> Facts:
        state = self.status.supervisor_state
        is_watched = self.is_reporting and not self.status.is_stale
        return Facts(
            state=self.status.state,
            attempt=self.status.attempt,
            verdict=state.verdict.kind if is_watched else None,
            step=self.step,
            epoch=self.session.place.epoch or self.session.epoch,
            metrics=metrics,
        )

    @property
    def step(self) -> float | None:
        """As the session inside counts; without one, as the output says."""
        return self.session.step if self.session.step is not None else self.status.supervisor_state.progress.done


def look(run: RunDir) -> Look:
    return Look(run, read_status(run), _session(run))


def _session(run: RunDir) -> SessionRecord:
    for path in run.session_files():
        found = SessionRecord.from_json(atomic.read_json(path))
        if found.is_there:
            return found
    return SessionRecord()


def exit_code(found: Look, met: Condition | None, *, is_timeout: bool) -> int:
    """By what happened to the run, not by what was asked: a crash is 1 whatever was waited for."""
    state = found.status.state
    if state == "dead":
        return EXIT_DIED
    if state == "stopped":
        return 75
    if met is not None and met.text in ("stuck", "suspect", "paused"):
        return EXIT_STUCK
    if met is not None:
        return 0
    if state == "finished":
        return EXIT_ENDED_EARLIER
    return EXIT_TIMEOUT if is_timeout else EXIT_UNKNOWN


def verdict_json(
    found: Look, latest: Mapping[str, float], met: Condition | None, *, is_timeout: bool, waited_s: float
) -> dict[str, Any]:
    """At most about 1.5 KB, whatever the run logs or prints."""
    status, session, state = found.status, found.session, found.status.supervisor_state
    progress = session.progress if session.done is not None else state.progress
    return {
        "schema": SCHEMA,
        "run": safe_text(found.run.name, MAX_NAME),
        "path": str(found.run.path),
        "met": safe_text(met.text, MAX_NAME) if met is not None else None,
        "is_timeout": is_timeout and met is None,
        "state": status.state,
        "attempt": status.attempt,
        "exit_code": status.exit_code if found.is_over else None,
        "cause": safe_text(status.exit.cause, MAX_NAME) if found.is_over and status.exit.cause else None,
        "text": _text(found),
        "hint": _hint(found),
        "verdict": safe_text(state.verdict.kind, MAX_NAME) if found.is_reporting and state.verdict.kind else None,
        "step": _whole(found.step),
        "total": _whole(progress.total),
        "epoch": session.place.epoch or session.epoch,
        "rate_per_s": _short(progress.rate_per_s),
        "eta_s": _short(progress.eta_s) if not found.is_over else None,
        "metrics": {safe_text(name, MAX_NAME): _short(latest[name]) for name in sorted(latest)[:MAX_METRICS]},
        "checkpoint_step": session.last_checkpoint.step,
        "at_risk_s": _short(session.loss_bounds.process_s) if not found.is_over else None,
        "waited_s": round(waited_s, 1),
        "next": _next(found),
    }


def _text(found: Look) -> str:
    """One sentence: why it ended, or what it is doing."""
    status, state = found.status, found.status.supervisor_state
    if status.exit.is_there and found.is_over:
        return safe_text((status.exit.text or "").strip().split("\n")[0].removeprefix("error: "), MAX_TEXT)
    if found.is_over:
        return "nobody saw how it ended"
    if status.state == "empty":
        return "created, but never started"
    if status.state == "elsewhere" and not found.is_reporting:
        return "last seen on another machine"
    if status.state == "unwatched":
        return "alive without a supervisor: `jackline watch` starts a new one; hangs are not noticed until then"
    if state.is_restarting:
        return "between two attempts: its supervisor starts it again"
    if state.verdict.is_alarm or state.verdict.is_pause:
        return safe_text(f"{state.verdict.kind}: {state.verdict.text}", MAX_TEXT)
    doing = found.session.doing or state.now.what or found.session.phase or ""
    place = f" at {state.now.file.rsplit('/', 1)[-1]}:{state.now.line}" if state.now.file and state.now.line else ""
    return safe_text(f"{doing}{place}" if doing else "starting", MAX_TEXT)


def _hint(found: Look) -> str | None:
    """The next action that the explanation of its end names."""
    findings = found.status.exit.findings if found.is_over else ()
    hint = findings[0].get("hint") if findings else None
    return safe_text(hint, MAX_TEXT) if isinstance(hint, str) and hint else None


def _next(found: Look) -> str:
    name = shlex.quote(found.run.name)
    state, verdict = found.status.state, found.status.supervisor_state.verdict
    if state == "dead" or (verdict.is_alarm and found.is_reporting):
        return f"jackline why {name}"
    if state == "stopped":
        return f"jackline resume {name} --detach --json"
    if state == "finished":
        return f"jackline status {name}"
    if state == "unwatched":
        return f"jackline watch {name}"
    return f"jackline wait {name} --until ended,stuck --timeout 1h"


def _whole(value: float | None) -> float | int | None:
    return int(value) if value is not None and math.isfinite(value) and value == int(value) else _short(value)


def _short(value: float | None) -> float | None:
    """Six digits are enough to decide by. Numbers that JSON cannot represent become null."""
    return float(f"{value:.6g}") if value is not None and math.isfinite(value) else None
