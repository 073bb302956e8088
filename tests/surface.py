"""A command on a pipe or on a terminal, with every print timed."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import time
from pathlib import Path

from tests.deadline import HANGS_S


class Viewer:
    """The command as a person types it, on a pipe or on a terminal, with every print timed."""

    def __init__(self, command: list[str], cwd: Path, env: dict[str, str], surface: str, stdin: str) -> None:
        self.stdout, self.stderr = bytearray(), bytearray()
        self.heard_at_s: list[float] = []
        self.stdout_at_s: list[float] = []
        keyboard, self._silent_writer = _stdin(stdin)
        out: int = subprocess.PIPE
        err: int = subprocess.PIPE
        slave = None
        if surface == "pty":
            master, slave = pty.openpty()
            out = err = slave
        try:
            self.process = subprocess.Popen(
                command, cwd=cwd, env=env, stdin=keyboard, stdout=out, stderr=err, start_new_session=True
            )
        finally:
            for fd in (keyboard, slave):
                if fd is not None and fd >= 0:
                    os.close(fd)
        if surface == "pty":
            self._sinks = {master: self.stdout}
        else:
            assert self.process.stdout is not None and self.process.stderr is not None
            self._sinks = {self.process.stdout.fileno(): self.stdout, self.process.stderr.fileno(): self.stderr}
        self._fds = list(self._sinks) if surface == "pty" else []

    def listen(self, timeout_s: float) -> None:
        """Take what is printed within `timeout_s`."""
        if not self._sinks:
            time.sleep(timeout_s)
            return
        for fd in select.select(list(self._sinks), [], [], timeout_s)[0]:
            try:
                data = os.read(fd, 1 << 20)
            except OSError:  # a terminal whose other side is closed
                data = b""
            if not data:
                del self._sinks[fd]
                continue
            sink = self._sinks[fd]
            if len(sink) < 300 << 20:
                sink += data
            self.heard_at_s.append(time.monotonic())
            if sink is self.stdout:
                self.stdout_at_s.append(time.monotonic())

    def drain(self) -> None:
        """After the end: whatever is still in the pipes."""
        deadline_s = time.monotonic() + HANGS_S
        while self._sinks and time.monotonic() < deadline_s:
            before = len(self.stdout) + len(self.stderr)
            self.listen(0.2)
            if self.process.poll() is not None and before == len(self.stdout) + len(self.stderr):
                break

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for file in (self.process.stdout, self.process.stderr):
            if file is not None:
                file.close()
        for fd in (*self._fds, self._silent_writer):
            if fd is not None:
                os.close(fd)


def _stdin(kind: str) -> tuple[int, int | None]:
    """(what the command gets, what must be kept open). 'silent' is a pipe nobody writes to."""
    if kind == "silent":
        reader, writer = os.pipe()
        return reader, writer
    if kind.startswith("lines:"):
        reader, writer = os.pipe()
        os.write(writer, b"".join(b"item %d\n" % number for number in range(int(kind.removeprefix("lines:")))))
        os.close(writer)
        return reader, None
    return subprocess.DEVNULL, None
