"""What else happens while a run trains: its GPUs, CPUs and disk, and who else uses them, as numbers of one moment.

Owns turning counters (of the processes, /proc/stat, cpu.stat) into shares of the time since the reading before, and
who used the CPUs between two moments. Does not own what a change of them means (`slowness`).
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence

from jackline.immutable import immutable
from jackline.machine import procfs
from jackline.machine.cgroups import cgroup_folders
from jackline.machine.proc import read_command
from jackline.machine.readings import GpuReading, ProcessReading

MOST_PROCESSES = 16  # of the run, that are asked for their swap
MOST_OTHERS = 4096
NAMED = 3
LEAST_SHARE = 0.1  # of one CPU: below it nobody is named
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_STOLEN = 8  # field of the first line of /proc/stat: the hypervisor ran another machine
_ALL = slice(1, 9)


@immutable
class Around:
    """None: not known here."""

    clock_share: float | None = None  # of the GPU's highest
    slowdown: str = ""  # 'too hot', 'power cap' ... as the driver says
    gpu_others: tuple[int, ...] = ()
    swapped_bytes: int | None = None  # of the processes of the run
    io_pressure: float | None = None  # share of the last 10 s in which something waited for the disk
    on_disk: float | None = None  # 1.0 where a main thread of the run waited for a disk itself at this moment
    queued: float | None = None  # seconds a second that the busiest process of the run waited for a CPU
    stolen: float | None = None  # share of the machine's CPU time that its hypervisor gave to others
    throttled: float | None = None  # seconds a second that the CPU limit of its cgroup held it


class Surroundings:
    """The counters of the reading before."""

    def __init__(self) -> None:
        self._at_s = 0.0
        self._queued: dict[int, tuple[float, float]] = {}  # pid -> waited for a CPU, used
        self._machine: tuple[float, float] | None = None  # stolen, all
        self._throttled_s: float | None = None

    def read(self, now_s: float, gpus: Sequence[GpuReading], processes: Sequence[ProcessReading]) -> Around:
        ours = [gpu for gpu in gpus if gpu.is_ours]
        pids = {process.pid for process in processes}
        shares = [gpu.clock_share for gpu in ours if gpu.clock_share is not None]
        passed_s, self._at_s = now_s - self._at_s, now_s
        return Around(
            clock_share=min(shares, default=None),
            slowdown=next((gpu.slowdown for gpu in ours if gpu.slowdown), ""),
            gpu_others=tuple(user.pid for gpu in ours for user in gpu.processes if user.pid not in pids),
            swapped_bytes=sum(
                procfs.read_fields(f"/proc/{pid}/status").get("VmSwap") or 0 for pid in sorted(pids)[:MOST_PROCESSES]
            ),
            io_pressure=read_pressure(),
            on_disk=float(any(process.wait.kind == "disk" for process in processes)),
            queued=self._queue(passed_s, processes),
            stolen=self._steal(),
            throttled=self._throttle(passed_s, processes[0].pid) if processes else None,
        )

    def _queue(self, passed_s: float, processes: Sequence[ProcessReading]) -> float | None:
        """Of the process that used most since the last reading: a launcher in front of it waits for nothing."""
        before, self._queued = self._queued, {one.pid: (one.wants_cpu_s - one.cpu_s, one.cpu_s) for one in processes}
        known = [
            (used_s - before[pid][1], waited_s - before[pid][0])
            for pid, (waited_s, used_s) in self._queued.items()
            if pid in before
        ]
        return max(0.0, max(known)[1] / passed_s) if known and passed_s > 0 else None

    def _steal(self) -> float | None:
        before, self._machine = self._machine, parse_stolen(procfs.read_text("/proc/stat") or "")
        if before is None or self._machine is None or self._machine[1] <= before[1]:
            return None
        return max(0.0, (self._machine[0] - before[0]) / (self._machine[1] - before[1]))

    def _throttle(self, passed_s: float, pid: int) -> float | None:
        before, self._throttled_s = self._throttled_s, read_throttled_s(pid)
        if before is None or self._throttled_s is None or passed_s <= 0:
            return None
        return max(0.0, (self._throttled_s - before) / passed_s)


def read_pressure() -> float | None:
    words = (procfs.read_text("/proc/pressure/io") or "").partition("\n")[0].split()
    for word in words:
        if word.startswith("avg10="):
            return float(word.removeprefix("avg10=")) / 100
    return None


def parse_stolen(stat: str) -> tuple[float, float] | None:
    """(stolen, all) ticks of /proc/stat, all CPUs together. Guests count as user time already."""
    words = stat.partition("\n")[0].split()
    if len(words) <= _STOLEN or words[0] != "cpu":
        return None
    return float(words[_STOLEN]), float(sum(int(word) for word in words[_ALL]))


def read_throttled_s(pid: int) -> float | None:
    """How long the CPU limits of its cgroups have held it; None where nothing says so."""
    found = []
    for folder, _ in cgroup_folders("cpu", pid):
        fields = procfs.read_fields(f"{folder}/cpu.stat")
        if "throttled_usec" in fields:
            found.append(fields["throttled_usec"] / 1e6)
        elif "throttled_time" in fields:  # version 1 counts nanoseconds
            found.append(fields["throttled_time"] / 1e9)
    return max(found, default=None)


def read_cpu_times(without: Collection[int]) -> dict[int, float]:
    """CPU seconds of every other process, its ended threads included. Reads all of /proc: when steps are slow, not
    for each sample."""
    found = {}
    for pid in procfs.list_numbers("/proc")[:MOST_OTHERS]:
        data = procfs.read_bytes(f"/proc/{pid}/stat") if pid not in without else None
        if data:
            fields = data[data.rfind(b")") + 2 :].split()
            found[pid] = (int(fields[11]) + int(fields[12])) / _TICKS_PER_S
    return found


def busiest(before: Mapping[int, float], after: Mapping[int, float], passed_s: float) -> str:
    """'pid 812 (python other.py, 1.9 CPUs), ...': who used most CPU in between; '' when nobody did."""
    used = {pid: (now_s - before.get(pid, 0.0)) / max(passed_s, 1e-6) for pid, now_s in after.items()}
    ranked = sorted((pid for pid in used if used[pid] >= LEAST_SHARE), key=lambda pid: -used[pid])[:NAMED]
    return ", ".join(f"pid {pid} ({read_command(pid)[:40]}, {used[pid]:.1f} CPUs)" for pid in ranked)
