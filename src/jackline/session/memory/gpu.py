"""GPU memory inside a session: steps that survive an out-of-memory error, and the facts when one does not.

Owns one SafeStep over the attached models, the part of it that goes into the checkpoint, and the report of an error:
step, shape, needed and free memory, the largest part, what would have fitted, which other processes use the GPU.
memory/guard/safe_step.py owns the slicing; host.py owns the host's memory.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from jackline import accelerator
from jackline.errors import UsageError
from jackline.machine.gpu.watch import read_gpus
from jackline.memory.guard.allocator_settings import allocator_environment, cap_where_spilling
from jackline.memory.guard.oom import OomNumbers, is_out_of_memory, read_numbers
from jackline.memory.guard.oom_report import GpuUser, OomFacts, about_fitting, clean_up, oom_text, other_users
from jackline.memory.guard.replay import Replay
from jackline.memory.guard.safe_step import OutOfMemory, SafeStep, Shrunk, Slicing, StepResult, plain_step
from jackline.session.ranks import Ranks
from jackline.units import format_bytes

_BUCKET_NUMBERS = 8 << 20  # of gradients that are exchanged in one message
Tell = Callable[..., None]  # Reporter.event
Fn = Callable[[Any], Any]


@dataclass
class GradientRanks:
    """The ranks of a step, for `safe_step` (memory/guard/safe_step.py: Team).

    Without FSDP2 the gradients are added up here, once a step, bucket by bucket in a fixed order, and after all ranks
    have said that their share fitted: a rank that runs out of memory alone never leaves the others waiting.
    """

    ranks: Ranks
    modules: Sequence[nn.Module]

    @property
    def size(self) -> int:
        return self.ranks.size

    @property
    def is_sharded(self) -> bool:
        return self.ranks.is_sharded

    def any_failed(self, is_failed: bool) -> bool:
        return self.ranks.agree(is_failed)[0]

    def total(self, count: float) -> float:
        told = torch.tensor([count], dtype=torch.float64)
        dist.all_reduce(told, group=self.ranks.group)
        return float(told)

    def add_up(self, tensors: Sequence[Tensor]) -> None:
        bucket: list[Tensor] = []
        for number, tensor in enumerate(tensors):
            bucket.append(tensor)
            after = tensors[number + 1] if number + 1 < len(tensors) else None
            is_alike = after is not None and (after.dtype, after.device) == (tensor.dtype, tensor.device)
            if not is_alike or sum(one.numel() for one in bucket) >= _BUCKET_NUMBERS:
                _add_up(bucket)
                bucket = []

    @contextlib.contextmanager
    def without_sync(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for wrapper in self.ranks.wrappers:
                # After an error the ranks may differ in whether the next pass begins with an exchange of buffers.
                wrapper.require_forward_param_sync = True
                stack.enter_context(wrapper.no_sync())
            yield

    def before_slice(self, is_last: bool) -> None:
        for module in self.modules if self.is_sharded else ():
            if callable(set_sync := getattr(module, "set_requires_gradient_sync", None)):
                set_sync(is_last)


def _add_up(bucket: list[Tensor]) -> None:
    flat = torch.cat([one.detach().reshape(-1) for one in bucket])
    dist.all_reduce(flat)
    position = 0
    for one in bucket:
        one.copy_(flat[position : position + one.numel()].view_as(one))
        position += one.numel()


class GpuMemory:
    """The GPU memory of one session. `tell` writes an event."""

    def __init__(
        self,
        state: Mapping[str, Any],
        optimizers: list[torch.optim.Optimizer],
        tell: Tell,
        on_phase: Callable[[str], None] | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        self._modules = find_modules(state)
        self.ranks = GradientRanks(ranks, self._modules) if ranks is not None else None
        self._scaler = find_scaler(state)
        self._optimizers = optimizers
        self._tell = tell
        self._on_phase = on_phase
        self._safe: SafeStep | None = None
        self._asked: int | None = None  # the micro-batch the loop passed last
        self._kept: Mapping[str, Any] | None = None  # from the checkpoint, until the first safe step
        self._dims: tuple[int, ...] = ()  # shape of the batch under way
        self.replay: Replay | None = None  # set before the first step
        self.last_oom: dict[str, Any] | None = None

    def step(self, fn: Fn, batch: Any, how: Slicing, *, step: int) -> StepResult:
        """A micro-batch found later, or restored, overrides the one in `how`, until the loop changes that one."""
        if self._safe is None:
            self._safe, self._asked = self._make(how.micro_batch), how.micro_batch
        safe = self._safe
        if how.micro_batch != self._asked:
            # Another size than the loop began with is a user's request, and the only way to a larger size again.
            self._asked = how.micro_batch
            if how.micro_batch is not None:
                safe.grow(how.micro_batch)
        safe.step = step
        self.look_at(batch)
        return safe(fn, batch, weight=how.weight, count=how.count)

    @property
    def is_stepping(self) -> bool:
        """Whether the loop uses safe_step."""
        return self._safe is not None

    def _make(self, micro_batch: int | None) -> SafeStep:
        if not self._modules:
            raise UsageError(
                "safe_step does not know the model whose gradients it makes",
                hint="jackline.attach(model=model, ...)",
            )
        made = SafeStep(
            self._modules,
            micro_batch=micro_batch,
            scaler=self._scaler,
            on_change=self._on_change,
            on_phase=self._on_phase,
        )
        made.team, made.replay = self.ranks, self.replay
        if self._kept is not None:
            made.load_state_dict(self._kept)
        return made

    def look_at(self, batch: Any) -> None:
        """Remember the batch's shape for the report of an error in it.

        Only the shape, which costs 2 us; a reference to the batch would keep it alive.
        """
        first = batch[0] if isinstance(batch, list | tuple) and batch else batch
        if not isinstance(first, Tensor) or not first.dim():
            first = next((tensor for tensor in _tensors(batch) if tensor.dim()), None)
        self._dims = tuple(first.shape) if first is not None else ()

    # -- kept in the checkpoint ------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any] | None:
        if self._safe is not None:
            return self._safe.state_dict()
        return dict(self._kept) if self._kept is not None else None

    def restore(self, kept: Any) -> None:
        if not isinstance(kept, Mapping) or "micro_batch" not in kept:
            return
        self._kept = kept
        if kept.get("changes"):
            text = f"micro-batch {kept['micro_batch']}, as it was after running out of memory before"
            self._tell("micro_batch", text, is_loud=True, micro_batch=kept["micro_batch"])

    def read(self) -> dict[str, Any]:
        """For session-RANK.json. Asks PyTorch's own statistics and never the device, which may hang."""
        safe = self._safe
        found: dict[str, Any] = {
            "micro_batch": safe.micro_batch if safe else None,
            "num_shrinks": len(safe.changes) if safe else 0,
            "last_oom": self.last_oom,
        }
        if accelerator.is_open():
            found["gpu"] = {
                "allocated_bytes": accelerator.allocated_bytes(),
                "reserved_bytes": accelerator.reserved_bytes(),
                "peak_allocated_bytes": accelerator.peak_allocated_bytes(),
                "peak_reserved_bytes": accelerator.peak_reserved_bytes(),
            }
        return found

    # -- out of memory ---------------------------------------------------------------------------------------------

    def _on_change(self, change: Shrunk) -> None:
        facts = self._facts(change.step, change.old_micro_batch, read_numbers(change.text), change.new_micro_batch)
        again = " (compiled anew for it)" if change.is_recompiling else ""
        text = (
            f"{_first_words(facts, change.phase)}; micro-batch {change.old_micro_batch} -> {change.new_micro_batch}"
            f"{again} and the whole step again; batch, learning rate, data order and step count stay"
        )
        self._note(facts, text, new_micro_batch=change.new_micro_batch, phase=change.phase)

    def note_error(self, error: BaseException | None, step: int) -> bool:
        """For an error that ends the run: report what is known if it is out of memory.

        True when only a new process would get the GPU's memory back.
        """
        if error is None or not (is_out_of_memory(error) or isinstance(error, OutOfMemory)):
            return False
        try:
            return self._account_for(error, step)
        except Exception as problem:  # the driver may be gone: the user's own error must still be raised
            self._tell("protection_off", f"out of memory could not be explained: {problem}", protection="memory")
            return False

    def _account_for(self, error: BaseException, step: int) -> bool:
        numbers = read_numbers(str(error))
        micro_batch = 1 if isinstance(error, OutOfMemory) else self._dims[0] if self._dims else 0
        fitting = about_fitting(micro_batch, numbers, self._fixed_bytes())
        facts = self._facts(step, micro_batch, numbers, fitting)
        # Outside a safe step the error's traceback still holds the step's tensors, and nothing could be freed.
        needs_new_process = isinstance(error, OutOfMemory) and clean_up().needs_restart
        self._note(facts, oom_text(facts), needs_new_process=needs_new_process)
        return needs_new_process

    def _facts(self, step: int, micro_batch: int, numbers: OomNumbers, fitting: int) -> OomFacts:
        return OomFacts(
            step=step,
            micro_batch=micro_batch,
            numbers=numbers,
            shape=" x ".join(map(str, self._dims)),
            parts=self._parts(numbers),
            fitting_micro_batch=fitting,
            others=_others(numbers),
        )

    def _parts(self, numbers: OomNumbers) -> dict[str, int]:
        """What is known from outside: the models' and the optimizers' own tensors; the step allocated the rest."""
        parts = {"weights": self._weight_bytes(), "optimizer state": self._optimizer_bytes()}
        if numbers.allocated_bytes is not None:
            rest = numbers.allocated_bytes - sum(parts.values())
            parts["activations, gradients and temporaries"] = max(0, rest)
        return {part: size for part, size in parts.items() if size}

    def _weight_bytes(self) -> int:
        return sum(_size(t) for module in self._modules for t in (*module.parameters(), *module.buffers()))

    def _optimizer_bytes(self) -> int:
        states = (state for optimizer in self._optimizers for state in optimizer.state.values())
        return sum(_size(value) for state in states for value in state.values() if isinstance(value, Tensor))

    def state_bytes(self) -> int:
        """About the size of a checkpoint."""
        return self._weight_bytes() + self._optimizer_bytes()

    def _fixed_bytes(self) -> int:
        """The part that does not depend on the batch: weights, their gradients, the optimizer's state."""
        trained = (w for module in self._modules for w in module.parameters() if w.requires_grad)
        return self._weight_bytes() + self._optimizer_bytes() + sum(map(_size, trained))

    def _note(self, facts: OomFacts, text: str, **more: Any) -> None:
        record = {
            "step": facts.step,
            "micro_batch": facts.micro_batch,
            "shape": facts.shape,
            **asdict(facts.numbers),
            "parts": dict(facts.parts or {}),
            "fitting_micro_batch": facts.fitting_micro_batch or None,
            "others": [asdict(user) for user in facts.others],
            **more,
        }
        self.last_oom = {**record, "text": text}
        self._tell("out_of_memory", text, is_loud=True, **record)


