"""`--pid`: a process that was started without Jackline becomes a run that is only read."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jackline.rundir.layout import AttemptDir
from jackline.supervisor.child.adopter import exit_status, may_read, open_end, start_ticks, words_of
from tests.deadline import HANGS_S

PROGRAM = """
import pathlib, time
print("step 1 of 9", flush=True)
while not pathlib.Path("go").exists():
    time.sleep(0.02)
raise ValueError("bad batch")
"""


def jackline(folder: Path, *words: object) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "jackline", *map(str, words)]
    return subprocess.run(line, cwd=folder, capture_output=True, text=True, timeout=HANGS_S)


def test_a_process_started_without_us_is_watched_to_its_end_and_never_signalled(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    with (tmp_path / "log.txt").open("wb") as log:
        process = subprocess.Popen([sys.executable, "train.py"], cwd=tmp_path, stdout=log, stderr=log)
    try:
        until_s = time.monotonic() + HANGS_S
        while not (tmp_path / "log.txt").stat().st_size:
            assert time.monotonic() < until_s
            time.sleep(0.02)
        told = jackline(tmp_path, "status", "--pid", process.pid, "--json")
        assert told.returncode == 0, told.stderr
        status = json.loads(told.stdout)
        assert status["state"] == "alive" and status["name"] == f"train-pid-{process.pid}"
        assert f"its output is read from {tmp_path / 'log.txt'}" in told.stderr
        again = json.loads(jackline(tmp_path, "status", "--pid", process.pid, "--json").stdout)
        assert again["name"] == status["name"]  # found again, not made again
        stopped = jackline(tmp_path, "stop", status["name"])
        assert stopped.returncode == 2 and "was started without Jackline" in stopped.stderr
        assert process.poll() is None
        (tmp_path / "go").touch()
        # Our own child, which nobody has waited for: its status can be read on every kernel.
        wait = AttemptDir(tmp_path / "runs" / status["name"] / "attempts/001").wait_file
        while not wait.exists():
            assert time.monotonic() < until_s
            time.sleep(0.02)
        assert process.wait(HANGS_S) == 1
        watched = jackline(tmp_path, "watch", status["name"])
        assert "step 1 of 9" in watched.stdout and "ValueError: bad batch" in watched.stdout
        assert "[jackline] error: ValueError: bad batch (train.py:6)" in watched.stderr and watched.returncode == 1
        why = jackline(tmp_path, "why", status["name"])
        assert "error: ValueError: bad batch (train.py:6)" in why.stdout
        assert "nobody saw" not in why.stdout and "certainty: certain" in why.stdout
        assert (tmp_path / "log.txt").read_text().count("step 1 of 9") == 1
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("exit 7", {"status": 7 << 8, "exit_code": 7}),
        ("kill -KILL $$", {"status": 9, "signal": 9}),
        ("exit 0", {"status": 0, "exit_code": 0}),
    ],
)
def test_the_exit_status_of_another_parents_child_is_learnt(command: str, words: dict[str, int]) -> None:
    """As a zombie, on every kernel; after its parent has read it, from Linux 6.15 on."""
    process = subprocess.Popen(["sh", "-c", f"read go; {command}"], stdin=subprocess.PIPE)
    end, child = open_end(process.pid), {"pid": process.pid, "start_ticks": start_ticks(process.pid)}
    is_readable = may_read(process.pid)
    process.communicate(b"\n")  # and waits
    reaped = exit_status(end, child, is_readable=is_readable)
    assert words_of(reaped) == (words if reaped is not None or _LINUX >= (6, 15) else {})
    os.close(end)
    process = subprocess.Popen(["sh", "-c", f"read go; {command}"], stdin=subprocess.PIPE)
    child = {"pid": process.pid, "start_ticks": start_ticks(process.pid)}
    assert process.stdin is not None
    process.stdin.close()
    while start_ticks(process.pid) is not None:
        time.sleep(0.02)
    assert words_of(exit_status(-1, child, is_readable=True)) == words
    assert exit_status(-1, child, is_readable=False) is None
    process.wait()


_LINUX = tuple(int(part) for part in re.findall(r"\d+", platform.release())[:2])


def test_a_process_that_is_not_there_is_refused(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    told = jackline(tmp_path, "watch", "--pid", process.pid)
    assert told.returncode == 2 and f"there is no process {process.pid}" in told.stderr
