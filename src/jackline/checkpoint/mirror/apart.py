"""A store in a process of its own, for a training that looks into its mirror.

A client of S3 or the like brings threads, an event loop and many megabytes of modules. In the training's process they
would stay until its end, and what needs a process without foreign threads would not work any more: two steps could
not be compared in a copy of it. Here they live in a child that ends with the look.
Owns the lines between the two: a request with its arguments, an answer with a value or a problem.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from jackline.checkpoint.mirror.store import Moved, Store, StoreTrouble, is_folder, open_store
from jackline.errors import JacklineError, UsageError

_ENDS_WITHIN_S = 2.0
# -P keeps a json.py or random.py in the user's folder from being imported instead of Python's own.
_COMMAND = (sys.executable, "-P", "-m", "jackline.checkpoint.mirror.apart")


class ApartStore:
    """The calls of a store, made in a child that is started by the first of them."""

    def __init__(self, place: str) -> None:
        self._place = place
        self._process: subprocess.Popen[bytes] | None = None

    def put(self, local: Path, name: str, moved: Moved | None = None) -> None:
        self._ask("put", str(local), name)

    def put_bytes(self, data: bytes, name: str) -> None:
        self._ask("put_bytes", {"bytes": base64.b64encode(data).decode()}, name)

    def get(self, name: str, local: Path) -> None:
        self._ask("get", name, str(local))

    def read(self, name: str) -> bytes:
        return bytes(self._ask("read", name))

    def names(self, folder: str) -> list[str]:
        return [str(name) for name in self._ask("names", folder)]

    def size(self, name: str) -> int | None:
        size = self._ask("size", name)
        return None if size is None else int(size)

    def delete(self, name: str) -> None:
        self._ask("delete", name)

    def checksum(self, name: str) -> tuple[str, str] | None:
        found = self._ask("checksum", name)
        return None if found is None else (str(found[0]), str(found[1]))

    def local_path(self, name: str) -> Path | None:
        return None

    def close(self) -> None:
        """A child that hangs in a call is ended."""
        process, self._process = self._process, None
        if process is None:
            return
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
        try:
            process.wait(_ENDS_WITHIN_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _ask(self, call: str, *arguments: Any) -> Any:
        if self._process is None:
            self._process = subprocess.Popen(_COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            # Not as an argument: a command line can be read by every user, and a URL may hold a password.
            self._write(self._place)
        self._write([call, *arguments])
        process = self._process
        line = process.stdout.readline() if process is not None and process.stdout is not None else b""
        if not line:
            raise OSError("the process that reads the mirror has ended")
        answer = json.loads(line)
        if "problem" in answer:
            if answer["kind"] == "usage":
                raise UsageError(answer["problem"][0], hint=answer["problem"][1])
            raise _PROBLEMS.get(answer["kind"], RuntimeError)(*answer["problem"])
        value = answer["value"]
        return base64.b64decode(value["bytes"]) if isinstance(value, dict) else value

    def _write(self, value: Any) -> None:
        if self._process is None or self._process.stdin is None:
            raise OSError("the process that reads the mirror has ended")
        self._process.stdin.write(json.dumps(value).encode() + b"\n")
        self._process.stdin.flush()


@contextlib.contextmanager
def opened(place: str) -> Iterator[Store]:
    """The store for the length of a look; a folder is read here, anything else in a child."""
    if is_folder(place):
        yield open_store(place)
        return
    store = ApartStore(place)
    try:
        yield store
    finally:
        store.close()


_PROBLEMS: dict[str, type[Exception]] = {"missing": FileNotFoundError, "os": OSError, "store": StoreTrouble}


def _kind_of_problem(problem: BaseException) -> tuple[str, list[Any]]:
    if isinstance(problem, FileNotFoundError):
        return "missing", [problem.errno, str(problem.strerror or problem)]
    if isinstance(problem, StoreTrouble):
        return "store", [str(problem), problem.place]
    if isinstance(problem, OSError):
        return "os", [problem.errno, problem.strerror] if problem.errno else [str(problem)]
    if isinstance(problem, JacklineError):
        return "usage", [problem.message, problem.hint]
    return "other", [f"{type(problem).__name__}: {problem}"]


def _serve() -> None:
    """The child: it ends with its parent, also in the middle of a call."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # what a library prints is no answer
    requests: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def listen(stream: BinaryIO) -> None:
        for line in stream:
            requests.put(line)
        os._exit(0)

    threading.Thread(target=listen, args=(sys.stdin.buffer,), daemon=True).start()
    place, store = json.loads(requests.get()), None
    while True:
        call, *arguments = json.loads(requests.get())
        try:
            store = store or open_store(place)
            ready = [base64.b64decode(one["bytes"]) if isinstance(one, dict) else one for one in arguments]
            value = getattr(store, call)(*_with_paths(call, ready))
            answer = {"value": {"bytes": base64.b64encode(value).decode()} if isinstance(value, bytes) else value}
        except BaseException as problem:
            kind, words = _kind_of_problem(problem)
            answer = {"kind": kind, "problem": words}
        answers.write(json.dumps(answer).encode() + b"\n")


def _with_paths(call: str, arguments: list[Any]) -> list[Any]:
    at = {"put": 0, "get": 1}.get(call)
    return [Path(one) if number == at else one for number, one in enumerate(arguments)]


if __name__ == "__main__":
    _serve()
