"""What bars and counters say about the whole run: epochs and the batches in them, nested bars, bars that start again.

Owns which counter is the run's, so that an epoch's time left is never shown as the run's, and the step that counts
through the whole run. Does not own: reading text (bars.py, lines.py), nor the pace (progress.py).
"""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass, replace

from jackline.supervisor.output.progress import Pace, Progress

_EPOCH = re.compile(r"(?<![a-z])epochs?\b[\s:#(\[]*(\d+)(?!\.\d)(?:\s*/\s*(\d+))?", re.IGNORECASE)
_HEADING = re.compile(r"^\W*epoch[\s:#]*\[?(\d+)\s*/\s*(\d+)\W*$", re.IGNORECASE)
_BARE_HEADING = re.compile(r"^\W*epoch[\s:#]*\[?(\d+)\W*$", re.IGNORECASE)
_LEADING = re.compile(r"^\s*(\d+)/(\d+)\s")  # ultralytics puts the epoch first: '  3/100  2.5G  1.2  ...'
_EPOCH_WORD = re.compile(r"(?<![a-z])epochs?(?![a-z])", re.IGNORECASE)
_ASIDE = re.compile(
    r"eval|valid|(?<![a-z])val(?![a-z])|(?<![a-z])test|predict|load|checkpoint|shard|download|fetch|extract|filter|token"
    r"|cach|(?<![a-z])map(?![a-z])|sanity",
    re.IGNORECASE,
)
_DIGITS = re.compile(r"[\d.,:/]+")
_MAX_COUNTERS = 32
_OUTER_FOR_S = 1800.0
_SAME_SHARE = 0.1  # a resume begins anywhere in an epoch: how long that one took says nothing
_MOST = 0.9  # a counter that starts again after this share has done a whole epoch


def is_aside(phase: str) -> bool:
    """Whether a phase's name says that it loads, prepares or evaluates and does not train."""
    return _ASIDE.search(phase) is not None


@dataclass
class _Counter:
    first_s: float
    seen_s: float
    last: Progress
    restarts: int = 0
    offset: float = 0.0  # what earlier epochs have counted
    heading: float | None = None  # the epoch that a line above it named
    stride: float = 0.0  # how far apart its last two reports were


