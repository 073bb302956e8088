"""`jackline stop`: what it waits for."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

from click.testing import CliRunner

from jackline.cli.commands.stop import _ended_words, _is_over, _owes_records, command
from jackline.rundir.process_id import ProcessId, identify
from jackline.rundir.records.mirror import MirrorRecord, write_mirror
from jackline.rundir.records.rescue import RescueRecord, write_rescue
from tests.rundir.made import make_run, write_exit, write_start, write_state
from tests.shell import wait_for

# Ends its run on SIGTERM, as a supervisor does, and then still has work: a --when-done command, for example.
SUPERVISOR = """
import pathlib, signal, sys, time
run, go = map(pathlib.Path, sys.argv[1:])
def end(number, frame):
    (run / "ended").touch()
    while not go.exists():
        time.sleep(0.02)
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
print("ready", flush=True)
while True:
    time.sleep(0.05)
"""


def process_of(process: subprocess.Popen[str]) -> ProcessId:
    found = identify(process.pid)
    assert found is not None
    return found


def test_stop_waits_until_the_supervisor_itself_has_exited(clean_environment: Path, tmp_path: Path) -> None:
    """Until then the lock is held: `jackline resume` right after `jackline stop` would find it taken."""
    run, go = make_run(clean_environment / "story"), tmp_path / "go"
    supervisor = subprocess.Popen(
        [sys.executable, "-c", SUPERVISOR, str(run.path), str(go)], stdout=subprocess.PIPE, text=True
    )
    done = []
    stop = threading.Thread(target=lambda: done.append(CliRunner().invoke(command, ["story"])))
    try:
        assert supervisor.stdout is not None and supervisor.stdout.readline() == "ready\n"
        write_start(run, process_of(supervisor))
        write_state(run, process_of(supervisor), attempt=1)
        stop.start()
        wait_for((run.path / "ended").exists, "the signal")
        write_start(run, ProcessId(1, 1, "gone", "gone"))
        write_exit(run, 0)
        write_state(run, process_of(supervisor), attempt=1, is_finished=True)
        assert not _is_over(run)
        assert stop.is_alive()
        go.touch()
        supervisor.wait()
        stop.join()
    finally:
        go.touch()
        supervisor.kill()
        supervisor.wait()
        if supervisor.stdout is not None:
            supervisor.stdout.close()
    assert _is_over(run)
    assert done[0].exit_code == 0, done[0].output
    assert done[0].stderr.splitlines()[-1] == "[jackline] run 'story' has ended; `jackline resume story` continues it"
    write_rescue(run.attempt(1), RescueRecord(pid=7, outcome="saved", path="/x", step=12, at_s=1.0))
    assert _ended_words(run) == (
        "run 'story' has ended; `jackline rescue story --load` prints the lines that load its rescued state"
    )


def test_records_of_the_end_that_are_on_their_way_to_the_mirror_are_told(clean_environment: Path) -> None:
    run = make_run(clean_environment / "mine")
    write_start(run, ProcessId(2**22 - 1, 1, "here", "boot"))
    write_exit(run, 75, ended_at_s=100.0)
    assert not _owes_records(run)  # without a mirror
    me = identify(os.getpid())
    write_mirror(run.mirror_file, MirrorRecord(store="/far", process=me, story_at_s=90.0))
    assert _owes_records(run)
    write_mirror(run.mirror_file, MirrorRecord(store="/far", process=me, story_at_s=101.0))
    assert not _owes_records(run)
    gone = ProcessId(2**22 - 1, 1, me.host if me else "", me.boot_id if me else "")
    write_mirror(run.mirror_file, MirrorRecord(store="/far", process=gone, story_at_s=90.0))
    assert not _owes_records(run)  # nobody uploads them
