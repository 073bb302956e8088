"""Runs tiny real programs under `jackline run` and reads what it said about them.

Owns the expectation line of a program and one supervised run of it; `expectations` compares the two. Everything is
read from outside: the run directory's files and what the command printed. Used by the stories and the benchmark.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import json
import os
import pickle
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.deadline import HANGS_S
from tests.marked import MARK, end_marked, wait_until_gone
from tests.places import Unavailable, memory_cgroup, path_without, python_without_py_spy, small_disk
from tests.surface import Viewer

TESTS = Path(__file__).parent
PROGRAMS = TESTS / "programs"
HEALTHY = TESTS / "healthy"
JACKLINE = (sys.executable, "-m", "jackline")

QUIET_AFTER_S = 1
STUCK_AFTER_S = 6
# Only a verdict that never comes, or a program that hangs where it should end, meets this.
PATIENCE_S = HANGS_S - 40
KEPT_BYTES = 4 << 20
ALARMS = ("STUCK", "SUSPECT")


@dataclass(frozen=True)
class Program:
    """A script and what its `# expect:` line says must be found out about it."""

    path: Path
    expect: dict[str, str]
    places: dict[str, int]  # marker -> line number

    @property
    def name(self) -> str:
        return self.path.stem

    @property
    def is_slow(self) -> bool:
        """`slow=yes`: like another one to the supervisor, so it is left out of the usual tests."""
        return "slow" in self.expect

    def place(self, marker: str) -> str:
        return f"{self.path.name}:{self.places[marker]}"

    def words(self, key: str, separator: str = ",") -> list[str]:
        return [word for word in self.expect.get(key, "").split(separator) if word]


@dataclass
class Outcome:
    """Everything one supervised run left behind."""

    folder: Path
    events: list[dict[str, Any]] = field(default_factory=list)
    states: list[dict[str, Any]] = field(default_factory=list)  # supervisor.json, each time it was seen changed
    exit: dict[str, Any] = field(default_factory=dict)
    incidents: list[str] = field(default_factory=list)
    stdout: bytes = b""
    stderr: str = ""
    out_log: str = ""
    heard_at_s: list[float] = field(default_factory=list)  # monotonic times at which the command printed anything
    stdout_at_s: list[float] = field(default_factory=list)
    began_s: float = 0.0
    ended_s: float = 0.0
    exit_code: int | None = None
    left_over: list[str] = field(default_factory=list)
    was_ended_by_harness: bool = False
    problems: list[str] = field(default_factory=list)

    @property
    def longest_silence_s(self) -> float:
        times = [self.began_s, *self.heard_at_s, self.ended_s]
        return max(after - before for before, after in itertools.pairwise(times))

    @property
    def verdicts(self) -> list[tuple[str, str]]:
        """(kind, label) of every verdict that was announced or shown."""
        told = [(str(event["verdict"]), str(event.get("label", ""))) for event in self.events if "verdict" in event]
        shown = [state.get("verdict") or {} for state in self.states]
        return told + [(str(one.get("kind")), str(one.get("label"))) for one in shown if one]

    @property
    def said(self) -> str:
        """All words a person could have read, without the program's own output."""
        texts = [str(event.get("text", "")) for event in self.events]
        texts += [str((state.get("now") or {}).get("what", "")) for state in self.states]
        texts += [str((state.get("verdict") or {}).get("text", "")) for state in self.states]
        return "\n".join([*texts, str(self.exit.get("text", "")), self.stderr, *self.incidents])


def read_program(path: Path) -> Program:
    expect: dict[str, str] = {}
    places: dict[str, int] = {}
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if line.startswith("# expect:"):
            expect.update(word.split("=", 1) for word in shlex.split(line.removeprefix("# expect:")))
        if match := re.search(r"# (HERE|THERE)$", line):
            places[match[1]] = number
    return Program(path, expect, places)


def list_programs(folder: Path) -> list[Program]:
    return [read_program(path) for path in sorted(folder.glob("*.py"))]


def environment(folder: Path, mark: str = "") -> dict[str, str]:
    """The outside's environment without its settings for Jackline; runs and registry inside `folder`."""
    # PYTHONUNBUFFERED and its kin would do our work for us.
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("JACKLINE", "PYTHON"))}
    return {
        **kept,
        "JACKLINE_RUNS": str(folder / "runs"),
        "XDG_STATE_HOME": str(folder / "state"),
        "TERM": "xterm",
        MARK: mark or uuid.uuid4().hex,
    }


# -- one run --------------------------------------------------------------------------------------------------------


