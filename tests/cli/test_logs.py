"""`jackline logs` prints what a run printed, and says what silence means."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from jackline.cli.commands.logs import explain_lines, log_record, read_on, tail_offset
from jackline.rundir import atomic
from jackline.rundir.layout import RunDir
from jackline.rundir.process_id import identify
from jackline.rundir.run_file import describe_run, write_run_file
from jackline.rundir.status import read_status
from jackline.supervisor.output.room import punch
from tests.deadline import HANGS_S

STAMP = "2026-11-15T02:13:39.1Z "
PATIENCE_S = HANGS_S


@pytest.fixture
def run(clean_environment: Path) -> RunDir:
    """A run that has ended with code 0."""
    made = RunDir(clean_environment / "mine")
    attempt = made.attempt(1)
    attempt.path.mkdir(parents=True)
    contents = describe_run("mine", kind="run", argv=["python"], settings={}, options={}, cwd=made.path)
    write_run_file(made, contents)
    atomic.write_json(attempt.exit_file, {"exit_code": 0})
    return made


def make_alive(run: RunDir) -> None:
    me = identify(os.getpid())
    assert me is not None
    state = {"at_s": time.time(), "started_at_s": time.time() - 180, "supervisor": me.to_json(), "attempt": 1}
    atomic.write_json(run.supervisor_file, state)


def jackline(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "jackline", *words], capture_output=True, text=True, timeout=PATIENCE_S
    )


def write_log(run: RunDir, *lines: str) -> str:
    text = "".join(f"{STAMP}{line}\n" for line in lines)
    run.out_log.write_text(text)
    return text


def test_the_whole_log_is_printed(run: RunDir) -> None:
    text = write_log(run, "one", "two", "[jackline] a note")
    done = jackline("logs", "mine")
    assert (done.returncode, done.stdout, done.stderr) == (0, text, "")


def test_without_a_name_it_is_the_only_run(run: RunDir) -> None:
    text = write_log(run, "one")
    assert jackline("logs").stdout == text


def test_tail_prints_the_last_lines(run: RunDir) -> None:
    write_log(run, *(f"line {number}" for number in range(1000)))
    assert jackline("logs", "mine", "--tail", "2").stdout == f"{STAMP}line 998\n{STAMP}line 999\n"
    assert jackline("logs", "mine", "--tail", "0").stdout == ""


@pytest.mark.parametrize("ending", ["", "\n"], ids=["torn", "whole"])
@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_the_tail_is_counted_right(tmp_path: Path, ending: str, count: int) -> None:
    path = tmp_path / "log"
    path.write_text("a\nb\n\nlast" + ending)
    expected = "".join(("a\nb\n\nlast" + ending).splitlines(keepends=True)[-count:])
    assert path.read_text()[tail_offset(path, count) :] == expected


def test_the_tail_of_a_large_log_is_counted_right(tmp_path: Path) -> None:
    path = tmp_path / "log"
    lines = [f"{number} {'x' * (number % 3000)}\n" for number in range(3000)]
    path.write_text("".join(lines))
    assert path.read_text()[tail_offset(path, 1500) :] == "".join(lines[-1500:])


def test_json_gives_time_speaker_and_text(run: RunDir) -> None:
    write_log(run, "one [jackline] in the middle", "[jackline] a note", "")
    records = [json.loads(line) for line in jackline("logs", "mine", "--json").stdout.splitlines()]
    at = STAMP.strip()
    assert records == [
        {"at": at, "by": "command", "text": "one [jackline] in the middle"},
        {"at": at, "by": "jackline", "text": "a note"},
        {"at": at, "by": "command", "text": ""},
    ]


def test_a_line_without_a_stamp_is_still_a_record() -> None:
    assert log_record("torn") == {"at": None, "by": "command", "text": "torn"}


def test_raw_prints_the_bytes_as_they_were(run: RunDir) -> None:
    run.attempt(1).raw_out.write_bytes(b"\r 45%|\xff\x1b[31m\n")
    done = subprocess.run([sys.executable, "-m", "jackline", "logs", "mine", "--raw"], capture_output=True)
    assert done.stdout == b"\r 45%|\xff\x1b[31m\n"


def test_raw_says_what_is_no_longer_kept(run: RunDir) -> None:
    raw = run.attempt(1).raw_out
    raw.write_bytes(b"x" * 8192 + b"kept\n")
    with open(raw, "r+b") as file:
        punch(file.fileno(), 0, 8192)
    done = jackline("logs", "mine", "--raw")
    assert done.stdout == "kept\n"
    assert done.stderr == "[jackline] the first 8.0 KiB are no longer kept raw; they are in out.log\n"


def test_raw_and_json_together_are_refused(run: RunDir) -> None:
    done = jackline("logs", "mine", "--raw", "--json")
    assert done.returncode == 2
    assert done.stderr == (
        "error: --raw and --json do not go together\nhint: raw bytes are no lines; leave one of them out\n"
    )


@pytest.fixture
def following(run: RunDir) -> Iterator[subprocess.Popen[bytes]]:
    make_alive(run)
    write_log(run, "one")
    command = [sys.executable, "-m", "jackline", "logs", "mine", "-f"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, bufsize=0)
    yield process
    process.kill()
    process.wait()
    assert process.stdout is not None
    process.stdout.close()


def read_until(process: subprocess.Popen[bytes], text: bytes) -> bytes:
    assert process.stdout is not None
    data, end_s = b"", time.monotonic() + PATIENCE_S
    while text not in data:
        assert time.monotonic() < end_s, f"{text!r} never came: {data!r}"
        if select.select([process.stdout], [], [], 0.1)[0]:
            data += os.read(process.stdout.fileno(), 65536)
    return data


def test_follow_continues_until_the_run_is_over(run: RunDir, following: subprocess.Popen[bytes]) -> None:
    read_until(following, b"one\n")
    with open(run.out_log, "a") as log:
        log.write(f"{STAMP}tw")
        log.flush()
        log.write(f"o\n{STAMP}three\n")
    assert read_until(following, b"three\n") == f"{STAMP}two\n{STAMP}three\n".encode()
    run.supervisor_file.unlink()
    assert following.wait(PATIENCE_S) == 0


def test_follow_continues_after_a_supervisor_that_took_over_cut_the_log(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each pause between two looks is one thing that happens to the log: the reader surely looks at every state."""
    make_alive(run)
    write_log(run, "one")
    happens = iter(
        [
            lambda: os.truncate(run.out_log, 0),
            lambda: run.out_log.write_text(f"{STAMP}one, again\n"),
            lambda: run.supervisor_file.unlink(),
        ]
    )
    monkeypatch.setattr("jackline.cli.commands.logs.time", SimpleNamespace(sleep=lambda _: next(happens)()))
    blocks = list(read_on(run, run.out_log, tail=None, follow=True))
    assert b"".join(blocks).decode() == f"{STAMP}one\n{STAMP}one, again\n"


