"""A viewer shows the child's bytes unchanged, is never silent, and comes and goes without the run noticing."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jackline.cli.text.paint import cut_to_cells
from jackline.cli.view.raw_stream import ProtocolFilter, RawStream
from jackline.cli.view.screen import Screen, choose_color, choose_surface
from jackline.cli.view.viewer import Viewer, life_line
from jackline.rundir import atomic
from jackline.rundir.jsonl import JsonlWriter
from jackline.rundir.layout import AttemptDir
from jackline.rundir.process_id import identify
from jackline.rundir.records.session import SessionRecord
from jackline.rundir.records.supervisor import SupervisorRecord
from jackline.rundir.registry import register
from jackline.supervisor.output.room import punch
from tests.cli.terminal import Terminal
from tests.deadline import HANGS_S
from tests.rundir.made import make_run

PATIENCE_S = HANGS_S
MIB = 1 << 20


class Run:
    """A run directory whose supervisor and child are this very process, as far as a viewer can tell."""

    def __init__(self, path: Path) -> None:
        self.dir = make_run(path)
        register(self.dir, vouched=True)
        self.begin(1)
        self.events = JsonlWriter(self.dir.supervisor_events)
        self.state()

    def begin(self, number: int) -> AttemptDir:
        self.attempt = self.dir.attempt(number)
        self.attempt.path.mkdir(parents=True)
        me = identify(os.getpid())
        assert me is not None
        self.me = me.to_json()
        atomic.write_json(self.attempt.start_file, {"child": self.me})
        self.attempt.raw_out.touch()
        return self.attempt

    def print(self, data: bytes, *, is_err: bool = False) -> None:
        with open(self.attempt.raw_err if is_err else self.attempt.raw_out, "ab") as file:
            file.write(data)

    def note(self, text: str, **facts: Any) -> None:
        self.events.append({"at_s": time.time(), "event": "note", "text": text, **facts})

    def state(self, **more: Any) -> None:
        state = {
            # In an hour, so that it is fresh, and a first sign of life after an hour: neither may depend on how long
            # this machine takes to start a viewer. Tests of a sign of life ask for one earlier.
            "at_s": time.time() + 3600,
            "options": {"quiet_after_s": 3600},
            "started_at_s": time.time() - 72,
            "is_finished": False,
            "attempt": self.attempt.number,
            "supervisor": self.me,
            "child": self.me,
            "now": {"what": "importing torch", "file": "/home/me/model.py", "line": 3, "source": "import torch"},
            **more,
        }
        atomic.write_json(self.dir.supervisor_file, state)

    def finish(self, code: int) -> None:
        atomic.write_json(self.attempt.exit_file, {"exit_code": code})
        self.state(is_finished=True)

    def close(self) -> None:
        self.events.close()


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    made = Run(tmp_path / "runs" / "mine")
    yield made
    made.close()


VIEWER = """
import sys
from pathlib import Path
from jackline.cli.view.viewer import follow
from jackline.rundir.layout import RunDir
def pressed(number):
    print("Ctrl-C was handed on", file=sys.stderr, flush=True)
    return {answer}
