"""How a run ends when somebody wants it to: Ctrl-C, `stop`, a limit, and what must not be left behind."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import pytest

from jackline.rundir.process_id import read_state
from tests.shell import PATIENCE_S, Shell, is_running, wait_for

pytestmark = pytest.mark.zoo

SAVES_ON_SIGTERM = """
import signal, sys, time
def save(number, frame):
    open("saved", "w").close()
    print("saved", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
print("training", flush=True)
while True:
    time.sleep(0.05)
"""
REPORTS_SIGNALS = """
import signal, time
signal.signal(signal.SIGINT, lambda *_: print("got SIGINT", flush=True))
signal.signal(signal.SIGTERM, lambda *_: print("got SIGTERM", flush=True))
print("training", flush=True)
while True:
    time.sleep(0.05)
"""
WITH_WORKERS = """
import multiprocessing, time
def work(number):
    print("worker up", flush=True)
    time.sleep(1000)
if __name__ == "__main__":
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=work, args=(number,), daemon=True) for number in range(2)]
    for worker in workers:
        worker.start()
    try:
        time.sleep(1000)
    except KeyboardInterrupt:
        print("main saved", flush=True)
        raise SystemExit(0)
"""


def test_ctrl_c_reaches_the_main_process_only(shell: Shell) -> None:
    live = shell.start("run", "--name", "keys", "--", *shell.python("train.py", WITH_WORKERS), surface="pty")
    wait_for(lambda: live.read() or live.text().count("worker up") == 2, "both workers")
    live.press_ctrl_c()
    live.wait_for("main saved")
    live.wait()
    run = shell.run_dir("keys")
    run.wait_until_over()
    own = [line for line in run.log().splitlines() if "[jackline]" not in line]
    assert not [line for line in own if "KeyboardInterrupt" in line]
    assert run.exit()["cause"] == "stopped"
    assert shell.left_over() == []


def test_the_second_ctrl_c_is_sigterm_and_the_third_kills(shell: Shell) -> None:
    live = shell.start("run", "--name", "deaf", "--", *shell.python("train.py", REPORTS_SIGNALS), surface="pty")
    live.wait_for("training")
    live.press_ctrl_c()
    live.wait_for("got SIGINT")
    assert "got SIGTERM" not in live.text()
    live.press_ctrl_c()
    live.wait_for("got SIGTERM")
    live.press_ctrl_c()
    live.wait()
    run = shell.run_dir("deaf")
    run.wait_until_over()
    assert run.exit()["signal"] == signal.SIGKILL
    assert run.exit()["cause"] == "stopped"
    assert shell.left_over() == []


def test_stop_lets_a_script_save_and_end(shell: Shell) -> None:
    live = shell.start("run", "--name", "polite", "--", *shell.python("train.py", SAVES_ON_SIGTERM))
    live.wait_for("training")
    done = shell.jackline("stop", "polite")
    assert done.code == 0, done
    assert (shell.work / "saved").exists()
    assert live.wait() == 75
    run = shell.run_dir("polite")
    assert run.exit()["cause"] == "stopped"
    assert json.loads(shell.jackline("status", "polite", "--json").out)["state"] == "stopped"


WORKER_AND_SAVE = """
import multiprocessing, signal, sys, time
def work(connection):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        connection.send(connection.recv())
if __name__ == "__main__":
    ours, theirs = multiprocessing.Pipe()
    worker = multiprocessing.get_context("fork").Process(target=work, args=(theirs,), daemon=True)
    worker.start()
    open("worker.pid", "w").write(str(worker.pid))
    def save(number, frame):
        ours.send("state")  # a save needs the worker
        open("saved", "w").write(ours.recv())
        worker.kill()  # it ignores SIGTERM, and Python waits for it at the end
        sys.exit(0)
    signal.signal(signal.SIGTERM, save)
    print("training", flush=True)
    while True:
        time.sleep(0.05)