def test_a_reader_that_goes_away_is_no_error(run: RunDir) -> None:
    write_log(run, *(f"line {number}" for number in range(200_000)))
    command = f"{sys.executable} -m jackline logs mine | head -n 1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=PATIENCE_S)
    assert (done.stdout, done.stderr) == (f"{STAMP}line 0\n", "")


# -- silence explained -----------------------------------------------------------------------------------------------


def test_an_absent_log_of_an_ended_run_is_explained(run: RunDir) -> None:
    done = jackline("logs", "mine")
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr == "[jackline] it has printed nothing, and it is finished; `jackline why mine` tells more\n"


def test_a_log_with_only_our_notes_is_an_empty_one(run: RunDir) -> None:
    make_alive(run)
    write_log(run, "[jackline] 12 s  importing torch")
    assert explain_lines([], read_status(run), "mine", time.time()) == (
        "it has printed nothing so far, and it is alive for 3 min; `jackline why mine` tells what it is doing"
    )
    assert jackline("logs", "mine").stderr.startswith("[jackline] it has printed nothing so far, and it is alive")


WARNING = ["/x/torch/nn.py:12: UserWarning: old", "  warn(", "WARNING: something"]


def test_a_log_of_warnings_only_is_said_to_be_that(run: RunDir) -> None:
    text = explain_lines(WARNING, read_status(run), "mine", 0.0)
    assert text == "it has printed only warnings, and it is finished; `jackline why mine` tells more"


@pytest.mark.parametrize("line", ["step 1 loss 2", "done"])
def test_a_log_with_real_lines_needs_no_words(run: RunDir, line: str) -> None:
    assert explain_lines([*WARNING, line], read_status(run), "mine", 0.0) is None
