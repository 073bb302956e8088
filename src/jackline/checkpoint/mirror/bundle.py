"""The small files of a run as one archive, so that `jackline why` still works after the machine is lost.

Owns which files are packed and how much of each, and safe unpacking: no file of an archive can land outside the run.
"""

from __future__ import annotations

import gzip
import io
import os
import re
import tarfile
import time
from pathlib import Path

from jackline.rundir.access.reading import read_end
from jackline.rundir.access.writing import FOLDER_MODE, open_own
from jackline.rundir.layout import RunDir

TAIL_BYTES = 4 << 20
MAX_BUNDLE_BYTES = 256 << 20
MAX_UNPACKED_BYTES = 1 << 30
MAX_ENTRIES = 20_000
_TAR_BLOCK = 512
_TOP = re.compile(
    r"(run|supervisor|foreign|skipped-batches|session-\d+)\.json|config\.yaml|out\.log"
    r"|(timeline|events-[a-z0-9]+|metrics-(\d+|printed))\.jsonl"
)
_ATTEMPT = re.compile(
    r"attempts/\d+/(exit|findings|intent|start|surroundings|wait)\.json|attempts/\d+/incident-\d+\.txt"
)


def pack_run(run: RunDir) -> bytes:
    """An archive of the run's records: settings, events, metrics, findings, the end of the log. Of the same records
    the same bytes."""
    buffer = io.BytesIO()
    with (
        gzip.GzipFile(fileobj=buffer, mode="wb", compresslevel=1, mtime=0) as packed,
        tarfile.open(fileobj=packed, mode="w") as archive,
    ):
        for path in sorted([*run.path.glob("*"), *run.path.glob("attempts/*/*")]):
            name = path.relative_to(run.path).as_posix()
            if is_bundled(name) and path.is_file():
                data = read_tail(path, TAIL_BYTES)
                entry = tarfile.TarInfo(name)
                entry.size = len(data)
                entry.mtime = int(path.stat().st_mtime)
                archive.addfile(entry, io.BytesIO(data))
    return buffer.getvalue()


def find_landmarks(run: RunDir) -> frozenset[str]:
    """Records that a run never loses: where one is gone, somebody is deleting the folder."""
    found = [run.run_file, run.supervisor_file, *run.path.glob("attempts/*/start.json")]
    return frozenset(path.relative_to(run.path).as_posix() for path in found if path.exists())


def unpack_run(data: bytes, run: RunDir) -> list[str]:
    """Write the files that do not exist yet; return their names. Anything unexpected in the archive is ignored."""
    written: list[str] = []
    with gzip.GzipFile(fileobj=io.BytesIO(data)) as stream:
        for _ in range(MAX_ENTRIES):
            entry = _next_entry(stream)
            if entry is None:
                return written
            size = -(-entry.size // _TAR_BLOCK) * _TAR_BLOCK
            if entry.isreg() and is_bundled(entry.name) and not os.path.lexists(run.path / entry.name):
                target = run.path / entry.name
                target.parent.mkdir(FOLDER_MODE, parents=True, exist_ok=True)
                contents = stream.read(min(entry.size, TAIL_BYTES))
                with open(open_own(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as file:
                    file.write(contents)
                    file.flush()
                    _set_time(file.fileno(), float(entry.mtime))
                written.append(entry.name)
                size -= len(contents)
            _skip(stream, size)
    return written


def _set_time(fd: int, at_s: float) -> None:
    """Readers take it for the time of the last change. An older archive has none, and any clock may be wrong."""
    if 0 < at_s <= time.time():
        os.utime(fd, (at_s, at_s))


def check_whole(data: bytes) -> None:
    """Raise OSError or EOFError for an archive that was cut off, as one that is just being uploaded is."""
    left = MAX_UNPACKED_BYTES
    with gzip.GzipFile(fileobj=io.BytesIO(data)) as stream:
        while left > 0 and (block := stream.read(1 << 20)):
            left -= len(block)


def _next_entry(stream: gzip.GzipFile) -> tarfile.TarInfo | None:
    """The next header, by itself: the library's own reader takes as much memory as a header asks for."""
    block = stream.read(_TAR_BLOCK)
    if len(block) < _TAR_BLOCK or not block.strip(b"\0") or stream.tell() > MAX_UNPACKED_BYTES:
        return None
    return tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")


def _skip(stream: gzip.GzipFile, size: int) -> None:
    size = min(size, MAX_UNPACKED_BYTES)
    while size > 0 and (block := stream.read(min(size, 1 << 20))):
        size -= len(block)


def is_bundled(name: str) -> bool:
    return bool(_TOP.fullmatch(name) or _ATTEMPT.fullmatch(name))


def read_tail(path: Path, limit: int) -> bytes:
    """The end of a file, starting at the beginning of a line."""
    data, is_cut = read_end(path, limit)
    return data[data.find(b"\n") + 1 :] if is_cut else data
