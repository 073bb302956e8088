"""Where the wall time of a run went: every moment counted once, over all attempts.

Pure: attempts and the lines of timeline.jsonl in, seconds for each use out. Times are whole microseconds inside, so
that the parts add up to the wall time exactly.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from jackline.immutable import immutable
from jackline.review.history import AttemptSpan
from jackline.rundir.records.timeline import TimelineRecord
from jackline.units import format_duration

MICRO = 1_000_000
SEEN_FOR_S = 90.0  # a line is written at least each minute: after this the supervisor was not there
WORTH_US = 10 * MICRO  # nobody changes a run to save less

PRODUCTIVE = "productive"
# In the order in which they are shown. `stopped` is a person's wish and no loss; `unseen`: nobody was watching.
USES = (
    PRODUCTIVE,
    "start-up",
    "compile",
    "redone",
    "data wait",
    "save stall",
    "evaluation",
    "hang",
    "paused",
    "down",
    "unseen",
    "stopped",
)
# What the words of a phase or of an activity tell about its use, the first that fits. Everything else is productive.
WORDS = (
    ("hang", ("waiting for file lock", "waiting for a file lock")),
    ("compile", ("compil",)),
    ("start-up", ("data: ", "verify")),  # before "valid": the trainer prepares "data: validation data"
    ("evaluation", ("valid", "evaluat")),
    ("save stall", ("saving", "save", "upload", "wait for room")),
    ("data wait", ("waiting for data", "waiting for a batch", "data wait", "download", "tokenis", "prepare")),
    ("start-up", ("start", "import", "load", "build", "rehears", "resum", "skip", "construct", "restor")),
)
PHASES_OF_TRAINING = ("train", "training", "epoch", "step", "")


@immutable
class Span:
    """One use of the time between two moments, in microseconds since 1970."""

    begin_us: int
    end_us: int
    use: str
    attempt: int | None = None

    @property
    def length_us(self) -> int:
        return self.end_us - self.begin_us


@immutable
class Account:
    """All of it, without gaps or overlaps, in the order of time."""

    spans: tuple[Span, ...] = ()

    @property
    def wall_us(self) -> int:
        return self.spans[-1].end_us - self.spans[0].begin_us if self.spans else 0

    def microseconds(self) -> dict[str, int]:
        found = dict.fromkeys(USES, 0)
        for span in self.spans:
            found[span.use] += span.length_us
        return found

    def seconds(self) -> dict[str, float]:
        return {use: length / MICRO for use, length in self.microseconds().items() if length}

    @property
    def goodput(self) -> float | None:
        """The productive share of the time in which it was meant to run."""
        spent = self.microseconds()
        meant = self.wall_us - spent["stopped"]
        return spent[PRODUCTIVE] / meant if meant > 0 else None


def account(attempts: Sequence[AttemptSpan], marks: Sequence[TimelineRecord]) -> Account:
    """`attempts` in order; a clock that was set back makes an attempt begin where the one before it ended."""
    spans: list[Span] = []
    furthest = float("-inf")  # the last step that any earlier attempt had reached
    has_loop = any(map(_is_in_loop, marks))
    for number, attempt in enumerate(attempts):
        begin_us = round(attempt.started_at_s * MICRO)
        if spans:
            gap_us = spans[-1].end_us
            begin_us = max(begin_us, gap_us)
            use = "stopped" if attempts[number - 1].is_stopped else "down"
            spans.append(Span(gap_us, begin_us, use))
        end_us = max(begin_us, round(attempt.ended_at_s * MICRO))
        own = [line for line in marks if line.attempt == attempt.number]
        ready = list(_as_start_up(own)) if has_loop else own
        spans += _mark_hangs(list(_divide(attempt.number, begin_us, end_us, ready, furthest)), own)
        counted = [line.run_step for line in own if line.spent_s or not has_loop]  # older files count bytes as well
        furthest = max([furthest, *(step for step in counted if step is not None)])
    return Account(tuple(span for span in spans if span.length_us > 0))


def _is_in_loop(line: TimelineRecord) -> bool:
    """Whether an attached loop trains."""
    return bool(line.spent_s) and (line.phase or "").lower() in ("train", "training")


def _as_start_up(own: Sequence[TimelineRecord]) -> Iterator[TimelineRecord]:
    """What an attached loop does before its first step is no training, whatever it is called."""
    is_before = True
    for line in own:
        is_before = is_before and not _is_in_loop(line)
        yield replace(line, phase="start-up") if is_before and line.phase and use_of(line) == PRODUCTIVE else line


def use_of(line: TimelineRecord) -> str:
    """The use of the time after this line, as far as it can be told without numbers."""
    if line.verdict in ("STUCK", "SUSPECT"):
        return "hang"
    if line.verdict == "PAUSED":
        return "paused"
    phase = (line.phase or "").lower()
    told = phase if phase and phase not in PHASES_OF_TRAINING else ""
    if not told and line.phase is None:
        told = (line.what or "").lower()
    return (
        next((use for use, words in WORDS if any(word in told for word in words)), PRODUCTIVE) if told else PRODUCTIVE
    )


def _divide(
    attempt: int, begin_us: int, end_us: int, marks: Sequence[TimelineRecord], furthest: float
) -> Iterator[Span]:
    """The spans of one attempt, from its first moment to its last."""
    at_us = begin_us
    ordered = [(min(max(round((line.at_s or 0.0) * MICRO), begin_us), end_us), line) for line in marks]
    if not ordered:
        yield Span(begin_us, end_us, "unseen", attempt)
        return
    yield Span(at_us, ordered[0][0], "start-up", attempt)
    nothing = TimelineRecord()
    for (since_us, line), (until_us, following) in pairwise([*ordered, (end_us, nothing)]):
        if until_us <= since_us:
            continue
        seen_us = min(until_us, since_us + round(SEEN_FOR_S * MICRO))
        use = use_of(line)
        if use == PRODUCTIVE:
            yield from _split(Span(since_us, seen_us, use, attempt), line, following, furthest)
        else:
            yield Span(since_us, seen_us, use, attempt)
        yield Span(seen_us, until_us, "unseen", attempt)


def _split(span: Span, line: TimelineRecord, following: TimelineRecord, furthest: float) -> Iterator[Span]:
    """Time in which it trained: waiting for data, saving, steps done before, and new steps."""
    at_us = span.begin_us
    for name, use in (("fetch", "data wait"), ("save", "save stall")):
        spent_s = following.spent_s.get(name, 0.0) - line.spent_s.get(name, 0.0)
        until_us = min(span.end_us, at_us + max(0, round(spent_s * MICRO)))
        yield Span(at_us, until_us, use, span.attempt)
        at_us = until_us
    share = _redone_share(line.run_step, following.run_step, furthest)
    until_us = at_us + round((span.end_us - at_us) * share)
    yield Span(at_us, until_us, "redone", span.attempt)
    yield Span(until_us, span.end_us, PRODUCTIVE, span.attempt)


def _redone_share(step: float | None, following: float | None, furthest: float) -> float:
    """The share of the steps between two lines that an earlier attempt had done already."""
    if step is None or step >= furthest:
        return 0.0
    if following is None or following <= step:
        return 1.0
    return min(1.0, (furthest - step) / (following - step))


def _mark_hangs(spans: list[Span], marks: Sequence[TimelineRecord]) -> list[Span]:
    """An alarm comes late: it says for how long nothing had moved, and that time was lost too."""
    alarms = [line for line in marks if line.still_s and line.at_s is not None and use_of(line) == "hang"]
    windows = [
        (until_us - round((line.still_s or 0.0) * MICRO), until_us)
        for line in alarms
        for until_us in [round((line.at_s or 0.0) * MICRO)]
    ]
    for begin_us, end_us in _united(windows):
        spans = [part for span in spans for part in _overwrite(span, begin_us, end_us) if part.length_us > 0]
    return spans


def _united(windows: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The same time as windows that do not overlap: of one hang there is an alarm each minute, all from its start."""
    found: list[tuple[int, int]] = []
    for begin_us, end_us in sorted(windows):
        if found and begin_us <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end_us))
        else:
            found.append((begin_us, end_us))
    return found


