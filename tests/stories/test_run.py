"""`jackline run -- CMD` as a person types it: the output, and what happens when the one who watches goes away."""

from __future__ import annotations

import json
import os
import signal
import sys
import time

import pytest

from tests.shell import Shell, is_running, wait_for

pytestmark = pytest.mark.zoo

# Prints numbered lines until a file named 'go' appears, then says goodbye.
COUNTS_UNTIL_GO = """
import os, time
number = 0
while not os.path.exists("go"):
    print("line", number)
    number += 1
    time.sleep(0.02)
print("printed", number)
"""
WAITS_FOR_GO = """
import os, time
print("waiting")
while not os.path.exists("go"):
    time.sleep(0.02)
print("went on")
"""


def counted(lines: list[str]) -> None:
    """Every line that was printed is there once and in order."""
    total = int(lines[-1].removeprefix("printed "))
    assert lines == [*(f"line {number}" for number in range(total)), f"printed {total}"]


def test_a_python_line_appears_while_the_script_runs_on(shell: Shell) -> None:
    live = shell.start("run", "--name", "live", "--", *shell.python("train.py", WAITS_FOR_GO))
    live.wait_for("waiting", "out")  # nothing lets the script end before this line was seen
    (shell.work / "go").touch()
    assert live.wait() == 0
    assert live.text("out") == "waiting\nwent on\n"
    assert "[jackline] run 'live', attempt 1: " in live.text("err")


def test_our_own_words_go_to_stderr_and_the_commands_to_stdout(shell: Shell) -> None:
    done = shell.jackline(
        "run", "--", sys.executable, "-c", "import sys; print('out'); print('err', file=sys.stderr)"
    )
    assert done.code == 0
    assert done.out == "out\nerr\n"
    assert all(line.startswith("[jackline] ") for line in done.err.splitlines()), done


@pytest.mark.parametrize("code", [0, 1, 3, 75, 200])
def test_the_commands_exit_code_is_passed_through(shell: Shell, code: int) -> None:
    assert shell.jackline("run", "--", sys.executable, "-c", f"raise SystemExit({code})").code == code


def test_a_death_by_signal_becomes_128_plus_its_number(shell: Shell) -> None:
    assert shell.jackline("run", "--", "sh", "-c", "kill -9 $$").code == 137


def test_the_order_of_stdout_and_stderr_is_kept(shell: Shell) -> None:
    text = """
import sys
for number in range(1000):
    print(number, file=sys.stdout if number % 2 else sys.stderr)
"""
    done = shell.jackline("run", "--name", "order", "--", *shell.python("order.py", text))
    wanted = [str(number) for number in range(1000)]
    assert done.out.splitlines() == wanted
    assert shell.run_dir("order").log_lines() == wanted


def test_split_streams_keeps_stderr_apart(shell: Shell) -> None:
    text = "import sys; print('to stdout'); print('to stderr', file=sys.stderr)"
    live = shell.start("run", "--split-streams", "--", sys.executable, "-c", text)
    assert live.wait() == 0
    assert live.text("out") == "to stdout\n"
    assert "to stderr\n" in live.text("err")


def test_tty_gives_the_command_a_terminal(shell: Shell) -> None:
    text = "import sys, os; print(sys.stdout.isatty(), sys.stdin.isatty(), os.get_terminal_size().columns > 0)"
    done = shell.jackline("run", "--tty", "--", sys.executable, "-c", text)
    assert (done.code, done.out) == (0, "True True True\n")


def test_a_pipe_on_stdin_reaches_the_command(shell: Shell) -> None:
    command = [sys.executable, "-m", "jackline", "run", "--", sys.executable, "-c", "print(input()[::-1])"]
    done = shell.call(["sh", "-c", 'echo hello | "$0" "$@"', *command])
    assert (done.code, done.out) == (0, "olleh\n")


def test_the_command_sees_its_folder_and_environment_and_no_secret_is_written(shell: Shell) -> None:
    text = "import os; print(os.getcwd()); print(os.environ['TOKEN'][::-1])"
    done = shell.jackline("run", "--", sys.executable, "-c", text, env={"TOKEN": "hf_secret"})
    assert done.out == f"{shell.work}\nterces_fh\n"
    files = [path for path in shell.runs.rglob("*") if path.is_file()]
    assert len(files) > 5
    assert [str(path) for path in files if b"hf_secret" in path.read_bytes()] == []


def test_a_silent_script_gets_a_sign_of_life(shell: Shell) -> None:
    live = shell.start("run", "--quiet-after", "0.5", "--", *shell.python("train.py", WAITS_FOR_GO))
    live.wait_for("train.py:5 `time.sleep(0.02)`", "err")
    (shell.work / "go").touch()
    assert live.wait() == 0


