"""What counts as a step, and whether anything has changed since the last one ended.

A step is over when every attached optimizer has stepped and the loop has returned for its next batch: scheduler,
scaler and EMA have been updated by then. Owns the hooks on the optimizers and the counting.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from jackline import accelerator
from jackline.errors import UsageError
from jackline.session.saving.rng import RngState
from jackline.session.uncounted import Outcome, Uncounted

_SHORT = 16
_version = operator.attrgetter("_version")


def refuse_hookless(optimizer: Optimizer) -> None:
    """Raise for an optimizer that never called Optimizer.__init__, as some wrappers do: its steps cannot be seen.

    torch could be made to add the places for hooks. But the `load_state_dict` of the wrappers known so far separates
    their parameter groups from those of the optimizer inside, and what they save from then on is out of date.
    """
    if "_optimizer_step_pre_hooks" not in vars(optimizer):
        name = type(optimizer).__name__
        raise UsageError(
            f"{name} does not call Optimizer.__init__, so its steps cannot be counted",
            hint=f"call super().__init__(params, defaults) in {name}.__init__, or use one that does",
        )


class Stepper:
    """Counts steps. `before_change` is called before an optimizer changes anything: the barrier of a running save."""

    def __init__(
        self, state: Mapping[str, Any], accumulate: int | None, before_change: Callable[[], None] = lambda: None
    ) -> None:
        self.optimizers = find_optimizers(state)
        counted = merge_nested(self.optimizers or find_held_optimizers(state))
        self.accumulate = accumulate if counted or accumulate else 1
        self.uncounted = Uncounted([team[0] for team in counted])
        self.steps_done = 0
        self._steps_before = 0  # at the last boundary
        self._before_change = before_change
        self._stepped: set[int] = set()  # since the last counted step
        self._depth = 0  # steps under way: an optimizer may call another one's
        self._is_dirty = False  # an optimizer has begun to change something since the boundary
        self._batches = 0
        self._handles: list[Any] = []
        self._num_counted = len(counted)
        for number, team in enumerate(counted):
            for optimizer in team:
                refuse_hookless(optimizer)
                self._handles.append(optimizer.register_step_pre_hook(self._on_begin))
                self._handles.append(optimizer.register_step_post_hook(self._on_end(number)))
        self._rng_state = RngState()
        self._state = state
        self.tensors = find_tensors(state)
        self._places = find_places(state)
        self._mark: tuple[Any, ...] = ()

    def after_batch(self) -> Outcome:
        """The loop has returned for its next batch: 'step' at a boundary.

        'rest': no step has ended for long, but none is under way either.
        """
        self._depth = 0
        if self.accumulate is not None:
            self._batches += 1
            if self._batches < self.accumulate:
                return "accumulating"
            self._batches = 0
            self.steps_done += 1
        if self.steps_done == self._steps_before:
            outcome = self.uncounted.look(self._stepped)
            if outcome != "step":
                return outcome
            self.steps_done += 1
        self.uncounted.counted()
        self._steps_before = self.steps_done
        self._stepped.clear()
        return "step"

    def state(self) -> dict[str, Any]:
        return self.uncounted.state()

    def restore(self, state: Any) -> None:
        """Count as the saved run did."""
        if isinstance(state, dict):
            self.uncounted.restore(state)

    def go_on_from(self, steps_done: int) -> None:
        self.steps_done = self._steps_before = steps_done

    def refuse_moved(self) -> None:
        """Refuse tensors moved since `attach`.

        The restore filled the old ones: training would work until a resume.
        """
        now = find_places(self._state)
        for name, place in self._places.items():
            if now.get(name) != place:
                raise UsageError(
                    f"{name} has changed since attach(): {place} -> {now.get(name, 'gone')}",
                    hint="build, convert and move the model first, and attach it as it will train",
                )

    def mark(self) -> None:
        """From here on `has_moved` tells whether the state is still that of the boundary."""
        self._mark = self._read()
        self._is_dirty = False

    def has_moved(self) -> bool:
        return self._is_dirty or not _is_same(self._mark, self._read())

    def has_changed(self) -> bool:
        """Like `has_moved`, but ignores random draws."""
        return self._is_dirty or not self._mark or sum(map(_version, self.tensors)) != self._mark[0]

    def weights_step(self, label: int) -> int | None:
        """In the body of step `label`: the step whose weights the model has.

        None: only some optimizers have stepped.
        """
        if not self._num_counted:
            return label  # without an optimizer nothing shows when they change
        if not self._is_dirty:
            return label - 1
        return label if self.accumulate is not None or self.steps_done == label else None

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _on_begin(self, *_: Any) -> None:
        self._depth += 1
        self._is_dirty = True
        self._before_change()

    def _on_end(self, number: int) -> Callable[..., None]:
        def on_end(*_: Any) -> None:
            self._depth = max(0, self._depth - 1)
            if self._depth:
                return  # it belongs to the step of the optimizer that called it
            self._stepped.add(number)
            self.uncounted.by_batch = False
            self.uncounted.idle.discard(number)
            if self.accumulate is None and len(self._stepped | self.uncounted.idle) == self._num_counted:
                self._stepped.clear()
                self.steps_done += 1

        return on_end

    def _read(self) -> tuple[Any, ...]:
        # Torch counts in-place changes of each tensor: 0.3 us a tensor, against reading all of it.
        versions = sum(map(_version, self.tensors))
        return versions, accelerator.rng_offsets(), self._rng_state.mark()


def _is_same(before: tuple[Any, ...], now: tuple[Any, ...]) -> bool:
    if not before or before[:2] != now[:2]:
        return False
    one, other = before[2], now[2]
    same = one["python"] == other["python"] and one["numpy"] == other["numpy"]
    return same and torch.equal(one["torch"], other["torch"])


def find_optimizers(state: Mapping[str, Any]) -> list[torch.optim.Optimizer]:
    """All optimizers in the state, also inside lists and dicts."""
    found: list[torch.optim.Optimizer] = []
    stack = list(state.values())
    while stack:
        value = stack.pop(0)
        if isinstance(value, torch.optim.Optimizer):
            found.append(value)
        elif isinstance(value, dict):
            stack += value.values()
        elif isinstance(value, list | tuple):
            stack += value
    return found


def find_held_optimizers(state: Mapping[str, Any]) -> list[torch.optim.Optimizer]:
    """Optimizers that attached objects hold: a wrapper of the user's own class, a scheduler."""
    found: list[torch.optim.Optimizer] = []
    for value in state.values():
        for one in _held(value):
            if all(one is not other for other in found):
                found.append(one)
    return found


