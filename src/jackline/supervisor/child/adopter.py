"""Stands in for the keeper of a process that Jackline did not start: copies its output and notices its end.

Owns start.json and wait.json of such an attempt, and raw.out, into which it copies what the process appends to the
files that are its standard output and error. It only reads: it sends no signal and changes no file of the process.
Only a parent can wait for it. Its exit status is read from /proc while it is a zombie, and after that from the pidfd
(Linux 6.15 and newer); where both fail, wait.json has none. It runs as a plain file (`python -I -S adopter.py FD`),
with the standard library only, and outlives the supervisor like a keeper.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import signal
import stat
import struct
import sys
import time
from typing import Any

EARLIER_BYTES = 64 << 10  # of what it had printed before we came
BLOCK_BYTES = 1 << 20
TICK_S = 0.1
REAPED_WITHIN_S = 2.0  # by its parent: then the pidfd tells
GET_INFO = 0xC040FF0B  # PIDFD_GET_INFO, _IOWR(0xFF, 11, 64 bytes)
HAS_EXIT = 1 << 3
IGNORED = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGQUIT, signal.SIGUSR1, signal.SIGTSTP)


def main() -> None:
    spec = json.loads(os.fdopen(int(sys.argv[1]), "rb").read())
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    pid = spec["child"]["pid"]
    end = open_end(pid)
    if start_ticks(pid) != spec["child"]["start_ticks"]:
        return  # it has ended, and its number may belong to another process
    raw = os.open(spec["raw_out"], os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    sources, is_readable = open_sources(pid), may_read(pid)
    me = {**spec["child"], "pid": os.getpid(), "start_ticks": start_ticks(os.getpid())}
    start = {"child": spec["child"], "keeper": me, "started_at_s": spec["started_at_s"], "is_adopted": True}
    write_json(spec["start_file"], start)
    while not has_ended(end, spec["child"]):
        copy(sources, raw)
    status, ended_at_s = exit_status(end, spec["child"], is_readable=is_readable), time.time()
    copy(sources, raw)
    write_json(spec["wait_file"], {**words_of(status), "ended_at_s": ended_at_s, "is_settled": True})


def may_read(pid: int) -> bool:
    """Whether the kernel shows us what only its own user may see: in other /proc/PID/stat the exit status reads 0."""
    try:
        return bool(os.listdir(f"/proc/{pid}/fd"))  # noqa: PTH208
    except OSError:
        return False


def exit_status(end: int, child: dict[str, Any], *, is_readable: bool) -> int | None:
    """As the kernel would report it to the parent; None where it tells nobody else."""
    until_s = time.monotonic() + REAPED_WITHIN_S
    while True:
        status = zombie_status(child) if is_readable else None
        status = status_of_reaped(end) if status is None and end >= 0 else status
        if status is not None or time.monotonic() > until_s or end < 0:
            return status
        time.sleep(TICK_S)


def zombie_status(child: dict[str, Any]) -> int | None:
    """The last field of /proc/PID/stat, which a process of the same user may read."""
    fields = stat_fields(child["pid"])
    is_it = len(fields) > 49 and fields[0] == b"Z" and int(fields[19]) == child["start_ticks"]
    return int(fields[49]) if is_it else None


def status_of_reaped(end: int) -> int | None:
    answer = bytearray(struct.pack("=Q", HAS_EXIT) + bytes(56))
    try:
        fcntl.ioctl(end, GET_INFO, answer)
    except OSError:
        return None
    (mask,) = struct.unpack_from("=Q", answer)
    return int(struct.unpack_from("=i", answer, 60)[0]) if mask & HAS_EXIT else None


def words_of(status: int | None) -> dict[str, int | None]:
    if status is None:
        return {}
    if os.WIFSIGNALED(status):
        return {"status": status, "signal": os.WTERMSIG(status)}
    return {"status": status, "exit_code": os.waitstatus_to_exitcode(status)}


def open_end(pid: int) -> int:
    """A descriptor that becomes readable when the process ends; -1 where the kernel has none."""
    try:
        return os.pidfd_open(pid)
    except OSError:
        return -1


def has_ended(end: int, child: dict[str, Any]) -> bool:
    """Waits a moment for it."""
    if end < 0:
        time.sleep(TICK_S)
        return bool(start_ticks(child["pid"]) != child["start_ticks"])
    return bool(select.select([end], [], [], TICK_S)[0])


def start_ticks(pid: int) -> int | None:
    """Field 22 of /proc/PID/stat; None for a process that does not exist or is a zombie."""
    fields = stat_fields(pid)
    return None if not fields or fields[0] in (b"Z", b"X") else int(fields[19])


def stat_fields(pid: int) -> list[bytes]:
    """/proc/PID/stat from its third field on; empty for a process that does not exist."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            data = file.read()
    except OSError:
        return []
    return data[data.rfind(b")") + 2 :].split()


class Source:
    """One file that the process writes its output to."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        size = os.fstat(fd).st_size
        self.at = max(0, size - EARLIER_BYTES)
        if self.at:  # begin with a whole line
            block = os.pread(fd, EARLIER_BYTES, self.at)
            self.at += block.find(b"\n") + 1

    def read(self) -> bytes:
        if os.fstat(self.fd).st_size < self.at:
            self.at = 0  # it was truncated
        block = os.pread(self.fd, BLOCK_BYTES, self.at)
        self.at += len(block)
        return block


def open_sources(pid: int) -> list[Source]:
    """The regular files that are its descriptors 1 and 2, each once."""
    found, seen = [], set()
    for number in (1, 2):
        with contextlib.suppress(OSError):
            path = f"/proc/{pid}/fd/{number}"
            status = os.stat(path)  # noqa: PTH116
            if stat.S_ISREG(status.st_mode) and (status.st_dev, status.st_ino) not in seen:
                seen.add((status.st_dev, status.st_ino))
                found.append(Source(os.open(path, os.O_RDONLY | os.O_CLOEXEC)))
    return found


def copy(sources: list[Source], raw: int) -> None:
    for source in sources:
        with contextlib.suppress(OSError):  # a full disk loses the copy; the process has its own file
            while block := source.read():
                os.write(raw, block)


def write_json(path: str, value: dict[str, Any]) -> None:
    """Whole or absent, also after a power cut."""
    with open(path + ".tmp", "w") as file:
        json.dump(value, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(path + ".tmp", path)


if __name__ == "__main__":
    main()
