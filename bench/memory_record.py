"""What a step of `memory_zoo.py` did, for a look at an error: the allocator's events and the kernels' times.

Owns only the recording. `memory_zoo.py --record` writes it beside its rows.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

_NAME = 90
_MOST_EVENTS = 400_000


def begin_history() -> None:
    torch.cuda.memory._record_memory_history(max_entries=_MOST_EVENTS, context=None, stacks="python")


def end_history() -> list[list[int]]:
    """[bytes, block] of each allocation and [-bytes, block] of each free, in order; blocks are numbered."""
    history = torch.cuda.memory._snapshot()["device_traces"][0]
    torch.cuda.memory._record_memory_history(enabled=None)
    live: dict[int, int] = {}
    events: list[list[int]] = []
    for event in history:
        if event["action"] == "alloc":
            live[event["addr"]] = len(events)
            events.append([event["size"], len(events)])
        elif event["action"] == "free_requested" and event["addr"] in live:
            events.append([-event["size"], live.pop(event["addr"])])
    return events


def kernel_times(run: Callable[[], None]) -> dict[str, list[float]]:
    """Kernel: [how often, microseconds] of one step."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        run()
        torch.cuda.synchronize()
    times: dict[str, list[float]] = {}
    for event in seen.profiler.kineto_results.events():
        if event.device_type() == DeviceType.CUDA:
            row = times.setdefault(event.name()[:_NAME], [0, 0.0])
            row[0] += 1
            row[1] += event.duration_ns() / 1000
    return times


class Calls:
    """Counts the Python functions, and the modules, that a loss calls; those of Jackline are left out."""

    def __init__(self) -> None:
        self.count = self.modules = 0

    def counting(self, loss: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any) -> Any:
            self.count = self.modules = 0
            sys.setprofile(self._called)
            try:
                return loss(*args)
            finally:
                sys.setprofile(None)

        return counted

    def _called(self, frame: Any, event: str, _: Any) -> None:
        if event == "call" and "jackline" not in frame.f_code.co_filename:
            self.count += 1
            self.modules += frame.f_code.co_name == "_call_impl"
