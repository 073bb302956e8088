"""`jackline stop` says what will really happen to this script, and offers Ctrl-C to one that saves on it."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from jackline.machine.proc import signal_answer
from jackline.rundir.records.stop_request import StopRequest
from jackline.supervisor.attempt.reaction import stop_words
from jackline.supervisor.attempt.stopping import asked_to_stop, next_step
from tests.shell import Shell

pytestmark = pytest.mark.zoo

SAVES_ON_CTRL_C = """
import time
print("ready", flush=True)
try:
    while True:
        time.sleep(0.05)
except KeyboardInterrupt:
    open("saved", "w").close()
    raise SystemExit(0)
"""
HAS_NO_HANDLER = """
import time
print("ready", flush=True)
while True:
    time.sleep(0.05)
"""
SAVES_ON_SIGTERM = """
import signal, sys, time
def save(number, frame):
    open("saved", "w").close()
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
print("ready", flush=True)
while True:
    time.sleep(0.05)
"""


def stop(shell: Shell, text: str, *options: str) -> str:
    live = shell.start("run", "--name", "job", "--", *shell.python("train.py", text))
    live.wait_for("ready", "out")
    done = shell.jackline("stop", "job", *options)
    assert done.code == 0
    live.wait()
    return done.err


def test_a_script_that_handles_only_ctrl_c_gets_that_and_saves(shell: Shell) -> None:
    words = stop(shell, SAVES_ON_CTRL_C)
    assert "(SIGINT because its script handles Ctrl-C and not SIGTERM)" in words
    assert "KeyboardInterrupt" in words
    assert (Path(shell.work) / "saved").exists()


def test_a_script_without_a_handler_is_not_said_to_save(shell: Shell) -> None:
    words = stop(shell, HAS_NO_HANDLER)
    assert "(SIGTERM): it has no handler for SIGTERM, so it ends at once and saves nothing" in words
    assert "asked run 'job' to save" not in words


def test_a_handler_of_its_own_decides(shell: Shell) -> None:
    words = stop(shell, SAVES_ON_SIGTERM)
    assert "it has its own handler for SIGTERM, which decides whether it saves" in words
    assert (Path(shell.work) / "saved").exists()


def test_the_signal_can_be_chosen(shell: Shell) -> None:
    assert "(SIGINT): Python raises KeyboardInterrupt" in stop(shell, HAS_NO_HANDLER, "--signal", "INT")


def test_an_attached_or_a_deaf_script_is_told_apart() -> None:
    assert stop_words("default", signal.SIGTERM, is_attached=True) == "it saves after its current step and ends"
    assert "killed when the grace is over" in stop_words("ignored", signal.SIGTERM, is_attached=False)


def test_the_kernel_is_asked_what_a_process_does_about_a_signal() -> None:
    before = signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    try:
        assert signal_answer(os.getpid(), signal.SIGUSR2) == "ignored"
        signal.signal(signal.SIGUSR2, lambda *_: None)
        assert signal_answer(os.getpid(), signal.SIGUSR2) == "caught"
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert signal_answer(2**22 + 1, signal.SIGTERM) == "unknown"


def test_ctrl_c_comes_first_and_the_rest_follows_by_the_clock() -> None:
    stopping = asked_to_stop(StopRequest(grace_s=10.0, signal=int(signal.SIGINT)), 30.0)
    taken = []
    for second in range(20):
        stopping, step = next_step(stopping, float(second))
        taken += [(second, step.signal, step.target)] if step is not None else []
    assert taken == [(0, signal.SIGINT, "main"), (10, signal.SIGTERM, "group"), (15, signal.SIGKILL, "tree")]
