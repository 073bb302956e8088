"""The text of `jackline status`: alive or not, progress, time left, activity, what a kill would lose. Pure."""

from __future__ import annotations

from typing import Any

from jackline.cli.text.clock import clock
from jackline.cli.text.headline import headline, paused_pid
from jackline.cli.text.memory import gpu_line, oom_lines, others_beside
from jackline.cli.text.mirror import mirror_lines
from jackline.cli.text.origin import origin_lines
from jackline.cli.text.safety import safe_lines, safe_text
from jackline.cli.view.run_view import RunView
from jackline.diagnosis.logs.curves import stale_curves
from jackline.rundir.records.supervisor import ProgressRecord
from jackline.units import format_bytes, format_duration, format_limit

_NUMBERS = 4
_MAX_INCIDENTS = 3
_STALE_S = 30.0  # values that are older are shown with their age


def status_text(view: RunView) -> str:
    """Everything, most important first, one line each."""
    lines = [f"{safe_text(view.name)}: {headline(view)}"]
    if view.problem:
        lines.append(f"  damaged:    {safe_text(view.problem)}")
    if not is_over(view):
        lines += _live_lines(view)
    lines += _ending_lines(view)
    if is_over(view):
        lines += _reached_lines(view)
    lines += _resume_lines(view)
    lines += _common_lines(view)
    lines += [f"hint: {hint}" for hint in [hint_for(view)] if hint]
    return "\n".join(lines)


def is_over(view: RunView) -> bool:
    """Whether its end was recorded, so that what it did last no longer matters."""
    return view.status.state in ("finished", "stopped", "dead") and view.status.exit.is_there


def is_old_news(view: RunView) -> bool:
    """Whether supervisor.json may be out of date."""
    return view.status.state != "alive" or view.status.is_stale


def _live_lines(view: RunView) -> list[str]:
    found = [
        ("progress", progress_line(view)),
        ("time limit", limit_line(view)),
        ("epoch", epoch_line(view)),
        ("best", best_line(view)),
        ("saved", saved_line(view)),
        ("numbers", numbers_line(view)),
        ("now", now_line(view)),
        *[("ranks", line) for line in rank_rows(view)],
        ("verdict", verdict_line(view)),
        ("memory", memory_line(view)),
        *[(f"gpu {index}", line) for index, line in gpu_lines(view)],
        ("gpu", gpu_line(view.session)),
        *[("also there", line) for line in others_beside(view.state)],
        *[("ran out", line.strip()) for line in oom_lines(view.session)],
        ("cpu", rates_line(view)),
        ("goodput", view.goodput),
    ]
    lines = [row(label, text) for label, text in found if text]
    if lines and is_old_news(view) and view.status.last_seen_at_s is not None:
        age = format_duration(max(0.0, view.now_s - view.status.last_seen_at_s))
        lines.insert(0, row("last seen", f"{age} ago; what follows was true then"))
    if view.is_live:
        lines.append(row("at risk", loss_line(view)))
    return lines


def rank_rows(view: RunView) -> list[str]:
    """What the ranks do, of all machines of the job; nothing for one process."""
    if not view.state.ranks:
        return []
    from jackline.cli.text.ranks import job_lines  # only a distributed job pays for it

    return job_lines(view.path, view.state.ranks, view.now_s)


def _reached_lines(view: RunView) -> list[str]:
    """For an ended run: how far it got, and which checkpoints are kept."""
    found = [
        ("progress", reached_line(view)),
        ("epoch", epoch_line(view)),
        ("numbers", last_numbers_line(view)),
        ("best", best_line(view)),
        ("saved", saved_line(view)),
        ("goodput", view.goodput),
    ]
    return [row(label, text) for label, text in found if text]


def _resume_lines(view: RunView) -> list[str]:
    """What the next attempt would resume from."""
    if view.next_start is None:
        return []
    first, *more = (safe_text(line, 400) for line in view.next_start.lines)
    return [row("next start", first), *(f"{'':14}{line}" for line in more)]


def reached_line(view: RunView) -> str:
    """How far it got, without a rate, which an ended run does not have: 'train, 1,230 of 10,000 steps (12 %)'."""
    done, total, unit = view.progress.done, view.progress.total, safe_text(view.progress.unit_word, 20)
    if not total or done is None or done >= total or view.status.state != "finished":
        return progress_words(view.progress)
    return f"done; {_count(done)} of {_count(total)} {unit}".rstrip() + " printed last"  # no share of it is missing


