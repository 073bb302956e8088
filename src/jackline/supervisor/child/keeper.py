"""The keeper: the parent process of the user's command, small and hard to kill by accident.

Owns: starting the command, its terminal with --tty, its exit status from the kernel, and ending the processes that a
failed command leaves behind. Does not own: output, verdicts, restarts. It outlives the supervisor, because only a
parent learns an exit code. It runs as a plain file (`python -I -S keeper.py FD`) with the standard library only and
without importing Jackline, so that neither the user's packages nor ours can break it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import json
import os
import select
import signal
import struct
import sys
import termios
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

PR_SET_CHILD_SUBREAPER = 36
PR_SET_PTRACER = 0x59616D61
ORPHANS_MAY_FINISH_S = 2.0
ORPHANS_MAY_SAVE_S = 5.0
# Jackline's own processes beside a training. Both exit by themselves: the writer when it has committed its current
# save, the mirror after its last upload. We wait for the writer, because the next attempt resumes from its commit.
WRITER, MIRROR = "jackline.checkpoint.writer.serve", "jackline.checkpoint.mirror.upload"
WRITER_MAY_COMMIT_S = 60.0
RESERVED_BYTES = 8192
PATIENCE_S = 600.0
IGNORED = (
    signal.SIGHUP,
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGTSTP,
    signal.SIGTTIN,
    signal.SIGTTOU,
)


def main() -> None:
    spec = json.loads(os.fdopen(int(sys.argv[1]), "rb").read())
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    lock = spec.get("lock")
    if lock is not None:
        os.set_inheritable(lock, False)
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    os.set_inheritable(spec["report_fd"], False)
    try:
        # Before the command starts: without room for these two, nobody would know of it or learn how it ended.
        for name in ("start_file", "wait_file"):
            reserve(spec[name])
        terminal = Terminal(spec) if spec["tty"] else None
    except OSError as error:
        report(spec, {"refused_errno": error.errno or errno.EIO})
        return
    child, exec_errno = start_child(spec, terminal)
    write_json(
        spec["start_file"],
        {
            "child": identify(child, spec),
            "keeper": identify(os.getpid(), spec),
            "started_at_s": time.time(),
            "exec_errno": exec_errno,
        },
    )
    # Until start.json names the command, only the run's lock shows that one was started: a supervisor that is killed
    # in between must not be followed by one that starts a second command.
    if lock is not None:
        os.close(lock)
    wait_for(child, terminal, spec)


class Terminal:
    """A pseudo-terminal whose output goes to raw.out and whose keyboard input comes from a FIFO."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self.master, self.slave = os.openpty()
        attributes = termios.tcgetattr(self.slave)
        attributes[1] &= ~termios.OPOST  # keep LF as LF: the log and the viewer expect LF, not CRLF
        attributes[3] &= ~termios.ECHO  # the viewer's own terminal has echoed it already
        termios.tcsetattr(self.slave, termios.TCSANOW, attributes)
        size = struct.pack("HHHH", spec["rows"], spec["columns"], 0, 0)
        fcntl.ioctl(self.slave, termios.TIOCSWINSZ, size)
        self.raw = open_raw(spec["raw_out"])
        os.mkfifo(spec["keyboard"], 0o600)
        # Opened for reading and writing, so that the FIFO never reports end-of-file when a viewer exits.
        self.keyboard = os.open(spec["keyboard"], os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)

    def pump(self, timeout_s: float) -> bool:
        """Copy the bytes available in both directions; False when the command has closed its terminal."""
        ready, _, _ = select.select([self.master, self.keyboard], [], [], timeout_s)
        if self.keyboard in ready:
            with contextlib.suppress(OSError):
                os.write(self.master, os.read(self.keyboard, 4096))
        if self.master in ready:
            try:
                data = os.read(self.master, 65536)
            except OSError:
                return False
            # A full disk loses output here; it must not stop the training.
            with contextlib.suppress(OSError):
                os.write(self.raw, data)
            return bool(data)
        return True


