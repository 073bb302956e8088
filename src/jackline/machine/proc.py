"""Processes: one, or a tree of them, from /proc.

Owns reading /proc/PID and finding the descendants. `waits` tells what a thread waits for, `net` counts bytes on the
network. For a process that has exited the result is None or empty; nothing here raises for it.
"""

from __future__ import annotations

import functools
import os
import re
import time
from collections.abc import Mapping
from stat import S_ISREG
from typing import Literal, NamedTuple

from jackline.immutable import immutable
from jackline.machine.net import look_at_sockets
from jackline.machine.procfs import list_numbers, read_bytes, read_link, read_text
from jackline.machine.readings import ProcessReading, RankPlace, TreeReading, Wait
from jackline.machine.waits import read_wait, wait_in_state

__all__ = [
    "OpenFile",
    "catches_signal",
    "is_python",
    "list_threads",
    "list_tree",
    "open_files",
    "read_command",
    "read_environ",
    "read_process",
    "read_rank",
    "read_tree",
    "read_wait",
]

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
# Above this number, threads are not summed one by one: a torch process on a large host has hundreds, at 4 us each.
_MOST_THREADS = 64
# The first processes of a tree are read completely, the others without the costly parts: threads and descriptors.
_MOST_READ_WHOLE = 48
_MOST_PROCESSES = 4096
_MOST_COMMAND_CHARS = 4096
_GPU_DEVICE = re.compile(r"/dev/(nvidia\d+$|nvidia-uvm|kfd$|dri/renderD\d+$|dxg$|accel)")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]+")


@immutable
class OpenFile:
    """A file on disk that a process has open."""

    fd: int
    path: str
    size_bytes: int
    modified_s: float  # time.time() of the last write
    is_writing: bool


@immutable
class _Stat:
    comm: str
    state: str
    ppid: int
    cpu_s: float
    num_threads: int
    start_ticks: int
    rss_bytes: int


class _ThreadTimes(NamedTuple):
    tid: int
    on_cpu_ns: int
    queued_ns: int  # ready to run, but others had the CPU
    num_runs: int  # how often it was given a CPU


def _parse_stat(data: bytes) -> _Stat:
    # The command name may contain spaces and parentheses, so count from the last parenthesis.
    end = data.rfind(b")")
    fields = data[end + 2 :].split()
    return _Stat(
        comm=data[data.find(b"(") + 1 : end].decode("utf-8", "replace"),
        state=fields[0].decode("ascii"),
        ppid=int(fields[1]),
        cpu_s=(int(fields[11]) + int(fields[12])) / _TICKS_PER_S,
        num_threads=int(fields[17]),
        start_ticks=int(fields[19]),
        rss_bytes=int(fields[21]) * _PAGE_BYTES,
    )


def read_process(pid: int) -> ProcessReading | None:
    """The current reading of one process; costs about 0.1 ms with a few threads. None when it has exited."""
    return _read(pid, is_whole=True)


def _read(pid: int, *, is_whole: bool) -> ProcessReading | None:
    data = read_bytes(f"/proc/{pid}/stat")
    if not data:
        return None
    stat = _parse_stat(data)
    read, written = _disk_bytes(pid)
    main_read, main_written = _main_chars(pid)
    times = _thread_times(pid, stat, is_whole=is_whole)
    on_cpu_s = sum(one.on_cpu_ns for one in times) / 1e9
    wait = wait_in_state(pid, pid, stat.state, is_cheap=not is_whole)
    return ProcessReading(
        pid=pid,
        ppid=stat.ppid,
        start_ticks=stat.start_ticks,
        comm=stat.comm,
        state=stat.state,
        cpu_s=stat.cpu_s,
        wants_cpu_s=max(on_cpu_s, stat.cpu_s) + sum(one.queued_ns for one in times) / 1e9,
        rss_bytes=stat.rss_bytes,
        num_threads=stat.num_threads,
        read_bytes=read,
        write_bytes=written,
        wait=wait,
        is_python=is_python(pid, stat.start_ticks),
        main_cpu_s=next((one.on_cpu_ns / 1e9 for one in times if one.tid == pid), None),
        main_wchar_bytes=main_written,
        main_rchar_bytes=main_read,
        main_sleeps=_main_sleeps(pid),
        threads=tuple((one.tid, one.on_cpu_ns) for one in times),
        thread_runs=tuple(one.num_runs for one in times),
        awaited_sockets=_awaited_sockets(pid, wait),
        rank=read_rank(pid, stat.start_ticks),
    )


