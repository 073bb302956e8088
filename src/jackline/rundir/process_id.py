"""The permanent identity of a process: pid, start time, boot and host.

Owns the rule for being alive: same host and boot, and pid and start time match. A state written in a file is never
trusted. Does not own any other reading of /proc (that is `machine`).
"""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any, Literal

from jackline.immutable import immutable

Liveness = Literal["alive", "gone", "elsewhere"]
_MAX_PID = 2**31


@immutable
class ProcessId:
    """One process on one boot of one host."""

    pid: int
    start_ticks: int
    host: str
    boot_id: str

    def to_json(self) -> dict[str, Any]:
        return {"pid": self.pid, "start_ticks": self.start_ticks, "host": self.host, "boot_id": self.boot_id}

    @staticmethod
    def from_json(value: Any) -> ProcessId | None:
        """None for an incomplete identity, because it may match another process."""
        if not isinstance(value, dict):
            return None
        pid, ticks, host, boot = (value.get(name) for name in ("pid", "start_ticks", "host", "boot_id"))
        if not (type(pid) is int and type(ticks) is int and isinstance(host, str) and isinstance(boot, str)):
            return None
        is_meant = 0 < pid < _MAX_PID and 0 <= ticks < 2**63 and host.isprintable() and boot.isprintable()
        return ProcessId(pid, ticks, host, boot) if is_meant else None


def identify(pid: int) -> ProcessId | None:
    """The identity of a process on this machine; None when it does not exist."""
    ticks = read_start_ticks(pid)
    return None if ticks is None else ProcessId(pid, ticks, host_name(), boot_id())


def liveness(process: ProcessId) -> Liveness:
    """Whether it is alive, gone, or on another machine. A zombie counts as gone, because it does nothing any more."""
    if process.host != host_name():
        return "elsewhere"
    if process.boot_id != boot_id():
        return "gone"
    return "alive" if read_start_ticks(process.pid) == process.start_ticks else "gone"


def is_alive(process: ProcessId | None) -> bool:
    return process is not None and liveness(process) == "alive"


def read_start_ticks(pid: int) -> int | None:
    """Field 22 of /proc/PID/stat; None for a process that does not exist or is a zombie."""
    fields = _stat_fields(pid)
    return None if not fields or fields[0] in (b"Z", b"X") else int(fields[19])


def read_state(pid: int) -> str:
    """The kernel's letter for a process: T when a signal stopped it, t when a tracer holds it; '' when it is gone."""
    fields = _stat_fields(pid)
    return fields[0].decode("ascii", "replace") if fields else ""


def _stat_fields(pid: int) -> list[bytes]:
    """/proc/PID/stat from the state on; empty for a process that does not exist."""
    try:
        fd = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)  # 5 us; Path.read_bytes takes 25
    except OSError:
        return []
    try:
        stat = os.read(fd, 4096)
    except OSError:
        return []
    finally:
        os.close(fd)
    # The command name may contain spaces and parentheses, so count from the last parenthesis.
    return stat[stat.rfind(b")") + 2 :].split()


@functools.cache
def boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return "unknown"


@functools.cache
def host_name() -> str:
    return os.environ.get("JACKLINE_HOST") or os.uname().nodename
