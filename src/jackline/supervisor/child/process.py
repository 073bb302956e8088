"""The user's running command: start it through a keeper, send it signals, ask whether it has ended.

Owns starting the keeper and reading its files. Does not own when to signal (stopping.py).
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jackline.errors import JacklineError, UsageError
from jackline.immutable import immutable
from jackline.machine.disk import explain_refusal
from jackline.machine.proc import list_tree, read_environ, read_tree
from jackline.machine.procfs import list_numbers
from jackline.machine.readings import TreeReading
from jackline.rundir.layout import AttemptDir
from jackline.rundir.process_id import boot_id, host_name, is_alive, read_state
from jackline.rundir.records.start import StartRecord, WaitRecord, read_start, read_wait
from jackline.supervisor.attempt.stopping import Target
from jackline.supervisor.child.keeper import is_own
from jackline.supervisor.child.waking import EndWatch
from jackline.supervisor.options import SuperviseOptions

KEEPER = Path(__file__).with_name("keeper.py")
START_DEADLINE_S = 30.0
SURVIVORS_MAY_SAVE_S = 5.0


@immutable
class Ending:
    """How the command ended. If both are None, no process saw the end."""

    exit_code: int | None
    signal: int | None
    ended_at_s: float
    max_rss_bytes: int = 0
    orphans: tuple[dict[str, Any], ...] = ()


class Command:
    """One attempt's process tree."""

    def __init__(
        self,
        attempt: AttemptDir,
        start: StartRecord,
        started: subprocess.Popen[bytes] | None = None,
        reports: KeeperReports | None = None,
    ) -> None:
        self.attempt = attempt
        self._started = started  # the keeper, when it is our own child and must be reaped
        self._reports = reports
        if start.child is None or start.keeper is None:
            raise JacklineError(f"{attempt.start_file} is damaged", hint="start again: jackline resume")
        self.child = start.child
        self.keeper = start.keeper
        self.started_at_s = start.started_at_s or 0.0
        self.is_adopted = bool(start.is_adopted)
        self.ends = EndWatch((self.child, self.keeper))

    def read_tree(self) -> TreeReading:
        """Read the command and its descendants, without the keeper."""
        root = self.keeper if is_alive(self.keeper) and not self.is_adopted else self.child
        return read_tree(root.pid, without_root=root is self.keeper)

    def ending(self) -> Ending | None:
        """How the main process ended; None while it is alive."""
        if self.ends.are_all_there():
            return None
        # Check this before reading the file: a keeper may write it and exit in between, and would then seem to have
        # exited without writing.
        is_keeper_there = is_alive(self.keeper)
        wait = read_wait(self.attempt)
        if not wait.is_there and self._reports is not None:
            wait = WaitRecord.from_json(self._reports.newest())  # the disk did not take wait.json
        if wait.is_there:
            return Ending(
                exit_code=wait.exit_code,
                signal=wait.signal,
                ended_at_s=time.time() if wait.ended_at_s is None else wait.ended_at_s,
                max_rss_bytes=wait.max_rss_bytes or 0,
                orphans=wait.orphans,
            )
        if is_keeper_there:
            if read_state(self.child.pid) in ("", "Z"):
                continue_paused([self.keeper.pid])  # a paused keeper cannot report the end
            return None
        return self._ending_without_keeper()

    def is_settled(self) -> bool:
        """True when no process of the command is left to wait for."""
        if self._started is not None:
            self._started.poll()
        return not is_alive(self.keeper) and not self._is_child_there()

    def _is_child_there(self) -> bool:
        return is_alive(self.child)

    def send(self, number: int, target: Target) -> list[int]:
        """Signal the main process, its group, or all processes below the keeper except a running save or upload.
        A paused process handles no signal, so all paused processes are continued; returns their pids. A process that
        Jackline did not start gets none."""
        if self.is_adopted:
            return []
        with contextlib.suppress(OSError):
            if target == "main":
                os.kill(self.child.pid, number) if is_alive(self.child) else None
            elif target == "group":
                os.killpg(self.child.pid, number)
        if target == "tree":
            with contextlib.suppress(OSError):
                os.killpg(self.child.pid, number)
            for process in self.read_tree().processes:
                if is_own(process.pid):
                    continue
                with contextlib.suppress(OSError):
                    os.kill(process.pid, number)
        root = self.keeper if is_alive(self.keeper) else self.child
        return continue_paused(list_tree(root.pid)) if number != signal.SIGKILL and is_alive(root) else []

    def end_survivors(self) -> list[int]:
        """End the processes that a failed command left behind, if its keeper was killed and cannot do it: they would
        hold the GPU. They are found by the environment they were started with. Returns their pids."""
        if is_alive(self.keeper) or read_wait(self.attempt).is_settled or is_alive(self.child):
            return []
        ending = self.ending()
        found = self._survivors() if ending is not None and ending.exit_code != 0 else []
        for number in (signal.SIGTERM, signal.SIGKILL) if found else ():
            for pid in self._survivors():
                with contextlib.suppress(OSError):
                    os.kill(pid, number)
                    continue_paused([pid])
            until_s = time.monotonic() + SURVIVORS_MAY_SAVE_S
            while self._survivors() and time.monotonic() < until_s:
                time.sleep(0.05)
        for pid in found:
            with contextlib.suppress(OSError):  # not all of them have become our children
                os.waitpid(pid, os.WNOHANG)
        return found

    def _survivors(self) -> list[int]:
        """All processes of this attempt, without ourselves and a running save or upload."""
        run, number = str(self.attempt.path.parents[1]), str(self.attempt.number)
        found = []
        for pid in list_numbers("/proc"):
            env = read_environ(pid) if pid not in (os.getpid(), self.keeper.pid) else {}
            is_of_it = env.get("JACKLINE_RUN_DIR") == run and env.get("JACKLINE_ATTEMPT") == number
            if is_of_it and read_state(pid) not in ("Z", "X", "") and not is_own(pid):
                found.append(pid)
        return found

    def _ending_without_keeper(self) -> Ending | None:
        """The keeper was killed: the command is now our child if we are its subreaper, else nobody's."""
        try:
            pid, status = os.waitpid(self.child.pid, os.WNOHANG)
        except ChildProcessError:
            return None if self._is_child_there() else Ending(None, None, self._last_sign_s())
        if pid == 0:
            return None
        if os.WIFSIGNALED(status):
            return Ending(None, os.WTERMSIG(status), time.time())
        return Ending(os.waitstatus_to_exitcode(status), None, time.time())

    def _last_sign_s(self) -> float:
        """When it last wrote something, for an end that nobody saw: it may be noticed days later."""
        times = [self.started_at_s]
        for path in (self.attempt.raw_out, self.attempt.raw_err):
            with contextlib.suppress(OSError):
                times.append(path.stat().st_mtime)
        return min(max(times), time.time())


