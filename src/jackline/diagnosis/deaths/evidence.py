"""Evidence about an ended or a live run as plain data, and the findings concluded from it."""

from __future__ import annotations

from dataclasses import asdict, field
from typing import Any, Literal

from jackline.diagnosis.frames import Frame
from jackline.immutable import immutable
from jackline.rundir.records.fields import decode, each

Confidence = Literal["certain", "likely", "not sure"]

Cause = Literal[
    "finished",
    "stopped",  # by a person, or requested by the script itself (exit 75)
    "kernel_oom",
    "killed_by_someone",
    "preempted",
    "segfault",
    "abort",
    "bus_error",
    "other_signal",
    "cuda_oom",
    "host_memory_error",  # MemoryError, can't allocate memory
    "disk_full",
    "import_error",
    "syntax_error",
    "command_not_found",
    "keyboard_input",  # EOFError: the script asked for input and got none
    "worker_killed",
    "nccl_timeout",
    "cuda_error",
    "network",
    "own_exception",
    "stuck",  # ended by us after a STUCK verdict
    "memory_guard",  # ended by us before the kernel would have killed it
    "time_limit",
    "timed_out",  # by the command `timeout`
    "exit_code",
    "unknown",
]


@immutable
class SentSignal:
    """A signal that Jackline itself sent, and why: 'ctrl-c', 'stop', 'stuck', 'time-limit', 'memory', 'clean-up'."""

    at_s: float = 0.0
    signal: int = 0
    why: str = ""


@immutable
class DiskSpace:
    """A disk that the command wrote to, or whose path its error names, measured when the attempt had ended."""

    path: str = ""
    free_bytes: int = 0
    total_bytes: int = 0


@immutable
class GpuGrowth:
    """GPU memory that grew steadily until the end, which a single large allocation does not."""

    grew_bytes: int = 0
    over_s: float = 0.0
    bytes_per_s: float = 0.0


@immutable
class RankEnd:
    """One rank of a distributed job, as it was seen last."""

    rank: int = 0
    world_size: int = 0
    pid: int = 0
    has_file: bool = False  # its output is in a file of its own, and `output_tail` is the end of that
    output_tail: tuple[str, ...] = ()
    last_frame: Frame | None = None
    doing: str = ""


@immutable
class NamedFile:
    """A file that was being read when an error came whose message names none."""

    path: str = ""
    line: int | None = None
    column: int | None = None
    is_proved: bool = False  # it holds the very text that could not be read
    is_whole: bool = False  # that text is all of the file
    is_empty: bool = False
    is_file: bool = False  # the code had it open; otherwise a variable or a constant names it
    at_byte: int | None = None


@immutable
class OtherEnd:
    """Who is at the other end of a pipe."""

    what: str = ""  # 'stdout', 'stderr', a 'child' of subprocess, a 'worker' of multiprocessing
    name: str = ""
    pid: int = 0
    returncode: int | None = None  # as Popen.returncode; None while it lives, or where that is not known
    is_broken: bool = False  # nobody reads what is written there


@immutable
class LastWords:
    """What a process noted while it ended (supervisor/child/inside/last_words)."""

    how: str = ""  # 'sys.exit', 'exit', 'os._exit', 'raise SystemExit', 'exception'
    code: int | None = None
    frames: tuple[Frame, ...] = ()  # where it was left, innermost first
    error: str = ""  # the exception that was not caught, or that was being handled
    raised: tuple[Frame, ...] = ()
    files: tuple[NamedFile, ...] = ()
    pipes: tuple[OtherEnd, ...] = ()
    user: tuple[int, ...] = ()  # uid, gid, and the other groups
    is_own: bool = False  # of the command's first process
    is_read: bool = False  # not noted by the process, but the only such line of its script


@immutable
class Rights:
    """Who may do what at a path that an error says may not be used, measured when the attempt had ended."""

    path: str = ""
    exists: bool | None = None  # None: a folder above cannot be entered
    at: str = ""  # the path, or the nearest folder above that exists
    is_folder: bool = False
    owner: str = ""  # 'root (uid 0)'
    group: str = ""
    mode: int = 0
    user: str = ""  # who the process was
    is_user_known: bool = False
    can_read: bool = False
    can_write: bool = False
    can_execute: bool = False  # of a folder: enter it
    is_read_only: bool = False  # the file system
    is_sticky: bool = False  # in a folder like /tmp, and another user's


def _gpu_growth(value: Any) -> GpuGrowth | None:
    found = decode(GpuGrowth, value)
    return found if found.grew_bytes else None


def _frame(value: Any) -> Frame | None:
    found = decode(Frame, value)
    return found if found.file else None


