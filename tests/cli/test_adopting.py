"""`--pid`: a process that was started without Jackline becomes a run that is only read."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

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
        assert process.wait(HANGS_S) == 1
        watched = jackline(tmp_path, "watch", status["name"])
        assert "step 1 of 9" in watched.stdout and "ValueError: bad batch" in watched.stdout
        why = jackline(tmp_path, "why", status["name"])
        assert "ValueError: bad batch" in why.stdout and "nobody saw its exit status" in why.stdout
        assert (tmp_path / "log.txt").read_text().count("step 1 of 9") == 1
    finally:
        process.kill()
        process.wait()


def test_a_process_that_is_not_there_is_refused(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    told = jackline(tmp_path, "watch", "--pid", process.pid)
    assert told.returncode == 2 and f"there is no process {process.pid}" in told.stderr
