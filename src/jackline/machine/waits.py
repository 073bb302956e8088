"""What a thread waits for: from its system call, the descriptor in it, or the kernel function in which it sleeps; and
the frames of the threads of this process.

Owns turning /proc/PID/task/TID/{stat,syscall,wchan} into a `Wait`. Draws no conclusions: a thread that waits for the
network may be healthy. Without the permission to read another process's system call (ptrace) it falls back to wchan,
and then to the state letter.
"""

from __future__ import annotations

import functools
import gc
import os
import struct
import sys
import threading
import types
from dataclasses import replace
from typing import cast

from jackline.machine.cgroups import is_frozen
from jackline.machine.net import describe_socket
from jackline.machine.procfs import list_numbers, read_bytes, read_link, read_memory, read_text
from jackline.machine.readings import Wait, WaitKind, other_end_of
from jackline.machine.time_limits import as_descriptor, with_limit

# The arguments of each group:
#   read/write: arg 0 is a descriptor          poll: arg 0 array, arg 1 count      select: arg 0 count, 1-3 sets
#   epoll: arg 0 is the epoll descriptor       fcntl: arg 0 descriptor, arg 1 command
_X86_64 = {
    **dict.fromkeys((0, 17, 19, 43, 45, 47, 288, 295, 299, 327), "read"),
    **dict.fromkeys((1, 18, 20, 40, 42, 44, 46, 275, 278, 296, 307, 326, 328), "write"),
    **dict.fromkeys((7, 271), "poll"),
    **dict.fromkeys((23, 270), "select"),
    **dict.fromkeys((232, 281, 441), "epoll"),
    **dict.fromkeys((202, 449, 455, 65, 69, 70, 220, 242, 243), "lock"),
    **dict.fromkeys((34, 35, 128, 130, 230), "sleep"),
    **dict.fromkeys((56, 57, 58, 61, 247, 435), "child"),
    **dict.fromkeys((26, 74, 75, 162, 208, 277, 306, 333), "sync"),
    **dict.fromkeys((2, 4, 6, 21, 82, 87, 257, 262, 332, 437), "open"),
    **dict.fromkeys((16, 426), "ioctl"),
    72: "fcntl",
    73: "flock",
}
_AARCH64 = {
    **dict.fromkeys((63, 65, 67, 69, 202, 207, 212, 242, 243, 286), "read"),
    **dict.fromkeys((64, 66, 68, 70, 71, 75, 76, 203, 206, 211, 269, 285, 287), "write"),
    73: "poll",
    72: "select",
    **dict.fromkeys((22, 441), "epoll"),
    **dict.fromkeys((98, 449, 455, 182, 183, 188, 189, 192, 193), "lock"),
    **dict.fromkeys((101, 115, 133, 137), "sleep"),
    **dict.fromkeys((95, 220, 260, 435), "child"),
    **dict.fromkeys((4, 81, 82, 83, 84, 227, 267, 292), "sync"),
    **dict.fromkeys((56, 38, 79, 276, 291, 437), "open"),
    **dict.fromkeys((29, 426), "ioctl"),
    25: "fcntl",
    32: "flock",
}

# Commands of fcntl that wait for a lock: F_SETLKW, F_OFD_SETLKW.
FCNTL_LOCK_COMMANDS = frozenset((7, 38))

# /proc/PID/wchan is the kernel function in which a thread sleeps. Parts of names are matched, because names change
# between kernel versions. The first match wins, so the specific ones come first.
WCHAN_PARTS = (
    ("futex", "lock"),
    ("nanosleep", "sleep"),
    ("sigsuspend", "sleep"),
    ("sys_pause", "sleep"),
    ("sigtimedwait", "sleep"),
    ("wait_for_partner", "pipe"),
    ("pipe_", "pipe"),
    ("unix_", "local_socket"),
    ("n_tty", "keyboard"),
    ("tty_", "keyboard"),
    ("inet_", "network"),
    ("tcp_", "network"),
    ("sk_wait", "network"),
    ("skb_wait", "network"),
    ("flock", "file_lock"),
    ("lock_inode_wait", "file_lock"),
    ("setlk", "file_lock"),
    ("vfork", "child"),
    ("kernel_clone", "child"),
    ("do_wait", "child"),
    ("wait4", "child"),
    ("waitid", "child"),
    ("poll", "poll"),
    ("select", "poll"),
    ("io_schedule", "disk"),
    ("folio_wait", "disk"),
    ("page_bit", "disk"),
    ("jbd2", "disk"),
    ("blk_", "disk"),
    ("rpc_", "disk"),
    ("nfs", "disk"),
    ("fuse", "file"),
    ("request_wait_answer", "file"),
    ("signal_stop", "stopped"),
    ("ptrace_stop", "stopped"),
)

