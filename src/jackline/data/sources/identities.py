"""Which source files were read, and whether they are still the same.

Owns `files.jsonl`. It reports what changed when a rebuilt era does not match its hash, and it refuses at once if the
file in which reading resumes is a different one. Only the newest few thousand entries are kept in memory, however
many files there are.
"""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

from jackline.data.sources.bytefile import ByteFile, Patience, SourceChanged, SourceUnavailable
from jackline.data.sources.listing import open_file
from jackline.rundir.jsonl import JsonlWriter, read_last, read_lines

_KEPT = 2000
_CHECKED_AT_START = 64


class FileBook:
    """The identities of the files opened so far."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "files.jsonl"
        self._newest: OrderedDict[str, dict[str, Any]] = OrderedDict(
            (entry["file"], entry["identity"]) for entry in read_last(self._path, _KEPT)
        )

    def note(self, source: int, name: str, file: ByteFile, *, is_first_time: bool) -> None:
        """Record a new file; compare a file that is already recorded."""
        found = file.identity()
        known = self._newest.get(name)
        if known is not None:
            change = difference(name, known, found)
            if change:
                raise SourceChanged(
                    f"the source changed while the cache was being built: {change}",
                    hint="put it back as it was, or build a new cache: `jackline data prepare --rebuild`",
                )
            return
        if not is_first_time:
            return
        writer = JsonlWriter(self._path)
        writer.append({"source": source, "file": name, "identity": found})
        writer.close()
        self._newest[name] = found
        if len(self._newest) > _KEPT:
            self._newest.popitem(last=False)

    def changes(self, limit: int = 5) -> list[str]:
        """What is different now, as text; opens every file until `limit` differences are found."""
        found: list[str] = []
        offset = 0
        while len(found) < limit:
            lines = read_lines(self._path, offset, max_bytes=1 << 20)
            if not lines.records:
                break
            offset = lines.next_offset
            for entry in lines.records:
                change = _compare(entry)
                if change and len(found) < limit:
                    found.append(change)
        return found


def check_first_files(folder: Path) -> None:
    """Refuse a cache whose local sources have changed since it was built; checks the first few dozen files only."""
    for entry in read_lines(folder / "files.jsonl", max_bytes=1 << 16).records[:_CHECKED_AT_START]:
        if "://" in entry["file"] or not Path(entry["file"]).exists():
            continue
        change = _compare(entry)
        if change:
            raise SourceChanged(
                f"the source changed since the cache in {folder} was built: {change}",
                hint="`jackline data prepare --rebuild` builds it anew; a run that used it cannot resume exactly",
            )


def difference(name: str, known: dict[str, Any], found: dict[str, Any]) -> str | None:
    """The difference as text; None if both are the same file."""
    if known.get("size") != found.get("size"):
        return f"{name} was {known.get('size')} bytes long and is {found.get('size')} bytes now"
    for key in ("edges", "etag"):
        if known.get(key) and found.get(key) and known[key] != found[key]:
            return f"{name} has the same length but other content"
    return None


def _compare(entry: dict[str, Any]) -> str | None:
    name = entry["file"]
    try:
        file = open_file(name, Patience(give_up_after_s=10))
    except SourceUnavailable:
        return f"{name} is gone"
    try:
        return difference(name, entry["identity"], file.identity())
    except SourceUnavailable:
        return f"{name} cannot be read"
    finally:
        file.close()
