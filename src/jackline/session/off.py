"""`JACKLINE=off`: the same loop and nothing else. Nothing is written or restored, no signal is caught.

Owns a run without a session: it counts steps as the real one does, because `total` must mean the same.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from jackline.checkpoint.mirror.progress import LossBounds
from jackline.memory.guard.safe_step import Slicing, StepResult
from jackline.session.memory.gpu import off_step
from jackline.session.metrics.scalars import Scalars
from jackline.session.phase import Phase, phase
from jackline.session.settings import Settings
from jackline.session.stepping import Stepper


def is_off() -> bool:
    return os.environ.get("JACKLINE", "").lower() == "off"


class OffRun:
    """What `attach` returns with JACKLINE=off: it has the public names of Run."""

    def __init__(self, settings: Settings, state: Mapping[str, Any], values: dict[str, Any], loader: Any) -> None:
        self._stepper = Stepper(state, settings.accumulate)
        self._state = state
        self._loader = loader
        self._total: int | None = None
        self.values = values
        self.epoch = self.batch = 0
        self.name = settings.name or "off"
        self.should_stop = False
        self.saving_s = 0.0
        self.doing = ""
        self.at_risk: LossBounds | None = None
        self.newest_checkpoint: str | None = None
        self._scalars, self._is_read = Scalars(), False

    @property
    def step(self) -> int:
        return self._stepper.steps_done

    def steps(self, total: int | None = None) -> Iterator[Any]:
        self._total = total if total is not None else self._total
        while True:
            batches = iter(self._loader) if self._loader is not None else iter(range(self.step, self._total or 0))
            num_batches = 0
            for batch in batches:
                if self._is_total_reached():
                    return
                yield batch
                num_batches += 1
                self.batch += 1
                self._stepper.after_batch()
            if total is None or self._is_total_reached() or not num_batches:
                return
            self.epoch += 1

    def epochs(self, count: int) -> Iterator[int]:
        for epoch in range(count):
            self.epoch = epoch
            if self._is_total_reached():
                return
            yield epoch

    def log(self, values: Mapping[str, Any] | None = None, /, **more: Any) -> None:
        if self._is_read:
            self._scalars.log(self.step, {**(values or {}), **more})

    def logged(self, *, wait: bool = False) -> list[tuple[int, dict[str, float]]]:
        self._is_read = True
        found = self._scalars.take(wait=wait)
        self._scalars.resolve()  # nobody writes them down
        return [(step, values) for step, _, values in found]

    def event(self, kind: str, text: str, **fields: Any) -> None:
        pass

    def save(self, **metrics: float) -> None:
        pass

    def before_change(self) -> None:
        pass

    def safe_step(
        self,
        fn: Callable[[Any], Any],
        batch: Any,
        *,
        micro_batch: int | None = None,
        weight: Callable[[Any], float] | None = None,
        count: float | None = None,
    ) -> StepResult:
        return off_step(self._state, fn, batch, Slicing(micro_batch, weight, count))

    def phase(self, name: str, items: Any = None, *, total: float | None = None, unit: str = "") -> Phase:
        return phase(name, items, total=total, unit=unit)

    def __enter__(self) -> OffRun:
        return self

    def __exit__(self, *_: Any) -> None:
        self._stepper.close()

    def _is_total_reached(self) -> bool:
        return self._total is not None and self.step >= self._total