_TABLES: dict[str, dict[int, str]] = {"x86_64": _X86_64, "aarch64": _AARCH64}


def table_for(machine: str | None = None) -> dict[int, str]:
    """Syscall number -> group for this architecture; empty for one without a table here (wchan is used then)."""
    return _TABLES.get(machine or os.uname().machine, {})


_LONGEST_PATH = 200
_MOST_POLLED = 64  # descriptors checked in one poll; the thousands of a server add nothing
_WORDS: dict[str, Wait] = {
    "lock": Wait("lock"),
    "sleep": Wait("sleep"),
}
FROZEN = Wait("stopped", "its cgroup is frozen")
_STATES: dict[str, Wait] = {
    "R": Wait("running"),
    "T": Wait("stopped"),
    "t": Wait("stopped", "by a debugger"),
    "Z": Wait("zombie"),
    "X": Wait("zombie"),
}
_syscalls = functools.cache(table_for)


def read_wait(pid: int, tid: int | None = None) -> Wait:
    """What one thread waits for; the main one when `tid` is not given; 'zombie' when it has exited."""
    data = read_bytes(f"/proc/{pid}/task/{tid or pid}/stat")
    if not data:
        return Wait("zombie", "gone")
    at = data.rfind(b")") + 2
    return wait_in_state(pid, tid or pid, chr(data[at]))


def wait_in_state(pid: int, tid: int, state: str, *, is_cheap: bool = False) -> Wait:
    """Like `read_wait`, for a caller that already has the state letter. `is_cheap` reads only the kernel function:
    one file instead of two to five."""
    if state in _STATES:
        return _STATES[state]
    if is_cheap:
        return _from_wchan(pid, tid, state)
    call = read_text(f"/proc/{pid}/task/{tid}/syscall")
    if call is None:
        return _from_wchan(pid, tid, state)
    if call.startswith("running"):
        return _STATES["R"]
    words = call.split()
    number = int(words[0])
    if number < 0:
        if _is_frozen(pid, tid, state):
            return FROZEN
        return Wait("disk", "page fault") if state == "D" else _from_wchan(pid, tid, state)
    group = _syscalls().get(number)
    arguments = [int(word, 16) for word in words[1:7]]
    if group is None:
        wait = _from_wchan(pid, tid, state)
    else:
        wait = with_limit(pid, _from_call(pid, number, group, arguments), number, group, arguments)
    if wait.kind == "file" and group in ("read", "write", "open"):
        wait = _named_pipe(pid, tid, wait)
    # In an uninterruptible sleep the kernel does I/O, except for a parent that waits for its vfork child.
    if (state == "D" or wait.kind == "unknown") and _is_frozen(pid, tid, state):
        return FROZEN
    return Wait("disk", wait.target, wait.fd) if state == "D" and wait.kind != "child" else wait


def _is_frozen(pid: int, tid: int, state: str) -> bool:
    """Whether its cgroup is frozen (the freezer of version 1, cgroup.freeze of version 2, docker pause)."""
    wchan = read_text(f"/proc/{pid}/task/{tid}/wchan") or ""
    if "refrigerator" in wchan or "freezer" in wchan:
        return True
    # Linux 6.1 and newer freeze a task where it sleeps, and call that D as well. Otherwise no task is in D in a call
    # that a signal can interrupt.
    return state == "D" and classify_wchan(wchan) in _INTERRUPTIBLE and is_frozen(pid)


_INTERRUPTIBLE = ("lock", "sleep", "pipe", "local_socket", "keyboard", "network", "file_lock", "child", "poll")


def _child_awaited(number: int, arguments: list[int]) -> Wait:
    """wait4(pid, ...) and waitid(P_PID, pid, ...); any child otherwise."""
    first, second = as_descriptor(arguments[0]), as_descriptor(arguments[1])
    by_call = {61: first, 260: first, 247: second if first == 1 else 0, 95: second if first == 1 else 0}
    pid = by_call.get(number, 0)  # 0 for clone and vfork, where the child is not known yet
    return Wait("child", f"process {pid}") if pid > 0 else Wait("child")