def numbers_line(view: RunView) -> str:
    """A few of the metrics that the loop logged or printed last, the loss first, and their age where it matters."""
    printed_s = max((entry.at_s or 0.0 for entry in view.state.printed), default=0.0)
    text = last_numbers_line(view)
    return text + age_words(printed_s, view.now_s) if text and not view.session.metrics else text


def last_numbers_line(view: RunView) -> str:
    known = [(safe_text(name, 30), f"{value:.4g}") for name, value in view.session.metrics.items()]
    if not known:
        printed = view.state.printed
        known = [
            (safe_text(entry.name, 30), safe_text(entry.text, 8) if entry.value is None else f"{entry.value:.4g}")
            for entry in printed
            if entry.value is not None or entry.text
        ]
    known.sort(key=lambda pair: (pair[0] != "loss", "loss" not in pair[0]))
    shown = [f"{name} {value}" for name, value in known]
    return ", ".join(shown[:_NUMBERS]) + (", ..." if len(shown) > _NUMBERS else "")


def age_words(at_s: float | None, now_s: float) -> str:
    """' (3 min ago)' for a value that may no longer be true; '' for a fresh one."""
    old_s = now_s - at_s if at_s else 0.0
    return f" ({format_duration(old_s)} ago)" if old_s >= _STALE_S else ""


def progress_words(progress: ProgressRecord) -> str:
    """Phase, count and total; '' when nothing was counted."""
    done, total = progress.done, progress.total
    if done is None:
        return ""
    phase = f"{safe_text(progress.phase, 60)}, " if progress.phase else ""
    unit = f" {safe_text(progress.unit_word, 20)}" if progress.unit else ""
    guessed = " (guessed from its output)" if progress.is_guessed else ""
    if progress.epoch is not None and progress.unit != "epochs" and not progress.phase:
        epochs = f" of {_count(progress.epochs)}" if progress.epochs else ""
        guessed = f", epoch {_count(progress.epoch)}{epochs}{guessed}"
    if total:
        return f"{phase}{_count(done)} of {_count(total)}{unit} ({100 * done / total:.0f} %){guessed}"
    if progress.source == "line" and (one := progress.one_of):
        return f"{phase}{one} {_count(done)}{guessed}"  # what it printed: 'epoch 9' may be its tenth
    return f"{phase}{_count(done)}{unit}{guessed}"


def progress_line(view: RunView) -> str:
    progress = view.progress
    if not (words := progress_words(progress)):
        return ""
    parts = [words]
    unit = f" {safe_text(progress.unit_word, 20)}" if progress.unit else ""
    rate = progress.rate_per_s
    if rate and not _is_stuck(view):
        parts.append(f"{_rate(rate)}{unit}/s" if rate >= 0.1 else f"{format_duration(1 / rate)} each")
    if left := time_left_words(view):
        parts.append(left)
    return ", ".join(parts) + age_words(progress.at_s, view.now_s)


def time_left_words(view: RunView) -> str:
    """'done in about 3 min (14:02)'; of one epoch or one bar where the end of the run is not known."""
    progress, eta_s = view.progress, view.progress.eta_s
    if eta_s is None or progress.is_complete or _is_stuck(view):
        return ""
    part = f"this {progress.of} " if progress.is_part else ""
    if is_old_news(view):
        return f"{part}about {format_duration(eta_s)} to go"
    left_s = (progress.at_s or view.status.last_seen_at_s or view.now_s) + eta_s - view.now_s
    end = clock(view.now_s + left_s, view.now_s)
    if left_s < 0.05:  # something is left, and takes longer than what was counted before
        return f"{part}expected to be done at {end}, it takes longer"
    return f"{part}done in about {format_duration(left_s)} ({end})"


def _is_stuck(view: RunView) -> bool:
    """Then the pace of before tells nothing."""
    return view.is_live and view.state.verdict.kind == "STUCK"


def limit_line(view: RunView) -> str:
    """When its time is over, and whether it is done before; '' without a limit."""
    from jackline.review.limits import limit_lines  # as in `rank_rows`: not for `status --json`

    lines = limit_lines(view.state.time_limit, view.progress, view.now_s, is_saving=view.session.is_there)
    return safe_text("; ".join(reversed(lines)), 300)


def epoch_line(view: RunView) -> str:
    """'2 of 50, batch 34 of 437 (8 %)'; '' where neither total is known: the steps are enough then."""
    place = view.session.place
    epoch, epochs, batch, batches = place.epoch, place.epochs, place.batch, place.num_batches
    if epoch is None or not batch or not (batches or epochs):
        return ""
    text = f"{_count(epoch)} of {_count(epochs)}" if epochs else _count(epoch)
    share = f" of {_count(batches)} ({100 * batch / batches:.0f} %)" if batches else ""
    return f"{text}, batch {_count(batch)}{share}"


def best_line(view: RunView) -> str:
    """'val_spearman 0.6213 at step 1,200', of the best checkpoint that is kept."""
    best = view.session.best
    if best.value is None or best.step is None:
        return ""
    return f"{safe_text(best.name, 40)} {best.value:.4f} at step {_count(best.step)}"


def saved_line(view: RunView) -> str:
    """'2.1 min ago, at step 1,100': the newest checkpoint of the session."""
    at_s, step = view.session.last_checkpoint.at_s, view.session.last_checkpoint.step
    if at_s is None or step is None:
        return ""
    return f"{format_duration(max(0.0, view.now_s - at_s))} ago, at step {_count(step)}"


def now_line(view: RunView) -> str:
    """The part of a step, as the loop reports it, and the line of code, as the supervisor sees it."""
    parts = [safe_text(view.session.doing, 60)] if view.session.doing else []
    return "; ".join(part for part in (*parts, _place_line(view)) if part)


def _place_line(view: RunView) -> str:
    now = view.state.now
    text = safe_text(now.what or "", 120)
    if now.file:
        where = f"{safe_text(now.file, 160)}:{safe_text(now.line, 10)}"
        if now.function:
            where += f" in {safe_text(now.function, 60)}"
        source = f": {safe_text(now.source, 100)}" if now.source else ""
        text = f"{text}, {where}{source}" if text else f"{where}{source}"
    return f"{text}; {safe_text(now.worker, 120)}" if now.worker else text


def verdict_line(view: RunView) -> str:
    verdict = view.state.verdict
    if not verdict.kind:
        return ""
    for_s = verdict.for_s
    if for_s is None and verdict.since_s is not None and view.status.last_seen_at_s is not None:
        for_s = max(0.0, view.status.last_seen_at_s - verdict.since_s)
    is_worth_saying = for_s is not None and for_s >= 1.0 and verdict.kind != "PROGRESS"
    length = f" for {format_duration(for_s or 0.0)}" if is_worth_saying else ""
    text = f": {safe_text(verdict.text, 200)}" if verdict.text else ""
    return f"{safe_text(verdict.kind, 20)}{length}{text}"


def memory_line(view: RunView) -> str:
    memory = view.state.memory
    # Workers share most of their pages with the process they were forked from; `own_bytes` counts shared pages once.
    own = memory.tree_rss_bytes if memory.own_bytes is None else memory.own_bytes
    peak, used, limit, left_s = memory.peak_bytes, memory.used_bytes, memory.limit_bytes, memory.seconds_to_limit
    parts = []
    if own is not None:
        parts.append(f"it uses {format_bytes(own)}" + (f", at most {format_bytes(peak)} so far" if peak else ""))
    if used is not None and limit:
        # Other processes under the same limit use part of it, and that counts towards an OOM kill.
        of = safe_text(format_limit(limit, memory.limit_source), 100)
        parts.append(f"{format_bytes(used)} of {of} are in use, {100 * used / limit:.0f} %")
    if left_s is not None:
        parts.append(f"full in about {format_duration(left_s)} at this rate")
        if memory.grows_at is not None:
            parts.append(f"it grows at {safe_text(memory.grows_at, 240)}")
    return "; ".join(parts)


def gpu_lines(view: RunView) -> list[tuple[int, str]]:
    found = []
    for place, gpu in enumerate(view.state.gpu):
        parts = [safe_text(gpu.name, 40)] if gpu.name else []
        if gpu.used_bytes is not None and gpu.total_bytes:
            parts.append(f"{format_bytes(gpu.used_bytes)} of {format_bytes(gpu.total_bytes)}")
        if gpu.utilisation_percent is not None:
            parts.append(f"{gpu.utilisation_percent} % busy")
        if parts:
            found.append((gpu.index if gpu.index is not None else place, ", ".join(parts)))
    return found


def rates_line(view: RunView) -> str:
    cores = view.state.cpu_cores
    parts = [f"{cores:.1f} cores"] if cores is not None else []
    for name, rate in (("disk", view.state.disk_bytes_per_s), ("network", view.state.net_bytes_per_s)):
        if rate:
            parts.append(f"{name} {format_bytes(rate)}/s")
    return ", ".join(parts)


