"""Everything that a proof of a deadlock needs, read at one time: what each thread waits for, and what ties processes.

Owns the order of reading: reports from inside the processes first (their handlers run a moment), then the kernel's
view of each thread. Does not prove anything (`hang.deadlock`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field, replace
from pathlib import Path

from jackline.diagnosis.frames import innermost_user_frame
from jackline.immutable import immutable
from jackline.machine.proc import is_python, list_threads
from jackline.machine.procfs import read_bytes, read_link, read_text
from jackline.machine.readings import Wait
from jackline.machine.ties import Ties, read_ties
from jackline.machine.waits import read_wait
from jackline.supervisor.stacks.inside import InsideReport, ask_inside
from jackline.supervisor.stacks.interrupts import would_break_off
from jackline.supervisor.stacks.take import sample_stacks

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


@immutable
class Standing:
    """All threads of a tree that stands still."""

    threads: tuple[StandingThread, ...]
    reports: tuple[InsideReport, ...] = ()
    ties: Ties = field(default_factory=Ties)


def read_standing(pids: Sequence[int], folder: Path) -> Standing:
    """Signals each Python process once; costs about 10 ms in it and a millisecond a process here."""
    looked = list(dict.fromkeys(pids))[:_MOST_PIDS]
    pythons = [pid for pid in looked if is_python(pid)]
    reports = ask_inside(pythons, folder)
    places = _places_of([pid for pid in pythons if would_break_off(pid)])
    threads = [replace(one, place=places.get(one.tid, "")) for pid in looked for one in _threads_of(pid)]
    links = {thread.link for thread in threads if thread.link}
    needs_locks = any(thread.wait.kind == "file_lock" for thread in threads)
    return Standing(tuple(threads), reports, read_ties(links) if links or needs_locks else Ties())


def _places_of(pids: Sequence[int]) -> dict[int, str]:
    """Where the threads of processes stand that no signal may reach, as it is seen from outside."""
    stacks = sample_stacks(pids, stacks_folder=None) if pids else ()
    found = {one.thread_id: innermost_user_frame(one) for stack in stacks for one in stack.threads}
    return {tid: frame.place for tid, frame in found.items() if frame is not None}


def _threads_of(pid: int) -> list[StandingThread]:
    stat = read_bytes(f"/proc/{pid}/stat") or b""
    fields = stat[stat.rfind(b")") + 2 :].split()
    ppid = int(fields[1]) if len(fields) > 1 else 0
    python = is_python(pid)
    found = []
    for tid in list_threads(pid)[:_MOST_THREADS]:
        wait = read_wait(pid, tid)
        link = read_link(f"/proc/{pid}/fd/{wait.fd}") or "" if wait.fd is not None else ""
        if link.endswith((f"/ask.{pid}", f"/flight.{pid}")):
            continue  # our own thread, which waits to be asked: it can wake nobody
        comm = (read_text(f"/proc/{pid}/task/{tid}/comm") or "").strip()
        found.append(StandingThread(pid, tid, ppid, comm, wait, link if link.endswith("]") else "", python))
    return found