def test_a_viewer_killed_hard_leaves_the_run_supervised(shell: Shell) -> None:
    live = shell.start("run", "--name", "orphan", "--", *shell.python("train.py", COUNTS_UNTIL_GO))
    live.wait_for("line 5")
    run = shell.run_dir("orphan")
    os.kill(live.pid, signal.SIGKILL)
    assert live.wait() == -signal.SIGKILL
    before_s = run.state()["at_s"]
    wait_for(lambda: run.state()["at_s"] > before_s + 1, "the supervisor to continue writing its state")
    assert is_running(run.child_pid())
    (shell.work / "go").touch()
    run.wait_until_over()
    assert run.exit()["cause"] == "finished"
    counted(run.log_lines())


def test_a_closed_terminal_only_detaches(shell: Shell) -> None:
    live = shell.start("run", "--name", "closed", "--", *shell.python("train.py", COUNTS_UNTIL_GO), surface="pty")
    live.wait_for("line 5")
    run = shell.run_dir("closed")
    live.hang_up()
    wait_for(lambda: live.code() is not None, "the viewer to end with its terminal")
    before_s = run.state()["at_s"]
    wait_for(lambda: run.state()["at_s"] > before_s + 1, "the supervisor to continue writing its state")
    (shell.work / "go").touch()
    run.wait_until_over()
    assert run.exit()["cause"] == "finished"
    counted(run.log_lines())


def test_an_interrupted_notebook_cell_only_detaches(shell: Shell) -> None:
    """A SIGINT to a viewer that has no terminal comes from a notebook or a script, not from Ctrl-C."""
    live = shell.start("run", "--name", "cell", "--", *shell.python("train.py", COUNTS_UNTIL_GO))
    live.wait_for("line 5")
    os.kill(live.pid, signal.SIGINT)
    live.wait()
    assert "jackline watch cell" in live.text("err")
    run = shell.run_dir("cell")
    assert is_running(run.child_pid())
    (shell.work / "go").touch()
    run.wait_until_over()
    counted(run.log_lines())


def test_nohup_and_a_shell_that_ends_leave_the_run_supervised(shell: Shell) -> None:
    words = [sys.executable, "-m", "jackline", "run", "--name", "nohup", "--", *shell.python("t.py", COUNTS_UNTIL_GO)]
    done = shell.call(["sh", "-c", 'nohup "$0" "$@" > mine.log 2>&1 &', *words])
    assert done.code == 0
    run = shell.run_dir("nohup")
    wait_for(lambda: "line 5\n" in (shell.work / "mine.log").read_text(), "lines in the log of nohup")
    (shell.work / "go").touch()
    run.wait_until_over()
    wait_for(lambda: "printed " in (shell.work / "mine.log").read_text(), "the last line in the log of nohup")
    counted([line for line in (shell.work / "mine.log").read_text().splitlines() if "jackline]" not in line])
    counted(run.log_lines())


def test_two_watchers_see_the_same(shell: Shell) -> None:
    shell.jackline("run", "--detach", "--name", "seen", "--", *shell.python("train.py", COUNTS_UNTIL_GO))
    watchers = [shell.start("watch", "seen") for _ in range(2)]
    for watcher in watchers:
        watcher.wait_for("line 3", "out")
    (shell.work / "go").touch()
    for watcher in watchers:
        assert watcher.wait() == 0
        counted(watcher.text("out").splitlines())


def test_a_supervisor_that_was_paused_raises_no_alarm(shell: Shell) -> None:
    """A laptop's lid, a paused virtual machine: time passed, and nothing could be seen."""
    words = ("run", "--detach", "--name", "paused", "--stuck-after", "2", "--quiet-after", "1", "--")
    shell.jackline(*words, *shell.python("train.py", COUNTS_UNTIL_GO))
    run = shell.run_dir("paused")
    wait_for(lambda: run.state().get("verdict"), "a first verdict")
    pids = [run.supervisor_pid(), run.child_pid()]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    paused_at_s = run.state()["at_s"]
    wait_for(lambda: time.time() > paused_at_s + 8, "the pause to pass")
    for pid in reversed(pids):
        os.kill(pid, signal.SIGCONT)
    wait_for(lambda: run.state()["at_s"] > paused_at_s + 11, "the supervisor to watch on for three seconds")
    (shell.work / "go").touch()
    run.wait_until_over()
    assert run.events("stuck") == []
    assert [event for event in run.events("verdict") if event.get("verdict") in ("SUSPECT", "STUCK")] == []
    counted(run.log_lines())


