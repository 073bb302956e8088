"""What a rank of DistributedDataParallel has of its own beside the weights, for a resumed run: buckets and buffers.

DDP starts with buckets in the order of the parameters and arranges them anew after its first backward pass, in the
order in which the gradients came. With more than two ranks the place of a gradient in its bucket decides in which
order the ranks' values are added, and so its last bits. A resumed process would begin with the first arrangement
again. Here it gets the later one before its first step, by a backward pass of zeros in the recorded order.
What cannot be arranged without a side effect (hooks of the user's own) is left alone.

Buffers (BatchNorm statistics) are those of rank 0 in every forward pass of training; until the next one each rank has
its own, and a validation uses these. `Follower` stands in for the checkpoint engine on a rank that saves nothing.
Owns these; RNG states are in session/ranks.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, MutableMapping
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map

from jackline.checkpoint.engine import EngineSettings
from jackline.checkpoint.format.manifest import Name
from jackline.checkpoint.mirror.progress import LossBounds
from jackline.checkpoint.place import choose_place
from jackline.checkpoint.state import load
from jackline.checkpoint.state.attributes import Baseline, find_roots
from jackline.checkpoint.state.capture import Captured, capture
from jackline.checkpoint.state.frozen import FrozenHashes
from jackline.checkpoint.ticket import Event, Ticket
from jackline.rundir.layout import RunDir

_KEY = "rebuilt_per_bucket_param_indices"


def describe_replicas(ranks: Any) -> dict[str, Any]:
    """For rank 0's checkpoint. All ranks call it at a boundary."""
    wrappers = ranks.wrappers
    # Of two values the order of the sum does not matter.
    return {"buckets": read_buckets(wrappers) if ranks.size > 2 else [], "buffers": _read_buffers(ranks)}


def restore_replica(ranks: Any, session: Any) -> None:
    """Give this rank back what it had of its own, once the weights are loaded. All ranks call it."""
    restore_buckets(ranks.wrappers, session.get("buckets"))
    saved, own = session.get("buffers"), _buffers(ranks.wrappers)
    if isinstance(saved, list) and len(saved) == ranks.size:
        with torch.no_grad():
            for name, value in saved[ranks.rank].items():
                if name in own and own[name].shape == value.shape:
                    own[name].copy_(value)


def gather_objects(ranks: Any, value: Any) -> list[Any]:
    """Plain values and tensors of all ranks, on the CPU. Only ranks of this job can send here."""
    found: list[Any] = [None] * ranks.size
    dist.all_gather_object(found, tree_map(_on_cpu, value), group=ranks.group)
    return found


def _on_cpu(value: Any) -> Any:
    return value.detach().cpu() if isinstance(value, torch.Tensor) else value


def _buffers(wrappers: list[Any]) -> dict[str, torch.Tensor]:
    return {
        f"{number}.{name}": buffer
        for number, wrapper in enumerate(wrappers)
        for name, buffer in wrapper.module.named_buffers()
        if buffer.is_floating_point()
    }


def _read_buffers(ranks: Any) -> list[dict[str, torch.Tensor]]:
    """Of each rank the buffers that are not those of rank 0."""
    own = _buffers(ranks.wrappers)
    if not own:
        return []
    if getattr(ranks, "machine", None) is not None:  # each machine saves; any of them may be loaded by rank 0
        return gather_objects(ranks, own)
    device = next(iter(own.values())).device
    both = [part.to(device) for one in own.values() for part in (one.double().sum(), one.double().square().sum())]
    values = torch.stack(both).tolist()  # waits for a GPU once
    sums = {name: values[2 * number : 2 * number + 2] for number, name in enumerate(own)}
    first = json.loads(ranks.from_first(json.dumps(sums)))
    return gather_objects(
        ranks, {name: own[name] for name in own if json.dumps(sums[name]) != json.dumps(first.get(name))}
    )


def read_buckets(wrappers: list[Any]) -> list[str]:
    """The buckets of each wrapper, '3 2, 1 0'; '' where DDP keeps its first ones. All ranks call it at a boundary."""
    return [_read(wrapper) if _is_arranged(wrapper) else "" for wrapper in wrappers]


