"""A remote place that stores whole files: a folder, or any file system that fsspec supports.

Nothing is ever overwritten and nothing is trusted. An upload counts once its last file, the manifest, is there. It is
confirmed once the store itself returns the right checksum. fsspec is imported only when a URL needs it.
Owns the calls. upload.py decides what is put where.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import errno
import functools
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, TypeVar

from jackline.errors import JacklineError, UsageError
from jackline.machine.disk import read_disk
from jackline.rundir.access.reading import open_plain, read_whole
from jackline.rundir.access.secrets import without_secrets

_BLOCK_BYTES = 8 << 20
MAX_READ_BYTES = 1 << 30
_LONGEST_WORDS = 300
Result = TypeVar("Result")
Moved = Callable[[int], None]  # called with the number of bytes that were uploaded since the last call


class Store(Protocol):
    """The interface of a store. Names are relative paths with '/'. Every call may raise OSError and may take long."""

    def put(self, local: Path, name: str, moved: Moved | None = None) -> None: ...
    def put_bytes(self, data: bytes, name: str) -> None: ...
    def get(self, name: str, local: Path) -> None: ...
    def read(self, name: str) -> bytes: ...
    def names(self, folder: str) -> list[str]: ...
    def size(self, name: str) -> int | None: ...
    def delete(self, name: str) -> None: ...
    def checksum(self, name: str) -> tuple[str, str] | None: ...
    def local_path(self, name: str) -> Path | None: ...


class FolderStore:
    """A folder on this machine, or one mounted into it."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def put(self, local: Path, name: str, moved: Moved | None = None) -> None:
        with open(local, "rb") as source:
            self._write(name, lambda file: _copy(source, file, moved))

    def put_bytes(self, data: bytes, name: str) -> None:
        self._write(name, lambda file: file.write(data))

    def get(self, name: str, local: Path) -> None:
        with open(open_plain(self._root / name), "rb") as source, open(local, "xb") as file:
            shutil.copyfileobj(source, file, _BLOCK_BYTES)
            file.flush()
            os.fsync(file.fileno())

    def read(self, name: str) -> bytes:
        # Whatever is there: a device or a FIFO must not be read for ever.
        return read_whole(self._root / name, MAX_READ_BYTES)

    def names(self, folder: str) -> list[str]:
        try:
            return sorted(path.name for path in (self._root / folder).iterdir())
        except (FileNotFoundError, NotADirectoryError):
            return []

    def size(self, name: str) -> int | None:
        try:
            return (self._root / name).stat().st_size
        except (FileNotFoundError, NotADirectoryError):
            return None

    def delete(self, name: str) -> None:
        path = self._root / name
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)

    def checksum(self, name: str) -> tuple[str, str] | None:
        return None

    def local_path(self, name: str) -> Path | None:
        """The path for reading the file back from the disk itself; None on a mount that only forwards bytes."""
        disk = read_disk(self._root)
        return None if disk is None or disk.is_remote else self._root / name

    def _write(self, name: str, write: Any) -> None:
        path = self._root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "xb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())


class StoreTrouble(OSError):
    """A remote store does not do what it is asked: nobody answers, the credentials are refused."""

    hint = "check its address, the credentials and the network; what was saved on this machine is not affected"

    def __init__(self, text: str, place: str) -> None:
        super().__init__(text)
        self.place = place


def _told_as_os_error(call: Callable[..., Result]) -> Callable[..., Result]:
    """Clients of stores have errors of their own (an endpoint that nobody answers at, missing credentials)."""

    @functools.wraps(call)
    def told(store: FsspecStore, *arguments: Any, **named: Any) -> Result:
        try:
            return call(store, *arguments, **named)
        except (FileNotFoundError, JacklineError):
            raise
        except Exception as problem:
            raise trouble_of(problem, store.shown) from problem

    return told


def trouble_of(problem: Exception, place: str) -> StoreTrouble:
    text = " ".join(without_secrets(str(problem)).split())[:_LONGEST_WORDS]
    return StoreTrouble(f"{type(problem).__name__}: {text}".removesuffix(": "), place)


