"""The report after a CUDA out-of-memory error: what was needed, what was free, what took it, who else uses the GPU.

Owns the wording, finding the other processes, and the clean-up. No torch at import, so that a process without torch
can write the report too; the clean-up imports torch when called.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from jackline import accelerator
from jackline.machine.readings import GpuReading
from jackline.memory.guard.oom import OomNumbers
from jackline.units import format_bytes


@dataclass(frozen=True)
class GpuUser:
    """A process that holds memory of a GPU. `name` is empty when the process is not visible from here."""

    pid: int
    name: str
    used_bytes: int | None


@dataclass(frozen=True)
class OomFacts:
    step: int
    micro_batch: int  # 0: not known
    numbers: OomNumbers
    shape: str = ""  # of the batch: '16 x 1024'
    parts: Mapping[str, int] | None = None  # the plan's, at this micro-batch
    fitting_micro_batch: int = 0
    others: tuple[GpuUser, ...] = ()


def oom_text(facts: OomFacts) -> str:
    """Three lines a person can act on; more when other processes use the GPU."""
    return "\n".join(_lines(facts))


def _lines(facts: OomFacts) -> Iterator[str]:
    numbers = facts.numbers
    needed = f": needed {format_bytes(numbers.wanted_bytes)}" if numbers.wanted_bytes is not None else ""
    yield f"error: out of GPU memory at step {facts.step}{needed}{numbers.free_text()}"
    shape = f" ({facts.shape})" if facts.shape else ""
    size_words = f"micro-batch {facts.micro_batch}{shape}" if facts.micro_batch else ""
    if facts.parts:
        largest = max(facts.parts, key=lambda part: facts.parts[part] if facts.parts else 0)
        size = format_bytes(facts.parts[largest])
        yield f"       largest part: {largest}, {size}{f' at {size_words}' if size_words else ''}"
    elif size_words:
        yield f"       {size_words}"
    for other in facts.others:
        yield f"       also on this GPU: {_other(other)}"
    yield f"hint: {_hint(facts)}"


def _other(other: GpuUser) -> str:
    size = format_bytes(other.used_bytes) if other.used_bytes is not None else "an unknown amount"
    name = other.name or "not visible from here, perhaps in another container or already dead"
    return f"pid {other.pid} ({name}), {size}"


def _hint(facts: OomFacts) -> str:
    held = sum(other.used_bytes or 0 for other in facts.others)
    if facts.numbers.wanted_bytes and held > facts.numbers.wanted_bytes:
        return f"ending the other processes frees {format_bytes(held)}"
    if facts.fitting_micro_batch:
        return f"micro-batch {facts.fitting_micro_batch} would have fitted; run.safe_step keeps the batch the same"
    return "`jackline plan ... --explain` shows what would save memory"


def about_fitting(num_samples: int, numbers: OomNumbers, fixed_bytes: int) -> int:
    """The micro-batch that would have fitted; 0 when the error's text has too few numbers.

    Estimated by a straight line through the bytes that do not depend on the batch and the bytes allocated when it
    failed. A tenth is kept back, because the peak was still to come.
    """
    if num_samples < 2 or numbers.allocated_bytes is None or numbers.wanted_bytes is None:
        return 0
    room = numbers.allocated_bytes + (numbers.unused_bytes or 0) + (numbers.free_bytes or 0)
    a_sample = (numbers.allocated_bytes + numbers.wanted_bytes - fixed_bytes) / num_samples
    if a_sample <= 0:
        return 0
    return max(0, min(num_samples - 1, int(0.9 * (room - fixed_bytes) / a_sample)))


def other_users(
    gpus: Sequence[GpuReading], own_pids: Sequence[int], *, own_bytes: int | None = None, root: Path = Path("/")
) -> tuple[GpuUser, ...]:
    """Processes on the GPUs that are not ours, the largest first. A pid that is not visible here runs in another
    container, or the driver has not noticed yet that it ended.

    In a container the driver reports pids of the host, so our own pid is not among them. With `own_bytes` (what we
    hold) the process whose size is nearest to it is taken as ours.
    """
    own = {*own_pids, os.getpid()}
    seen = [process for gpu in gpus for process in gpu.processes]
    if own_bytes and seen and not any(process.pid in own for process in seen):
        own.add(min(seen, key=lambda process: abs((process.used_bytes or 0) - own_bytes)).pid)
    found = {
        process.pid: GpuUser(process.pid, _name(process.pid, root), process.used_bytes)
        for gpu in gpus
        for process in gpu.processes
        if process.pid not in own
    }
    return tuple(sorted(found.values(), key=lambda user: -(user.used_bytes or 0)))


def _name(pid: int, root: Path) -> str:
    try:
        words = (root / "proc" / str(pid) / "cmdline").read_bytes().split(b"\0")
    except OSError:
        return ""
    return b" ".join(words[:3]).decode("utf-8", "replace").strip()[:80]


@dataclass(frozen=True)
class CleanUp:
    """Reserved memory before and after, and what tensors still hold. Memory that is reserved and unused but was not
    released is fragmented: it shares segments with blocks in use, and only a new process gets it back."""

    before_bytes: int
    after_bytes: int
    held_bytes: int

    @property
    def needs_restart(self) -> bool:
        return self.after_bytes - self.held_bytes > max(256 * 2**20, self.after_bytes // 4)


def clean_up() -> CleanUp:
    """Release all GPU memory that PyTorch can release without ending the process. Call it outside any `except`
    block: inside one the traceback keeps the tensors alive."""
    import torch

    from jackline.memory.guard.safe_step import free_caches

    if not accelerator.is_available():
        return CleanUp(0, 0, 0)
    before = accelerator.reserved_bytes()
    clear_workspaces = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    if clear_workspaces is not None:
        clear_workspaces()
    free_caches()
    return CleanUp(before, accelerator.reserved_bytes(), accelerator.allocated_bytes())
