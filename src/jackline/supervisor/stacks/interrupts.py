"""Whether a look at a process from outside would change what its program does.

A signal, even one whose handler does nothing, ends some system calls early; so does the moment for which a debugger
holds a process. Python repeats a call that moved no byte, but not one that moved a part: `recv(9, MSG_WAITALL)`
returns 5 bytes, and `os.write` to a full pipe returns how many had room. Programs that never saw that lose data.
"""

from __future__ import annotations

import os

from jackline.machine.proc import list_threads
from jackline.machine.procfs import read_bytes

# Calls that a signal ends early, which C code may not expect: pause, sigsuspend, sigtimedwait, nanosleep; and
# restart_syscall, which is what a sleep is called after a debugger (our own stack reader) had paused it; and connect,
# because Python takes the interrupted connect() of a local socket for a successful one.
_FRAGILE = {"x86_64": (34, 35, 42, 128, 130, 219), "aarch64": (101, 128, 133, 137, 203)}
_CLOCK_NANOSLEEP = {"x86_64": 230, "aarch64": 115}
_TIMER_ABSTIME = 1
# Calls that may have moved a part. The value is the argument that says how much they want to move; None where only
# the memory of the process does.
_RECEIVES = {"x86_64": {45: 3, 47: 2, 299: 3}, "aarch64": {207: 3, 212: 2, 243: 3}}  # the argument with the flags
_WRITES: dict[str, dict[int, int | None]] = {
    "x86_64": {1: 2, 18: 2, 44: 2, 20: None, 46: None, 40: None, 275: None, 278: None, 307: None},
    "aarch64": {64: 2, 68: 2, 206: 2, 66: None, 211: None, 71: None, 76: None, 75: None, 269: None},
}
_MSG_WAITALL = 0x100
_PIPE_BUF = 4096  # what is not larger is written whole or not at all


def would_break_off(pid: int) -> bool:
    """Whether a handled signal would end the wait of its main thread, which gets a signal to the process. Python's
    own time.sleep goes back to sleep, and is known by its absolute end; sleep() of the C library returns early."""
    words = _words(f"/proc/{pid}/syscall")
    machine = os.uname().machine
    if not words or not words[0].lstrip(b"-").isdigit():
        return not words
    number = int(words[0])
    is_relative = len(words) > 2 and not int(words[2], 16) & _TIMER_ABSTIME
    is_fragile = number in _FRAGILE.get(machine, ()) or (number == _CLOCK_NANOSLEEP.get(machine) and is_relative)
    return is_fragile or _may_be_partial(words, machine)


def would_cut_a_transfer(pid: int) -> bool:
    """Whether one of its threads would get a part of what it asked for if a debugger held the process."""
    machine = os.uname().machine
    return any(_may_be_partial(_words(f"/proc/{pid}/task/{tid}/syscall"), machine) for tid in list_threads(pid))


def _words(path: str) -> list[bytes]:
    return (read_bytes(path) or b"").split()


def _may_be_partial(words: list[bytes], machine: str) -> bool:
    if len(words) < 7 or not words[0].isdigit():
        return False
    number, arguments = int(words[0]), [int(word, 16) for word in words[1:7]]
    flags = _RECEIVES.get(machine, {}).get(number)
    if flags is not None:
        return bool(arguments[flags] & _MSG_WAITALL)
    writes = _WRITES.get(machine, {})
    if number not in writes:
        return False
    size = writes[number]
    return size is None or arguments[size] > _PIPE_BUF
