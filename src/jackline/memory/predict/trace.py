"""Which tensors live when: every storage made and freed on one device, in order, with its purpose.

Owns the recording and its result. Works on the meta device (nothing is computed) and on real tensors alike; `predict`
and `rehearse` own what runs while recording. The scratch memory of kernels is added by rules.

Also owns sums of gradients inside backward. Autograd adds into the first gradient in place where nothing else holds
it, but never while a dispatch mode is active, and the recorder is one. So a plain trace has an allocation too many at
every residual connection and for every weight that is used twice.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from jackline.memory.plan.gpus import GPU_MODELS, GpuModel, Processors
from jackline.memory.predict.kernels import Scratch, copied_input, scratch_of
from jackline.memory.predict.shapes import run_with_values
from jackline.memory.predict.shortcuts import run_meta
from jackline.memory.predict.values import Values
from jackline.memory.predict.work import Counter, Work

# 'measured' is the only part where a real run was measured as a whole and not traced.
Part = Literal[
    "weights",
    "weight_copies",
    "gradients",
    "optimizer",
    "activations",
    "logits",
    "temporaries",
    "workspace",
    "communication",
    "measured",
]


_KNOWN_NAMESPACES = frozenset({"aten", "prim", "prims", "profiler", "_c10d_functional"})
_PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm", "addmv", "mv", "addbmm"})
_LT_WORKSPACE = 2**20


@dataclass(frozen=True)
class Allocation:
    """One storage. `last_dim` is that of the tensor it was made for: logits are recognised by it. `scratch` is the
    rule that gives the bytes of a kernel's scratch memory."""

    num_bytes: int
    last_dim: int
    part: Part
    phase: str
    scratch: Scratch | None = None


