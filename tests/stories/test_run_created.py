"""A start that is killed before its command runs: the same command typed again starts as if nothing had been."""

from __future__ import annotations

import signal

import pytest

from tests.faults import kill_at
from tests.shell import Shell, wait_for

pytestmark = pytest.mark.zoo


@pytest.mark.parametrize(
    ("point", "nth"),
    [
        ("run.mkdir", 1),
        ("run.open", 1),
        ("run.sync", 1),
        ("run.replace", 1),
        ("run.rename", 1),
        ("supervisor.log", 1),
    ],
)
def test_a_creator_that_is_killed_at_any_step_is_followed_by_a_normal_start(
    shell: Shell, point: str, nth: int
) -> None:
    command = ("run", "--name", "once", "--", "echo", "hello")
    with kill_at(point, nth=nth) as fault:
        killed = shell.jackline(*command, env=fault.in_child(shell.env))
        assert killed.code == -signal.SIGKILL, killed
    done = shell.jackline(*command)
    assert (done.code, done.out) == (0, "hello\n"), done
    assert [path.name for path in shell.runs.iterdir()] == ["once"]
    assert [path.name for path in (shell.runs / "once" / "attempts").iterdir()] == ["001"]


@pytest.mark.parametrize(
    ("point", "nth"),
    [("log.open", 1), ("event.open", 1), ("attempt.mkdir", 1), ("attempt.mkdir", 2), ("reserve.open", 1)],
)
def test_a_supervisor_that_is_killed_before_its_first_attempt_is_followed_by_a_normal_start(
    shell: Shell, point: str, nth: int
) -> None:
    command = ("run", "--name", "once", "--", "echo", "hello")
    with kill_at(point, nth=nth) as fault:
        killed = shell.call(fault.jackline(*command), env=fault.in_supervisor(shell.env))
        assert killed.code == 1, killed
        assert "the supervisor did not start" in killed.err
    done = shell.jackline(*command)
    assert (done.code, done.out) == (0, "hello\n"), done
    assert [path.name for path in shell.runs.iterdir()] == ["once"]


def test_creator_and_supervisor_killed_together_leave_a_run_that_another_command_may_have(shell: Shell) -> None:
    with kill_at("supervisor.log") as fault:
        shell.jackline("run", "--name", "mine", "--", "echo", "first", env=fault.in_child(shell.env))
    assert "created, but never started" in shell.jackline("status", "mine").out
    done = shell.jackline("run", "--name", "mine", "--", "echo", "second")
    assert (done.code, done.out) == (0, "second\n"), done
    assert shell.run_dir("mine").json("run.json")["argv"] == ["echo", "second"]


def test_a_start_waits_for_a_creator_at_work_and_then_watches(shell: Shell) -> None:
    """The creator is stopped between the folder and the command: no second one may slip in."""
    command = ("run", "--name", "once", "--", "sh", "-c", "echo hello; while [ ! -e go ]; do sleep 0.02; done")
    from tests.faults import stall_at

    with stall_at("supervisor.log", for_s=3) as fault:
        plain, shell.env = shell.env, fault.in_child(shell.env)
        first = shell.start(*command)
        wait_for(fault.strikes, "the creator to stand still")
        shell.env = plain
        second = shell.start(*command)
        second.wait_for("is alive already; watching it", "err")
        second.wait_for("hello", "out")
        (shell.work / "go").touch()
        assert [live.wait() for live in (first, second)] == [0, 0]
    assert [path.name for path in (shell.runs / "once" / "attempts").iterdir()] == ["001"]