def _awaited_sockets(pid: int, wait: Wait) -> frozenset[int]:
    if wait.kind != "network" or wait.fd is None:
        return frozenset()
    links = (read_link(f"/proc/{pid}/fd/{fd}") or "" for fd in wait.fds or (wait.fd,))
    return frozenset(int(link[8:-1]) for link in links if link.startswith("socket:["))


def _main_sleeps(pid: int) -> int | None:
    return _number_after(read_bytes(f"/proc/{pid}/task/{pid}/status") or b"", b"voluntary_ctxt_switches:")


def _main_chars(pid: int) -> tuple[int | None, int | None]:
    """Bytes that the main thread has passed through read() and write()."""
    data = read_bytes(f"/proc/{pid}/task/{pid}/io") or b""
    return _number_after(data, b"rchar:"), _number_after(data, b"wchar:")


def _number_after(data: bytes, name: bytes) -> int | None:
    """The number in the line that begins with `name`. One search, where splitting all lines takes five times that."""
    _, found, rest = (b"\n" + data).partition(b"\n" + name)
    return int(rest.split(None, 1)[0]) if found else None


def _thread_times(pid: int, stat: _Stat, *, is_whole: bool) -> list[_ThreadTimes]:
    """The times of each thread; for many threads only of the main one.

    Threads that ended are in `stat` but no longer in task/, so the larger of both counts as CPU time; the waiting
    time of an ended thread is lost. So the sum may fall a little: a caller treats a fall as zero.
    """
    is_one = stat.num_threads == 1 or not is_whole or stat.num_threads > _MOST_THREADS
    times = []
    for tid in [pid] if is_one else list_numbers(f"/proc/{pid}/task"):
        words = (read_bytes(f"/proc/{pid}/task/{tid}/schedstat") or b"").split()
        if len(words) >= 3:
            times.append(_ThreadTimes(tid, int(words[0]), int(words[1]), int(words[2])))
    return times


def _disk_bytes(pid: int) -> tuple[int, int]:
    """Bytes read from and written to a device; 0, 0 for a process of another user."""
    data = read_bytes(f"/proc/{pid}/io") or b""
    return _number_after(data, b"read_bytes:") or 0, _number_after(data, b"write_bytes:") or 0


def read_tree(root_pid: int, *, with_network: bool = False, without_root: bool = False) -> TreeReading:
    """A process and all its descendants, the root first; empty when the root has exited.

    Only the first 48 processes are read with all their threads and descriptors, so that 300 workers cost 20 ms
    instead of 100.
    """
    at_s = time.monotonic()
    pids = list_tree(root_pid)[1 if without_root else 0 :]
    readings = [_read(pid, is_whole=number < _MOST_READ_WHOLE) for number, pid in enumerate(pids)]
    found = tuple(reading for reading in readings if reading is not None)
    if not found or not (without_root or found[0].pid == root_pid):
        return TreeReading(at_s)
    if not with_network:
        return TreeReading(at_s, found)
    return TreeReading(at_s, found, *look_at_sockets([reading.pid for reading in found]))


def list_tree(root_pid: int) -> list[int]:
    """The pids of a process and its descendants, parents before children."""
    if not os.path.isdir(f"/proc/{root_pid}"):  # noqa: PTH112 - 2 us, not 15
        return []
    found, parents = [root_pid], None
    known = {root_pid}
    for pid in found:
        children = _children_by_kernel(pid) if parents is None else None
        if children is None:
            # This kernel has no such file, or there are more threads to read than processes: scan all processes once.
            parents = parents if parents is not None else _children_by_scan()
            children = parents.get(pid, [])
        new = [child for child in children if child not in known]
        known.update(new)
        found += new
        if len(found) >= _MOST_PROCESSES:
            return found[:_MOST_PROCESSES]
    return found