def _from_call(pid: int, number: int, group: str, arguments: list[int]) -> Wait:
    if group in _WORDS:
        return _WORDS[group]
    first = as_descriptor(arguments[0])
    if group == "child":
        return _child_awaited(number, arguments)
    if group in ("read", "write"):
        return describe_descriptor(pid, first, is_reading=group == "read")
    if group == "poll":
        return _merge(pid, _polled(pid, arguments[0], arguments[1]))
    if group == "select":
        return _merge(pid, _selected(pid, arguments[0], arguments[1:4]))
    if group == "epoll":
        return _merge(pid, _watched(pid, first), is_endless=True)
    if group == "flock" or (group == "fcntl" and arguments[1] in FCNTL_LOCK_COMMANDS):
        return Wait("file_lock", read_link(f"/proc/{pid}/fd/{first}") or "", first)
    if group == "sync":
        return Wait("disk", read_link(f"/proc/{pid}/fd/{first}") or "", first)
    if group == "open":
        path = _path_opened(pid, number, arguments)
        return Wait("file", f"opening {path}" if path else "opening a file")
    return Wait("file", read_link(f"/proc/{pid}/fd/{first}") or "", first)


# The argument that points to the path, of open, creat, openat and openat2.
_PATH_AT = {"x86_64": {2: 0, 85: 0, 257: 1, 437: 1}, "aarch64": {56: 1, 437: 1}}


def _path_opened(pid: int, number: int, arguments: list[int]) -> str:
    at = _PATH_AT.get(os.uname().machine, {}).get(number)
    address = arguments[at] if at is not None else 0
    # It may stand at the end of a page, behind which nothing can be read.
    data = read_memory(pid, address, min(_LONGEST_PATH, 4096 - address % 4096)) if address else None
    path = (data or b"").partition(b"\0")[0].decode("utf-8", "replace")
    return path if path.isprintable() else ""


def describe_descriptor(pid: int, fd: int, *, is_reading: bool) -> Wait:
    """What one descriptor is, for a process that waits for it."""
    link = read_link(f"/proc/{pid}/fd/{fd}")
    if link is None:
        return Wait("unknown", "", fd)
    if link.startswith("socket:"):
        found = describe_socket(pid, fd)
        # Editors and notebooks give their children a local socket as standard input.
        is_typed = fd == 0 and is_reading and found.kind == "local_socket"
        return Wait("keyboard", "standard input (a local socket)", fd) if is_typed else found
    if link.startswith("pipe:"):
        return _describe_pipe(pid, fd, link, is_reading=is_reading)
    if link.startswith("anon_inode:"):
        return Wait("poll", link.removeprefix("anon_inode:").strip("[]"), fd)
    if is_reading and link.startswith(("/dev/pts/", "/dev/tty", "/dev/console")):
        return Wait("keyboard", link, fd)
    if link.endswith("/ptmx"):
        return Wait("pipe", other_end_of(_terminal_made(pid, fd)), fd)
    # Do not call stat: on a dead network mount it would hang us as well as the process that we look at.
    return Wait("file", link, fd)


def _terminal_made(pid: int, fd: int) -> str:
    """'/dev/pts/3', of the process that holds its other end."""
    for line in (read_bytes(f"/proc/{pid}/fdinfo/{fd}") or b"").split(b"\n"):
        if line.startswith(b"tty-index:"):
            return f"/dev/pts/{int(line.split()[1])}"
    return "a terminal"


def _describe_pipe(pid: int, fd: int, link: str, *, is_reading: bool) -> Wait:
    if fd != 0 or not is_reading:
        return Wait("pipe", link, fd)
    # Standard input: if a parent or sibling writes to it, it is a pipeline; else it counts as a keyboard.
    feeder = _find_writer(pid, link)
    return Wait("pipe", feeder, fd) if feeder else Wait("keyboard", "standard input (a pipe)", fd)


def _find_writer(pid: int, link: str) -> str:
    """A text that names the parent or sibling with the writing end of this pipe; '' when none has it."""
    data = read_bytes(f"/proc/{pid}/stat") or b""
    fields = data[data.rfind(b")") + 2 :].split()
    parent = int(fields[1]) if len(fields) > 1 else 0
    if parent <= 1:
        return ""
    siblings = read_text(f"/proc/{parent}/task/{parent}/children") or ""
    for other in (parent, *(int(word) for word in siblings.split()[:_MOST_POLLED])):
        if other == pid:
            continue
        for held in list_numbers(f"/proc/{other}/fd")[:256]:
            if read_link(f"/proc/{other}/fd/{held}") == link and _is_writable(other, held):
                name = (read_text(f"/proc/{other}/comm") or "").strip()
                return f"output of {name} (pid {other})"
    return ""


