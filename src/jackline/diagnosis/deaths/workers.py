"""Errors that say that another process of the run has ended, and why that one ended."""

from __future__ import annotations

import re
import signal as signals
from dataclasses import replace

from jackline.diagnosis.deaths.evidence import Evidence, Finding
from jackline.diagnosis.deaths.sentences import at_place, is_memory_nearly_full, place_line, ran_line
from jackline.diagnosis.deaths.signal import (
    are_counters_unreadable,
    crashed,
    kernel_oom,
    perhaps_oom,
    shm_of_workers,
    signal_name,
)
from jackline.diagnosis.deaths.traceback_text import ErrorText
from jackline.immutable import immutable

_SIGNAL_WORDS = {
    "Killed": signals.SIGKILL,
    "Segmentation fault": signals.SIGSEGV,
    "Bus error": signals.SIGBUS,
    "Aborted": signals.SIGABRT,
    "Terminated": signals.SIGTERM,
}
_LOADER = re.compile(
    r"DataLoader worker \(pid\(?s?\)? ([\d, ]+)\) (?:is killed by signal: (\w[\w ]*)|exited unexpectedly)"
)
_TORCHRUN = re.compile(r"exitcode\s*: (-\d+) \(pid: (\d+)\)")
# The ranks above this line were ended by the launcher itself.
_ROOT_CAUSE = "Root Cause (first observed failure)"
_RECEIVED = re.compile(r"Signal (\d+) \(SIG\w+\) received by PID (\d+)")
_DIED_WITH = re.compile(r"died with <Signals\.(SIG\w+): (\d+)>")
_SPAWNED = re.compile(r"process \d+ terminated with signal (SIG\w+)")
_EXIT_CODES = re.compile(r"exit codes of the workers are \{SIG\w+\(-(\d+)\)")  # joblib
_POOL = re.compile(
    r"terminated abruptly while the future|unexpectedly terminated|abruptly died during map|BrokenProcessPool"
    r"|worker process has died"
)
# These errors, raised inside multiprocessing, mean that the process at the other end has ended.
_LOST_CONTACT = frozenset({"EOFError", "ConnectionResetError", "BrokenPipeError", "ConnectionRefusedError"})
_HINT = "`jackline logs` shows what it said last; ask who or what ends processes here"
_LOADER_HINT = "`jackline logs` shows what the worker said last; with num_workers=0 its own error is seen"
_CRASHES = (signals.SIGSEGV, signals.SIGBUS, signals.SIGABRT)


_NO_MORE = re.compile(
    r"can't start new thread|pthread_create failed|Thread creation failed|BlockingIOError: \[Errno 11\] [\w ]+$"
    r"|fork: (?:retry: )?Resource temporarily unavailable"
)


def no_more_threads(error: ErrorText, evidence: Evidence) -> Finding | None:
    """The limit on processes was reached. Libraries print so, or crash right after it."""
    said = next((line.strip() for line in error.text.splitlines() if _NO_MORE.search(line)), None)
    if said is None:
        return None
    return Finding(
        "own_exception",
        # A library may print so and live on: only an exception of that name is proof.
        "certain" if error.name else "likely",
        f"no more threads or processes could be started{at_place(error.place)}",
        (*place_line(error.place), said[:200], *ran_line(evidence)),
        "raise the limit (`ulimit -u`, a container's --pids-limit), or start fewer: OMP_NUM_THREADS=1, fewer workers",
        place=error.place,
    )


_FAULTS = {
    "Segmentation fault": signals.SIGSEGV,
    "Aborted": signals.SIGABRT,
    "Bus error": signals.SIGBUS,
    "Illegal instruction": signals.SIGILL,
}


def faulted(fault_text: str) -> signals.Signals | None:
    """The signal of a crash that faulthandler wrote down."""
    return next((number for name, number in _FAULTS.items() if name in fault_text), None)


@immutable
class Lost:
    """A process of the run that has ended; unknown fields are None."""

    pid: int | None
    signal: int | None
    who: str
    is_certain: bool = True
    code: int | None = None


