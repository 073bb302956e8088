"""Bytes of one file, local or remote, from any offset.

Owns: local files and HTTP files with one interface (`read_at`), resuming at the byte where a connection broke, and
distinguishing "not available now" (waits, then stops with `SourceUnavailable`) from "changed" (`SourceChanged`). It
never skips: a caller gets the file's bytes in order or an exception. Does not own decompression or records.
"""

from __future__ import annotations

import os
import socket
import ssl
import stat
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from http.client import HTTPException, HTTPResponse
from typing import IO, Any, Protocol
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, Request, build_opener

import xxhash

from jackline.errors import JacklineError
from jackline.units import format_duration

_EDGE_BYTES = 1 << 16
_READ_BYTES = 1 << 18
_SLEEP_SLICE_S = 0.25
_UNKNOWN_HOST_S = 5.0


class SourceUnavailable(JacklineError):
    """The bytes are not available now, for a cause outside the file's content."""


class SourceChanged(JacklineError):
    """The source is no longer the one the cache was built from."""


class ByteFile(Protocol):
    """One file of a source."""

    @property
    def name(self) -> str: ...

    def size(self) -> int | None:
        """Its length; None until the server has reported it."""

    def read_at(self, offset: int, count: int, *, at_least: int | None = None) -> bytes:
        """`count` bytes from `offset`; fewer only at the end of the file, or once `at_least` bytes have arrived."""

    def identity(self) -> dict[str, Any]:
        """What must be the same when the file is opened again."""

    def check_same(self) -> None:
        """Raise SourceChanged if the file was written to since it was opened."""

    def close(self) -> None: ...


class LocalFile:
    """A file on this machine. An I/O error stops reading: a failing disk must not change the order of the data."""

    def __init__(self, path: str) -> None:
        self.name = path
        try:
            # Without O_NONBLOCK, opening a named pipe without a writer blocks forever.
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise SourceUnavailable(f"cannot open {path}: {error.strerror}") from error
        found = os.fstat(self._fd)
        if not stat.S_ISREG(found.st_mode):
            os.close(self._fd)
            raise SourceUnavailable(
                f"{path} is not a file with bytes to go back to",
                hint="pipes, sockets and devices cannot be read again after a death; write the data to a file first",
            )
        self._size, self._written_at_ns = found.st_size, found.st_mtime_ns
        os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)

    def size(self) -> int:
        return os.fstat(self._fd).st_size

    def read_at(self, offset: int, count: int, *, at_least: int | None = None) -> bytes:
        parts: list[bytes] = []
        while count > 0:
            try:
                part = os.pread(self._fd, count, offset)
            except OSError as error:
                raise SourceUnavailable(f"cannot read {self.name} at byte {offset}: {error.strerror}") from error
            if not part:
                break
            parts.append(part)
            offset, count = offset + len(part), count - len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def identity(self) -> dict[str, Any]:
        """Size, first bytes and last bytes, but no time: a corpus copied to another machine is still the same."""
        size = self.size()
        edges = self.read_at(0, _EDGE_BYTES) + self.read_at(max(0, size - _EDGE_BYTES), _EDGE_BYTES)
        return {"size": size, "edges": xxhash.xxh3_64_hexdigest(edges)}

    def check_same(self) -> None:
        now = os.fstat(self._fd)
        if now.st_size != self._size:
            raise _changed(self.name, f"it was {self._size} bytes long and is {now.st_size} bytes now")
        if now.st_mtime_ns != self._written_at_ns:
            raise _changed(self.name, "it was written to")

    def close(self) -> None:
        os.close(self._fd)


@dataclass(frozen=True)
class Patience:
    """How long the network may be unavailable. `on_wait` is called several times a second with what is waited for."""

    give_up_after_s: float = 900.0
    stall_after_s: float = 30.0
    on_wait: Callable[[str], None] = field(default=lambda text: None)
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep


def retry_wait_s(attempt: int, retry_after: str | None) -> float:
    """Seconds before try number `attempt` + 1: what the server asks for, else 0.5 s, doubling up to 30 s."""
    if retry_after and retry_after.isdigit():
        return min(float(retry_after), 300.0)
    return float(min(30.0, 0.5 * 2 ** min(attempt, 6)))


class _DropTokenOnRedirect(HTTPRedirectHandler):
    """An access token meant for one server must not be sent to the storage host it redirects to, nor to another port
    of the same host, nor without encryption."""

    def redirect_request(
        self, req: Request, fp: IO[bytes], code: int, msg: str, headers: Any, newurl: str
    ) -> Request | None:
        made = super().redirect_request(req, fp, code, msg, headers, newurl)
        if made is not None and _origin(newurl) != _origin(req.full_url):
            made.headers.pop("Authorization", None)
        return made


def _origin(url: str) -> tuple[str, str | None, int | None]:
    parts = urlsplit(url)
    scheme = parts.scheme.lower()
    return scheme, parts.hostname, parts.port or {"http": 80, "https": 443}.get(scheme)


