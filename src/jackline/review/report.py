"""The report of a run: what ran, how it ended, where the time went, and for a failure a post-mortem.

Pure: a Summary in, a Document out. All text from the run passes through `redact`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

from jackline.review.document import Bar, Block, Document, Plain, Section, Table, Text
from jackline.review.goodput import MICRO, best_saving, cost_line
from jackline.review.limits import limit_lines
from jackline.review.redact import redact
from jackline.review.summary import Summary, charts_of, first_finding
from jackline.units import format_bytes, format_duration, format_limit

OUTPUT_LINES = 25
INCIDENT_LINES = 120
SHOWN_NAMES = 4
_MEMORY = "`jackline plan` before, and the memory guard of an attached loop: it saves and ends in time"
PREVENTION = {
    "kernel_oom": _MEMORY,
    "host_memory_error": _MEMORY,
    "cuda_oom": "`jackline plan` tells the largest micro-batch; `run.safe_step` shrinks it by itself",
    "disk_full": "`--disk-budget` bounds what a run may use; `jackline doctor` checks the disk beforehand",
    "stuck": "`--on-stuck restart` restarts a run that hangs from its newest checkpoint",
    "network": "`--restart 5` starts again after a lost connection; prepared data needs no network",
    "preempted": "`--mirror` keeps checkpoints off the machine, so that any other machine can resume",
    "killed_by_someone": "checkpoints that are minutes apart make a kill cheap: `jackline.attach`",
    "worker_killed": "fewer DataLoader workers, or a larger /dev/shm",
    "import_error": "`jackline doctor -- CMD` looks for missing packages before anything is started",
    "syntax_error": "`jackline doctor -- CMD` reads the files before anything is started",
    "command_not_found": "`jackline doctor -- CMD` looks for the command before anything is started",
    "keyboard_input": "`--tty`, or an option of the script that asks no question",
    "nccl_timeout": "`--on-stuck restart` restarts a job whose ranks wait for each other; `why` names the rank",
    "cuda_error": "a short run with CUDA_LAUNCH_BLOCKING=1 names the line; checks of labels and indices before it",
    "time_limit": "`--time-limit` with checkpoints: it then saves and stops in time, and resumes in the next session",
    "timed_out": "`--time-limit` instead of `timeout`: it then saves and stops in time",
    "segfault": "not known; `--restart 3` with checkpoints makes it cheap",
    "own_exception": "`jackline doctor -- CMD` checks without training; a short run first finds the rest",
}


def make_report(summary: Summary, price_an_hour: float | None = None) -> Document:
    sections = [Section("What ran", tuple(_what_ran(summary)))]
    if summary.has_failed:
        sections.insert(0, Section("Post-mortem", tuple(_post_mortem(summary))))
    if summary.incidents:
        sections.append(Section("Incidents", tuple(_incidents(summary))))
    if summary.rewinds:
        sections.append(Section("Rewinds", tuple(_rewinds(summary))))
    sections += [
        Section("Time", tuple(_time(summary, price_an_hour))),
        Section("Curves", tuple(charts_of(summary)) or (Text("No numbers were logged or recognised."),)),
        Section("Memory", tuple(_memory(summary))),
        Section("What happened", tuple(_events(summary))),
        *([Section("Config", (Plain(summary.config),))] if summary.config else []),
        Section("Next", tuple(_next(summary))),
    ]
    name = redact(summary.run.name)
    return Document(f"{name}: {_outcome(summary)[0]}", tuple(_lead(summary)), tuple(sections))


def _outcome(summary: Summary) -> tuple[str, str]:
    """In a few words, and its tone."""
    state = summary.status.state
    if state == "finished":
        return "finished", "good"
    if state == "stopped":
        return "stopped, can be resumed", "warn"
    verdict = summary.status.supervisor_state.verdict
    if state == "alive" and verdict.is_alarm:
        length = f" for {format_duration(verdict.for_s)}" if verdict.for_s is not None else ""
        return f"running, but {verdict.kind}{length}", "bad"
    if state in ("alive", "unwatched"):
        return "running", "good"
    if state == "dead":
        cause = (summary.ending.cause or "end not seen").replace("_", " ")
        return f"failed ({cause})", "bad"
    return f"{state}: last seen on another machine", "warn"


def _lead(summary: Summary) -> Iterator[Text]:
    words, tone = _outcome(summary)
    step = summary.last_step
    total = summary.session.total
    far = "" if step is None else f" at step {step:,.0f}" + (f" of {total:,.0f}" if total else "")
    wall = format_duration(summary.account.wall_us / MICRO)
    count = len(summary.history.attempts)
    attempts = "one attempt" if count == 1 else f"{count} attempts"
    goodput = summary.account.goodput
    share = "" if goodput is None else f", {100 * goodput:.1f} % of it productive"
    yield Text(f"{words}{far}, after {wall} of wall time in {attempts}{share}.", tone)
    title = first_finding(summary.ending).get("title")
    if isinstance(title, str) and summary.has_failed:
        yield Text(redact(title))
    for problem in summary.problems:
        yield Text(redact(problem), "warn")
    yield Text(f"Made on {_clock(summary.now_s)}. Tokens, passwords and home folders are hidden.")


def _post_mortem(summary: Summary) -> Iterator[Block]:
    ending, finding = summary.ending, first_finding(summary.ending)
    last = summary.history.attempts[-1] if summary.history.attempts else None
    when = _clock(last.ended_at_s) if last is not None else "unknown"
    detail = finding.get("detail")
    details = [line for line in detail if isinstance(line, str)] if isinstance(detail, list) else []
    cause = str(finding.get("title") or "the end was not seen: neither a supervisor nor the keeper recorded it")
    sure = str(finding.get("confidence") or "not sure")
    found = "its supervisor saw the end" if ending.is_there else "nobody was watching when it ended"
    rows = [
        ("what happened", _how_it_ended(summary)),
        ("when", when),
        ("how it was found", found),
        ("cause", f"{redact(cause)} ({sure})"),
        ("what was lost", _lost(summary)),
        ("what would have prevented it", PREVENTION.get(ending.cause or "", "not known for this cause")),
    ]
    yield Table(tuple(rows))
    if details:
        yield Text("Evidence:")
        yield Plain("\n".join(redact(line) for line in details))
    hint = finding.get("hint")
    if isinstance(hint, str) and hint:
        yield Text(f"What to do: {redact(hint)}")
    tail = (ending.evidence or {}).get("output_tail")
    if isinstance(tail, list) and tail:
        yield Text("Its last output:")
        yield Plain("\n".join(redact(line) for line in tail[-OUTPUT_LINES:]))


def _incidents(summary: Summary) -> Iterator[Block]:
    """What was found when nothing moved, with its evidence: whoever gets the report does not have the run's files."""
    for attempt, text in summary.incidents:
        lines = text.splitlines()
        first, rest = lines[0] if lines else "", lines[1 : 1 + INCIDENT_LINES]
        more = len(lines) - 1 - len(rest)
        yield Text(f"In attempt {attempt}: {redact(first)}")
        yield Plain(
            "\n".join([*map(redact, rest), *([f"... {more} more lines in the run's folder"] if more else [])]).strip()
        )


