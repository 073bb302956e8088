"""Sentences about memory, for `status` and `why`: host, GPU, what ran out, other users of the GPU. Pure.

Reads what the session (session-RANK.json) and the supervisor (supervisor.json) wrote.
"""

from __future__ import annotations

from collections.abc import Iterator

from jackline.cli.text.safety import safe_text
from jackline.rundir.records.session import OomRecord, SessionRecord
from jackline.rundir.records.supervisor import GpuUserRecord, SupervisorRecord
from jackline.units import format_bytes, format_duration, format_limit

_MAX_OTHERS = 4


def memory_section(session: SessionRecord, state: SupervisorRecord, attempt: int | None) -> Iterator[str]:
    """Everything known about this attempt's memory, one line each."""
    is_ours = session.attempt == attempt
    host = host_line(state, session if is_ours else SessionRecord())
    if host:
        yield f"host memory: {host}"
    gpu = gpu_line(session) if is_ours else ""
    if gpu:
        yield f"GPU memory: {gpu}"
    for other in others_beside(state):
        yield f"also on the GPU: {other}"
    if is_ours:
        yield from oom_lines(session)


def host_line(state: SupervisorRecord, session: SessionRecord) -> str:
    """Used memory, limit, forecast, and the line of code where memory grows."""
    memory, inside = state.memory, session.memory.host
    used, limit = memory.used_bytes, memory.limit_bytes
    if used is None or not limit:
        used, limit = inside.used_bytes, inside.limit_bytes
    if used is None or not limit:
        return ""
    of = safe_text(format_limit(limit, memory.limit_source), 100)
    parts = [f"{format_bytes(used)} of {of} in use, {100 * used / limit:.0f} %"]
    left_s = inside.seconds_to_limit if memory.seconds_to_limit is None else memory.seconds_to_limit
    growth = memory.growth_bytes_per_s
    if left_s is not None:
        pace = f", growing {format_bytes(growth)}/s" if growth and growth > 0 else ""
        parts.append(f"full in about {format_duration(left_s)} at this rate{pace}")
    grows_at = memory.grows_at or inside.grows_at
    if grows_at is not None and left_s is not None:
        parts.append(f"it grows at {safe_text(grows_at, 240)}")
    return "; ".join(parts)


def gpu_line(session: SessionRecord) -> str:
    """The statistics of PyTorch's allocator for this process, and its current micro-batch."""
    memory = session.memory
    gpu, parts = memory.gpu, []
    if gpu.allocated_bytes is not None and gpu.reserved_bytes is not None:
        text = f"{format_bytes(gpu.allocated_bytes)} in tensors, {format_bytes(gpu.reserved_bytes)} reserved"
        most, kept = gpu.peak_allocated_bytes, gpu.peak_reserved_bytes
        if most is not None and kept is not None:
            text += f" (at most {format_bytes(most)} and {format_bytes(kept)})"
        parts.append(text)
    if memory.num_shrinks and memory.micro_batch is not None:
        times = "once" if memory.num_shrinks == 1 else f"{memory.num_shrinks} times"
        parts.append(f"micro-batch {memory.micro_batch} after running out {times}")
    return "; ".join(parts)


def others_beside(state: SupervisorRecord) -> list[str]:
    """'pid 4211 (python other.py), 15.2 GiB' for every process of others on the GPUs."""
    return [_other(user) for user in state.gpu_others[:_MAX_OTHERS] if user.pid is not None]


def _other(user: GpuUserRecord) -> str:
    shown = safe_text(user.name, 80) if user.name else "not visible from here: another container, or already dead"
    size = "an unknown amount" if user.used_bytes is None else format_bytes(user.used_bytes)
    return f"pid {user.pid} ({shown}), {size}"


def oom_lines(session: SessionRecord) -> Iterator[str]:
    """The last time GPU memory ran out: step, shape, needed and free, largest part, what would have fitted."""
    account = session.memory.last_oom
    if account.step is None:
        return
    shape = f", batch {safe_text(account.shape, 60)}" if account.shape else ""
    yield f"the GPU's memory ran out at step {account.step}{shape}{_needed(account)}"
    if account.parts:
        largest = max(account.parts, key=lambda part: account.parts[part])
        yield f"  largest part: {safe_text(largest, 60)}, {format_bytes(account.parts[largest])}"
    if account.new_micro_batch is not None:
        yield f"  it continued with micro-batch {account.new_micro_batch}"
    elif account.fitting_micro_batch:
        fitting = account.fitting_micro_batch
        yield f"  about micro-batch {fitting} would have fitted; run.safe_step finds it and keeps the batch"
    if account.needs_new_process:
        yield "  what is left is split between blocks: only a new process gets it back"
    for user in account.others[:_MAX_OTHERS]:
        if user.pid is not None:
            yield f"  also on the GPU then: {_other(user)}"


def _needed(account: OomRecord) -> str:
    wanted, free, total = account.wanted_bytes, account.free_bytes, account.total_bytes
    text = f": needed {format_bytes(wanted)}" if wanted is not None else ""
    if text and free is not None:
        text += f", {format_bytes(free)} free" + (f" of {format_bytes(total)}" if total is not None else "")
    return text
