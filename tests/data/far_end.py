"""The network's far end, made up: an HTTP server with ranges that drops, stalls, refuses, truncates and changes."""

from __future__ import annotations

import contextlib
import re
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from jackline.data.sources.bytefile import Patience
from tests.deadline import HANGS_S


@dataclass
class FarEnd:
    """What the server holds and what it does wrong. `faults` are used up, one a request, in order."""

    files: dict[str, bytes] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    has_ranges: bool = True
    tells_length: bool = True
    etags: dict[str, str] = field(default_factory=dict)
    moved: dict[str, str] = field(default_factory=dict)  # name -> where a redirect leads
    requests: list[tuple[str, str | None]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    url: str = ""
    released: threading.Event = field(default_factory=threading.Event)

    def address(self, name: str) -> str:
        return f"{self.url}/{name}"


@contextlib.contextmanager
def serving(far_end: FarEnd) -> Iterator[FarEnd]:
    """Faults: 'drop:N' after N bytes of the body, 'stall:N' the same but silent, '429', '500', '503', 'reset'."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            _answer(self, far_end)

        def log_message(self, format: str, *args: object) -> None:
            """The tests' output stays the tests'."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    far_end.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield far_end
    finally:
        far_end.released.set()
        server.shutdown()
        server.server_close()
        thread.join()


def _answer(handler: BaseHTTPRequestHandler, far_end: FarEnd) -> None:
    name = handler.path.split("?")[0].strip("/")
    wanted = handler.headers.get("Range")
    far_end.requests.append((name, wanted))
    far_end.headers.append(dict(handler.headers.items()))
    fault = far_end.faults.pop(0) if far_end.faults else ""
    handler.close_connection = True
    if fault == "reset":
        handler.connection.shutdown(socket.SHUT_RDWR)
    elif fault.isdigit():
        _refuse(handler, int(fault))
    elif name in far_end.moved:
        _refuse(handler, 302, {"Location": far_end.moved[name]})
    elif name not in far_end.files:
        _refuse(handler, 404)
    else:
        _send(handler, far_end, name, wanted, fault)


def _refuse(handler: BaseHTTPRequestHandler, code: int, more: dict[str, str] | None = None) -> None:
    handler.send_response(code)
    for word, value in ({"Retry-After": "1"} if code == 429 else more or {}).items():
        handler.send_header(word, value)
    handler.send_header("Content-Length", "0")
    handler.end_headers()


def _send(handler: BaseHTTPRequestHandler, far_end: FarEnd, name: str, wanted: str | None, fault: str) -> None:
    data = far_end.files[name]
    start = 0
    match = re.fullmatch(r"bytes=(\d+)-", wanted or "")
    if match and far_end.has_ranges:
        start = int(match[1])
        if start >= len(data):
            _refuse(handler, 416)
            return
        handler.send_response(206)
        handler.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
    else:
        handler.send_response(200)
    if far_end.tells_length:
        handler.send_header("Content-Length", str(len(data) - start))
    if name in far_end.etags:
        handler.send_header("ETag", far_end.etags[name])
    handler.end_headers()
    kind, _, count = fault.partition(":")
    body = data[start : start + int(count)] if count else data[start:]
    if kind == "stall":
        body = body[: len(data) - start - 1]  # a reader that has everything would never notice the silence
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        handler.wfile.write(body)
        handler.wfile.flush()
    if kind == "stall":
        far_end.released.wait(HANGS_S)  # silent for as long as the test lasts


class FakeTime:
    """Time that passes only in sleeps, so that patience is tested without having it."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.said: list[str] = []

    def patience(self, **settings: float) -> Patience:
        return Patience(on_wait=self.said.append, clock=lambda: self.now_s, sleep=self.sleep, **settings)

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds
