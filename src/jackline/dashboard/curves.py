"""The numbers of a training, read once and kept thin: the lowest, highest and last value of neighbouring points.

A file is read on from where the last reading ended, so a look at a live run costs only its new lines. A million lines
take seconds: until they are read, evenly spread samples of the file stand for them. Memory is bounded by the number
of names, not by the length of the run. Owns that store; `rundir/records/metrics` owns the format.
"""

from __future__ import annotations

import json
import math
import os
import time
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import le
from pathlib import Path
from typing import Any

from jackline.rundir.access.reading import open_plain, parse_json, read_part
from jackline.rundir.jsonl import MAX_LINE_BYTES
from jackline.rundir.layout import RunDir
from jackline.rundir.records.fields import MAX_NUMBER
from jackline.rundir.records.metrics import MAX_NAME

BUCKETS = 300  # a curve has at most twice as many
MAX_CURVES = 100
PORTION_BYTES = 1 << 20
SAMPLED_ABOVE_BYTES = 6 << 20
SAMPLES = 300
SAMPLE_BYTES = 2048
_FACTS = frozenset({"step", "epoch", "at_s", "is_guessed"})
_NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
Row = dict[str, Any]


@dataclass
class Bucket:
    """`count` points that follow each other. `low` and `high` leave out NaN and infinity; None without a number."""

    step: float | None
    at_s: float | None
    low: float | None
    high: float | None
    last: float | None
    count: int
    seq: int


@dataclass
class Curve:
    """One metric. `per`: how many points a full bucket has; it doubles when there are too many buckets."""

    buckets: list[Bucket] = field(default_factory=list)
    per: int = 1
    last_step: float = -math.inf
    is_guessed: bool = True

    def add(
        self, steps: Sequence[float | None], times: Sequence[float | None], values: Sequence[float], seq: int
    ) -> None:
        """Points in their order; where the step goes back, the new points replace those that they repeat."""
        known = [step for step in steps if step is not None]
        if known and (known[0] < self.last_step or not all(map(le, known, known[1:]))):
            for part in _rising(steps, self.last_step):
                self._go_back(steps[part.start])
                self._append(steps[part], times[part], values[part], seq)
                self.last_step = max((step for step in steps[part] if step is not None), default=self.last_step)
            return
        self._append(steps, times, values, seq)
        if known:
            self.last_step = known[-1]

    def _go_back(self, step: float | None) -> None:
        if step is None or step > self.last_step:
            return
        while self.buckets and (self.buckets[-1].step or 0.0) >= step:
            self.buckets.pop()
        if self.buckets:
            self.buckets[-1].count = self.per  # its later points are gone: nothing is added to it
        self.last_step = -math.inf

    def _append(
        self, steps: Sequence[float | None], times: Sequence[float | None], values: Sequence[float], seq: int
    ) -> None:
        at = 0
        while at < len(values):
            if not self.buckets or self.buckets[-1].count >= self.per:
                self.buckets.append(Bucket(steps[at], times[at], None, None, None, 0, seq))
            bucket = self.buckets[-1]
            end = at + self.per - bucket.count
            _extend(bucket, values[at:end], seq)
            at = end
            if len(self.buckets) > 2 * BUCKETS:
                self._merge(seq)

    def _merge(self, seq: int) -> None:
        pairs = [self.buckets[at : at + 2] for at in range(0, len(self.buckets), 2)]
        self.buckets = [_joined(pair, seq) for pair in pairs]
        self.per *= 2

    def since(self, seq: int) -> int:
        """The first bucket that changed after `seq`: changes are always at the end."""
        at = len(self.buckets)
        while at and self.buckets[at - 1].seq > seq:
            at -= 1
        return at


def _rising(steps: Sequence[float | None], last: float) -> Iterator[slice]:
    """Parts in which the step does not go back."""
    begin, newest = 0, last
    for at, step in enumerate(steps):
        if step is None:
            continue
        if step < newest and at > begin:
            yield slice(begin, at)
            begin = at
        newest = step
    yield slice(begin, len(steps))


def _extend(bucket: Bucket, values: Sequence[float], seq: int) -> None:
    bucket.count += len(values)
    bucket.seq = seq
    total = sum(values)
    if total - total != 0:  # NaN or infinity is among them
        bucket.last = values[-1] if math.isfinite(values[-1]) else None
        values = [value for value in values if math.isfinite(value)]
        if not values:
            return
    else:
        bucket.last = values[-1]
    low, high = min(values), max(values)
    bucket.low = low if bucket.low is None or low < bucket.low else bucket.low
    bucket.high = high if bucket.high is None or high > bucket.high else bucket.high


