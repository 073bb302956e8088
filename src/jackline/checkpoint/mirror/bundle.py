"""The small files of a run as one archive, so that `jackline why` still works after the machine is lost.

Owns which files are packed and how much of each, and safe unpacking: no file of an archive can land outside the run.
"""

from __future__ import annotations

import io
import re
import tarfile
from pathlib import Path

from jackline.rundir.layout import RunDir

TAIL_BYTES = 4 << 20
_TOP = re.compile(
    r"run\.json|config\.yaml|supervisor\.json|foreign\.json|out\.log|events-[a-z0-9]+\.jsonl|metrics-\d+\.jsonl|session-\d+\.json"
)
_ATTEMPT = re.compile(r"attempts/\d+/(exit|findings|intent|start|wait)\.json|attempts/\d+/incident-\d+\.txt")


def pack_run(run: RunDir) -> bytes:
    """An archive of the run's records: settings, events, metrics, findings, the end of the log."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz", compresslevel=1) as archive:
        for path in sorted([*run.path.glob("*"), *run.path.glob("attempts/*/*")]):
            name = path.relative_to(run.path).as_posix()
            if is_bundled(name) and path.is_file():
                data = read_tail(path, TAIL_BYTES)
                entry = tarfile.TarInfo(name)
                entry.size = len(data)
                archive.addfile(entry, io.BytesIO(data))
    return buffer.getvalue()


def unpack_run(data: bytes, run: RunDir) -> list[str]:
    """Write the files that do not exist yet; return their names. Anything unexpected in the archive is ignored."""
    written = []
    with tarfile.open(fileobj=io.BytesIO(data), mode="r:gz") as archive:
        for entry in archive:
            target = run.path / entry.name
            file = archive.extractfile(entry) if entry.isreg() and is_bundled(entry.name) else None
            if file is None or target.exists():
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(file.read(TAIL_BYTES))
            written.append(entry.name)
    return written


def is_bundled(name: str) -> bool:
    return bool(_TOP.fullmatch(name) or _ATTEMPT.fullmatch(name))


def read_tail(path: Path, limit: int) -> bytes:
    """The end of a file, starting at the beginning of a line."""
    with open(path, "rb") as file:
        size = file.seek(0, io.SEEK_END)
        file.seek(max(0, size - limit))
        data = file.read(limit)
    return data if size <= limit else data[data.find(b"\n") + 1 :]
