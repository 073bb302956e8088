"""The files of a source, in order, one by one.

Owns: folders, globs, `http(s)://` with brace ranges, `hf://` and `python-stdlib`, listed lazily in one fixed order
(names compared folder by folder), so that tens of thousands of names never delay the first document and listing can
resume at any file. Does not own opening them for reading (`open_file` here chooses the class, bytefile.py opens).
walk.py walks a tree of folders, hub.py lists the hub's folders.
"""

from __future__ import annotations

import os
import re
import sysconfig
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from urllib.parse import urlsplit

from jackline.data.sources.bytefile import ByteFile, HttpFile, LocalFile, Patience, SourceUnavailable
from jackline.data.sources.formats import layout_of
from jackline.data.sources.walk import MAGIC, Entry, Found, read_pattern, walk
from jackline.errors import UsageError

PYTHON_STDLIB = "python-stdlib"
_STDLIB_LEFT_OUT = {
    "test",
    "tests",
    "idlelib",
    "lib2to3",
    "turtledemo",
    "site-packages",
    "dist-packages",
    "__pycache__",
}
_BRACES = re.compile(r"\{(\d+)\.\.(\d+)\}")


def list_files(url: str, *, start_at: str | None = None, needs_known_ending: bool = True) -> Iterator[Found]:
    """Files of `url` in order, from the one named `start_at` on."""
    if url.startswith(("http://", "https://")):
        return _from(map(Found, _expand_braces(url)), start_at)
    if url.startswith("hf://"):
        from jackline.data.sources.hub import list_hub_files

        return list_hub_files(url, start_at=start_at)
    if url == PYTHON_STDLIB:
        root = sysconfig.get_paths()["stdlib"]
        return walk(_list_local, root, ("**", "*.py"), start_at=start_at, leave_out=_STDLIB_LEFT_OUT)
    return _list_local_files(local_path(url), start_at, needs_known_ending)


def local_path(url: str) -> str:
    """The path as typed, made absolute without following links: a link to the newest corpus stays that link."""
    return os.path.abspath(os.path.expanduser(url))  # noqa: PTH100, PTH111 - Path.resolve() would follow links


def is_one_text_file(url: str, container: str = "auto") -> bool:
    """Whether a source is a single text file: by its name, also where it is gone or remote; of a local folder or
    pattern, by what is there."""
    if url == PYTHON_STDLIB:
        return False
    is_remote = "://" in url
    name = url
    if not is_remote and (Path(local_path(url)).is_dir() or MAGIC.search(url)):
        files = list(islice(list_files(url, needs_known_ending=container == "auto"), 2))
        if len(files) != 1:
            return False
        name = files[0].name
    if is_remote and (MAGIC.search(urlsplit(url).path) or _BRACES.search(url)):
        return False
    layout = layout_of(name, container)
    return layout is not None and layout.container == "txt"


def open_file(name: str, patience: Patience) -> ByteFile:
    """Open the file with that name, as `list_files` returned it."""
    if name.startswith(("http://", "https://")):
        return HttpFile(name, patience)
    if name.startswith("hf://"):
        from jackline.data.sources.hub import open_hub_file

        return open_hub_file(name, patience)
    return LocalFile(name)


def _list_local_files(path: str, start_at: str | None, needs_known_ending: bool) -> Iterator[Found]:
    if Path(path).is_file():
        return _from(iter([Found(path, Path(path).stat().st_size)]), start_at)
    if Path(path).is_dir():
        found = walk(_list_local, path, ("**", "*"), start_at=start_at, leave_out={"__pycache__"})
        return (file for file in found if not needs_known_ending or layout_of(file.name) is not None)
    if not MAGIC.search(path):
        name = os.path.relpath(path)
        is_hub_like = name.count("/") == 1 and not name.startswith(".") and not Path(name).parent.exists()
        hub = f"; a data set of the hub is hf:{name}" if is_hub_like else ""
        raise UsageError(
            f"there is no file or folder {path}", hint=f"check the path; globs like 'data/*.txt' work too{hub}"
        )
    parts = path.strip("/").split("/")
    fixed = next(index for index, part in enumerate(parts) if MAGIC.search(part))
    return walk(_list_local, "/" + "/".join(parts[:fixed]), read_pattern(parts[fixed:]), start_at=start_at)


def _list_local(folder: str) -> list[Entry]:
    try:
        with os.scandir(folder or "/") as entries:
            return [_entry(entry) for entry in entries if not _is_left_out(folder, entry)]
    except OSError as error:
        hint = "check the path; globs like 'data/*.txt' work too"
        raise SourceUnavailable(f"cannot list {folder}: {error.strerror}", hint=hint) from error


def _is_left_out(folder: str, entry: os.DirEntry[str]) -> bool:
    """Whether an entry is left out: hidden files, and links to one of their own parent folders, which would never
    end."""
    if entry.name.startswith("."):
        return True
    try:
        if not entry.is_symlink() or not entry.is_dir():
            return False
    except OSError:
        return False  # a link to itself: opening it raises an error that names it
    target = f"{os.path.realpath(entry.path).rstrip('/')}/"
    # Each parent folder is resolved to its real path: two links may lead to each other.
    way = [folder, *map(str, Path(folder).parents)]
    return any(f"{os.path.realpath(above)}/".startswith(target) for above in way)


def _entry(entry: os.DirEntry[str]) -> Entry:
    try:
        is_folder = entry.is_dir()
        return Entry(entry.name, is_folder, None if is_folder else entry.stat().st_size)
    except OSError:
        return Entry(entry.name, False, None)  # a dangling link: opening it raises an error that names it


def _expand_braces(url: str) -> Iterator[str]:
    match = _BRACES.search(url)
    if match is None:
        yield url
        return
    width = len(match[1])
    for number in range(int(match[1]), int(match[2]) + 1):
        yield from _expand_braces(f"{url[: match.start()]}{number:0{width}d}{url[match.end() :]}")


def _from(files: Iterator[Found], start_at: str | None) -> Iterator[Found]:
    for file in files:
        if start_at is None or file.name == start_at:
            start_at = None
            yield file