def _joined(pair: list[Bucket], seq: int) -> Bucket:
    one, two = pair[0], pair[-1]
    lows = [bucket.low for bucket in pair if bucket.low is not None]
    highs = [bucket.high for bucket in pair if bucket.high is not None]
    count = sum(bucket.count for bucket in pair)
    return Bucket(one.step, one.at_s, min(lows, default=None), max(highs, default=None), two.last, count, seq)


@dataclass
class MetricsReader:
    """One file of metrics, read so far up to `offset`. `is_read`: its end was reached once."""

    path: Path
    offset: int = 0
    size: int = 0
    is_read: bool = False
    curves: dict[str, Curve] = field(default_factory=dict)

    def advance(self, deadline_s: float, seq: int) -> None:
        """Read on until the end of the file or, after at least one portion, until time.process_time() is later."""
        self.size = _size(self.path)
        if self.size < self.offset:  # another file is in its place
            self.offset, self.curves, self.is_read = 0, {}, False
        while self.offset < self.size:
            try:
                data = read_part(self.path, self.offset, PORTION_BYTES)
            except OSError:
                break
            end = data.rfind(b"\n") + 1
            if end == 0:
                if len(data) < PORTION_BYTES:
                    break  # an incomplete last line
                end = len(data)
            self.offset += end
            add_rows(self.curves, parse_rows(data[:end]), seq)
            if time.thread_time() >= deadline_s and self.offset < self.size:
                return
        self.is_read = True


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def parse_rows(data: bytes) -> list[Row]:
    """The JSON objects of these lines. All at once where that works: it is twice as fast as line by line."""
    lines = data.split(b"\n")
    try:
        rows = json.loads(b"[" + b",".join(filter(None, lines)) + b"]") if b"[" not in data else None
    except (ValueError, RecursionError):
        rows = None
    if rows is None:
        rows = [row for row in map(_parse_line, lines) if row is not None]
    return [row for row in rows if isinstance(row, dict)]


def _parse_line(line: bytes) -> Any:
    if not line or len(line) > MAX_LINE_BYTES:
        return None
    try:
        return parse_json(line, with_all_numbers=True)
    except ValueError:
        return None


def add_rows(curves: dict[str, Curve], rows: Iterable[Row], seq: int) -> None:
    columns: dict[str, tuple[list[float | None], list[float | None], list[float]]] = {}
    for row in rows:
        step, at_s = _number(row.get("step")), _number(row.get("at_s"))
        is_guessed = row.get("is_guessed") is True
        for name, raw in row.items():
            if name in _FACTS or (value := _value(raw)) is None:
                continue
            column = columns.get(name)
            if column is None:
                column = _new_column(curves, columns, name, is_guessed)
                if column is None:
                    continue
            column[0].append(step)
            column[1].append(at_s)
            column[2].append(value)
    for name, (steps, times, values) in columns.items():
        curves[name].add(steps, times, values, seq)


def _new_column(
    curves: dict[str, Curve], columns: dict[str, Any], name: str, is_guessed: bool
) -> tuple[list[float | None], list[float | None], list[float]] | None:
    if name not in curves and (len(curves) >= MAX_CURVES or len(name) > MAX_NAME):
        return None
    curve = curves.setdefault(name, Curve())
    curve.is_guessed = curve.is_guessed and is_guessed
    column: tuple[list[float | None], list[float | None], list[float]] = ([], [], [])
    columns[name] = column
    return column


def _number(raw: Any) -> float | None:
    is_number = type(raw) is int or type(raw) is float
    return raw if is_number and -MAX_NUMBER < raw < MAX_NUMBER else None


def _value(raw: Any) -> float | None:
    if type(raw) is float:
        return raw
    if type(raw) is int:
        return float(raw) if -MAX_NUMBER < raw < MAX_NUMBER else None
    return _NOT_FINITE.get(raw) if type(raw) is str else None


def read_samples(path: Path, *, places: int = SAMPLES, place_bytes: int = SAMPLE_BYTES) -> list[Row]:
    """Whole lines from evenly spread places of a file, its beginning and end among them."""
    rows: list[Row] = []
    try:
        fd = open_plain(path)
    except OSError:
        return rows
    try:
        size = os.fstat(fd).st_size
        if size <= places * place_bytes:
            return parse_rows(_whole_lines(os.pread(fd, size, 0), is_first=True))
        for number in range(places):
            offset = (size - place_bytes) * number // (places - 1)
            rows += parse_rows(_whole_lines(os.pread(fd, place_bytes, offset), is_first=offset == 0))
    except OSError:
        pass
    finally:
        os.close(fd)
    return rows


