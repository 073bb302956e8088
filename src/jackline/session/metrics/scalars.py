"""Values a loop logs: taken in microseconds, without making the GPU wait, and written later by another thread.

A value on the host is read immediately. A value on a device is copied to the host on the loop's own stream (it may
change in place a moment later) and is known when the device has executed that copy. Owns the order of the values and
metrics-RANK.jsonl. `log` and `send` run in the training thread (copies belong on its stream), `resolve` and `write`
in the reporting thread. A loop that reads its own values back (`take`) gets them from the same copies.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

import torch

from jackline import accelerator
from jackline.errors import UsageError
from jackline.rundir.jsonl import JsonlWriter
from jackline.session.metrics.landing import CudaLanes, Place, mark_arrival, read_places

Line = tuple[int, float, dict[str, Any]]  # step, time, values: numbers, or slots that will receive them
_MAX_WAITING = 100_000  # lines: values that are never collected must not fill the memory
_SEND_EVERY_S = 0.25


class Scalars:
    """The loop's values. `latest` holds the last known value of each that was written."""

    def __init__(self) -> None:
        self.latest: dict[str, float] = {}
        self._landed: dict[str, tuple[int, float]] = {}  # `latest`, with the step of each
        self._on_host: dict[str, tuple[int, float]] = {}
        self._waiting: deque[Line] = deque(maxlen=_MAX_WAITING)
        self._on_the_way: deque[tuple[list[Line], list[tuple[dict[str, Any], str]], list[Any]]] = deque()
        self._to_write: deque[Line] = deque()
        self._to_take: deque[Line] | None = None  # None: the loop does not read its values back
        self._is_settling = threading.Lock()
        self._heard_name = ""
        self._heard: deque[tuple[int, float]] = deque(maxlen=_MAX_WAITING)
        self._sent_s = 0.0
        self._lanes = CudaLanes()

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Costs 2 us per host value, 8 us per device value. Nothing here waits for a device."""
        taken: dict[str, Any] = {}
        for name, value in values.items():
            kind = type(value)
            if kind is float or kind is int:
                taken[name] = value
            elif not isinstance(value, torch.Tensor):
                taken[name] = _take_other(name, value)
            elif value.numel() != 1:
                raise UsageError(f"log({name}=...) has {value.numel()} numbers", hint=f"log({name}=value.mean())")
            elif accelerator.is_on_gpu(value):
                taken[name] = self._lanes.land(value)
                continue
            else:
                taken[name] = value.item()
            self._on_host[name] = (step, taken[name])
            if name == self._heard_name:
                self._heard.append(self._on_host[name])
        self._waiting.append((step, time.time(), taken))

    def hear(self, name: str) -> None:
        """Keep each value of this name for `heard`."""
        self._heard_name = name

    def heard(self) -> list[tuple[int, float]]:
        """(step, value), each once: those on the host at once, a GPU's when they have arrived."""
        return [self._heard.popleft() for _ in range(len(self._heard))]

    def known(self) -> dict[str, float]:
        """The newest value of each name that is available without waiting."""
        return {**self.latest, **{name: value for name, (_, value) in self._on_host.items()}}

    def known_at(self, step: int) -> dict[str, float]:
        """The same for a checkpoint of `step`: a value of an earlier step has its step in its name, 'val@40'."""
        known = {**self._landed, **self._on_host}
        return {name if of == step else f"{name}@{of}": value for name, (of, value) in known.items()}

    def resolve(self, *, wait: bool = False) -> list[Line]:
        """Lines whose values are known by now, oldest first. `wait`: all of them."""
        self._settle(wait=wait)
        return _drain(self._to_write)

    def take(self, *, wait: bool = False) -> list[Line]:
        """For the loop's own thread: from the first call on, the lines known by now, in order, each once."""
        if self._to_take is None:
            self._to_take = deque()
            return []
        self.send(float("inf"))
        self._settle(wait=wait)
        return _drain(self._to_take)

    def _settle(self, *, wait: bool) -> None:
        """Put the numbers that have arrived into their lines. Two threads may ask."""
        with self._is_settling:
            while self._on_the_way:
                lines, named, events = self._on_the_way[0]
                if wait:
                    for event in events:
                        event.synchronize()
                elif not all(event.query() for event in events):
                    break
                for (values, name), number in zip(named, read_places([v[n] for v, n in named]), strict=True):
                    values[name] = number
                landed = {id(values) for values, name in named if name == self._heard_name}
                self._heard.extend(
                    (step, values[self._heard_name]) for step, _, values in lines if id(values) in landed
                )
                for step, _, values in lines:
                    self.latest.update(values)
                    self._landed.update({name: (step, value) for name, value in values.items()})
                self._to_write.extend(lines)
                if self._to_take is not None:
                    self._to_take.extend(lines)
                self._on_the_way.popleft()

    def send(self, now_s: float) -> None:
        """Let `resolve` take all pending values once they have arrived: one event for many lines."""
        if now_s - self._sent_s < _SEND_EVERY_S or not self._waiting:
            return
        self._sent_s = min(now_s, time.monotonic())
        lines: list[Line] = []
        while self._waiting:
            lines.append(self._waiting.popleft())
        named = [(values, n) for _, _, values in lines for n, value in values.items() if type(value) is Place]
        self._on_the_way.append((lines, named, mark_arrival(values[n] for values, n in named)))


class MetricsFile:
    """metrics-RANK.jsonl. Numbers that JSON cannot represent become text ('nan', 'inf')."""

    def __init__(self, writer: JsonlWriter) -> None:
        self._writer = writer

    def write(self, lines: list[Line]) -> bool:
        """False when the disk did not accept all of them."""
        is_whole = True
        for step, at_s, values in lines:
            plain = {name: value if value - value == 0 else str(value) for name, value in values.items()}
            is_whole &= self._writer.append({"step": step, "at_s": round(at_s, 3), **plain})
        return is_whole

    def close(self) -> None:
        self._writer.close()


def _drain(lines: deque[Line]) -> list[Line]:
    return [lines.popleft() for _ in range(len(lines))]


def _take_other(name: str, value: Any) -> Any:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise UsageError(
            f"log({name}=...) is a {type(value).__name__}, not a number", hint="log numbers and one-element tensors"
        ) from None
