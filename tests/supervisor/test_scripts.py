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
from jackline.rundir.access.secrets import without_credentials
from jackline.supervisor.stacks.sources import script_frames
from jackline.supervisor.stacks.take import main_hash, sample_stacks
from tests.supervisor.hanging import wait_until

pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
SLEEPS = "sleep 1000"


def frames_of(tmp_path: Path, script: str) -> list[tuple[int, str]]:
    """Line and text of each frame, once the script waits for `sleep`."""
    path = tmp_path / "train.sh"
    path.write_text(script)
    with sleeping(["bash", str(path)], tmp_path) as pid:
        found = script_frames(pid)
        (stack,) = sample_stacks([pid], stacks_folder=None)
        assert stack.main is not None and stack.main.frames == found
        assert main_hash(stack) == ""  # nobody takes a script that stays in a loop for one that stands still
        assert all(frame.file == str(path) and frame.is_user for frame in found)
        return [(frame.line, frame.source) for frame in found]


@contextlib.contextmanager
def sleeping(command: list[str], folder: Path | None = None) -> Iterator[int]:
    """The pid of a shell that has started `sleep`, or of that itself; everything is ended afterwards."""
    quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL}
    process = subprocess.Popen(command, cwd=folder, start_new_session=True, **quiet)  # type: ignore[call-overload]
    try:
        wait_until(
            lambda: any(read_command(pid).removeprefix("/bin/") == SLEEPS for pid in list_tree(process.pid)),
            "sleep to start",
        )
        yield process.pid
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


SCRIPTS = {
    "a line": (f"#!/bin/bash\necho start\n{SLEEPS}\necho end\n", [(3, SLEEPS)]),
    "a loop": (f"# sleep well\nfor part in 1 2; do\n  {SLEEPS}\ndone\necho end\n", [(3, SLEEPS)]),
    "a function": (f"waits() {{\n  {SLEEPS}\n}}\n\nwaits > /dev/null\n", [(2, SLEEPS), (5, "waits > /dev/null")]),
    "a condition": (f"if true; then\n  # not here: sleep\n  {SLEEPS}\nfi", [(3, SLEEPS)]),
    "a text": (f'while true; do\n  /bin/{SLEEPS}\n  echo "time to sleep"\ndone\n', [(2, f"/bin/{SLEEPS}")]),
    "a variable": ('program=sleep\nslept=1\n"$program" 1000\n', [(3, '"$program" 1000')]),
    "a job in the background": (
        f"sleep 999 > /dev/null &\necho start\nenv A=1 {SLEEPS}\n",
        [(3, f"env A=1 {SLEEPS}")],
    ),
    "a job and a loop": (f"sleep 999 &\nwhile true; do\n  {SLEEPS}\ndone\n", [(3, SLEEPS)]),
    "output to a program": (f"exec > >(cat > /dev/null) 2>&1\n{SLEEPS}\n", [(2, SLEEPS)]),
    "something done before": (f"sleep 0.01\nbash -c '{SLEEPS}; true'\n", [(2, f"bash -c '{SLEEPS}; true'")]),
    "either of two": (f"if true; then\n  {SLEEPS}\nelse\n  sleep 5\nfi\n", [(2, SLEEPS)]),
    "one of two alike": (f"if true; then\n  {SLEEPS}\nelse\n  {SLEEPS}\nfi\n", [(1, "if true; then")]),
    "one of two functions": (
        f"runs() {{\n  {SLEEPS}\n}}\nother() {{\n  sleep 2\n}}\nruns\n",
        [(2, SLEEPS), (7, "runs")],
    ),
    "a function of one line": (
        f"runs() {{ {SLEEPS}; }}\nother() {{\n  true\n  {SLEEPS}\n}}\nruns\n",
        [(1, f"runs() {{ {SLEEPS}; }}"), (6, "runs")],
    ),
    "a continued line": ("timeout \\\n  --foreground 5000 \\\n  sleep 1000\n", [(1, "timeout \\")]),
    "a text of lines": (f"{SLEEPS} << 'EOF'\nsleep well\nEOF\n", [(1, f"{SLEEPS} << 'EOF'")]),
    "a script in Python": (
        "python3 -c 1\nfor part in 1; do\n  ./tool.py --big\ndone\n",
        [(3, "./tool.py --big")],
    ),
}
TOOL = "#!/usr/bin/env python3\nimport subprocess\nsubprocess.run(['sleep', '1000'])\n"


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_is_placed_at_the_program_it_waits_for(name: str, tmp_path: Path) -> None:
    script, wanted = SCRIPTS[name]
    (tmp_path / "tool.py").write_text(TOOL)
    (tmp_path / "tool.py").chmod(0o755)
    assert frames_of(tmp_path, script) == wanted


def test_credentials_of_a_script_are_not_told(tmp_path: Path) -> None:
    line = f"HF_TOKEN=hf_abc API_KEY=xyz env --max-tokens=1 {SLEEPS}"
    ((_, told),) = frames_of(tmp_path, f"HF_TOKEN=hf_abc API_KEY=xyz {SLEEPS} # curl -u me:word 'Bearer abc'\n")
    assert told == f"HF_TOKEN=*** API_KEY=*** {SLEEPS} # curl -u *** 'Bearer ***'"
    assert without_credentials(line) == f"HF_TOKEN=*** API_KEY=*** env --max-tokens=1 {SLEEPS}"


def test_a_script_need_not_be_utf_8(tmp_path: Path) -> None:
    path = tmp_path / "train.sh"
    path.write_bytes(b"for part in 1; do\n  caf\xe9=1\n  \xe9 2> /dev/null\n  sleep 1000\ndone\n")
    with sleeping(["bash", str(path)]) as pid:
        assert [(frame.line, frame.source) for frame in script_frames(pid)] == [(4, SLEEPS)]


def test_a_script_of_one_long_line_costs_nothing(tmp_path: Path) -> None:
    long = "(time " * 30_000
    assert frames_of(tmp_path, f"while true; do\n  : '{long}'\n  {SLEEPS}\ndone\n") == [(3, SLEEPS)]


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
