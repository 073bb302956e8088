"""Errors that say, or mean, that a disk is full: by any library, measured on the disk that was written to."""

from __future__ import annotations

import re

from jackline.diagnosis.deaths.evidence import Confidence, DiskSpace, Evidence, Finding
from jackline.diagnosis.deaths.sentences import at_place, memory_line, place_line
from jackline.diagnosis.deaths.traceback_text import ErrorText
from jackline.units import format_bytes

_SHM = re.compile(r"/dev/shm|shared memory\(shm\)|</torch_|/psm_")
# The kernel's own words, whoever prints them: Python, HDF5, Rust (safetensors), Arrow, a shell.
_SAID = re.compile(
    r"\[Errno 28\]|No space left on device|\bENOSPC\b|os error 28\b|errno[ =]+28\b|\[Errno 122\]|Disk quota exceeded"
    r"|\bEDQUOT\b|database or disk is full|not enough (?:free |disk )?space",
    re.IGNORECASE,
)
# The same error number for limits of the kernel that are no disk's.
_NO_DISK = re.compile(r"inotify|SemLock|sem_open|semget|shmget|msgget|\bbpf\b", re.IGNORECASE)
_SQLITE = re.compile(r"database or disk is full", re.IGNORECASE)
_QUOTA = re.compile(r"quota|Errno 122|EDQUOT", re.IGNORECASE)
# Python names the source of a copy, too: "No space left on device: 'from' -> 'to'".
_PATH = re.compile(r"(?:device|exceeded|full)[^']{0,20}: (?:'[^']+' -> )?'([^']+)'")
# What libraries say when a write came back short. A closed or broken file causes the same words.
_MEANT = re.compile(
    r"PytorchStreamWriter failed|basic_ios::clear|inline_container\.cc.*unexpected pos|unexpected pos \d+ vs \d+"
    r"|\d+ requested and \d+ written|file write failed|Unable to (?:flush|write|synchronously write)|disk I/O error"
    r"|Can't (?:write|flush|synchronously write)|iostream (?:error|stream error)|write failed|fwrite|Failed to write"
    r"|short write|failed to (?:flush|write)",
    re.IGNORECASE,
)
_FULL_BYTES = 1 << 20
_NEARLY_FULL_BYTES = 64 << 20
_ROOMY_BYTES = 1 << 30


def disk_full(error: ErrorText, evidence: Evidence) -> Finding | None:
    if _NO_DISK.search(error.text):
        return None
    is_said = bool(_SAID.search(error.text))
    if not is_said and not _is_meant(error, fullest(evidence)):
        return None
    if _SHM.search(error.text):
        return _shm_full(error, evidence)
    path = _PATH.search(error.text)
    if _SQLITE.search(error.text) and has_room(fullest(evidence)):
        return _database_full(error, evidence)
    what = "the disk quota is used up" if _QUOTA.search(error.text) else "the disk is full"
    disk = fullest(evidence)
    confidence, title = _title(error, what, is_said=is_said, disk=disk)
    title += f": it could not write {path[1]}" if path else ""
    known = tuple(_space(one) for one in _worth_saying(evidence, path[1] if path else ""))
    where = path[1] if path else (disk.path if disk and is_full(disk) else "")
    if not path and not is_full(disk):
        known = ("no disk that Jackline knows of is full now: the unfinished file may have been removed",)
    look = f"(df -h {where} shows where)" if where else "(df -h and df -i shows where)"
    if _QUOTA.search(error.text):
        look, known = "(quota -s shows how much is used)", ()
    return Finding(
        "disk_full",
        confidence,
        title,
        (*place_line(error.place), error.first_line[:200], *known),
        f"free space {look}, then run the same command again",
        place=error.place,
    )


def has_room(disk: DiskSpace | None) -> bool:
    return disk is not None and disk.free_bytes >= _ROOMY_BYTES


def _database_full(error: ErrorText, evidence: Evidence) -> Finding:
    """SQLite says so of its own limit too, and of a temporary file on another disk."""
    known = tuple(_space(one) for one in _worth_saying(evidence, ""))
    return Finding(
        "disk_full",
        "not sure",
        f"SQLite could not let its database grow{at_place(error.place)}, though the disk has room now",
        (*place_line(error.place), error.first_line[:200], *known),
        "look at PRAGMA max_page_count (SQLite's own limit), at the disk of its temporary files (SQLITE_TMPDIR, "
        "/tmp), and whether another disk was full then",
        place=error.place,
    )


def _is_meant(error: ErrorText, disk: DiskSpace | None) -> bool:
    """A short write on a disk that is not known to have room. Without a traceback the disk must be full."""
    if not _MEANT.search(error.text):
        return False
    return (disk is None or disk.free_bytes < _ROOMY_BYTES) if error.kind else is_full(disk)


def fullest(evidence: Evidence) -> DiskSpace | None:
    """The disk with the least space among those that it wrote to; the run's own where no other is known."""
    return min(_all_disks(evidence), key=lambda disk: disk.free_bytes, default=None)


def _all_disks(evidence: Evidence) -> tuple[DiskSpace, ...]:
    own = evidence.disk_free_bytes
    return evidence.disks or ((DiskSpace(evidence.disk_path, own),) if own is not None else ())


def _title(error: ErrorText, what: str, *, is_said: bool, disk: DiskSpace | None) -> tuple[Confidence, str]:
    place = at_place(error.place)
    if is_said:
        return "certain", f"{what}{place}"
    if is_full(disk):
        return "certain", f"{what}{place}"
    if disk is not None and disk.free_bytes < _NEARLY_FULL_BYTES:
        return "likely", f"{what}{place}"
    return "not sure", f"a file could not be written{place}; a full disk does that"


def is_full(disk: DiskSpace | None) -> bool:
    return disk is not None and disk.free_bytes < max(_FULL_BYTES, disk.total_bytes // 1000)


def _worth_saying(evidence: Evidence, path: str) -> list[DiskSpace]:
    """The disk of the path that the error names, else the fullest; others only when they are nearly full too."""
    disks = sorted(_all_disks(evidence), key=lambda disk: (disk.path != path, disk.free_bytes))
    return [disk for number, disk in enumerate(disks) if number == 0 or is_full(disk)][:2]


def _space(disk: DiskSpace) -> str:
    total = f" of {format_bytes(disk.total_bytes)}" if disk.total_bytes else ""
    return f"the disk of {disk.path} has {format_bytes(disk.free_bytes)}{total} free now"


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
