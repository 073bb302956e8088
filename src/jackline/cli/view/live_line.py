"""The live line: how far, how well, how fast, when done, how long since the last save, how much memory. Pure.

Owns the wording, which parts are left out on a narrow terminal, and what its colour says. The numbers come from the
session inside the training; without one, from what the command prints; without that, from what the supervisor sees.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from jackline.cli.text.paint import Tone, num_cells, shorten
from jackline.cli.text.safety import safe_text
from jackline.immutable import immutable
from jackline.review.limits import judge_fit
from jackline.rundir.records.session import SessionRecord
from jackline.rundir.records.supervisor import GpuRecord, ProgressRecord, SupervisorRecord
from jackline.supervisor.attempt.heartbeat import heartbeat_line, pause_words
from jackline.units import format_bytes, format_duration, format_short

GAP = "  "
AT_RISK_S = 900.0  # so much unsaved work is unusual, and said
NEAR_LIMIT_S = 900.0  # a stop so near is said first
STILL_AFTER_S = 5.0  # a count that has not changed for so long is shown with what it is doing instead
_OVERDUE = 0.1
_NEAR_LIMIT = 0.85
_NUMBERS = 4
_GPUS = 8
# One of what is counted; '' where the number says it all.
_WORDS = {
    "": "step", "it": "step", "its": "step", "steps": "step", "timesteps": "step", "total_timesteps": "step",
    "batches": "batch", "epochs": "epoch", "iterations": "iteration", "episodes": "episode", "rounds": "round",
    "updates": "update", "rows": "row", "%": "",
}  # fmt: skip
_TRAINING_PHASES = ("", "train", "training", "step", "steps", "batch", "iter", "epoch", "epochs")
_EVALUATIONS = ("val", "eval", "test", "dev")


@immutable
class Line:
    text: str
    tone: Tone


@immutable
class _Part:
    """`rank`: where there is little room, parts with a lower one are taken first; 0 always stays, and is cut if need
    be. `short`: its text where not everything fits."""

    text: str
    rank: int
    short: str = ""


class Pulse:
    """Makes a line change while it has nothing new to say: it adds how long ago the line was new. Otherwise a count
    that stands looks the same as a viewer that does."""

    def __init__(self) -> None:
        self._text = ""
        self._new_at_s = float("-inf")

    def beat(self, line: Line, now_s: float, columns: int) -> Line:
        """Called for each drawing; `columns` is the room for the line."""
        shown = shorten(line.text, columns)  # on a narrow terminal what changes may be cut off
        if shown != self._text:
            self._text, self._new_at_s = shown, now_s
        age_s = int(now_s - self._new_at_s)
        if age_s < 1:
            return line
        ago = f"{GAP}({_to_the_second(age_s)} ago)"
        return Line(shorten(line.text, columns - len(ago)) + ago, line.tone)


def live_line(
    state: SupervisorRecord,
    session: SessionRecord,
    now_s: float,
    *,
    columns: int | None = None,
    still_s: float = 0.0,
) -> Line:
    """`still_s`: how long the count has not changed. `columns` None: everything, as in a pipe."""
    session = session if session.attempt in (None, state.attempt) else SessionRecord()
    progress = session.progress if session.done is not None else state.progress
    counted = list(_count(progress, session))
    tone = tone_of(state, is_counted=bool(counted))
    if not counted and columns is None:
        return Line(heartbeat_line(state), tone)
    parts = [*_alarm(state), *counted, *_numbers(state, session)]
    parts += _pace(progress, now_s) if not state.verdict.is_alarm else []
    parts += _limit(state, progress, now_s)
    if not counted or still_s >= STILL_AFTER_S or state.verdict.is_alarm:
        parts += _activity(state, session, now_s, is_all=not counted)
    parts += [*_safety(state, session, now_s), *_memory(state)]
    return Line(_fit([part for part in parts if part.text], columns), tone)


def tone_of(state: SupervisorRecord, *, is_counted: bool) -> Tone:
    """Green: something is counted and moves. Yellow: suspect. Red: stuck."""
    if state.verdict.kind == "STUCK":
        return "bad"
    if state.verdict.is_alarm or state.verdict.is_pause:
        return "warn"
    return "good" if is_counted else "dim"


def _fit(parts: list[_Part], columns: int | None) -> str:
    """Their texts in their order. Where they do not all fit: short texts; of rank 0, then in the order of rank each
    that has room."""
    text = GAP.join(part.text for part in parts)
    if columns is None or num_cells(text) <= columns:
        return text
    short = [_Part(part.short or part.text, part.rank) for part in parts]
    shown = {at for at, part in enumerate(short) if not part.rank}
    for at in sorted((at for at, part in enumerate(short) if part.rank), key=lambda at: short[at].rank):
        if sum(num_cells(short[one].text) + len(GAP) for one in (*shown, at)) - len(GAP) <= columns:
            shown.add(at)
    return shorten(GAP.join(part.text for at, part in enumerate(short) if at in shown), columns)


def _alarm(state: SupervisorRecord) -> Iterator[_Part]:
    verdict = state.verdict
    if verdict.is_alarm:
        yield _Part(f"{verdict.kind} for {format_duration(verdict.for_s or 0.0)}", 0)
    elif verdict.is_pause:
        yield _Part(pause_words(state), 0)


def _count(progress: ProgressRecord, session: SessionRecord) -> Iterator[_Part]:
    """'step 1,230/10,000', its share, and the epoch; nothing where nothing was counted."""
    done, total = progress.done, progress.total
    if done is None or (not done and not total and progress.epoch is None):
        if progress.phase and progress.source == "protocol":
            yield _Part(safe_text(progress.phase, 60), 0)
        return
    word = _counted_word(progress)
    if progress.unit == "%" and total:  # 'download  32%': nobody counts percents
        yield _Part(f"{word} {_share(done, total)}".strip(), 1)
    else:
        yield _Part(_of(word, done, total, _number), 1, _of(word, done, total, _thousands))
        if total and not progress.is_part:
            yield _Part(_share(done, total), 7)
    place = session.place
    epoch, epochs = (place.epoch, place.epochs) if session.done is not None else (progress.epoch, progress.epochs)
    if (
        epoch is not None
        and word != "epoch"
        and (epochs or progress.source == "line" or progress.is_part or place.num_batches)
    ):
        yield _Part(f"epoch {_number(epoch)}" + (f"/{_number(epochs)}" if epochs else ""), 6)


def _of(word: str, done: float, total: float | None, number: Callable[[float], str]) -> str:
    """'step  1,230/10,000': as wide from the first step to the last."""
    return f"{word} {number(done):>{len(number(total))}}/{number(total)}" if total else f"{word} {number(done)}"


def _share(done: float, total: float) -> str:
    return f"{min(100.0, 100 * done / total):3.0f}%"


def _counted_word(progress: ProgressRecord) -> str:
    """What is counted, in the singular: 'step'; with the phase where that is not the training itself."""
    unit, phase = safe_text(progress.unit or "", 20), safe_text(progress.phase or "", 40)
    word = _WORDS.get(unit.lower())
    if phase.lower() == "epochs" and word == "step":
        return "epoch"
    if phase.lower() in _TRAINING_PHASES:
        return unit if word is None else word
    return phase if word is not None else f"{phase} {unit}"


def _numbers(state: SupervisorRecord, session: SessionRecord) -> Iterator[_Part]:
    """The loss first; others where there is room."""
    known = session.metrics or {
        str(entry.name): entry.value for entry in state.printed if entry.name and entry.value is not None
    }
    for place, name in enumerate(sorted(known, key=_order)[:_NUMBERS]):
        yield _Part(f"{safe_text(name, 24)} {_value(known[name])}", 2 if place == 0 else 7 + place)


def _order(name: str) -> int:
    lower = name.lower()
    is_loss = "loss" in lower
    if is_loss and not is_evaluation(name):
        return 0 if lower in ("loss", "train_loss", "train/loss") else 1
    return 2 if is_loss else 4 if lower in ("lr", "learning_rate", "grad_norm") else 3


def is_evaluation(name: str) -> bool:
    return name.lower().replace("/", "_").split("_")[0] in _EVALUATIONS


def evaluation(metrics: Mapping[str, float]) -> dict[str, float]:
    """Those of the metrics that an evaluation logged."""
    return {name: value for name, value in metrics.items() if is_evaluation(name)}


def _pace(progress: ProgressRecord, now_s: float) -> Iterator[_Part]:
    rate, eta_s = progress.rate_per_s, progress.eta_s
    if rate:
        unit = _counted_word(progress).split(" ")[-1]
        yield _Part(f"{_rate(rate)}/s" if rate >= 0.1 else f"{format_short(1 / rate)}/{unit}", 4)
    if eta_s is not None and progress.done is not None and progress.done != progress.total:
        waited_s = max(0.0, now_s - progress.at_s) if progress.at_s is not None else 0.0
        where = {"epoch": " of this epoch", "bar": " of this bar", "part": " of this part"}.get(progress.of or "", "")
        left_s = eta_s - waited_s
        # It is not done, so it never takes 0 s; and an estimate that is over is worth nothing.
        if left_s > -_OVERDUE * eta_s:
            yield _Part(f"eta {_coarse(left_s) if left_s >= 1 else '<1s'}{where}", 3)


def _limit(state: SupervisorRecord, progress: ProgressRecord, now_s: float) -> Iterator[_Part]:
    """The time limit: first where the run does not fit or is about to be stopped, last where it fits."""
    fit = judge_fit(state.time_limit, progress, now_s)
    if fit is None:
        return
    left = _coarse(fit.left_s)
    if fit.fits is False:
        yield _Part(f"limit {left}: {_coarse(fit.missing_s or 0.0)} short", 3, f"limit {left}: too short")
    elif fit.left_s < NEAR_LIMIT_S and fit.is_stopped and not fit.fits:
        yield _Part(f"stops in {left}", 2)
    else:
        yield _Part(f"limit {left}", 7)


def _activity(state: SupervisorRecord, session: SessionRecord, now_s: float, *, is_all: bool) -> list[_Part]:
    """What it is doing and where; `is_all`: nothing is counted, so this is all there is to say."""
    now = state.now
    elapsed_s = max(0.0, now_s - state.started_at_s) if state.started_at_s is not None else None
    # The time is what changes: without it a line too long for the terminal would stand still for minutes.
    time_rank = 1 if state.verdict.is_alarm or state.verdict.is_pause else 0
    parts = [_Part(format_short(elapsed_s), time_rank)] if is_all and elapsed_s is not None else []
    doing = safe_text(session.doing, 40) if session.doing else ""
    doing = doing or safe_text(now.what or "running", 80)
    parts.append(_Part(doing, 0 if is_all else 5, doing.partition(" (/")[0]))
    if now.file:
        source = f" `{safe_text(now.source, 80)}`" if now.source and is_all else ""
        parts.append(_Part(f"{safe_text(now.file.rsplit('/', 1)[-1], 60)}:{now.line}{source}", 3 if is_all else 5))
    if is_all and now.worker:
        parts.append(_Part(safe_text(now.worker, 100), 4))
    if is_all:
        parts.append(_Part(f"cpu {state.cpu_cores or 0.0:.1f}", 4))
        for name, rate in (("disk", state.disk_bytes_per_s), ("net", state.net_bytes_per_s)):
            if rate is not None and rate >= 1024:
                parts.append(_Part(f"{name} {format_bytes(rate)}/s", 6))
    return parts


def _safety(state: SupervisorRecord, session: SessionRecord, now_s: float) -> Iterator[_Part]:
    """The age of the last save; what is at risk only where that is unusually much."""
    at_s = session.last_checkpoint.at_s if session.last_checkpoint.at_s is not None else state.checkpoint.at_s
    bound_s = session.loss_bounds.process_s
    if bound_s is not None and bound_s >= AT_RISK_S:
        yield _Part(f"at risk: {_coarse(bound_s)}", 2)
    elif at_s is not None:
        age = _coarse(max(0.0, now_s - at_s))
        yield _Part(f"saved {age} ago", 5, f"saved {age}")


def _memory(state: SupervisorRecord) -> Iterator[_Part]:
    memory = state.memory
    # Workers share most of their pages with the process they were forked from, so a sum of RSS would be far too high.
    own, limit, used = memory.own_bytes or memory.tree_rss_bytes, memory.limit_bytes, memory.used_bytes
    gpus = [gpu for gpu in state.gpu if gpu.used_bytes is not None]
    for gpu in gpus[:_GPUS]:
        yield _Part(_gpu(gpu), 6)
    if memory.seconds_to_limit is not None:
        yield _Part(f"memory full in {format_short(memory.seconds_to_limit)}", 2)
    elif used is not None and limit and used >= _NEAR_LIMIT * limit:
        yield _Part(f"ram {_bytes(used)} of {_bytes(limit)}", 3)
    elif own is not None:
        yield _Part(f"ram {_bytes(own)}", 8 if gpus else 6)


def _gpu(gpu: GpuRecord) -> str:
    of = f"/{_bytes(gpu.total_bytes)}" if gpu.total_bytes else ""
    busy = f" {gpu.utilisation_percent}%" if gpu.utilisation_percent is not None else ""
    name = "gpu" if gpu.index in (None, 0) else f"gpu{gpu.index}"
    return f"{name} {_bytes(gpu.used_bytes or 0)}{of}{busy}"


def _bytes(count: float) -> str:
    return format_bytes(count).replace(" ", "").replace("iB", "")


def _number(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) else f"{value:,.1f}"


def _thousands(value: float) -> str:
    """1,230 stays, 1,234,567 becomes 1.23M."""
    if abs(value) < 1e5:
        return _number(value)
    return f"{value / 1e6:.2f}M" if abs(value) >= 1e6 else f"{value / 1e3:.0f}k"


def _coarse(seconds: float) -> str:
    """'6m40s', but '28m': nobody needs the seconds of an hour."""
    return f"{seconds / 60:.0f}m" if 600 <= seconds < 3600 else format_short(seconds)


def _to_the_second(seconds: int) -> str:
    """'7s', '1m07s', '1h01m07s': never the same for two different seconds."""
    if seconds < 60:
        return f"{seconds}s"
    minutes, rest = divmod(seconds, 60)
    return f"{minutes}m{rest:02d}s" if minutes < 60 else f"{minutes // 60}h{minutes % 60:02d}m{rest:02d}s"


def _value(value: float) -> str:
    """Five characters or so: 2.314, 0.0312, 1.2e-05, 12,345."""
    if value != value or value in (float("inf"), float("-inf")):
        return str(value)
    size = abs(value)
    if size and (size < 1e-3 or size >= 1e6):
        return f"{value:.1e}"
    return f"{value:,.0f}" if size >= 1000 else f"{value:.{3 if size >= 1 else 4}f}"


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"
