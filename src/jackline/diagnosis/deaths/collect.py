"""Reads the evidence about an attempt's end that is only in files of the run. `diagnose` draws the conclusions."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from jackline.rundir.access.reading import read_end, read_part

if TYPE_CHECKING:  # a dozen dataclasses cost 14 ms, which `status` does not need
    from jackline.machine.readings import OomCounters

_BLOCK = 1 << 16
_MAX_TAIL_BYTES = 8 << 20
_MAX_LINE_CHARS = 4000
_TRACEBACK_HEAD = 40
_MAX_FAULT_BYTES = 1 << 20
_MAX_FAULT_FRAMES = 200
_MAX_SOURCE_BYTES = 4 << 20
# The start of a line in out.log: a UTC stamp and one space; with --split-streams the stream's name follows.
_STAMP = re.compile(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|\+00:00)? ?(?:err\| )?")
_NOTE = "[jackline]"
_START = r"\[jackline\] attempt \d+(?:: | has started$)"
_ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\\\)|[ -/]*[0-~])")
# Compiled where they are used: `status` imports this module, and compiling takes a thousand calls.
_FATAL = r"(?m)^Fatal Python error: "
_FAULT_FRAME = r'  File "(.+)", line (\d{1,9}) in .+'
_FRAME = r'  File "(.+)", line (\d{1,9}), in .+'


def oom_delta(before: OomCounters, after: OomCounters) -> tuple[int | None, int | None]:
    """OOM kills (in the cgroup, on the machine) between two readings; None where one of them could not be read."""
    is_same = before.cgroup == after.cgroup
    return (
        _increase(before.cgroup_kills, after.cgroup_kills) if is_same else None,
        _increase(before.machine_kills, after.machine_kills),
    )


def tail_lines(out_log: Path, count: int) -> tuple[str, ...]:
    """The last `count` lines that the newest attempt wrote, without our stamps and notes; () when there is no log."""
    try:
        span = _BLOCK
        while True:
            data, is_cut = read_end(out_log, span)
            lines, has_start = _own_lines(data, is_cut=is_cut)
            is_all = has_start or not is_cut or span >= _MAX_TAIL_BYTES
            begins = _traceback_above(lines, count) if len(lines) > count > 0 else None
            if is_all or (len(lines) >= count and (begins is None or begins >= 0)):
                return _last_of(lines, count, begins)
            span *= 4
    except OSError:
        return ()


def _traceback_above(lines: list[str], count: int) -> int | None:
    """Where the traceback begins whose middle is the first of the last `count` lines; -1 if it is above all of them,
    None if that line is in no traceback. A recursion prints thousands of lines, and who began it is in the first."""
    at = len(lines) - count
    if not lines[at].startswith("  "):
        return None
    while at > 0 and (lines[at].startswith("  ") or not lines[at].strip()):
        at -= 1
    if re.search(r"Traceback \(most recent call last\):$", lines[at]):
        return at
    return -1 if at == 0 else None


def _last_of(lines: list[str], count: int, begins: int | None) -> tuple[str, ...]:
    """The last `count` lines; in front of them the first frames of the traceback that they are the end of."""
    if count <= 0:
        return ()
    last = lines[-count:]
    if begins is None or begins < 0:
        return tuple(last)
    head = lines[begins : begins + _TRACEBACK_HEAD]
    while head and not head[-1].startswith('  File "'):
        head.pop()
    frame = next((at for at, line in enumerate(last) if line.startswith('  File "')), 0)
    return (*head[:-1], *last[frame:])


def last_output(out_log: Path, raws: Iterable[Path], count: int) -> tuple[str, ...]:
    """The last lines that the command wrote: from the log, or from its raw output where the log lacks the end of it,
    as it does when the disk of the run's folder is full."""
    logged = tail_lines(out_log, count)
    for raw in raws:
        said = tuple(_as_shown(line) for line in tail_lines(raw, count))
        last = next((line for line in reversed(said) if line.strip()), "")
        if last and not any(line.endswith(last[-200:]) for line in logged):
            return with_sources(said)
    return with_sources(logged)


