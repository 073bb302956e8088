"""The metric that `keep_best` names: which step's weights produced it, and whether that step is worth a save.

A value belongs to the weights it was measured with. Only a checkpoint of exactly that step carries it, so `best`
never points to weights that were not measured. Owns the newest value and its comparison with the existing
checkpoints. run.py decides when a save can be made; the writer decides which checkpoints stay
(checkpoint/writer/retention.py).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from jackline.checkpoint.format.catalogue import list_names
from jackline.checkpoint.format.manifest import Damage, Name
from jackline.checkpoint.format.verify import read_manifest
from jackline.checkpoint.state.rng import ProcessRandom
from jackline.checkpoint.ticket import Ticket

Say = Callable[..., None]  # Reporter.event


@dataclass(frozen=True)
class Boundary:
    """What a save of the last boundary needs when it is made later, inside the next step's body."""

    step: int
    random: dict[str, Any]
    values: dict[str, Any]
    addresses: list[int]


class BestKeeper:
    """The newest value of the `keep_best` metric. `name` is None when no best is wanted.

    `held_values`: what to save as `run.values`, None for the current ones.
    """

    def __init__(self, wish: str | None, folder: Path) -> None:
        self.wish = wish
        self.name = wish.removeprefix("+") if wish else None
        self.was_seen = False
        self.held_values: dict[str, Any] | None = None
        self._is_high_good = bool(wish) and str(wish).startswith("+")
        self._folder = folder
        self._step: int | None = None  # the step whose weights gave the newest value; None: no whole step
        self._value: float | torch.Tensor = math.nan
        self._is_rare = True
        self._is_marking = wish is not None
        self._boundary: Boundary | None = None
        self._scores: dict[Name, float | None] = {}
        self._under_way: tuple[Ticket, float] | None = None
        self._has_said = False

    # -- what was measured -------------------------------------------------------------------------------------------

    def measure(self, value: Any, step: int | None, *, is_rare: bool | None = None) -> None:
        """The weights of `step` gave `value`. `is_rare` None: derive it from the previous measurement.

        Does not wait for a device: a metric that is logged at every step may be on a GPU.
        """
        if not self.was_seen or step is None or self._step is None:
            self._is_rare = True
        elif step != self._step:
            self._is_rare = step > self._step + 1
        self._is_rare = self._is_rare if is_rare is None else is_rare
        self.was_seen, self._step = True, step
        self._value = value.detach().clone() if isinstance(value, torch.Tensor) else float(value)

    @property
    def is_rare(self) -> bool:
        """Whether the metric is not logged at every step, so that the newest value may have a save of its own."""
        return self._is_rare

    def value_at(self, step: int) -> float | None:
        """The value that the weights of `step` gave. Waits for the device."""
        if self.name is None or not self.was_seen or self._step != step:
            return None
        if isinstance(self._value, torch.Tensor):
            self._value = float(self._value.item())
        return self._value

    def is_better(self, step: int) -> bool:
        """Whether the value of `step` is better than that of every checkpoint that exists or is being written."""
        value = self.value_at(step)
        if value is None or not math.isfinite(value):
            return False
        return all(value > other if self._is_high_good else value < other for other in self._known())

    def wants_save(self, step: int) -> bool:
        """Whether the state of `step` should be saved because of its value alone."""
        return self._is_rare and self._step == step and self.is_better(step)

    def label(self, metrics: dict[str, float], step: int) -> dict[str, float]:
        """`metrics` for a checkpoint of `step`, with the `keep_best` metric only if it was measured at this step."""
        if self.name is None or not self.was_seen:
            return metrics
        found = {word: value for word, value in metrics.items() if word.partition("@")[0] != self.name}
        value = self.value_at(step)
        return found if value is None else {**found, self.name: value}

    def carried(self, ticket: Ticket, metrics: dict[str, float]) -> None:
        """Note that a save with these metrics is under way."""
        if self.name in metrics:
            self._under_way = (ticket, metrics[self.name])

    # -- the last boundary -------------------------------------------------------------------------------------------

    def mark(self, step: int, values: dict[str, Any], tensors: Iterable[torch.Tensor], *, is_asked: bool) -> None:
        """Remember this boundary (0.2 ms), until it is clear that the loop measures after its optimizer's step."""
        if self.name is not None and (self._is_marking or is_asked):
            random = ProcessRandom().state_dict()
            self._boundary = Boundary(step, random, dict(values), list(map(_address, tensors)))

    def mark_no_longer(self) -> None:
        self._is_marking = False

    def is_marked(self, step: int, tensors: Iterable[torch.Tensor]) -> bool:
        """Whether the boundary of `step` is remembered, and no weight tensor was replaced since."""
        boundary = self._boundary
        return boundary is not None and boundary.step == step and boundary.addresses == list(map(_address, tensors))

    @contextlib.contextmanager
    def as_marked(self, random: ProcessRandom) -> Iterator[None]:
        """A save inside this block gets the RNG states and the values of the last boundary."""
        assert self._boundary is not None
        random.held, self.held_values = self._boundary.random, self._boundary.values
        try:
            yield
        finally:
            random.held = self.held_values = None

    # -- messages ----------------------------------------------------------------------------------------------------

    def refuse(self, step: int, why: str, say: Say) -> None:
        """Report, once, that a value that would be the best cannot be kept."""
        if not self._has_said:
            self._has_said = True
            text = (
                f"{self.name} of step {step} is not kept as the best: {why}. Log it after optimizer.step() or after "
                "the epoch, and its step is saved"
            )
            say("best_unkept", text, is_loud=True, step=step)

    def tell_unseen(self, names: Iterable[str], say: Say) -> None:
        """At the end of a complete run: report that the metric was never logged.

        Names with best_ come with `run.save`, and only if there is a best at all.
        """
        if self.name is None or self.was_seen or self.name.startswith("best_") or self._known():
            return
        there = ", ".join(sorted(names))
        known = f"there is {there}" if there else "nothing was logged"
        text = f"keep_best='{self.wish}': no number of that name was logged ({known}), so no checkpoint is the best"
        say("best_unseen", text, is_loud=True)

    # -- private -----------------------------------------------------------------------------------------------------

    def _known(self) -> list[float]:
        names = list_names(self._folder)
        self._scores = {name: self._scores[name] if name in self._scores else self._read(name) for name in names}
        found = [value for value in self._scores.values() if value is not None]
        if self._under_way is not None and not self._under_way[0].is_over:
            found.append(self._under_way[1])
        return found

    def _read(self, name: Name) -> float | None:
        try:
            return read_manifest(self._folder / str(name)).metrics.get(str(self.name))
        except (Damage, OSError):
            return None


def _address(tensor: torch.Tensor) -> int:
    try:
        return tensor.data_ptr()
    except (RuntimeError, ValueError, NotImplementedError):  # sparse, or not materialised yet
        return 0
