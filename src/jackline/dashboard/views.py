"""What the page asks for, as JSON made from run folders. Every part is bounded; nothing is written.

Owns the list of runs with their short names for addresses, and what is kept between two requests so that a second
look is cheap. Does not own sentences (told.py) or HTTP (server.py).
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from jackline.dashboard.curves import Row, RunCurves, read_samples, rounded, sparkline
from jackline.dashboard.tails import clean, read_events, read_incidents, read_log, search_log
from jackline.dashboard.told import Teller, Told
from jackline.review.chart import thin
from jackline.review.compare import differences
from jackline.review.facts import read_facts
from jackline.review.goodput import MICRO, USES, Account, Span, account, best_saving, cost_line
from jackline.review.history import History, read_history, step_times, usual_steps_per_s
from jackline.review.summary import FIRST
from jackline.rundir.access.reading import read_text
from jackline.rundir.find import list_runs
from jackline.rundir.kin import as_tree, parent_of, read_fork
from jackline.rundir.layout import RunDir

SCHEMA = 1
MAX_RUNS = 500
MAX_SPANS = 400
MAX_CONFIG_BYTES = 128 << 10
MAX_DIFFERENCES = 300
CATALOGUE_S = 2.0
HISTORY_S = 10.0  # a live run's account is made anew this often
LIST_BUDGET_S = 0.25  # CPU time for sparklines and goodput in one answer; the next answer has more of them
LIST_WALL_S = 0.3  # the same on a machine where others take the CPU: the names come first
CURVE_BUDGET_S = 0.2
STACKS_S = 3.0


@dataclass
class Kept:
    """What is known of one run from earlier requests. `lock`: one request at a time."""

    run: RunDir
    lock: threading.Lock = field(default_factory=threading.Lock)
    curves: RunCurves | None = None
    row: tuple[Any, dict[str, Any]] | None = None
    history: tuple[float, Any, History, Account] | None = None
    spark: tuple[int, str, list[float | None]] | None = None
    stacks: tuple[float, tuple[str, ...]] | None = None
    tokens: tuple[int, float | None] | None = None
    fork: tuple[int, str] | None = None


class Site:
    """The runs of a folder, and the registered ones, under names that are safe in an address."""

    def __init__(self, folder: Path, teller: Teller, price_an_hour: float | None = None) -> None:
        self._folder = folder
        self._price_an_hour = price_an_hour
        self._teller = teller
        self._kept: dict[str, Kept] = {}
        self._order: list[str] = []
        self._listed_at_s = -CATALOGUE_S
        self._lock = threading.Lock()

    def find(self, key: str) -> Kept | None:
        """The run with this key. A key is looked up in a list and never becomes part of a path."""
        self._list()
        return self._kept.get(key)

    def _list(self) -> list[Kept]:
        with self._lock:
            if time.monotonic() - self._listed_at_s >= CATALOGUE_S:
                found = {key_of(run): run for run in list_runs(self._folder)[:MAX_RUNS]}
                self._kept = {key: self._kept.get(key) or Kept(run) for key, run in found.items()}
                self._order = list(found)
                self._listed_at_s = time.monotonic()
            return [self._kept[key] for key in self._order]

    def runs_json(self, now_s: float) -> dict[str, Any]:
        listed = self._list()
        deadline_s, until_s = time.thread_time() + LIST_BUDGET_S, time.monotonic() + LIST_WALL_S
        rows, is_whole, is_begun = [], True, False
        for kept in listed:
            with kept.lock:
                row = self._row(kept, now_s)
                is_early = time.thread_time() < deadline_s and time.monotonic() < until_s
                if is_early or (kept.spark is None and not is_begun):  # each answer has at least one more
                    is_begun = is_begun or kept.spark is None
                    self._add_slow_parts(kept, row, now_s)
                row = {**row, **_slow_parts(kept), "fork_of": clean(_fork(kept), 160)}
                is_whole = is_whole and kept.spark is not None
            rows.append((kept.run.path, _fork(kept), row))
        return {
            "schema": SCHEMA,
            "now_s": now_s,
            "folder": clean(str(self._folder), 400),
            "is_whole": is_whole,
            "runs": [{**row, "depth": depth} for depth, row in as_tree(rows)],
        }

    def _row(self, kept: Kept, now_s: float) -> dict[str, Any]:
        """What `jackline runs` shows. An ended run is read again only when its files have changed."""
        stamp = _stamp(kept.run)
        if kept.row is not None and kept.row[0] == stamp:
            return kept.row[1]
        told = self._teller.tell(kept.run, now_s=now_s, short=True)
        row = _row_json(kept.run, told)
        kept.row = None if told.is_live or told.state == "elsewhere" else (stamp, row)
        return row

    def _add_slow_parts(self, kept: Kept, row: dict[str, Any], now_s: float) -> None:
        path = metrics_file(kept.run)
        size = _size(path)
        if kept.spark is None or kept.spark[0] != size:
            kept.spark = (size, *sparkline(_spark_rows(path), FIRST))
        self._history(kept, now_s, is_live=row["is_live"])

    def _history(self, kept: Kept, now_s: float, *, is_live: bool) -> tuple[History, Account]:
        stamp = (_size(kept.run.timeline), _stamp(kept.run) if not is_live else None, is_live)
        known = kept.history
        if known is not None and (known[1] == stamp or now_s - known[0] < HISTORY_S) and known[1][2] == is_live:
            return known[2], known[3]
        history = read_history(kept.run, now_s=now_s)
        found = account(history.attempts, history.marks)
        kept.history = (now_s, stamp, history, found)
        return history, found

    # -- one run -----------------------------------------------------------------------------------------------------

    def run_json(self, kept: Kept, now_s: float) -> dict[str, Any]:
        with kept.lock:
            told = self._teller.tell(kept.run, now_s=now_s, short=False)
            history, found = self._history(kept, now_s, is_live=told.is_live)
        return {
            "schema": SCHEMA,
            "now_s": now_s,
            "key": key_of(kept.run),
            "told": _told_json(told),
            "time": {**_account_json(found), "cost": cost_line(found, self._price_an_hour)},
            "usual_steps_per_s": rounded(usual_steps_per_s(history.marks)),
            "attempts": _attempts_json(history),
            "machine": _machine_json(history),
            "tokens_per_step": _tokens_per_step(kept),
            "family": self._family(kept),
        }

    def _family(self, kept: Kept) -> dict[str, Any]:
        """The run that this one was forked from, if it is listed, and the forks of this one."""
        listed = self._list()
        parent = parent_of(kept.run.path, _fork(kept))
        parents = [_relative(one, _fork(kept)) for one in listed if one.run.path == parent and one is not kept]
        forks = [one for one in listed if parent_of(one.run.path, _fork(one)) == kept.run.path and one is not kept]
        return {"parent": parents[0] if parents else None, "forks": [_relative(one, _fork(one)) for one in forks]}

    def curves_json(self, kept: Kept, cursor: str) -> dict[str, Any]:
        with kept.lock:
            kept.curves = kept.curves or RunCurves(kept.run)
            kept.curves.advance(CURVE_BUDGET_S)
            found = kept.curves.to_json(cursor)
        found["curves"].sort(key=lambda curve: (_place(curve["name"]), curve["name"]))
        for curve in found["curves"]:
            curve["name"] = clean(curve["name"], 80)
        return found

    def events_json(self, kept: Kept, cursor: str) -> dict[str, Any]:
        return read_events(kept.run, cursor)

    def log_json(self, kept: Kept, cursor: int | None, word: str) -> dict[str, Any]:
        return search_log(kept.run, word) if word else read_log(kept.run, cursor)

    def stacks_json(self, kept: Kept) -> dict[str, Any]:
        """Where every thread is now; asked of the kernel at most once in STACKS_S."""
        with kept.lock:
            if kept.stacks is None or time.monotonic() - kept.stacks[0] >= STACKS_S:
                kept.stacks = (time.monotonic(), self._teller.stacks(kept.run))
            lines = kept.stacks[1]
        return {"lines": [clean(line, 400) for line in lines[:2000]], "incidents": read_incidents(kept.run)}

    def config_json(self, kept: Kept) -> dict[str, Any]:
        text = ""
        with contextlib.suppress(OSError):
            text = read_text(kept.run.config_file, MAX_CONFIG_BYTES)
        return {"lines": [clean(line, 400) for line in text.splitlines()[:3000]]}

    def diff_json(self, kept: Kept, other_key: str) -> dict[str, Any]:
        """What this run and another one were made of, where that differs: as `jackline diff` says it."""
        other = self.find(other_key)
        if other is None:
            return {"with": "", "rows": [], "num_rows": 0}
        found = differences(read_facts(kept.run), read_facts(other.run))
        rows = [
            [one.section, clean(one.name, 120), _value(one.name, one.one), _value(one.name, one.other)]
            for one in found[:MAX_DIFFERENCES]
        ]
        return {"with": clean(other.run.name, 120), "rows": rows, "num_rows": len(found)}

    def checkpoints_json(self, kept: Kept) -> dict[str, Any]:
        return {"checkpoints": list(self._teller.checkpoints(kept.run))}


def key_of(run: RunDir) -> str:
    return hashlib.sha256(os.fsencode(run.path)).hexdigest()[:12]


def metrics_file(run: RunDir) -> Path:
    """The file with a run's own numbers; without one, that with the numbers it printed."""
    ranks = sorted(run.path.glob("metrics-[0-9]*.jsonl"), key=lambda path: (len(path.name), path.name))
    own = ranks[0] if ranks else run.metrics()
    return own if _size(own) else run.printed_metrics