def run_program(
    program: Program, folder: Path, *, surface: str = "pipe", quiet_after_s: float | None = QUIET_AFTER_S
) -> Outcome:
    """Run one program supervised until its expectation is met, it ends, or the patience does. Raises Unavailable
    with the reason when this machine cannot run it."""
    check_needs(program)
    with contextlib.ExitStack() as stack:
        work = folder / "work"
        work.mkdir(parents=True)
        if "cwd_on" in program.expect:
            stack.enter_context(small_disk(work, program.expect["cwd_on"].removeprefix("tmpfs:")))
        (folder / "runs").mkdir()
        if "runs_on" in program.expect:
            stack.enter_context(small_disk(folder / "runs", program.expect["runs_on"].removeprefix("tmpfs:")))
        env = environment(folder)
        jackline, prefix = JACKLINE, ()
        if program.expect.get("without") == "py-spy":
            jackline = (python_without_py_spy(folder / "bare"), "-m", "jackline")
            env["PATH"] = path_without("py-spy", env.get("PATH", ""))
        if "memory_limit" in program.expect:
            group = stack.enter_context(memory_cgroup(program.expect["memory_limit"]))
            prefix = ("sh", "-c", f'echo $$ > {shlex.quote(str(group))}/cgroup.procs; exec "$@"', "sh")
        command = [*prefix, *jackline, "run", "--name", "zoo", *_thresholds(quiet_after_s), "--", *_command(program)]
        run = LiveRun(program, folder, Viewer(command, work, env, surface, program.expect.get("stdin", "")))
        stack.callback(end_marked, env[MARK])
        outcome = run.to_the_end()
        outcome.left_over = wait_until_gone(env[MARK])
        _gather(outcome, folder / "runs" / "zoo")
        if "work" in program.expect and not (work / program.expect["work"]).exists():
            outcome.problems.append(f"the program did not get as far as writing {program.expect['work']}")
        return outcome


def check_needs(program: Program) -> None:
    for need in program.words("needs"):
        if need == "gcc" and shutil.which("gcc") is None:
            raise Unavailable("there is no gcc to compile a C program with")
        if need == "libstdbuf" and not list(Path("/usr").glob("lib*/**/libstdbuf.so")):
            raise Unavailable("there is no libstdbuf (coreutils), so a C program cannot be made to flush")
        if need in ("torch", "tokenizers", "numpy", "uvicorn", "zmq") and importlib.util.find_spec(need) is None:
            raise Unavailable(f"{need} is not installed")


def _thresholds(quiet_after_s: float | None) -> tuple[str, ...]:
    quiet = () if quiet_after_s is None else ("--quiet-after", str(quiet_after_s))
    return (*quiet, "--stuck-after", str(STUCK_AFTER_S))


def _command(program: Program) -> list[str]:
    if "command" in program.expect:
        text = program.expect["command"]
        return shlex.split(text.format(python=sys.executable, program=program.path, folder=program.path.parent))
    return [sys.executable, str(program.path)]


class LiveRun:
    """Follows one run through its files until there is nothing more to learn."""

    def __init__(self, program: Program, folder: Path, viewer: Viewer) -> None:
        self.program = program
        self.viewer = viewer
        self.run_dir = folder / "runs" / "zoo"
        self.outcome = Outcome(folder, began_s=time.monotonic())
        self._events_read = 0
        self._last_state = b""
        self._next_look_s = 0.0
        self._stopper: subprocess.Popen[bytes] | None = None

    def to_the_end(self) -> Outcome:
        outcome, viewer = self.outcome, self.viewer
        deadline_s = time.monotonic() + PATIENCE_S
        try:
            while viewer.process.poll() is None and time.monotonic() < deadline_s and not self._knows_enough():
                viewer.listen(0.1)
                self._look()
                self._act()
            outcome.ended_s = time.monotonic()
            self._end_if_alive()
            self._join_stopper()
            viewer.drain()
            self._look(is_last=True)
            outcome.exit_code = viewer.process.poll()
        finally:
            viewer.close()
        outcome.stdout = bytes(viewer.stdout[-KEPT_BYTES:])
        outcome.stderr = viewer.stderr[-KEPT_BYTES:].decode("utf-8", "replace")
        outcome.heard_at_s = [at_s for at_s in viewer.heard_at_s if at_s <= outcome.ended_s]
        outcome.stdout_at_s = viewer.stdout_at_s
        return outcome

    def _look(self, *, is_last: bool = False) -> None:
        now_s = time.monotonic()
        if now_s < self._next_look_s and not is_last:
            return
        self._next_look_s = now_s + 0.2
        self._read_events()
        try:
            state = (self.run_dir / "supervisor.json").read_bytes()
        except OSError:
            return
        if state != self._last_state:
            self._last_state = state
            try:
                self.outcome.states.append(json.loads(state))
            except ValueError:
                self.outcome.problems.append(f"supervisor.json was torn: {state[:80]!r} ...")

    def _read_events(self) -> None:
        try:
            lines = (self.run_dir / "events-supervisor.jsonl").read_bytes().split(b"\n")[:-1]
        except OSError:
            return
        for line in lines[self._events_read :]:
            try:
                self.outcome.events.append(json.loads(line))
            except ValueError:
                self.outcome.problems.append(f"an event is not JSON: {line[:80]!r}")
        self._events_read = len(lines)

    def _knows_enough(self) -> bool:
        expect = self.program.expect
        if "verdict" not in expect:
            return False
        lived_s = time.monotonic() - self.outcome.began_s
        wanted = set(self.program.words("verdict", "|"))
        was_given = any(kind in wanted for kind, _ in self.outcome.verdicts)
        if not wanted <= set(ALARMS):
            # Watched for a while in any case: an alarm may still come.
            return was_given and lived_s > float(expect.get("watch_s", 10))
        has_incident = any(event.get("event") == "incident" for event in self.outcome.events)
        return has_incident and was_given

    def _act(self) -> None:
        """`do=stop`: as soon as the program has printed, ask for its end, and continue listening meanwhile."""
        if self.program.expect.get("do") == "stop" and self.viewer.stdout and self._stopper is None:
            env = environment(self.outcome.folder, mark="stopper")
            self._stopper = subprocess.Popen(
                [*JACKLINE, "stop", "zoo", "--grace", "2"], env=env, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE
            )

    def _join_stopper(self) -> None:
        if self._stopper is not None:
            _, words = self._stopper.communicate(timeout=HANGS_S)
            if self._stopper.returncode != 0:
                text = words.decode("utf-8", "replace")
                self.outcome.problems.append(f"jackline stop: exit {self._stopper.returncode}: {text}")

    def _end_if_alive(self) -> None:
        """The verdict is known: end the program, and let the supervisor write down how."""
        if self.viewer.process.poll() is not None:
            return
        self.outcome.was_ended_by_harness = True
        for start in sorted(self.run_dir.glob("attempts/*/start.json")):
            with contextlib.suppress(OSError, ValueError, KeyError):
                os.kill(int(json.loads(start.read_bytes())["child"]["pid"]), signal.SIGKILL)
        deadline_s = time.monotonic() + HANGS_S
        while self.viewer.process.poll() is None and time.monotonic() < deadline_s:
            self.viewer.listen(0.1)
        if self.viewer.process.poll() is None:
            self.outcome.problems.append("the command did not return after the program's end")


