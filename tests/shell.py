"""A person at a shell: types `jackline ...`, reads what comes, presses keys, closes the window.

Everything that is started carries a mark and is ended when the test is over. Waiting is always for a state, with a
deadline that only a broken program meets.
"""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from tests.deadline import HANGS_S
from tests.marked import end_marked, marked_pids, wait_until_gone
from tests.zoo import JACKLINE, environment

T = TypeVar("T")
PATIENCE_S = HANGS_S


def wait_for(state: Callable[[], T], what: str, patience_s: float = PATIENCE_S) -> T:
    """The first true value of `state()`."""
    deadline_s = time.monotonic() + patience_s
    while True:
        value = state()
        if value:
            return value
        assert time.monotonic() < deadline_s, f"waited {patience_s:.0f} s in vain for {what}"
        time.sleep(0.05)


class Shell:
    """One person's environment: own runs folder, own registry, own work folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.work = folder / "work"
        self.work.mkdir(parents=True)
        self.runs = folder / "runs"
        self.mark = uuid.uuid4().hex
        self.env = environment(folder, self.mark)
        self._lives: list[Live] = []

    def script(self, name: str, text: str) -> str:
        """Write a script into the work folder; returns its path."""
        path = self.work / name
        path.write_text(text)
        return str(path)

    def python(self, name: str, text: str, *words: str) -> list[str]:
        return [sys.executable, self.script(name, text), *words]

    def jackline(self, *words: str, cwd: Path | None = None, env: dict[str, str] | None = None) -> Done:
        """Type it and wait for the prompt."""
        return self.call([*JACKLINE, *words], cwd=cwd, env=env)

    def call(self, command: list[str], *, cwd: Path | None = None, env: dict[str, str] | None = None) -> Done:
        done = subprocess.run(
            command,
            cwd=cwd or self.work,
            env={**self.env, **(env or {})},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=HANGS_S,
        )
        return Done(done.returncode, done.stdout.decode("utf-8", "replace"), done.stderr.decode("utf-8", "replace"))

    def start(self, *words: str, surface: str = "pipe", command: list[str] | None = None) -> Live:
        """Type it and continue; `surface` is 'pipe' or 'pty'."""
        live = Live(command or [*JACKLINE, *words], self.work, self.env, surface)
        self._lives.append(live)
        return live

    def run_dir(self, name: str) -> RunFiles:
        return RunFiles(self.runs / name)

    def pids(self) -> list[int]:
        return marked_pids(self.mark)

    def left_over(self) -> list[str]:
        """What is still running some seconds after everything should have ended."""
        return wait_until_gone(self.mark)

    def close(self) -> None:
        end_marked(self.mark)
        for live in self._lives:
            live.close()


class Done:
    """A command that has come back."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err

    def __repr__(self) -> str:
        return f"exit {self.code}\n--- stdout\n{self.out}\n--- stderr\n{self.err}"


