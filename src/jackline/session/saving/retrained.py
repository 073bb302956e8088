"""Steps that are trained again after a resume: their values, and the state after the first, as recorded or not.

An attempt that was killed had mostly gone further than its last checkpoint. What it logged there must come out again,
bit for bit. Measured numbers (times, rates, memory) cannot, so they are not compared, and the text says which values
were. Owns the comparison and its text. Without such steps nothing is compared and nothing is vouched for.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from jackline.checkpoint.format.hashing import best_algorithm, digest
from jackline.checkpoint.state.capture import Source
from jackline.checkpoint.state.dtypes import as_stored, plain_bytes
from jackline.rundir.jsonl import read_last
from jackline.rundir.layout import RunDir
from jackline.session.metrics.scalars import Line

STATE_EVENT = "state_digest"
_LOOKED_AT = 4000  # metrics lines of the previous attempt
_EVENTS_LOOKED_AT = 400
_SAMPLED = 64  # values of each tensor
_GPU_EVERY_S = 60.0  # reading samples makes the loop wait for the GPU
_MEASURED = re.compile(
    r"(^|[_./ -])(time|t|s|ms|sec|secs|seconds|eta|speed|throughput|rate_per_s|wall|clock|mem|memory|rss|vram|util|"
    r"temp|power|duration|elapsed|latency)($|[_./ -])|per_s|/s($|[^a-z])|_s$|toks|tokens_per|samples_per|gib|gb$"
)


class Retrained:
    """Compares the steps after `step` with those an earlier attempt recorded."""

    def __init__(self, run: RunDir, rank: int, step: int, tell: Callable[..., None]) -> None:
        self._first = step + 1
        self._tell = tell
        self._recorded = lines_after(list(read_last(run.metrics(rank), _LOOKED_AT)), step)
        self._last = max(self._recorded, default=0)
        events = list(read_last(run.session_events(rank), _EVENTS_LOOKED_AT))
        self._state = next((one for one in reversed(events) if _is_state_of(one, self._first)), None)
        self._seen: dict[int, int] = {}
        self._equal: dict[str, int] = {}
        self._measured: set[str] = set()
        self._has_differed = self._has_begun = False
        self._is_done = not self._recorded

    def look(self, lines: list[Line]) -> None:
        """Called with every line that is written."""
        if self._is_done:
            return
        for step, _, values in lines:
            if step > self._first and not self._has_begun:
                self._has_begun = True
                self._report_first()
            if step > self._last:
                self._is_done = True
                self._report_all()
                return
            self._compare(step, values)

    def look_at_state(self, step: int, found: str) -> None:
        """The digest of the state after a step that follows a save."""
        if self._state is None or step != self._first:
            return
        before, self._state = self._state.get("digest"), None
        if before == found:
            self._tell(STATE_EVENT, f"weights and optimizer state after step {step} have the recorded digest")
            return
        self._has_differed = True
        text = f"weights or optimizer state after step {step} are not those recorded: this resume is not bit-exact"
        self._tell("not_exact", text, is_loud=True, step=step)

    def _compare(self, step: int, values: dict[str, Any]) -> None:
        number = self._seen.get(step, 0)
        self._seen[step] = number + 1
        lines = self._recorded.get(step, [])
        if number >= len(lines):
            return
        for name in [name for name in values if name in lines[number]]:
            now, before = values[name], lines[number][name]
            if now == before or str(now) == str(before):
                self._equal[name] = self._equal.get(name, 0) + 1
            elif _MEASURED.search(name.lower()):
                self._measured.add(name)
            elif not self._has_differed:
                self._has_differed = True
                text = f"{name} is {now!r} at step {step}, but {before!r} was recorded: this resume is not bit-exact"
                self._tell("first_loss", text, is_loud=True, is_equal=False, step=step)

    def _report_first(self) -> None:
        if self._has_differed or not self._equal:
            return
        text = f"step {self._first} gave the recorded values again, bit for bit: {self._names()}"
        self._tell("first_loss", text, is_loud=True, is_equal=True, step=self._first)

    def _report_all(self) -> None:
        if self._has_differed or not self._equal or self._last == self._first:
            return
        count = sum(self._equal.values())
        text = (
            f"steps {self._first} to {self._last} gave the recorded values again, bit for bit: {count} values of "
            f"{self._names()}"
        )
        self._tell("retrained", text, is_loud=True, is_equal=True, step=self._last)

    def _names(self) -> str:
        names = sorted(self._equal)
        text = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
        if not self._measured:
            return text
        return f"{text} (measured and therefore not compared: {', '.join(sorted(self._measured))})"


class StateDigest:
    """A digest of the saved tensors, from a few values of each. Cheap enough for the first step after every save."""

    def __init__(self) -> None:
        self._read_s = float("-inf")

    def read(self, sources: Sequence[Source]) -> str:
        """Empty when it would cost too much now."""
        is_on_gpu = any(not source.tensor.is_cpu for source in sources)
        now_s = time.monotonic()
        if is_on_gpu and now_s - self._read_s < _GPU_EVERY_S:
            return ""
        self._read_s = now_s
        algorithm = best_algorithm()
        return digest(algorithm, b"".join(_sample(source.tensor) for source in sources))


def _sample(tensor: torch.Tensor) -> bytes:
    plain = as_stored(tensor.detach())
    flat = plain.reshape(-1) if plain.is_contiguous() or plain.numel() <= _SAMPLED else plain[:1].reshape(-1)
    picked = flat[:: max(1, flat.numel() // _SAMPLED)][:_SAMPLED]
    return plain_bytes(picked)


def lines_after(records: Iterable[dict[str, Any]], step: int) -> dict[int, list[dict[str, Any]]]:
    """The recorded lines of later steps, by step. Where an attempt began again, its lines replace the older ones."""
    found: dict[int, list[dict[str, Any]]] = {}
    previous = 0
    for record in records:
        number = record.get("step")
        if not isinstance(number, int):
            continue
        if number < previous:
            found = {one: lines for one, lines in found.items() if one < number}
        previous = number
        if number > step:
            found.setdefault(number, []).append(record)
    return found


def _is_state_of(record: dict[str, Any], step: int) -> bool:
    return record.get("event") == STATE_EVENT and record.get("step") == step and bool(record.get("digest"))