def _rewinds(summary: Summary) -> Iterator[Block]:
    """Never silently: its numbers are not those of one straight run."""
    num_back = sum(one.to_step is not None for one in summary.rewinds)
    often = {0: "It did not go back", 1: "It went back once"}.get(num_back, f"It went back {num_back} times")
    batches = ", ".join(one.batches for one in summary.rewinds if one.batches)
    yield Text(f"{often}; batches left out: {batches or 'none'}.", "warn")
    rows = [
        (
            "?" if one.at_s is None else _clock(one.at_s),
            "-" if one.to_step is None else f"step {one.to_step:,}",
            one.batches or "-",
            redact(one.origin),
            redact(", ".join([*one.left_behind[:SHOWN_NAMES], *["..."][: len(one.left_behind) - SHOWN_NAMES]]))
            or "-",
        )
        for one in summary.rewinds
    ]
    yield Table(tuple(rows), ("when", "went back to", "batches left out", "why", "checkpoints left behind"))


def _how_it_ended(summary: Summary) -> str:
    ending, attempts = summary.ending, summary.history.attempts
    if not attempts:
        return "no attempt of it has begun"
    how = "ended, and nobody recorded how"
    if ending.signal is not None:
        how = f"was ended by signal {ending.signal}"
    elif ending.child_exit_code is not None or ending.exit_code is not None:
        code = ending.exit_code if ending.child_exit_code is None else ending.child_exit_code
        how = f"exited with code {code}"
    last, step = attempts[-1], summary.last_step
    far = "" if step is None else f" at step {step:,.0f}"
    return f"attempt {last.number} {how}{far}, {format_duration(last.ended_at_s - last.started_at_s)} after its start"


def _lost(summary: Summary) -> str:
    session = summary.session
    saved, step = session.last_checkpoint.step, session.step
    if saved is not None and step is not None:
        lost = step - saved
        at_s = session.last_checkpoint.at_s
        last = summary.history.attempts[-1] if summary.history.attempts else None
        if lost <= 0:
            return f"nothing: step {saved:,} is saved"
        minutes = (
            f", {format_duration(max(0.0, last.ended_at_s - at_s))} of work" if last and at_s is not None else ""
        )
        return f"{lost:,} steps after step {saved:,}{minutes}"
    if summary.ending.checkpoint_after:
        return f"everything after {redact(summary.ending.checkpoint_after)}"
    return "everything since the start, as far as is known: no checkpoint of it is known here"


