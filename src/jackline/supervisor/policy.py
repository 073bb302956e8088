"""The restart policy: after an attempt ended, restart (and when) or stop (and why).

Owns only the decision: no clock, no files, no processes. The loop passes it the attempts that this supervisor has
run, and does what it returns. `diagnosis` has already decided why an attempt ended.
"""

from __future__ import annotations

from collections.abc import Sequence

from jackline.diagnosis.deaths.evidence import Cause
from jackline.immutable import immutable
from jackline.rundir.intent import Intent

FIRST_DELAY_S = 5.0
MAX_DELAY_S = 300.0
MAX_DEATHS_WITHOUT_PROGRESS = 3
QUICK_DEATH_S = 60.0
# A session may ask for restarts that look alike from outside (micro-batch 16, 8, 4, 2, 1), but not endlessly.
MAX_ASKED_DEATHS_WITHOUT_PROGRESS = 10

_ENDED_BY_A_PERSON: frozenset[Cause] = frozenset({"killed_by_someone", "time_limit"})
# We ended it, and it has a checkpoint; the next attempt starts with fewer workers.
_GUARDED_AGAIN = "resuming from the last checkpoint, with fewer workers where they are Jackline's to choose"
_RETRIED_ONCE: frozenset[Cause] = frozenset({"segfault", "abort", "bus_error"})
_WORDS: dict[Cause, str] = {
    "finished": "it is finished",
    "stopped": "it was stopped",
    "killed_by_someone": "it was stopped on purpose",
    "time_limit": "the time limit was reached",
    "preempted": "it was preempted or stopped on purpose",
    "kernel_oom": "the same command would run out of memory again",
    "host_memory_error": "the same command would run out of memory again",
    "cuda_oom": "the same command would run out of GPU memory again",
    "disk_full": "the disk is still full",
}


@immutable
class AttemptSummary:
    """One attempt that has ended. `made_progress`: it wrote a newer checkpoint than the one it resumed from."""

    number: int
    duration_s: float
    cause: Cause
    is_retryable: bool
    made_progress: bool = False
    traceback_hash: str = ""


@immutable
class Restart:
    delay_s: float
    why: str


@immutable
class Stop:
    why: str
    is_crash_loop: bool = False


def decide(
    attempts: Sequence[AttemptSummary],
    *,
    max_restarts: int,
    is_stop_requested: bool,
    intent: Intent | None,
) -> Restart | Stop:
    """What to do after the last of `attempts`. `intent` is what the session wrote into intent.json, if anything."""
    last = attempts[-1]
    if is_stop_requested:
        return Stop("a stop was requested")
    if last.cause in _ENDED_BY_A_PERSON:
        return Stop(_WORDS[last.cause])
    if intent is not None:
        return _as_asked(intent.restart, intent.why + (_settings(intent) if intent.restart else ""), attempts)
    if last.cause == "memory_guard":
        return _after_guard(attempts)
    if not last.is_retryable:
        return Stop(_WORDS.get(last.cause, "the same command would most likely fail the same way"))
    if max_restarts <= 0:
        return Stop("restarts are off; --restart N turns them on")
    loop = _crash_loop(attempts)
    if loop is not None:
        return loop
    used = len(attempts) - 1
    if used >= max_restarts:
        return Stop(f"all {max_restarts} restarts are used" if max_restarts > 1 else "the one restart is used")
    return Restart(_delay_s(attempts), f"restart {used + 1} of {max_restarts}")


def _as_asked(wants_restart: bool, why: str, attempts: Sequence[AttemptSummary]) -> Restart | Stop:
    if not wants_restart:
        return Stop(why or "the script asked not to be started again")
    if attempts[-1].cause == "finished":
        return Stop(_WORDS["finished"])
    num_deaths = _deaths_without_progress(attempts)
    if num_deaths >= MAX_ASKED_DEATHS_WITHOUT_PROGRESS:
        return Stop(f"the script asked for {num_deaths} restarts without a new checkpoint", is_crash_loop=True)
    return Restart(0.0, why or "the script asked to be started again")


def _after_guard(attempts: Sequence[AttemptSummary]) -> Restart | Stop:
    """We ended it, so we also restart it, whatever --restart says; but not endlessly."""
    num_deaths = _deaths_without_progress(attempts)
    if num_deaths >= MAX_DEATHS_WITHOUT_PROGRESS:
        return Stop(f"it filled the host's memory {num_deaths} times without a new checkpoint", is_crash_loop=True)
    return Restart(0.0, _GUARDED_AGAIN)


def _crash_loop(attempts: Sequence[AttemptSummary]) -> Stop | None:
    last = attempts[-1]
    fruitless = attempts[len(attempts) - _deaths_without_progress(attempts) :]
    if len(fruitless) >= 2 and _is_same_quick_death(fruitless[-2], last):
        return Stop("the same error ended two attempts within a minute of their start", is_crash_loop=True)
    if last.cause in _RETRIED_ONCE and any(attempt.cause == last.cause for attempt in fruitless[:-1]):
        return Stop(f"it ended by {last.cause.replace('_', ' ')} again; that is retried once", is_crash_loop=True)
    if len(fruitless) >= MAX_DEATHS_WITHOUT_PROGRESS:
        return Stop(f"{len(fruitless)} deaths in a row without a new checkpoint", is_crash_loop=True)
    return None


def _is_same_quick_death(before: AttemptSummary, last: AttemptSummary) -> bool:
    is_quick = max(before.duration_s, last.duration_s) <= QUICK_DEATH_S
    return is_quick and bool(last.traceback_hash) and before.traceback_hash == last.traceback_hash


def _deaths_without_progress(attempts: Sequence[AttemptSummary]) -> int:
    """How many of the last attempts, counted from the end, wrote no new checkpoint."""
    count = 0
    for attempt in reversed(attempts):
        if attempt.made_progress:
            break
        count += 1
    return count


def _delay_s(attempts: Sequence[AttemptSummary]) -> float:
    earlier = max(0, _deaths_without_progress(attempts) - 1)
    return min(MAX_DELAY_S, FIRST_DELAY_S * 2.0 ** min(earlier, 16))


def _settings(intent: Intent) -> str:
    """'; next with num_workers=2, prefetch=1', '' when the session asked for nothing else."""
    words = [f"{word}={value}" for word, value in intent.settings.items() if word != "limit_bytes"]
    return f"; next with {', '.join(words)}" if words else ""
