"""Out-of-memory kills in the kernel log.

Owns /dev/kmsg and `dmesg`. In a container the kernel reports pids of the host, so a pid that does not match ours
means nothing there; the counters of `memory` are reliable.
"""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Iterable, Iterator

from jackline.machine.readings import KernelKill

_KILLED = re.compile(r"(?P<cgroup>Memory cgroup out of memory|Out of memory[^:]*): Kill(?:ed)? process (?P<pid>\d+)")
_SUMMARY = re.compile(r"oom-kill:constraint=(?P<constraint>\w+),.*?\bpid=(?P<pid>\d+)")
_RECORD = re.compile(rb"^\d+,\d+,(\d+),[^;]*;([^\n]*)")
_DMESG_LINE = re.compile(r"^(?:<\d+>)?\[\s*(\d+\.\d+)\]\s?(.*)")
# NTP does not adjust the log's clock as it does ours; over weeks they drift apart by seconds.
_SLACK_S = 5.0
_DMESG_TIMEOUT_S = 2.0
_MOST_RECORDS = 100_000


def read_kernel_kills(since_s: float) -> tuple[KernelKill, ...]:
    """Kills logged since `since_s` (a `time.time()`), oldest first; () when we may not read the log."""
    since_boot_s = since_s - (time.time() - time.monotonic()) - _SLACK_S
    lines = _from_device()
    if lines is None:
        lines = _from_dmesg()
    return find_kills(text for at_s, text in lines or () if at_s >= since_boot_s)


def can_read_kernel_log() -> bool:
    return _from_device(most=1) is not None or _from_dmesg() is not None


def find_kills(lines: Iterable[str]) -> tuple[KernelKill, ...]:
    """One entry per killed process. The kernel writes a summary and a line 'Killed process', which says more."""
    kills: dict[int, KernelKill] = {}
    for line in lines:
        text = line.strip()
        if match := _KILLED.search(text):
            pid = int(match["pid"])
            is_cgroup = match["cgroup"].startswith("Memory cgroup") or (pid in kills and kills[pid].is_cgroup)
            kills[pid] = KernelKill(pid, text, is_cgroup)
        elif match := _SUMMARY.search(text):
            pid = int(match["pid"])
            kills.setdefault(pid, KernelKill(pid, text, match["constraint"] == "CONSTRAINT_MEMCG"))
    return tuple(kills.values())


def _from_device(most: int = _MOST_RECORDS) -> list[tuple[float, str]] | None:
    try:
        fd = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return list(_records(fd, most))
    except PermissionError:
        return None
    finally:
        os.close(fd)


def _records(fd: int, most: int) -> Iterator[tuple[float, str]]:
    for _ in range(most):
        try:
            record = os.read(fd, 8192)
        except BlockingIOError:
            return
        except BrokenPipeError:  # overwritten while we read: the next read continues after the gap
            continue
        except PermissionError:
            raise
        except OSError:
            return
        if match := _RECORD.match(record):
            yield int(match[1]) / 1e6, match[2].decode("utf-8", "replace")


def _from_dmesg() -> list[tuple[float, str]] | None:
    try:
        done = subprocess.run(
            ["dmesg", "-r"], capture_output=True, timeout=_DMESG_TIMEOUT_S, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.SubprocessError):
        return None
    if done.returncode != 0:
        return None
    matches = map(_DMESG_LINE.match, done.stdout.decode("utf-8", "replace").splitlines())
    return [(float(match[1]), match[2]) for match in matches if match]
