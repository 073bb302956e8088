"""Asks the page's server: without a network, as raw as a test wants it, or as a person starts it."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jackline.dashboard.guard import TOKEN_HEADER
from tests.deadline import HANGS_S

TOKEN = "t" * 43
PORT = 7654
HOST = f"127.0.0.1:{PORT}"


@dataclass(frozen=True)
class Answer:
    status: int
    headers: list[tuple[str, str]]
    body: bytes

    def header(self, name: str) -> str:
        return next((value for key, value in self.headers if key == name), "")

    @property
    def text(self) -> str:
        body = gzip.decompress(self.body) if self.header("content-encoding") == "gzip" else self.body
        return body.decode()

    @property
    def json(self) -> Any:
        return json.loads(self.text)


def ask(
    app: Any,
    address: str,
    *,
    method: str = "GET",
    hosts: tuple[str, ...] = (HOST,),
    token: str | None = TOKEN,
    headers: dict[str, str] | None = None,
) -> Answer:
    """`address` is sent as it is, percent signs and all."""
    path, _, query = address.partition("?")
    given = [(b"host", host.encode("latin-1")) for host in hosts]
    if token is not None:
        given.append((TOKEN_HEADER.encode(), token.encode()))
    given += [(name.lower().encode(), value.encode()) for name, value in (headers or {}).items()]
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method, "scheme": "http",
        "path": _decoded(path), "raw_path": path.encode("latin-1", "replace"), "query_string": query.encode(),
        "root_path": "", "headers": given, "client": ("127.0.0.1", 40000), "server": ("127.0.0.1", PORT),
    }  # fmt: skip
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    asyncio.run(app(scope, receive, send))
    found = [(name.decode().lower(), value.decode()) for name, value in sent[0]["headers"]]
    return Answer(sent[0]["status"], found, b"".join(message.get("body", b"") for message in sent[1:]))


def _decoded(path: str) -> str:
    from urllib.parse import unquote

    return unquote(path, errors="replace")


class Served:
    """`jackline dash` as a person starts it, on a free port."""

    def __init__(self, runs: Path, state: Path, *options: str) -> None:
        env = {**os.environ, "XDG_STATE_HOME": str(state)}
        self.errors = state.parent / "dash.err"
        command = [sys.executable, "-m", "jackline", "dash", "--port", "0", "--runs-dir", str(runs), *options]
        with open(self.errors, "wb") as errors:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, env=env)
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().decode().strip()
        self.base, _, self.token = self.url.partition("#token=")
        self.port = int(self.base.rstrip("/").rpartition(":")[2])

    def get(self, path: str) -> str:
        request = urllib.request.Request(self.base + path, headers={"X-Jackline-Token": self.token})
        deadline_s = time.monotonic() + HANGS_S
        while True:
            try:
                with urllib.request.urlopen(request, timeout=HANGS_S) as answer:
                    return str(answer.read().decode())
            except urllib.error.URLError as error:
                if isinstance(error, urllib.error.HTTPError) or time.monotonic() > deadline_s:
                    raise

    def end(self) -> int:
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(timeout=HANGS_S)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()