@dataclass(frozen=True)
class Trace:
    """`events` are indices into `allocations`: i when the i-th is made, ~i (that is -i - 1) when it is freed."""

    allocations: tuple[Allocation, ...]
    events: tuple[int, ...]
    unknowns: tuple[str, ...] = ()  # operators whose kernels take memory that cannot be predicted
    processors: Processors = GPU_MODELS["A100-80"].processors
    assumptions: tuple[str, ...] = ()  # what was assumed where a shape or a branch depends on real data
    is_routed: bool = False  # one of them is the choice of experts
    work: tuple[Work, ...] = ()  # of one slice: forward and backward
    num_views: int = 0  # operators of that slice that start no kernel
    num_updated: int = 0  # weights that the optimizer moves
    update_bytes: int = 0  # what the optimizer reads and writes in a step
    wire_bytes: int = 0  # what a rank sends; of DDP in a step, otherwise in a slice
    host_bytes: int = 0  # what a rank keeps in host memory instead of the GPU's
    moved_bytes: int = 0  # between that and the GPU, in a slice
    state_bytes: int = (
        0  # weights, buffers and optimizer state: what stays between steps, and what a checkpoint holds
    )

    @property
    def peak_bytes(self) -> int:
        """The most bytes of tensors at a time, without what an allocator adds."""
        now = peak = 0
        for event in self.events:
            now += self.allocations[event].num_bytes if event >= 0 else -self.allocations[~event].num_bytes
            peak = max(peak, now)
        return peak

    def in_warm_process(self) -> Trace:
        """The trace in a process that has multiplied matrices before: the libraries already have their workspaces, in
        places of their own. In a fresh process they take them out of whatever block is free at that moment, and the
        workspaces stay there."""
        kept = [index for index, made in enumerate(self.allocations) if made.part == "workspace"]
        return replace(self, events=(*kept, *(event for event in self.events if event not in kept)))

    def on(self, gpu: GpuModel) -> Trace:
        """The trace on a GPU that differs only in processors and cuBLAS workspace: kernels take other amounts
        of scratch memory."""
        made = tuple(self._moved(one, gpu) for one in self.allocations)
        return replace(self, allocations=made, processors=gpu.processors)

    def most_moved_bytes(self, gpu: GpuModel) -> int:
        """By how much the peak can differ on that GPU: all workspaces together, and the largest scratch memory."""
        workspaces = scratch = 0
        for one in self.allocations:
            if one.scratch is not None:
                scratch = max(scratch, abs(one.scratch.num_bytes(gpu.processors) - one.num_bytes))
            elif one.part == "workspace" and one.num_bytes > _LT_WORKSPACE:
                workspaces += abs(gpu.workspace_bytes - one.num_bytes)
        return workspaces + scratch

    def with_reordering(self, share: float) -> Trace:
        """The trace if cuDNN's convolutions took this share of the workspace that is assumed for them."""
        made = tuple(
            replace(one, num_bytes=int(one.num_bytes * share)) if one.scratch and one.scratch.is_chosen else one
            for one in self.allocations
        )
        return replace(self, allocations=made)

    def _moved(self, one: Allocation, gpu: GpuModel) -> Allocation:
        if one.scratch is not None:
            return replace(one, num_bytes=one.scratch.num_bytes(gpu.processors))
        if one.part == "workspace" and one.num_bytes > _LT_WORKSPACE:
            return replace(one, num_bytes=gpu.workspace_bytes)
        return one


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records while it is entered. `part` and `phase` label what is made from then on."""

    def __init__(
        self,
        device_type: str = "meta",
        processors: Processors = GPU_MODELS["A100-80"].processors,
        workspace_bytes: int = 0,
        values: Values | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        references_of_one_holder()
        self.part: Part = "temporaries"
        self.phase = "start"
        self._device_type = device_type
        self._values = values or Values()
        self._is_meta = device_type == "meta"  # there CUDA is imitated; real tensors are recorded as they are
        self._processors = processors
        self._workspace_bytes = workspace_bytes
        self._has_workspace: set[tuple[str, bool]] = set()
        self._scratch: dict[int, Scratch] = {}
        self._live: dict[int, tuple[int, Any]] = {}
        self._events: list[int] = []
        self._sizes: list[int] = []
        self._last_dims: list[int] = []
        self._parts: list[Part] = []
        self._phases: list[str] = []
        self._unknowns: dict[str, None] = {}
        self.counter = Counter()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """torch calls this; True would import its compiler at the first operator, a second of CPU for nothing."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self._is_meta and is_summed_in_place(func, args):
            self.counter.count("add_", args, args[0])
            return args[0]
        # What happens in here is ours and not the model's: without this every look at a shape would pass the rules.
        with torch._C.DisableTorchFunction():
            return self._recorded(func, args, kwargs)

    def _recorded(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
        result = (
            run_with_values(self._values, run_meta, func, args, kwargs or {})
            if self._is_meta
            else func(*args, **(kwargs or {}))
        )
        name = func.overloadpacket.__name__
        is_convolving = name.startswith("convolution")
        copied = self._note_copied(name, args) if is_convolving and self._is_meta else None
        for tensor in _tensors(result):
            self.add(tensor)
        if copied is not None:
            self._events.append(~copied)
        if self._is_meta and func.namespace == "aten":
            self.counter.count(name, args, result)
            if scratches := scratch_of(name, args):
                self._pass_through(scratches)
            if name in _PRODUCTS:
                self._reserve_for_products(name)
        if is_convolving or func.namespace not in _KNOWN_NAMESPACES:
            self._unknowns[f"{func.namespace}::{name}"] = None
        return result

    def add(self, tensor: Tensor, part: Part | None = None) -> None:
        """Record a tensor's storage. When `part` is given, label it, even if it was recorded before."""
        if tensor.device.type != self._device_type:
            return
        if tensor.layout == torch.sparse_coo:  # the gradient of an embedding with sparse=True
            self.add(tensor._indices(), part)
            self.add(tensor._values(), part)
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        known = self._live.get(key)
        if known is None:
            num_bytes = storage.nbytes()
            if num_bytes == 0:
                return
            index = self._note(num_bytes, tensor.shape[-1] if tensor.dim() else 0, part or self.part)
            self._live[key] = (index, weakref.ref(storage, partial(self._dropped, key, index)))
        elif part is not None:
            self._parts[known[0]] = part

    def _note(self, num_bytes: int, last_dim: int, part: Part) -> int:
        index = len(self._sizes)
        self._sizes.append(num_bytes)
        self._last_dims.append(last_dim)
        self._parts.append(part)
        self._phases.append(self.phase)
        self._events.append(index)
        return index

    def _dropped(self, key: int, index: int, _: Any) -> None:
        if self._live.get(key, (-1,))[0] == index:
            del self._live[key]
        self._events.append(~index)

    def _note_copied(self, name: str, args: tuple[Any, ...]) -> int | None:
        """The copy of an input that a kernel wants in one piece, made before its result and freed after it."""
        value = copied_input(name, args)
        return None if value is None else self._note(value.numel() * value.element_size(), 0, "temporaries")

    def _pass_through(self, scratches: list[Scratch]) -> None:
        """Record the memory that a kernel takes and frees before it ends."""
        indices = [self._note(one.num_bytes(self._processors), 0, "temporaries") for one in scratches]
        self._scratch.update(zip(indices, scratches, strict=True))
        self._events += [~index for index in reversed(indices)]

    def _reserve_for_products(self, name: str) -> None:
        """cuBLAS takes its workspace at the first matrix product of a thread, and backward has a thread of its own.
        cuBLASLt, which does the products with a bias, takes a workspace of its own."""
        is_in_backward = torch._C._current_graph_task_id() != -1
        for size, kind in ((self._workspace_bytes, "any"), (_LT_WORKSPACE, "addmm")):
            if kind in ("any", name) and (kind, is_in_backward) not in self._has_workspace:
                self._has_workspace.add((kind, is_in_backward))
                self.reserve((size,))

    def reserve(self, sizes: Iterable[int], part: Part = "workspace") -> None:
        """Record memory that is taken once and kept, such as cuBLAS's workspaces."""
        for size in sizes:
            self._note(size, 0, part)

    def survivors(self, since: int) -> list[int]:
        """Indices of the storages made since event `since` that are still alive."""
        return [index for index, _ in self._live.values() if index >= since]

    def mark(self) -> int:
        return len(self._sizes)

    def label(self, indices: Iterable[int], part: Part) -> None:
        for index in indices:
            if self._parts[index] == "temporaries":
                self._parts[index] = part

    def finish(self, class_sizes: Iterable[int] = ()) -> Trace:
        """The result. A storage whose last dimension is a loss's number of classes is labelled logits, whenever it
        was made."""
        classes = {size for size in class_sizes if size > 1}
        allocations = []
        rows = zip(self._sizes, self._last_dims, self._parts, self._phases, strict=True)
        for index, (num_bytes, last_dim, part, phase) in enumerate(rows):
            is_logits = last_dim in classes and part in ("activations", "temporaries")
            named: Part = "logits" if is_logits else part
            allocations.append(Allocation(num_bytes, last_dim, named, phase, self._scratch.get(index)))
        return Trace(
            tuple(allocations),
            tuple(self._events),
            tuple(self._unknowns),
            self._processors,
            tuple(self._values.notes),
            self._values.is_routed,
            tuple(self.counter.done),
            self.counter.num_views,
        )


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item)


