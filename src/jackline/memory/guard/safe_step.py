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
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from jackline import accelerator
from jackline.errors import JacklineError, UsageError
from jackline.memory.guard.batches import batch_dependent, count_samples
from jackline.memory.guard.oom import read_numbers
from jackline.memory.guard.replay import Redo, Replay
from jackline.memory.guard.slices import Failure, Slices, Team
from jackline.memory.guard.step_state import (
    Buffers,
    Generators,
    Scaler,
    is_compiled_static,
    nothing_changed,
    uses_cuda_graphs,
)

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
        self.replay: Replay | None = None  # redoes a step now and then, and when its loss is strange
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
        make = partial(Slices, fn, weight, count, self._scaler, self._modules)

        def until_it_fits() -> Slices:
            while True:
                slices, failure = self._try(make(), batch, num_samples)
                if failure is None:
                    return slices
                # At this point the error and its traceback are released, and with them every tensor its frames held.
                shrunk.append(self._recover(failure, slices.micro_batch, generators, scaler))
                if self._on_change is not None:
                    self._on_change(shrunk[-1])

        def again() -> Slices:
            self._put_back(generators, scaler)
            return until_it_fits()

        slices = until_it_fits()
        if self.replay is not None:
            # A probe may be asked for in a later step, when this one's slices are long gone.
            probe = partial(self._forward, make, batch, num_samples)
            slices = self.replay.look(self.step, slices, Redo(again, probe, self._modules))
        self._buffers.learn()
        self.step += 1
        self._warn_once(slices.num_slices)
        return StepResult(slices.loss(), slices.total, slices.micro_batch, slices.num_slices, tuple(shrunk))

    def _try(self, slices: Slices, batch: Any, num_samples: int) -> tuple[Slices, Failure | None]:
        slices.on_phase, slices.team, slices.wants_loss = self._on_phase, self.team, self.replay is not None
        failure = slices.run(batch, num_samples, min(self.micro_batch or num_samples, num_samples))
        self._refuse_sharded(failure)
        if self.team is not None and not self.team.is_sharded and self.team.any_failed(failure is not None):
            failure = failure or Failure("backward", 0, "another rank ran out of memory", "")
        if failure is None:
            slices.exchange()
        return slices, failure

    def _forward(self, make: Callable[[], Slices], batch: Any, num_samples: int) -> float:
        """The loss of a batch with the weights there are now; leaves no trace."""
        with nothing_changed(self._modules):
            return make().only_forward(batch, num_samples, min(self.micro_batch or num_samples, num_samples))

    def _put_back(self, generators: Generators, scaler: Scaler) -> None:
        """Be as before the step."""
        for module in self._modules:
            module.zero_grad(set_to_none=True)
        generators.put_back()
        scaler.put_back()
        lost = self._buffers.put_back()
        if lost:
            warnings.warn(f"buffers changed by the failed step and not put back: {', '.join(lost)}", stacklevel=3)

    def _refuse_sharded(self, failure: Failure | None) -> None:
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

    def _recover(self, failure: Failure, micro_batch: int, generators: Generators, scaler: Scaler) -> Shrunk:
        started_s = time.monotonic()
        for module in self._modules:
            module.zero_grad(set_to_none=True)
        free_caches()
        self._put_back(generators, scaler)
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
        replay = {} if self.replay is None else {"replay": self.replay.state()}
        return {"micro_batch": self.micro_batch, "step": self.step, "changes": changes, **replay}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.micro_batch, self.step = state["micro_batch"], state["step"]
        self.changes = [Shrunk(**change) for change in state["changes"]]
        if self.replay is not None:
            self.replay.load(state.get("replay"))


def plain_step(
    fn: Callable[[Any], Any], batch: Any, how: Slicing, *, modules: Sequence[nn.Module], scaler: Any = None
) -> StepResult:
    """The same gradients without any protection: errors are not caught, no state is saved or restored."""
    num_samples = count_samples(batch)
    attempt = Slices(fn, how.weight, how.count, scaler, modules)
    size = min(how.micro_batch or num_samples, num_samples)
    attempt.go(batch, num_samples, size)
    return StepResult(attempt.loss(), attempt.total, size, attempt.num_slices)


def free_caches() -> None:
    """Release unused cached memory of the GPU. Of use only once no exception's traceback is alive any more."""
    gc.collect()
    if accelerator.is_open():
        accelerator.synchronize()
        accelerator.empty_cache()
