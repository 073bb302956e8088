"""Messages between the trainer and the writer: JSON, a payload, sometimes a file descriptor, over a local socket.

Owns the framing and never blocks longer than asked. Does not know what the messages mean (serve.py, engine.py).
"""

from __future__ import annotations

import json
import select
import socket
import struct
import time
from collections import deque
from typing import Any

from jackline.immutable import immutable

_HEAD = struct.Struct("<II?3x")  # bytes of JSON, bytes of payload, is a descriptor attached
_READ_BYTES = 1 << 20


class Closed(Exception):
    """The other side has closed the socket."""


@immutable
class Message:
    body: dict[str, Any]
    payload: bytes = b""
    fd: int | None = None


class Channel:
    """One end of the socket. Not thread-safe: the owner provides a lock."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self._end = end
        self._came = bytearray()
        self._fds: deque[int] = deque()
        self._going: deque[tuple[memoryview, int | None]] = deque()
        self._is_ended = False

    def fileno(self) -> int:
        return self._end.fileno()

    def send(self, body: dict[str, Any], payload: bytes = b"", fd: int | None = None) -> None:
        """Queue a message and send what the socket accepts immediately; `flush` sends the rest."""
        text = json.dumps(body, separators=(",", ":"), default=str).encode()
        self._going.append((memoryview(_HEAD.pack(len(text), len(payload), fd is not None) + text), fd))
        if payload:
            self._going.append((memoryview(payload), None))
        self.flush(0)

    def flush(self, timeout_s: float) -> bool:
        """True when everything was sent. Raises Closed when the other side is gone."""
        deadline = time.monotonic() + timeout_s
        while self._going:
            data, fd = self._going[0]
            try:
                sent = socket.send_fds(self._end, [data], [] if fd is None else [fd])
            except BlockingIOError:
                left = deadline - time.monotonic()
                if left <= 0 or not select.select([], [self._end], [], left)[1]:
                    return False
                continue
            except OSError as problem:
                self._going.clear()
                raise Closed(str(problem)) from None
            if sent == len(data):
                self._going.popleft()
            else:
                self._going[0] = (data[sent:], None)
        return True

    def receive(self) -> Message | None:
        """The next whole message if it has arrived. Raises Closed after the last one when the other side is gone."""
        self._read()
        message = self._take()
        if message is None and self._is_ended:
            raise Closed("the other side is gone")
        return message

    def wait(self, timeout_s: float) -> bool:
        """Wait until data may have arrived."""
        return bool(self._is_ended or self._has_whole() or select.select([self._end], [], [], timeout_s)[0])

    def close(self) -> None:
        self._end.close()

    def _read(self) -> None:
        while not self._is_ended:
            try:
                data, fds, _, _ = socket.recv_fds(self._end, _READ_BYTES, 4)
            except BlockingIOError:
                return
            except OSError:
                data, fds = b"", []
            self._fds.extend(fds)
            self._came += data
            self._is_ended = not data

    def _has_whole(self) -> bool:
        if len(self._came) < _HEAD.size:
            return False
        text_bytes, payload_bytes, _ = _HEAD.unpack_from(self._came)
        return len(self._came) >= _HEAD.size + int(text_bytes) + int(payload_bytes)

    def _take(self) -> Message | None:
        if not self._has_whole():
            return None
        text_bytes, payload_bytes, has_fd = _HEAD.unpack_from(self._came)
        middle = _HEAD.size + text_bytes
        body = json.loads(self._came[_HEAD.size : middle])
        payload = bytes(self._came[middle : middle + payload_bytes])
        del self._came[: middle + payload_bytes]
        return Message(body, payload, self._fds.popleft() if has_fd else None)