def _children_by_kernel(pid: int) -> list[int] | None:
    # Children belong to the thread that started them, so every thread has to be read.
    tids = list_numbers(f"/proc/{pid}/task")
    if len(tids) > _MOST_THREADS:
        return None
    children: list[int] = []
    for tid in tids:
        data = read_bytes(f"/proc/{pid}/task/{tid}/children")
        if data is None:
            if os.path.isdir(f"/proc/{pid}/task/{tid}"):  # noqa: PTH112
                return None
            continue
        children += [int(word) for word in data.split()]
    return children


def _children_by_scan() -> dict[int, list[int]]:
    children: dict[int, list[int]] = {}
    for pid in list_numbers("/proc"):
        data = read_bytes(f"/proc/{pid}/stat")
        if data:
            children.setdefault(int(data[data.rfind(b")") + 2 :].split()[1]), []).append(pid)
    return children


def list_threads(pid: int) -> list[int]:
    """Thread ids, the main thread (whose id is the pid) first; empty when the process has exited."""
    return sorted(list_numbers(f"/proc/{pid}/task"), key=lambda tid: (tid != pid, tid))


def read_command(pid: int) -> str:
    """The command line for people: control characters become spaces, so that no process can write to our screen.
    '[name]' for a kernel thread or a zombie, '' when it has exited."""
    data = read_bytes(f"/proc/{pid}/cmdline")
    if data is None:
        return ""
    text = data.decode("utf-8", "replace")
    if not text.strip("\0"):
        name = read_text(f"/proc/{pid}/comm")
        return "" if name is None else f"[{_CONTROL.sub(' ', name).strip()}]"
    return _CONTROL.sub(" ", text)[:_MOST_COMMAND_CHARS].strip()


def read_environ(pid: int) -> dict[str, str]:
    """The environment it was started with; empty when it has exited or we may not read it."""
    entries = (read_bytes(f"/proc/{pid}/environ") or b"").split(b"\0")
    pairs = (os.fsdecode(entry).partition("=") for entry in entries if b"=" in entry)
    return {name: value for name, _, value in pairs}


# How launchers tell a process its rank: torchrun and accelerate, Slurm, Open MPI, other MPIs.
RANK_VARIABLES = (
    ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
    ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
)
# Where the ranks of a job meet (torch), or which step of which job they are (Slurm).
_JOB_VARIABLES = (("MASTER_ADDR", "MASTER_PORT"), ("SLURM_JOB_ID", "SLURM_STEP_ID"))
_MOST_JOB_CHARS = 200
_ranks_known: dict[tuple[int, int], RankPlace | None] = {}


def rank_in(environ: Mapping[str, str], ours: Mapping[str, str]) -> RankPlace | None:
    """The rank that this environment names; None without one. Variables that are in `ours` too say nothing: a batch
    script of Slurm has SLURM_PROCID=0, and so has everything that it starts."""
    for names in RANK_VARIABLES:
        if names[0] in ours:
            continue
        words = [environ.get(name, "") for name in names]
        if all(word.isdecimal() and len(word) < 8 for word in words[:2]) and int(words[1]) > 1:
            rank, world_size = int(words[0]), int(words[1])
            local = int(words[2]) if words[2].isdecimal() and len(words[2]) < 8 else rank
            return RankPlace(rank, world_size, local, job_in(environ)) if rank < world_size else None
    return None


def job_in(environ: Mapping[str, str]) -> str:
    """What all ranks of one job have in common, on all its machines; '' where nothing tells."""
    for names in _JOB_VARIABLES:
        words = [environ.get(name, "") for name in names]
        is_own = names[0] == "MASTER_ADDR" and words[0].startswith(("127.", "localhost", "::1"))
        if all(words) and not is_own:  # every machine has such an address for itself
            return ":".join(words)[:_MOST_JOB_CHARS]
    return ""


