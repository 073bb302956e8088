"""What a process is doing, in words, from its stack or its name. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from jackline.diagnosis.frames import Frame, ProcessStack, innermost_user_frame
from jackline.machine.readings import Wait


@dataclass(frozen=True)
class Doing:
    """`what` is a phrase ('importing torch'); `frame` the person's own line behind it."""

    what: str
    frame: Frame | None = None


def describe(stack: ProcessStack | None, wait: Wait, comm: str) -> Doing:
    return Doing(comm, innermost_user_frame(stack.main if stack else None))