"""


@pytest.mark.parametrize("who", ["main", "worker", "all"])
def test_stop_of_a_paused_run_lets_it_save(shell: Shell, who: str) -> None:
    """Ctrl-Z in another shell, `kill -STOP`, a batch system that suspends jobs: it handles no signal then."""
    live = shell.start("run", "--name", "paused", "--", *shell.python("train.py", WORKER_AND_SAVE))
    live.wait_for("training")
    run = shell.run_dir("paused")
    main, worker = run.child_pid(), int((shell.work / "worker.pid").read_text())
    paused = {"main": [main], "worker": [worker], "all": [main, worker]}[who]
    for pid in paused:
        os.kill(pid, signal.SIGSTOP)
    wait_for(lambda: all(read_state(pid) == "T" for pid in paused), "the pause")
    # The grace is longer than this test may take: a run that is not continued is not killed here, it waits in vain.
    done = shell.jackline("stop", "paused", "--grace", f"{2 * PATIENCE_S:.0f}s")
    assert done.code == 0, done
    assert (shell.work / "saved").read_text() == "state"
    assert live.wait() == 75
    ended = run.exit()
    assert (ended["exit_code"], ended["signal"], ended["child_exit_code"]) == (75, None, 0), "it was killed"
    assert "it was paused: continued process" in run.log()


def test_a_paused_run_is_called_paused_and_neither_stuck_nor_restarted(shell: Shell) -> None:
    text = "import os, time\nprint('training', flush=True)\nwhile not os.path.exists('done'):\n    time.sleep(0.05)"
    options = ("--stuck-after", "1", "--quiet-after", "1", "--restart", "3", "--on-stuck", "restart")
    live = shell.start("run", "--name", "held", *options, "--", *shell.python("train.py", text))
    live.wait_for("training")
    run = shell.run_dir("held")
    os.kill(run.child_pid(), signal.SIGSTOP)

    def verdict() -> dict[str, object]:
        return json.loads((run.path / "supervisor.json").read_text())["verdict"]

    wait_for(lambda: verdict()["kind"] == "PAUSED" and float(str(verdict()["for_s"])) > 4, "a long pause")
    status = shell.jackline("status", "held")
    assert "; paused (SIGSTOP) since " in status.out.splitlines()[0]
    assert f"hint: `kill -CONT {run.child_pid()}` continues it" in status.out
    assert "paused for " in shell.jackline("runs").out
    live.wait_for("paused (SIGSTOP) since ")
    (shell.work / "done").touch()
    os.kill(run.child_pid(), signal.SIGCONT)
    assert live.wait() == 0
    assert "STUCK" not in run.log()
    assert sorted(path.name for path in (run.path / "attempts").iterdir()) == ["001"]


def test_stop_without_a_name_takes_the_only_live_run(shell: Shell) -> None:
    live = shell.start("run", "--", *shell.python("train.py", SAVES_ON_SIGTERM))
    live.wait_for("training")
    assert shell.jackline("stop").code == 0
    assert live.wait() == 75


def test_stop_without_a_name_and_two_live_runs_is_refused(shell: Shell) -> None:
    lives = [shell.start("run", "--name", name, "--", *shell.python(f"{name}.py", SAVES_ON_SIGTERM)) for name in "ab"]
    for live in lives:
        live.wait_for("training")
    done = shell.jackline("stop")
    assert done.code == 2
    assert done.err.startswith("error: 2 runs are alive: ")
    assert "hint: name one: jackline stop " in done.err
    assert all(is_running(shell.run_dir(name).child_pid()) for name in "ab")


def test_a_script_that_ignores_sigterm_ends_after_the_grace(shell: Shell) -> None:
    live = shell.start("run", "--name", "deaf", "--", *shell.python("train.py", REPORTS_SIGNALS))
    live.wait_for("training")
    assert shell.jackline("stop", "deaf", "--grace", "1").code == 0
    live.wait()
    run = shell.run_dir("deaf")
    assert "got SIGTERM" in run.log()
    assert run.exit()["signal"] == signal.SIGKILL
    assert run.exit()["cause"] == "stopped"
    assert shell.left_over() == []


def test_a_daemonised_grandchild_is_ended_with_a_failed_run(shell: Shell) -> None:
    text = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        open("daemon.pid", "w").write(str(os.getpid()))
        time.sleep(1000)
    os._exit(0)
os.wait()
while not (os.path.exists("daemon.pid") and os.path.getsize("daemon.pid")):
    time.sleep(0.01)
raise SystemExit(1)
"""
    assert shell.jackline("run", "--name", "daemon", "--", *shell.python("train.py", text)).code == 1
    pid = int((shell.work / "daemon.pid").read_text())
    assert not is_running(pid)
    assert shell.left_over() == []
    notes = [event["text"] for event in shell.run_dir("daemon").events("note")]
    assert any(note.startswith(f"ended a process that outlived it: pid {pid} ") for note in notes), notes


