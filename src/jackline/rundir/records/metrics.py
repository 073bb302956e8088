"""metrics-RANK.jsonl and metrics-printed.jsonl: the numbers of a training, one line for each report.

`metrics-RANK.jsonl` holds what a loop logged through the session. `metrics-printed.jsonl` holds what a command only
printed; its supervisor recognised it. Both have the same shape, so that every reader (`status`, the live view,
`plot`) uses `read_series`. Owns both shapes, the writer of the second file and the reader of both.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jackline.immutable import immutable
from jackline.rundir.jsonl import JsonlWriter, Lines, read_lines
from jackline.rundir.layout import RunDir
from jackline.rundir.records.fields import MAX_NUMBER, flag, moment, number

MAX_NAME = 60
# A file is read in portions, so that a long one never needs much memory at once.
_PORTION_BYTES = 4 << 20
_SAMPLE_BYTES = 8 << 10
_MAX_SAMPLES = 1024  # each opens the file
MAX_SERIES_BYTES = 256 << 20  # some three million lines; a larger file would fill the memory of the reader
_FACTS = frozenset({"step", "epoch", "at_s", "is_guessed"})
_NOT_FINITE = {"nan": float("nan"), "inf": float("inf"), "-inf": float("-inf")}


class Point(NamedTuple):  # a tuple, because a long run has millions of them
    """One value. `step` counts through the whole run, epochs included; None where the command printed no count."""

    value: float  # may be NaN or infinite
    step: float | None = None
    at_s: float | None = None
    epoch: float | None = None


@immutable
class Series:
    """The values of one name, in the order in which they were reported."""

    name: str
    points: tuple[Point, ...]
    source: str  # 'session' or 'printed'
    is_guessed: bool = False  # the format was not known: Jackline learned it from repeated lines


class MetricsLine(NamedTuple):
    """One line of either file."""

    values: Mapping[str, float]
    step: float | None = None
    at_s: float | None = None
    epoch: float | None = None
    is_guessed: bool = False

    def to_json(self) -> dict[str, Any]:
        """Numbers that JSON cannot represent become text ('nan', 'inf')."""
        facts: dict[str, Any] = {"step": self.step, "at_s": round(self.at_s or 0.0, 3)}
        if self.epoch is not None:
            facts["epoch"] = self.epoch
        if self.is_guessed:
            facts["is_guessed"] = True
        named = {name[:MAX_NAME]: value for name, value in self.values.items() if name not in _FACTS}
        return {**facts, **{name: value if value - value == 0 else str(value) for name, value in named.items()}}

    @staticmethod
    def from_json(raw: Mapping[str, Any]) -> MetricsLine:
        values = {}
        for name, value in raw.items():
            if name in _FACTS:
                continue
            # Nearly every value is a plain number, and a long run has millions of them.
            is_plain = type(value) is float and -MAX_NUMBER < value < MAX_NUMBER
            known = value if is_plain else _value(value)
            if known is not None:
                values[name] = known
        return MetricsLine(
            values,
            number(raw.get("step")),
            moment(raw.get("at_s")),
            number(raw.get("epoch")),
            bool(flag(raw.get("is_guessed"))),
        )


class PrintedMetrics:
    """The writer of metrics-printed.jsonl. Only the run's supervisor has one."""

    def __init__(self, run: RunDir) -> None:
        self._path = run.printed_metrics
        self._writer: JsonlWriter | None = None  # made with the first line: most commands print no metrics

    def append(self, line: MetricsLine) -> bool:
        """False when the disk did not accept it."""
        try:
            self._writer = self._writer or JsonlWriter(self._path)
        except OSError:
            return False
        return self._writer.append(line.to_json())

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def read_series(run: RunDir, *, max_bytes: int = MAX_SERIES_BYTES) -> tuple[Series, ...]:
    """Every metric of a run; from the session where it logged any of that name, else from what was printed. Of a file
    with more than `max_bytes` only parts are read, evenly spread from its beginning to its end."""
    found: dict[str, Series] = {}
    ranks = sorted(run.path.glob("metrics-[0-9]*.jsonl"), key=lambda path: (len(path.name), path.name))
    for path, source in (*((path, "session") for path in ranks[:1]), (run.printed_metrics, "printed")):
        for name, series in _read_file(path, source, max_bytes).items():
            found.setdefault(name, series)
    return tuple(found.values())


def _read_file(path: Path, source: str, max_bytes: int) -> dict[str, Series]:
    points: dict[str, list[Point]] = {}
    guessed: dict[str, bool] = {}
    for portion in _portions(path, max_bytes):
        for raw in portion.records:
            line = MetricsLine.from_json(raw)
            for name, value in line.values.items():
                own = points.get(name)
                if own is None:
                    own, guessed[name] = points.setdefault(name, []), True
                _add(own, Point(value, line.step, line.at_s, line.epoch))
                if not line.is_guessed:
                    guessed[name] = False
    return {name: Series(name, tuple(values), source, guessed[name]) for name, values in points.items()}


def _portions(path: Path, max_bytes: int) -> Iterator[Lines]:
    try:
        size = path.stat().st_size
    except OSError:
        return
    if size > max_bytes:
        each = max(_SAMPLE_BYTES, max_bytes // _MAX_SAMPLES)
        count = max(2, max_bytes // each)
        for number in range(count):
            # A portion begins and ends inside of a line, and such a line is left out.
            yield read_lines(path, (size - each) * number // (count - 1), max_bytes=each)
        return
    offset = 0
    while (portion := read_lines(path, offset, max_bytes=_PORTION_BYTES)).next_offset != offset:
        yield portion
        offset = portion.next_offset


def _add(points: list[Point], point: Point) -> None:
    """After a crash or `resume --step` the step goes back; then the new lines count, not those that they repeat."""
    if points and point.step is not None and _step(points) > point.step:
        while _step(points) >= point.step:
            points.pop()
    points.append(point)


def _step(points: list[Point]) -> float:
    """The newest step; less than any where it is unknown."""
    step = points[-1].step if points else None
    return float("-inf") if step is None else step


def _value(raw: Any) -> float | None:
    if isinstance(raw, str):
        return _NOT_FINITE.get(raw)
    return number(raw)
