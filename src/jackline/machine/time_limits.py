"""When a call that a thread waits in ends by itself: never, or at a time that the kernel was told.

Owns the arguments that limit the time of a call. `waits` knows what a call waits for.
"""

from __future__ import annotations

import os
import struct
import time
from dataclasses import replace

from jackline.machine.procfs import read_memory
from jackline.machine.readings import UNTIL_A_SIGNAL, Wait

# Calls whose time limit is a number of milliseconds: (argument, bits). All others take a pointer, 0 for no limit.
_MILLISECONDS = {"x86_64": {7: 2, 232: 3, 281: 3}, "aarch64": {22: 3}}
_LIMIT_AT = {"poll": 2, "epoll": 3, "select": 4, "lock": 3}
# pause, sigsuspend and sigtimedwait, with the argument that points to a time limit.
_SIGNAL_WAITS: dict[str, dict[int, int | None]] = {
    "x86_64": {34: None, 130: None, 128: 2},
    "aarch64": {133: None, 137: 2},
}
_FUTEX = {"x86_64": 202, "aarch64": 98}
_NANOSLEEP = {"x86_64": 35, "aarch64": 101}
_CLOCK_NANOSLEEP = {"x86_64": 230, "aarch64": 115}
# pselect6, ppoll and epoll_pwait2, with the argument that points to a duration.
_DURATIONS = {"x86_64": {270: 4, 271: 2, 441: 3}, "aarch64": {72: 4, 73: 2, 441: 3}}
_WAIT_UNTIL, _ON_WALL_CLOCK = 9, 256  # FUTEX_WAIT_BITSET and a flag of it


def with_limit(pid: int, wait: Wait, number: int, group: str, arguments: list[int]) -> Wait:
    """Add whether the call ends only when what it waits for comes, and of a futex which one it is."""
    machine = os.uname().machine
    if number in _SIGNAL_WAITS.get(machine, {}):
        limit_at = _SIGNAL_WAITS[machine][number]
        is_endless = limit_at is None or arguments[limit_at] == 0
        return replace(wait, target=UNTIL_A_SIGNAL, is_endless=True) if is_endless else wait
    if group == "sleep":
        return _with_end(pid, wait, number, arguments)
    if group in ("read", "write", "child", "flock", "fcntl"):
        return replace(wait, is_endless=True, is_writing=group == "write")
    if group not in _LIMIT_AT or (group == "lock" and number != _FUTEX.get(machine)):
        return wait
    limit = arguments[_LIMIT_AT[group]]
    if number in _MILLISECONDS.get(machine, {}):
        limit_ms = as_descriptor(limit)
        return replace(wait, is_endless=True) if limit_ms < 0 else replace(wait, lasts_s=limit_ms / 1000)
    wait = replace(wait, is_endless=limit == 0, address=arguments[0] if group == "lock" else None)
    return wait if wait.is_endless else _with_end(pid, wait, number, arguments)


def _with_end(pid: int, wait: Wait, number: int, arguments: list[int]) -> Wait:
    """Add when the call ends by itself. Python passes the time at which it ends; for a limit that is a duration, as
    the command `sleep` passes it, the kernel does not say since when it runs."""
    machine = os.uname().machine
    if number == _NANOSLEEP.get(machine):
        is_time, is_wall, address = False, False, arguments[0]
    elif number == _CLOCK_NANOSLEEP.get(machine):
        is_time, is_wall, address = bool(arguments[1] & 1), arguments[0] == time.CLOCK_REALTIME, arguments[2]
        if not is_wall and arguments[0] != time.CLOCK_MONOTONIC:
            return wait
    elif number in _DURATIONS.get(machine, {}):
        is_time, is_wall, address = False, False, arguments[_DURATIONS[machine][number]]
    elif number == _FUTEX.get(machine) and arguments[1] & 127 == _WAIT_UNTIL:
        is_time, is_wall, address = True, bool(arguments[1] & _ON_WALL_CLOCK), arguments[3]
    else:
        return wait
    data = read_memory(pid, address, 16)
    if data is None:
        return wait
    seconds, nanoseconds = struct.unpack("=qq", data)
    value_s = float(seconds + nanoseconds / 1e9)
    if not is_time:
        return replace(wait, lasts_s=value_s)
    return replace(wait, until_s=value_s - time.time() + time.monotonic() if is_wall else value_s)


def as_descriptor(argument: int) -> int:
    """Descriptors are 32-bit; the upper half of the register may contain anything."""
    number = argument & 0xFFFFFFFF
    return number - 2**32 if number >= 2**31 else number
