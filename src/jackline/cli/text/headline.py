"""The first line of `jackline status`: alive or not, paused, gone, and since when. Pure."""

from __future__ import annotations

from jackline.cli.text.clock import clock
from jackline.cli.text.paint import Tone
from jackline.cli.text.safety import safe_text
from jackline.cli.view.run_view import RunView
from jackline.units import format_duration


def headline(view: RunView) -> str:
    """The state in one clause, with its uncertainty."""
    state = view.status.state
    attempt = f"attempt {view.status.attempt}"
    if state == "alive":
        return _alive(view, attempt) + _paused(view)
    if state == "unwatched" and view.status.is_bare:
        return f"alive in {attempt}, started without a supervisor{_paused(view)}"
    if state == "unwatched":
        return f"alive in {attempt}, but unwatched: {_supervisor_gone(view)}{_paused(view)}"
    if view.status.is_heard_afar:
        age_s = max(0.0, view.now_s - (view.status.last_seen_at_s or view.now_s))
        return f"alive on host '{_host(view)}' {format_duration(age_s)} ago, {attempt}{_paused(view)}"
    if state == "elsewhere":
        return f"unknown from here: it was last seen {_seen(view)} on host '{_host(view)}', in {attempt}"
    if state == "empty":
        return "created, but never started"
    if not view.status.exit.is_there:
        return f"gone in {attempt}: {_gone(view)}; nobody saw how it ended"
    word = {"finished": "finished", "stopped": "stopped"}.get(state)
    word = word or view.status.exit.word.removeprefix("was ")
    word += "," if word[-1].isdigit() else ""  # 'exited with code 3, 5 s ago'
    return f"{word}{_ago(view.status.exit.ended_at_s, view.now_s)} in {attempt}{_after(view)}"


def state_tone(view: RunView) -> Tone:
    """Green moves, yellow wants a look, red is stuck or dead."""
    if view.status.state == "dead" or view.problem or (view.is_live and view.state.verdict.kind == "STUCK"):
        return "bad"
    if view.status.state == "alive":
        is_calm = not view.state.verdict.is_alarm and view.pause is None and not view.status.is_stale
        return "good" if is_calm and not view.state.is_restarting else "warn"
    if view.status.is_heard_afar:
        return "warn" if view.state.verdict.is_alarm else "good"
    return "warn" if view.status.state in ("unwatched", "elsewhere") else ""


def _alive(view: RunView, attempt: str) -> str:
    restart_at_s = view.state.restart_at_s
    if view.state.is_restarting:
        wait = f" in {format_duration(max(0.0, restart_at_s - view.now_s))}" if restart_at_s is not None else ""
        text = f"alive, between attempts: attempt {view.status.attempt + 1} starts{wait}"
    else:
        going = f", for {format_duration(view.running_s)}" if view.running_s is not None else ""
        text = f"alive, {attempt}{going}"
    if view.status.is_stale:
        text += f"; stale: no heartbeat since {_seen(view)}, though its supervisor lives"
    return text


def _paused(view: RunView) -> str:
    """', paused (SIGSTOP) since 14:02:11 UTC (3 min ago)'; '' for a run that is not paused."""
    if view.pause is None:
        return ""
    at_s = view.pause.since_s
    since = f" since {clock(at_s, view.now_s)} ({format_duration(max(0.0, view.now_s - at_s))} ago)" if at_s else ""
    return f"; {safe_text(view.pause.text.partition(':')[0], 60)}{since}"


def paused_pid(view: RunView) -> int | None:
    """The process to continue; None when it is not paused, or when a debugger holds it."""
    if view.pause is None or "SIGSTOP" not in view.pause.text:
        return None
    child = view.status.child
    return view.state.verdict.pid if view.state.verdict.is_pause else (child.pid if child else None)


def _supervisor_gone(view: RunView) -> str:
    who = f"its supervisor (pid {view.status.supervisor.pid})" if view.status.supervisor else "its supervisor"
    return f"{who} is gone, no heartbeat since {_seen(view)}"


def _gone(view: RunView) -> str:
    child = view.status.child
    who = f"pid {child.pid} is gone" if child else "no process of it is left"
    return f"no heartbeat since {_seen(view)}, {who}"


def _host(view: RunView) -> str:
    known = view.status.child or view.status.supervisor
    return safe_text(known.host if known else (view.contents.host if view.contents else "unknown"), 80)


def _seen(view: RunView) -> str:
    at_s = view.session.at_s if view.status.last_seen_at_s is None else view.status.last_seen_at_s
    if at_s is None:
        return "a time that cannot be read"
    return f"{clock(at_s, view.now_s)} ({format_duration(max(0.0, view.now_s - at_s))} ago)"


def _ago(at_s: float | None, now_s: float) -> str:
    return f" {format_duration(max(0.0, now_s - at_s))} ago" if at_s is not None else ""


def _after(view: RunView) -> str:
    return f", after {format_duration(view.running_s)}" if view.running_s is not None else ""
