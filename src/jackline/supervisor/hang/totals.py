"""What a whole process tree did in an interval: CPU, disk and TCP. Pure arithmetic over two readings.

Owns the limits above which a tree counts as busy. What a single process did is in `views`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable

from jackline.immutable import immutable
from jackline.machine.readings import TreeReading, traffic_between

CPU_CORES = 0.02  # times the square root of the number of processes, because their noise adds up
STARVED_WANTS_CORES = 0.5
STARVED_CPU_CORES = 0.005
DISK_BYTES_PER_S = 1000.0
DUMP_BYTES = 128_000  # up to this much may be a stack dump that our signal caused, not its own work
# What reading a stack may cost the process itself: a signal handler, or a stop of a few tenths of a second.
DISTURBED_CORES = 0.3
# Processes beside the training. A launcher only looks after the ranks, which are the run.
LAUNCHER_COMMS = ("pt_elastic", "torchrun", "accelerate", "accelerate-laun", "srun", "mpirun", "mpiexec", "prterun")
HELPER_COMMS = ("wandb-core", "wandb-service", "gpu_stats", "nvidia-smi", "tensorboard", "py-spy", *LAUNCHER_COMMS)


@immutable
class Totals:
    """What the whole tree did in an interval. `wants_s` is CPU time plus the time spent waiting for a CPU."""

    cpu_s: float = 0.0
    wants_s: float = 0.0
    disk_bytes: float = 0.0
    tcp_bytes: float = 0.0
    socket_events: float = 0.0  # sockets that were opened, closed, or moved bytes

    def plus(self, other: Totals) -> Totals:
        return Totals(
            self.cpu_s + other.cpu_s,
            self.wants_s + other.wants_s,
            self.disk_bytes + other.disk_bytes,
            self.tcp_bytes + other.tcp_bytes,
            self.socket_events + other.socket_events,
        )

    def per_s(self, span_s: float) -> Totals:
        span_s = max(span_s, 1e-3)
        return Totals(
            self.cpu_s / span_s,
            self.wants_s / span_s,
            self.disk_bytes / span_s,
            self.tcp_bytes / span_s,
            self.socket_events / span_s,
        )

    @property
    def is_starved(self) -> bool:
        """For rates: it works as much as a fully loaded machine allows. Waiting for a CPU alone is no evidence: on
        such a machine a thread that only wakes up to check a flag waits for as long as others compute."""
        return self.wants_s >= STARVED_WANTS_CORES and self.cpu_s >= STARVED_CPU_CORES


NOTHING = Totals()


def totals_between(
    before: TreeReading,
    after: TreeReading,
    *,
    signalled: Collection[int] = (),
    disturbed: Collection[int] = (),
    left_out: Collection[int] = (),
) -> Totals:
    """What the tree did between two readings. A new process counts in full; a counter that fell counts as zero."""
    old = {(process.pid, process.start_ticks): process for process in before.processes}
    span_s = max(1e-3, after.at_s - before.at_s)
    cpu_s = wants_s = disk_bytes = 0.0
    for process in after.processes:
        if process.comm in HELPER_COMMS or process.pid in left_out:
            continue
        former = old.get((process.pid, process.start_ticks))
        spent_s = max(0.0, process.cpu_s - (former.cpu_s if former else 0.0))
        is_ours = process.pid in disturbed and spent_s < DISTURBED_CORES * span_s
        cpu_s += 0.0 if is_ours else spent_s
        wants_s += 0.0 if is_ours else max(0.0, process.wants_cpu_s - (former.wants_cpu_s if former else 0.0))
        disk_bytes += max(0, process.read_bytes - (former.read_bytes if former else 0))
        written = max(0, process.write_bytes - (former.write_bytes if former else 0))
        is_dump = process.pid in signalled or process.pid in disturbed
        disk_bytes += 0 if is_dump and written <= DUMP_BYTES else written
    traffic = traffic_between(before, after)
    return Totals(cpu_s, wants_s, disk_bytes, traffic.num_bytes, len(traffic.active))


def sum_totals(parts: Iterable[Totals]) -> Totals:
    cpu_s = wants_s = disk_bytes = tcp_bytes = socket_events = 0.0
    for part in parts:  # not by `plus`, which makes an object for each
        cpu_s += part.cpu_s
        wants_s += part.wants_s
        disk_bytes += part.disk_bytes
        tcp_bytes += part.tcp_bytes
        socket_events += part.socket_events
    return Totals(cpu_s, wants_s, disk_bytes, tcp_bytes, socket_events)


def busy_signs(rates: Totals, num_processes: int) -> list[str]:
    """What shows that something in the tree works. A socket that was opened, closed or moved a byte is enough: short
    requests move few bytes a second."""
    signs = []
    if rates.cpu_s >= CPU_CORES * math.sqrt(max(1, num_processes)) or rates.is_starved:
        signs.append(f"CPU: {rates.cpu_s:.2f} cores")
    if rates.disk_bytes >= DISK_BYTES_PER_S:
        signs.append(f"disk: {rates.disk_bytes:.0f} bytes/s")
    if rates.socket_events > 0:
        signs.append(f"sockets: {rates.tcp_bytes:.0f} bytes/s, {rates.socket_events:.1f} active/s")
    return signs
