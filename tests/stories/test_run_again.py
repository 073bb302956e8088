"""The same command typed again, and commands that are started again by themselves."""

from __future__ import annotations

import json
import os
import signal
import sys
import zipfile
from pathlib import Path

import pytest

from tests.shell import Shell

pytestmark = pytest.mark.zoo

WAITS_FOR_GO = """
import os, sys, time
print("started with", sys.argv[1:], flush=True)
while not os.path.exists("go"):
    time.sleep(0.02)
"""


def test_a_second_start_of_a_live_command_watches_it(shell: Shell) -> None:
    command = shell.python("train.py", WAITS_FOR_GO)
    first = shell.start("run", "--", *command)
    first.wait_for("started with")
    second = shell.start("run", "--", *command)
    second.wait_for("is alive already; watching it", "err")
    second.wait_for("started with", "out")
    (shell.work / "go").touch()
    assert (first.wait(), second.wait()) == (0, 0)
    (run,) = shell.runs.iterdir()
    assert [path.name for path in (run / "attempts").iterdir()] == ["001"]


def test_a_finished_command_says_so_and_asks_for_new(shell: Shell) -> None:
    assert shell.jackline("run", "--name", "once", "--", "echo", "hello").code == 0
    done = shell.jackline("run", "--name", "once", "--", "echo", "hello")
    assert (done.code, done.out) == (2, "")
    assert done.err == (
        f"[jackline] this command has finished already, as run 'once' in {shell.runs / 'once'}\n"
        "[jackline] hint: --new starts it again as a new run; `jackline logs` shows what it printed\n"
    )
    again = shell.jackline("run", "--name", "once", "--new", "--", "echo", "hello")
    assert (again.code, again.out) == (0, "hello\n")
    assert sorted(path.name for path in shell.runs.iterdir()) == ["once", "once-2"]


def test_a_dead_command_typed_again_is_the_next_attempt_of_the_same_run(shell: Shell) -> None:
    command = shell.python("train.py", "import os, sys; sys.exit(0 if os.path.exists('fixed') else 1)")
    assert shell.jackline("run", "--name", "two", "--", *command).code == 1
    (shell.work / "fixed").touch()
    done = shell.jackline("run", "--name", "two", "--", *command)
    assert done.code == 0, done
    assert [path.name for path in sorted((shell.runs / "two" / "attempts").iterdir())] == ["001", "002"]
    assert shell.run_dir("two").exit(2)["cause"] == "finished"
    earlier = shell.jackline("why", "two", "--attempt", "1")
    assert earlier.code == 0, earlier
    assert earlier.out.startswith("attempt 1 of run 'two' exited with code 1 at ")
    assert f"({shell.runs / 'two'}; 2 is its newest)" in earlier.out.splitlines()[0]
    assert shell.jackline("why", "two").out.startswith("run 'two' finished at ")


def test_resume_starts_the_next_attempt(shell: Shell) -> None:
    command = shell.python("train.py", "import os, sys; sys.exit(0 if os.path.exists('fixed') else 1)")
    assert shell.jackline("run", "--name", "two", "--", *command).code == 1
    (shell.work / "fixed").touch()
    assert shell.jackline("resume", "two", cwd=shell.folder).code == 0


def test_the_same_name_with_another_command_is_refused_with_the_difference(shell: Shell) -> None:
    assert shell.jackline("run", "--name", "mine", "--", "false").code == 1
    before = sorted(str(path) for path in shell.runs.rglob("*"))
    done = shell.jackline("run", "--name", "mine", "--", "false", "--lr", "1e-3")
    assert done.code == 2
    assert done.err == (
        "error: run 'mine' was started with another command\n"
        "       argv: false -> false --lr 1e-3\n"
        "hint: --new starts another run, --continue-with-changes continues this one\n"
    )
    assert sorted(str(path) for path in shell.runs.rglob("*")) == before
    assert shell.jackline("run", "--name", "mine", "--continue-with-changes", "--", "true").code == 0