def start_child(spec: dict[str, Any], terminal: Terminal | None) -> tuple[int, int]:
    """Fork and exec; return the pid, and the errno of a failed exec (0 when it succeeded)."""
    report, reporter = os.pipe2(os.O_CLOEXEC)
    child = os.fork()
    if child == 0:
        try:
            become_the_command(spec, terminal)
        except OSError as error:
            os.write(reporter, str(error.errno or errno.EINVAL).encode())
        except BaseException:
            os.write(reporter, str(errno.EINVAL).encode())
        os._exit(127)
    os.close(reporter)
    if terminal is not None:
        os.close(terminal.slave)
    problem = os.read(report, 16)  # returns when exec closes the pipe
    os.close(report)
    return child, int(problem or 0)


def become_the_command(spec: dict[str, Any], terminal: Terminal | None) -> None:
    os.setsid()
    if terminal is not None:
        fcntl.ioctl(terminal.slave, termios.TIOCSCTTY, 0)
        for fd in (0, 1, 2):
            os.dup2(terminal.slave, fd)
    else:
        out = open_raw(spec["raw_out"])
        err = open_raw(spec["raw_err"]) if spec["raw_err"] else out
        os.dup2(out, 1)
        os.dup2(err, 2)
    for number in (*IGNORED, signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    # When memory runs out, the kernel should kill the command, not the processes that can explain why.
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("500")
    if os.path.exists("/proc/sys/kernel/yama/ptrace_scope"):
        ctypes.CDLL(None).prctl(PR_SET_PTRACER, ctypes.c_ulong(-1), 0, 0, 0)
    os.chdir(spec["cwd"])
    os.execvpe(spec["argv"][0], spec["argv"], spec["env"])


def wait_for(child: int, terminal: Terminal | None, spec: dict[str, Any]) -> None:
    """Record how the command ended, then handle the processes it left behind."""
    status, usage = reap_until(child, terminal)
    result = {
        "status": status,
        "exit_code": os.waitstatus_to_exitcode(status) if os.WIFEXITED(status) else None,
        "signal": os.WTERMSIG(status) if os.WIFSIGNALED(status) else None,
        "ended_at_s": time.time(),
        "max_rss_bytes": usage.ru_maxrss * 1024,
        "cpu_s": usage.ru_utime + usage.ru_stime,
        "orphans": [],
        "is_settled": False,
    }
    is_known = report(spec, result)
    write_json(spec["wait_file"], result, patience_s=0.0 if is_known else PATIENCE_S)
    may_go_on = status == 0
    result["orphans"] = end_orphans(terminal, may_go_on=may_go_on)
    result["is_settled"] = True
    write_json(spec["wait_file"], result)


def reap_until(child: int, terminal: Terminal | None) -> tuple[int, Any]:
    while True:
        if terminal is None:
            pid, status, usage = os.wait4(-1, 0)
        else:
            if not terminal.pump(0.2):
                time.sleep(0.02)
            pid, status, usage = os.wait4(-1, os.WNOHANG)
        if pid == child:
            while terminal is not None and select.select([terminal.master], [], [], 0)[0] and terminal.pump(0):
                pass
            return status, usage


def end_orphans(terminal: Terminal | None, *, may_go_on: bool) -> list[dict[str, Any]]:
    """Handle processes that outlived the command. After success they may continue (a script that starts background
    work). After a failure they are killed, since they would hold the GPU; a Jackline save or upload is spared."""
    wait_until_childless(terminal, ORPHANS_MAY_FINISH_S)
    if may_go_on:
        wait_until_childless(terminal, None)
        return []
    ended = [{"pid": pid, "command": command_of(pid)} for pid in children() if not is_own(pid)]
    for number, patience_s in ((signal.SIGTERM, ORPHANS_MAY_SAVE_S), (signal.SIGKILL, ORPHANS_MAY_SAVE_S)):
        for pid in strangers():
            with contextlib.suppress(OSError):
                os.kill(pid, number)
        if wait_until_childless(terminal, patience_s, lambda: not strangers()):
            break
    wait_until_childless(terminal, WRITER_MAY_COMMIT_S, is_written)
    return ended


def is_written() -> bool:
    return not any(is_own(pid, (WRITER,)) for pid in descendants())


def wait_until_childless(
    terminal: Terminal | None, patience_s: float | None, is_enough: Callable[[], bool] = lambda: False
) -> bool:
    """Wait until there are no children or `is_enough` returns True; False when the time limit passed first."""
    deadline = None if patience_s is None else time.monotonic() + patience_s
    while deadline is None or time.monotonic() < deadline:
        try:
            pid, _, _ = os.wait4(-1, os.WNOHANG)
        except ChildProcessError:
            return True
        if pid:
            continue
        if is_enough():
            return True
        if terminal is None or not terminal.pump(0.1):
            time.sleep(0.1)
    return False


def strangers() -> list[int]:
    """Pids of processes that the command has left behind, without Jackline's own."""
    return [pid for pid in descendants() if not is_own(pid)]


def is_own(pid: int, modules: tuple[str, ...] = (WRITER, MIRROR)) -> bool:
    """Whether the process was started as `python -m MODULE` with one of Jackline's own modules."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            words = file.read(65536).split(b"\0")
    except OSError:
        return False
    return any(before == b"-m" and word.decode("utf-8", "replace") in modules for before, word in pairwise(words))


def children(of: int | None = None) -> list[int]:
    parent = of or os.getpid()
    try:
        with open(f"/proc/{parent}/task/{parent}/children", "rb") as file:
            return [int(word) for word in file.read().split()]
    except OSError:
        return []


def descendants() -> list[int]:
    found: list[int] = []
    waiting = children()
    while waiting and len(found) < 10_000:
        pid = waiting.pop()
        found.append(pid)
        waiting += children(pid)
    return found


def command_of(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read(400).replace(b"\0", b" ").decode("utf-8", "replace").strip()
    except OSError:
        return "?"


def identify(pid: int, spec: dict[str, Any]) -> dict[str, Any]:
    ticks = 0
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat", "rb") as file:
        stat = file.read()
        ticks = int(stat[stat.rfind(b")") + 2 :].split()[19])
    return {"pid": pid, "start_ticks": ticks, "host": spec["host"], "boot_id": spec["boot_id"]}


def open_raw(path: str) -> int:
    # Another name may have been linked to in its place; the attempt's folder is new, so nothing else can be there.
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


def report(spec: dict[str, Any], value: dict[str, Any]) -> bool:
    """Send one line to the supervisor that started us; False when it is gone. A pipe needs no disk."""
    try:
        os.write(spec["report_fd"], json.dumps(value).encode() + b"\n")
    except OSError:
        return False
    return True


def reserve(path: str) -> None:
    """Write a file of blanks beside `path`: its blocks take the content later, when the disk may be full."""
    fd = os.open(f"{path}.tmp", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    with open(fd, "wb") as file:
        file.write(b" " * RESERVED_BYTES)


def write_json(path: str, value: dict[str, Any], *, patience_s: float = 0.0) -> None:
    """Write the file whole or not at all, into the reserved blocks if they are there.

    `patience_s`: how long to try again while the disk refuses it, when only this process knows the content.
    """
    data = json.dumps(value).encode()
    until_s = time.monotonic() + patience_s
    while True:
        try:
            write_in_place(path, data)
            return
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS) or time.monotonic() >= until_s:
                return
        time.sleep(1.0)


def write_in_place(path: str, data: bytes) -> None:
    temporary = f"{path}.tmp"
    try:
        overwrite(temporary, data, os.O_CREAT)
        os.replace(temporary, path)
    except OSError:
        # The second version of wait.json: only fields that nobody waits for have changed since the first.
        if not os.path.exists(path):
            raise
        overwrite(path, data)


def overwrite(path: str, data: bytes, more_flags: int = 0) -> None:
    """Write `data` over the file's own blocks, padded with blanks to its length."""
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW | more_flags, 0o600)
    try:
        text = data.ljust(os.fstat(fd).st_size - 1) + b"\n"
        if os.pwrite(fd, text, 0) < len(text):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    finally:
        os.close(fd)


if __name__ == "__main__":
    main()