def test_workers_of_a_killed_main_process_are_ended(shell: Shell) -> None:
    live = shell.start("run", "--name", "headless", "--", *shell.python("train.py", WITH_WORKERS))
    wait_for(lambda: live.read() or live.text().count("worker up") == 2, "both workers")
    os.kill(shell.run_dir("headless").child_pid(), signal.SIGKILL)
    assert live.wait() == 137
    assert shell.left_over() == []
    assert shell.run_dir("headless").exit()["cause"] == "killed_by_someone"


def test_work_left_in_the_background_after_a_good_end_is_watched_on(shell: Shell) -> None:
    """`sh launch.sh` with an `&` in it: the launcher is done, the training is not."""
    script = shell.script(
        "train.py", "import os, time\nwhile not os.path.exists('go'): time.sleep(0.02)\nprint('trained')"
    )
    live = shell.start("run", "--name", "background", "--", "sh", "-c", f"{sys.executable} {script} & echo launched")
    live.wait_for("launched")
    live.wait_for("continues; watching on")
    (shell.work / "go").touch()
    assert live.wait() == 0
    assert "trained" in live.text("out")


def test_the_time_limit_ends_it_politely_and_it_can_go_on(shell: Shell) -> None:
    """SIGTERM is blocked from the start and let in where the script has its handler: the two seconds may be over
    before Python is up, and the signal waits for the script then."""
    text = SAVES_ON_SIGTERM.replace(
        "while True:", "signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})\nwhile True:"
    )
    words = ("run", "--name", "timed", "--time-limit", "2s", "--", *shell.python("train.py", text))
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        done = shell.jackline(*words)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    assert done.code == 75, done
    assert (shell.work / "saved").exists()
    run = shell.run_dir("timed")
    assert run.exit()["cause"] == "time_limit"
    assert json.loads(shell.jackline("status", "timed", "--json").out)["state"] == "stopped"


def test_a_job_of_slurm_is_stopped_before_its_end_and_saved(shell: Shell) -> None:
    """`squeue` says how much is left at the moment it is asked, so that a slow start takes nothing away from it."""
    squeue = shell.work / "squeue"
    squeue.write_text("#!/bin/sh\necho 0:06\n")
    squeue.chmod(0o755)
    shell.env.update(SLURM_JOB_ID="41", PATH=f"{shell.work}:{shell.env['PATH']}")
    shell.env.pop("SLURM_JOB_END_TIME", None)
    text = SAVES_ON_SIGTERM.replace(
        "while True:", "signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})\nwhile True:"
    )
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        done = shell.jackline("run", "--name", "job", "--grace", "10m", "--", *shell.python("train.py", text))
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    assert done.code == 75, done
    assert (shell.work / "saved").exists()
    run = shell.run_dir("job")
    assert run.exit()["cause"] == "time_limit"
    assert run.state()["time_limit"]["source"] == "Slurm"
    said = [event["text"] for event in run.events() if event["event"] == "note"]
    assert any(text.startswith("Slurm ends this job at ") and "so that it can save" in text for text in said), said