def with_sources(lines: tuple[str, ...]) -> tuple[str, ...]:
    """A traceback without any source text, as a program writes it that cannot open one file more, with that text."""
    frames = {at: match for at, line in enumerate(lines) if (match := re.fullmatch(_FRAME, line))}
    if any(line.startswith("    ") for at, line in enumerate(lines) if at - 1 in frames):
        return lines
    found = []
    for at, line in enumerate(lines):
        source = source_line(frames[at][1], int(frames[at][2])) if at in frames else ""
        found += [line, f"    {source}"] if source else [line]
    return tuple(found)


def _as_shown(line: str) -> str:
    """A raw line without colours, and of a redrawn bar only its last state."""
    return _ANSI.sub("", line.rstrip("\r").rpartition("\r")[2])


def dumped_pids(stacks_folder: Path) -> list[int]:
    """The processes of an attempt that Python ran in, also those that lived too shortly to be seen."""
    words = (path.suffix[1:] for path in stacks_folder.glob("fh.*"))
    return sorted(int(word) for word in words if word.isascii() and word.isdigit())


def read_fault_text(stacks_folder: Path, pids: Iterable[int], *, with_source: bool = True) -> str:
    """What faulthandler wrote when a fatal signal killed one of `pids`; '' when there was none.

    The same files hold the dumps that we requested while it ran; only what follows 'Fatal Python error' counts.
    Python writes no source text there, so it is added here, which is right as long as the files have not changed.
    """
    newest = ""
    newest_s = float("-inf")
    for pid in pids:
        path = stacks_folder / f"fh.{pid}"
        try:
            written_s = path.stat().st_mtime
            text = read_end(path, _MAX_FAULT_BYTES)[0].decode("utf-8", "replace")
        except OSError:
            continue
        starts = [match.start() for match in re.finditer(_FATAL, text)]
        if starts and written_s > newest_s:
            newest, newest_s = text[starts[-1] :], written_s
    return _with_source(newest) if with_source else newest


def _own_lines(data: bytes, *, is_cut: bool) -> tuple[list[str], bool]:
    """The command's lines, and whether they begin with the start of an attempt. What an attempt before it printed
    explains nothing: a traceback of then would be taken for that of a silent end."""
    text = data.decode("utf-8", "replace")
    lines = text.split("\n")
    if lines and not lines[-1]:
        lines.pop()
    if is_cut:
        lines = lines[1:]  # the first line may be incomplete
    bare = [_without_stamp(line.rstrip("\r")) for line in lines]
    starts = [at for at, line in enumerate(bare) if line.startswith(_NOTE) and re.match(_START, line)]
    own = bare[starts[-1] :] if starts else bare
    return [line[:_MAX_LINE_CHARS] for line in own if not line.startswith(_NOTE)], bool(starts)


def _without_stamp(line: str) -> str:
    stamp = _STAMP.match(line)
    return line[stamp.end() :] if stamp else line


def _with_source(fault_text: str) -> str:
    if not fault_text:
        return ""
    lines: list[str] = []
    for line in fault_text.splitlines()[:_MAX_FAULT_FRAMES]:
        lines.append(line)
        match = re.fullmatch(_FAULT_FRAME, line)
        if match and not match[1].startswith("<"):
            source = source_line(match[1], int(match[2]))
            if source:
                lines.append(f"    {source}")
    return "\n".join(lines)


def source_line(file: str, number: int) -> str:
    """Line `number` of a Python file; the path is what somebody's file says, so it may be anything."""
    if not file.endswith((".py", ".pyw")):
        return ""
    try:
        lines = read_part(file, 0, _MAX_SOURCE_BYTES).split(b"\n")
    except (OSError, ValueError):
        return ""
    return lines[number - 1].decode("utf-8", "replace").strip()[:_MAX_LINE_CHARS] if number <= len(lines) else ""


def _increase(before: int | None, after: int | None) -> int | None:
    return None if before is None or after is None else max(0, after - before)
