"""Brings the rescue into a process that was started without Jackline: `jackline rescue --pid N`, from Python 3.14 on.

The process's own interpreter is started for a moment and calls `sys.remote_exec`, because that asks for the same
version as the process has, and Jackline may run on another. Owns who can be reached, and the words for who cannot.
What then runs inside is `supervisor/child/inside/joining`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from jackline.errors import JacklineError, UsageError
from jackline.immutable import immutable
from jackline.machine.proc import read_environ
from jackline.machine.procfs import read_bytes
from jackline.rundir.access.trust import user_name
from jackline.rundir.access.writing import open_own
from jackline.rundir.layout import AttemptDir
from jackline.rundir.process_id import read_state
from jackline.rundir.records.rescue import read_rescue
from jackline.supervisor.child.environment import INJECT_FOLDER

ANSWER_S = 60.0  # for the helper, which starts an interpreter and writes into the memory of the process
FIRST = (3, 14)
_HELPER = """
import json, sys
def answer(kind, text=""):
    print(json.dumps({"kind": kind, "text": text, "version": sys.version_info[:3]}))
    sys.exit()
if len(sys.argv) < 3 or not hasattr(sys, "remote_exec"):
    answer("version")
try:
    sys.remote_exec(int(sys.argv[1]), sys.argv[2])
except BaseException as problem:
    answer("failed", "%s: %s" % (type(problem).__name__, problem))
answer("sent")
"""
# Runs in the process, in a namespace of its own.
_REQUEST = """
def _join(folder, question, python, inside):
    import importlib.util, os, sys
    if "_jackline_inside" not in sys.modules:
        path = os.path.join(inside, "__init__.py")
        spec = importlib.util.spec_from_file_location("_jackline_inside", path, submodule_search_locations=[inside])
        sys.modules["_jackline_inside"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules["_jackline_inside"])
    import _jackline_inside.joining
    _jackline_inside.joining.join(folder, question, python)
try:
    _join(*{arguments!r})
except Exception:
    pass
"""


@immutable
class Interpreter:
    path: str
    version: tuple[int, ...]


def find_interpreter(pid: int) -> Interpreter:
    """The Python that a process runs; raises, in words, where nothing can be brought into it."""
    path = _own_program(pid)
    version = tuple(_ask(path, pid).get("version") or ())
    text = ".".join(map(str, version))
    if version < FIRST:
        raise UsageError(
            f"process {pid} runs Python {text}: a process that was started without Jackline can be asked for its "
            "state from Python 3.14 on",
            hint=f"`jackline watch --pid {pid}` watches it; the next start with `jackline run -- ...` can be rescued",
        )
    return Interpreter(path, version)


def join(attempt: AttemptDir, pid: int, interpreter: Interpreter, wait_s: float) -> None:
    """Until it can be asked, or raises in words."""
    question = f"join-{os.getpid()}-{time.time_ns()}"
    request = write_request(attempt, pid, question)
    answer = _ask(interpreter.path, pid, str(request.resolve()))
    if answer.get("kind") != "sent":
        _refuse(pid, str(answer.get("text") or "no answer"))
    until_s = time.monotonic() + wait_s
    while time.monotonic() < until_s:
        if attempt.rescue_door(pid).exists():
            return
        record = read_rescue(attempt, pid)
        if record.id == question:
            why = record.why.removeprefix("RuntimeError: ")
            raise JacklineError(f"process {pid} cannot be asked for its state: {why}")
        if read_state(pid) in ("", "Z", "X"):
            raise UsageError(f"process {pid} ended just now", hint="its log and dmesg may tell why")
        time.sleep(0.05)
    raise JacklineError(
        f"process {pid} has not taken up the request within {wait_s:g} s",
        detail="Python takes it up between two instructions of the main thread, which is inside a call that does\n"
        "not return. The request stays: once the call returns, the same command works.",
        hint=f"`jackline why --pid {pid}` shows the call",
    )


def write_request(attempt: AttemptDir, pid: int, question: str) -> Path:
    """The file that the process runs. It stays: Python would complain about a missing one on the process's stderr."""
    path = attempt.stacks / f"join.{pid}.py"
    arguments = (str(attempt.stacks.resolve()), question, sys.executable, str(INJECT_FOLDER.parent / "inside"))
    fresh = path.with_suffix(".new")
    with os.fdopen(open_own(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "w") as file:
        file.write(_REQUEST.format(arguments=arguments))
    fresh.rename(path)
    return path


def _own_program(pid: int) -> str:
    owner = os.stat(f"/proc/{pid}").st_uid  # noqa: PTH116
    if owner != os.geteuid():  # root would run a program that another user has put there
        name = user_name(owner)
        raise UsageError(
            f"process {pid} belongs to {name}: only {name} can ask it for its state",
            hint=f"sudo -u {name} jackline rescue --pid {pid}",
        )
    try:
        path = os.readlink(f"/proc/{pid}/exe")  # noqa: PTH115
        is_same = os.path.samestat(os.stat(f"/proc/{pid}/exe"), os.stat(path))  # noqa: PTH116
    except OSError:
        path, is_same = "", False
    if not Path(path.removesuffix(" (deleted)")).name.startswith("python"):
        raise UsageError(
            f"process {pid} is not a Python interpreter ({path or 'its program cannot be read'})",
            hint=f"`ps --ppid {pid} -o pid,args` lists what it has started",
        )
    if not is_same:
        raise UsageError(
            f"the interpreter of process {pid} cannot be started from here: it was replaced, or is in a container",
            hint="inside its container, `jackline rescue --pid` works with the pid it has there",
        )
    return path


def _ask(path: str, pid: int, *words: str) -> dict[str, Any]:
    """Start the process's own interpreter, alone, and have it answer in JSON."""
    environ = {name: value for name, value in read_environ(pid).items() if name == "LD_LIBRARY_PATH"}
    command = [path, "-I", "-S", "-c", _HELPER, *([str(pid), *words] if words else [])]
    try:
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=ANSWER_S, cwd="/")
        found = json.loads(done.stdout)
    except (OSError, ValueError, subprocess.TimeoutExpired) as problem:
        raise JacklineError(f"the interpreter of process {pid} ({path}) does not answer: {problem}") from None
    return found if isinstance(found, dict) else {}


def _refuse(pid: int, text: str) -> None:
    """Say why the interpreter could not write its request."""
    environ, words = read_environ(pid), (read_bytes(f"/proc/{pid}/cmdline") or b"").split(b"\0")
    if environ.get("PYTHON_DISABLE_REMOTE_DEBUG") or b"disable_remote_debug" in words or "not enabled" in text:
        raise UsageError(
            f"process {pid} refuses code from outside: it was started with PYTHON_DISABLE_REMOTE_DEBUG or "
            "`-X disable_remote_debug`, or its Python was built without remote debugging",
            hint=f"`jackline watch --pid {pid}` watches it; the next start with `jackline run -- ...` can be rescued",
        )
    if text.startswith("PermissionError"):
        scope = (read_bytes("/proc/sys/kernel/yama/ptrace_scope") or b"").decode("ascii", "replace").strip()
        why = f" (kernel.yama.ptrace_scope is {scope})" if scope not in ("", "0") else ""
        raise JacklineError(
            f"the kernel does not let you write into process {pid}{why}",
            hint="in a container: --cap-add SYS_PTRACE; else `sudo sysctl kernel.yama.ptrace_scope=0`, then again",
        )
    raise JacklineError(f"process {pid} could not be asked: {text}", hint=f"`jackline why --pid {pid}` looks at it")
