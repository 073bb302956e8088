"""Errors that say that memory ran out, on a GPU or on the host."""

from __future__ import annotations

import re

from jackline.diagnosis.deaths.evidence import Evidence, Finding
from jackline.diagnosis.deaths.sentences import (
    at_place,
    less_memory,
    memory_lines,
    memory_share,
    place_line,
    ran_line,
)
from jackline.diagnosis.deaths.signal import fault_place
from jackline.diagnosis.deaths.traceback_text import ErrorText
from jackline.units import format_bytes, format_duration

_UNITS = {"bytes": 1, "byte": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_SIZE = r"([\d.]+) ?(bytes?|[KMGT]iB|B)\b"

_GPU = re.compile(
    r"(?:CUDA|HIP|XPU|MPS backend) out of memory|CUDA error: out of memory|^torch[\w.]*OutOfMemoryError"
    r"|CUBLAS_STATUS_ALLOC_FAILED|CUDNN_STATUS_ALLOC_FAILED|RESOURCE_EXHAUSTED: Out of memory"
    r"|OOM when allocating tensor",
    re.IGNORECASE,
)
_IN_LIBRARY = re.compile(r"CUBLAS_STATUS_ALLOC_FAILED|CUDNN_STATUS_ALLOC_FAILED")
_NEEDED = re.compile(rf"[Tt]r(?:ied|ying) to allocate {_SIZE}")
_TOTAL = re.compile(rf"total capacity of {_SIZE}|{_SIZE} total capacity")
_FREE = re.compile(rf"of which {_SIZE} is free|; {_SIZE} free")
_HELD = re.compile(rf"allocated memory {_SIZE} is allocated by PyTorch|{_SIZE} already allocated")
_UNUSED = re.compile(rf"{_SIZE} is reserved by PyTorch but unallocated")
_RESERVED = re.compile(rf"{_SIZE} reserved in total by PyTorch")
_NEIGHBOUR = re.compile(rf"Process (\d+) has {_SIZE} memory in use")

_HOST = re.compile(
    r"can't allocate memory|Unable to allocate .+ for an array|\[Errno 12\] Cannot allocate memory|std::bad_alloc"
    r"|ArrowMemoryError|realloc of size \d+ failed|node running low on memory|java\.lang\.OutOfMemoryError"
    r"|heap out of memory|^Out of memory$|cannot allocate vector of size"
)
_HARDLY_USED = 0.25
_HOST_NEEDED = re.compile(rf"(?:tried to allocate|Unable to allocate) {_SIZE}|realloc of size (\d+)()")
_ALLOWED = re.compile(rf"{_SIZE} allowed")
# Where a whole card is the limit, PyTorch prints no cap or one that is nearly all of it.
_IS_A_CAP = 0.95


def cuda_oom(error: ErrorText, evidence: Evidence) -> Finding | None:
    text = error.text
    if not _GPU.search(text) or "can't allocate memory" in text:
        return None
    needed, free, total, cap = _first(_NEEDED, text), _first(_FREE, text), _first(_TOTAL, text), _cap(text)
    title = f"ran out of GPU memory{at_place(error.place)}"
    if needed is not None:
        title += f": needed {format_bytes(needed)}"
        if cap is not None:
            title += f", and this process may use only {format_bytes(cap)}"
        elif free is not None and total is not None:
            title += f", {format_bytes(free)} free of {format_bytes(total)}"
    neighbours = [(int(pid), _bytes(size, unit)) for pid, size, unit in _NEIGHBOUR.findall(text)]
    return Finding(
        "cuda_oom",
        # cuBLAS and cuDNN also fail to allocate where something before them broke the GPU's state.
        "likely" if _IN_LIBRARY.search(text) else "certain",
        title,
        (*place_line(error.place), *_gpu_lines(text, neighbours), *_leak_lines(evidence), *ran_line(evidence)),
        _gpu_hint(text, needed, neighbours, evidence),
        place=error.place,
    )


def _cap(text: str) -> int | None:
    """The limit of this process (set_per_process_memory_fraction), where it has one: '8.39 GiB allowed'."""
    allowed, total = _first(_ALLOWED, text), _first(_TOTAL, text)
    return None if allowed is None or (total and allowed >= _IS_A_CAP * total) else allowed


def _leak_lines(evidence: Evidence) -> tuple[str, ...]:
    growth = evidence.gpu_growth
    if growth is None:
        return ()
    grew, over = format_bytes(growth.grew_bytes), format_duration(growth.over_s)
    found = f"GPU memory grew steadily until the end, by {grew} in {over}: it is kept from step to step (a leak)"
    lines = tuple(
        f"may keep it: {place_line(frame)[0]}" for frame in evidence.keeping_frames[:2] if place_line(frame)
    )
    return (found, *lines)


def _gpu_lines(text: str, neighbours: list[tuple[int, int]]) -> tuple[str, ...]:
    held, unused = _first(_HELD, text), _unused(text)
    lines = []
    if held is not None:
        rest = f" and kept {format_bytes(unused)} more without using it" if unused else ""
        lines.append(f"PyTorch held {format_bytes(held)}{rest}")
    lines += [
        f"another process, pid {pid}, held {format_bytes(size)} of the same GPU" for pid, size in neighbours[:2]
    ]
    return tuple(lines)


def _gpu_hint(text: str, needed: int | None, neighbours: list[tuple[int, int]], evidence: Evidence) -> str:
    unused = _unused(text)
    if evidence.gpu_growth is not None:
        return "keep numbers, not tensors: `loss.item()` or `.detach()`; a smaller batch would only delay it"
    if (cap := _cap(text)) is not None:
        return (
            f"the limit is this process's own, {format_bytes(cap)}: raise it (set_per_process_memory_fraction, MPS, "
            "MIG), or make the batch smaller"
        )
    if neighbours and needed is not None and neighbours[0][1] > needed:
        return f"if pid {neighbours[0][0]} is a leftover of yours, `kill {neighbours[0][0]}` frees its GPU memory"
    if unused and needed is not None and unused >= needed:
        return "memory is there but split up: set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
    return "make the batch (or the sequence) smaller and accumulate gradients over more of them"


def _unused(text: str) -> int | None:
    """Bytes reserved by PyTorch but unused. Newer messages state it; in older ones it is reserved minus allocated."""
    said, reserved, held = _first(_UNUSED, text), _first(_RESERVED, text), _first(_HELD, text)
    if said is not None or reserved is None or held is None:
        return said
    return max(0, reserved - held)


def host_memory_error(error: ErrorText, evidence: Evidence) -> Finding | None:
    is_memory_error = error.name.endswith("MemoryError")  # one of a GPU was found before
    if not is_memory_error and not _HOST.search(error.text):
        return None
    needed = _first(_HOST_NEEDED, error.text)
    place = error.place or fault_place(evidence.fault_text)
    title = f"{'one request for memory was refused' if _is_odd(evidence) else 'ran out of memory'}{at_place(place)}"
    if needed is not None:
        title += f": asked for {format_bytes(needed)} at once"
    return Finding(
        "host_memory_error",
        "certain",
        title,
        (*place_line(place), error.first_line[:200], *memory_lines(evidence)),
        _host_hint(needed, evidence),
        place=place,
    )


def _is_odd(evidence: Evidence) -> bool:
    """Whether the request was refused though hardly any memory was used and nothing grew."""
    share = memory_share(evidence)
    return share is not None and share < _HARDLY_USED and evidence.growing_frame is None


def _host_hint(needed: int | None, evidence: Evidence) -> str:
    """One allocation that is large by itself, or a little too much after a long growth."""
    if needed is None and _is_odd(evidence):
        return (
            "hardly any memory was in use, so the size that was asked for is the thing to look at: computed wrong "
            "(negative, an overflow, never set), or above a limit (ulimit -v)"
        )
    if needed is None and evidence.growing_frame is None:
        return less_memory(evidence)
    limit = evidence.memory_limit_bytes
    is_large = needed is not None and (not limit or needed > 0.2 * limit)
    if evidence.growing_frame is not None and not is_large:
        return less_memory(evidence)
    return "ask for less at once: smaller pieces, a smaller data type, or memory-mapped data (numpy.memmap)"


def _first(pattern: re.Pattern[str], text: str) -> int | None:
    match = pattern.search(text)
    if match is None:
        return None
    found = [group for group in match.groups() if group is not None]
    return _bytes(found[0], found[1])


def _bytes(number: str, unit: str) -> int:
    try:
        return round(float(number.rstrip(".")) * _UNITS.get(unit, 1))
    except ValueError:
        return 0