def _is_writable(pid: int, fd: int) -> bool:
    for line in (read_bytes(f"/proc/{pid}/fdinfo/{fd}") or b"").split(b"\n"):
        if line.startswith(b"flags:"):
            return int(line.split()[1], 8) & os.O_ACCMODE != os.O_RDONLY
    return False


def _merge(pid: int, fds: list[int] | None, *, is_endless: bool = False) -> Wait:
    """One kind of wait for several descriptors. If any of them is a network socket, the wait counts as network: event
    loops also watch a wake-up pipe."""
    if fds is None:
        return Wait("poll")
    if not fds:
        return Wait("poll", "event loop, nothing watched") if is_endless else Wait("sleep")
    waits = [describe_descriptor(pid, fd, is_reading=True) for fd in fds[:_MOST_POLLED]]
    networks = [wait for wait in waits if wait.kind == "network"]
    if len(waits) == 1:
        return waits[0]
    if networks:
        return replace(networks[0], fds=tuple(wait.fd for wait in networks if wait.fd is not None))
    if len({wait.kind for wait in waits}) == 1:
        return Wait(waits[0].kind, waits[0].target, waits[0].fd)
    return Wait("poll", ", ".join(sorted({wait.target or wait.kind for wait in waits})[:4]))


def _polled(pid: int, address: int, count: int) -> list[int] | None:
    if count == 0:
        return []
    data = read_memory(pid, address, min(count & 0xFFFFFFFF, _MOST_POLLED) * 8)
    return None if data is None else [fd for fd, _, _ in struct.iter_unpack("=ihh", data) if fd >= 0]


def _selected(pid: int, count: int, sets: list[int]) -> list[int] | None:
    count = min(count & 0xFFFFFFFF, 1024)
    found: set[int] = set()
    for address in sets:
        if address == 0 or count == 0:
            continue
        data = read_memory(pid, address, (count + 63) // 64 * 8)
        if data is None:
            return None
        bits = int.from_bytes(data, "little")
        found.update(fd for fd in range(count) if bits >> fd & 1)
    return sorted(found)


def _watched(pid: int, epoll_fd: int) -> list[int] | None:
    data = read_bytes(f"/proc/{pid}/fdinfo/{epoll_fd}")
    if data is None:
        return None
    return [int(line.split()[1]) for line in data.split(b"\n") if line.startswith(b"tfd:")]


def _named_pipe(pid: int, tid: int, wait: Wait) -> Wait:
    """A named pipe looks like a file; only the kernel function tells them apart."""
    if classify_wchan(read_text(f"/proc/{pid}/task/{tid}/wchan") or "") != "pipe":
        return wait
    return Wait("pipe", wait.target if wait.fd is not None else f"{wait.target}, a named pipe", wait.fd)


def _from_wchan(pid: int, tid: int, state: str) -> Wait:
    name = read_text(f"/proc/{pid}/task/{tid}/wchan") or ""
    kind = classify_wchan(name)
    if state == "D" and _is_frozen(pid, tid, state):
        return FROZEN
    if kind == "unknown" and state == "D":
        return Wait("disk")
    return Wait(kind, "" if kind != "unknown" or name in ("", "0") else name)


def classify_wchan(name: str) -> WaitKind:
    """What a thread waits for, from the kernel function in which it sleeps. Cannot tell a keyboard from a file."""
    return cast(WaitKind, next((kind for part, kind in WCHAN_PARTS if part in name), "unknown"))


def thread_frames() -> dict[int, types.FrameType]:
    """The frame of every Python thread of this process, by its ident.

    `sys._current_frames` holds a lock of the interpreter while it allocates. Before Python 3.12 a garbage collection
    can begin there, and one that needs the same lock never ends: a training hung in a save.
    """
    is_collecting = gc.isenabled()
    gc.disable()
    try:
        found = sys._current_frames()
    finally:
        if is_collecting:
            gc.enable()
    found[threading.get_ident()] = sys._getframe(1)  # the caller's, as if it had asked by itself
    return found
