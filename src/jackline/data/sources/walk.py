"""Walks a tree of folders for files that match a pattern, in one fixed order, on a disk or on the hub alike."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import NamedTuple

from jackline.errors import UsageError

MAGIC = re.compile(r"[*?\[]")


@dataclass(frozen=True)
class Found:
    """One file: `name` is what the cursor and messages use; `size` is None if the listing does not include it."""

    name: str
    size: int | None = None


class Entry(NamedTuple):
    name: str
    is_folder: bool
    size: int | None


ListFolder = Callable[[str], list[Entry]]


def walk(
    list_folder: ListFolder,
    root: str,
    pattern: tuple[str, ...],
    *,
    start_at: str | None = None,
    leave_out: set[str] | None = None,
) -> Iterator[Found]:
    """Files under `root` that match `pattern` (`**` = any depth), folder by folder.

    `start_at` skips whole folders before it without listing them.
    """
    start = start_at[len(root) :].strip("/").split("/") if start_at else []
    yield from _walk(list_folder, root, pattern, start, leave_out or set())


def _walk(
    list_folder: ListFolder, folder: str, pattern: tuple[str, ...], start: list[str], leave_out: set[str]
) -> Iterator[Found]:
    head, rest = pattern[0], pattern[1:]
    for entry in sorted(list_folder(folder), key=lambda entry: entry.name):
        if entry.name in leave_out or (start and entry.name < start[0]):
            continue
        path = f"{folder.rstrip('/')}/{entry.name}"
        below = start[1:] if start and entry.name == start[0] else []
        if head == "**":
            if entry.is_folder:
                yield from _walk(list_folder, path, pattern, below, leave_out)
            elif len(rest) == 1 and fnmatchcase(entry.name, rest[0]):
                yield Found(path, entry.size)
        elif fnmatchcase(entry.name, head):
            if entry.is_folder and rest:
                yield from _walk(list_folder, path, rest, below, leave_out)
            elif not entry.is_folder and not rest:
                yield Found(path, entry.size)


def read_pattern(parts: list[str]) -> tuple[str, ...]:
    """`**` may be only right before the last part; anywhere else the same folders would be listed twice."""
    if "**" in parts[:-2] or parts[-1] == "**":
        raise UsageError(f"'**' may only stand before the last part: {'/'.join(parts)}", hint="write 'data/**/*.txt'")
    return tuple(parts)