def _what_ran(summary: Summary) -> Iterator[Block]:
    contents = summary.contents
    if contents is None:
        yield Text("run.json cannot be read.")
        return
    git = contents.git
    commit = str(git.get("commit") or "no git repository")
    if git.get("is_dirty"):
        commit += f", with changes (sha256 of the diff {str(git.get('diff_sha256', ''))[:16]})"
    machine = contents.machine
    gpus = machine.get("cards")
    rows = [
        ("command", redact(contents.command)),
        ("folder", redact(contents.cwd)),
        ("commit", redact(commit)),
        ("started", _clock(contents.created_at_s)),
        ("machine", redact(f"{machine.get('system', '?')}, {machine.get('num_cpus', '?')} CPUs")),
        ("GPUs", ", ".join(map(redact, gpus if isinstance(gpus, list) else ())) or "none"),
        ("versions", ", ".join(f"{redact(name)} {redact(version)}" for name, version in contents.versions.items())),
    ]
    yield Table(tuple(rows))
    attempts = [
        (
            str(attempt.number),
            _clock(attempt.started_at_s),
            format_duration(attempt.ended_at_s - attempt.started_at_s),
            "running" if attempt.is_open else redact(attempt.summary or attempt.cause or "end not seen"),
        )
        for attempt in summary.history.attempts
    ]
    if attempts:
        yield Table(tuple(attempts), ("attempt", "started", "lasted", "how it ended"))


def _time(summary: Summary, price_an_hour: float | None) -> Iterator[Block]:
    found = summary.account
    yield Bar(found)
    spent, meant = found.seconds(), found.wall_us - found.microseconds()["stopped"]
    rows = [
        (
            use,
            format_duration(seconds),
            "" if use == "stopped" or not meant else f"{100 * seconds * MICRO / meant:.1f} %",
        )
        for use, seconds in spent.items()
    ]
    yield Table(tuple(rows), ("use", "time", "share"))
    if saving := best_saving(found):
        yield Text(f"Largest loss: {saving}.")
    if cost := cost_line(found, price_an_hour):
        yield Text(cost[0].upper() + cost[1:] + ".")
    if summary.status.state == "alive":
        state, session = summary.status.supervisor_state, summary.session
        progress = session.progress if session.done is not None else state.progress
        lines = limit_lines(state.time_limit, progress, summary.now_s, is_saving=session.is_there)
        if lines:
            yield Text(f"Time limit: {redact('; '.join(reversed(lines)))}.")


def _memory(summary: Summary) -> Iterator[Block]:
    record, host = summary.memory, summary.status.supervisor_state.memory
    rows = []
    if host.peak_bytes:
        limit = f" of {redact(format_limit(host.limit_bytes, host.limit_source))}" if host.limit_bytes else ""
        rows.append(("host RAM, peak", f"{format_bytes(host.peak_bytes)}{limit}"))
    if host.grows_at:
        rows.append(("it grew at", redact(host.grows_at)))
    for name in ("allocated", "reserved"):
        predicted = getattr(record, f"predicted_{name}_bytes")
        measured = getattr(record, f"measured_{name}_bytes")
        if predicted and measured:
            off = 100 * (predicted - measured) / measured
            rows.append((f"{name}, predicted / measured", _pair(predicted, measured) + f" ({off:+.1f} %)"))
    yield Table(tuple(rows)) if rows else Text("No memory was measured.")


def _pair(one: float, two: float) -> str:
    return f"{format_bytes(one)} / {format_bytes(two)}"


def _events(summary: Summary) -> Iterator[Block]:
    rows = [(_clock(event.at_s or 0.0), redact(event.text or "").partition("\n")[0][:400]) for event in summary.told]
    yield Table(tuple(rows)) if rows else Text("Nothing was recorded.")


def _next(summary: Summary) -> Iterator[Block]:
    name = redact(summary.run.name)
    state = summary.status.state
    if state in ("stopped", "dead"):
        is_saved = summary.session.last_checkpoint.step is not None or bool(summary.ending.checkpoint_after)
        begins = (
            "from its newest whole checkpoint" if is_saved else "as it was typed: no checkpoint of it is known here"
        )
        yield Plain(f"jackline resume {name}      # {begins}\njackline why {name}")
    elif state == "finished":
        yield Plain(f"jackline checkpoints {name}")
    else:
        yield Plain(f"jackline watch {name}\njackline status {name}")


def _clock(at_s: float) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(at_s))
    except (OverflowError, ValueError, OSError):
        return "?"