def loss_line(view: RunView) -> str:
    """What is lost if it is killed now. Without a checkpoint that we know of, that is everything."""
    bounds, checkpoint = view.session.loss_bounds, view.state.checkpoint
    if bounds.process_s is not None:
        note = f" ({safe_text(bounds.note, 80)})" if bounds.note else ""
        if bounds.machine_s is None:
            return f"{format_duration(bounds.process_s)} (no off-machine copy){note}"
        machine = format_duration(bounds.machine_s)
        return f"{format_duration(bounds.process_s)}; if the machine is lost, {machine}{note}"
    if checkpoint.at_s is not None:
        age = format_duration(max(0.0, view.now_s - checkpoint.at_s))
        return f"{age}, since checkpoint {safe_text(checkpoint.path, 160)}"
    since = f", {format_duration(view.running_s)}" if view.running_s is not None else ""
    return f"everything since the start{since}: Jackline knows of no checkpoint"


def _ending_lines(view: RunView) -> list[str]:
    """The explanation that was recorded at the end."""
    text = view.status.exit.text
    if view.is_live or text is None or view.status.state == "elsewhere":
        return []
    lines = safe_lines(text, 12)
    if lines[0].startswith("finished after ") and not lines[0].endswith("(not sure)"):
        lines = [line.strip() for line in lines[1:]]  # the headline already says that
    if view.status.state == "stopped":  # the last line says how to resume, with the run's name
        lines = [line for line in lines if not (line.startswith("hint: ") and "`jackline res" in line)]
    return [f"  {line}" for line in lines]


def _common_lines(view: RunView) -> list[str]:
    incidents = view.state.incidents
    lines = [
        row("incident", f"{safe_text(entry.text, 160)}: {safe_text(entry.path, 200)}")
        for entry in incidents[-_MAX_INCIDENTS:]
    ]
    if len(incidents) > _MAX_INCIDENTS:
        lines.insert(0, row("incidents", f"{len(incidents)}, the last {_MAX_INCIDENTS}:"))
    lines += [row("mirror", line) for line in mirror_lines(view)]
    lines += [row("off", safe_text(entry, 200)) for entry in view.state.protections_off]
    if budget := disk_line(view):
        lines.append(row("disk", budget))
    lines.append(row("log", f"{safe_text(view.log.path, 400)}{_log_size(view)}; {view.log_verdict.text}"))
    if stale := stale_curves(view.curves, view.started_at_s):
        lines.append(row("curves", stale))
    if view.contents:
        lines.append(row("command", safe_text(view.contents.command, 200)))
        lines += [row(label, text) for label, text in origin_lines(view.contents) if text]
    return lines


def disk_line(view: RunView) -> str:
    """'812 MiB of 1.0 GiB (disk budget), 79 %'; '' without a budget."""
    used, budget = view.disk_used_bytes, view.disk_budget
    if used is None or not budget:
        return ""
    return f"{format_bytes(used)} of {format_bytes(budget)} (disk budget), {100 * used / budget:.0f} %"


def _log_size(view: RunView) -> str:
    return "" if view.log.size_bytes is None else f", {format_bytes(view.log.size_bytes)}"


def hint_for(view: RunView) -> str:
    name = safe_text(view.name, 90)
    state = view.status.state
    if view.next_start is not None and view.next_start.hint:
        return safe_text(view.next_start.hint, 600)
    if (pid := paused_pid(view)) is not None:
        return f"`kill -CONT {pid}` continues it; `jackline stop {name}` continues it, saves and ends it"
    if state == "unwatched" and view.status.is_bare:
        return f"`jackline why {name}` shows what it is doing; `jackline stop {name}` saves and ends it"
    if state == "unwatched":
        return f"`jackline watch {name}` takes over and watches it again"
    if state == "alive" and view.state.verdict.is_alarm:
        return f"`jackline why {name}` shows where, with the stacks of every process"
    if state == "dead":
        return f"`jackline why {name}` tells more, {_resume_words(view, name)}"
    if state == "stopped":
        return _resume_words(view, name)
    if state == "elsewhere":
        return "" if view.is_live else "ask on that host, or `jackline why` for what its files say"
    return ""


def _resume_words(view: RunView, name: str) -> str:
    is_anew = view.next_start is not None and view.next_start.is_anew
    return f"`jackline resume {name}` {'starts it again' if is_anew else 'continues'}"


def row(label: str, text: Any) -> str:
    return f"  {label + ':':<12}{text}"


def _count(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) else f"{value:,.1f}"


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"
