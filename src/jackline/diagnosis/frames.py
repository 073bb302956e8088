"""Stacks as plain data, wherever they came from (py-spy, faulthandler, /proc)."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Frame:
    """One line of a stack. `source` is the line's text when it could be read, because C and Rust callables have
    no Python frame: the calling line's text is what names them."""

    function: str = ""
    file: str = ""
    line: int = 0
    source: str = ""
    is_user: bool = False  # not the standard library, not site-packages, not Jackline

    @property
    def place(self) -> str:
        return f"{self.file}:{self.line}"

    @property
    def sleeps(self) -> bool:
        """Its line does nothing but wait, also while its thread counts as running: on a crowded machine one that has
        slept enough stands there until a core is free."""
        return re.match(r"(await\s+)?[\w.]*\bsleep\(", self.source.strip()) is not None


@dataclass(frozen=True)
class ThreadStack:
    """Innermost frame first."""

    thread_id: int
    name: str
    frames: tuple[Frame, ...]
    is_main: bool = False
    wait: str = ""  # words of machine.readings.Wait, e.g. 'lock', 'network 10.0.0.3:443'


@dataclass(frozen=True)
class ProcessStack:
    """All threads of one process; `method` says how it was read, `problem` why it could not be."""

    pid: int
    command: str
    threads: tuple[ThreadStack, ...] = field(default_factory=tuple)
    method: str = ""
    problem: str = ""

    @property
    def main(self) -> ThreadStack | None:
        return next((thread for thread in self.threads if thread.is_main), self.threads[0] if self.threads else None)


def to_json(stack: ProcessStack) -> dict[str, Any]:
    return asdict(stack)


def from_json(value: dict[str, Any]) -> ProcessStack:
    threads = tuple(
        ThreadStack(**{**thread, "frames": tuple(Frame(**frame) for frame in thread["frames"])})
        for thread in value["threads"]
    )
    return ProcessStack(**{**value, "threads": threads})


def innermost_user_frame(thread: ThreadStack | None) -> Frame | None:
    """Where in the person's own code the thread is; its innermost frame when none is theirs."""
    if thread is None or not thread.frames:
        return None
    return next((frame for frame in thread.frames if frame.is_user), thread.frames[0])