_ADD = torch.ops.aten.add.Tensor


def is_summed_in_place(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether autograd would do this sum in place. Call it in `__torch_dispatch__` itself: it looks at the caller's
    frame and counts references. A sum inside a derivative that PyTorch has in C++ cannot be distinguished; there are
    hardly any."""
    if func is not _ADD or len(args) != 2 or not isinstance(args[1], Tensor):
        return False
    # A sum in Python code, such as one that is recomputed, has a frame of that code in between.
    if sys._getframe(2).f_code.co_name != "_engine_run_backward":
        return False
    first, second = args
    if first.layout != torch.strided or second.layout != torch.strided:
        return False
    if first.shape != second.shape or first.dtype != second.dtype or not _fills_its_storage(first):
        return False
    expected = references_of_one_holder()
    return expected is not None and _references(first) == expected


def _fills_its_storage(value: Tensor) -> bool:
    strides = zip(value.shape, value.stride(), strict=True)
    is_repeated = any(size > 1 and stride == 0 for size, stride in strides)
    return not is_repeated and value.untyped_storage().nbytes() == value.numel() * value.element_size()


def _references(value: Tensor) -> tuple[int, int]:
    """The reference counts of the tensor and of its storage, including those that the call itself adds."""
    storage = value.untyped_storage()
    return value._use_count(), torch._C._storage_Use_Count(storage._cdata)  # type: ignore[attr-defined]


class _Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Observes a sum of gradients whose first operand is certainly held by autograd alone."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: tuple[int, int] | None = None  # what `_references` returned for that first operand

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is _ADD:
            self.seen = _references(args[0])
        return run_meta(func, args, kwargs or {})


@functools.cache
def references_of_one_holder() -> tuple[int, int] | None:
    """The reference counts of a gradient that only autograd holds. They are measured, because the references that the
    call itself adds differ between versions of PyTorch. None where they cannot be counted: then no sum counts as in
    place, and the prediction is a little too high. Call it once before any mode is active."""
    try:
        weight = torch.empty((1,), device="meta", requires_grad=True)
        with torch.inference_mode(False), torch.enable_grad(), _Counting() as counting:
            torch.autograd.grad(weight * weight, weight)
        seen: tuple[int, int] | None = counting.seen
    except (AttributeError, RuntimeError):
        return None
    return seen
