"""Numbers of the system calls in which a thread can wait, by architecture, grouped by what they wait for.

Only data. A call that is not listed is 'unknown', never guessed.
"""

from __future__ import annotations

import os

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
