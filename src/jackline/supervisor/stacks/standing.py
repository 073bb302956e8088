"""Everything that a proof of a deadlock needs, read at one time: what each thread waits for, and what ties processes.

Owns the order of reading: reports from inside the processes first (their handlers run a moment), then the kernel's
view of each thread. Does not prove anything (`hang.deadlock`).
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Sequence
from dataclasses import field, replace
from pathlib import Path

from jackline.diagnosis.deaths.traceback_text import find_chains
from jackline.diagnosis.frames import innermost_user_frame
from jackline.immutable import immutable
from jackline.machine.proc import is_python, list_threads
from jackline.machine.procfs import read_bytes, read_link, read_text
from jackline.machine.readings import Wait
from jackline.machine.ties import Ties, read_ties
from jackline.machine.waits import read_wait
from jackline.rundir.access.reading import read_end
from jackline.rundir.access.secrets import without_credentials
from jackline.rundir.layout import AttemptDir
from jackline.supervisor.stacks.inside import InsideReport, ask_inside
from jackline.supervisor.stacks.interrupts import would_break_off
from jackline.supervisor.stacks.take import sample_stacks

_ENDING = re.compile(r"(?:Exception in (?=thread)|(?=Process))(thread|Process) (.{1,80}):$")
_LOOKED_BYTES, _MOST_LINES, _MOST_ENDINGS, _LONGEST_WORDS = 256 << 10, 120, 2, 160
_EXIT_CODE = 49  # its place behind the name in /proc/PID/stat
_MOST_PIDS = 64
_MOST_THREADS = 256


@immutable
class StandingThread:
    """One thread as the kernel sees it. `link` is the pipe or socket that it waits for, e.g. 'pipe:[5]'."""

    pid: int
    tid: int
    ppid: int
    comm: str
    wait: Wait
    link: str = ""
    is_python: bool = False
    place: str = ""  # only where the process itself could not be asked
    ended_by: int | None = None  # as waitpid tells it, of a process that its parent has not noticed to have ended

    @property
    def ending(self) -> str:
        status = self.ended_by or 0
        if not os.WIFSIGNALED(status):
            return f"has exited with code {os.waitstatus_to_exitcode(status)}"
        number = os.WTERMSIG(status)
        is_named = number in set(signal.Signals)
        return f"was killed by {signal.Signals(number).name if is_named else f'signal {number}'}"


@immutable
class Standing:
    """All threads of a tree that stands still."""

    threads: tuple[StandingThread, ...]
    reports: tuple[InsideReport, ...] = ()
    ties: Ties = field(default_factory=Ties)
    endings: tuple[str, ...] = ()  # "thread 'reader' has ended with ValueError: ... at a.py:7", as it was printed


def read_standing(pids: Sequence[int], folder: Path) -> Standing:
    """Signals each Python process once; costs about 10 ms in it and a millisecond a process here."""
    looked = list(dict.fromkeys(pids))[:_MOST_PIDS]
    pythons = [pid for pid in looked if is_python(pid)]
    reports = ask_inside(pythons, folder)
    places = _places_of([pid for pid in pythons if would_break_off(pid)])
    threads = [replace(one, place=places.get(one.tid, "")) for pid in looked for one in _threads_of(pid)]
    links = {thread.link for thread in threads if thread.link}
    needs_locks = any(thread.wait.kind == "file_lock" for thread in threads)
    ties = read_ties(links) if links or needs_locks else Ties()
    return Standing(tuple(threads), reports, ties, printed_endings(folder.parent))


def printed_endings(attempt: Path) -> tuple[str, ...]:
    """What Python printed when a thread or a child ended by an exception, the newest of them: those who wait for it
    are told nothing."""
    found: list[str] = []
    for path in (AttemptDir(attempt).raw_out, AttemptDir(attempt).raw_err):
        try:
            data, _ = read_end(path, _LOOKED_BYTES)
        except OSError:
            continue
        lines = data.decode("utf-8", "replace").splitlines()
        for number, line in enumerate(lines):
            if header := _ENDING.match(line):
                found += _ending_of(header, lines[number + 1 : number + 1 + _MOST_LINES])
    return tuple(found[-_MOST_ENDINGS:])


def _ending_of(header: re.Match[str], lines: Sequence[str]) -> list[str]:
    chain = next(iter(find_chains(lines)), None)
    if chain is None:
        return []
    error, place = chain.last, chain.last.place
    words = without_credentials(error.first_line)[:_LONGEST_WORDS]
    return [f"{header[1].lower()} '{header[2]}' has ended with {words}{f' at {place.place}' if place else ''}"]


def _places_of(pids: Sequence[int]) -> dict[int, str]:
    """Where the threads of processes stand that no signal may reach, as it is seen from outside."""
    stacks = sample_stacks(pids, stacks_folder=None) if pids else ()
    found = {one.thread_id: innermost_user_frame(one) for stack in stacks for one in stack.threads}
    return {tid: frame.place for tid, frame in found.items() if frame is not None}


def _threads_of(pid: int) -> list[StandingThread]:
    stat = read_bytes(f"/proc/{pid}/stat") or b""
    fields = stat[stat.rfind(b")") + 2 :].split()
    ppid = int(fields[1]) if len(fields) > 1 else 0
    status = int(fields[_EXIT_CODE]) if len(fields) > _EXIT_CODE and fields[0] == b"Z" else None
    python = is_python(pid)
    found = []
    for tid in list_threads(pid)[:_MOST_THREADS]:
        wait = read_wait(pid, tid)
        link = read_link(f"/proc/{pid}/fd/{wait.fd}") or "" if wait.fd is not None else ""
        if link.endswith((f"/ask.{pid}", f"/flight.{pid}")):
            continue  # our own thread, which waits to be asked: it can wake nobody
        comm = (read_text(f"/proc/{pid}/task/{tid}/comm") or "").strip()
        link = link if link.endswith("]") else ""
        found.append(StandingThread(pid, tid, ppid, comm, wait, link, python, ended_by=status))
    return found