def _read(wrapper: Any) -> str:
    if not (found := wrapper._get_ddp_logging_data().get(_KEY)):
        wrapper.reducer._rebuild_buckets()  # the next forward pass would do it
        wrapper.logger.set_runtime_stats_and_log()
        found = wrapper._get_ddp_logging_data().get(_KEY)
    return str(found or "")


def restore_buckets(wrappers: list[Any], saved: Any) -> None:
    """Arrange the buckets of `wrappers` as `read_buckets` found them. All ranks call it before the first step."""
    if not isinstance(saved, list) or len(saved) != len(wrappers):
        return
    for wrapper, text in zip(wrappers, saved, strict=True):
        order = [int(word) for word in str(text).replace(",", " ").split() if word.isdigit()]
        parameters = _parameters(wrapper)[0] if _is_arranged(wrapper) else []
        if parameters and sorted(order) == list(range(len(parameters))) and not _has_hooks(parameters):
            _arrange(wrapper, [parameters[index] for index in order])


def _arrange(wrapper: Any, parameters: list[torch.Tensor]) -> None:
    kept = [parameter.grad for parameter in parameters]
    with torch.enable_grad():
        wrapper.reducer.prepare_for_forward()
        wrapper.reducer.prepare_for_backward([])
        for parameter in parameters:
            parameter.grad = None
            torch.autograd.backward(parameter.sum() * 0)
    wrapper.reducer._rebuild_buckets()
    for parameter, gradient in zip(parameters, kept, strict=True):
        parameter.grad = gradient


def _is_arranged(wrapper: Any) -> bool:
    """Whether DDP itself would arrange the buckets anew, in a way that can be repeated here."""
    return (
        isinstance(wrapper, DistributedDataParallel)
        and not wrapper.find_unused_parameters
        and not wrapper.static_graph
        and not getattr(wrapper, "_comm_hooks", None)
        and getattr(wrapper, "mixed_precision", None) is None
        and not any(_parameters(wrapper)[1])  # sparse gradients
        and all(hasattr(wrapper, word) for word in ("reducer", "logger", "_get_ddp_logging_data"))
    )


def _parameters(wrapper: Any) -> tuple[list[torch.Tensor], list[bool]]:
    """Those that the reducer counts, in its order, and whether their gradients are sparse."""
    found: tuple[list[torch.Tensor], list[bool]] = wrapper._build_params_for_reducer()
    return found


def _has_hooks(parameters: list[torch.Tensor]) -> bool:
    """A hook of the user's own (an optimizer in the backward pass) would take the zeros for gradients."""
    words = ("_backward_hooks", "_post_accumulate_grad_hooks")
    return any(getattr(parameter, word, None) for parameter in parameters for word in words)


class Follower:
    """The checkpoint engine of a rank that is not the first: it loads, and leaves saving to rank 0."""

    def __init__(self, run: RunDir) -> None:
        self.folder, self.run_name = choose_place(run).folder, run.name
        self.mirror: str | None = None
        self.is_busy = False
        self.parent_step: int | None = None
        self.why_off = ""
        self.stalled_s = 0.0
        self.settings = EngineSettings()
        self._baseline = Baseline()

    def save(self, state: Mapping[str, Any], *, step: int, **_: Any) -> Ticket:
        return Ticket(step, "committed")

    def save_again(self, ticket: Ticket) -> Ticket | None:
        return Ticket(ticket.step, "committed")

    def load_newest(
        self, into: MutableMapping[str, Any], *, step: int | None = None, only: Name | None = None
    ) -> load.Receipt | None:
        self._baseline.note_all(find_roots(into))
        return load.load_newest(self.folder, into, hash_frozen=FrozenHashes(), step=step, only=only)

    def wait_ready(self) -> None:
        """There is no writer here."""

    def note_program(self, state: Mapping[str, Any]) -> None:
        self._baseline.note_all(find_roots(state))

    def capture(self, state: Mapping[str, Any]) -> Captured:
        return capture(state, baseline=self._baseline)

    def before_change(self) -> None:
        """Nothing is copied here."""

    def prepare(self, state: Mapping[str, Any]) -> None:
        """No memory is needed for copies."""

    def give_back_gpu_memory(self) -> int:
        return 0

    def poll(self) -> list[Event]:
        return []

    def bounds(self) -> LossBounds:
        return LossBounds(None, None)

    def ask_mirror(self, number: int) -> None:
        """Rank 0 uploads."""

    def close(self, **_: Any) -> list[Event]:
        return []