class _Epochs:
    """How long an epoch takes, from its first report to the first one of the next: a validation between is in it."""

    def __init__(self) -> None:
        self._began: tuple[float, float, float] | None = None  # epoch, how much of it was done, when
        self._took_s: deque[float] = deque(maxlen=5)

    def take(self, epoch: float, share: float, now_s: float) -> None:
        began = self._began
        if began is not None and began[0] == epoch:
            return
        if began is not None and epoch == began[0] + 1 and abs(share - began[1]) <= _SAME_SHARE:
            self._took_s.append(now_s - began[2])
        self._began = (epoch, share, now_s)

    def left_s(self, later_epochs: float, least_s: float, now_s: float) -> float | None:
        """How long this epoch and the later ones still take; None while no whole one was seen. `least_s`: what is
        left of this one at the pace of its reports."""
        if not self._took_s or self._began is None:
            return None
        took_s = sorted(self._took_s)[len(self._took_s) // 2]
        _, share, began_s = self._began
        return max(least_s, began_s + took_s - now_s + (later_epochs - share) * took_s)


class Journey:
    """Takes every report of one command, in order; returns what is known about the run."""

    def __init__(self) -> None:
        self._pace = Pace()
        self._took = _Epochs()
        self._counters: dict[tuple[str, str, float | None, str], _Counter] = {}
        self._epoch: float | None = None  # from a line such as 'Epoch 3/10', which Keras prints before its bars
        self._epochs: float | None = None
        self._first_epoch = 1.0
        self._heading: float | None = None  # of 'Epoch 3' or 'Epoch 3/10', where lines with counters follow
        self._first_heading: float | None = None
        self._fine: Progress | None = None  # the newest report of something finer than epochs
        self.step: float | None = None  # counts through the whole run

    def take(self, progress: Progress, now_s: float) -> Progress:
        if progress.source == "protocol":
            self.step = progress.done
            return replace(self._pace.update(progress, now_s), at_s=now_s)
        told = self._with_total(self._with_epoch(progress))
        if told.unit == "epochs" and told.source == "line" and self._fine is not None:
            return self._fine  # '| end of epoch 3 | valid loss 5.9': the batches say more, and have counted on
        counter = self._count(told, now_s)
        whole = self._as_run(told, counter, now_s)
        if not is_aside(told.phase):
            self.step = self._step(told, counter)
        found = replace(self._pace.update(whole, now_s), at_s=now_s)
        found = self._with_pauses(found, told, now_s)
        if found.unit == "it" and _is_epoch_bar(found):  # tqdm's word for anything
            found = replace(found, unit="epochs")
        if told.unit != "epochs" and told.total is not None and not is_aside(told.phase):
            self._fine = found
        return found

    @property
    def has_heading(self) -> bool:
        return self._heading is not None

    def note_heading(self, text: str) -> None:
        """'Epoch 3/10' alone on a line: Keras prints it before the bar of that epoch, PyTorch's first tutorial
        'Epoch 3' before its lines."""
        if len(text) >= 40:
            return
        heading = _HEADING.match(text)
        named = heading or _BARE_HEADING.match(text)
        if named is not None:
            self._heading = float(named[1])
            self._first_heading = self._heading if self._first_heading is None else self._first_heading
        if heading is not None:
            self._epoch, self._epochs = float(heading[1]), float(heading[2])
            self._first_epoch = 0.0 if self._epoch < 1 else self._first_epoch

    def _with_pauses(self, found: Progress, told: Progress, now_s: float) -> Progress:
        """The time left as whole epochs took it: a few reports of one do not tell how often it pauses."""
        if found.of != "run" or found.epoch is None or not found.epochs or not told.total or told.unit == "epochs":
            return found
        self._took.take(found.epoch, told.done / told.total, now_s)
        is_complete = found.total is not None and found.done >= found.total
        if is_complete or found.eta_s is None or not found.rate_per_s:
            return found
        least_s = max(0.0, told.total - told.done) / found.rate_per_s
        left_s = self._took.left_s(found.epochs - 1 - (found.epoch - self._first_epoch), least_s, now_s)
        return found if left_s is None else replace(found, eta_s=left_s)

    def _with_epoch(self, progress: Progress) -> Progress:
        """The report with the epoch that it is in, and the first and last epoch remembered."""
        found = progress
        if progress.source == "bar" and progress.epoch is None and not is_aside(progress.phase):
            named = _EPOCH.search(progress.phase) or _LEADING.search(progress.phase)
            if named is not None:
                epochs = float(named[2]) if named[2] else None
                found = replace(progress, epoch=float(named[1]), epochs=epochs, of="epoch")
            elif _is_epoch_bar(progress):
                return replace(progress, of="run")
            elif self._epoch is not None and progress.total is not None:
                found = replace(progress, epoch=self._epoch, epochs=self._epochs, of="epoch")
        if found.epoch is not None:
            # A bar that has its epoch by itself is Lightning's, which counts from 0: its first one may not be seen.
            is_from_0 = found.epoch < 1 or (progress.source == "bar" and progress.epoch is not None)
            self._first_epoch = 0.0 if is_from_0 else self._first_epoch
            self._epoch, self._epochs = found.epoch, found.epochs or self._epochs
            if found.epochs != self._epochs:
                found = replace(found, epochs=self._epochs)
        return found

    def _with_total(self, told: Progress) -> Progress:
        """'error at step 700', after 'step 695/2000', is about the same steps: their total still holds."""
        last = self._fine
        is_bare = told.source == "line" and told.total is None and told.epoch is None and not told.phase
        if not is_bare or last is None or last.total is None or (last.source, last.of) != ("line", "run"):
            return told
        is_same = told.unit == last.unit and last.epoch is None and last.done <= told.done <= last.total
        return replace(told, total=last.total) if is_same else told

    def _count(self, progress: Progress, now_s: float) -> _Counter:
        phase = _DIGITS.sub("#", progress.phase)[:30]
        key = (phase, progress.unit, progress.total, progress.source)
        counter = self._counters.pop(key, None) or _Counter(now_s, now_s, progress)
        self._counters[key] = counter
        last = counter.last
        is_new_epoch = counter.heading != self._heading
        counter.heading = self._heading
        # Where every 40th of 100 batches is printed, an epoch ends after 80.
        was_at_end = last.total is None or last.done + counter.stride >= last.total or last.done >= _MOST * last.total
        if progress.done < last.done and (was_at_end or is_new_epoch):
            is_small = progress.done < 0.5 * last.done
            if progress.total is not None or is_small:
                counter.restarts += 1
                counter.offset += last.total if last.total is not None else last.done
        counter.stride = max(0.0, progress.done - last.done)
        counter.last, counter.seen_s = progress, now_s
        if len(self._counters) > _MAX_COUNTERS:
            del self._counters[next(iter(self._counters))]
        return counter

    def _as_run(self, told: Progress, counter: _Counter, now_s: float) -> Progress:
        total = told.total
        if told.unit == "epochs" or total is None:
            return told
        # A counter that does not start again below a new heading counts through the whole run.
        is_in_epoch = self._heading is not None and (counter.restarts > 0 or self._heading == self._first_heading)
        if is_in_epoch and told.source == "line" and told.epoch is None:
            told = replace(told, epoch=self._heading, epochs=self._epochs)
        if told.epoch is not None:
            index = told.epoch - self._first_epoch
            if told.epochs and 0 <= index < told.epochs:
                done = index * total + told.done
                total *= told.epochs
                if told.of == "part":  # of a preparation or a validation
                    return replace(told, done=done, total=total, eta_s=None)
                return replace(told, phase="", done=done, total=total, eta_s=None, of="run")
            return replace(told, of="epoch")
        outer = self._outer(counter, now_s) if told.source == "bar" else None
        if outer is not None and outer.total is not None:
            # One percent of the outer bar is no epoch, so that the inner one adds nothing to it.
            inner = min(1.0, told.done / total) if total and outer.unit != "%" else 0.0
            done = min(outer.total, outer.done + inner)
            return replace(outer, done=done, rate_per_s=None, eta_s=None, of="run")
        if counter.restarts:
            return replace(told, of="epoch")
        return told if told.source == "line" or _is_epoch_bar(told) else replace(told, of="bar")

    def _outer(self, inner: _Counter, now_s: float) -> Progress | None:
        """The bar around this one: it began earlier, is not done, and never started again while this one did."""
        if not inner.restarts and not any(_is_epoch_bar(other.last) for other in self._counters.values()):
            return None
        for other in sorted(self._counters.values(), key=lambda counter: counter.first_s):
            last = other.last
            is_open = last.total is not None and last.done < last.total
            if other is inner or other.first_s > inner.first_s or last.source != "bar":
                continue
            if last.unit == "%" and not _is_epoch_bar(last):
                continue
            if is_open and not other.restarts and now_s - other.seen_s < _OUTER_FOR_S and not is_aside(last.phase):
                return last
        return None

    def _step(self, told: Progress, counter: _Counter) -> float:
        if told.unit == "epochs" or told.epoch is None or told.total is None:
            return counter.offset + told.done
        return max(0.0, told.epoch - self._first_epoch) * told.total + told.done


def _is_epoch_bar(progress: Progress) -> bool:
    """A bar over epochs: 'Epochs:  30%|███  | 3/10 [01:00<02:20, 20.0s/epoch]'."""
    if progress.source != "bar" or progress.total is None:
        return False
    is_word = _EPOCH_WORD.search(progress.phase) is not None and _EPOCH.search(progress.phase) is None
    return progress.unit.lower().startswith("epoch") or (is_word and progress.total <= 10_000)
