"""What `jackline dash` says about a run, in the words of `status`, `why` and `checkpoints`. Reads; draws nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from jackline.checkpoint.place import choose_place
from jackline.cli.commands.runs import state_word
from jackline.cli.commands.status import with_next_start
from jackline.cli.text.checkpoints import read_rows
from jackline.cli.text.headline import headline, state_tone
from jackline.cli.text.memory import gpu_line, others_beside
from jackline.cli.text.origin import origin_lines
from jackline.cli.text.safety import safe_lines, safe_text
from jackline.cli.text.status import (
    best_line,
    epoch_line,
    gpu_lines,
    hint_for,
    loss_line,
    memory_line,
    now_line,
    numbers_line,
    progress_line,
    progress_words,
    rank_rows,
    rates_line,
    saved_line,
    time_left_words,
    verdict_line,
)
from jackline.cli.view.run_view import RunView, read_view
from jackline.dashboard.told import Card, Told
from jackline.review.limits import judge_fit, limit_lines
from jackline.rundir.layout import RunDir
from jackline.rundir.process_id import is_alive
from jackline.rundir.status import read_status
from jackline.units import format_bytes, format_duration

FULL, NEARLY_FULL = 0.95, 0.85
MUCH_WORK_S = 600.0
MAX_CHECKPOINTS = 200
_SENTENCES = {
    "finished": "Finished",
    "stopped": "Stopped; it can be resumed",
    "elsewhere": "Last seen on another machine",
    "empty": "Created, but never started",
}


class RunTeller:
    """Answers the page's questions from the run's folder and, for stacks, from the kernel."""

    def tell(self, run: RunDir, *, now_s: float, short: bool) -> Told:
        view = read_view(run, now_s=now_s, is_short=short)
        return tell(view if short else with_next_start(run, view), short=short)

    def stacks(self, run: RunDir) -> tuple[str, ...]:
        from jackline.supervisor.hang.incident import stack_lines

        child = read_status(run).child
        if child is None or not is_alive(child):
            return ()
        from jackline.cli.text.why_live import look_at
        from jackline.errors import UsageError

        last = run.last_attempt()
        try:
            look = look_at(child.pid, stacks_folder=last.stacks if last else None, look_s=0.0)
        except UsageError as error:
            return (error.message,)
        return tuple(line for stack in look.stacks for line in stack_lines(stack))

    def checkpoints(self, run: RunDir) -> tuple[Mapping[str, Any], ...]:
        rows = read_rows(choose_place(run).folder)[:MAX_CHECKPOINTS]
        return tuple(
            {
                "name": safe_text(row.name, 80),
                "step": row.step,
                "saved_at_s": row.saved_at_s,
                "size": "" if row.size_bytes is None else format_bytes(row.size_bytes),
                "problem": safe_text(row.problem, 200) if row.problem else "",
                "verified_at_s": row.read_back_at_s,
                "mirror": safe_text(row.mirror, 40),
                "marks": [word for word, is_so in (("latest", row.is_latest), ("best", row.is_best)) if is_so],
                "resume": f"jackline resume {safe_text(run.name, 90)} --step {row.step}",
            }
            for row in rows
        )


def tell(view: RunView, *, short: bool) -> Told:
    progress = view.progress
    share = progress.done / progress.total if progress.done is not None and progress.total else None
    told = Told(
        name=safe_text(view.name, 120),
        path=safe_text(view.path, 400),
        state=view.status.state,
        word=state_word(view),
        tone=state_tone(view) or ("good" if view.status.state == "finished" else ""),
        is_live=view.is_live,
        sentence=sentence(view),
        progress=progress_words(progress),
        share=None if share is None else min(1.0, max(0.0, share)),
        left=time_left_words(view) if view.is_live else "",
        attempt=view.status.attempt,
        created_at_s=view.contents.created_at_s if view.contents else None,
        seen_at_s=view.status.last_seen_at_s,
    )
    if short:
        return told
    more = {
        "details": tuple(_details(view)),
        "cards": (risk_card(view), memory_card(view), time_card(view), speed_card(view)),
        "facts": tuple((label, text) for label, text in _facts(view) if text),
        "hint": hint_for(view),
        "command": safe_text(view.contents.command, 600) if view.contents else "",
        "resume": _resume_command(view),
    }
    return Told(**{**told.__dict__, **more})


def sentence(view: RunView) -> str:
    """The verdict in one sentence: what a person wants to know first."""
    state = view.status.state
    if state == "dead":
        return f"Failed: {_why_it_ended(view)}"
    if state == "unwatched":
        return "Alive, started without a supervisor" if view.status.is_bare else "Alive, but its supervisor is gone"
    if view.status.is_heard_afar:
        return f"{_live_sentence(view)}, on another machine"
    return _SENTENCES.get(state) or _live_sentence(view)


def _live_sentence(view: RunView) -> str:
    verdict = view.state.verdict
    if view.state.is_restarting:
        return "Restarting: the next attempt is about to begin"
    if view.status.is_stale and view.status.last_seen_at_s is not None:
        return f"Alive, but no heartbeat for {format_duration(max(0.0, view.now_s - view.status.last_seen_at_s))}"
    if view.pause is not None:
        return "Paused: " + safe_text(view.pause.text, 160)
    words = {"SUSPECT": "Perhaps stuck", "STUCK": "Stuck", "WAITING": "Waiting"}
    if verdict.kind in words:
        length = f" for {format_duration(verdict.for_s)}" if verdict.for_s is not None else ""
        return f"{words[verdict.kind]}{length}: {safe_text(verdict.text or '', 200)}".rstrip(": ")
    phase = (view.progress.phase or "").strip().lower()
    if phase in ("train", "training", "epoch", "step") or (not phase and view.progress.done is not None):
        return "Alive and training"
    doing = safe_text(view.progress.phase or view.state.now.what or "", 80)
    return f"Alive: {doing}" if doing else "Alive"


def _why_it_ended(view: RunView) -> str:
    if not view.status.exit.is_there:
        return "it is gone, and nobody saw how it ended"
    first = (view.status.exit.text or "").partition("\n")[0].removeprefix("error: ")
    return safe_text(first or (view.status.exit.cause or "no reason was recorded").replace("_", " "), 300)


def _details(view: RunView) -> Iterator[str]:
    if view.is_live:
        yield from filter(None, (progress_line(view), now_line(view)))
        return
    yield headline(view)
    if view.status.state == "dead" and view.status.exit.text:
        yield from (line.strip() for line in safe_lines(view.status.exit.text, 12)[1:] if line.strip())
    elif words := progress_words(view.progress):
        yield f"reached: {words}"


def risk_card(view: RunView) -> Card:
    """What is lost if it dies now; for one that ended, what the next start begins with."""
    if not view.is_live:
        lines = view.next_start.lines if view.next_start else ("It has ended: nothing is at risk.",)
        return Card("Next start" if view.next_start else "If it dies now", tuple(safe_text(x, 300) for x in lines))
    bounds = view.session.loss_bounds
    lost_s = bounds.process_s
    if lost_s is None and view.state.checkpoint.at_s is not None:
        lost_s = max(0.0, view.now_s - view.state.checkpoint.at_s)
    tone = "bad" if lost_s is None else "warn" if lost_s > MUCH_WORK_S else "good"
    saved = saved_line(view)
    what, _, why = loss_line(view).partition(": ")
    if ", since checkpoint " in what:  # of a script's own checkpoint: its path is not the first thing to read
        what, _, why = what.partition(", ")
    lines = (f"lost: {what}", why, f"last checkpoint: {saved}" if saved else "")
    return Card("If it dies now", tuple(filter(None, lines)), tone)


def memory_card(view: RunView) -> Card:
    memory, gpus = view.state.memory, view.state.gpu
    if not view.is_live:
        peak = f"at most {format_bytes(memory.peak_bytes)} of host RAM" if memory.peak_bytes else "not measured"
        return Card("Memory", tuple(filter(None, (peak, gpu_line(view.session)))))
    shares = [memory.used_bytes / memory.limit_bytes] if memory.used_bytes and memory.limit_bytes else []
    shares += [gpu.used_bytes / gpu.total_bytes for gpu in gpus if gpu.used_bytes and gpu.total_bytes]
    lines = [f"GPU {index}: {line}" for index, line in gpu_lines(view)]
    lines += [f"GPU: {line}" for line in (gpu_line(view.session),) if line]
    lines += [f"also there: {line}" for line in others_beside(view.state)]
    host = memory_line(view).split("; ")
    if memory.used_bytes is not None and memory.limit_bytes:
        used = f"{format_bytes(memory.used_bytes)} of {format_bytes(memory.limit_bytes)}"
        host = [
            f"host {used} in use",
            *(part for part in host if not part.startswith(format_bytes(memory.used_bytes))),
        ]
    lines += filter(None, host)
    share = max(shares, default=None)
    tone = "" if share is None else "bad" if share >= FULL else "warn" if share >= NEARLY_FULL else "good"
    if memory.seconds_to_limit is not None:
        tone = "bad"
    return Card("Memory", tuple(lines) or ("not measured",), tone, share)


def time_card(view: RunView) -> Card:
    """Whether it will be done before its time limit."""
    left = time_left_words(view) if view.is_live else ""
    lines = [left] if left else []
    if not view.is_live:
        length = f"ran for {format_duration(view.running_s)}" if view.running_s is not None else ""
        return Card("Time", (length or "it has ended",))
    limit = view.state.time_limit
    fit = judge_fit(limit, view.progress, view.now_s)
    if fit is None:
        return Card("Time limit", (*lines, "no time limit is set (--time-limit)"))
    lines += limit_lines(limit, view.progress, view.now_s, is_saving=view.session.is_there)
    began_s = view.started_at_s
    whole_s = fit.left_s + max(0.0, view.now_s - began_s) if began_s is not None else 0.0
    share = 1.0 - fit.left_s / whole_s if whole_s else None
    tone = "" if fit.fits is None else "good" if fit.fits else "warn"
    return Card("Time limit", tuple(safe_text(line, 300) for line in lines), tone, share)


def speed_card(view: RunView) -> Card:
    progress, is_stuck = view.progress, view.is_live and view.state.verdict.kind == "STUCK"
    lines = ["no step is being made"] if is_stuck else []
    if progress.rate_per_s and not is_stuck:
        unit = safe_text(progress.unit or "", 20)
        each = f", {format_duration(1 / progress.rate_per_s)} each" if progress.rate_per_s < 10 else ""
        lines.append(f"{progress.rate_per_s:.3g} {unit}/s".replace(" /s", "/s") + each)
    spent, running_s = view.session.spent_s, view.running_s
    if spent.get("fetch") is not None and running_s:
        lines.append(f"waiting for data {100 * spent['fetch'] / running_s:.0f} %")
    if spent.get("save") is not None and running_s:
        lines.append(f"saving {100 * spent['save'] / running_s:.1f} %")
    if view.is_live and (rates := rates_line(view)):
        lines.append(rates)
    return Card("Speed", tuple(lines) or ("not known yet" if view.is_live else "it has ended",))


def _facts(view: RunView) -> Iterator[tuple[str, str]]:
    yield "state", headline(view)
    yield "epoch", epoch_line(view)
    yield "best", best_line(view)
    yield "numbers", numbers_line(view)
    if view.is_live:
        yield "verdict", verdict_line(view)
        for line in rank_rows(view):
            yield "ranks", line
    for entry in view.state.protections_off:
        yield "off", safe_text(entry, 200)
    yield "log", f"{safe_text(view.log.path, 400)}; {view.log_verdict.text}"
    if view.contents:
        yield from origin_lines(view.contents)
        yield "host", safe_text(view.contents.host, 80)
        yield "folder", safe_text(view.contents.cwd, 400)
    if view.problem:
        yield "problem", safe_text(view.problem, 300)


def _resume_command(view: RunView) -> str:
    if view.status.state in ("stopped", "dead"):
        return f"jackline resume {safe_text(view.name, 90)}"
    return f"jackline stop {safe_text(view.name, 90)}" if view.is_live and not view.status.is_heard_afar else ""
