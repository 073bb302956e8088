"""Numbers a loop reports: taken in microseconds, without making the GPU wait, written down later by another thread.

A value on the host is read at once. A value on a device is copied there (the loop may change it in place a moment
later) and brought over in one transfer for many; it is known when the device has got that far. Owns the order of the
values and metrics-RANK.jsonl. `log` and `send` run in the training thread (transfers belong on its stream), `resolve`
and `write` in the reporting thread.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from typing import Any

import torch

from jackline.errors import UsageError
from jackline.rundir.jsonl import JsonlWriter

Line = tuple[int, float, dict[str, Any]]  # step, time, values: numbers, or tensors still on their device
_MAX_WAITING = 100_000  # lines: what nobody takes must not fill the memory
_SEND_EVERY_S = 0.25


class Scalars:
    """The loop's numbers. `latest` holds the last known value of each that was written down."""

    def __init__(self) -> None:
        self.latest: dict[str, float] = {}
        self._on_host: dict[str, float] = {}
        self._waiting: deque[Line] = deque(maxlen=_MAX_WAITING)
        self._on_the_way: deque[tuple[list[Line], list[tuple[dict[str, Any], str]], Any, Any]] = deque()
        self._sent_s = 0.0

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Costs 2 us a host value, 8 us a device value. Nothing here waits for a device."""
        taken: dict[str, Any] = {}
        for name, value in values.items():
            kind = type(value)
            if kind is float or kind is int:
                taken[name] = value
            elif isinstance(value, torch.Tensor):
                taken[name] = _take_tensor(name, value)
            else:
                taken[name] = _take_other(name, value)
            if type(taken[name]) is not torch.Tensor:
                self._on_host[name] = taken[name]
        self._waiting.append((step, time.time(), taken))

    def known(self) -> dict[str, float]:
        """The newest value of each that can be had without waiting: what goes with a checkpoint of this moment."""
        return {**self.latest, **self._on_host}

    def resolve(self, *, wait: bool = False) -> list[Line]:
        """Lines whose numbers are known by now, oldest first. `wait`: all of them."""
        found: list[Line] = []
        while self._on_the_way:
            lines, places, buffer, event = self._on_the_way[0]
            if event is not None and not event.query():
                if not wait:
                    break
                event.synchronize()
            self._on_the_way.popleft()
            for (values, name), number in zip(places, [] if buffer is None else buffer.tolist(), strict=True):
                values[name] = number
            found += lines
        for _, _, values in found:
            self.latest.update(values)
        return found

    def send(self, now_s: float) -> None:
        """Starts the way home for everything that waits, now and then: one transfer for each kind of number."""
        if now_s - self._sent_s < _SEND_EVERY_S or not self._waiting:
            return
        self._sent_s = min(now_s, time.monotonic())
        lines: list[Line] = []
        while self._waiting:
            lines.append(self._waiting.popleft())
        # By kind as well: casting each number on its own would cost a kernel for each.
        alike: dict[tuple[torch.device, torch.dtype], list[tuple[dict[str, Any], str]]] = {}
        for _, _, values in lines:
            for name, value in values.items():
                if isinstance(value, torch.Tensor):
                    alike.setdefault((value.device, value.dtype), []).append((values, name))
        if not alike and lines:
            self._on_the_way.append((lines, [], None, None))
        for position, ((device, _), places) in enumerate(alike.items()):
            # The lines follow their last transfer: the others arrive before or with it.
            is_last = position == len(alike) - 1
            self._on_the_way.append((lines if is_last else [], places, *_bring_home(device, places)))


class MetricsFile:
    """metrics-RANK.jsonl. Numbers that JSON has no word for become text ('nan', 'inf')."""

    def __init__(self, writer: JsonlWriter) -> None:
        self._writer = writer

    def write(self, lines: list[Line]) -> bool:
        """False when the disk would not take all of them."""
        is_whole = True
        for step, at_s, values in lines:
            plain = {name: value if value - value == 0 else str(value) for name, value in values.items()}
            is_whole &= self._writer.append({"step": step, "at_s": round(at_s, 3), **plain})
        return is_whole

    def close(self) -> None:
        self._writer.close()


def _take_tensor(name: str, value: torch.Tensor) -> Any:
    if value.numel() != 1:
        raise UsageError(f"log({name}=...) has {value.numel()} numbers", hint=f"log({name}=value.mean())")
    if value.device.type == "cpu":
        return value.item()
    return value.detach().clone() if value.dim() == 0 else value.detach().clone().reshape(())


def _take_other(name: str, value: Any) -> Any:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise UsageError(
            f"log({name}=...) is a {type(value).__name__}, not a number", hint="log numbers and one-element tensors"
        ) from None


def _bring_home(device: torch.device, places: list[tuple[dict[str, Any], str]]) -> tuple[torch.Tensor, Any]:
    # float64 holds every float, bfloat16 and count exactly.
    stacked = torch.stack([values[name] for values, name in places]).to(torch.float64)
    if device.type != "cuda":
        return stacked.cpu(), None
    with torch.cuda.device(device):
        buffer = torch.empty(len(places), dtype=torch.float64, pin_memory=True)
        buffer.copy_(stacked, non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
    return buffer, event
