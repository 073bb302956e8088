"""`jackline logs`: what a run has printed, with times, and an explanation when it has printed nothing."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import click

from jackline.cli.options import find, json_option, quiet_option, run_argument, runs_dir_option
from jackline.errors import UsageError
from jackline.rundir.layout import RunDir
from jackline.rundir.status import RunStatus, read_status
from jackline.supervisor.output.room import first_data
from jackline.units import format_bytes, format_duration

POLL_S = 0.1
_BLOCK = 1 << 20
_EXPLAINED_BELOW_BYTES = 64 << 10
_STAMPED = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\dZ) (\[jackline\] )?(.*)", re.DOTALL)
_WARNING = re.compile(r"\bwarn(?:ing)?s?\b|Warning\b", re.IGNORECASE)


@click.command(short_help="Its output, with times.")
@run_argument
@click.option("-f", "--follow", is_flag=True, help="Go on printing until the run is over.")
@click.option("-n", "--tail", type=click.IntRange(min=0), metavar="N", help="Only the last N lines.")
@click.option("--raw", is_flag=True, help="The bytes as the command wrote them, last attempt only.")
@quiet_option
@json_option
@runs_dir_option
def command(run: str | None, tail: int | None, raw: bool, runs_dir: str | None, **given: bool) -> None:
    """Print what a run has printed: every line with its time (UTC), lines of ours marked [jackline].

    \b
    jackline logs                 the only live run, else the newest
    jackline logs NAME -f         and continue
    jackline logs NAME -n 50      the last lines
    jackline logs NAME --json     one JSON object a line
    """
    follow, as_json = given["follow"], given["as_json"]
    if raw and as_json:
        raise UsageError("--raw and --json do not go together", hint="raw bytes are no lines; leave one of them out")
    found = find(run, runs_dir)
    path = raw_path(found) if raw else found.out_log
    write = write_json_lines if as_json else write_bytes
    for block in read_on(found, path, tail=tail, follow=follow):
        write(block)
    remark = None if raw or given["quiet"] else explain_log(found)
    if remark:
        print(f"[jackline] {remark}", file=sys.stderr, flush=True)


def raw_path(run: RunDir) -> Path:
    attempt = run.last_attempt()
    if attempt is None:
        raise UsageError(f"run '{run.name}' was never started", hint=f"start it: jackline resume {run.name}")
    return attempt.raw_out


def read_on(run: RunDir, path: Path, *, tail: int | None, follow: bool) -> Iterator[bytes]:
    """Blocks of whole lines (only the very last may be incomplete). With `follow`, until the run has ended."""
    offset = tail_offset(path, tail) if tail is not None else start_offset(path)
    rest = b""
    while True:
        is_over = not follow or read_status(run).state not in ("alive", "unwatched")
        while block := read_block(path, offset):
            offset += len(block)
            end = block.rfind(b"\n") + 1
            if end:
                yield rest + block[:end]
                rest = block[end:]
            else:
                rest += block
        if is_over:
            break
        time.sleep(POLL_S)
        offset = min(offset, size_of(path))  # a supervisor that took over may have truncated it
    if rest:
        yield rest


def read_block(path: Path, offset: int) -> bytes:
    try:
        with open(path, "rb") as file:
            return os.pread(file.fileno(), _BLOCK, offset)
    except FileNotFoundError:
        return b""


def start_offset(path: Path) -> int:
    """The offset after the freed part of a raw file; 0 for a log."""
    try:
        with open(path, "rb") as file:
            start = first_data(file.fileno(), 0)
    except FileNotFoundError:
        return 0
    if start:
        size = format_bytes(start)
        print(f"[jackline] the first {size} are no longer kept raw; they are in out.log", file=sys.stderr, flush=True)
    return start or 0


def tail_offset(path: Path, count: int) -> int:
    """The offset of the last `count` lines. Reads backwards, so that a log of any size costs the same."""
    size = size_of(path)
    if count == 0:
        return size
    at, num_found = size, 0
    while at > 0:
        start = max(0, at - _BLOCK)
        block = read_block(path, start)[: at - start]
        place = len(block)
        while (place := block.rfind(b"\n", 0, place)) >= 0:
            if start + place == size - 1:
                continue  # this newline ends the last line, not the one before it
            num_found += 1
            if num_found == count:
                return start + place + 1
        at = start
    return 0


def size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def write_bytes(block: bytes) -> None:
    sys.stdout.buffer.write(block)
    sys.stdout.buffer.flush()


def write_json_lines(block: bytes) -> None:
    for line in block.decode("utf-8", "backslashreplace").removesuffix("\n").split("\n"):
        print(json.dumps(log_record(line), ensure_ascii=False))
    sys.stdout.flush()


def log_record(line: str) -> dict[str, str | None]:
    """'2026-11-15T02:13:39.1Z [jackline] text' -> time, who printed it, text."""
    match = _STAMPED.fullmatch(line)
    if match is None:
        return {"at": None, "by": "command", "text": line}
    return {"at": match[1], "by": "jackline" if match[2] else "command", "text": match[3]}


def explain_log(run: RunDir) -> str | None:
    """A short explanation when the log is empty or has only warnings."""
    if size_of(run.out_log) > _EXPLAINED_BELOW_BYTES:
        return None
    text = read_block(run.out_log, 0).decode("utf-8", "backslashreplace")
    records = [log_record(line) for line in text.split("\n") if line]
    texts = [record["text"] or "" for record in records if record["by"] == "command"]
    return explain_lines(texts, read_status(run), run.name, time.time())


def explain_lines(texts: list[str], status: RunStatus, name: str, now_s: float) -> str | None:
    if not any(text.strip() for text in texts):
        what = "it has printed nothing"
    elif all(_is_part_of_warning(texts, index) for index in range(len(texts))):
        what = "it has printed only warnings"
    else:
        return None
    started_s = status.supervisor_state.started_at_s
    if status.state not in ("alive", "unwatched"):
        return f"{what}, and it is {status.state}; `jackline why {name}` tells more"
    since = f" for {format_duration(now_s - started_s)}" if started_s is not None else ""
    return f"{what} so far, and it is alive{since}; `jackline why {name}` tells what it is doing"


def _is_part_of_warning(texts: list[str], index: int) -> bool:
    """Python prints a warning as a line and the source line below, indented."""
    text = texts[index]
    if not text.strip() or _WARNING.search(text):
        return True
    return index > 0 and text[:1].isspace() and bool(_WARNING.search(texts[index - 1]))