class HttpFile:
    """A file behind a URL, read as one stream; a broken stream is reopened at the byte where it broke."""

    def __init__(self, url: str, patience: Patience, headers: Mapping[str, str] | None = None) -> None:
        self.name = url
        self._headers = dict(headers or {})
        self._patience = patience
        self._opener = build_opener(_DropTokenOnRedirect)
        self._response: HTTPResponse | None = None
        self._at = 0
        self._size: int | None = None
        self._etag: str | None = None
        self._is_ended = False

    def size(self) -> int | None:
        if self._size is None and not self._is_ended:
            self._keep_trying(partial(self._open, 0), 0)
        return self._size

    def identity(self) -> dict[str, Any]:
        return {"size": self.size(), "etag": self._etag}

    def check_same(self) -> None:
        """Nothing to do: each response was compared when it arrived."""

    def read_at(self, offset: int, count: int, *, at_least: int | None = None) -> bytes:
        if self._size is not None:
            count = min(count, self._size - offset)
        needed = count if at_least is None else min(at_least, count)
        out = bytearray()
        while len(out) < needed:
            at = offset + len(out)
            part = self._keep_trying(partial(self._read_some, at, count - len(out)), at)
            if not part:
                break
            out += part
        return bytes(out)

    def close(self) -> None:
        if self._response is not None:
            self._response.close()
            self._response = None

    def _read_some(self, at: int, count: int) -> bytes:
        if self._response is None or at != self._at:
            self._open(at)
        if self._response is None:
            return b""
        # read1 returns what has arrived; read would wait for all bytes and lose them if the connection breaks.
        part = self._response.read1(min(count, _READ_BYTES))
        self._at += len(part)
        if not part and self._size is not None and self._at < self._size:
            raise ConnectionResetError(f"the connection ended after {self._at} of {self._size} bytes")
        if not part:
            self._size = self._at
        return part

    def _open(self, at: int) -> None:
        self.close()
        headers = {"User-Agent": "jackline", "Accept-Encoding": "identity", **self._headers}
        if at:
            headers["Range"] = f"bytes={at}-"
        request = Request(self.name, headers=headers)
        try:
            response = self._opener.open(request, timeout=self._patience.stall_after_s)
        except HTTPError as error:
            with error:
                if error.code == 416 and at:
                    if self._size is not None and at < self._size:
                        what = f"it was {self._size} bytes long and ends before byte {at} now"
                        raise _changed(self.name, what) from error
                    self._is_ended = True
                    return
                raise
        self._accept(response, at)

    def _accept(self, response: HTTPResponse, at: int) -> None:
        starts_at, size = _extent(response)
        if self._size is not None and size is not None and size != self._size:
            response.close()
            raise _changed(self.name, f"it was {self._size} bytes long and is {size} bytes now")
        etag = response.headers.get("ETag")
        if self._etag and etag and etag != self._etag:
            response.close()
            raise _changed(self.name, f"its ETag was {self._etag} and is {etag} now")
        self._size = self._size if size is None else size
        self._etag = self._etag or etag
        # A server without range requests begins at 0 again: read up to the wanted byte instead of skipping records.
        while starts_at < at and (part := response.read1(min(_READ_BYTES, at - starts_at))):
            starts_at += len(part)
        self._response, self._at = response, at

    def _keep_trying(self, act: Callable[[], Any], at: int) -> Any:
        patience, began, attempt = self._patience, self._patience.clock(), 0
        while True:
            try:
                return act()
            except (OSError, HTTPException) as error:
                self.close()
                cause, retry_after = _cause(error)
                if not _is_transient(error):
                    raise SourceUnavailable(f"cannot read {self.name}: {cause}", hint=_hint(error)) from error
                waited_s = patience.clock() - began
                if waited_s > self._give_up_after_s(error):
                    raise SourceUnavailable(
                        f"{self.name} gave no byte for {format_duration(waited_s)}, at byte {at}: {cause}",
                        hint="nothing was skipped; run the same command again when the network is back",
                    ) from error
                attempt += 1
                self._wait(retry_wait_s(attempt, retry_after), cause)

    def _give_up_after_s(self, error: OSError | HTTPException) -> float:
        """Shorter for a host name that never resolved: it is more often misspelt than unavailable."""
        reason = error.reason if isinstance(error, URLError) else error
        is_unknown = isinstance(reason, socket.gaierror) and self._size is None
        return min(_UNKNOWN_HOST_S, self._patience.give_up_after_s) if is_unknown else self._patience.give_up_after_s

    def _wait(self, seconds: float, cause: str) -> None:
        host = urlsplit(self.name).netloc
        until = self._patience.clock() + seconds
        while (left := until - self._patience.clock()) > 0:
            self._patience.on_wait(f"{host}: {cause}; trying again in {format_duration(left)}")
            self._patience.sleep(min(left, _SLEEP_SLICE_S))


def _extent(response: HTTPResponse) -> tuple[int, int | None]:
    """Where the body begins in the file, and the file's length."""
    content_range = response.headers.get("Content-Range", "")
    if response.status == 206 and content_range.startswith("bytes "):
        span, _, total = content_range.removeprefix("bytes ").partition("/")
        return int(span.partition("-")[0]), int(total) if total.isdigit() else None
    length = response.headers.get("Content-Length")
    return 0, int(length) if length and length.isdigit() else None


def _is_transient(error: OSError | HTTPException) -> bool:
    if isinstance(error, HTTPError):
        return error.code in (408, 425, 429) or error.code >= 500
    reason = error.reason if isinstance(error, URLError) else error
    return not isinstance(reason, str | ssl.SSLCertVerificationError)


def _cause(error: OSError | HTTPException) -> tuple[str, str | None]:
    if isinstance(error, HTTPError):
        return f"HTTP {error.code} {error.reason}", error.headers.get("Retry-After")
    if isinstance(error, TimeoutError):
        return "no byte arrived in time", None
    reason = error.reason if isinstance(error, URLError) else error
    return str(reason) or type(reason).__name__, None


def _hint(error: OSError | HTTPException) -> str | None:
    if isinstance(error, HTTPError) and error.code in (401, 403):
        return "this file needs permission; for the hub: `hf auth login` or set HF_TOKEN"
    if isinstance(error, HTTPError) and error.code == 404:
        return "check the spelling of the address"
    return None


def _changed(name: str, what: str) -> SourceChanged:
    return SourceChanged(
        f"{name} changed while it was read: {what}",
        hint="build a new cache from the file as it is now: `jackline data prepare --rebuild`",
    )
