"""A coding agent starts a run, its session ends, and it follows the run to the end with few and short calls."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from typing import Any

import pytest

from jackline.cli.commands.stop import SCHEMA as STOP_SCHEMA
from jackline.cli.programs.events import SCHEMA as EVENT_SCHEMA
from jackline.cli.programs.started import SCHEMA as START_SCHEMA
from jackline.cli.programs.verdict import SCHEMA as WAIT_SCHEMA
from tests.docs.json_reference import check_answer
from tests.shell import Done, Shell, is_running
from tests.zoo import JACKLINE

pytestmark = pytest.mark.zoo

COUNTS = """
import os, sys, time
number = 0
while not os.path.exists("go"):
    number += 1
    print(f"step {number}/100000", flush=True)
    time.sleep(0.05)
sys.exit(int(sys.argv[1]))
"""
# What a tool of an agent does: run a shell command, collect its output until both pipes are closed, print it.
AGENT = """
import subprocess, sys
done = subprocess.run(sys.argv[1:], capture_output=True)
sys.stdout.buffer.write(done.stdout)
sys.stdout.flush()
sys.stdin.read()
"""


def answer(done: Done, schema: str) -> dict[str, Any]:
    lines = done.out.splitlines()
    assert len(lines) == 1, done
    found: dict[str, Any] = json.loads(lines[0])
    check_answer(schema, found)
    return found


def test_a_run_survives_the_agents_session_and_is_followed_with_four_short_calls(shell: Shell) -> None:
    start = [*JACKLINE, "run", "--detach", "--json", "--", *shell.python("train.py", COUNTS, "0")]
    agent = subprocess.Popen(
        [sys.executable, "-c", AGENT, *start],
        cwd=shell.work, env=shell.env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    assert agent.stdout is not None and agent.stdin is not None
    said = agent.stdout.readline().decode()
    started = json.loads(said)
    check_answer(START_SCHEMA, started)
    assert started["state"] == "started"
    os.killpg(agent.pid, signal.SIGKILL)  # the session ends, and everything in it
    agent.wait()
    agent.stdin.close()
    agent.stdout.close()

    first = shell.jackline("wait", started["run"], "--until", "ended,stuck,step=5")
    found = answer(first, WAIT_SCHEMA)
    assert (first.code, found["met"], found["state"]) == (0, "step=5", "alive")
    assert found["step"] >= 5 and found["total"] == 100000
    assert is_running(shell.run_dir(started["run"]).child_pid())

    late = shell.jackline("wait", started["run"], "--timeout", "0s")
    assert (late.code, answer(late, WAIT_SCHEMA)["is_timeout"]) == (124, True)

    (shell.work / "go").touch()
    last = shell.jackline("wait", started["run"], "--until", "ended,stuck", "--timeout", "1h")
    found = answer(last, WAIT_SCHEMA)
    assert (last.code, found["met"], found["exit_code"], found["cause"]) == (0, "ended", 0, "finished")
    size = sum(len(text.encode()) for done in (first, late, last) for text in (done.out, done.err))
    assert len(said.encode()) + size <= 4096  # four calls in all


def test_starting_it_again_starts_nothing(shell: Shell) -> None:
    command = ["run", "--detach", "--json", "--name", "again", "--", *shell.python("train.py", COUNTS, "0")]
    assert answer(shell.jackline(*command), START_SCHEMA)["state"] == "started"
    assert answer(shell.jackline(*command), START_SCHEMA)["state"] == "alive"
    (shell.work / "go").touch()
    assert shell.jackline("wait", "again").code == 0
    done = shell.jackline(*command)
    assert (done.code, answer(done, START_SCHEMA)["state"]) == (2, "finished")


def test_a_crash_and_a_stop_have_their_own_codes(shell: Shell) -> None:
    crash = shell.python("crash.py", "raise ValueError('no such column')\n")
    shell.jackline("run", "--detach", "--json", "--name", "crash", "--", *crash)
    done = shell.jackline("wait", "crash", "--until", "step=100")
    found = answer(done, WAIT_SCHEMA)
    assert (done.code, found["met"], found["state"], found["cause"]) == (1, None, "dead", "own_exception")
    assert found["text"] == "ValueError: no such column (crash.py:1)"
    assert found["hint"] and found["next"] == "jackline why crash"

    shell.jackline("run", "--detach", "--json", "--name", "ended", "--", *shell.python("train.py", COUNTS, "0"))
    stopped = shell.jackline("stop", "ended", "--json")
    found = answer(stopped, STOP_SCHEMA)
    assert (stopped.code, stopped.err, found["has_ended"], found["state"]) == (0, "", True, "stopped")
    assert found["next"] == "jackline resume ended --detach --json" and "SIGTERM" in found["text"]
    done = shell.jackline("wait", "ended")
    assert (done.code, answer(done, WAIT_SCHEMA)["state"]) == (75, "stopped")


def test_a_hang_ends_the_wait(shell: Shell) -> None:
    script = "import threading\nlock = threading.Lock()\nlock.acquire()\nprint('once', flush=True)\nlock.acquire()\n"
    run = ["run", "--detach", "--json", "--name", "hang", "--quiet-after", "0.5", "--stuck-after", "2", "--"]
    shell.jackline(*run, *shell.python("hang.py", script))
    done = shell.jackline("wait", "hang")
    found = answer(done, WAIT_SCHEMA)
    assert (done.code, found["met"], found["verdict"]) == (3, "stuck", "STUCK")
    assert "hang.py:5" in found["text"] and found["next"] == "jackline why hang"


def test_events_are_followed_to_the_end_and_read_on_from_a_cursor(shell: Shell) -> None:
    shell.jackline("run", "--detach", "--json", "--name", "told", "--", *shell.python("train.py", COUNTS, "3"))
    live = shell.start("events", "told", "-f", "--json")
    live.wait_for('"event":"started"', "out")
    cursor = json.loads(live.text("out").splitlines()[0])["cursor"]
    (shell.work / "go").touch()
    assert live.wait() == 0
    followed = [json.loads(line) for line in live.text("out").splitlines()]
    for event in followed:
        check_answer(EVENT_SCHEMA, event)
    assert (followed[0]["event"], followed[-1]["event"]) == ("started", "died")
    newer = shell.jackline("events", "told", "--json", "--since", cursor)
    assert [json.loads(line) for line in newer.out.splitlines()] == followed[1:]


def test_json_of_a_start_needs_detach(shell: Shell) -> None:
    done = shell.jackline("run", "--json", "--", "true")
    assert (done.code, done.out, done.err) == (
        2,
        "",
        "error: --json goes with --detach: else stdout holds what your command prints\n"
        "hint: add --detach; for a run in the foreground: `jackline status --json` from another shell\n",
    )
    assert not list(shell.runs.glob("*"))