def _first_words(facts: OomFacts, phase: str) -> str:
    numbers = facts.numbers
    text = f"out of GPU memory at step {facts.step} in the {phase} pass"
    if numbers.wanted_bytes is not None:
        text += f": needed {format_bytes(numbers.wanted_bytes)}{numbers.free_text()}"
    if facts.others:
        held = sum(user.used_bytes or 0 for user in facts.others)
        text += f" (pid {', '.join(str(user.pid) for user in facts.others[:3])} beside it: {format_bytes(held)})"
    return text


def _others(numbers: OomNumbers) -> tuple[GpuUser, ...]:
    """The GPU's other users: from the driver, or from the error's text if the driver's library is missing."""
    reserved = accelerator.reserved_bytes() if accelerator.is_available() else None
    found = other_users(read_gpus(), (), own_bytes=reserved)
    known = {user.pid for user in found} | {os.getpid()}
    return (*found, *(GpuUser(pid, "", size) for pid, size in numbers.neighbours if pid not in known))


def prepare_gpu() -> None:
    """Before CUDA starts: use expandable segments unless the user chose otherwise.

    Also set a cap where the driver would spill into host memory. What cannot be set is left unchanged.
    """
    if not accelerator.is_open():
        # PyTorch reads this at the first use of the GPU, not at its import.
        os.environ.update(allocator_environment(os.environ))
    with contextlib.suppress(RuntimeError):
        cap_where_spilling()


def off_step(state: Mapping[str, Any], fn: Fn, batch: Any, how: Slicing) -> StepResult:
    """JACKLINE=off: the same gradients; no error is caught and nothing is kept."""
    return plain_step(fn, batch, how, modules=find_modules(state), scaler=find_scaler(state))


def find_modules(state: Mapping[str, Any]) -> tuple[nn.Module, ...]:
    """All modules in the state, also inside lists and dicts."""
    return tuple(value for value in _walk(state) if isinstance(value, nn.Module))


def find_scaler(state: Mapping[str, Any]) -> Any:
    return next((value for value in _walk(state) if type(value).__name__.endswith("GradScaler")), None)


def _walk(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        for part in value.values():
            yield from _walk(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _walk(part)
    else:
        yield value


def _tensors(batch: Any) -> Iterator[Tensor]:
    return (value for value in _walk(batch) if isinstance(value, Tensor))


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
