"""The gradients of one step in whatever memory there is: on an out-of-memory error the micro-batch shrinks and the
whole step is repeated.

Owns the slicing, the normalisation by the count of the whole step, and the recovery after an error. The update
(`optimizer.step()`) is the caller's and stays outside: after a half-done update nothing could be repeated. Global
batch, learning rate, step count and data order do not change; only the number of samples on the GPU at a time does.

Some things are not mathematically the same in smaller slices: BatchNorm statistics, losses that compare samples of a
batch with each other (contrastive ones), and dropout masks, which are drawn again. `fn` may run more than once for
the same samples, so it should not count, log or append anything.
"""

from __future__ import annotations

import gc
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from torch import Tensor, nn

from jackline import accelerator
from jackline.errors import JacklineError, UsageError
from jackline.memory.guard.batches import batch_dependent, count_samples, take_slice
from jackline.memory.guard.oom import first_line, is_out_of_memory, read_numbers
from jackline.memory.guard.step_state import Buffers, Generators, Scaler, is_compiled_static, uses_cuda_graphs

_MAX_TEXT = 1500
_CHANGES_KEPT = 20  # in the checkpoint; the run's events have all of them


class BatchDependent(UserWarning):
    """The model has parts that compute something else when the batch is sliced."""


class OutOfMemory(JacklineError):
    """Even one sample at a time does not fit."""


@dataclass(frozen=True)
class Shrunk:
    """One change of the micro-batch, for the run's events."""

    step: int
    old_micro_batch: int
    new_micro_batch: int
    phase: str  # 'forward' or 'backward'
    slice_number: int
    error: str
    wanted_bytes: int | None
    free_bytes: int | None
    recovery_s: float
    is_recompiling: bool = False
    text: str = ""  # the whole text of the error


@dataclass(frozen=True)
class Slicing:
    """What a caller may set for one step: the micro-batch to begin with, the weight of a slice's mean, and the count
    of the whole step where it is known beforehand."""

    micro_batch: int | None = None
    weight: Callable[[Any], float] | None = None
    count: float | None = None


@dataclass(frozen=True)
class StepResult:
    """`loss` is that of the step, over all its samples; reading its value waits for the GPU."""

    loss: Tensor
    count: float
    micro_batch: int
    num_slices: int
    shrunk: tuple[Shrunk, ...] = ()