def lost_process(error: ErrorText) -> Lost | None:
    """Which process has ended, according to an error."""
    text = error.text.rpartition(_ROOT_CAUSE)[2]
    loader = _LOADER.search(text)
    if loader:
        pid = int(loader[1].split(",")[0])
        word = (loader[2] or "").strip()
        known = next((number for name, number in _SIGNAL_WORDS.items() if word.startswith(name)), None)
        return Lost(pid, known, f"DataLoader worker {pid}")
    launched = _TORCHRUN.search(text) or _RECEIVED.search(text)
    if launched:
        return Lost(int(launched[2]), abs(int(launched[1])), f"the training process {launched[2]}")
    died = _DIED_WITH.search(text)
    if died:
        return Lost(None, int(died[2]), "the launched process")
    spawned = _SPAWNED.search(text)
    if spawned:
        number = getattr(signals, spawned[1], None)
        return Lost(None, int(number) if number else None, "a spawned process")
    if _POOL.search(text):
        return Lost(None, None, "a worker of the process pool")
    if error.name in _LOST_CONTACT and any("multiprocessing" in frame.file for frame in error.frames[-4:]):
        return Lost(None, None, "a worker process", is_certain=False)
    return None


def _said_exit_code(evidence: Evidence) -> int | None:
    """joblib names the signals of its workers below an empty line."""
    found = (_EXIT_CODES.search(line) for line in reversed(evidence.output_tail[-10:]))
    return next((int(match[1]) for match in found if match), None)


def _noted(evidence: Evidence) -> Lost | None:
    """The only child of multiprocessing that failed, as the parent noted when it ended."""
    pipes = evidence.last_words.pipes if evidence.last_words is not None else ()
    # SIGTERM is what multiprocessing itself sends to daemons at the end.
    ended = [end for end in pipes if end.what == "worker" and end.returncode not in (None, 0, -signals.SIGTERM)]
    if len(ended) != 1:
        return None
    code = ended[0].returncode or 0
    who = f"the process '{ended[0].name}' (pid {ended[0].pid})"
    return Lost(ended[0].pid, -code if code < 0 else None, who, code=code if code > 0 else None)


def worker_killed(error: ErrorText, evidence: Evidence) -> tuple[Finding, ...]:
    """() when the error is not about a lost process."""
    lost = lost_process(error)
    if lost is None:
        return ()
    if lost.signal is None and (fault := faulted(evidence.fault_text)) is not None:
        lost = replace(lost, signal=fault)  # the parent only lost contact; the worker wrote how it crashed
    if lost.signal is None and (said := _said_exit_code(evidence)) is not None:
        lost = replace(lost, signal=said)
    if lost.signal is None and not lost.is_certain:
        lost = _noted(evidence) or lost
    if lost.signal == signals.SIGBUS and lost.who.startswith("DataLoader"):
        return (shm_of_workers(evidence, f"{lost.who} crashed with a bus error", error.place),)
    if lost.signal in _CRASHES:
        return (crashed(evidence, lost.signal, who=lost.who),)
    by_kernel = kernel_oom(evidence, victim=lost.who)
    if by_kernel is not None and lost.signal in (None, signals.SIGKILL):
        return (by_kernel,)
    # If the counters cannot be read and memory was full, an identical retry would most likely end the same way.
    is_doubtful = is_memory_nearly_full(evidence) and are_counters_unreadable(evidence)
    silent = "ended without a word" if lost.code is None else f"ended with exit code {lost.code}"
    how = f"was killed with {signal_name(lost.signal)}" if lost.signal else silent
    finding = Finding(
        "worker_killed",
        "not sure" if is_doubtful or not lost.is_certain else "likely",
        f"{lost.who} {how}, and the run ended with it",
        (*place_line(error.place), *_no_oom_line(evidence), *ran_line(evidence)),
        _LOADER_HINT if lost.who.startswith("DataLoader") else _HINT,
        not is_doubtful,
        error.place,
    )
    return (finding, perhaps_oom(evidence)) if is_doubtful else (finding,)


def _no_oom_line(evidence: Evidence) -> tuple[str, ...]:
    if are_counters_unreadable(evidence):
        return ("the kernel's out-of-memory counters could not be read here",)
    return ("the kernel counted no out-of-memory kill of this run",)
