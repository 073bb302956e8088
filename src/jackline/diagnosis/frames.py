"""Stacks as plain data, whatever their source (py-spy, faulthandler, /proc)."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, field
from typing import Any

_RESCUE = "/jackline/supervisor/child/inside/"
SHELL = "bash"  # in place of the function, for a line of a shell script


@dataclass(frozen=True, slots=True)
class Frame:
    """One line of a stack. `source` is the line's text, if it could be read. It is needed because C and Rust
    callables have no Python frame, so only the text of the calling line names them."""

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
        """Whether its line only sleeps. That can hold while its thread counts as running: on a busy machine, a thread
        whose sleep is over stays at that line until a core is free."""
        return re.match(r"(await\s+)?[\w.]*\bsleep\(", self.source.strip()) is not None


@dataclass(frozen=True, slots=True)
class ThreadStack:
    """The stack of one thread, innermost frame first."""

    thread_id: int
    name: str
    frames: tuple[Frame, ...]
    is_main: bool = False
    wait: str = ""  # text of a machine.readings.Wait, e.g. 'lock', 'network 10.0.0.3:443'
    awaiting: Frame | None = None  # of an event loop: the line at which its task awaits, which no frame shows
    is_endless: bool = False  # its wait has no time limit
    awaits: str = ""  # what it waits for inside Python, read from inside: "the end of thread 'loader'"
    until_s: float | None = None  # when its wait ends by itself, on the clock of `time.monotonic`


@dataclass(frozen=True, slots=True)
class ProcessStack:
    """All threads of one process; `method` is how it was read, `problem` why it could not be read."""

    pid: int
    command: str
    threads: tuple[ThreadStack, ...] = field(default_factory=tuple)
    method: str = ""
    problem: str = ""
    tasks: tuple[str, ...] = ()  # "task 'Task-2' awaits a future at train.py:9", read from inside
    role: str = ""  # 'DataLoader worker 1', 'rank 3', read from inside

    @property
    def main(self) -> ThreadStack | None:
        return next((thread for thread in self.threads if thread.is_main), self.threads[0] if self.threads else None)


def to_json(stack: ProcessStack) -> dict[str, Any]:
    return asdict(stack)


def from_json(value: dict[str, Any]) -> ProcessStack:
    threads = tuple(_thread_from_json(thread) for thread in value["threads"])
    return ProcessStack(**{**value, "threads": threads, "tasks": tuple(value.get("tasks") or ())})


def _thread_from_json(value: dict[str, Any]) -> ThreadStack:
    awaiting = value.get("awaiting")
    frames = tuple(Frame(**frame) for frame in value["frames"])
    return ThreadStack(**{**value, "frames": frames, "awaiting": Frame(**awaiting) if awaiting else None})


def innermost_user_frame(thread: ThreadStack | None) -> Frame | None:
    """The thread's innermost frame in the user's own code; its innermost frame when none is the user's."""
    if thread is None or not thread.frames:
        return None
    if thread.awaiting is not None:
        return thread.awaiting
    frames = _outside_of_rescue(thread.frames)
    own = [frame for frame in frames if frame.is_user]
    # Libraries run code from strings too (dataclasses, namedtuples); it is the user's only with `python -c`.
    return next((frame for frame in own if frame.file != "<string>"), own[0] if own else next(iter(frames), None))


def _outside_of_rescue(frames: tuple[Frame, ...]) -> tuple[Frame, ...]:
    """The frames of the program: Jackline's rescue may run in its main thread when it ends."""
    last = max((at for at, frame in enumerate(frames) if _RESCUE in frame.file), default=-1)
    return frames[last + 1 :]
