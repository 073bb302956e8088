"""Starts a supervisor, for a new run or for one whose supervisor has exited."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from jackline.errors import JacklineError
from jackline.machine.proc import list_tree
from jackline.rundir import registry
from jackline.rundir.access.trust import may_be_signalled
from jackline.rundir.access.writing import open_own
from jackline.rundir.layout import RunDir
from jackline.rundir.lock import RunLock
from jackline.rundir.process_id import ProcessId, identify, is_alive
from jackline.rundir.records.stop_request import StopRequest, write_stop_request
from jackline.rundir.run_file import DamagedRun, read_run_file
from jackline.rundir.status import read_status
from jackline.supervisor.child.process import continue_paused
from jackline.supervisor.options import SuperviseOptions
from jackline.supervisor.request import StartAnswer, StartRequest

START_DEADLINE_S = 60.0
ADOPTER = Path(__file__).parent / "child/adopter.py"
_WRITES_DOWN_WITHIN_S = 30.0

# Isolated (-I): files in the current folder or on PYTHONPATH may have names of standard modules, and they must not
# break the supervisor. Our own folder comes last for the same reason.
# Garbage is not looked for before all is imported: that would be a tenth of the start.
_BOOT = (
    "import gc, sys; gc.disable(); sys.path.append(sys.argv[1]); "
    "from jackline.supervisor.__main__ import main; gc.freeze(); gc.enable(); main(sys.argv[2:])"
)
_PACKAGE_PARENT = Path(__file__).parents[2]


class NotStarted(JacklineError):
    """The supervisor did not start; carries the reason that it reported."""

    def __init__(self, message: str, *, detail: tuple[str, ...], hint: str | None, exit_code: int) -> None:
        super().__init__(message, detail=detail, hint=hint)
        self.exit_code = exit_code


def start_supervisor(
    run: RunDir,
    options: SuperviseOptions,
    *,
    adopts: bool = False,
    stdin: int | None = None,
    lock: RunLock | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> None:
    """Start one in a session of its own; return when the command runs, raise with the reason when it does not. Lines
    that it reports before that go to `say`. It inherits the `lock` of a run that this process has claimed."""
    lasting = replace(options, start_from=None, from_scratch=False)
    registry.register(run, vouched=True, options=lasting.to_json())
    report, reporter = os.pipe()
    lock_fd = lock.fd if lock is not None else None
    request = StartRequest(reporter, options, adopts=adopts, lock=lock_fd).to_memory()
    log = open_own(run.supervisor_log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    try:
        process = subprocess.Popen(
            [
                sys.executable,
                "-I",
                "-X",
                "no_debug_ranges",  # columns for carets in tracebacks, 0.1 MB
                "-c",
                _BOOT,
                str(_PACKAGE_PARENT),
                str(run.path),
                str(request),
            ],
            stdin=subprocess.DEVNULL if stdin is None else stdin,
            stdout=log,
            stderr=log,
            pass_fds=[fd for fd in (reporter, request, lock_fd) if fd is not None],
            start_new_session=True,
            cwd="/",
        )
    finally:
        os.close(log)
        os.close(request)
        os.close(reporter)
    process.wait()
    answer = _read_answer(report, say)
    if answer.problem:
        raise NotStarted(answer.problem, detail=answer.detail, hint=answer.hint, exit_code=answer.exit_code)


def adopt_process(run: RunDir, process: ProcessId, lock: RunLock) -> None:
    """Make a running process that Jackline did not start the first attempt of a claimed run, and watch it."""
    attempt = run.attempt(1)
    attempt.stacks.mkdir(parents=True)
    ticks_s = process.start_ticks / os.sysconf("SC_CLK_TCK")
    spec = {
        "child": process.to_json(),
        "started_at_s": time.time() - (time.clock_gettime(time.CLOCK_BOOTTIME) - ticks_s),
        "raw_out": str(attempt.raw_out),
        "start_file": str(attempt.start_file),
        "wait_file": str(attempt.wait_file),
    }
    spec_fd = os.memfd_create("jackline-adopter", 0)
    os.write(spec_fd, json.dumps(spec).encode())
    os.lseek(spec_fd, 0, os.SEEK_SET)
    try:
        adopter = subprocess.Popen(
            [sys.executable, "-I", "-S", str(ADOPTER), str(spec_fd)],
            pass_fds=(spec_fd,),
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
        )
    finally:
        os.close(spec_fd)
    while not attempt.start_file.exists():
        if adopter.poll() is not None and not attempt.start_file.exists():
            raise JacklineError(f"process {process.pid} ended just now", hint="its log and dmesg may tell why")
        time.sleep(0.01)
    adopter.returncode = 0  # it lives as long as the process that it watches; this avoids Python's warning
    start_supervisor(run, SuperviseOptions(inject=False, rescue=False), adopts=True, lock=lock)


def take_over(run: RunDir) -> None:
    """Start a new supervisor for a command whose own has exited, or for recording how such a command ended. Only for
    a run that this user has made or accepted."""
    start_supervisor(run, adopted_options(run), adopts=True)


def adopted_options(run: RunDir) -> SuperviseOptions:
    """The options that this user gave at the last start; else those of run.json. Never those of supervisor.json, a
    file that says what is, not what to do."""
    told = registry.entry_of(run).options
    if told is None:
        with contextlib.suppress(DamagedRun):
            told = read_run_file(run).options
    return SuperviseOptions.from_json(told or {})


def take_over_unless_watched(run: RunDir) -> bool:
    """False when the run has a supervisor after all: another process was faster, or a supervisor that has just
    started had not recorded itself yet."""
    try:
        take_over(run)
    except JacklineError:
        until_s = time.monotonic() + _WRITES_DOWN_WITHIN_S
        while (state := read_status(run).state) == "unwatched" and time.monotonic() < until_s:
            time.sleep(0.05)
        if state == "unwatched":
            raise
        return False
    return True


def request_stop(
    run: RunDir, *, by: str, grace_s: float | None = None, number: int | None = None
) -> ProcessId | None:
    """Ask the supervisor to stop the run, or the command itself if there is none. Returns the process asked.

    `number` is the signal for the command; the supervisor itself always gets SIGTERM and passes that one on."""
    import signal

    status = read_status(run)
    with contextlib.suppress(OSError):  # who asks is worth knowing, but the signal counts
        write_stop_request(run, StopRequest(time.time(), by, grace_s, identify(os.getpid()), number))
    for process in (status.supervisor, status.child):
        if process is not None and is_alive(process) and may_be_signalled(process, run):
            with contextlib.suppress(ProcessLookupError):
                is_supervisor = process is status.supervisor
                os.kill(process.pid, signal.SIGTERM if is_supervisor else number or signal.SIGTERM)
                # A paused process would not handle the signal. The supervisor itself continues a paused command.
                continue_paused([process.pid] if is_supervisor else list_tree(process.pid))
                return process
    return None


def _read_answer(report: int, say: Callable[[str], None]) -> StartAnswer:
    """Read the answer, which is the last line. Earlier lines are printed at once and each extends the time limit,
    since copying may take minutes."""
    data = b""
    deadline_s = time.monotonic() + START_DEADLINE_S
    try:
        while time.monotonic() < deadline_s:
            if not select.select([report], [], [], 0.5)[0]:
                continue
            block = os.read(report, 65536)
            if not block:
                break
            data += block
            while b"\n" in data:
                line, _, data = data.partition(b"\n")
                answer = StartAnswer.from_line(line)
                if answer.said is None:
                    return answer
                say(answer.said)
                deadline_s = time.monotonic() + START_DEADLINE_S
    finally:
        os.close(report)
    return StartAnswer.from_line(data)