def read_rank(pid: int, start_ticks: int) -> RankPlace | None:
    """The rank of a process, read once: the environment that it was started with does not change."""
    key = (pid, start_ticks)
    if key not in _ranks_known:
        found = rank_in(read_environ(pid), os.environ)
        if found is None and _age_s(start_ticks) < _YOUNG_S:
            return None  # it may not have called exec yet: until then it has the environment of its launcher
        if len(_ranks_known) > 4096:
            _ranks_known.clear()
        _ranks_known[key] = found
    return _ranks_known[key]


def _age_s(start_ticks: int) -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME) - start_ticks / _TICKS_PER_S


# (pid, start, program) -> result. A program that calls exec keeps pid and start, so its file is part of the key.
_is_python_known: dict[tuple[int, int, str], bool] = {}
_YOUNG_S = 5.0


@functools.lru_cache(maxsize=256)
def _is_named_python(program: str) -> bool:
    return re.fullmatch(r"python[\d.]*[a-z]*( \(deleted\))?", program.rpartition("/")[2]) is not None


def is_python(pid: int, start_ticks: int | None = None) -> bool:
    """Whether it runs a Python interpreter, by its program's name, else by a libpython among its libraries."""
    program = read_link(f"/proc/{pid}/exe")
    if program is None:
        return False
    if _is_named_python(program):
        return True
    if start_ticks is None:
        data = read_bytes(f"/proc/{pid}/stat")
        start_ticks = _parse_stat(data).start_ticks if data else 0
    key = (pid, start_ticks, program)
    if key not in _is_python_known:
        answer = b"/libpython" in (read_bytes(f"/proc/{pid}/maps") or b"")
        if not answer and _age_s(start_ticks) < _YOUNG_S:
            return False  # its libraries may not be loaded yet: check again next time
        if len(_is_python_known) > 1024:
            _is_python_known.clear()
        _is_python_known[key] = answer
    return _is_python_known[key]


def catches_signal(pid: int, signum: int) -> bool:
    """Whether a handler for the signal is installed; an uncaught real-time signal would kill the process."""
    for line in (read_bytes(f"/proc/{pid}/status") or b"").split(b"\n"):
        if line.startswith(b"SigCgt:"):
            return bool(int(line.split()[1], 16) >> (signum - 1) & 1)
    return False


SignalAnswer = Literal["caught", "ignored", "default", "unknown"]


def signal_answer(pid: int, signum: int) -> SignalAnswer:
    """What the process does about a signal. Python itself always catches SIGINT and raises KeyboardInterrupt."""
    masks = {}
    for line in (read_bytes(f"/proc/{pid}/status") or b"").split(b"\n"):
        if line.startswith((b"SigCgt:", b"SigIgn:")):
            masks[line[:6]] = int(line.split()[1], 16) >> (signum - 1) & 1
    if len(masks) < 2:
        return "unknown"
    if masks[b"SigCgt"]:
        return "caught"
    return "ignored" if masks[b"SigIgn"] else "default"


def uses_gpu(pid: int) -> bool:
    """Whether the process has a GPU's device open. In a container the driver's list has pids of another namespace."""
    for fd in list_numbers(f"/proc/{pid}/fd"):
        link = read_link(f"/proc/{pid}/fd/{fd}") or ""
        if link.startswith("/dev/") and _GPU_DEVICE.match(link):
            return True
    return False


def open_files(pid: int) -> list[OpenFile]:
    """Regular files that it has open, the last written first. Empty when it has exited or we may not read it."""
    found = []
    for fd in list_numbers(f"/proc/{pid}/fd"):
        path = read_link(f"/proc/{pid}/fd/{fd}") or ""
        if not path.startswith("/") or path.startswith(("/dev/", "/proc/", "/memfd:")):
            continue
        try:
            status = os.stat(f"/proc/{pid}/fd/{fd}")  # noqa: PTH116
            flags = os.lstat(f"/proc/{pid}/fd/{fd}").st_mode
        except OSError:
            continue
        if not S_ISREG(status.st_mode):
            continue
        # The link's own permission bits say how the file was opened: 0o200 is "for writing".
        found.append(OpenFile(fd, path, status.st_size, status.st_mtime, bool(flags & 0o200)))
    return sorted(found, key=lambda file: -file.modified_s)
