"""Stands in for the keeper of a process that Jackline did not start: copies its output and notices its end.

Owns start.json and wait.json of such an attempt, and raw.out, into which it copies what the process appends to the
files that are its standard output and error. It only reads: it sends no signal and changes no file of the process.
Only a parent learns an exit code, so wait.json has none. It runs as a plain file (`python -I -S adopter.py FD`), with
the standard library only, and outlives the supervisor like a keeper.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import stat
import sys
import time
from typing import Any

EARLIER_BYTES = 64 << 10  # of what it had printed before we came
BLOCK_BYTES = 1 << 20
TICK_S = 0.1
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
    sources = open_sources(pid)
    me = {**spec["child"], "pid": os.getpid(), "start_ticks": start_ticks(os.getpid())}
    start = {"child": spec["child"], "keeper": me, "started_at_s": spec["started_at_s"], "is_adopted": True}
    write_json(spec["start_file"], start)
    while not has_ended(end, spec["child"]):
        copy(sources, raw)
    copy(sources, raw)
    write_json(spec["wait_file"], {"ended_at_s": time.time(), "is_settled": True})


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
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            data = file.read()
    except OSError:
        return None
    fields = data[data.rfind(b")") + 2 :].split()
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


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
