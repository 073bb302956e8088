"""Internet sockets: how many bytes a tree of processes transferred, and what one socket is connected to.

Owns NETLINK_SOCK_DIAG (the interface behind `ss`), with `ss` itself and /proc/net as fallbacks. Sees only the
sockets of our own network namespace.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
import subprocess
from collections.abc import Collection, Iterator

from jackline.machine.procfs import list_numbers, read_bytes, read_link
from jackline.machine.readings import Wait

_NETLINK_SOCK_DIAG = 4
_SOCK_DIAG_BY_FAMILY = 20
_NLM_F_REQUEST, _NLM_F_DUMP = 0x1, 0x300
_NLMSG_ERROR, _NLMSG_DONE = 2, 3
_INET_DIAG_INFO = 2
# All states except TIME_WAIT, LISTEN and NEW_SYN_RECV: those transfer no bytes, and a busy host has thousands.
_STATES = 0xFFF & ~(1 << 6) & ~(1 << 10) & ~(1 << 12)
_NLMSG = struct.Struct("=IHHII")
_DIAG_MSG_BYTES = 72
_INODE_AT = 68
_BYTES_ACKED_AT = 120  # offset in struct tcp_info; bytes_received follows

_FAR_AT, _QUEUE_AT = 24, 60  # the remote address, and the bytes not acknowledged, in struct inet_diag_msg
_MAPPED = bytes(10) + b"\xff\xff"
# Each repetition waits twice as long as the one before, from 0.2 s on: the fourth is sent 3 s after the data. What
# was lost by chance is acknowledged after one or two.
_TIMER_RETRANSMIT, _TIMER_PROBE, _REPEATS = 1, 4, 4
_MOST_SILENT = 8

_DEADLINE_S = 0.5
_SS_TIMEOUT_S = 2.0


def tree_sockets(pids: Collection[int]) -> dict[int, int] | None:
    """Bytes received plus bytes acknowledged by the remote end, for each TCP socket of these processes, by inode.

    Loopback counts too, because workers that communicate do work. None when the machine does not report it. Without
    sockets the kernel is not asked, which takes 0.4 ms.
    """
    return look_at_sockets(pids)[0]


def look_at_sockets(pids: Collection[int]) -> tuple[dict[int, int] | None, tuple[str, ...]]:
    """The same, and the addresses to which these processes have sent what nobody acknowledges for seconds."""
    inodes = _socket_inodes(pids)
    if not inodes:
        return {}, ()
    try:
        found = [one for one in _dump_tcp_bytes() if one[0] in inodes]
    except OSError:
        return _bytes_from_ss(inodes), ()
    silent = sorted({address for _, _, address in found if address})
    return {inode: moved for inode, moved, _ in found}, tuple(silent[:_MOST_SILENT])


def _socket_inodes(pids: Collection[int]) -> set[int]:
    # A set, because forked workers share sockets with their parent.
    inodes: set[int] = set()
    for pid in pids:
        for fd in list_numbers(f"/proc/{pid}/fd"):
            link = read_link(f"/proc/{pid}/fd/{fd}") or ""
            if link.startswith("socket:["):
                inodes.add(int(link[8:-1]))
    return inodes


def _dump_tcp_bytes() -> Iterator[tuple[int, int, str]]:
    """(inode, bytes received + acknowledged, the address that does not answer or '') for each connected TCP socket
    of this network namespace."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _NETLINK_SOCK_DIAG) as channel:
        channel.settimeout(_DEADLINE_S)
        for family in (socket.AF_INET, socket.AF_INET6):
            request = struct.pack("=BBBxI48x", family, socket.IPPROTO_TCP, 1 << (_INET_DIAG_INFO - 1), _STATES)
            header = _NLMSG.pack(
                _NLMSG.size + len(request), _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST | _NLM_F_DUMP, family, 0
            )
            channel.send(header + request)
            yield from _replies(channel)


def _replies(channel: socket.socket) -> Iterator[tuple[int, int, str]]:
    while True:
        data = channel.recv(262144)
        at = 0
        while at + _NLMSG.size <= len(data):
            length, kind, *_ = _NLMSG.unpack_from(data, at)
            if kind == _NLMSG_DONE:
                return
            if kind == _NLMSG_ERROR or length < _NLMSG.size:
                raise OSError("the kernel refused to list its sockets")
            yield from _socket_bytes(data[at + _NLMSG.size : at + length])
            at += (length + 3) & ~3


def _socket_bytes(message: bytes) -> Iterator[tuple[int, int, str]]:
    if len(message) < _DIAG_MSG_BYTES:
        return
    (inode,) = struct.unpack_from("=I", message, _INODE_AT)
    at = _DIAG_MSG_BYTES
    while at + 4 <= len(message):
        length, kind = struct.unpack_from("=HH", message, at)
        if length < 4:
            return
        if kind == _INET_DIAG_INFO and length >= 4 + _BYTES_ACKED_AT + 16:
            acked, received = struct.unpack_from("=QQ", message, at + 4 + _BYTES_ACKED_AT)
            yield inode, acked + received, _unanswered(message)
        at += (length + 3) & ~3


