"""Sentences about the evidence that several rules share."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

from jackline.diagnosis.deaths.evidence import Evidence
from jackline.diagnosis.frames import Frame
from jackline.units import format_bytes, format_duration, format_limit

NEARLY_FULL = 0.9
_MAX_SOURCE = 100


def short_place(frame: Frame | None) -> str:
    """'train.py:41', '' for none."""
    return f"{os.path.basename(frame.file)}:{frame.line}" if frame else ""


def at_place(frame: Frame | None) -> str:
    """' at train.py:41', '' for none."""
    return f" at {short_place(frame)}" if frame else ""


def place_line(frame: Frame | None) -> tuple[str, ...]:
    """The line for the report: '/home/me/train.py:41 in step: loss.backward()'."""
    if frame is None:
        return ()
    where = f"{frame.file}:{frame.line}"
    if frame.function and frame.function != "<module>":
        where += f" in {frame.function}"
    source = frame.source.strip()[:_MAX_SOURCE]
    if not source and where == short_place(frame):
        return ()  # the title already says it
    return (f"{where}: {source}" if source else where,)


def memory_share(evidence: Evidence) -> float | None:
    """The peak share of memory used; None when the peak or the limit is unknown."""
    most = max(evidence.peak_memory_bytes, evidence.last_memory_bytes)
    return most / evidence.memory_limit_bytes if evidence.memory_limit_bytes and most else None


def is_memory_nearly_full(evidence: Evidence) -> bool:
    share = memory_share(evidence)
    return share is not None and share > NEARLY_FULL


def memory_line(evidence: Evidence) -> tuple[str, ...]:
    """'peak memory 7.9 GiB of 8.0 GiB (cgroup /job)', and what others used of the same limit."""
    peak, used, limit = evidence.peak_memory_bytes, evidence.last_memory_bytes, evidence.memory_limit_bytes
    if not peak and not used:
        return ()
    # A sum over processes counts shared pages twice, so it can pass the limit; the kernel's own count cannot.
    most = min(peak or used, limit) if limit else peak or used
    text = f"peak memory {format_bytes(most)}"
    if limit:
        text += f" of {format_limit(limit, evidence.memory_limit_source)}"
    # Other processes matter only where the total came near the limit.
    if peak and used > 1.1 * peak and used > 0.5 * (limit or 0):
        text += f"; with all others, {format_bytes(min(used, limit) if limit else used)} were in use"
    return (text,)


def has_jumped(evidence: Evidence) -> bool:
    """Whether the kernel ended it for memory that it had not used up step by step."""
    return evidence.is_jump and bool(evidence.kernel_log or evidence.oom_kills_in_cgroup)


def growth_line(evidence: Evidence) -> tuple[str, ...]:
    """Which line of the user's code was filling memory, and how fast."""
    frame = evidence.growing_frame
    rate = evidence.memory_growth_bytes_per_s
    if frame is None:
        return ("its memory had not grown before: it asked for much at once",) if has_jumped(evidence) else ()
    speed = f" by {format_bytes(rate)}/s" if rate >= 1 else ""
    where = place_line(frame) or (short_place(frame),)
    return (f"it was growing{speed} in {where[0]}",)


def less_memory(evidence: Evidence) -> str:
    """What to do about host memory: at the line that grew, where it is known."""
    frame = evidence.growing_frame
    if frame is not None and has_jumped(evidence):
        return (
            f"host RAM, not GPU memory, rose in its last seconds at {short_place(frame)}: make what that step needs "
            "smaller (batch, sequence, array), or free it before the next"
        )
    if has_jumped(evidence):
        return (
            "this is host RAM, not GPU memory: one step needed much more than the others (a longer sequence, a "
            "larger array, a file loaded whole); make that smaller, or allow more memory"
        )
    if frame is None:
        return (
            "this is host RAM, not GPU memory: load less at once (fewer DataLoader workers, streamed or mapped data)"
        )
    return (
        f"host RAM, not GPU memory, grew at {short_place(frame)}: keep less there (free it, bound it, or write it to "
        "disk); a smaller batch does not stop a growth"
    )


def memory_lines(evidence: Evidence) -> tuple[str, ...]:
    return memory_line(evidence) + growth_line(evidence)


def ran_line(evidence: Evidence) -> tuple[str, ...]:
    """How long it ran and how much memory it used; part of every report."""
    ran = f"it ran for {format_duration(evidence.duration_s)}"
    return ("; ".join((ran, *memory_line(evidence))),)


_THROWN = re.compile(r"terminate called after throwing an instance of '([^']+)'")
_THROWN_BY_CLANG = re.compile(r"terminating due to uncaught exception of type (.+)")
_WHAT = re.compile(r"^\s*what\(\):\s*(.*)")


def cpp_exception(lines: Sequence[str]) -> str:
    """'std::out_of_range: vector::at ...', as the C++ runtime prints before it aborts; '' if it did not."""
    for at in range(len(lines) - 1, -1, -1):
        if by_clang := _THROWN_BY_CLANG.search(lines[at]):
            return by_clang[1].strip()
        if thrown := _THROWN.search(lines[at]):
            said = _WHAT.match(lines[at + 1]) if at + 1 < len(lines) else None
            return f"{thrown[1]}: {said[1].strip()}" if said and said[1].strip() else thrown[1]
    return ""
