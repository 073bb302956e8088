"""`jackline events`: what happened to a run, oldest first, from a cursor on; schema `jackline.event/1`.

Owns the cursor: where in each events file reading continues. Lines of a file stay in their order; files are merged by
time. The output of one call is bounded, except with -f.
"""

from __future__ import annotations

import heapq
import json
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from jackline.cli.mirrored import find_to_follow, find_to_read
from jackline.cli.options import json_option, run_argument, runs_dir_option
from jackline.cli.text.clock import clock
from jackline.cli.text.safety import safe_text
from jackline.errors import UsageError
from jackline.immutable import immutable
from jackline.rundir.access.reading import parse_json, read_part
from jackline.rundir.layout import RunDir
from jackline.rundir.records.event import EventRecord
from jackline.rundir.status import read_status

SCHEMA = "jackline.event/1"
POLL_S = 0.5
SHOWN = 50
MAX_TEXT = 300
MAX_FACTS = 12
_FIRST_LOOK_BYTES = 256 << 10
_BLOCK_BYTES = 1 << 20
_FILE = re.compile(r"events-(supervisor|\d+)\.jsonl")

Cursor = dict[str, int]  # 'supervisor' or a rank -> offset


@immutable
class Happened:
    """An event, whose file it is from, and where that file continues."""

    source: str
    record: EventRecord
    next_offset: int


@click.command(short_help="What happened to a run; with --since, what is new.")
@run_argument
@click.option("-f", "--follow", is_flag=True, help="Follow until the run is over.")
@click.option(
    "--since", metavar="CURSOR", help="Only what is newer: the cursor of an earlier event, or 'start' for all."
)
@click.option(
    "-n", "--limit", type=click.IntRange(min=1), default=SHOWN, show_default=True, help="At most so many at once."
)
@json_option
@runs_dir_option
def command(
    run: str | None, follow: bool, since: str | None, limit: int, as_json: bool, runs_dir: str | None
) -> None:
    """Print the events of RUN: started, checkpoints, alarms, restarts, its end. Without --since the newest.

    \b
    jackline events NAME                             the last 50
    jackline events NAME --json --since CURSOR       what is new; each line has the cursor after it
    jackline events NAME -f --json                   until the run is over
    """
    found = find_to_follow(run, runs_dir)[0] if follow else find_to_read(run, runs_dir)
    cursor = parse_cursor(since) if since is not None else None
    write = _write_json if as_json else _write_text
    events, is_cut, cursor = read_events(found, cursor, limit)
    for event, place in events:
        write(event, place)
    if is_cut and not follow:
        more = f"jackline events {found.name} --since {format_cursor(cursor)}"
        print(f"[jackline] there are more: {more}", file=sys.stderr, flush=True)
    while follow:
        status = read_status(found)
        is_over = status.state not in ("alive", "unwatched") and not status.is_heard_afar
        events, is_cut, cursor = read_events(found, cursor, limit)
        for event, place in events:
            write(event, place)
        if is_over and not is_cut:
            return
        if not is_cut:
            time.sleep(POLL_S)


def read_events(run: RunDir, cursor: Cursor | None, limit: int) -> tuple[list[tuple[Happened, Cursor]], bool, Cursor]:
    """At most `limit` events with the cursor after each; whether more are there; the cursor after all of these.
    Without a cursor the newest."""
    files = _files(run)
    begin = dict(cursor) if cursor is not None else {name: _near_end(path) for name, path in files.items()}
    streams = [_read(name, path, begin.get(name, 0)) for name, path in files.items()]
    merged = list(heapq.merge(*streams, key=lambda event: event.record.at_s or 0.0))
    is_cut = cursor is not None and len(merged) > limit
    found, place = [], dict(begin)
    for event in merged if cursor is None else merged[:limit]:
        place = {**place, event.source: event.next_offset}
        found.append((event, place))
    return (found[-limit:] if cursor is None else found), is_cut, place


def format_cursor(cursor: Cursor) -> str:
    """'supervisor:1234.0:567'; 'start' for the beginning."""
    return ".".join(f"{name}:{offset}" for name, offset in sorted(cursor.items())) or "start"


def parse_cursor(text: str) -> Cursor:
    if text == "start":
        return {}
    parts = [part.partition(":") for part in text.split(".")]
    if not all(re.fullmatch(r"supervisor|\d{1,6}", name) and re.fullmatch(r"\d{1,15}", at) for name, _, at in parts):
        hint = "take it from `jackline events --json`, or --since start"
        raise UsageError(f"'{safe_text(text, 60)}' is not a cursor", hint=hint)
    return {name: int(at) for name, _, at in parts}


def event_json(event: Happened, cursor: Cursor) -> dict[str, Any]:
    """Bounded: a long text is cut, and so is a long list of facts."""
    record = event.record
    facts = {
        safe_text(name, 40): _short(value)
        for name, value in list(record.facts.items())[:MAX_FACTS]
        if isinstance(value, str | int | float | bool)
    }
    return {
        "schema": SCHEMA,
        "at_s": record.at_s,
        "event": record.event,
        "text": _one_line(record),
        "from": event.source,
        "facts": facts,
        "cursor": format_cursor(cursor),
    }


def _one_line(record: EventRecord) -> str:
    return safe_text("; ".join(line.strip() for line in (record.text or "").splitlines()), MAX_TEXT)


def _short(value: str | int | float | bool) -> str | int | float | bool:
    return safe_text(value, MAX_TEXT) if isinstance(value, str) else value


def _files(run: RunDir) -> dict[str, Path]:
    paths = [path for path in run.path.glob("events-*.jsonl") if _FILE.fullmatch(path.name)]
    return {path.stem.removeprefix("events-"): path for path in sorted(paths)}


def _near_end(path: Path) -> int:
    try:
        return max(0, path.stat().st_size - _FIRST_LOOK_BYTES)
    except OSError:
        return 0


def _read(source: str, path: Path, offset: int) -> Iterator[Happened]:
    """Every complete line from `offset` on, at most a megabyte: the caller comes again for more."""
    try:
        data = read_part(path, offset, _BLOCK_BYTES)
    except OSError:
        return
    at = offset
    for line in data.split(b"\n")[:-1]:
        at += len(line) + 1
        try:
            value = parse_json(line)
        except ValueError:
            continue
        if isinstance(value, dict):
            yield Happened(source, EventRecord.from_json(value), at)


def _write_json(event: Happened, cursor: Cursor) -> None:
    print(json.dumps(event_json(event, cursor), ensure_ascii=False, separators=(",", ":"), default=str), flush=True)


def _write_text(event: Happened, cursor: Cursor) -> None:
    record = event.record
    when = clock(record.at_s) if record.at_s is not None else "-"
    print(f"{when}  {safe_text(record.event or '-', 20):<20}  {_one_line(record)}", flush=True)
