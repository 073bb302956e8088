"""Run directories made by hand, with processes that are real, gone, or of another machine."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from jackline.rundir import atomic
from jackline.rundir.layout import RunDir
from jackline.rundir.process_id import ProcessId, boot_id, host_name, identify
from jackline.rundir.run_file import RunFile, write_run_file


def make_run(folder: Path, **facts: Any) -> RunDir:
    """A run that has its run.json and nothing else."""
    folder.mkdir(parents=True, exist_ok=True)
    run = RunDir(folder)
    known: dict[str, Any] = {
        "name": folder.name,
        "kind": "command",
        "argv": ("python", "train.py"),
        "cwd": "/home/me",
        "settings": {},
        "options": {},
        "created_at_s": time.time(),
        "host": host_name(),
        "boot_id": boot_id(),
    }
    write_run_file(run, RunFile(**{**known, **facts}))
    return run


def this_process() -> ProcessId:
    found = identify(os.getpid())
    assert found is not None
    return found


def gone_process() -> ProcessId:
    """Our own pid, but started at another time: a process whose pid was used again."""
    return ProcessId(os.getpid(), 1, host_name(), boot_id())


def foreign_process() -> ProcessId:
    return ProcessId(4242, 77, "gpu-box", "00000000-0000-0000-0000-000000000000")


def write_state(run: RunDir, supervisor: ProcessId, **facts: Any) -> None:
    state = {"at_s": time.time(), "supervisor": supervisor.to_json(), "is_finished": False, "is_restarting": False}
    atomic.write_json(run.supervisor_file, {**state, **facts})


def write_start(run: RunDir, child: ProcessId, number: int = 1) -> None:
    attempt = run.attempt(number)
    attempt.path.mkdir(parents=True, exist_ok=True)
    atomic.write_json(attempt.start_file, {"child": child.to_json(), "started_at_s": time.time()})


def write_exit(run: RunDir, code: int, number: int = 1, **facts: Any) -> None:
    attempt = run.attempt(number)
    attempt.path.mkdir(parents=True, exist_ok=True)
    atomic.write_json(attempt.exit_file, {"format": 1, "attempt": number, "exit_code": code, **facts})
