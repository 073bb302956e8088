"""A forked copy of the training process that may compute and read, and nothing else.

Its files, pipes and sockets lead to /dev/null; opening a file to write, starting a process or a connection ends it.
Python's audit events see what Python does, Landlock (Linux 5.13) what C code does. Owns the confinement, and the
reasons for which a process should not be forked. Does not own what the copy computes (trial.py).
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import json
import os
import re
import resource
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from jackline import accelerator
from jackline.units import format_duration

_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_FORBIDDEN = (
    "os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.truncate", "os.link", "os.symlink", "os.chmod", "os.kill",
    "os.fork", "os.forkpty", "os.exec", "os.posix_spawn", "os.system", "os.startfile", "subprocess.Popen", "shutil.",
    "socket.connect", "socket.bind", "socket.sendto", "socket.sendmsg", "sqlite3.connect", "urllib.Request",
)  # fmt: skip
# The record of batches (seen-0.bin) is written by the training process only (feeds/compared.py).
_KNOWN_MAPS = re.compile(r"^/memfd:jackline-|^/dev/shm/sem\.|/seen-\d+\.bin$")
_HARMLESS_THREADS = ("jackline-", "QueueFeederThread", "MainThread")
_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS = 1, 38
_LANDLOCK_CREATE, _LANDLOCK_RESTRICT = 444, 446  # the same numbers on every architecture
# Write, remove, make anything, and from newer kernels on: link across folders, truncate.
_LANDLOCK_WRITES = {1: 0x1FF2, 2: 0x3FF2, 3: 0x7FF2}


def why_not_forked(*, has_batches: bool) -> str:
    """Why a copy of this process would not work, or could disturb it; empty when it can be made.

    `has_batches`: batches of DataLoader workers have arrived, and those lie in memory that torch shares.
    """
    if accelerator.is_available():  # its threads exist from the first backward() on, on the CPU too
        return "torch has a GPU here, and its autograd threads cannot be copied"
    if not hasattr(os, "fork") or not sys.platform.startswith("linux"):
        return "processes can be copied safely on Linux only"
    if "ipykernel" in sys.modules:
        return "this is a notebook's kernel"
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return "torch.distributed is in use"
    for thread in threading.enumerate():
        is_known = thread.name.startswith(_HARMLESS_THREADS) or type(thread).__name__ == "TMonitor"  # tqdm's
        if thread is not threading.current_thread() and not is_known:
            return f"the process has another thread ({thread.name})"
    if threading.current_thread() is not threading.main_thread():
        return "the loop does not run in the main thread"
    return _why_shared(has_batches=has_batches)


def _why_shared(*, has_batches: bool) -> str:
    """Memory that a copy would share instead of copying: what it wrote there would reach the training.

    Known by their exact names: what Jackline maps, and what the copy does not use (queues and batches of workers).
    """
    with contextlib.suppress(OSError), open("/proc/self/maps", encoding="utf-8", errors="replace") as lines:
        for line in lines:
            words = line.split(maxsplit=5)
            path = words[5].strip() if len(words) > 5 else "shared memory"
            is_known = bool(_KNOWN_MAPS.search(path)) or (has_batches and path.startswith("/dev/shm/torch_"))
            if words[1].startswith("rw") and words[1].endswith("s") and not is_known:
                return f"the process shares memory with others ({path})"
    return ""


def release_threads() -> None:
    """End the idle threads of OpenMP before a fork: the copy would wait for them for ever. They are made again."""
    with contextlib.suppress(OSError), open("/proc/self/maps", encoding="utf-8", errors="replace") as lines:
        for path in {line.split()[-1] for line in lines if "libgomp" in line}:
            with contextlib.suppress(OSError, AttributeError):
                ctypes.CDLL(path).omp_pause_resource_all(2)


def confine(report_fd: int, forbid: Callable[[str], None]) -> None:
    """Confine this process, which was just forked. `forbid` is called with what it was about to do, and ends it."""
    gc.disable()  # finalizers of the training's objects are not for this process to run
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        with contextlib.suppress(OSError, ValueError):
            signal.signal(number, signal.SIG_IGN)
    signal.set_wakeup_fd(-1)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _close_the_outside(report_fd)
    _lock_files(libc)
    # torch.save is C++ that audit events do not see.
    setattr(torch.serialization, "_open_zipfile_writer", lambda *_: forbid("torch.save"))  # noqa: B010

    def look(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            path, _, flags = arguments
            if isinstance(flags, int) and flags & _WRITING and path != os.devnull:
                forbid(f"open({str(path)!r})")
        elif event.startswith(_FORBIDDEN):
            forbid(event)

    sys.addaudithook(look)


def _close_the_outside(report_fd: int) -> None:
    """Whatever can be written to leads to /dev/null. Descriptors keep their numbers, since objects hold them."""
    null = os.open(os.devnull, os.O_RDWR)
    for entry in list(Path("/proc/self/fd").iterdir()):
        fd = int(entry.name)
        if fd in (report_fd, null):
            continue
        with contextlib.suppress(OSError):
            if fd <= 2 or fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDONLY:
                os.dup2(null, fd)


def _lock_files(libc: Any) -> None:
    """No file can be opened to write, from any language. Kernels without Landlock refuse: audit events remain."""
    version = libc.syscall(_LANDLOCK_CREATE, None, 0, 1)
    if version < 1 or libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
        return
    rules = ctypes.c_uint64(_LANDLOCK_WRITES[min(version, 3)])
    fd = libc.syscall(_LANDLOCK_CREATE, ctypes.byref(rules), ctypes.sizeof(rules), 0)
    if fd >= 0:
        libc.syscall(_LANDLOCK_RESTRICT, fd, 0)


def wait_for_copy(pid: int, read_fd: int, timeout_s: float, is_stopped: Callable[[], bool]) -> dict[str, Any]:
    deadline_s = time.monotonic() + timeout_s
    data = b""
    try:
        while time.monotonic() < deadline_s and not is_stopped():
            if select.select([read_fd], [], [], 0.05)[0]:
                part = os.read(read_fd, 65536)
                if not part:
                    break
                data += part
    finally:
        os.close(read_fd)
        os.kill(pid, signal.SIGKILL)
        status = _reap(pid)
    if data:
        found: dict[str, Any] = json.loads(data)
        return found
    if time.monotonic() >= deadline_s:
        return {"why": f"the copy of the process did not end within {format_duration(timeout_s)}"}
    return {"why": "a stop was requested" if is_stopped() else f"the copy of the process ended ({status})"}


def _reap(pid: int) -> str:
    try:
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    except ChildProcessError:  # somebody else collects children here
        return "its exit code is unknown"
    return f"signal {-code}" if code < 0 else f"exit code {code}"
