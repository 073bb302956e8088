"""What a step of `memory_zoo.py` did, for a look at an error: the allocator's events and the time of each operator.

Owns only the recording. `memory_zoo.py --record` writes it beside its rows.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

_NAME = 60
_MOST_EVENTS = 400_000


def begin_history() -> None:
    torch.cuda.memory._record_memory_history(max_entries=_MOST_EVENTS, context=None, stacks="python")


def end_history() -> list[list[int]]:
    """[bytes, block] of each allocation and [-bytes, block] of each free, in order; blocks are numbered. Pages that
    are mapped are [bytes, -1]."""
    history = torch.cuda.memory._snapshot()["device_traces"][0]
    torch.cuda.memory._record_memory_history(enabled=None)
    live: dict[int, int] = {}
    events: list[list[int]] = []
    for event in history:
        action = event["action"]
        if action == "alloc":
            live[event["addr"]] = len(events)
            events.append([event["size"], len(events)])
        elif action == "free_requested" and event["addr"] in live:
            events.append([-event["size"], live.pop(event["addr"])])
        elif action in ("segment_alloc", "segment_map"):
            events.append([event["size"], -1])
    return events


def operator_times(run: Callable[[], None]) -> dict[str, Any]:
    """The operators of one step that started kernels, in the order of their start: [name, 1 in backward, shapes,
    dtypes, microseconds on the GPU, kernels, microseconds since the first kernel began], with shared name lists."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU], record_shapes=True) as seen:
        run()
        torch.cuda.synchronize()
    events = seen.profiler.kineto_results.events()
    kernels: dict[int, list[Any]] = {}
    starts: list[int] = []
    names: dict[str, int] = {}
    for event in events:
        if event.device_type() != DeviceType.CUDA or "gpu_user_annotation" in str(event.name()):
            continue
        found = kernels.setdefault(event.linked_correlation_id(), [0.0, [], event.start_ns()])
        found[0] += event.duration_ns() / 1000
        found[1].append(names.setdefault(event.name()[:_NAME], len(names)))
        found[2] = min(found[2], event.start_ns())
        starts.append(event.start_ns())
    began = min(starts, default=0)
    rows: list[tuple[int, list[Any]]] = []
    main_thread = None
    lost = dict(kernels)
    for event in events:
        if event.device_type() == DeviceType.CUDA:
            continue
        main_thread = event.start_thread_id() if main_thread is None else main_thread
        if event.correlation_id() not in lost:
            continue
        us, which, first = lost.pop(event.correlation_id())
        shapes = [list(shape) for shape in event.shapes()]
        where = names.setdefault(f"{shapes} {list(event.dtypes())}", len(names))
        is_other = int(event.start_thread_id() != main_thread)
        op = names.setdefault(event.name()[:_NAME], len(names))
        rows.append((first, [op, is_other, where, round(us, 2), which, round((first - began) / 1000, 1)]))
    rows.sort(key=lambda row: row[0])
    unlinked = [[round(us, 2), which, round((first - began) / 1000, 1)] for us, which, first in lost.values()]
    return {"names": list(names), "operators": [row for _, row in rows], "unlinked": unlinked}


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
