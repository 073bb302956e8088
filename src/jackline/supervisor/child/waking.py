"""Lets the supervisor sleep until something happens: the command prints, a process ends, or a signal arrives.

Owns the kernel's descriptors for that (inotify, pidfd, the signal pipe). Where the kernel has none, `Waker` sleeps as
long as it is told and `EndWatch` says that it does not know. Does not own how long to sleep (attempt/watching.py) or
how a process ended (process.py).
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from jackline.rundir.process_id import ProcessId, is_alive

_IN_MODIFY = 0x2
_EVENTS_BYTES = 65536


class EndWatch:
    """Whether processes are still there: one call for all of them, where reading /proc and wait.json takes 150 us."""

    def __init__(self, processes: Iterable[ProcessId]) -> None:
        self.fds: list[int] = []
        self._poll = select.poll()
        self._is_known = True
        for process in processes:
            try:
                fd = os.pidfd_open(process.pid)
            except (OSError, AttributeError):  # gone already, or a kernel before 5.3
                self._is_known = False
                continue
            self.fds.append(fd)
            self._poll.register(fd, select.POLLIN)
            # Checked after the call: before it, the number may have passed to another process.
            self._is_known = self._is_known and is_alive(process)

    def are_all_there(self) -> bool:
        """False where one has ended, and where the kernel does not tell."""
        return self._is_known and not self._poll.poll(0)

    def __del__(self) -> None:
        for fd in self.fds:
            with contextlib.suppress(OSError):
                os.close(fd)


class Waker:
    """Sleeps in place of `time.sleep`. A command that is silent is looked at once a second instead of five times, and
    its next line is still read at once."""

    def __init__(self, files: Sequence[Path], ends: EndWatch) -> None:
        self._ends = ends  # kept, because it owns the descriptors
        self._poll, self._urgent = select.poll(), select.poll()
        self._fds: list[int] = []
        self._signals = -1
        self._is_whole = False
        with contextlib.suppress(OSError, AttributeError, ValueError):
            self._events = self._watch(files)
            self._signals = self._hear_signals()
            for fd in (self._events, self._signals, *ends.fds):
                self._poll.register(fd, select.POLLIN)
            for fd in (self._signals, *ends.fds):
                self._urgent.register(fd, select.POLLIN)
            self._is_whole = True

    def sleep(self, least_s: float, most_s: float) -> None:
        """Sleep `least_s`, but only until a process ends or a signal arrives; then also until something is printed.
        At most `most_s` in all."""
        left_s = most_s - max(0.0, least_s)
        if self._rest(max(0.0, least_s)) or not self._is_whole or left_s <= 0.0:
            return
        if self._poll.poll(1000.0 * left_s):
            # Emptied before the next look at the files, so that what is written after this wakes us again.
            self._empty(self._events, self._signals)

    def _rest(self, least_s: float) -> bool:
        """Sleep that long; True when a process ended or a signal arrived meanwhile. An end that is known already does
        not count: it would end every sleep at once."""
        if not self._is_whole or not self._ends.are_all_there():
            time.sleep(least_s)
            return False
        is_woken = bool(self._urgent.poll(1000.0 * least_s))
        if is_woken:
            self._empty(self._signals)
        return is_woken

    def _empty(self, *fds: int) -> None:
        for fd in fds:
            with contextlib.suppress(OSError):
                os.read(fd, _EVENTS_BYTES)

    def close(self) -> None:
        if self._signals >= 0:
            with contextlib.suppress(ValueError):
                signal.set_wakeup_fd(-1)
        for fd in self._fds:
            with contextlib.suppress(OSError):
                os.close(fd)
        self._fds, self._signals, self._is_whole = [], -1, False

    def _watch(self, files: Sequence[Path]) -> int:
        import ctypes  # the supervisor has loaded it; others need not

        library = ctypes.CDLL(None, use_errno=True)
        fd: int = library.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if fd < 0:
            raise OSError(ctypes.get_errno(), "no inotify")
        self._fds.append(fd)
        for path in files:
            if library.inotify_add_watch(fd, os.fsencode(path), ctypes.c_uint32(_IN_MODIFY)) < 0:
                raise OSError(ctypes.get_errno(), f"{path} cannot be watched")
        return fd

    def _hear_signals(self) -> int:
        """Python runs a handler and then sleeps on; a byte in this pipe ends the sleep."""
        reader, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._fds += [reader, writer]
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        return reader