def _unanswered(message: bytes) -> str:
    """The remote address, if what was sent there has been repeated again and again without an acknowledgement, or
    waits to be sent because no route leads there any more."""
    family, _state, timer, repeats = message[:4]
    (num_waiting,) = struct.unpack_from("=I", message, _QUEUE_AT)
    is_stopped = timer == _TIMER_PROBE and num_waiting > 0
    if not is_stopped and (timer != _TIMER_RETRANSMIT or repeats < _REPEATS):
        return ""
    raw = message[_FAR_AT : _FAR_AT + (4 if family == socket.AF_INET else 16)]
    if raw[:12] == _MAPPED:
        family, raw = socket.AF_INET, raw[12:]
    address = socket.inet_ntop(family, raw)
    return "" if is_stopped and _has_route(family, address) else address


def _has_route(family: int, address: str) -> bool:
    """Asks the kernel's table; nothing is sent."""
    with socket.socket(family, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as channel:
        try:
            channel.connect((address, 9))
        except OSError as error:
            return error.errno not in (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENETDOWN)
    return True


def _bytes_from_ss(inodes: Collection[int]) -> dict[int, int] | None:
    """Fallback where raw netlink diagnosis is not available, but the distribution's `ss` works."""
    try:
        done = subprocess.run(
            ["ss", "-tineH"], capture_output=True, text=True, timeout=_SS_TIMEOUT_S, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return parse_ss(done.stdout, inodes) if done.returncode == 0 else None


def parse_ss(text: str, inodes: Collection[int]) -> dict[int, int]:
    """The output of `ss`: per socket a line with addresses and 'ino:N', then an indented one with counters."""
    found: dict[int, int] = {}
    inode = 0
    for line in text.splitlines():
        for word in line.split():
            name, _, number = word.partition(":")
            if name == "ino":
                inode = int(number) if number.isdigit() else 0
            elif inode in inodes and name in ("bytes_acked", "bytes_received") and number.isdigit():
                found[inode] = found.get(inode, 0) + int(number)
    return found


def describe_socket(pid: int, fd: int) -> Wait:
    """A socket as a wait: internet with the remote address, or local."""
    try:
        # Read the family of another process's socket from the socket file system itself: 3 us and no scan.
        protocol = (
            os.getxattr(f"/proc/{pid}/fd/{fd}", "system.sockprotoname").rstrip(b"\0").decode("ascii", "replace")
        )
    except OSError:
        protocol = ""
    if protocol.startswith("UNIX"):
        return Wait("local_socket", "local socket", fd)
    if protocol.startswith("NETLINK"):
        return Wait("poll", "netlink socket", fd)
    link = read_link(f"/proc/{pid}/fd/{fd}") or ""
    inode = link[8:-1].encode() if link.startswith("socket:[") else b"-"
    for table in ("tcp", "tcp6", "udp", "udp6"):
        if protocol and not table.startswith(protocol[:3].lower()):
            continue
        address = far_address(read_bytes(f"/proc/{pid}/net/{table}") or b"", inode)
        if address:
            return Wait("network", address, fd)
    return Wait("network" if protocol else "local_socket", protocol, fd)


def find_listener(port: int) -> int | None:
    """The pid that listens on a TCP port of this machine; 0 when we may not see it, None when no process listens."""
    inodes = {
        inode for table in ("tcp", "tcp6") for inode in _listening(read_bytes(f"/proc/net/{table}") or b"", port)
    }
    if not inodes:
        return None
    return next((pid for pid in list_numbers("/proc") if inodes & _socket_inodes([pid])), 0)


def _listening(table: bytes, port: int) -> Iterator[int]:
    for line in table.split(b"\n")[1:]:
        words = line.split()
        if len(words) > 9 and words[3] == b"0A" and int(words[1].rpartition(b":")[2], 16) == port:
            yield int(words[9])


def far_address(table: bytes, inode: bytes) -> str | None:
    """The remote address of the socket with that inode in a /proc/net/tcp table; 'listening on' when it has none."""
    for line in table.split(b"\n")[1:]:
        words = line.split()
        if len(words) > 9 and words[9] == inode:
            remote = _address(words[2])
            return remote if not remote.endswith(":0") else f"listening on {_address(words[1])}"
    return None


def _address(word: bytes) -> str:
    host, _, port = word.decode().partition(":")
    # Each group of four bytes is in the machine's own byte order.
    raw = b"".join(struct.pack("=I", int(host[at : at + 8], 16)) for at in range(0, len(host), 8))
    if len(raw) == 4:
        return f"{socket.inet_ntop(socket.AF_INET, raw)}:{int(port, 16)}"
    if raw[:12] == _MAPPED:
        return f"{socket.inet_ntop(socket.AF_INET, raw[12:])}:{int(port, 16)}"
    return f"[{socket.inet_ntop(socket.AF_INET6, raw)}]:{int(port, 16)}"
