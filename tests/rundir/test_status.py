"""Is a run alive? Told from pids, start times and exit files, never from a word in a file."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest

from jackline.rundir import atomic
from jackline.rundir.layout import RunDir
from jackline.rundir.process_id import ProcessId, boot_id, host_name, identify, liveness
from jackline.rundir.status import read_status
from tests.deadline import HANGS_S
from tests.rundir.made import (
    foreign_process,
    gone_process,
    make_run,
    this_process,
    write_exit,
    write_start,
    write_state,
)


def test_a_run_that_never_started_is_empty(tmp_path: Path) -> None:
    status = read_status(make_run(tmp_path / "r"))
    assert (status.state, status.attempt, status.is_stale) == ("empty", 0, True)


def test_a_live_supervisor_makes_a_run_alive_also_between_attempts(tmp_path: Path) -> None:
    run = make_run(tmp_path / "r")
    write_state(run, this_process(), is_restarting=True)
    write_start(run, gone_process())
    write_exit(run, 1)
    assert read_status(run).state == "alive"


def test_a_live_child_without_a_supervisor_is_unwatched(tmp_path: Path) -> None:
    run = make_run(tmp_path / "r")
    write_state(run, gone_process(), at_s=time.time() - 60)
    write_start(run, this_process())
    status = read_status(run)
    assert (status.state, status.is_stale) == ("unwatched", True)


def test_a_pid_that_was_used_again_is_not_the_same_process(tmp_path: Path) -> None:
    run = make_run(tmp_path / "r")
    write_state(run, gone_process())
    write_start(run, gone_process())
    assert read_status(run).state == "dead"


def test_a_zombie_is_gone() -> None:
    child = subprocess.Popen(["sleep", "600"])
    found = identify(child.pid)
    assert found is not None and liveness(found) == "alive"
    child.kill()
    deadline_s = time.monotonic() + HANGS_S
    while liveness(found) == "alive" and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert liveness(found) == "gone"  # killed, but not yet waited for
    child.wait()


def test_a_process_of_another_boot_is_gone_and_of_another_host_unknown() -> None:
    me = this_process()
    assert liveness(me) == "alive"
    assert liveness(ProcessId(me.pid, me.start_ticks, me.host, "another boot")) == "gone"
    assert liveness(foreign_process()) == "elsewhere"


@pytest.mark.parametrize(
    ("code", "facts", "state"),
    [
        (0, {}, "finished"),
        (1, {}, "dead"),
        (75, {}, "stopped"),
        (130, {"is_stopped": True}, "stopped"),
        (0, {"is_stopped": True}, "stopped"),
        (137, {}, "dead"),
    ],
)
def test_an_exit_file_tells_how_it_ended(tmp_path: Path, code: int, facts: dict[str, bool], state: str) -> None:
    run = make_run(tmp_path / "r")
    write_state(run, gone_process(), is_finished=True)
    write_start(run, gone_process())
    write_exit(run, code, **facts)
    status = read_status(run)
    assert (status.state, status.exit_code) == (state, code)


def test_the_last_attempt_counts_also_beyond_a_thousand(tmp_path: Path) -> None:
    run = make_run(tmp_path / "r")
    write_exit(run, 0, number=999)
    write_exit(run, 1, number=1000)
    (run.attempts / "notes").mkdir()
    status = read_status(run)
    assert (status.attempt, status.state) == (1000, "dead")


def test_a_run_without_an_end_on_another_host_is_elsewhere(tmp_path: Path) -> None:
    run = make_run(tmp_path / "r")
    write_state(run, foreign_process())
    write_start(run, foreign_process())
    assert read_status(run).state == "elsewhere"


def test_a_run_that_ended_on_another_host_has_ended(tmp_path: Path) -> None:
    run = make_run(tmp_path / "r")
    write_state(run, foreign_process(), is_finished=True)
    write_start(run, foreign_process())
    write_exit(run, 0)
    assert read_status(run).state == "finished"


def test_a_run_that_waited_to_restart_on_another_host_is_elsewhere(tmp_path: Path) -> None:
    run = make_run(tmp_path / "r")
    write_state(run, foreign_process(), is_restarting=True)
    write_start(run, foreign_process())
    write_exit(run, 1)
    assert read_status(run).state == "elsewhere"


def test_a_supervisor_that_died_while_it_waited_to_restart_leaves_a_dead_run(tmp_path: Path) -> None:
    run = make_run(tmp_path / "r")
    write_state(run, gone_process(), is_restarting=True)
    write_start(run, gone_process())
    write_exit(run, 1)
    assert read_status(run).state == "dead"


@pytest.mark.parametrize("data", [b"", b"{", b"[1, 2]", b'{"supervisor": 7, "at_s": "now"}', b"\xff\x00"])
def test_damaged_state_files_are_absent_state_files(tmp_path: Path, data: bytes) -> None:
    run = make_run(tmp_path / "r")
    write_start(run, gone_process())
    run.supervisor_file.write_bytes(data)
    run.attempt(1).start_file.write_bytes(data)
    status = read_status(run)
    assert (status.state, status.child, status.supervisor, status.last_seen_at_s) == ("dead", None, None, None)


def test_a_heartbeat_is_stale_after_ten_seconds(tmp_path: Path) -> None:
    run = make_run(tmp_path / "r")
    write_state(run, this_process(), at_s=1000.0)
    assert not read_status(run, now_s=1009.0).is_stale
    assert read_status(run, now_s=1011.0).is_stale


def test_the_word_running_in_a_file_is_not_believed(tmp_path: Path) -> None:
    run = make_run(tmp_path / "r")
    write_state(run, gone_process(), state="running", is_finished=False)
    write_start(run, ProcessId(2**22 - 7, 5, host_name(), boot_id()))
    assert read_status(run).state == "dead"


def test_an_earlier_attempt_is_judged_by_its_own_end(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    for number, code in ((1, 139), (2, 0)):
        run.attempt(number).path.mkdir(parents=True)
        atomic.write_json(run.attempt(number).exit_file, {"exit_code": code})
    assert (read_status(run).attempt, read_status(run).state) == (2, "finished")
    earlier = read_status(run, attempt=1)
    assert (earlier.attempt, earlier.state, earlier.exit_code) == (1, "dead", 139)
