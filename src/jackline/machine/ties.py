"""What ties processes together: the ends of pipes and local sockets, and file locks with their holders.

Owns /proc/PID/fd for pipes, the kernel's list of local sockets, and /proc/locks. Reads; decides nothing.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Collection, Iterator
from dataclasses import field

from jackline.immutable import immutable
from jackline.machine.procfs import list_numbers, read_bytes, read_link

_SOCK_DIAG, _BY_FAMILY, _REQUEST_DUMP = 4, 20, 0x301
_ERROR, _DONE = 2, 3
_SHOW_PEER, _PEER = 0x4, 2
_MOST_FDS = 4096
_DEADLINE_S = 0.5


@immutable
class FileLock:
    """A line of /proc/locks. A waiter has the number of the lock that it waits for."""

    number: int
    pid: int
    inode: str  # 'major:minor:inode'
    is_waiting: bool


@immutable
class Ties:
    """`readers` and `writers` of a pipe or local socket, by inode ('pipe:[5]'); `peers` of a local socket."""

    readers: dict[str, frozenset[int]] = field(default_factory=dict)
    writers: dict[str, frozenset[int]] = field(default_factory=dict)
    peers: dict[str, str] = field(default_factory=dict)
    locks: tuple[FileLock, ...] = ()


def read_ties(inodes: Collection[str]) -> Ties:
    """The ties of these pipes and sockets ('pipe:[5]', 'socket:[6]') over all processes that we may look into."""
    sockets = [name for name in inodes if name.startswith("socket:")]
    peers = _local_peers() if sockets else {}
    wanted = {*inodes, *(peers[name] for name in sockets if name in peers)}
    readers: dict[str, set[int]] = {}
    writers: dict[str, set[int]] = {}
    for pid in list_numbers("/proc") if wanted else ():
        for fd in list_numbers(f"/proc/{pid}/fd")[:_MOST_FDS]:
            link = read_link(f"/proc/{pid}/fd/{fd}") or ""
            if link in wanted:
                mode = _open_mode(pid, fd)
                if mode != os.O_WRONLY:
                    readers.setdefault(link, set()).add(pid)
                if mode != os.O_RDONLY:
                    writers.setdefault(link, set()).add(pid)
    return Ties(
        {name: frozenset(pids) for name, pids in readers.items()},
        {name: frozenset(pids) for name, pids in writers.items()},
        peers,
        tuple(read_file_locks()),
    )


def _open_mode(pid: int, fd: int) -> int:
    for line in (read_bytes(f"/proc/{pid}/fdinfo/{fd}") or b"").split(b"\n"):
        if line.startswith(b"flags:"):
            return int(line.split()[1], 8) & os.O_ACCMODE
    return os.O_RDWR


def read_file_locks(text: bytes | None = None) -> list[FileLock]:
    """flock and fcntl locks of the machine: '1: POSIX  ADVISORY  WRITE 708 08:01:1234 0 EOF', '1: -> FLOCK ...'."""
    found = []
    for line in (
        ((read_bytes("/proc/locks") or b"") if text is None else text).decode("ascii", "replace").splitlines()
    ):
        words = line.split()
        is_waiting = len(words) > 1 and words[1] == "->"
        words = [word for word in words if word != "->"]
        if len(words) >= 6 and words[0].rstrip(":").isdigit() and words[4].lstrip("-").isdigit():
            found.append(FileLock(int(words[0].rstrip(":")), int(words[4]), words[5], is_waiting))
    return found


def find_holders(path: str) -> list[int]:
    """The processes that hold a flock or fcntl lock of a file and are seen from here, which those of another
    container or machine are not. Raises OSError where there is no such file."""
    found = os.stat(path)  # noqa: PTH116
    number = f":{found.st_ino}"
    # The same number may belong to a file of another disk, and in an overlay the kernel names another device.
    alike = [lock for lock in read_file_locks() if not lock.is_waiting and lock.inode.endswith(number)]
    exact = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}{number}"
    holders = {lock.pid for lock in alike if _holds(lock.pid, found, is_exact=lock.inode == exact)}
    if alike and not holders:  # whoever took it may have ended, and left it to a child
        holders = {pid for pid in list_numbers("/proc") if _holds(pid, found, is_exact=False)}
    return sorted(holders)


def _holds(pid: int, wanted: os.stat_result, *, is_exact: bool) -> bool:
    """Whether one of its descriptors has locked the file. Those of another user's process cannot be read: there the
    kernel's list is believed where it names the same device."""
    fds = list_numbers(f"/proc/{pid}/fd")
    if not fds:
        return is_exact and os.path.isdir(f"/proc/{pid}")  # noqa: PTH112
    held = (read_bytes(f"/proc/{pid}/fdinfo/{fd}") or b"" for fd in fds_of(pid, wanted))
    return any(b"\nlock:" in info for info in held)


def fds_of(pid: int, wanted: os.stat_result) -> Iterator[int]:
    """The descriptors by which a process has a file open, the newest first."""
    for fd in sorted(list_numbers(f"/proc/{pid}/fd"), reverse=True)[:_MOST_FDS]:
        with contextlib.suppress(OSError):
            held = os.stat(f"/proc/{pid}/fd/{fd}")  # noqa: PTH116
            if (held.st_dev, held.st_ino) == (wanted.st_dev, wanted.st_ino):
                yield fd


def _local_peers() -> dict[str, str]:
    """The other end of each connected local socket, by inode."""
    request = struct.pack("=BBHIIIII", socket.AF_UNIX, 0, 0, 0xFFFFFFFF, 0, _SHOW_PEER, 0, 0)
    header = struct.pack("=IHHII", 16 + len(request), _BY_FAMILY, _REQUEST_DUMP, 1, 0)
    found: dict[str, str] = {}
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _SOCK_DIAG) as channel:
            channel.settimeout(_DEADLINE_S)
            channel.send(header + request)
            while _take_peers(channel.recv(262144), found):
                pass
    except OSError:
        pass
    return found


def _take_peers(data: bytes, found: dict[str, str]) -> bool:
    """Add the sockets of one answer; False when it is the last."""
    at = 0
    while at + 16 <= len(data):
        length, kind = struct.unpack_from("=IH", data, at)
        if kind in (_DONE, _ERROR) or length < 16:
            return False
        (inode,) = struct.unpack_from("=I", data, at + 20)
        part = at + 32
        while part + 4 <= at + length:
            size, name = struct.unpack_from("=HH", data, part)
            if size < 4:
                break
            if name == _PEER and size >= 8:
                found[f"socket:[{inode}]"] = f"socket:[{struct.unpack_from('=I', data, part + 4)[0]}]"
            part += (size + 3) & ~3
        at += (length + 3) & ~3
    return True