def half(micro_batch: int) -> int:
    return max(1, micro_batch // 2)


class Team(Protocol):
    """Ranks that make one step's gradients together, each from its share of the batch."""

    @property
    def size(self) -> int: ...
    @property
    def is_sharded(self) -> bool:
        """FSDP2: torch exchanges parameters in each pass, so no rank can repeat a step alone; averages gradients."""

    def any_failed(self, is_failed: bool) -> bool:
        """Whether one of the ranks ran out of memory. All of them ask, after their last slice."""

    def total(self, count: float) -> float:
        """The sum over all ranks."""

    def add_up(self, tensors: Sequence[Tensor]) -> None:
        """Put the sum over all ranks into each of these."""

    def without_sync(self) -> AbstractContextManager[None]:
        """Backward passes inside exchange nothing: that happens once a step, when it is known that all ranks fit."""

    def before_slice(self, is_last: bool) -> None:
        """With FSDP2: gradients are exchanged in the backward pass of the last slice."""


class SafeStep:
    """Keeps the micro-batch from step to step. `state_dict` belongs in the checkpoint, so that a resumed run slices
    as the attempt before it did."""

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        *,
        micro_batch: int | None = None,
        scaler: Any = None,
        on_change: Callable[[Shrunk], None] | None = None,
        shrink: Callable[[int], int] = half,
        on_phase: Callable[[str], None] | None = None,
    ) -> None:
        self.team: Team | None = None  # the other ranks of the step
        self._modules = (model,) if isinstance(model, nn.Module) else tuple(model)
        if any(uses_cuda_graphs(module) for module in self._modules):
            raise UsageError(
                "safe_step cannot shrink a model compiled with CUDA graphs: their memory is fixed when they are made",
                hint='compile with mode="default" or "max-autotune-no-cudagraphs"',
            )
        self.micro_batch = micro_batch
        self.step = 0
        self.changes: list[Shrunk] = []
        self._scaler = scaler
        self._on_change = on_change
        self._shrink = shrink
        self._on_phase = on_phase
        self._buffers = Buffers(self._modules)
        self._has_warned = False

    def __call__(
        self,
        fn: Callable[[Any], Any],
        batch: Any,
        *,
        weight: Callable[[Any], float] | None = None,
        count: float | None = None,
    ) -> StepResult:
        """Sum the gradients of the whole batch's loss into `.grad`, which must be empty at the start.

        `fn(slice)` returns (loss_sum, count). If it returns a bare mean instead, `weight(slice)` must give the weight
        of that mean. `count` is the count of the whole step where it is known beforehand (for example over all
        ranks); otherwise the counts of the slices are summed.
        """
        num_samples = count_samples(batch)
        self._refuse_gradients()
        generators, scaler = Generators.take(), Scaler(self._scaler)
        self._buffers.take()
        shrunk: list[Shrunk] = []
        while True:
            micro_batch = min(self.micro_batch or num_samples, num_samples)
            attempt = _Attempt(fn, weight, count, self._scaler, self._modules)
            attempt.on_phase, attempt.team = self._on_phase, self.team
            failure = attempt.run(batch, num_samples, micro_batch)
            self._refuse_sharded(failure)
            if self.team is not None and not self.team.is_sharded and self.team.any_failed(failure is not None):
                failure = failure or _Failure("backward", 0, "another rank ran out of memory", "")
            if failure is None:
                attempt.exchange()
                break
            # At this point the error and its traceback are released, and with them every tensor its frames held.
            shrunk.append(self._recover(failure, micro_batch, generators, scaler))
            if self._on_change is not None:
                self._on_change(shrunk[-1])
        self._buffers.learn()
        self.step += 1
        self._warn_once(attempt.num_slices)
        return StepResult(attempt.loss(), attempt.total, micro_batch, attempt.num_slices, tuple(shrunk))

    def _refuse_sharded(self, failure: _Failure | None) -> None:
        if failure is not None and self.team is not None and self.team.is_sharded:
            raise OutOfMemory(
                f"step {self.step} ran out of memory on this rank: {failure.error}",
                hint="with FSDP2 one rank cannot repeat a step alone; start again with a smaller micro-batch",
            )

    def _refuse_gradients(self) -> None:
        for module in self._modules:
            if any(weight.grad is not None for weight in module.parameters()):
                raise UsageError(
                    "there are gradients already at the start of the step; after an error they could not be kept",
                    hint="call optimizer.zero_grad() before safe_step, with set_to_none=True, its default",
                )

    def _recover(self, failure: _Failure, micro_batch: int, generators: Generators, scaler: Scaler) -> Shrunk:
        started_s = time.monotonic()
        for module in self._modules:
            module.zero_grad(set_to_none=True)
        free_caches()
        generators.put_back()
        scaler.put_back()
        lost = self._buffers.put_back()
        if lost:
            warnings.warn(f"buffers changed by the failed step and not put back: {', '.join(lost)}", stacklevel=3)
        if micro_batch == 1:
            raise OutOfMemory(
                f"step {self.step} ran out of memory with one sample at a time: {failure.error}",
                hint="`jackline plan ... --explain` shows where it goes and what would save some",
            )
        self.micro_batch = max(1, min(self._shrink(micro_batch), micro_batch - 1))
        numbers = read_numbers(failure.text)
        change = Shrunk(
            step=self.step,
            old_micro_batch=micro_batch,
            new_micro_batch=self.micro_batch,
            phase=failure.phase,
            slice_number=failure.slice_number,
            error=failure.error,
            wanted_bytes=numbers.wanted_bytes,
            free_bytes=numbers.free_bytes,
            recovery_s=time.monotonic() - started_s,
            is_recompiling=any(is_compiled_static(module) for module in self._modules),
            text=failure.text[:_MAX_TEXT],
        )
        self.changes.append(change)
        return change

    def _warn_once(self, num_slices: int) -> None:
        if num_slices == 1 or self._has_warned:
            return
        self._has_warned = True
        found = sorted({name for module in self._modules for name in batch_dependent(module)})
        if found:
            warnings.warn(
                f"{', '.join(found)}: results depend on which samples are together, and the batch is cut into"
                f" {num_slices} slices",
                BatchDependent,
                stacklevel=3,
            )

    def grow(self, micro_batch: int) -> None:
        """Use a larger micro-batch from the next step on. Jackline never does this unasked."""
        self.micro_batch = micro_batch

    def state_dict(self) -> dict[str, Any]:
        changes = [asdict(one) for one in self.changes[-_CHANGES_KEPT:]]
        return {"micro_batch": self.micro_batch, "step": self.step, "changes": changes}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.micro_batch, self.step = state["micro_batch"], state["step"]
        self.changes = [Shrunk(**change) for change in state["changes"]]


@dataclass(frozen=True)
class _Failure:
    """What is kept of an out-of-memory error: text and numbers, no tensors."""

    phase: str
    slice_number: int
    error: str
    text: str


