"""Redoes a step from the state before it and compares the gradients bit by bit: was it the machine, or the data?

A step is redone between its gradients and its update, when weights and optimizer are those it was computed from. That
happens every so many steps, and at once when its loss is not finite or far above the usual. The first redone step
shows whether the same state gives the same bits at all; where it does not, the answer is "cannot tell".

    other gradients: hardware or race; training continues with the gradients that agree
    the same, and the batch before it has its usual loss: data or mathematics, in this batch
    the same, and the batch before it is strange too: the weights were damaged by an earlier update

Owns the fingerprints, what a strange loss is, and the verdict. Does not own how a step is redone (safe_step) nor who
is told (the session).
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from jackline import accelerator

if TYPE_CHECKING:
    from jackline.memory.guard.slices import Slices

Why = Literal["", "due", "not finite", "jump"]
Verdict = Literal["same", "hardware or race", "data or mathematics", "cannot tell"]
Prints = tuple[tuple[int, int], ...]

_REPEATS = 4  # of a step whose first repetition differs: all of them agree, or all but one, or nothing can be told
_CHUNK = 1 << 18  # numbers read at a time on the host: what a cache holds
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_FLOATS = {torch.int16: torch.bfloat16, torch.int32: torch.float32, torch.int64: torch.float64}
_APART = 32  # steps between two redone ones whose loss jumped, so that a restless loss costs little


class UsualLoss:
    """The losses of the last steps, and whether one is far above them.

    Far: ten times the usual scatter (by medians, so that one odd step does not count), at least half as much again,
    and twice as far as the highest of them: small batches have losses with rare high ones. What stays high becomes
    the usual after a while.
    """

    _WINDOW, _FIRST, _SCATTERS, _TIMES_HIGHEST, _LEAST, _LASTING = 64, 16, 10.0, 2.0, 0.5, 32

    def __init__(self) -> None:
        self._losses: deque[float] = deque(maxlen=self._WINDOW)
        self._first = 0.0  # the usual at the beginning: a hundredth of it counts as nothing
        self._num_strange = 0

    @property
    def middle(self) -> float | None:
        return median(self._losses) if len(self._losses) >= self._FIRST else None

    def why_strange(self, loss: float) -> Why:
        if not math.isfinite(loss):
            return "not finite"
        # The medians cost 10 us, and a loss that is not even the highest of the window needs none.
        if len(self._losses) < self._FIRST or loss <= (highest := max(self._losses)):
            return ""
        middle = median(self._losses)
        scatter = 1.4826 * median(abs(value - middle) for value in self._losses)
        known = self._TIMES_HIGHEST * (highest - middle)
        least = max(self._SCATTERS * scatter, known, self._LEAST * abs(middle), 0.01 * abs(self._first))
        return "jump" if loss > middle + least else ""

    def add(self, loss: float, strange: Why) -> None:
        """Once a step, with what `why_strange` says about it. Strange ones do not count, until they last."""
        if strange:
            self._num_strange += 1
            if self._num_strange < self._LASTING:
                return
            self._losses.clear()
        self._num_strange = 0
        if not math.isfinite(loss):
            return
        self._losses.append(loss)
        if len(self._losses) == self._FIRST and not self._first:
            self._first = median(self._losses)

    def state(self) -> dict[str, Any]:
        return {"losses": list(self._losses), "first": self._first, "num_strange": self._num_strange}

    def load(self, state: object) -> None:
        """What is missing or damaged begins anew."""
        found = state if isinstance(state, Mapping) else {}
        losses = found.get("losses")
        self._losses = deque((float(one) for one in losses or ()), maxlen=self._WINDOW)
        self._first, self._num_strange = float(found.get("first", 0.0)), int(found.get("num_strange", 0))


@dataclass(frozen=True)
class Redo:
    """`again` does the step once more from the state before it. `probe` gives its batch's loss with the weights there
    are when it is called."""

    again: Callable[[], Slices]
    probe: Callable[[], float]
    modules: Sequence[nn.Module]


@dataclass(frozen=True)
class Replayed:
    """What came of redoing a step. `text` goes with 'step N: '; `is_new`: that nothing can be told is said once."""

    step: int
    why: Why
    verdict: Verdict
    text: str
    loss: float
    is_of_batch: bool = False  # the batch itself is to blame
    is_new: bool = True


class Replay:
    """`every`: steps between two redone ones. `tell` gets every result but those that are due and agree."""

    def __init__(self, every: int, tell: Callable[[Replayed], None]) -> None:
        self._every, self._tell = every, tell
        self.usual = UsualLoss()
        self.num_agreed = 0
        self._is_deterministic: bool | None = None
        self._before: tuple[Callable[[], float], float] | None = None  # the batch of the last healthy step
        self._can_probe = True
        self._jumped_at = -_APART

    def look(self, step: int, slices: Slices, redo: Redo) -> Slices:
        """After the gradients of step number `step`. Returns those that are in the model then."""
        loss = slices.known_loss()
        strange = self.usual.why_strange(loss)
        why = self._why(step, strange)
        if why:
            slices = self._redo(step, why, slices, redo)
            loss = slices.known_loss()
            strange = self.usual.why_strange(loss)
        if not strange:
            self._before = (redo.probe, loss)
        self.usual.add(loss, strange)
        return slices

    def state(self) -> dict[str, Any]:
        return self.usual.state()

    def load(self, state: object) -> None:
        self.usual.load(state)

    def _why(self, step: int, strange: Why) -> Why:
        if strange == "not finite" or (strange and step - self._jumped_at >= _APART):
            self._jumped_at = step
            return strange
        is_first = self._is_deterministic is None and self._before is not None
        is_due = self._is_deterministic is True and step % self._every == 0
        return "due" if is_first or is_due else ""

    def _redo(self, step: int, why: Why, slices: Slices, redo: Redo) -> Slices:
        runs = _Runs(step, why, slices, redo)
        is_learning = self._is_deterministic is None
        for _ in range(2 if is_learning else 1):
            runs.once_more()
        runs.settle()
        if is_learning and why == "due":
            self._can_probe = self._try_probe()
        found = self._judge(runs)
        if found.verdict == "same":
            self.num_agreed += 1
        elif found.is_new:
            self._tell(found)
        return runs.last

    def _judge(self, runs: _Runs) -> Replayed:
        was_known, is_strange = self._is_deterministic, runs.why != "due"
        odd = runs.num_odd() if was_known is not False else None
        self._is_deterministic = odd is not None
        strange = f"{_strange_text(runs, self.usual.middle)}; " if is_strange else ""
        head = f"{strange}done again from the same state it "
        if odd is None:
            again = f" (its loss was {_number(runs.last.known_loss())} then)" if is_strange else ""
            text = (
                f"{head}gives other gradients each time{again}: cannot tell a fault of the machine from one of the "
                "data; exact=True asks for deterministic kernels"
            )
            is_new = is_strange or was_known is not False
            return Replayed(runs.step, runs.why, "cannot tell", text, runs.loss, is_new=is_new)
        if odd:
            return self._differs(runs, head)
        if runs.why == "due":
            return Replayed(runs.step, runs.why, "same", "", runs.loss)
        return self._same(runs, f"{head}gives the same gradients, bit for bit")

    def _differs(self, runs: _Runs, head: str) -> Replayed:
        again = f", with a loss of {_number(runs.last.known_loss())}" if runs.why != "due" else ""
        text = (
            f"{head}gives other gradients{again}: {runs.differing()}; {runs.num_agreeing} of {len(runs.prints)} runs "
            "agree: hardware or race, not the data. Training continues with the gradients that agree"
        )
        return Replayed(runs.step, runs.why, "hardware or race", text, runs.loss)

    def _same(self, runs: _Runs, head: str) -> Replayed:
        if self._before is None or not self._can_probe:
            text = f"{head}: data or mathematics, in this batch or in an update before it"
            return Replayed(runs.step, runs.why, "data or mathematics", text, runs.loss, is_of_batch=True)
        probe, then = self._before
        now = _try(probe)
        if now is not None and not self._is_far(now, then):
            text = (
                f"{head}, and the batch before it has a loss of {_number(now)} with these weights: data or "
                "mathematics, in this batch"
            )
            return Replayed(runs.step, runs.why, "data or mathematics", text, runs.loss, is_of_batch=True)
        text = (
            f"{head}, but the batch before it, whose loss was {_number(then)}, has {_number(now)} with these "
            "weights: not this batch, the weights were damaged by an earlier update. Cannot tell whether hardware "
            f"or mathematics did that (of the steps that were done again, {self.num_agreed:,} agreed)"
        )
        return Replayed(runs.step, runs.why, "cannot tell", text, runs.loss)

    def _try_probe(self) -> bool:
        """Whether the last healthy batch, tried now, has about the loss it had: its function may read variables that
        belong to another batch by now."""
        if self._before is None:
            return False
        probe, then = self._before
        now = _try(probe)
        return now is not None and not self._is_far(now, then)

    def _is_far(self, now: float, then: float) -> bool:
        if not math.isfinite(now):
            return True
        return bool(self.usual.why_strange(now)) or (self.usual.middle is None and now - then > 0.5 * abs(then))


class _Runs:
    """One step, done several times from the same state."""

    def __init__(self, step: int, why: Why, slices: Slices, redo: Redo) -> None:
        self.step, self.why, self.loss = step, why, slices.known_loss()
        self.last = slices
        self._redo, self._micro_batch, self._is_alike = redo, slices.micro_batch, True
        self.prints = [fingerprint(redo.modules)]

    def once_more(self) -> None:
        self.last = self._redo.again()
        self.prints.append(fingerprint(self._redo.modules))
        # Smaller slices, after running out of memory, add up in another order.
        self._is_alike = self._is_alike and self.last.micro_batch == self._micro_batch

    def settle(self) -> None:
        """Where they differ: until it is clear which are odd, and those that agree are in the model."""
        if len(set(self.prints)) == 1 or not self._is_alike:
            return
        while len(self.prints) <= _REPEATS:
            self.once_more()
        while self.prints[-1] != self._most() and len(self.prints) <= 2 * _REPEATS:
            self.once_more()

    def num_odd(self) -> int | None:
        """How many differ from all the others; None: nothing can be told."""
        odd = len(self.prints) - self.num_agreeing
        return odd if self._is_alike and (odd == 0 or (odd == 1 and self.prints[-1] == self._most())) else None

    @property
    def num_agreeing(self) -> int:
        return Counter(self.prints).most_common(1)[0][1]

    def _most(self) -> Prints:
        return Counter(self.prints).most_common(1)[0][0]

    def differing(self) -> str:
        """'blocks.3.up.weight', 'head.weight and 11 more of 148': whose gradients differed."""
        most = self._most()
        odd = next(one for one in self.prints if one != most)
        names = [name for name, _ in _gradients(self._redo.modules)]
        bad = [name for name, one, other in zip(names, odd, most, strict=False) if one != other]
        more = f" and {len(bad) - 1} more of {len(names)}" if len(bad) > 1 else ""
        return f"{bad[0] if bad else 'their number'}{more}"


def fingerprint(modules: Sequence[nn.Module]) -> Prints:
    """The sum of each gradient's bits, and another that tells changes which cancel out in it: the sum of their
    squares, on a GPU the length in double precision, because that takes one kernel for all. A single changed bit
    changes the first, and sums of integers do not depend on the order."""
    bits = [_as_integers(gradient) for _, gradient in _gradients(modules)]
    by_device: dict[torch.device, list[int]] = {}
    for number, one in enumerate(bits):
        by_device.setdefault(one.device, []).append(number)
    read: dict[int, tuple[int, int]] = {}
    for numbers in by_device.values():  # one wait for each device
        wanted = [bits[number] for number in numbers]
        is_fast = accelerator.is_on_gpu(wanted[0]) and all(one.dtype in _FLOATS for one in wanted)
        sums = _sums_on_gpu(wanted) if is_fast else torch.stack([*map(_sums, wanted)])
        read.update({number: (one, two) for number, (one, two) in zip(numbers, sums.tolist(), strict=True)})
    return tuple(read[number] for number in range(len(bits)))


def _gradients(modules: Sequence[nn.Module]) -> list[tuple[str, Tensor]]:
    return [
        (name, weight.grad)
        for module in modules
        for name, weight in module.named_parameters()
        if weight.grad is not None
    ]


@torch.no_grad()
def _as_integers(gradient: Tensor) -> Tensor:
    flat = gradient.coalesce().values() if gradient.is_sparse else gradient
    flat = (torch.view_as_real(flat) if flat.is_complex() else flat).contiguous().reshape(-1)
    return flat.view(_BITS[flat.element_size()])


@torch.no_grad()
def _sums_on_gpu(bits: Sequence[Tensor]) -> Tensor:
    """Launching kernels is what takes time there, so there are few."""
    sums = torch.stack([one.sum(dtype=torch.int64) for one in bits])
    floats = [one.view(_FLOATS[one.dtype]) for one in bits]
    lengths = torch.stack(torch._foreach_norm(floats, 2, torch.float64))
    return torch.stack((sums, lengths.view(torch.int64)), 1)


@torch.no_grad()
def _sums(bits: Tensor) -> Tensor:
    sums = torch.zeros(2, dtype=torch.int64, device=bits.device)
    for begin in range(0, len(bits), _CHUNK):
        wide = bits[begin : begin + _CHUNK].to(torch.int64)
        sums[0] += wide.sum()
        sums[1] += (wide * wide).sum()
    return sums


def _try(probe: Callable[[], float]) -> float | None:
    try:
        return probe()
    except Exception:  # a function that needs more than its batch: this much is not known then
        return None


def _strange_text(runs: _Runs, usual: float | None) -> str:
    return f"loss {_number(runs.loss)}" + (f", usually {_number(usual)}" if usual is not None else "")


def _number(value: float | None) -> str:
    return "no loss" if value is None else f"{value:.4g}"
