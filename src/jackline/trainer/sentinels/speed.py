"""Sentinel of speed: steps that became slower and stay so, with the cause where there is evidence for one.

Owns what "slower" means and the order in which causes are believed. Pure but for `read_surroundings`, which is
called when the usual speed is known, when it begins to drop and when that is certain; never on the way. It takes 1-5
ms, with the driver's deadline as the upper end, and never touches the device's stream, so nothing waits for a
kernel.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from statistics import fmean, median
from typing import Any

from jackline import accelerator
from jackline.machine import procfs
from jackline.machine.gpu.watch import has_device_file, read_gpus
from jackline.machine.proc import read_command
from jackline.trainer.sentinels.facts import Alarm, Found, StepFacts, Surroundings
from jackline.units import format_bytes, format_duration

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


def read_surroundings() -> Surroundings:
    retries = _allocator_retries()
    return Surroundings(
        at_s=time.monotonic(),
        others_cpu_s=_others_cpu_s(),
        queued_s=_queued_s(),
        allocator_retries=retries,
        swapped_bytes=procfs.read_fields("/proc/self/status").get("VmSwap"),
        **(_gpu() if retries is not None else {}),
    )


def _others_cpu_s() -> float | None:
    words = (procfs.read_text("/proc/stat") or "").partition("\n")[0].split()
    if len(words) < 8 or words[0] != "cpu":
        return None
    # user, nice, system, irq, softirq; not idle and not waiting for the disk.
    busy = sum(int(words[at]) for at in (1, 2, 3, 6, 7)) * _TICK_S
    times = os.times()
    return busy - times.user - times.system


def _queued_s() -> float | None:
    """The second number of schedstat, of all threads: nanoseconds on a run queue."""
    total = 0
    for thread in procfs.list_numbers("/proc/self/task"):
        words = (procfs.read_text(f"/proc/self/task/{thread}/schedstat") or "").split()
        if len(words) < 2:
            return None
        total += int(words[1])
    return total / 1e9


def _allocator_retries() -> int | None:
    """None without a GPU in use."""

    if not accelerator.is_open():
        return None
    return accelerator.num_allocator_retries()


def _gpu() -> dict[str, Any]:
    if not has_device_file():
        return {}

    index = accelerator.current_device().index
    found: dict[str, Any] = {}
    gpus = read_gpus()
    if index < len(gpus):
        others = [process.pid for process in gpus[index].processes if process.pid != os.getpid()]
        # A pid that cannot be seen is the host's name for somebody, very likely for this process itself.
        seen = [(pid, read_command(pid)) for pid in others]
        found["gpu_others"] = tuple(f"pid {pid} ({command[:40]})" for pid, command in seen if command)
        found |= {"gpu_clock_share": gpus[index].clock_share, "gpu_slowdown": gpus[index].slowdown}
    return found


_SKIPPED = 5  # compilation, autotuning, first allocations
_REFERENCE = 30
_RECENT = 12
_SLOW = 0.75  # of the usual speed, as the median of the last 12 steps
_LEAST_S = 2.0  # of slow steps: shorter is noise
_CLOCK = 0.8
_QUEUED = 0.2  # seconds a second


class SlowSteps:
    """The usual speed is the median of steps 6 to 35 of this attempt, and moves up when a run gets faster."""

    def __init__(self, read_surroundings: Callable[[], Surroundings] | None = None, unit: str = "tokens") -> None:
        self._read, self._unit = read_surroundings, unit
        self._num_seen = 0
        self._first: list[StepFacts] = []
        self._recent: deque[StepFacts] = deque(maxlen=_RECENT)
        self._usual = 0.0
        self._usual_s = 0.0
        self._then: Surroundings | None = None
        self._micro_batch: int | None = None
        self._slow_s = 0.0
        self._began: Surroundings | None = None

    def look(self, step: StepFacts) -> Iterator[Found]:
        if not step.tokens_per_s or step.seconds is None:
            return
        self._num_seen += 1
        if self._num_seen <= _SKIPPED:
            return
        if not self._usual:
            self._learn(step)
            return
        self._recent.append(step)
        if len(self._recent) < _RECENT:
            return
        now = median(seen.tokens_per_s or 0.0 for seen in self._recent)
        if now >= _SLOW * self._usual:
            self._slow_s = 0.0
            return
        if not self._slow_s:
            self._began = self._surroundings()
            self._slow_s = 1e-9
            return
        self._slow_s += step.seconds
        if self._slow_s >= _LEAST_S:
            yield self._alarm(now)
            # What it is now becomes the usual, so that a further drop is seen and the old one is not said for ever.
            self._usual, self._slow_s = now, 0.0
            self._usual_s = fmean(seen.seconds or 0.0 for seen in self._recent)
            self._recent.clear()

    def _learn(self, step: StepFacts) -> None:
        self._first.append(step)
        if len(self._first) < _REFERENCE:
            return
        self._usual = median(seen.tokens_per_s or 0.0 for seen in self._first)
        self._usual_s = fmean(seen.seconds or 0.0 for seen in self._first)
        self._micro_batch = step.micro_batch
        self._then = self._surroundings()
        self._first.clear()

    def _alarm(self, now: float) -> Found:
        seen = list(self._recent)
        then, began = self._then, self._began
        if then is not None and began is not None:
            # What only grows in bad times is held against the good times, rates against the beginning of the bad.
            then = replace(began, allocator_retries=then.allocator_retries, swapped_bytes=then.swapped_bytes)
        cause, hint = find_cause(seen, self._usual_s, self._micro_batch, then, self._surroundings())
        less = f"{100 * (1 - now / self._usual):.0f} % less than before ({self._usual:,.0f})"
        text = f"{now:,.0f} {self._unit}/s, {less}: {cause}"
        self._micro_batch = seen[-1].micro_batch
        return Alarm("slow", text, hint)

    def _surroundings(self) -> Surroundings | None:
        try:
            return self._read() if self._read is not None else None
        except Exception:  # a driver's mood is no reason to disturb the training
            return None

    # A restart may be on another machine, so the usual speed is learnt anew.
    def state(self) -> dict[str, Any]:
        return {}

    def load(self, state: dict[str, Any]) -> None:
        return


def find_cause(
    seen: list[StepFacts],
    usual_s: float,
    usual_micro_batch: int | None,
    then: Surroundings | None,
    now: Surroundings | None,
) -> tuple[str, str]:
    """(cause, hint) for steps that take longer than `usual_s`: what was measured inside the step first, then what the
    driver says, then what others do on the machine."""
    mean_s = fmean(step.seconds or 0.0 for step in seen)
    lost_s = max(1e-9, mean_s - usual_s)
    waited_s = fmean((step.data_wait_share or 0.0) * (step.seconds or 0.0) for step in seen)
    saved_s = fmean(step.saved_s for step in seen)
    if waited_s > 0.5 * lost_s:
        share = f"{100 * waited_s / mean_s:.0f} % of a step is spent waiting for data"
        return share, "`jackline data bench` measures the source; more num_threads, or wait until it is tokenised"
    if saved_s > 0.5 * lost_s:
        return f"{format_duration(saved_s)} of a step is spent saving", "a larger save_every_s, or a faster disk"
    micro_batch = seen[-1].micro_batch
    if micro_batch and usual_micro_batch and micro_batch < usual_micro_batch:
        text = f"the micro-batch shrank from {usual_micro_batch} to {micro_batch} after running out of memory"
        return text, "see who else holds the GPU's memory; a restart plans anew"
    found = _outside_cause(then, now) if now is not None else None
    return found or ("the cause was not found", "`jackline why` shows where the time goes")


def _outside_cause(then: Surroundings | None, now: Surroundings) -> tuple[str, str] | None:
    if now.gpu_slowdown or (now.gpu_clock_share is not None and now.gpu_clock_share < _CLOCK):
        clock = f" (clock at {100 * now.gpu_clock_share:.0f} % of its highest)" if now.gpu_clock_share else ""
        return f"the GPU slowed itself down: {now.gpu_slowdown or 'low clock'}{clock}", "cooling, or the power limit"
    if now.gpu_others:
        return f"others work on the same GPU: {', '.join(now.gpu_others[:3])}", "`jackline doctor` names them"
    if then is None:
        return None
    if (now.allocator_retries or 0) > (then.allocator_retries or 0):
        count = (now.allocator_retries or 0) - (then.allocator_retries or 0)
        return f"the GPU's memory is full: the allocator gave memory back and asked anew {count} times", (
            "a smaller micro_batch"
        )
    if (now.swapped_bytes or 0) > (then.swapped_bytes or 0) + (64 << 20):
        return f"{format_bytes(now.swapped_bytes or 0)} of it were swapped to disk", "free host memory"
    return _others_cpu(then, now)


def _others_cpu(then: Surroundings, now: Surroundings) -> tuple[str, str] | None:
    seconds = now.at_s - then.at_s
    if seconds <= 0 or now.others_cpu_s is None or then.others_cpu_s is None:
        return None
    cores = (now.others_cpu_s - then.others_cpu_s) / seconds
    queued = ((now.queued_s or 0.0) - (then.queued_s or 0.0)) / seconds
    # Others may be busy on CPUs this process does not need: only waiting for one is evidence.
    if queued < _QUEUED or cores < _QUEUED:
        return None
    text = f"other processes use {cores:.1f} CPUs, and threads of this one wait {queued:.1f} s a second for theirs"
    return text, "end them, or wait until they are done"