def merge_nested(optimizers: list[torch.optim.Optimizer]) -> list[list[torch.optim.Optimizer]]:
    """Each optimizer with those inside it (SAM, Lookahead): a step of any of them is a step of the outermost."""
    inner = {id(part) for one in optimizers for part in _held(one)}
    return [[one, *_held(one)] for one in optimizers if id(one) not in inner]


def _held(owner: Any) -> list[torch.optim.Optimizer]:
    """Optimizers in the attributes of `owner`, also in its short lists and dicts."""
    parts = {
        name: part
        for name, part in getattr(owner, "__dict__", {}).items()
        if not isinstance(part, dict | list | tuple) or len(part) <= _SHORT
    }
    return [one for one in find_optimizers(parts) if one is not owner]


def find_tensors(state: Mapping[str, Any]) -> list[torch.Tensor]:
    """Parameters and buffers of all modules in the state; inference tensors cannot change."""
    found: list[torch.Tensor] = []
    for value in state.values():
        if isinstance(value, nn.Module):
            found += [tensor for tensor in (*value.parameters(), *value.buffers()) if not tensor.is_inference()]
    return found


def find_sizes(state: Mapping[str, Any]) -> dict[str, str]:
    """'6 parameters', '2 parameter groups': what a program must build again as large as it was saved."""
    found = {}
    for word, value in state.items():
        if isinstance(value, nn.Module):
            found[word] = f"{sum(1 for _ in value.parameters())} parameters"
        elif isinstance(value, torch.optim.Optimizer):
            found[word] = f"{len(value.param_groups)} parameter groups"
    return found


def describe_grown(before: Mapping[str, str], now: Mapping[str, str], run: str) -> list[str]:
    """What is larger than it was, and what that means for a resume."""
    how = f"jackline.peek({run!r}) tells the step and epoch; otherwise the resume is refused"
    return [
        f"{name} has {size} now and had {before[name]}. A resumed program must build it so first: {how}"
        for name, size in now.items()
        if before.get(name, size) != size
    ]


def find_places(state: Mapping[str, Any]) -> dict[str, str]:
    """Shape, type and device of each parameter, by name. Lazy ones have none before the first batch."""
    found: dict[str, str] = {}
    for word, value in state.items():
        if isinstance(value, nn.Module):
            for name, tensor in value.named_parameters():
                if not nn.parameter.is_lazy(tensor):
                    dtype = str(tensor.dtype).removeprefix("torch.")
                    found[f"{word}.{name}"] = f"{dtype}{list(tensor.shape)} on {tensor.device}"
    return found
