"""Python scripts as real processes within milliseconds: each is forked from one that has imported torch already.

    nursery = Nursery()
    child = nursery.start(script, ["--steps", "50"], folder)
    child.kill(); child.wait()

What differs from `python script.py` is the import time and nothing else; test_attach.py starts Python itself once.
With EVERY_SAVE in its environment no save of a script is skipped: one that finds the writer busy waits for it. Then
which checkpoints there are depends on steps alone, and not on the disk.
The server is this file run as a program: it reads a line of JSON for each start and writes one for each end.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import select
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
ENDS_WITHIN_S = 240.0  # only a hang meets it, as in tests.deadline, which the server cannot import
EVERY_SAVE = {"JACKLINE_TEST_EVERY_SAVE": "1"}


class Nursery:
    """The forking server, seen from a test."""

    def __init__(self, *imports: str) -> None:
        """`imports`: what the scripts need besides torch, imported once."""
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src"), "HF_HUB_OFFLINE": "1"}
        self._server = subprocess.Popen(
            [sys.executable, __file__, *imports],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            env=environment,
        )
        self._ended: dict[str, tuple[int, int]] = {}
        self._buffer = ""

    def start(
        self, script: Path | str, arguments: Sequence[str], folder: Path, env: Mapping[str, str] | None = None
    ) -> Child:
        """Runs `script` (a path, or source text) in `folder`, where its runs go too."""
        path = script if isinstance(script, Path) else folder / "script.py"
        if not isinstance(script, Path):
            path.write_text(script)
        key = uuid.uuid4().hex
        order = {
            "key": key,
            "argv": [str(path), *arguments],
            "cwd": str(folder),
            "output": str(folder / f"out-{key}.txt"),
            "env": {"JACKLINE_RUNS": str(folder / "runs"), "XDG_STATE_HOME": str(folder / "state"), **(env or {})},
        }
        assert self._server.stdin is not None
        self._server.stdin.write(json.dumps(order) + "\n")
        self._server.stdin.flush()
        pid = self._read(key, "started", ENDS_WITHIN_S)
        return Child(self, key, pid, Path(order["output"]))

    def run(
        self, script: Path | str, arguments: Sequence[str], folder: Path, env: Mapping[str, str] | None = None
    ) -> Ended:
        """Starts and waits."""
        return self.start(script, arguments, folder, env).wait()

    def wait(self, key: str, timeout_s: float) -> int:
        return self._read(key, "ended", timeout_s)

    def close(self) -> None:
        assert self._server.stdin is not None and self._server.stdout is not None
        self._server.stdin.close()
        self._server.wait(ENDS_WITHIN_S)
        self._server.stdout.close()

    def _read(self, key: str, what: str, timeout_s: float) -> int:
        deadline_s = time.monotonic() + timeout_s
        assert self._server.stdout is not None
        while (key + what) not in self._ended:
            left_s = max(0.0, deadline_s - time.monotonic())
            if not select.select([self._server.stdout], [], [], left_s)[0]:
                raise TimeoutError(f"a script has not {what} after {timeout_s} s")
            self._buffer += os.read(self._server.stdout.fileno(), 65536).decode()
            *lines, self._buffer = self._buffer.split("\n")
            for line in lines:
                word = json.loads(line)
                self._ended[word["key"] + word["what"]] = word["number"]
        return self._ended[key + what]  # type: ignore[return-value]


@dataclass(frozen=True)
class Ended:
    """How a script ended. `code` is negative for a signal."""

    code: int
    output: str


@dataclass(frozen=True)
class Child:
    """A script under way."""

    nursery: Nursery
    key: str
    pid: int
    out: Path

    @property
    def output(self) -> str:
        return self.out.read_text() if self.out.exists() else ""

    @property
    def has_ended(self) -> bool:
        try:
            self.nursery.wait(self.key, 0.0)
        except TimeoutError:
            return False
        return True

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)

    def wait(self, timeout_s: float = ENDS_WITHIN_S) -> Ended:
        status = self.nursery.wait(self.key, timeout_s)
        return Ended(os.waitstatus_to_exitcode(status), self.output)

    def wait_for(self, text: str, timeout_s: float = ENDS_WITHIN_S) -> None:
        """Until it has printed `text`."""
        deadline_s = time.monotonic() + timeout_s
        while text not in self.output:
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"{text!r} was not printed within {timeout_s} s; printed:\n{self.output}")
            time.sleep(0.005)


# -- the server ---------------------------------------------------------------------------------------------------


def serve(imports: Sequence[str]) -> None:
    import importlib

    gc.disable()
    for name in ("jackline.session.attach", "jackline.session.feeds.loader", *imports):
        importlib.import_module(name)
    import torch

    # The first optimizer of a process imports torch's compiler: 1.5 s of CPU, once instead of in every script.
    weight = torch.nn.Parameter(torch.zeros(2))
    torch.optim.SGD([weight], lr=0.0).step()

    # What is here now never becomes garbage. Otherwise the first collection in a script would write to all of it, and
    # the kernel would copy each of these pages: a quarter of a second of CPU for every script.
    gc.collect()
    gc.freeze()
    gc.enable()
    keys: dict[int, str] = {}
    buffer, is_open = "", True
    while is_open or keys:
        ready = select.select([0], [], [], 0.01)[0] if is_open else time.sleep(0.01) or []
        if ready:
            data = os.read(0, 65536).decode()
            is_open = bool(data)
            buffer += data
            *lines, buffer = buffer.split("\n")
            for line in lines:
                order = json.loads(line)
                keys[_fork(order)] = order["key"]
        elif not is_open:
            _end_all(keys)
        _reap(keys)


def _fork(order: dict) -> int:
    pid = os.fork()
    if pid:
        _say(order["key"], "started", pid)
        return pid
    code = 1
    try:
        code = _be_child(order)
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _be_child(order: dict) -> int:
    """As if Python had been started with this command line."""
    import threading
    import traceback
    from types import ModuleType

    os.setpgid(0, 0)
    fd = os.open(order["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (fd, 1), (fd, 2)):
        os.dup2(source, target)
    sys.stdout = os.fdopen(1, "w", buffering=1)
    sys.stderr = os.fdopen(2, "w", buffering=1)
    os.chdir(order["cwd"])
    os.environ.update(order["env"])
    if os.environ.pop("JACKLINE_TEST_EVERY_SAVE", ""):
        _take_every_save()
    sys.argv = order["argv"]
    sys.orig_argv = [sys.executable, *order["argv"]]
    sys.path[0] = str(Path(order["argv"][0]).parent)
    code = 0
    script = ModuleType("__main__")
    script.__file__ = order["argv"][0]
    sys.modules["__main__"] = sys.modules["__mp_main__"] = script  # both names, as torch's import leaves them
    try:
        exec(compile(Path(order["argv"][0]).read_bytes(), order["argv"][0], "exec"), vars(script))
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        code = 1
    threading._shutdown()
    import atexit

    atexit._run_exitfuncs()
    return code


def _take_every_save() -> None:
    from jackline.checkpoint.engine import CheckpointEngine

    save_if_free = CheckpointEngine.save

    def save(engine: CheckpointEngine, state: Any, **how: Any) -> Any:
        wait = "writer" if how.get("wait", "never") == "never" else how["wait"]
        return save_if_free(engine, state, **{**how, "wait": wait})

    CheckpointEngine.save = save  # type: ignore[method-assign]


def _end_all(keys: Mapping[int, str]) -> None:
    """The tests are over: a script that a failed one left behind would compute for ever."""
    for pid in keys:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _reap(keys: dict[int, str]) -> None:
    for pid in list(keys):
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            _say(keys.pop(pid), "ended", status)


def _say(key: str, what: str, number: int) -> None:
    os.write(1, (json.dumps({"key": key, "what": what, "number": number}) + "\n").encode())


if __name__ == "__main__":
    serve(sys.argv[1:])
    os._exit(0)  # taking all of torch down again takes seconds and tells nothing