def _whole_lines(data: bytes, *, is_first: bool) -> bytes:
    begin = 0 if is_first else data.find(b"\n") + 1
    return data[begin : data.rfind(b"\n") + 1]


class RunCurves:
    """All curves of one run: what its session logged, and what was printed under other names."""

    def __init__(self, run: RunDir) -> None:
        ranks = sorted(run.path.glob("metrics-[0-9]*.jsonl"), key=lambda path: (len(path.name), path.name))
        self._readers = [MetricsReader(path) for path in (*(ranks[:1] or [run.metrics()]), run.printed_metrics)]
        self._samples: dict[str, Curve] | None = None
        self._seq = 0

    def advance(self, budget_s: float) -> None:
        """Read on for about `budget_s` of CPU time."""
        self._seq += 1
        if self._samples is None and self._is_long:
            self._samples = {}
            for reader in self._readers:
                add_rows(self._samples, read_samples(reader.path), 1)
            return
        deadline_s = time.thread_time() + budget_s
        for reader in self._readers:
            reader.advance(deadline_s, self._seq)

    @property
    def _is_long(self) -> bool:
        return any(_size(reader.path) - reader.offset > SAMPLED_ABOVE_BYTES for reader in self._readers)

    @property
    def read_share(self) -> float:
        size = sum(max(reader.size, _size(reader.path)) for reader in self._readers)
        return min(1.0, sum(reader.offset for reader in self._readers) / size) if size else 1.0

    def to_json(self, cursor: str) -> dict[str, Any]:
        """What changed after `cursor`; everything for one that is not known. Samples until the file is read."""
        is_whole = all(reader.is_read for reader in self._readers)
        stage = "whole" if is_whole else "samples"
        since = int(known) if (known := cursor.removeprefix(f"{stage}.")).isdigit() and known != cursor else 0
        curves: dict[str, tuple[Curve, str]] = {}
        if is_whole:
            for reader, source in zip(self._readers, ("session", "printed"), strict=True):
                for name, curve in reader.curves.items():
                    curves.setdefault(name, (curve, source))
        else:
            curves = {name: (curve, "") for name, curve in (self._samples or {}).items()}
        seq = self._seq if is_whole else 1
        changed = [_curve_json(name, *found, since) for name, found in curves.items() if found[0].since(since) >= 0]
        return {
            "cursor": f"{stage}.{seq}",
            "is_new": since == 0,
            "is_whole": is_whole,
            "read_share": round(self.read_share, 3),
            "curves": [curve for curve in changed if curve["steps"] or since == 0],
        }


def _curve_json(name: str, curve: Curve, source: str, since: int) -> dict[str, Any]:
    begin = curve.since(since) if since else 0
    part = curve.buckets[begin:]
    found: dict[str, Any] = {
        "name": name,
        "source": source,
        "is_guessed": curve.is_guessed,
        "from": begin,
        "per": curve.per,
        "steps": [_short(bucket.step) for bucket in part],
        "times": [None if bucket.at_s is None else round(bucket.at_s, 1) for bucket in part],
        "last": [rounded(bucket.last) for bucket in part],
    }
    if curve.per > 1:
        found["low"] = [rounded(bucket.low) for bucket in part]
        found["high"] = [rounded(bucket.high) for bucket in part]
    return found


def _short(step: float | None) -> float | int | None:
    return int(step) if step is not None and step == int(step) else step


def rounded(value: float | None) -> float | None:
    """Five digits, which are more than a screen shows."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.5g}")


def sparkline(rows: Sequence[Row], wanted: Sequence[str], length: int = 40) -> tuple[str, list[float | None]]:
    """The first metric of `wanted` (else the first one whose name has 'loss'), thinned to `length` values."""
    names = {name for row in rows for name in row if name not in _FACTS}
    name = next((name for name in wanted if name in names), None) or next(
        (name for name in sorted(names) if "loss" in name.lower()), None
    )
    if name is None:
        return "", []
    spots = [(_number(row.get("step")), value) for row in rows if (value := _value(row.get(name))) is not None]
    # By step where each has one, because a busy command's lines are not evenly spread.
    steps = [step for step, _ in spots if step is not None]
    is_counted = len(steps) == len(spots) and all(map(le, steps, steps[1:]))
    xs = steps if is_counted else [float(number) for number in range(len(spots))]
    if not xs:
        return name, []
    width = (xs[-1] - xs[0]) / max(1, length - 1)
    places = sorted({bisect_right(xs, xs[0] + number * width) - 1 for number in range(length)} | {len(xs) - 1})
    return name, [rounded(spots[place][1]) for place in places if place >= 0]
