"""A disk that fails, dies, stops or remembers, at any one call. A fault reads as a sentence and verifies it fired.

FaultyDisk(fail_at("sync_folder", nth=2, with_errno=EIO))
FaultyDisk(kill_at(17, "after"))          # the 17th call of a save, whichever it is
"""

from __future__ import annotations

import errno
import json
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from jackline.checkpoint.writer.disk import Disk

CALLS = (
    "make_folder",
    "create",
    "reserve",
    "write",
    "truncate",
    "sync",
    "close",
    "sync_folder",
    "rename",
    "delete_folder",
)


@dataclass(frozen=True)
class Fault:
    """`call` None: any call. `nth` counts from 1. `goes_on`: every later one too."""

    action: Literal["fail", "kill", "stop", "none"]
    call: str | None
    nth: int
    when: Literal["before", "after"] = "before"
    with_errno: int = 0
    goes_on: bool = False
    fired: str = ""

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def fail_at(call: str | None, *, nth: int = 1, with_errno: int = errno.EIO, goes_on: bool = False) -> Fault:
    """The call fails with an OSError instead of happening."""
    return Fault("fail", call, nth, "before", with_errno, goes_on)


def fail_after(call: str | None, *, nth: int = 1, with_errno: int = errno.EIO) -> Fault:
    """The call happens and reports an error all the same."""
    return Fault("fail", call, nth, "after", with_errno)


def kill_at(nth: int, when: Literal["before", "after"], *, call: str | None = None, fired: str = "") -> Fault:
    """SIGKILL to the process itself, around its nth call."""
    return Fault("kill", call, nth, when, fired=fired)


def stop_at(nth: int, *, call: str | None = None, fired: str = "") -> Fault:
    """SIGSTOP to the process itself: it hangs, holding its locks."""
    return Fault("stop", call, nth, "before", fired=fired)


NO_FAULT = Fault("none", None, 1 << 60)


class FaultyDisk(Disk):
    """The real disk with one fault. `num_fired` says whether it struck; `num_calls` how many calls there were."""

    def __init__(self, fault: Fault = NO_FAULT) -> None:
        self.fault = fault
        self.num_calls = 0
        self.num_fired = 0
        self.calls: list[str] = []
        self._lock = threading.Lock()

    def _around(self, name: str, call: Callable[[], Any]) -> Any:
        with self._lock:
            self.calls.append(name)
            is_meant = self.fault.call in (None, name)
            if is_meant:
                self.num_calls += 1
            strikes = is_meant and (
                self.num_calls == self.fault.nth or (self.fault.goes_on and self.num_calls > self.fault.nth)
            )
        if strikes and self.fault.when == "before":
            self._strike()
        result = call()
        if strikes and self.fault.when == "after":
            self._strike()
        return result

    def _strike(self) -> None:
        if self.fault.action in ("kill", "stop") and self.fault.fired and os.path.exists(self.fault.fired):
            return  # once, however often the process is started again
        self.num_fired += 1
        if self.fault.fired:
            with open(self.fault.fired, "a") as file:
                file.write(f"{os.getpid()} {self.calls[-1]}\n")
        if self.fault.action == "fail":
            raise OSError(self.fault.with_errno, os.strerror(self.fault.with_errno))
        if self.fault.action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.fault.action == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)

    def make_folder(self, path: Path) -> None:
        self._around("make_folder", lambda: super(FaultyDisk, self).make_folder(path))

    def create(self, path: Path, *, is_direct: bool = False) -> int:
        return self._around("create", lambda: super(FaultyDisk, self).create(path, is_direct=is_direct))

    def reserve(self, fd: int, size_bytes: int) -> None:
        self._around("reserve", lambda: super(FaultyDisk, self).reserve(fd, size_bytes))

    def write(self, fd: int, data: memoryview, offset: int) -> int:
        return self._around("write", lambda: super(FaultyDisk, self).write(fd, data, offset))

    def truncate(self, fd: int, size_bytes: int) -> None:
        self._around("truncate", lambda: super(FaultyDisk, self).truncate(fd, size_bytes))

    def sync(self, fd: int) -> None:
        self._around("sync", lambda: super(FaultyDisk, self).sync(fd))

    def close(self, fd: int) -> None:
        self._around("close", lambda: super(FaultyDisk, self).close(fd))

    def sync_folder(self, path: Path) -> None:
        self._around("sync_folder", lambda: super(FaultyDisk, self).sync_folder(path))

    def rename(self, old: Path, new: Path) -> None:
        self._around("rename", lambda: super(FaultyDisk, self).rename(old, new))

    def delete_folder(self, path: Path) -> None:
        self._around("delete_folder", lambda: super(FaultyDisk, self).delete_folder(path))