def test_the_name_of_a_live_run_with_another_command_is_refused(shell: Shell) -> None:
    live = shell.start("run", "--name", "mine", "--", *shell.python("train.py", WAITS_FOR_GO))
    live.wait_for("started with")
    done = shell.jackline("run", "--name", "mine", "--continue-with-changes", "--", "true")
    assert done.code == 2
    assert done.err.startswith("error: run 'mine' is alive with another command\n")
    assert done.err.endswith("hint: another --name, --new, or `jackline stop mine` first\n")
    (shell.work / "go").touch()
    assert live.wait() == 0


def test_the_same_command_started_six_times_at_once_is_one_run(shell: Shell) -> None:
    """A person's loop, a scheduler's retry: one start wins, the others watch it."""
    command = shell.python("train.py", WAITS_FOR_GO)
    lives = [shell.start("run", "--name", "once", "--", *command) for _ in range(6)]
    for live in lives:
        live.wait_for("started with", "out")
    (shell.work / "go").touch()
    assert [live.wait() for live in lives] == [0] * 6
    assert [path.name for path in shell.runs.iterdir()] == ["once"]
    assert [path.name for path in (shell.runs / "once" / "attempts").iterdir()] == ["001"]


def test_a_run_resumed_four_times_at_once_is_started_once_and_watched_by_the_others(shell: Shell) -> None:
    command = shell.python("train.py", WAITS_FOR_GO)
    first = shell.start("run", "--name", "once", "--", *command)
    first.wait_for("started with", "out")
    assert shell.jackline("stop", "once").code == 0
    first.wait()
    lives = [shell.start("resume", "once") for _ in range(4)]
    for live in lives:
        live.wait_for("started with", "out")
    (shell.work / "go").touch()
    assert [live.wait() for live in lives] == [0] * 4, [live.text() for live in lives]
    assert sorted(path.name for path in (shell.runs / "once" / "attempts").iterdir()) == ["001", "002"]


def test_a_supervisor_that_has_yet_to_write_itself_down_is_not_taken_for_gone(shell: Shell) -> None:
    command = ("run", "--name", "once", "--", *shell.python("train.py", WAITS_FOR_GO))
    first = shell.start(*command)
    first.wait_for("started with", "out")
    state = shell.runs / "once" / "supervisor.json"
    pid = shell.run_dir("once").state()["supervisor"]["pid"]
    os.kill(pid, signal.SIGSTOP)  # as if it had got no turn since the start
    try:
        state.unlink()
        second = shell.start(*command)
        second.wait_for("run 'once' is alive already; watching it", "err")
    finally:
        os.kill(pid, signal.SIGCONT)
    second.wait_for("started with", "out")
    (shell.work / "go").touch()
    assert [live.wait() for live in (first, second)] == [0, 0]
    assert "a new one has taken over" not in second.text()


CRASHES_ONCE = """
import os, sys, zipfile
print("argv", sys.argv[1:], flush=True)
if "--resume" in sys.argv:
    sys.exit(0)
for number in (1, 2):
    with zipfile.ZipFile(f"ckpt-{number}.pt", "w") as file:
        file.writestr("data.pkl", "x" * 5000)
with open("ckpt-3.pt", "wb") as file:  # the machine died while this one was written
    file.write(open("ckpt-2.pt", "rb").read()[:1000])
os.kill(os.getpid(), 11)
"""


def test_a_restart_resumes_from_the_newest_whole_checkpoint(shell: Shell) -> None:
    words = ("--checkpoints", "ckpt-*.pt", "--resume-arg", "--resume {checkpoint}")
    done = shell.jackline("run", "--name", "again", *words, "--", *shell.python("train.py", CRASHES_ONCE))
    assert done.code == 0, done
    with pytest.raises(zipfile.BadZipFile):
        zipfile.ZipFile(shell.work / "ckpt-3.pt")
    assert done.out == f"argv []\nargv ['--resume', '{shell.work / 'ckpt-2.pt'}']\n"
    run = shell.run_dir("again")
    assert run.exit(1)["cause"] == "segfault"
    assert run.exit(2)["cause"] == "finished"
    assert run.exit(2)["resumed_from"] == str(shell.work / "ckpt-2.pt")
    told = [event["event"] for event in run.events() if event["event"] in ("started", "died", "restart", "finished")]
    assert told == ["started", "died", "restart", "started", "finished"]
    spent = json.loads(shell.jackline("goodput", "again", "--json").out)[0]
    assert spent["seconds"]["down"] > 0
    assert sum(spent["seconds"].values()) == pytest.approx(spent["wall_s"], abs=1e-5)
    assert "of wall time" in shell.jackline("goodput", "again", "--price", "2.5/h").out


