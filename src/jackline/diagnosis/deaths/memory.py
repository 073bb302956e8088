"""Errors that say that space ran out: in GPU memory, in host memory, on a disk."""

from __future__ import annotations

import re

from jackline.diagnosis.deaths.evidence import Evidence, Finding
from jackline.diagnosis.deaths.sentences import at_place, memory_line, memory_lines, place_line, ran_line
from jackline.diagnosis.deaths.traceback_text import ErrorText
from jackline.units import format_bytes

_UNITS = {"bytes": 1, "byte": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_SIZE = r"([\d.]+) ?(bytes?|[KMGT]iB|B)\b"

_GPU = re.compile(
    r"(?:CUDA|HIP|XPU|MPS backend) out of memory|CUDA error: out of memory|OutOfMemoryError"
    r"|CUBLAS_STATUS_ALLOC_FAILED|RESOURCE_EXHAUSTED: Out of memory|OOM when allocating tensor",
    re.IGNORECASE,
)
_NEEDED = re.compile(rf"[Tt]r(?:ied|ying) to allocate {_SIZE}")
_TOTAL = re.compile(rf"total capacity of {_SIZE}|{_SIZE} total capacity")
_FREE = re.compile(rf"of which {_SIZE} is free|; {_SIZE} free")
_HELD = re.compile(rf"allocated memory {_SIZE} is allocated by PyTorch|{_SIZE} already allocated")
_UNUSED = re.compile(rf"{_SIZE} is reserved by PyTorch but unallocated")
_RESERVED = re.compile(rf"{_SIZE} reserved in total by PyTorch")
_NEIGHBOUR = re.compile(rf"Process (\d+) has {_SIZE} memory in use")

_HOST = re.compile(
    r"can't allocate memory|Unable to allocate .+ for an array|\[Errno 12\] Cannot allocate memory|std::bad_alloc"
    r"|ArrowMemoryError|realloc of size \d+ failed"
)
_HOST_NEEDED = re.compile(rf"(?:tried to allocate|Unable to allocate) {_SIZE}|realloc of size (\d+)()")
_SHM = re.compile(r"/dev/shm|shared memory\(shm\)|</torch_|/psm_")
_DISK = re.compile(r"\[Errno 28\]|No space left on device|\[Errno 122\]|Disk quota exceeded")
_DISK_PATH = re.compile(r"(?:device|exceeded): '([^']+)'")
# What torch.save prints on a full disk; a closed or broken file causes the same text.
_WRITER = re.compile(r"PytorchStreamWriter failed writing|inline_container\.cc.*unexpected pos")
_NEARLY_FULL_BYTES = 64 << 20


def cuda_oom(error: ErrorText, evidence: Evidence) -> Finding | None:
    text = error.text
    if not _GPU.search(text) or "can't allocate memory" in text:
        return None
    needed, free, total = _first(_NEEDED, text), _first(_FREE, text), _first(_TOTAL, text)
    title = f"ran out of GPU memory{at_place(error.place)}"
    if needed is not None:
        title += f": needed {format_bytes(needed)}"
        if free is not None and total is not None:
            title += f", {format_bytes(free)} free of {format_bytes(total)}"
    neighbours = [(int(pid), _bytes(size, unit)) for pid, size, unit in _NEIGHBOUR.findall(text)]
    return Finding(
        "cuda_oom",
        "certain",
        title,
        (*place_line(error.place), *_gpu_lines(text, neighbours), *ran_line(evidence)),
        _gpu_hint(text, needed, neighbours),
        place=error.place,
    )


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


def _gpu_hint(text: str, needed: int | None, neighbours: list[tuple[int, int]]) -> str:
    unused = _unused(text)
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
    is_memory_error = error.name.endswith("MemoryError") and error.name != "OutOfMemoryError"
    if not is_memory_error and not _HOST.search(error.text):
        return None
    needed = _first(_HOST_NEEDED, error.text)
    title = f"ran out of memory{at_place(error.place)}"
    if needed is not None:
        title += f": asked for {format_bytes(needed)} at once"
    return Finding(
        "host_memory_error",
        "certain",
        title,
        (*place_line(error.place), error.first_line[:200], *memory_lines(evidence)),
        "ask for less at once: smaller pieces, a smaller data type, or memory-mapped data (numpy.memmap)",
        place=error.place,
    )


def disk_full(error: ErrorText, evidence: Evidence) -> Finding | None:
    free = evidence.disk_free_bytes
    is_writer = bool(_WRITER.search(error.text)) and free is not None and free < _NEARLY_FULL_BYTES
    if not is_writer and not _DISK.search(error.text):
        return None
    if _SHM.search(error.text):
        return _shm_full(error, evidence)
    path = _DISK_PATH.search(error.text)
    what = "the disk quota is used up" if "quota" in error.text or "Errno 122" in error.text else "the disk is full"
    title = f"{what}{at_place(error.place)}" + (f": it could not write {path[1]}" if path else "")
    # The full disk may be another than that of the run directory.
    known = (f"{evidence.disk_path} has {format_bytes(free)} free now",) if free is not None else ()
    return Finding(
        "disk_full",
        "certain",
        title,
        (*place_line(error.place), error.first_line[:200], *known),
        f"free space ({f'df -h {path[1]}' if path else 'df -h'} shows where), then run the same command again",
        place=error.place,
    )


def _shm_full(error: ErrorText, evidence: Evidence) -> Finding:
    free = evidence.shm_free_bytes
    known = (f"/dev/shm has {format_bytes(free)} free now",) if free is not None else ()
    return Finding(
        "disk_full",
        "certain",
        f"shared memory (/dev/shm) is full{at_place(error.place)}",
        (*place_line(error.place), error.first_line[:200], *known, *memory_line(evidence)),
        "use fewer DataLoader workers, or a larger /dev/shm (docker run --shm-size=8g)",
        place=error.place,
    )


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