def _gather(outcome: Outcome, run_dir: Path) -> None:
    for path in sorted(run_dir.glob("attempts/*/exit.json")):
        with contextlib.suppress(OSError, ValueError):
            outcome.exit = json.loads(path.read_bytes())
    outcome.incidents = [
        path.read_text(errors="replace") for path in sorted(run_dir.glob("attempts/*/incident-*.txt"))
    ]
    with contextlib.suppress(OSError), open(run_dir / "out.log", "rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - (2 << 20)))
        outcome.out_log = file.read().decode("utf-8", "replace")


# -- many at once ---------------------------------------------------------------------------------------------------


class Zoo:
    """Runs programs several at a time and hands out each outcome when it is there.

    Several of these may share a folder, one in each test worker: who claims a program first runs it, the others read
    the outcome from the folder. So every program runs once, however the tests are spread. With no programs of its own
    it only reads; `is_alive` says then whether somebody still runs them.
    """

    def __init__(
        self,
        programs: list[Program],
        folder: Path,
        *,
        at_once: int = 8,
        is_alive: Callable[[], bool] = lambda: True,
        **how: Any,
    ) -> None:
        self._folder = folder
        self._is_alive = is_alive
        self._how = how
        self._pool = ThreadPoolExecutor(at_once, thread_name_prefix="zoo")
        folder.mkdir(parents=True, exist_ok=True)
        for program in programs:
            self._pool.submit(self._run_if_free, program)

    def outcome(self, program: Program, skip: Callable[[str], Any]) -> Outcome:
        """Waits for it; calls `skip` with the reason when this machine cannot run the program."""
        path = self._place(program, ".outcome")
        deadline_s = time.monotonic() + 290
        while not path.exists():
            # Asked before the second look: the last outcome may have been written just before the end.
            was_alive = self._is_alive()
            if time.monotonic() > deadline_s or (not was_alive and not path.exists()):
                raise TimeoutError(f"{program.name} has not ended" + ("" if was_alive else ": nobody runs the zoo"))
            time.sleep(0.05)
        found = pickle.loads(path.read_bytes())
        if isinstance(found, Unavailable):
            skip(str(found))
        if isinstance(found, BaseException):
            raise found
        return found

    def wait(self) -> None:
        """Until every program has run, or will not any more because of `close`."""
        self._pool.shutdown(wait=True)

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _run_if_free(self, program: Program) -> None:
        try:
            os.close(os.open(self._place(program, ".claim"), os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return
        found: Outcome | Exception
        try:
            found = run_program(program, self._place(program, ""), **self._how)
        except Exception as error:  # handed to the test that asks for it
            found = error
        fresh = self._place(program, ".new")
        fresh.write_bytes(pickle.dumps(found))
        fresh.rename(self._place(program, ".outcome"))

    def _place(self, program: Program, suffix: str) -> Path:
        return self._folder / f"{program.path.parent.name}-{program.name}{suffix}"
