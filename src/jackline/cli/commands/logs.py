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

from jackline.cli.mirrored import find_to_read
from jackline.cli.options import json_option, quiet_option, run_argument, runs_dir_option
from jackline.cli.streams import write_exact
from jackline.cli.text.safety import safe_output
from jackline.errors import UsageError
from jackline.rundir.access.reading import open_plain, read_part
from jackline.rundir.layout import RunDir
from jackline.rundir.status import RunStatus, read_status
from jackline.supervisor.output.room import first_data
from jackline.units import format_bytes, format_duration, rank_words

POLL_S = 0.1
_BLOCK = 1 << 20
_MAX_TAIL_BYTES = 256 << 20
_EXPLAINED_BELOW_BYTES = 64 << 10
_STAMPED = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\dZ) (\[jackline\] )?(.*)", re.DOTALL)
_WARNING = re.compile(r"\bwarn(?:ing)?s?\b|Warning\b", re.IGNORECASE)


@click.command(short_help="Its output, with times.")
@run_argument
@click.option("-f", "--follow", is_flag=True, help="Print until the run is over.")
@click.option("-n", "--tail", type=click.IntRange(min=0), metavar="N", help="Only the last N lines.")
@click.option("--raw", is_flag=True, help="The bytes as the command wrote them, last attempt only.")
@click.option("--rank", type=click.IntRange(min=0), metavar="N", help="The output of one rank of a distributed job.")
@quiet_option
@json_option
@runs_dir_option
def command(
    run: str | None, tail: int | None, raw: bool, rank: int | None, runs_dir: str | None, **given: bool
) -> None:
    """Print what a run has printed: every line with its time (UTC), lines of ours marked [jackline].

    \b
    jackline logs                 the only live run, else the newest
    jackline logs NAME -f         and continue
    jackline logs NAME -n 50      the last lines
    jackline logs NAME --rank 3   what rank 3 has printed, last attempt only
    jackline logs NAME --json     one JSON object a line

    Control characters are left out: a log may hold what a stranger wrote. --raw gives a file or a pipe every byte.
    """
    follow, as_json = given["follow"], given["as_json"]
    if raw and as_json:
        raise UsageError("--raw and --json do not go together", hint="raw bytes are no lines; leave one of them out")
    found = find_to_read(run, runs_dir)
    path = raw_path(found) if raw else found.out_log
    if rank is not None:
        path, given["quiet"] = rank_path(found, rank), True
    write = write_json_lines if as_json else write_raw if raw else write_lines
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


def rank_path(run: RunDir, rank: int) -> Path:
    """The first rank of a machine is on the screen, so its output is in the log."""
    attempt = run.last_attempt()
    path = attempt.rank_out(rank) if attempt is not None else None
    if path is not None and path.exists():
        return path
    notes = [int(one.stem.removeprefix("rank-")) for one in attempt.rank_notes()] if attempt is not None else []
    if rank in notes:
        return run.out_log
    known = f"it has {rank_words(notes)}" if notes else "it is no distributed job, or each rank's output was not kept"
    raise UsageError(f"run '{run.name}' has no output of rank {rank}: {known}", hint=f"jackline logs {run.name}")


def read_on(run: RunDir, path: Path, *, tail: int | None, follow: bool) -> Iterator[bytes]:
    """Blocks of whole lines; only a very long one, or the last, may be cut. With `follow`, until the run ended."""
    offset = tail_offset(path, tail) if tail is not None else start_offset(path)
    rest = b""
    while True:
        is_over = not follow or read_status(run).state not in ("alive", "unwatched")
        while (piece := read_block(path, offset)) is not None:
            offset, block = piece[0] + len(piece[1]), piece[1]
            end = block.rfind(b"\n") + 1 or (len(block) if len(rest) > _BLOCK else 0)
            if end:
                yield rest + block[:end]
                rest = b""
            rest += block[end:]
        if is_over:
            break
        time.sleep(POLL_S)
        offset = min(offset, size_of(path))  # a supervisor that took over may have truncated it
    if rest:
        yield rest


def read_block(path: Path, offset: int) -> tuple[int, bytes] | None:
    """The next bytes and their offset; a hole is passed over. None at the end."""
    try:
        fd = open_plain(path)
    except FileNotFoundError:
        return None
    try:
        start = first_data(fd, offset)
        block = os.pread(fd, _BLOCK, start) if start is not None else b""
    finally:
        os.close(fd)
    return (start, block) if start is not None and block else None


def start_offset(path: Path) -> int:
    """The offset after the freed part of a raw file; 0 for a log."""
    piece = read_block(path, 0)
    start = piece[0] if piece is not None else 0
    if start:
        size = format_bytes(start)
        print(f"[jackline] the first {size} are no longer kept raw; they are in out.log", file=sys.stderr, flush=True)
    return start


def tail_offset(path: Path, count: int) -> int:
    """The offset of the last `count` lines. Reads backwards, so that a log of any size costs the same."""
    size = size_of(path)
    if count == 0:
        return size
    at, num_found, least = size, 0, max(0, size - _MAX_TAIL_BYTES)
    while at > least:
        start = max(least, at - _BLOCK)
        block = read_part(path, start, at - start)
        place = len(block)
        while (place := block.rfind(b"\n", 0, place)) >= 0:
            if start + place == size - 1:
                continue  # this newline ends the last line, not the one before it
            num_found += 1
            if num_found == count:
                return start + place + 1
        at = start
    return least


def size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def write_lines(block: bytes) -> None:
    """A log may be forged, or hold text that a program got from elsewhere: a terminal gets its colours at most."""
    write_exact(safe_output(block, with_colors=_has_colors()))


def write_raw(block: bytes) -> None:
    """The bytes as they are for a pipe or a file; a terminal gets each refresh of a bar as a line."""
    if not sys.stdout.isatty():
        write_exact(block)
        return
    write_lines(block.replace(b"\r\n", b"\n").replace(b"\r", b"\n"))


def _has_colors() -> bool:
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR")


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
    piece = read_block(run.out_log, 0)
    text = piece[1].decode("utf-8", "backslashreplace") if piece is not None else ""
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