def _spark_rows(path: Path) -> list[Row]:
    return read_samples(path, places=24, place_bytes=1024)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _stamp(run: RunDir) -> tuple[Any, ...]:
    """Changes when the run is started again, ends, or its files are replaced."""
    last = run.last_attempt()
    paths = [run.run_file, run.supervisor_file, run.attempts, *([last.exit_file, last.path] if last else [])]
    return tuple(_changed_ns(path) for path in paths)


def _changed_ns(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def _row_json(run: RunDir, told: Told) -> dict[str, Any]:
    return {
        "key": key_of(run),
        "name": clean(told.name, 120),
        "folder": clean(str(run.path.parent), 300),
        "state": told.state,
        "word": clean(told.word, 120),
        "tone": told.tone,
        "is_live": told.is_live,
        "progress": clean(told.progress, 160),
        "share": told.share,
        "left": clean(told.left, 120),
        "created_at_s": told.created_at_s,
    }


def _fork(kept: Kept) -> str:
    """'NAME at step N' of the run that this one was forked from; read when run.json is new."""
    stamp = _changed_ns(kept.run.run_file)
    if kept.fork is None or kept.fork[0] != stamp:
        kept.fork = (stamp, read_fork(kept.run))
    return kept.fork[1]


def _relative(kept: Kept, fork: str) -> dict[str, str]:
    return {"key": key_of(kept.run), "name": clean(kept.run.name, 120), "step": clean(fork.rpartition(" ")[2], 20)}


def _slow_parts(kept: Kept) -> dict[str, Any]:
    spark, history = kept.spark, kept.history
    return {
        "goodput": rounded(history[3].goodput) if history else None,
        "spark": {"name": clean(spark[1], 60), "values": spark[2]} if spark else None,
    }


def _told_json(told: Told) -> dict[str, Any]:
    found = asdict(told)
    for name in ("name", "path", "word", "sentence", "progress", "left", "hint", "command", "resume"):
        found[name] = clean(found[name], 600)
    found["details"] = [clean(line, 600) for line in told.details]
    found["facts"] = [[clean(label, 40), clean(text, 600)] for label, text in told.facts]
    found["cards"] = [{**asdict(card), "lines": [clean(line, 400) for line in card.lines]} for card in told.cards]
    return found


def _account_json(found: Account) -> dict[str, Any]:
    return {
        "uses": list(USES),
        "wall_s": found.wall_us / MICRO,
        "goodput": found.goodput,
        "seconds": {use: round(seconds, 3) for use, seconds in found.seconds().items()},
        "best_saving": best_saving(found),
        "spans": [
            [round(span.begin_us / MICRO, 2), round(span.end_us / MICRO, 2), USES.index(span.use), span.attempt]
            for span in merged(found.spans)
        ],
    }


def merged(spans: tuple[Span, ...], most: int = MAX_SPANS) -> list[Span]:
    """At most `most` spans that cover the same time: each small piece of it shows the use that took most of it."""
    spans = tuple(_joined(spans))
    if len(spans) <= most:
        return list(spans)
    begin, end = spans[0].begin_us, spans[-1].end_us
    width = max(1, (end - begin) // most + 1)
    longest: dict[int, Span] = {}
    for span in spans:
        for piece in range((span.begin_us - begin) // width, (span.end_us - 1 - begin) // width + 1):
            low, high = begin + piece * width, min(end, begin + (piece + 1) * width)
            part = Span(max(low, span.begin_us), min(high, span.end_us), span.use, span.attempt)
            if piece not in longest or part.length_us > longest[piece].length_us:
                longest[piece] = part
    return [
        Span(begin + piece * width, min(end, begin + (piece + 1) * width), span.use, span.attempt)
        for piece, span in sorted(longest.items())
    ]


def _joined(spans: tuple[Span, ...]) -> Iterator[Span]:
    """Neighbours of one use in one attempt as one span."""
    for _, group in groupby(spans, key=lambda span: (span.use, span.attempt)):
        own = list(group)
        yield Span(own[0].begin_us, own[-1].end_us, own[0].use, own[0].attempt)


def _attempts_json(history: History) -> list[dict[str, Any]]:
    found = []
    for attempt in history.attempts[-200:]:
        own = (
            line.run_step for line in history.marks if line.attempt == attempt.number and line.run_step is not None
        )
        found.append(
            {
                "number": attempt.number,
                "started_at_s": attempt.started_at_s,
                "ended_at_s": attempt.ended_at_s,
                "is_open": attempt.is_open,
                "ended": clean(attempt.summary or attempt.cause.replace("_", " "), 300),
                "first_step": next(own, None),
            }
        )
    return found


def _machine_json(history: History) -> list[dict[str, Any]]:
    """Memory and the time of a step over time, from timeline.jsonl."""
    marks = history.marks
    memory = {
        "host RAM": [(line.at_s, line.used_bytes) for line in marks],
        "GPU memory": [(line.at_s, line.gpu_bytes) for line in marks],
    }
    found = []
    for name, spots in memory.items():
        known = [(at_s or 0.0, float(value)) for at_s, value in spots if value is not None]
        if any(value for _, value in known):
            found.append(_spots_json(name, "bytes", known))
    found += [_spots_json(name, "s", spots) for name, spots in step_times(marks).items() if spots]
    return found


def _spots_json(name: str, unit: str, spots: list[tuple[float, float]]) -> dict[str, Any]:
    few = thin(spots, 150)
    return {
        "name": name,
        "unit": unit,
        "times": [round(at_s, 1) for at_s, _ in few],
        "last": [rounded(value) for _, value in few],
    }


def _value(name: str, text: str | None) -> str:
    """A setting's value. Beside its name, because a name such as `api_key` says that the value is a secret."""
    return "" if text is None else clean(f"{name}={text}", 500).removeprefix(clean(f"{name}=", 500))


def _tokens_per_step(kept: Kept) -> float | None:
    """Of a recipe for language models: sequences of a step times their length, from its config."""
    stamp = _changed_ns(kept.run.config_file)
    if kept.tokens is None or kept.tokens[0] != stamp:
        settings = read_facts(kept.run)["settings"] if stamp else {}
        sizes = [settings.get(name, "") for name in ("batch_size", "seq_len")]
        known = [float(size) for size in sizes if size.isdigit()]
        kept.tokens = (stamp, known[0] * known[1] if len(known) == len(sizes) else None)
    return kept.tokens[1]


def _place(name: str) -> tuple[int, int]:
    return (FIRST.index(name) if name in FIRST else len(FIRST), 0 if "loss" in name else 1)
