"""The trainer's side of the writer: start it, talk to it, notice when it has exited.

It is started early, before the model exists, because starting a process from a large one is slow. Owns the process
and the socket. Does not know what a save is (engine.py).
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jackline
from jackline.checkpoint.writer.serve import Options
from jackline.checkpoint.writer.wire import Channel, Closed

LOG = "writer.log"
MAX_LOG_BYTES = 1 << 20


class WriterProcess:
    """One writer process. Any thread may call `reports` and `send`."""

    def __init__(self, options: Options, command: Sequence[str] = ()) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            words = [*(command or default_command()), str(theirs.fileno()), options.to_json()]
            with _open_log(options.folder) as log:
                self._process = subprocess.Popen(
                    words,
                    pass_fds=(theirs.fileno(),),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,  # a Ctrl-C or a closed terminal must not reach it
                    env=writer_environment(),
                )
        self._channel = Channel(ours)
        self._lock = threading.Lock()
        self.is_gone = False

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, body: dict[str, Any], payload: bytes = b"", fd: int | None = None, timeout_s: float = 60) -> bool:
        """Send a message. False when the writer has exited or does not read."""
        try:
            with self._lock:
                self._channel.send(body, payload, fd)
                return self._channel.flush(timeout_s)
        except Closed:
            self.is_gone = True
            return False

    def reports(self, timeout_s: float = 0) -> list[dict[str, Any]]:
        """The writer's reports since the last call; waits up to `timeout_s` for the first one."""
        found: list[dict[str, Any]] = []
        try:
            if timeout_s > 0:
                self._channel.wait(timeout_s)
            with self._lock:
                while (message := self._channel.receive()) is not None:
                    found.append(message.body)
        except Closed:
            self.is_gone = True
        return found

    def wait_end(self, timeout_s: float) -> bool:
        """After a close: whether the writer exited within the time. It may continue without us."""
        deadline = time.monotonic() + timeout_s
        while self._process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        return self._process.poll() is not None

    def wake(self) -> None:
        with contextlib.suppress(OSError):
            self._process.send_signal(signal.SIGCONT)

    def let_go(self) -> None:
        """Stop listening; the writer exits by itself when its work is done."""
        self._channel.close()
        self.is_gone = True
        if self._process.poll() is None:
            self._process.returncode = 0  # it keeps running on purpose; this avoids Python's warning


def default_command() -> tuple[str, ...]:
    # -P keeps a json.py or random.py in the user's folder from being imported instead of Python's own.
    return (sys.executable, "-P", "-m", "jackline.checkpoint.writer.serve")


def writer_environment() -> dict[str, str]:
    """The trainer's environment, plus where jackline itself was found when it is not installed."""
    environment = dict(os.environ)
    home = str(Path(jackline.__file__).parents[1])
    if not home.endswith("-packages"):
        known = environment.get("PYTHONPATH")
        environment["PYTHONPATH"] = f"{known}{os.pathsep}{home}" if known else home
    return environment


def _open_log(folder: Path) -> Any:
    """The file for its last output if it crashes. Not the trainer's output: the writer would keep that open."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / LOG
        is_long = path.exists() and path.stat().st_size > MAX_LOG_BYTES
        return open(path, "wb" if is_long else "ab")
    except OSError:
        return open(os.devnull, "wb")
