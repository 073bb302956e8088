"""`--pid N` of `watch` and `status`: a process that was started without Jackline becomes a run.

Owns which run that is and what is said about its output. The process is only read: /proc, the file that is its
standard output, and its stacks through py-spy.
"""

from __future__ import annotations

import os
import stat
import time
from pathlib import Path

from jackline.cli.text.paint import print_note
from jackline.cli.text.why_live import check_pid
from jackline.errors import UsageError
from jackline.machine.proc import read_environ
from jackline.machine.procfs import read_bytes
from jackline.rundir.command import plain_settings, script_of
from jackline.rundir.create import claim_run
from jackline.rundir.find import runs_folder
from jackline.rundir.identity import numbered_name
from jackline.rundir.layout import RunDir
from jackline.rundir.process_id import ProcessId, identify
from jackline.rundir.status import read_status
from jackline.supervisor.options import SuperviseOptions
from jackline.supervisor.start import adopt_process

FIRST_READING_S = 10.0


def run_of_process(pid: int, run: str | None, runs_dir: str | None) -> RunDir:
    """The run that a process belongs to; one is made for it where there is none."""
    if run is not None:
        raise UsageError("a run and --pid were given; only one of them can be meant", hint=f"jackline status {run}")
    check_pid(pid)
    process = identify(pid)
    if process is None:
        raise UsageError(f"process {pid} ended just now", hint="its log and dmesg may tell why")
    own = RunDir(Path(read_environ(pid).get("JACKLINE_RUN_DIR") or "/nonexistent"))
    if own.has_run_file:
        print_note(f"process {pid} belongs to run '{own.name}': {own.path}")
        return own
    folder = runs_folder(runs_dir)
    argv = read_argv(pid)
    settings = plain_settings({"argv": argv, "cwd": working_folder(pid)})
    name = f"{_stem(settings, argv)}-pid-{pid}"
    known = RunDir(folder / name)
    if known.has_run_file and read_status(known).child == process:
        return known
    return _adopt(folder, name, process, settings)


def _adopt(folder: Path, name: str, process: ProcessId, settings: dict[str, object]) -> RunDir:
    from jackline.cli.commands.run import describe_here

    taken = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    run = RunDir(folder / numbered_name(name, taken))
    argv = read_argv(process.pid)
    options = SuperviseOptions(inject=False, rescue=False)
    claim = claim_run(run, describe_here(run.name, argv, settings, options), hint="choose another with --runs-dir")
    if claim is None:
        raise UsageError(f"another command has made run '{run.name}' just now", hint=f"jackline watch {run.name}")
    try:
        adopt_process(run, process, claim.lock)
    except BaseException:
        claim.abandon()
        raise
    claim.release()
    _wait_for_reading(run)
    print_note(f"process {process.pid} is now watched as run '{run.name}': {run.path}")
    print_note(output_words(process.pid))
    return run


def _wait_for_reading(run: RunDir) -> None:
    """Until the supervisor has read the process once, so that what is shown next is not empty."""
    until_s = time.monotonic() + FIRST_READING_S
    while time.monotonic() < until_s:
        status = read_status(run)
        if status.supervisor_state.num_processes or status.state != "alive":
            return
        time.sleep(0.05)


def read_argv(pid: int) -> list[str]:
    data = (read_bytes(f"/proc/{pid}/cmdline") or b"").rstrip(b"\0")
    return [word.decode("utf-8", "surrogateescape") for word in data.split(b"\0")] if data else [f"process {pid}"]


def working_folder(pid: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/cwd")  # noqa: PTH115
    except OSError:
        return "/"


def output_words(pid: int) -> str:
    """Where its output can be read, or why it cannot."""
    try:
        path = os.readlink(f"/proc/{pid}/fd/1")  # noqa: PTH115
        is_file = stat.S_ISREG(os.stat(f"/proc/{pid}/fd/1").st_mode)  # noqa: PTH116
    except OSError:
        return "what it prints cannot be read: its standard output is closed"
    if is_file:
        return f"its output is read from {path}; it is never signalled"
    return f"what it prints goes to {path} and cannot be read; stacks, memory and verdicts can"


def _stem(settings: dict[str, object], argv: list[str]) -> str:
    script = script_of(settings) or ""
    stem = Path(script.removeprefix("-m ")).stem or Path(argv[0]).name
    return "".join(sign if sign.isalnum() or sign in "._-" else "-" for sign in stem).strip(".-")[:40] or "process"
