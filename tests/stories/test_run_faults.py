"""The supervisor struck at the worst instants: the training continues, and nothing of it is lost."""

from __future__ import annotations

import errno
import os
import signal

import pytest

from tests.faults import Fault, fail_at, kill_at, stall_at
from tests.shell import Live, Shell, is_running, wait_for

pytestmark = pytest.mark.zoo

COUNTS_UNTIL_GO = """
import os, time
number = 0
while not os.path.exists("go"):
    print("line", number)
    number += 1
    time.sleep(0.02)
print("printed", number)
"""


def start(shell: Shell, fault: Fault) -> Live:
    shell.env = fault.in_supervisor(shell.env)
    words = ("run", "--name", "struck", "--", *shell.python("train.py", COUNTS_UNTIL_GO))
    return shell.start(command=fault.jackline(*words))


def assert_nothing_is_lost(shell: Shell) -> None:
    run = shell.run_dir("struck")
    run.wait_until_over()
    assert run.exit()["cause"] == "finished"
    lines = run.log_lines()
    total = int(lines[-1].removeprefix("printed "))
    assert lines == [*(f"line {number}" for number in range(total)), f"printed {total}"]


@pytest.mark.parametrize("point", ["state.replace", "log.write", "raw.read"])
def test_a_supervisor_that_dies_at_any_write_can_be_replaced(shell: Shell, point: str) -> None:
    run = shell.run_dir("struck")
    with kill_at(point, nth=3) as fault:
        start(shell, fault)
        wait_for(fault.strikes, "the fault to strike")
        struck = fault.strikes()[0]["pid"]
    wait_for(lambda: not is_running(struck), "the supervisor to be gone")
    assert struck != run.child_pid()
    assert is_running(run.child_pid())
    del shell.env["FAULT"]
    second = shell.start("watch", "struck")
    wait_for(lambda: run.events("taken_over"), "the run to be taken over")
    (shell.work / "go").touch()
    assert second.wait() == 0
    assert_nothing_is_lost(shell)


def test_a_supervisor_that_dies_writing_the_last_word_can_be_replaced(shell: Shell) -> None:
    run = shell.run_dir("struck")
    with kill_at("exit.replace") as fault:
        start(shell, fault).wait_for("line 3")
        (shell.work / "go").touch()
        wait_for(fault.strikes, "the fault to strike")
    assert run.exit() == {}
    del shell.env["FAULT"]
    assert shell.jackline("watch", "struck").code == 0
    assert_nothing_is_lost(shell)


@pytest.mark.parametrize("point", ["state.replace", "event.write", "log.write"])
def test_a_disk_that_is_full_for_the_supervisor_does_not_harm_the_training(shell: Shell, point: str) -> None:
    with fail_at(point, with_errno=errno.ENOSPC, nth=2, goes_on=True) as fault:
        live = start(shell, fault)
        live.wait_for("line 100")
        (shell.work / "go").touch()
        assert live.wait() == 0
        assert "printed " in live.text("out")
    assert shell.run_dir("struck").exit()["cause"] == "finished"


def test_lines_lost_to_a_full_disk_are_counted_in_the_log(shell: Shell) -> None:
    with fail_at("log.write", with_errno=errno.ENOSPC, nth=5) as fault:
        live = start(shell, fault)
        wait_for(fault.strikes, "the fault to strike")
        run = shell.run_dir("struck")
        wait_for(lambda: "missing here: the disk was full since" in run.log(), "the gap to be noted")
        (shell.work / "go").touch()
        assert live.wait() == 0


def test_a_disk_that_stalls_does_not_stall_the_training(shell: Shell) -> None:
    with stall_at("log.write", for_s=5, nth=3) as fault:
        live = start(shell, fault)
        wait_for(fault.strikes, "the fault to strike")
        # The viewer reads the command's own file, so lines keep coming while the supervisor stands.
        live.wait_for("line 30")
        (shell.work / "go").touch()
        assert live.wait() == 0
    assert_nothing_is_lost(shell)


def test_a_keeper_killed_hard_leaves_the_command_running_and_its_end_known(shell: Shell) -> None:
    live = shell.start("run", "--name", "struck", "--", *shell.python("train.py", COUNTS_UNTIL_GO))
    live.wait_for("line 5")
    run = shell.run_dir("struck")
    keeper = run.json("attempts/001/start.json")["keeper"]["pid"]
    os.kill(keeper, signal.SIGKILL)
    wait_for(lambda: not is_running(keeper), "the keeper to be gone")
    assert is_running(run.child_pid())
    (shell.work / "go").touch()
    assert live.wait() == 0
    assert_nothing_is_lost(shell)