def test_a_crash_loop_is_ended_and_explained(shell: Shell) -> None:
    text = "raise ConnectionResetError(104, 'Connection reset by peer')"
    done = shell.jackline("run", "--name", "loop", "--restart", "5", "--", *shell.python("train.py", text))
    assert done.code == 1
    run = shell.run_dir("loop")
    assert len(list((run.path / "attempts").iterdir())) == 2
    why = "not restarting: the same error ended two attempts within a minute of their start"
    assert why in [event["text"] for event in run.events("note")]
    assert why in done.err


def test_a_persons_kill_is_never_undone(shell: Shell) -> None:
    done = shell.jackline("run", "--name", "killed", "--restart", "5", "--", "sh", "-c", "kill -9 $$")
    assert done.code == 137
    assert len(list((shell.runs / "killed" / "attempts").iterdir())) == 1


def test_an_own_mistake_is_not_repeated(shell: Shell) -> None:
    text = "raise ValueError('learning rate must be positive')"
    done = shell.jackline("run", "--name", "wrong", "--restart", "5", "--", *shell.python("train.py", text))
    assert done.code == 1
    assert len(list((shell.runs / "wrong" / "attempts").iterdir())) == 1


def test_runs_are_found_from_any_folder(shell: Shell, tmp_path: Path) -> None:
    assert shell.jackline("run", "--name", "found", "--", "true").code == 0
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    done = shell.jackline("runs", cwd=elsewhere, env={"JACKLINE_RUNS": str(elsewhere / "runs")})
    assert done.code == 0
    assert "found" in done.out


HANGS_ONCE = """
import os, threading
if os.path.exists("second"):
    raise SystemExit(0)
open("second", "w").close()
print("training")
threading.Event().wait()
"""


def test_a_hang_is_ended_and_started_again_when_asked(shell: Shell) -> None:
    words = ("--restart", "2", "--on-stuck", "restart", "--stuck-after", "3", "--grace", "1")
    done = shell.jackline("run", "--name", "hung", *words, "--", *shell.python("train.py", HANGS_ONCE))
    assert done.code == 0, done
    run = shell.run_dir("hung")
    assert run.exit(1)["cause"] == "stuck"
    assert "train.py:7" in run.exit(1)["text"]
    assert run.exit(2)["cause"] == "finished"


def test_the_same_command_right_after_a_failure_starts_a_new_attempt(shell: Shell) -> None:
    """The supervisor of the first lives on while its hook runs; the run is over all the same."""
    words = [
        "run",
        "--name",
        "mine",
        "--when-done",
        "sleep 3",
        "--",
        sys.executable,
        "-c",
        "print(1); raise SystemExit(4)",
    ]
    for number in (1, 2):
        done = shell.jackline(*words)
        assert (done.code, done.out) == (4, "1\n"), done
        assert f"run 'mine', attempt {number}:" in done.err, done


def test_a_command_that_never_started_leaves_no_run(shell: Shell) -> None:
    shell.script("train.py", "")
    typo = shell.jackline("run", "--", sys.executable, "trian.py")
    assert (typo.code, typo.err) == (2, "error: there is no file 'trian.py'\nhint: did you mean 'train.py'?\n")
    missing = shell.jackline("run", "--", sys.executable, "-m", "nowhere_at_all")
    assert missing.code == 1
    assert "Python found no module 'nowhere_at_all'" in missing.err
    assert missing.err.endswith("was removed: its command never started\n"), missing.err
    assert list(shell.runs.iterdir()) == []


def test_a_script_that_printed_something_before_a_missing_program_keeps_its_run(shell: Shell) -> None:
    done = shell.jackline("run", "--name", "kept", "--", "bash", "-c", "echo one; echo two; nowhere_at_all")
    assert done.code == 127
    assert shell.run_dir("kept").exit(1)["cause"] == "command_not_found"