def test_a_sigterm_to_the_supervisor_is_a_preemption_and_saves(shell: Shell) -> None:
    live = shell.start("run", "--name", "taken", "--", *shell.python("train.py", SAVES_ON_SIGTERM))
    live.wait_for("training")
    run = shell.run_dir("taken")
    os.kill(run.supervisor_pid(), signal.SIGTERM)
    assert live.wait() == 75
    assert (shell.work / "saved").exists()
    assert run.exit()["cause"] in ("stopped", "preempted")
    assert "SIGTERM to the supervisor" in run.exit()["text"]


def hooked(shell: Shell, tmp_name: str) -> tuple[str, Path]:
    path = shell.work / tmp_name
    return f'echo "$JACKLINE_EVENT:$JACKLINE_RUN:$JACKLINE_EXIT_CODE" >> {path}', path


def test_on_event_is_called_when_it_dies_and_when_done_at_every_end(shell: Shell) -> None:
    on_event, events = hooked(shell, "events")
    when_done, ends = hooked(shell, "ends")
    words = ("--on-event", on_event, "--when-done", when_done)
    code = shell.jackline("run", "--name", "dies", *words, "--", sys.executable, "-c", "1/0").code
    assert code == 1
    shell.run_dir("dies").wait_until_over()
    wait_for(ends.exists, "the --when-done command")
    assert events.read_text() == "crashed:dies:\n"
    assert ends.read_text() == "done:dies:1\n"


def test_on_event_is_called_when_it_is_done(shell: Shell) -> None:
    on_event, events = hooked(shell, "events")
    assert shell.jackline("run", "--name", "good", "--on-event", on_event, "--", "true").code == 0
    wait_for(events.exists, "the --on-event command")
    assert events.read_text() == "done:good:\n"


def test_on_event_is_called_when_it_is_stuck_and_on_stuck_stop_ends_it(shell: Shell) -> None:
    on_event, events = hooked(shell, "events")
    text = "import threading\nprint('training')\nthreading.Event().wait()\n"
    words = ("--stuck-after", "3", "--quiet-after", "1", "--on-stuck", "stop", "--grace", "1", "--on-event", on_event)
    live = shell.start("run", "--name", "stuck", *words, "--", *shell.python("train.py", text))
    live.wait()
    run = shell.run_dir("stuck")
    run.wait_until_over()
    assert events.read_text().splitlines()[0] == "stuck:stuck:"
    assert run.exit()["cause"] in ("stuck", "stopped")
    assert "train.py:3" in run.exit()["text"] + "".join(event["text"] for event in run.events("stuck"))
    assert list(run.path.glob("attempts/001/incident-*.txt"))


def test_a_broken_hook_does_not_harm_the_run(shell: Shell) -> None:
    done = shell.jackline("run", "--on-event", "exit 7", "--when-done", "no-such-command-anywhere", "--", "true")
    assert done.code == 0, done


@pytest.mark.parametrize(("handler", "code"), [("", 143), ("signal.signal(signal.SIGUSR1, save)", 7)])
def test_slurms_warning_ends_a_run_unless_its_script_handles_it(shell: Shell, handler: str, code: int) -> None:
    source = "import signal, sys, time\ndef save(*_):\n    print('saved by itself')\n    sys.exit(7)\n"
    source += f"{handler}\nprint('ready', flush=True)\ntime.sleep(1000)\n"
    shell.env["SLURM_JOB_ID"] = "5"
    live = shell.start("run", "--name", "job", "--", *shell.python("train.py", source))
    live.wait_for("ready")
    state = json.loads((shell.run_dir("job").path / "supervisor.json").read_text())
    pids = [live.pid, *(state[word]["pid"] for word in ("supervisor", "keeper", "child"))]
    for pid in pids if handler else pids[:3]:  # Slurm signals every process of the job
        os.kill(pid, signal.SIGUSR1)
    assert live.wait() == code
    assert ("stopped by SIGUSR1" in live.text("err")) == (not handler)
    assert ("saved by itself" in live.text("out")) == bool(handler)