def _pids(value: Any) -> tuple[int, ...] | None:
    return tuple(pid for pid in value if type(pid) is int) if isinstance(value, list) else None


_frames = each(lambda value: decode(Frame, value))
_LAST_WORDS = {
    "tuple[Frame, ...]": _frames,
    "tuple[int, ...]": _pids,
    "tuple[NamedFile, ...]": each(lambda value: decode(NamedFile, value)),
    "tuple[OtherEnd, ...]": each(lambda value: decode(OtherEnd, value)),
}


def last_words_of(value: Any) -> LastWords | None:
    found = decode(LastWords, value, _LAST_WORDS)
    return found if found.how else None


def _rights(value: Any) -> Rights | None:
    found = decode(Rights, value)
    return found if found.path else None


_OWN = {
    "Frame | None": _frame,
    "tuple[int, ...]": _pids,
    "tuple[SentSignal, ...]": each(lambda value: decode(SentSignal, value)),
    "tuple[DiskSpace, ...]": each(lambda value: decode(DiskSpace, value)),
    "tuple[Frame, ...]": _frames,
    "LastWords | None": last_words_of,
    "Rights | None": _rights,
    "GpuGrowth | None": _gpu_growth,
    "tuple[RankEnd, ...]": each(lambda value: decode(RankEnd, value, {"Frame | None": _frame})),
}


GO_ON = "run the same command again, or `jackline resume`, to continue"


@immutable
class Evidence:
    """Everything the supervisor knew when an attempt ended. Saved inside exit.json, so `why` can diagnose again."""

    exit_code: int | None = None  # None when the child was killed by a signal or its end was not seen
    signal: int | None = None
    duration_s: float = -1.0
    ended_at_s: float = 0.0
    output_tail: tuple[str, ...] = ()
    fault_text: str = ""  # what faulthandler wrote at a fatal signal
    sent_signals: tuple[SentSignal, ...] = ()
    stop_requested_by: str = ""  # 'ctrl-c', 'jackline stop', 'SIGTERM to the supervisor', ...
    oom_kills_in_cgroup: int | None = None  # increase during this attempt
    oom_kills_on_machine: int | None = None
    kernel_log: tuple[str, ...] = ()  # lines that name a pid of our tree
    tree_pids: tuple[int, ...] = ()
    peak_memory_bytes: int = 0
    last_memory_bytes: int = 0
    memory_limit_bytes: int | None = None
    memory_limit_source: str = ""
    memory_growth_bytes_per_s: float = 0.0
    growing_frame: Frame | None = None
    is_jump: bool = False  # host memory did not grow in steps before the end
    last_frame: Frame | None = None
    disk_free_bytes: int | None = None
    disk_path: str = ""
    shm_free_bytes: int | None = None
    restart_wish: str = ""  # why the session itself asked for a restart (intent.json)
    is_incomplete: bool | None = None  # by the progress it printed; None where that is not known
    unsaved_why: str = ""  # why the last state of a training that was done could not be saved (intent.json)
    machine: dict[str, Any] = field(default_factory=dict)
    command: str = ""
    disks: tuple[DiskSpace, ...] = ()
    log_path: str = ""  # the log file that it wrote last, and its last lines
    log_tail: tuple[str, ...] = ()
    is_log_its_own: bool = False  # it had the log open; otherwise the file is only the newest in its working folder
    gpu_growth: GpuGrowth | None = None
    keeping_frames: tuple[Frame, ...] = ()  # lines of its code that may keep tensors from step to step
    ranks: tuple[RankEnd, ...] = ()  # of a distributed job
    stuck_text: str = ""  # which ranks were stuck and where, when the alarm was raised
    stuck_frame: Frame | None = None
    is_adopted: bool = False  # started without Jackline
    last_words: LastWords | None = None
    rights: Rights | None = None
    bindings: tuple[str, ...] = ()  # 'ctypes', 'cffi': ways into C that the file in which it crashed imports
    rescued: str = ""  # the command that prints how to load the state that was rescued

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def is_whole(self) -> bool:
        """False when it was read from a file in which the duration or the time of the end is damaged."""
        return self.ended_at_s > 0.0 and self.duration_s >= 0.0

    @staticmethod
    def from_json(raw: object) -> Evidence:
        return decode(Evidence, raw, _OWN)


@immutable
class Finding:
    """One conclusion: what happened with values, how certain it is, what to do next."""

    cause: Cause
    confidence: Confidence
    title: str  # one sentence, no full stop
    detail: tuple[str, ...] = ()  # the evidence, one sentence each
    hint: str = ""
    is_retryable: bool = False
    place: Frame | None = None
    rule: str = ""  # the function that decided, where several explain the same cause

    def to_json(self) -> dict[str, Any]:
        return asdict(self)