class _Attempt:
    """All slices of one step at one micro-batch."""

    def __init__(
        self,
        fn: Callable[[Any], Any],
        weight: Callable[[Any], float] | None,
        count: float | None,
        scaler: Any,
        modules: Sequence[nn.Module],
    ) -> None:
        self._fn, self._weight, self._scaler, self._modules = fn, weight, scaler, modules
        self._known_count = count
        self._divisor = count
        self._sum: Tensor | None = None
        self._phase = "forward"
        self.on_phase: Callable[[str], None] | None = None
        self.team: Team | None = None
        self.total = 0.0
        self.num_slices = 0

    def run(self, batch: Any, num_samples: int, micro_batch: int) -> _Failure | None:
        try:
            with self.team.without_sync() if self.team is not None else nullcontext():
                self.go(batch, num_samples, micro_batch)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            return _Failure(self._phase, self.num_slices, first_line(error), str(error))
        return None

    def go(self, batch: Any, num_samples: int, micro_batch: int) -> None:
        num_slices = -(-num_samples // micro_batch)
        if self.team is not None:  # the same on every rank, and put right at the end where it was a guess
            self._divisor = (self._known_count or float(num_samples * self.team.size)) / self._shares
        for begin in range(0, num_samples, micro_batch):
            part = take_slice(batch, begin, begin + micro_batch)
            if self.team is not None:
                self.team.before_slice(begin + micro_batch >= num_samples)
            self._enter("forward", num_slices)
            loss_sum, count = self._evaluate(part)
            if self._divisor is None:
                # The count of the first slice, scaled up to the whole batch. It is exact when all samples have the
                # same count, and corrected at the end otherwise. Without a divisor fp16 gradients of a sum would
                # overflow.
                self._divisor = max(1.0, count * num_samples / min(micro_batch, num_samples))
            loss = loss_sum / self._divisor
            self._enter("backward", num_slices)
            (loss if self._scaler is None else self._scaler.scale(loss)).backward()
            self._sum = loss_sum.detach() if self._sum is None else self._sum + loss_sum.detach()
            self.total += count
            self.num_slices += 1
        if self.team is None:
            self._put_right()

    def exchange(self) -> None:
        """With several ranks: add up counts, loss and gradients, in the order of the parameters."""
        if self.team is None:
            return
        assert self._sum is not None
        gradients = [
            weight.grad
            for module in (() if self.team.is_sharded else self._modules)
            for weight in module.parameters()
            if weight.grad is not None
        ]
        self.total = self.team.total(self.total)
        self.team.add_up([self._sum, *gradients])
        self._put_right()

    @property
    def _shares(self) -> int:
        """Into how many parts torch divides the sum of gradients by itself."""
        return self.team.size if self.team is not None and self.team.is_sharded else 1

    def _enter(self, phase: str, num_slices: int) -> None:
        self._phase = phase
        if self.on_phase is not None:
            self.on_phase(phase if num_slices == 1 else f"{phase} {self.num_slices + 1} of {num_slices}")

    def _evaluate(self, part: Any) -> tuple[Tensor, float]:
        made = self._fn(part)
        if isinstance(made, Tensor):
            if self._weight is None:
                raise UsageError(
                    "fn returned a single tensor: a mean over slices of different size would weigh samples wrongly",
                    hint="return (loss_sum, count), or give weight=: how much a slice's mean counts for",
                )
            count = float(self._weight(part))
            return made * count, count
        if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], Tensor) and made[0].dim() == 0):
            raise UsageError(f"fn returned {type(made).__name__}, not (loss_sum, count) with a scalar loss_sum")
        return made[0], float(made[1])

    def _put_right(self) -> None:
        """Correct the gradients: the divisor was an estimate, and now the true count is known."""
        wanted = (self._known_count or max(1.0, self.total)) / self._shares
        if self._divisor is None or wanted == self._divisor:
            return
        factor = self._divisor / wanted
        for module in self._modules:
            for weight in module.parameters():
                if weight.grad is not None:
                    weight.grad.mul_(factor)

    def loss(self) -> Tensor:
        assert self._sum is not None
        return self._sum / (self._known_count or max(1.0, self.total))


def plain_step(
    fn: Callable[[Any], Any], batch: Any, how: Slicing, *, modules: Sequence[nn.Module], scaler: Any = None
) -> StepResult:
    """The same gradients without any protection: errors are not caught, no state is saved or restored."""
    num_samples = count_samples(batch)
    attempt = _Attempt(fn, how.weight, how.count, scaler, modules)
    size = min(how.micro_batch or num_samples, num_samples)
    attempt.go(batch, num_samples, size)
    return StepResult(attempt.loss(), attempt.total, size, attempt.num_slices)


def free_caches() -> None:
    """Release unused cached memory of the GPU. Of use only once no exception's traceback is alive any more."""
    gc.collect()
    if accelerator.is_open():
        accelerator.synchronize()
        accelerator.empty_cache()
