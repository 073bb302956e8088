"""What one command's output tells: the progress of the run, and the metrics it prints.

Owns which of several reports counts, how many lines are looked at (a program may print thousands a second), and how
many metrics are kept. Does not own: the stream (reader.py), the formats (bars.py, lines.py, numbers.py, learned.py).
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from pathlib import Path

from jackline.rundir.layout import RunDir
from jackline.rundir.records.metrics import MetricsLine, PrintedMetrics
from jackline.rundir.records.supervisor import PrintedNumberRecord
from jackline.supervisor.output.journey import Journey, is_aside
from jackline.supervisor.output.learned import Learner
from jackline.supervisor.output.lines import parse_line
from jackline.supervisor.output.log_writer import NOTE_MARK
from jackline.supervisor.output.numbers import read_numbers
from jackline.supervisor.output.progress import Progress
from jackline.supervisor.output.totals import Totals

OUTRANKED_FOR_S = 30.0
_RANK = {"line": 0, "bar": 1, "protocol": 2}
_MAX_NAMES = 24
_MAX_SETS = 64
# CPU seconds for looking at lines: so much at once, and this share of a core. A plain line costs about 50 us, a long
# one a millisecond, and the supervisor has more urgent work: on a full disk it makes room for the command's output.
_AT_ONCE_S = 0.025
_SHARE = 0.0006
_NEWEST_EVERY_S = 0.5
_KEPT = 240.0
_KEPT_PER_S = 4.0
_LARGE_BYTES = 16 << 20
_HUGE_BYTES = 64 << 20
_RARE = re.compile(r"val|test|eval|epoch|end of", re.IGNORECASE)


@dataclass
class _Allowance:
    """So many at once, and so many a second after that."""

    most: float
    left: float
    at_s: float

    def take(self, now_s: float, per_s: float) -> bool:
        self.left = min(self.most, self.left + max(0.0, now_s - self.at_s) * per_s)
        self.at_s = now_s
        if self.left < 1.0:
            return False
        self.left -= 1.0
        return True


class Told:
    """The newest progress, and the newest value of each metric. Without `run` nothing is written."""

    def __init__(self, run: RunDir | None = None) -> None:
        self.progress: Progress | None = None
        self.progress_s = float("-inf")
        self._journey = Journey()
        self._learner = Learner()
        self._totals = Totals()
        self._is_known = False  # whether the newest progress came in a known format
        self._latest: dict[str, PrintedNumberRecord] = {}
        self._run = run
        self._file = PrintedMetrics(run) if run is not None else None
        self._num_bytes = _size(run.printed_metrics) if run is not None else 0
        self._budget_s = _AT_ONCE_S
        self._looked_at_s = float("-inf")
        self._each_s = 5e-5  # the cost of a line, as measured
        self._kept: dict[tuple[str, ...], _Allowance] = {}
        self._has_session, self._asked_at_s = False, float("-inf")

    @property
    def step(self) -> float | None:
        """The newest step, counted through the whole run."""
        return self._journey.step

    @property
    def latest(self) -> tuple[PrintedNumberRecord, ...]:
        """The newest values, the loss first, then in the order in which they appeared."""
        found = sorted(self._latest.values(), key=lambda entry: _importance(entry.name or ""))
        return tuple(found[:_MAX_NAMES])

    def offer(self, progress: Progress | None, now_s: float, *, is_known: bool = True) -> None:
        """A bar, a line or a protocol line; `now_s` is wall time. `is_known`: its format was not learned."""
        if progress is None:
            return
        last = self.progress
        is_outranked = last is not None and _RANK[progress.source] < _RANK[last.source]
        is_between = last is not None and progress.source == "line" and _is_validation(progress, last)
        if (is_outranked or is_between) and now_s - self.progress_s < OUTRANKED_FOR_S:
            return
        if last is not None and not is_known and self._is_known and not self._is_inside(progress, last):
            return  # a known format is worth more, however old
        if last is not None and not is_known and not self._is_known and self._is_coarser(progress, last, now_s):
            return
        self.progress = self._journey.take(progress, now_s)
        self.progress_s = now_s
        self._is_known = is_known and self.progress.unit == progress.unit and not is_aside(progress.phase)

    def _is_inside(self, progress: Progress, last: Progress) -> bool:
        """A learned counter below headings ('Epoch 2/3') says more than they do."""
        is_counter = progress.total is not None and progress.of in ("run", "epoch") and progress.unit != "epochs"
        return is_counter and last.unit == "epochs" and self._journey.has_heading

    def _is_coarser(self, progress: Progress, last: Progress, now_s: float) -> bool:
        """Of two learned counters that take turns (iterations and timesteps in one table), the finer one counts."""
        if progress.unit != last.unit and last.epoch is not None and progress.done == last.epoch:
            return True  # the epochs that the other one names too
        if now_s - self.progress_s >= OUTRANKED_FOR_S:
            return False
        if progress.unit == last.unit:
            return False
        is_without_total = progress.total is None and last.total is not None
        return is_without_total or (progress.done < last.done and not is_aside(last.phase))

    def take_heading(self, text: str) -> None:
        """A line between bars, at the place where it came; the lines themselves are looked at after the poll."""
        self._journey.note_heading(text)

    def take_bar(self, text: str, now_s: float) -> None:
        """The newest state of a bar, for the metrics behind it."""
        self._keep(read_numbers(text) or self._learner.read_cells(text), now_s, is_guessed=False)

    def take_lines(self, texts: list[str], now_s: float) -> None:
        """The lines of one poll, oldest first."""
        chosen = self._chosen([text for text in texts if text and not self._is_of_session(text, now_s)], now_s)
        if not chosen:
            return
        began_s = time.thread_time()
        spent_s, num_taken = 0.0, 0
        for at, text in enumerate(chosen):
            if spent_s <= self._budget_s or at == len(chosen) - 1:  # the newest is always looked at
                self._take_line(text, now_s)
                spent_s, num_taken = time.thread_time() - began_s, num_taken + 1
        self._budget_s = max(-_AT_ONCE_S, self._budget_s - spent_s)
        self._each_s = spent_s / num_taken

    def _take_line(self, text: str, now_s: float) -> None:
        self._journey.note_heading(text)
        progress, numbers, is_guessed, is_known = parse_line(text), read_numbers(text), False, True
        if progress is None:
            self._totals.note(text)
            learned = self._learner.take(text)
            if learned is not None:
                progress, is_guessed, is_known = learned.progress, not numbers, False
                numbers = numbers or learned.numbers
        if progress is not None:
            self.offer(self._totals.fill(progress, text), now_s, is_known=is_known)
        self._keep(numbers, now_s, is_guessed=is_guessed)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _chosen(self, texts: list[str], now_s: float) -> list[str]:
        """All lines while they are few; of very many the newest, and those that are rare by their nature."""
        passed_s = max(0.0, now_s - self._looked_at_s) if self._looked_at_s > float("-inf") else 0.0
        if not texts:
            return []
        self._budget_s = min(_AT_ONCE_S, self._budget_s + passed_s * _SHARE)
        count = int(self._budget_s / max(1e-6, self._each_s))
        if count <= 0 and passed_s < _NEWEST_EVERY_S:
            return []
        self._looked_at_s = now_s
        count = max(1, count)
        rare = [text for text in texts[:-count] if _RARE.search(text[:200])]
        return [*rare[-max(1, count // 4) :], *texts[-count:]]

    def _keep(self, numbers: dict[str, float], now_s: float, *, is_guessed: bool) -> None:
        if not numbers:
            return
        step = self.step
        for name, value in numbers.items():
            is_finite = value - value == 0
            self._latest[name] = PrintedNumberRecord(
                name, value if is_finite else None, None if is_finite else str(value), step, now_s, is_guessed or None
            )
        while len(self._latest) > 4 * _MAX_NAMES:
            del self._latest[next(iter(self._latest))]
        if self._file is None or self._is_logged(now_s):
            return
        if self._allowance(tuple(numbers), now_s).take(now_s, self._kept_per_s()):
            epoch = self.progress.epoch if self.progress is not None else None
            line = MetricsLine(numbers, step, now_s, epoch, is_guessed)
            self._num_bytes += 40 + 20 * len(numbers)
            self._file.append(line)

    def _is_of_session(self, text: str, now_s: float) -> bool:
        """What a session says about the run ('the loss was 3e10 at step 90') is no new number of it."""
        return text.startswith(NOTE_MARK) and self._is_logged(now_s)

    def _is_logged(self, now_s: float) -> bool:
        """What a session logs itself is more exact than what it prints."""
        if not 0.0 <= now_s - self._asked_at_s < 1.0 and not self._has_session:
            self._asked_at_s = now_s
            self._has_session = self._run is not None and self._run.metrics(0).exists()
        return self._has_session

    def _allowance(self, names: tuple[str, ...], now_s: float) -> _Allowance:
        if names not in self._kept and len(self._kept) >= _MAX_SETS:
            del self._kept[next(iter(self._kept))]
        return self._kept.setdefault(names, _Allowance(_KEPT, _KEPT, now_s))

    def _kept_per_s(self) -> float:
        if self._num_bytes > _HUGE_BYTES:
            return _KEPT_PER_S / 40
        return _KEPT_PER_S / 4 if self._num_bytes > _LARGE_BYTES else _KEPT_PER_S


def _is_validation(progress: Progress, last: Progress) -> bool:
    """Whether a counter is that of a validation or a preparation, and the one before it was of the training."""
    return is_aside(progress.phase) and not is_aside(last.phase)


def _importance(name: str) -> int:
    if name == "loss":
        return 0
    if name in ("train_loss", "train/loss", "total_loss"):
        return 1
    if "loss" in name:
        return 2
    return 3 if any(word in name for word in ("acc", "ppl", "reward", "lr", "learning_rate")) else 4


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
