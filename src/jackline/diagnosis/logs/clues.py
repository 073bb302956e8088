"""What the open files of a process tell: its logs with size and age, where it last wrote, why a log is empty.

Only reads /proc and calls `stat`; nothing here blocks for long. Includes the wording, because the numbers alone tell
a person little.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from jackline.diagnosis.deaths.collect import tail_lines
from jackline.diagnosis.logs.verdict import are_only_warnings
from jackline.immutable import immutable
from jackline.machine.proc import open_files, read_command, read_environ
from jackline.machine.procfs import read_link
from jackline.units import format_bytes, format_duration

_MOST_LOGS = 6
_MOST_ENTRIES = 5000
_MOST_DEPTH = 3
_MOST_LINES = 1000
_SHORT_LOG_BYTES = 1 << 16
_LOG_NAME = re.compile(
    r"\.(log|out|err|txt|jsonl|csv|tsv)(\.\d+)?$|(^|/)(stdout|stderr|nohup)|tfevents", re.IGNORECASE
)
_TEXT_LOG = re.compile(r"\.(log|out|err)(\.\d+)?$|log[^/]*\.txt$|(^|/)(stdout|stderr|nohup)[^/]*$", re.IGNORECASE)
_PASSED_OVER = (".git", "__pycache__", "node_modules", ".venv", "venv", "site-packages", "wandb")

Answer = TypeVar("Answer")


@immutable
class LogFile:
    """A file that a process of the tree has open for writing."""

    path: str
    size_bytes: int
    modified_s: float
    is_output: bool  # standard output or error of the process

    def words(self, now_s: float) -> str:
        kind = "output" if self.is_output else "file"
        return f"{kind} {self.path}: {format_bytes(self.size_bytes)}, written {_ago(now_s - self.modified_s)}"


@immutable
class LastWritten:
    """`is_open`: the process has it open; otherwise it is just the newest file under its working folder."""

    folder: str
    name: str
    modified_s: float
    is_open: bool

    def words(self, now_s: float) -> str:
        how = "last wrote in" if self.is_open else "newest file under its working folder is in"
        return f"{how} {self.folder} ({self.name}, {_ago(now_s - self.modified_s)})"


def find_logs(pids: Sequence[int]) -> list[LogFile]:
    """Standard output first, then the logs by time of the last write; each file once."""
    found: dict[str, LogFile] = {}
    for pid in pids:
        for file in open_files(pid):
            is_output = file.fd in (1, 2)
            if file.is_writing and (is_output or _LOG_NAME.search(file.path)) and "/stacks/fh." not in file.path:
                known = found.get(file.path)
                is_output = is_output or (known is not None and known.is_output)
                found[file.path] = LogFile(file.path, file.size_bytes, file.modified_s, is_output)
    return sorted(found.values(), key=lambda log: (not log.is_output, -log.modified_s))[:_MOST_LOGS]


def find_last_written(pids: Sequence[int], *, started_at_s: float, limit_s: float = 1.0) -> LastWritten | None:
    """The newest file among those open for writing and those under the working folder, newer than the process.

    Checkpoints are closed as soon as they are written, so the open files alone would miss them.
    """
    newest: LastWritten | None = None
    for pid in pids[:8]:
        for file in open_files(pid):
            if file.is_writing and "/stacks/fh." not in file.path:
                newest = _newer(newest, file.path, file.modified_s, is_open=True)
    folder = read_link(f"/proc/{pids[0]}/cwd") if pids else None
    if folder:
        # A working folder may be on a network disk that hangs.
        for path, modified_s in within(limit_s, lambda: newest_under(Path(folder))) or ():
            if modified_s >= started_at_s:
                newest = _newer(newest, path, modified_s, is_open=False)
    return newest


def newest_under(folder: Path) -> list[tuple[str, float]]:
    """The newest file below a folder, looking at a bounded number of entries."""
    best: tuple[str, float] | None = None
    left = _MOST_ENTRIES
    folders = [(str(folder), 0)]
    for path, depth in folders:
        try:
            entries = list(os.scandir(path))
        except OSError:
            continue
        # In a run's folder only files of the program itself count, not those that Jackline writes.
        is_run = any(entry.name == "run.json" for entry in entries)
        passed_over = (*_PASSED_OVER, "attempts") if is_run else _PASSED_OVER
        for entry in entries[:left]:
            if entry.is_dir(follow_symlinks=False):
                if depth < _MOST_DEPTH and entry.name not in passed_over:
                    folders.append((entry.path, depth + 1))
            elif entry.is_file(follow_symlinks=False) and not is_run:
                modified_s = entry.stat(follow_symlinks=False).st_mtime
                best = (entry.path, modified_s) if best is None or modified_s > best[1] else best
        left -= len(entries)
        if left <= 0:
            break
    return [best] if best else []


def is_log_name(path: str) -> bool:
    return _TEXT_LOG.search(path) is not None and "/stacks/fh." not in path


def newest_logs_under(folder: Path, since_s: float) -> list[str]:
    """The newest text log below a folder that was written since then; [] when there is none."""
    best: tuple[str, float] | None = None
    left, folders = _MOST_ENTRIES // 5, [(str(folder), 0)]
    for path, depth in folders:
        try:
            entries = list(os.scandir(path))[:left]
        except OSError:
            continue
        left -= len(entries)
        if any(entry.name == "run.json" for entry in entries):
            continue  # a run's folder: what is in it was written by Jackline
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                if depth < _MOST_DEPTH and entry.name not in _PASSED_OVER:
                    folders.append((entry.path, depth + 1))
            elif is_log_name(entry.name) and entry.is_file(follow_symlinks=False):
                modified_s = entry.stat(follow_symlinks=False).st_mtime
                if modified_s >= since_s and (best is None or modified_s > best[1]):
                    best = (entry.path, modified_s)
        if left <= 0:
            break
    return [best[0]] if best else []


def within(limit_s: float, ask: Callable[[], Answer]) -> Answer | None:
    """The result of `ask`; None when it takes too long. The thread that calls it is then left running."""
    answers: list[Answer] = []
    thread = threading.Thread(target=lambda: answers.append(ask()), daemon=True)
    thread.start()
    thread.join(limit_s)
    return answers[0] if answers else None


def explain_output(pid: int, *, is_python: bool) -> str:
    """Why lines that a program printed may not be in its log yet (buffering); '' when nothing delays them."""
    target = read_link(f"/proc/{pid}/fd/1") or ""
    if not target or target.startswith(("/dev/pts/", "/dev/tty", "/dev/console")):
        return ""
    if target == "/dev/null":
        return "its output goes to /dev/null: whatever it prints is lost"
    where = "a pipe" if target.startswith("pipe:") else "a file"
    if not is_python:
        return f"its output is {where}: a C program holds up to 4 KiB of lines back until it ends"
    is_flushed = bool(read_environ(pid).get("PYTHONUNBUFFERED")) or re.search(r" -\w*u\w* ", read_command(pid) + " ")
    if is_flushed:
        return ""
    return (
        f"its output is {where} and PYTHONUNBUFFERED is not set: Python holds up to 8 KiB of printed lines back, so "
        "an empty or old log does not mean that nothing was printed"
    )


def explain_log(log: Path) -> str:
    """What is unusual about a run's own log: it is empty, or has only warnings; '' when it is neither."""
    try:
        is_short = log.stat().st_size < _SHORT_LOG_BYTES  # if so, the last lines are the whole log
    except OSError:
        return ""
    return explain_lines(tail_lines(log, _MOST_LINES)) if is_short else ""


def explain_lines(lines: Sequence[str]) -> str:
    telling = [line for line in lines if line.strip()]
    if not telling:
        return "the log is empty: the command has printed nothing at all (Python's buffering is switched off here)"
    if not are_only_warnings(telling):
        return ""
    count = f"{len(telling)} line{'s' if len(telling) != 1 else ''}"
    return f"the log holds only warnings ({count}): the program itself has printed nothing yet"


def to_json(value: LogFile | LastWritten | None) -> dict[str, Any] | None:
    return None if value is None else dict(value.__dict__)


def _newer(known: LastWritten | None, path: str, modified_s: float, *, is_open: bool) -> LastWritten:
    if known is not None and known.modified_s >= modified_s:
        return known
    folder, _, name = path.rpartition("/")
    return LastWritten(folder or "/", name, modified_s, is_open)


def _ago(age_s: float) -> str:
    return "just now" if age_s < 2 else f"{format_duration(age_s)} ago"
