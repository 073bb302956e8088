"""The two messages at a start: the request from the command line to a supervisor, and its answer.

The request is passed in memory, not on a command line, which every user of the machine may read: hooks and mirror
URLs can hold passwords.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from typing import Any

from jackline.errors import EXIT_FAILED
from jackline.immutable import immutable
from jackline.supervisor.options import SuperviseOptions


@immutable
class StartRequest:
    """`reporter` and `lock` are descriptors that the supervisor inherits; `lock` only for a run just created."""

    reporter: int
    options: SuperviseOptions
    adopts: bool = False
    lock: int | None = None

    def to_memory(self) -> int:
        """A descriptor to read it from; the caller closes it."""
        fd = os.memfd_create("jackline-start", 0)
        os.write(fd, json.dumps({**asdict(self), "options": self.options.to_json()}).encode())
        os.lseek(fd, 0, os.SEEK_SET)
        return fd

    @staticmethod
    def from_memory(fd: int) -> StartRequest:
        """Closes `fd`. The supervisor's own children do not inherit its descriptors."""
        with open(fd, "rb") as file:
            value = json.load(file)
        request = StartRequest(**{**value, "options": SuperviseOptions.from_json(value["options"])})
        for inherited in (request.reporter, request.lock):
            if inherited is not None:
                os.set_inheritable(inherited, False)
        return request


@immutable
class StartAnswer:
    """An empty `problem` means that the command runs. A message with `said` is a line to print before the answer."""

    problem: str = ""
    hint: str | None = None
    exit_code: int = EXIT_FAILED
    detail: tuple[str, ...] = ()
    said: str | None = None

    def to_line(self) -> bytes:
        return json.dumps(asdict(self)).encode() + b"\n"

    @staticmethod
    def from_line(line: bytes) -> StartAnswer:
        """An incomplete answer means that the supervisor exited before it could say why."""
        try:
            value: dict[str, Any] = json.loads(line)
            said = None if value["said"] is None else str(value["said"])
            detail = tuple(str(row) for row in value["detail"])
            return StartAnswer(str(value["problem"]), value["hint"], int(value["exit_code"]), detail, said)
        except (ValueError, TypeError, KeyError):
            return StartAnswer("the supervisor did not start", "see supervisor.log in the run directory")
