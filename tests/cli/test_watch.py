"""`jackline watch`: which runs it follows, takes over or refuses. The whole of it is told in tests/stories."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jackline.cli.commands.watch import needs_supervisor
from jackline.cli.view.afar import LogSince
from jackline.rundir import atomic
from jackline.rundir.layout import RunDir
from jackline.rundir.process_id import ProcessId, identify
from jackline.rundir.run_file import describe_run, write_run_file
from jackline.rundir.status import read_status
from tests.deadline import HANGS_S


@pytest.fixture
def run(clean_environment: Path) -> RunDir:
    made = RunDir(clean_environment / "mine")
    made.path.mkdir(parents=True)
    contents = describe_run("mine", kind="run", argv=["python"], settings={}, options={}, cwd=made.path)
    write_run_file(made, contents)
    return made


def begin(run: RunDir, child: ProcessId) -> None:
    attempt = run.attempt(1)
    attempt.path.mkdir(parents=True)
    attempt.raw_out.write_bytes(b"printed\n")
    atomic.write_json(attempt.start_file, {"child": child.to_json()})
    atomic.write_json(run.supervisor_file, {"at_s": 1.0, "attempt": 1, "child": child.to_json()})


def watch(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "jackline", "watch", *words], capture_output=True, text=True, timeout=HANGS_S
    )


def me() -> ProcessId:
    found = identify(os.getpid())
    assert found is not None
    return found


def test_a_run_that_was_never_started_is_refused(run: RunDir) -> None:
    done = watch("mine")
    assert done.returncode == 2
    assert done.stderr == "error: run 'mine' was never started\nhint: start it: jackline resume mine\n"


def test_a_run_on_another_machine_is_refused(run: RunDir) -> None:
    begin(run, ProcessId(1, 1, "far-away", "some-boot"))
    done = watch("mine")
    assert done.returncode == 2
    first, hint = done.stderr.splitlines()
    assert first.startswith("error: run 'mine' runs on 'far-away', not here, last heard of ")
    assert hint == "hint: watch it there, or read what is here: jackline logs mine"


def test_a_run_on_another_machine_that_shares_the_folder_is_followed(run: RunDir) -> None:
    """Its output comes from its log, what it does from its records; its end is the end of the view."""
    far = ProcessId(1, 1, "far-away", "some-boot")
    begin(run, far)
    verdict = {"kind": "PROGRESS", "text": "running"}
    beat = {"at_s": time.time(), "attempt": 1, "child": far.to_json(), "verdict": verdict}
    atomic.write_json(run.supervisor_file, beat)
    run.out_log.write_text("2026-11-19T10:00:00.0Z epoch 1\n2026-11-19T10:00:01.0Z [jackline] a note\nand half a")
    words = [sys.executable, "-m", "jackline", "watch", "mine"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as viewer:
        assert viewer.stdout is not None and viewer.stderr is not None
        assert viewer.stdout.readline() == "epoch 1\n"
        with open(run.out_log, "a") as log:
            log.write(" line\n2026-11-19T10:00:02.0Z epoch 2\n")
        lines = [viewer.stdout.readline() for _ in range(3)]
        atomic.write_json(run.attempt(1).exit_file, {"exit_code": 7})
        assert viewer.wait(HANGS_S) == 7
        told = viewer.stderr.read()
    assert lines == ["[jackline] a note\n", "and half a line\n", "epoch 2\n"]
    assert "watching run 'mine' of 'far-away' through the folder " in told
    assert told.splitlines()[-1] == "[jackline] run 'mine' failed; `jackline why` tells more"


def test_an_ended_run_is_shown_with_its_exit_code(run: RunDir) -> None:
    begin(run, ProcessId(2**22 - 1, 1, me().host, me().boot_id))
    atomic.write_json(run.attempt(1).exit_file, {"exit_code": 3})
    done = watch("mine")
    assert (done.returncode, done.stdout) == (3, "printed\n")
    assert done.stderr == "[jackline] run 'mine' is not running: it failed; this is what it printed last\n"


def test_only_runs_without_supervisor_whose_end_is_unknown_get_a_new_one(run: RunDir) -> None:
    begin(run, me())
    assert needs_supervisor(read_status(run)), "alive and unwatched"
    begin_ended = ProcessId(2**22 - 1, 1, me().host, me().boot_id)
    atomic.write_json(run.attempt(1).start_file, {"child": begin_ended.to_json()})
    assert needs_supervisor(read_status(run)), "ended, and nobody wrote down how"
    atomic.write_json(run.attempt(1).exit_file, {"exit_code": 3})
    assert not needs_supervisor(read_status(run)), "ended, and written down"


def test_only_what_is_new_in_a_far_log_is_shown_also_when_lines_repeat_or_its_beginning_is_cut(run: RunDir) -> None:
    log = LogSince(run)
    assert log.read() == b""  # nothing was printed yet
    run.out_log.write_bytes(b"same\n" * 300)
    assert log.read() == b"same\n" * 300
    with run.out_log.open("ab") as file:
        file.write(b"same\n" * 5 + b"half")
    assert (log.read(), log.read()) == (b"same\n" * 5, b"")
    run.out_log.write_bytes(b"".join(b"line %d\n" % number for number in range(500)))
    log = LogSince(run)
    assert log.read() == b"".join(b"line %d\n" % number for number in range(300, 500))
    run.out_log.write_bytes(b"".join(b"line %d\n" % number for number in range(200, 510)))
    assert log.read() == b"".join(b"line %d\n" % number for number in range(500, 510))