def test_a_shell_script_may_open_its_own_stderr(shell: Shell) -> None:
    """`> /dev/stderr` opens the file behind the descriptor anew and cuts it. What was read before stays, what comes
    after is read, and the cut is told."""
    text = "echo one; while [ ! -e go ]; do sleep 0.05; done; echo two > /dev/stderr; echo three; echo four"
    live = shell.start("run", "--name", "cut", "--", "sh", "-c", text)
    run = shell.run_dir("cut")
    wait_for(lambda: any("one" in line for line in run.log_lines()), "the first line to be in the log")
    (shell.work / "go").touch()
    assert live.wait() == 0
    assert run.log_lines() == ["one", "two", "three", "four"]
    assert "cut its own output file raw.out" in (shell.runs / "cut" / "out.log").read_text()


def test_a_viewer_whose_reader_went_away_does_not_harm_the_run(shell: Shell) -> None:
    command = [sys.executable, "-m", "jackline", "run", "--name", "head", "--"]
    command += shell.python("train.py", COUNTS_UNTIL_GO)
    live = shell.start(command=["sh", "-c", '"$0" "$@" | head -n 3', *command])
    live.wait_for("line 2")
    run = shell.run_dir("head")
    (shell.work / "go").touch()
    run.wait_until_over()
    assert run.exit()["cause"] == "finished"
    counted(run.log_lines())


def test_detach_comes_back_at_once_and_watch_follows(shell: Shell) -> None:
    done = shell.jackline("run", "--detach", "--name", "far", "--", *shell.python("train.py", COUNTS_UNTIL_GO))
    assert done.code == 0
    assert done.out == ""
    run = shell.run_dir("far")
    assert is_running(run.child_pid())
    live = shell.start("watch", "far")
    live.wait_for("line 3", "out")
    (shell.work / "go").touch()
    assert live.wait() == 0
    counted(live.text("out").splitlines())


def test_a_supervisor_killed_hard_loses_and_doubles_nothing(shell: Shell) -> None:
    live = shell.start("run", "--name", "bereft", "--", *shell.python("train.py", COUNTS_UNTIL_GO))
    live.wait_for("line 20")
    run = shell.run_dir("bereft")
    first, child = run.supervisor_pid(), run.child_pid()
    os.kill(first, signal.SIGKILL)
    wait_for(lambda: not is_running(first), "the supervisor to be gone")
    assert is_running(child)
    status = json.loads(shell.jackline("status", "bereft", "--json").out)
    assert status["state"] == "unwatched"

    second = shell.start("watch", "bereft")
    wait_for(lambda: run.events("taken_over"), "the run to be taken over")
    wait_for(lambda: run.supervisor_pid() != first, "the new supervisor to write its state")
    assert run.child_pid() == child and is_running(child)
    (shell.work / "go").touch()
    assert second.wait() == 0
    run.wait_until_over()
    assert run.exit()["cause"] == "finished"
    assert run.exit()["child_exit_code"] == 0
    counted(run.log_lines())


def test_an_end_that_nobody_watched_is_still_known(shell: Shell) -> None:
    live = shell.start("run", "--name", "late", "--", *shell.python("train.py", WAITS_FOR_GO + "raise SystemExit(3)"))
    live.wait_for("waiting")
    run = shell.run_dir("late")
    child = run.child_pid()
    os.kill(run.supervisor_pid(), signal.SIGKILL)
    (shell.work / "go").touch()
    wait_for(lambda: not is_running(child), "the command to end unwatched")
    done = shell.jackline("watch", "late")
    assert done.code == 3, done
    assert run.exit()["child_exit_code"] == 3
    assert run.log_lines() == ["waiting", "went on"]


def test_json_outputs_parse_while_alive_and_afterwards(shell: Shell) -> None:
    live = shell.start("run", "--name", "asked", "--", *shell.python("train.py", WAITS_FOR_GO))
    live.wait_for("waiting")
    for words in (("status", "asked", "--json"), ("runs", "--json"), ("why", "asked", "--json")):
        done = shell.jackline(*words)
        assert done.code == 0, (words, done)
        assert json.loads(done.out), words
    assert json.loads(shell.jackline("status", "asked", "--json").out)["state"] == "alive"
    (shell.work / "go").touch()
    assert live.wait() == 0
    assert json.loads(shell.jackline("status", "asked", "--json").out)["state"] == "finished"
    assert json.loads(shell.jackline("why", "asked", "--json").out)