class FsspecStore:
    """S3, GCS, a hub, sftp ... through fsspec."""

    def __init__(self, url: str) -> None:
        self.shown = shown = without_secrets(url)
        try:
            from fsspec.core import url_to_fs
        except ImportError:
            raise UsageError(f"the mirror {shown} needs the package fsspec", hint="pip install fsspec") from None
        try:
            self._system, self._root = url_to_fs(url)
        except (ImportError, ValueError) as problem:
            raise UsageError(f"the mirror {shown} cannot be used: {without_secrets(str(problem))}") from None
        except Exception as problem:  # some connect at once
            raise trouble_of(problem, shown) from problem

    @_told_as_os_error
    def put(self, local: Path, name: str, moved: Moved | None = None) -> None:
        path = self._path(name)
        self._system.makedirs(path.rpartition("/")[0], exist_ok=True)
        if moved is None:
            self._system.put_file(str(local), path)
        else:
            self._system.put_file(str(local), path, callback=_report_to(moved))

    @_told_as_os_error
    def put_bytes(self, data: bytes, name: str) -> None:
        path = self._path(name)
        self._system.makedirs(path.rpartition("/")[0], exist_ok=True)
        self._system.pipe_file(path, data)

    @_told_as_os_error
    def get(self, name: str, local: Path) -> None:
        self._system.get_file(self._path(name), str(local))

    @_told_as_os_error
    def read(self, name: str) -> bytes:
        return bytes(self._system.cat_file(self._path(name)))

    @_told_as_os_error
    def names(self, folder: str) -> list[str]:
        self._system.invalidate_cache()  # a cached listing from before the upload is useless
        try:
            found = self._system.ls(self._path(folder), detail=False)
        except FileNotFoundError:
            return []
        return sorted(str(path).rstrip("/").rpartition("/")[2] for path in found)

    @_told_as_os_error
    def size(self, name: str) -> int | None:
        self._system.invalidate_cache()
        try:
            return int(self._system.info(self._path(name))["size"])
        except FileNotFoundError:
            return None

    @_told_as_os_error
    def delete(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._system.rm(self._path(name), recursive=True)

    @_told_as_os_error
    def checksum(self, name: str) -> tuple[str, str] | None:
        self._system.invalidate_cache()
        return read_checksum(self._system.info(self._path(name)))

    def local_path(self, name: str) -> Path | None:
        return None

    def _path(self, name: str) -> str:
        return f"{self._root.rstrip('/')}/{name}"


def read_small(store: Store, name: str, max_bytes: int) -> bytes:
    """A file of a store, which may hold anything. Raises OSError when it is larger than that."""
    size = store.size(name)
    if size is not None and size > max_bytes:
        raise OSError(errno.EFBIG, f"{name} is larger than {max_bytes} bytes")
    return store.read(name)


def open_store(place: str) -> Store:
    """A path or a URL."""
    if not is_folder(place):
        return FsspecStore(place)
    _, mark, rest = place.partition("://")
    return FolderStore(Path(rest) if mark else Path(place).expanduser().absolute())


def is_folder(place: str) -> bool:
    """Whether it is a folder of this machine, or mounted into it."""
    scheme, mark, _ = place.partition("://")
    return not mark or scheme in ("file", "local")


def _copy(source: Any, file: Any, moved: Moved | None) -> None:
    while block := source.read(_BLOCK_BYTES):
        file.write(block)
        if moved is not None:
            moved(len(block))


def _report_to(moved: Moved) -> Any:
    """fsspec's own way to report progress; a file system that does not use it reports nothing."""
    from fsspec.callbacks import Callback

    class Reporting(Callback):  # type: ignore[misc]
        def relative_update(self, inc: int = 1) -> None:
            moved(int(inc))

    return Reporting()


def read_checksum(info: Mapping[str, Any]) -> tuple[str, str] | None:
    """The store's own checksum of an object as (algorithm, hex); None when it gives none that can be checked."""
    lfs = info.get("lfs")
    if isinstance(lfs, Mapping) and isinstance(lfs.get("sha256"), str):
        return "sha256", str(lfs["sha256"])
    for key in ("md5Hash", "content_md5"):
        found = _from_base64(info.get(key))
        if found:
            return "md5", found
    etag = str(info.get("ETag", "")).strip('"')
    # A multipart upload has an ETag with a dash, which is not the checksum of any data we have.
    if len(etag) == 32 and all(letter in "0123456789abcdef" for letter in etag):
        return "md5", etag
    return None


def _from_base64(value: Any) -> str:
    if isinstance(value, bytes | bytearray):
        return bytes(value).hex()
    if not isinstance(value, str):
        return ""
    try:
        return base64.b64decode(value, validate=True).hex()
    except (binascii.Error, ValueError):
        return ""
