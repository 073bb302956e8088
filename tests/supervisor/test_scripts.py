"""Where a real bash script is: the line of the program that it waits for, read from outside."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from jackline.machine.proc import list_tree, read_command
from jackline.supervisor.stacks.sources import script_frames
from jackline.supervisor.stacks.take import main_hash, sample_stacks
from tests.supervisor.hanging import wait_until

pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
SLEEPS = "sleep 1000"


def frames_of(tmp_path: Path, script: str) -> list[tuple[int, str]]:
    """Line and text of each frame, once the script waits for `sleep`."""
    path = tmp_path / "train.sh"
    path.write_text(script)
    with sleeping(["bash", str(path)]) as pid:
        found = script_frames(pid)
        (stack,) = sample_stacks([pid], stacks_folder=None)
        assert stack.main is not None and stack.main.frames == found
        assert main_hash(stack) == ""  # nobody takes a script that stays in a loop for one that stands still
        assert all(frame.file == str(path) and frame.is_user for frame in found)
        return [(frame.line, frame.source) for frame in found]


@contextlib.contextmanager
def sleeping(command: list[str]) -> Iterator[int]:
    """The pid of a shell that has started `sleep`, or of that itself; everything is ended afterwards."""
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True)
    try:
        wait_until(
            lambda: any(read_command(pid).removeprefix("/bin/") == SLEEPS for pid in list_tree(process.pid)),
            "sleep to start",
        )
        yield process.pid
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.mark.parametrize(
    ("script", "wanted"),
    [
        (f"#!/bin/bash\necho start\n{SLEEPS}\necho end\n", [(3, SLEEPS)]),
        (f"# sleep well\nfor part in 1 2; do\n  {SLEEPS}\ndone\necho end\n", [(3, SLEEPS)]),
        (f"waits() {{\n  {SLEEPS}\n}}\n\nwaits > /dev/null\n", [(2, SLEEPS), (5, "waits > /dev/null")]),
        (f"if true; then\n  # not here: sleep\n  {SLEEPS}\nfi", [(3, SLEEPS)]),
        (f'while true; do\n  /bin/{SLEEPS}\n  echo "time to sleep"\ndone\n', [(2, f"/bin/{SLEEPS}")]),
        ('program=sleep\nslept=1\n"$program" 1000\n', [(3, '"$program" 1000')]),
    ],
    ids=["a line", "a loop", "a function", "a condition", "a text", "a variable"],
)
def test_a_script_is_placed_at_the_program_it_waits_for(
    script: str, wanted: list[tuple[int, str]], tmp_path: Path
) -> None:
    assert frames_of(tmp_path, script) == wanted


def test_a_script_that_was_edited_since_says_nothing(tmp_path: Path) -> None:
    """bash reads on at the same position, so the lines before it are no longer those that it has run."""
    path = tmp_path / "train.sh"
    path.write_text(f"{SLEEPS}\n")
    with sleeping(["bash", str(path)]) as pid:
        assert script_frames(pid)
        os.utime(path, (time.time() + 60,) * 2)
        assert script_frames(pid) == ()
        path.unlink()
        assert script_frames(pid) == ()


def test_other_shells_and_other_processes_say_nothing() -> None:
    for command in (["sh", "-c", f"{SLEEPS}; true"], ["bash", "-c", f"{SLEEPS}; true"], ["sleep", "1000"]):
        with sleeping(command) as pid:
            assert script_frames(pid) == ()


def test_characters_that_write_to_a_screen_are_not_shown(tmp_path: Path) -> None:
    assert frames_of(tmp_path, f"{SLEEPS} # \x1b[31m \x07 x\n") == [(1, f"{SLEEPS} #  [31m   x")]