sys.exit(follow(RunDir(Path(sys.argv[1])), attempt=1, from_start={from_start}, pass_on=pressed))
"""


class Viewing:
    """A real viewer process, on pipes or on a terminal of 80 columns."""

    def __init__(self, run: Run, *, on_terminal: bool, from_start: bool = True, answer: bool = True) -> None:
        code = VIEWER.format(from_start=from_start, answer=answer)
        command = [sys.executable, "-c", code, str(run.dir.path)]
        self.data = {"out": b"", "err": b""}
        self._code: int | None = None
        if on_terminal:
            self.pid, master = pty.fork()
            if self.pid == 0:
                os.execv(command[0], command)
            fcntl.ioctl(master, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
            self._process = None
            self.fds = {master: "out"}
        else:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0
            )
            assert self._process.stdout and self._process.stderr
            self.pid = self._process.pid
            self.fds = {self._process.stdout.fileno(): "out", self._process.stderr.fileno(): "err"}

    def read(self) -> None:
        for fd in select.select(list(self.fds), [], [], 0.05)[0] if self.fds else []:
            try:
                block = os.read(fd, MIB)
            except OSError:  # the terminal's other side is closed
                block = b""
            self.data[self.fds[fd]] += block
            if not block:
                del self.fds[fd]

    def wait_for(self, text: bytes, stream: str = "out") -> None:
        end_s = time.monotonic() + PATIENCE_S
        while text not in self.data[stream]:
            assert time.monotonic() < end_s, f"{text!r} never came; so far {self.data}"
            assert self.code() is None or self.fds, f"it ended without {text!r}: {self.data}"
            self.read()

    def code(self) -> int | None:
        if self._process is not None:
            return self._process.poll()
        if self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self._code = os.waitstatus_to_exitcode(status) if pid else None
        return self._code

    def wait(self) -> int:
        end_s = time.monotonic() + PATIENCE_S
        while self.code() is None:
            assert time.monotonic() < end_s, f"it did not end: {self.data}"
            self.read()
        while self.fds and self._process is not None:
            self.read()
        return self.code()  # type: ignore[return-value]

    @property
    def notes(self) -> list[str]:
        return self.data["err"].decode().splitlines()

    def close(self) -> None:
        if self.code() is None:
            os.kill(self.pid, signal.SIGKILL)
            while self.code() is None:
                self.read()
        if self._process is not None:
            self._process.stdout.close()  # type: ignore[union-attr]
            self._process.stderr.close()  # type: ignore[union-attr]
        else:
            for fd in list(self.fds):
                os.close(fd)


@contextlib.contextmanager
def viewing(run: Run, *, on_terminal: bool = False, **how: Any) -> Iterator[Viewing]:
    viewer = Viewing(run, on_terminal=on_terminal, **how)
    try:
        yield viewer
    finally:
        viewer.close()


# -- the child's bytes -----------------------------------------------------------------------------------------------


def test_the_childs_bytes_come_out_unchanged_and_ours_go_to_stderr(run: Run) -> None:
    data = b"plain\n\r 45%|###\r 46%|###\x1b[31mred\x1b[0m\xff\xfe\x00\x07\nno newline at the end"
    run.print(data)
    with viewing(run) as viewer:
        viewer.wait_for(data)
        run.note("memory is short", event="memory")
        run.print(b"\nmore")
        run.finish(3)
        assert viewer.wait() == 3
    assert viewer.data["out"] == data + b"\nmore"


def test_split_streams_go_to_their_own_descriptors(run: Run) -> None:
    run.print(b"to stdout\n")
    run.print(b"to stderr\n", is_err=True)
    run.finish(0)
    with viewing(run) as viewer:
        assert viewer.wait() == 0
    assert (viewer.data["out"], viewer.data["err"]) == (b"to stdout\n", b"to stderr\n")


def test_protocol_lines_are_taken_out_and_malformed_ones_are_not(run: Run) -> None:
    run.print(b"a\n::jackline phase=x done=1 total=2\nb\n\r 4%|#\r::jackline phase=y done=1\n\r 5%|#\n")
    run.print(b"::jackline what\nsay ::jackline phase=z done=1\n")
    run.finish(0)
    with viewing(run) as viewer:
        assert viewer.wait() == 0
    assert viewer.data["out"] == b"a\nb\n\r 4%|#\r 5%|#\n::jackline what\nsay ::jackline phase=z done=1\n"


def test_what_looks_like_the_beginning_of_a_protocol_line_is_shown_after_a_moment(run: Run) -> None:
    run.print(b"prompt\n::")
    with viewing(run) as viewer:
        viewer.wait_for(b"prompt\n::")


PARTS = [
    b"\n",
    b"\r",
    b"::jackline phase=x done=1\n",
    b"::jackline bad\n",
    b"::jack",
    b"line phase=y\n",
    b"text",
    b":",
]


@given(st.lists(st.sampled_from(PARTS), max_size=20), st.lists(st.integers(0, 200), max_size=8))
def test_any_cutting_of_the_stream_filters_the_same(parts: list[bytes], places: list[int]) -> None:
    data = b"".join(parts)
    whole = ProtocolFilter()
    expected = whole.feed(data) + whole.flush()
    ends = sorted({min(place, len(data)) for place in places} | {len(data)})
    portions = [data[start:end] for start, end in zip([0, *ends], ends, strict=False)]
    cut = ProtocolFilter()
    assert b"".join(cut.feed(portion) for portion in portions) + cut.flush() == expected
    assert (
        expected == re.sub(rb"(?:\r|(?<=\n)|\A)::jackline phase=[xy](?: done=1)?\n", b"", data) or b"::" in expected
    )


def test_the_next_attempt_follows_and_the_last_exit_code_counts(run: Run) -> None:
    run.print(b"first\n")
    with viewing(run) as viewer:
        viewer.wait_for(b"first\n")
        atomic.write_json(run.attempt.exit_file, {"exit_code": 1})
        run.begin(2)
        run.print(b"second\n")
        run.state()
        viewer.wait_for(b"second\n")
        run.finish(0)
        assert viewer.wait() == 0
    assert viewer.data["out"] == b"first\nsecond\n"


def test_a_finished_state_of_an_earlier_session_is_not_believed(run: Run) -> None:
    run.finish(1)
    run.begin(2)  # a new supervisor is starting; supervisor.json still is the old one's
    code = VIEWER.format(from_start=True, answer=True).replace("attempt=1", "attempt=2")
    viewer = subprocess.Popen([sys.executable, "-c", code, str(run.dir.path)], stdout=subprocess.PIPE)
    try:
        run.print(b"hello\n")
        assert viewer.stdout is not None and viewer.stdout.readline() == b"hello\n"
        run.finish(0)
        assert viewer.wait(PATIENCE_S) == 0
    finally:
        viewer.kill()
        viewer.wait()
        viewer.stdout.close()  # type: ignore[union-attr]


def test_a_late_viewer_shows_the_last_lines_only(run: Run) -> None:
    run.print(b"".join(b"line %d\n" % number for number in range(50_000)))
    run.finish(0)
    with viewing(run, from_start=False) as viewer:
        assert viewer.wait() == 0
    lines = viewer.data["out"].decode().splitlines()
    first = int(lines[0].split()[1])
    assert 0 < first < 50_000
    assert lines == [f"line {number}" for number in range(first, 50_000)]


def test_a_viewer_that_lags_behind_what_was_given_up_says_so(run: Run) -> None:
    run.print(b"x" * (2 * MIB - 1) + b"\nkept\n")
    with open(run.attempt.raw_out, "r+b") as file:
        assert punch(file.fileno(), 0, MIB) == MIB
    run.finish(0)
    with viewing(run) as viewer:
        assert viewer.wait() == 0
    assert viewer.data["out"] == b"x" * (MIB - 1) + b"\nkept\n"
    assert viewer.notes == [
        f"[jackline] 1.0 MiB of output are not shown here: this viewer came late. All of it: {run.dir.out_log}"
    ]


def test_a_report_of_the_launcher_that_comes_in_pieces_is_left_out(run: Run) -> None:
    """Python writes a traceback line by line, and reads source files in between: on a busy machine for seconds."""
    stream = RawStream(run.attempt.raw_out)
    report = [
        "Traceback (most recent call last):\n",
        '  File "<frozen runpy>", line 198, in _run_module_as_main\n',
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n",
        "============\ntrain.py FAILED\n",
        "------------\nFailures:\n============\n",
    ]
    shown, now_s = b"", 100.0
    for piece in ("step 1\n", *report, "done\n"):
        run.print(piece.encode())
        shown += stream.read()
        for _ in range(30):
            now_s += 0.1
            shown += stream.read() + stream.settle_if_quiet(now_s)
    assert shown == b"step 1\ndone\n"
    assert stream.take_folded() == 8


def test_a_stream_given_up_while_it_is_read_never_shows_zeros(run: Run) -> None:
    run.print(b"x" * 8 * MIB)
    stream = RawStream(run.attempt.raw_out)
    shown = stream.read()
    with open(run.attempt.raw_out, "r+b") as file:
        punch(file.fileno(), 0, 6 * MIB)
    while block := stream.read():
        shown += block
    stream.close()
    assert shown == b"x" * 3 * MIB
    assert stream.skipped_bytes == 5 * MIB


# -- signs of life ---------------------------------------------------------------------------------------------------


def test_a_silent_child_gets_a_sign_of_life_on_a_pipe(run: Run) -> None:
    run.state(options={"quiet_after_s": 0.3})
    with viewing(run) as viewer:
        viewer.wait_for(b"importing torch  model.py:3 `import torch`", "err")
    assert viewer.data["out"] == b""
    assert re.match(r"\[jackline\] \d+ min \d+ s ", viewer.notes[0]), viewer.notes


def test_a_silent_child_gets_a_status_line_on_a_terminal(run: Run) -> None:
    run.print(b"hello\n")
    with viewing(run, on_terminal=True) as viewer:
        viewer.wait_for(b"importing torch  model.py:3")
        run.print(b"more\n")
        viewer.wait_for(b"more")
        run.finish(0)
        assert viewer.wait() == 0
        for _ in range(5):
            viewer.read()
    assert Terminal().feed(viewer.data["out"].decode()).rows == ["hello", "more"]


def test_notes_are_shown_as_they_come_each_line_marked(run: Run) -> None:
    run.note("attempt 1: python train.py", event="started", attempt=1)
    with viewing(run) as viewer:
        run.note("STUCK: nothing moves\nin train.py:5")
        viewer.wait_for(b"train.py:5", "err")
        run.finish(0)
        assert viewer.wait() == 0
    assert viewer.notes == ["[jackline] STUCK: nothing moves", "[jackline] in train.py:5"]


def test_an_old_note_says_when_it_was(run: Run) -> None:
    run.note("attempt 1", event="started", attempt=1)
    run.note("memory is short", at_s=1_700_000_000.0)
    run.finish(0)
    with viewing(run) as viewer:
        assert viewer.wait() == 0
    assert viewer.notes == ["[jackline] 2023-11-14 22:13:20 UTC memory is short"]


def life(state: dict[str, Any], name: str, now_s: float) -> str:
    return life_line(SupervisorRecord.from_json(state), SessionRecord(), name, now_s).text


GONE = {"pid": 2**22 - 1, "start_ticks": 1, "host": "x", "boot_id": "y"}


def test_a_missing_heartbeat_is_said_as_it_is(run: Run) -> None:
    at_s = 1794708819.0
    clock = "02:13:39 UTC"
    pid = os.getpid()
    state = {"at_s": at_s, "supervisor": GONE, "child": run.me}
    assert life(state, "mine", at_s + 100) == (
        f"no heartbeat since {clock}, training pid {pid} is alive; `jackline watch mine` takes it over"
    )
    assert life({**state, "child": GONE}, "mine", at_s + 1) == (
        f"no heartbeat since {clock}, training pid {GONE['pid']} is gone; `jackline watch mine` takes it over"
    )
    assert life({**state, "supervisor": run.me}, "mine", at_s + 100) == (
        f"no heartbeat since {clock}, training pid {pid} is alive; "
        "its supervisor is alive but writes nothing (a full disk?)"
    )
    assert life({}, "mine", at_s) == "starting"


def test_a_wait_for_a_restart_is_a_sign_of_life(run: Run) -> None:
    state = {"at_s": 100.0, "supervisor": run.me, "attempt": 2, "is_restarting": True, "restart_at_s": 112.0}
    assert life(state, "mine", 100.0) == "attempt 2 has ended; restarting in 12 s"


def test_an_end_without_supervisor_is_told_from_the_keepers_file(run: Run) -> None:
    run.print(b"last words\n")
    atomic.write_json(run.attempt.start_file, {"child": GONE})
    atomic.write_json(run.attempt.wait_file, {"exit_code": None, "signal": 9})
    run.state(supervisor=GONE, child=GONE)
    with viewing(run) as viewer:
        assert viewer.wait() == 137
    assert viewer.data["out"] == b"last words\n"
    assert viewer.notes == [
        "[jackline] it ended with exit code 137, unwatched; `jackline watch mine` examines its end"
    ]


def test_an_end_nobody_saw_is_said_to_be_unknown(run: Run) -> None:
    atomic.write_json(run.attempt.start_file, {"child": GONE})
    run.state(supervisor=GONE, child=GONE)
    with viewing(run) as viewer:
        assert viewer.wait() == 1
    assert viewer.notes[-1] == (
        "[jackline] supervisor and training are gone, nobody saw how; `jackline why mine` looks into it"
    )


# -- coming and going ------------------------------------------------------------------------------------------------

GOES_ON = "the run continues; `jackline watch mine` shows it again, `jackline stop mine` ends it"


@pytest.mark.parametrize(
    ("number", "code", "words"),
    [
        (signal.SIGTERM, 143, [f"[jackline] this viewer was told to end (SIGTERM): {GOES_ON}"]),
        (signal.SIGINT, 130, [f"[jackline] detached: {GOES_ON}"]),
        (signal.SIGHUP, 129, []),
    ],
)
def test_a_signal_to_a_viewer_without_terminal_only_detaches(
    run: Run, number: signal.Signals, code: int, words: list[str]
) -> None:
    run.print(b"hello\n")
    with viewing(run) as viewer:
        viewer.wait_for(b"hello\n")
        os.kill(viewer.pid, number)
        assert viewer.wait() == code
    assert viewer.notes == words


def test_ctrl_c_at_a_terminal_is_handed_on_and_following_continues(run: Run) -> None:
    with viewing(run, on_terminal=True) as viewer:
        run.print(b"hello\n")
        viewer.wait_for(b"hello")
        (master,) = viewer.fds
        os.write(master, b"\x03")
        viewer.wait_for(b"Ctrl-C was handed on")
        run.print(b"saving\n")
        viewer.wait_for(b"saving")
        run.finish(75)
        assert viewer.wait() == 75


def test_with_tty_what_is_typed_reaches_the_runs_keyboard(run: Run) -> None:
    os.mkfifo(run.attempt.keyboard)
    keys = os.open(run.attempt.keyboard, os.O_RDWR | os.O_NONBLOCK)
    try:
        with viewing(run, on_terminal=True) as viewer:
            run.print(b"continue? ")
            viewer.wait_for(b"continue? ")
            (master,) = viewer.fds
            os.write(master, b"yes\n")
            assert select.select([keys], [], [], PATIENCE_S)[0], "nothing was passed on"
            assert os.read(keys, 100) == b"yes\n"
    finally:
        os.close(keys)


def test_ctrl_c_without_a_supervisor_detaches(run: Run) -> None:
    with viewing(run, on_terminal=True, answer=False) as viewer:
        run.print(b"hello\n")
        viewer.wait_for(b"hello")
        (master,) = viewer.fds
        os.write(master, b"\x03")
        viewer.wait_for(b"there is no supervisor to hand Ctrl-C to; detached")
        assert viewer.wait() == 130


def test_a_reader_that_goes_away_detaches_the_viewer(run: Run) -> None:
    with viewing(run) as viewer:
        run.print(b"hello\n")
        viewer.wait_for(b"hello\n")
        out = next(fd for fd, name in viewer.fds.items() if name == "out")
        del viewer.fds[out]
        viewer._process.stdout.close()  # type: ignore[union-attr]
        run.print(b"more\n")
        assert viewer.wait() == 141
    assert viewer.notes == [f"[jackline] nobody reads our output any more: {GOES_ON}"]


def test_a_closed_stdout_leaves_the_exit_code(run: Run) -> None:
    run.print(b"hello\n")
    run.finish(5)
    code = VIEWER.format(from_start=True, answer=True)
    shell = ["sh", "-c", 'exec "$0" -c "$1" "$2" >&-', sys.executable, code, str(run.dir.path)]
    assert subprocess.run(shell, stdin=subprocess.DEVNULL, timeout=PATIENCE_S).returncode == 5


# -- the screen ------------------------------------------------------------------------------------------------------


class Drawing:
    """A Screen on a real terminal, and what is seen on it."""

    def __init__(self, surface: str = "terminal") -> None:
        self.master, self.slave = os.openpty()
        fcntl.ioctl(self.slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        os.set_blocking(self.master, False)
        self.screen = Screen(surface, out_fd=self.slave, err_fd=self.slave)  # type: ignore[arg-type]
        self.terminal = Terminal()

    def look(self) -> Terminal:
        data = b""
        with contextlib.suppress(BlockingIOError):
            while block := os.read(self.master, 65536):
                data += block
        self.terminal.feed(data.decode("utf-8", "replace"))
        return self.terminal

    def close(self) -> None:
        os.close(self.master)
        os.close(self.slave)


@pytest.fixture
def drawing() -> Iterator[Drawing]:
    made = Drawing()
    yield made
    made.close()


COUNTED = {"phase": "", "done": 16, "unit": "batches", "source": "line", "of": "run"}
# Times are seconds from the beginning of the test: what is imported early may be tested an hour later.
STANDING_STATES: dict[str, dict[str, Any]] = {
    "a count without an end": {"progress": COUNTED, "memory": {"own_bytes": 178 << 20}},
    "a count with hours to go": {"progress": {**COUNTED, "total": 1e6, "eta_s": 9e5}},
    "a run of an hour": {"started_at_s": -4000.0},
    "an alarm": {"verdict": {"kind": "STUCK", "for_s": 4000.0, "text": "nothing moves"}, "progress": COUNTED},
    "a pause": {"verdict": {"kind": "PAUSED", "for_s": 4000.0, "text": "paused (SIGSTOP): x"}},
    "a restart in an hour": {"is_restarting": True, "restart_at_s": 4000.0},
    "a restart in minutes": {"is_restarting": True, "restart_at_s": 700.0},
    "no heartbeat": {"at_s": -4000.0},
    "nothing known yet": {"at_s": None, "supervisor": None},
}


@pytest.mark.parametrize("columns", [80, 24])
@pytest.mark.parametrize("name", STANDING_STATES)
def test_a_terminal_never_shows_the_same_for_two_seconds(
    run: Run, drawing: Drawing, name: str, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock is driven: nothing here takes time, and the files do not change any more."""
    fcntl.ioctl(drawing.slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    began_s, wall_s = time.monotonic(), time.time()
    state = STANDING_STATES[name].items()
    run.state(**{key: wall_s + value if key.endswith("at_s") and value else value for key, value in state})
    run.print(b"batch 16\n")
    now_s = began_s
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    monkeypatch.setattr(time, "time", lambda: wall_s + now_s - began_s)
    viewer = Viewer(run.dir, run.attempt, drawing.screen, from_start=True)
    shown, changed_s, gaps_s = list[str](), began_s, list[float]()
    while now_s < began_s + 40.0:
        assert viewer.step(now_s) is None
        if (rows := drawing.look().rows) != shown:
            gaps_s.append(now_s - changed_s)
            shown, changed_s = list(rows), now_s
        now_s += max(0.05, viewer.pause_s(now_s))
    viewer.close()
    assert max(*gaps_s, now_s - changed_s) <= 2.0, shown
    assert len(gaps_s) >= 20


def test_the_status_line_stands_below_a_bar_and_leaves_no_trace(drawing: Drawing) -> None:
    drawing.screen.show(b"before\n\r 45%|####      |")
    drawing.screen.set_status("12 s  loading data")
    assert drawing.look().rows == ["before", " 45%|####      |", "[jackline] 12 s  loading data"]
    drawing.screen.set_status("13 s  saving")
    assert drawing.look().rows == ["before", " 45%|####      |", "[jackline] 13 s  saving"]
    drawing.screen.show(b"\r 46%|####      |")
    assert drawing.look().rows == ["before", " 46%|####      |"]


def test_a_prompt_without_newline_continues_where_it_stood(drawing: Drawing) -> None:
    drawing.screen.show(b"loading ... ")
    drawing.screen.set_status("12 s")
    drawing.screen.show(b"done\n")
    assert drawing.look().rows == ["loading ... done"]


def test_nested_bars_are_left_alone(drawing: Drawing) -> None:
    drawing.screen.show(b"\router 1\n\rinner 1\x1b[A")
    drawing.screen.set_status("12 s")
    assert drawing.look().rows == ["outer 1", "inner 1", "[jackline] 12 s"]
    drawing.screen.show(b"\n\rinner 2\x1b[A")
    assert drawing.look().rows == ["outer 1", "inner 2"]


def test_a_note_goes_above_a_bar_in_progress(drawing: Drawing) -> None:
    drawing.screen.show(b"\r 45%|####")
    drawing.screen.say("memory is short")
    drawing.screen.show(b"\r 46%|####")
    assert drawing.look().rows == ["[jackline] memory is short", " 46%|####"]


CHILD = st.sampled_from(
    [b"line\n", b"\r 45%|###", b"\r 100%|#######\n", b"word ", b"bar\r", b"\rup\n\rdown\x1b[A", b"\n"]
)


@given(st.lists(st.tuples(CHILD, st.booleans()), max_size=12))
@settings(max_examples=60, deadline=None)
def test_whatever_the_child_draws_the_status_line_leaves_the_same_picture(steps: list[tuple[bytes, bool]]) -> None:
    plain, drawing = Drawing(), Drawing()
    try:
        for data, has_status in steps:
            plain.screen.show(data)
            drawing.screen.show(data)
            if has_status:
                drawing.screen.set_status("12 s  loading data")
                drawing.screen.set_status("13 s  x")
        drawing.screen.clear_status()
        assert drawing.look().rows == plain.look().rows
        assert drawing.terminal.cursor == plain.terminal.cursor
    finally:
        plain.close()
        drawing.close()


def test_in_a_cell_only_cr_and_blanks_are_used() -> None:
    drawing = Drawing("notebook")
    try:
        drawing.screen.show(b"\r 45%|####")
        drawing.screen.set_status("12 s")
        assert drawing.look().rows == [" 45%|####  [jackline] 12 s"]
        drawing.screen.show(b"\r 46%|####\n")
        drawing.screen.set_status("a long status")
        drawing.screen.set_status("short")
        assert drawing.look().rows == [" 46%|####", "[jackline] short"]
        drawing.screen.say("a note")
        assert drawing.look().rows == [" 46%|####", "[jackline] a note"]
    finally:
        drawing.close()


def test_a_plain_surface_has_no_status_line_and_no_glued_lines(tmp_path: Path) -> None:
    with open(tmp_path / "log", "wb") as file:
        screen = Screen("plain", out_fd=file.fileno(), err_fd=file.fileno())
        screen.show(b"\r 45%|####")
        screen.set_status("nothing")
        screen.say("a note")
    assert (tmp_path / "log").read_bytes() == b"\r 45%|####\n[jackline] a note\n"


def test_a_full_disk_under_our_stdout_is_a_problem_not_an_end() -> None:
    with open("/dev/full", "wb", buffering=0) as full:
        screen = Screen("plain", out_fd=full.fileno(), err_fd=full.fileno())
        screen.show(b"hello\n")
    assert screen.problem == "our stdout cannot be written: No space left on device"
    assert not screen.is_reader_gone


def test_a_slow_reader_with_a_nonblocking_pipe_gets_everything() -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    data = b"x" * MIB
    code = "import sys; sys.exit(len(sys.stdin.buffer.read()) != 1048576)"
    with open(reader, "rb") as end:
        slow = subprocess.Popen([sys.executable, "-c", code], stdin=end)
    Screen("plain", out_fd=writer, err_fd=writer).show(data)
    os.close(writer)
    assert slow.wait(PATIENCE_S) == 0


@pytest.mark.parametrize(
    ("env", "is_terminal", "is_cell_pipe", "surface"),
    [
        ({"TERM": "xterm"}, True, False, "terminal"),
        ({}, False, False, "plain"),
        ({"TERM": "dumb"}, True, False, "plain"),
        ({"JPY_PARENT_PID": "1"}, True, False, "notebook"),
        ({"COLAB_RELEASE_TAG": "r"}, False, True, "notebook"),
        ({"KAGGLE_KERNEL_RUN_TYPE": "Batch"}, False, False, "plain"),
    ],
)
def test_what_kind_of_surface_it_is(env: dict[str, str], is_terminal: bool, is_cell_pipe: bool, surface: str) -> None:
    assert choose_surface(env, is_terminal=is_terminal, is_cell_pipe=is_cell_pipe) == surface


@pytest.mark.parametrize(
    ("env", "surface", "expected"),
    [
        ({}, "terminal", True),
        ({}, "plain", False),
        ({"NO_COLOR": "1"}, "terminal", False),
        ({"NO_COLOR": "1", "FORCE_COLOR": "1"}, "terminal", False),
        ({"FORCE_COLOR": "1"}, "plain", True),
        ({"TERM": "dumb"}, "notebook", False),
    ],
)
def test_when_colours_are_used(env: dict[str, str], surface: Any, expected: bool) -> None:
    assert choose_color(env, surface) == expected


def test_a_status_line_is_cut_by_cells_not_by_characters() -> None:
    assert cut_to_cells("abc", 10) == "abc"
    assert cut_to_cells("日本語日本語", 7) == "日本語"
    assert cut_to_cells("x" * 100, 79) == "x" * 79