def _overwrite(span: Span, begin_us: int, end_us: int) -> Iterator[Span]:
    since_us, until_us = max(span.begin_us, begin_us), min(span.end_us, end_us)
    if since_us >= until_us:
        yield span
        return
    yield replace(span, end_us=since_us)
    yield replace(span, begin_us=since_us, end_us=until_us, use="hang")
    yield replace(span, begin_us=until_us)


def costs(found: Account, price_an_hour: float) -> dict[str, float]:
    """A machine that is stopped is assumed to be given back."""
    spent = found.microseconds()
    meant_us = found.wall_us - spent["stopped"]
    per_us = price_an_hour / 3600 / MICRO
    return {"all": meant_us * per_us, "not_productive": (meant_us - spent[PRODUCTIVE]) * per_us}


def cost_line(found: Account, price_an_hour: float | None) -> str:
    """'cost: 12.50, of which 1.20 was not productive'; '' without a price."""
    if price_an_hour is None:
        return ""
    cost = costs(found, price_an_hour)
    return f"cost: {cost['all']:,.2f}, of which {cost['not_productive']:,.2f} was not productive"


def goodput_line(found: Account, price_an_hour: float | None = None) -> str:
    """'94 % of 3 h 2 min was productive; restarts cost 5 %: ...'; '' when nothing was recorded, or seconds only."""
    if found.goodput is None or found.wall_us < WORTH_US:
        return ""
    share = f"{100 * found.goodput:.0f} % of {format_duration(found.wall_us / MICRO)} was productive"
    return "; ".join(filter(None, (share, best_saving(found), cost_line(found, price_an_hour))))


def best_saving(found: Account) -> str:
    """The largest loss of time and what would lessen it; '' when it is below one percent or ten seconds."""
    spent = found.microseconds()
    meant = found.wall_us - spent["stopped"]
    if meant <= 0:
        return ""
    groups = {
        "restarts": spent["redone"] + spent["down"] + (spent["start-up"] if _num_attempts(found) > 1 else 0),
        **{use: spent[use] for use in ("start-up", "compile", "data wait", "save stall", "evaluation", "hang")},
    }
    if _num_attempts(found) > 1:
        groups.pop("start-up")
    name, lost_us = max(groups.items(), key=lambda item: item[1])
    share = lost_us / meant
    return f"{name} cost {100 * share:.0f} %: {ADVICE[name]}" if share >= 0.01 and lost_us >= WORTH_US else ""


ADVICE = {
    "restarts": "save more often, and make a start cheaper (cached data, compiled code that is kept)",
    "start-up": "cache what is loaded or prepared before the first step",
    "compile": "keep compiled code (TORCHINDUCTOR_CACHE_DIR), or compile less",
    "data wait": "more DataLoader workers, or data downloaded and prepared before the run",
    "save stall": "save less often, or to a faster disk",
    "evaluation": "evaluate less often, or on a part of the data",
    "hang": "`jackline why` tells what it waited for; --on-stuck restart helps where that comes from outside",
}


def _num_attempts(found: Account) -> int:
    return len({span.attempt for span in found.spans if span.attempt is not None})