def continue_paused(pids: Iterable[int]) -> list[int]:
    """Send SIGCONT to those that a signal has stopped; returns them. A process held by a debugger stays held."""
    found = []
    for pid in pids:
        if read_state(pid) == "T":
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGCONT)
                found.append(pid)
    return found


class KeeperReports:
    """The lines that a keeper sends to the supervisor that started it, through a pipe, which needs no disk."""

    def __init__(self, fd: int) -> None:
        os.set_blocking(fd, False)
        self._fd = fd
        self._data = b""

    def newest(self) -> dict[str, Any]:
        """The last whole line so far; empty when there is none."""
        with contextlib.suppress(OSError):
            while block := os.read(self._fd, 65536):
                self._data += block
        lines = self._data.split(b"\n")[:-1]
        try:
            value = json.loads(lines[-1]) if lines else {}
        except ValueError:
            return {}
        return value if isinstance(value, dict) else {}

    def __del__(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self._fd)


def start_command(
    attempt: AttemptDir,
    argv: Sequence[str],
    *,
    cwd: str,
    env: Mapping[str, str],
    options: SuperviseOptions,
    lock_fd: int | None = None,
) -> Command:
    """Start `argv` under a keeper and wait until the kernel has accepted it. Until then the keeper holds the lock as
    well, so that nobody starts another command if we are killed meanwhile."""
    report, reporter = os.pipe()
    spec = {
        "report_fd": reporter,
        "argv": list(argv),
        "cwd": cwd,
        "env": dict(env),
        "raw_out": str(attempt.raw_out),
        "raw_err": str(attempt.raw_err) if options.split_streams else "",
        "start_file": str(attempt.start_file),
        "wait_file": str(attempt.wait_file),
        "keyboard": str(attempt.keyboard),
        "tty": options.tty,
        "columns": options.columns,
        "rows": options.rows,
        "host": host_name(),
        "boot_id": boot_id(),
        "lock": lock_fd,
    }
    # Passed in memory, not by command line or file, because the environment may hold passwords.
    spec_fd = os.memfd_create("jackline-keeper", 0)
    os.write(spec_fd, json.dumps(spec).encode("utf-8", "surrogateescape"))
    os.lseek(spec_fd, 0, os.SEEK_SET)
    try:
        keeper = subprocess.Popen(
            [sys.executable, "-I", "-S", str(KEEPER), str(spec_fd)],
            pass_fds=(spec_fd, reporter) if lock_fd is None else (spec_fd, reporter, lock_fd),
            start_new_session=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
        )
    finally:
        os.close(spec_fd)
        os.close(reporter)
    reports = KeeperReports(report)
    start = _wait_for_start(attempt, keeper, reports)
    if start.exec_errno:
        keeper.wait(START_DEADLINE_S)
        raise CommandNotStarted(argv[0], start.exec_errno)
    return Command(attempt, start, keeper, reports)


class CommandNotStarted(UsageError):
    """The kernel refused to run the command."""

    def __init__(self, program: str, number: int) -> None:
        super().__init__(f"cannot start '{program}': {os.strerror(number)}", hint="check the path and its rights")
        self.errno = number


def adopt_command(attempt: AttemptDir) -> Command | None:
    """The command that a previous supervisor started; None when it had not started one, and for an attempt without
    a supervisor, which has no keeper and no output file. Raises when such an attempt is still alive."""
    start = read_start(attempt)
    if start.is_bare:
        if is_alive(start.child):
            pid = start.child.pid if start.child else 0
            raise UsageError(f"the run is alive in process {pid}, which was started without a supervisor")
        return None
    return Command(attempt, start) if start.is_there else None


def _wait_for_start(attempt: AttemptDir, keeper: subprocess.Popen[bytes], reports: KeeperReports) -> StartRecord:
    deadline = time.monotonic() + START_DEADLINE_S
    while time.monotonic() < deadline:
        start = read_start(attempt)
        if start.is_there:
            return start
        if keeper.poll() is not None:
            break
        time.sleep(0.005)
    with contextlib.suppress(OSError):
        os.killpg(keeper.pid, signal.SIGKILL)
    refused = reports.newest().get("refused_errno")
    if isinstance(refused, int):
        why = explain_refusal(OSError(refused, os.strerror(refused)), attempt.path)
        raise JacklineError(f"cannot write to {attempt.path}: {why}", hint="make room there, then start it again")
    raise JacklineError("the keeper process did not start", hint="is the disk full, or the process limit reached?")