class Live:
    """A command in the foreground of a terminal, or at the end of a pipe."""

    def __init__(self, command: list[str], cwd: Path, env: dict[str, str], surface: str) -> None:
        self.master: int | None = None
        self.chunks: list[tuple[float, str, bytes]] = []
        if surface == "pty":
            pid, master = pty.fork()
            if pid == 0:
                os.chdir(cwd)
                os.execvpe(command[0], command, env)
            self.pid, self.master = pid, master
            self._process = None
            self._sources = {master: "out"}
        else:
            self._process = subprocess.Popen(
                command,
                cwd=cwd,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
            self.pid = self._process.pid
            assert self._process.stdout is not None and self._process.stderr is not None
            self._sources = {self._process.stdout.fileno(): "out", self._process.stderr.fileno(): "err"}
        self._code: int | None = None

    def read(self, timeout_s: float = 0.1) -> None:
        if not self._sources:
            time.sleep(timeout_s)
            return
        for fd in select.select(list(self._sources), [], [], timeout_s)[0]:
            try:
                data = os.read(fd, 1 << 20)
            except OSError:
                data = b""
            if data:
                self.chunks.append((time.time(), self._sources[fd], data))
            else:
                del self._sources[fd]

    def text(self, stream: str = "") -> str:
        data = b"".join(data for _, name, data in self.chunks if stream in ("", name))
        return data.decode("utf-8", "replace")

    def wait_for(self, text: str, stream: str = "") -> float:
        """When `text` was first there (time.time())."""
        deadline_s = time.monotonic() + PATIENCE_S
        while text not in self.text(stream):
            assert time.monotonic() < deadline_s, f"{text!r} was never printed; so far:\n{self.text()}"
            assert self.code() is None or self._sources, f"ended without printing {text!r}:\n{self.text()}"
            self.read()
        joined = b""
        for at_s, name, data in self.chunks:
            if stream in ("", name):
                joined += data
                if text.encode() in joined:
                    return at_s
        raise AssertionError(text)

    def code(self) -> int | None:
        """Exit code, None while it runs; -N when killed by signal N."""
        if self._process is not None:
            return self._process.poll()
        if self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self._code = os.waitstatus_to_exitcode(status) if pid else None
        return self._code

    def wait(self) -> int:
        deadline_s = time.monotonic() + PATIENCE_S
        while (code := self.code()) is None:
            assert time.monotonic() < deadline_s, f"it did not end; so far:\n{self.text()}"
            self.read()
        for _ in range(50):
            before = len(self.chunks)
            self.read(0.02)
            if not self._sources or len(self.chunks) == before:
                break
        return code

    def press_ctrl_c(self) -> None:
        """The key at a terminal; at a pipe, what the shell would send."""
        if self.master is not None:
            os.write(self.master, b"\x03")
        else:
            os.kill(self.pid, signal.SIGINT)

    def hang_up(self) -> None:
        """Close the terminal window: the kernel sends SIGHUP to what runs in it."""
        assert self.master is not None
        self._sources.pop(self.master, None)
        os.close(self.master)
        self.master = None

    def close(self) -> None:
        if self.code() is None:
            with contextlib.suppress(OSError):
                os.kill(self.pid, signal.SIGKILL)
            wait_for(lambda: self.code() is not None, "a killed viewer to be reaped")
        if self._process is not None and self._process.stdout and self._process.stderr:
            self._process.stdout.close()
            self._process.stderr.close()
        if self.master is not None:
            os.close(self.master)


class RunFiles:
    """A run directory, read the way `cat` and `jq` would."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def json(self, name: str) -> dict[str, Any]:
        return json.loads((self.path / name).read_bytes())

    def state(self) -> dict[str, Any]:
        try:
            return self.json("supervisor.json")
        except (OSError, ValueError):
            return {}

    def exit(self, attempt: int = 1) -> dict[str, Any]:
        try:
            return self.json(f"attempts/{attempt:03d}/exit.json")
        except (OSError, ValueError):
            return {}

    def events(self, kind: str = "") -> list[dict[str, Any]]:
        try:
            lines = (self.path / "events-supervisor.jsonl").read_text().splitlines()
        except OSError:
            return []
        records = [json.loads(line) for line in lines]
        return [record for record in records if kind in ("", record["event"])]

    def child_pid(self, attempt: int = 1) -> int:
        return int(self.json(f"attempts/{attempt:03d}/start.json")["child"]["pid"])

    def supervisor_pid(self) -> int:
        return int(self.state()["supervisor"]["pid"])

    def log(self) -> str:
        path = self.path / "out.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def log_lines(self) -> list[str]:
        """The command's own lines in out.log, without stamps and without our notes."""
        lines = [re.sub(r"^\S+Z ", "", line) for line in self.log().splitlines()]
        return [line for line in lines if not line.startswith("[jackline] ")]

    def wait_until_over(self) -> None:
        wait_for(lambda: self.state().get("is_finished"), f"{self.path.name} to be over")


def is_running(pid: int) -> bool:
    """False for a zombie: it does nothing any more."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in ("Z", "X")
