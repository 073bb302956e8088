"""How a command ended is known, whichever of the processes around it were killed before."""

from __future__ import annotations

import json
import os
import signal
import time

import pytest

from jackline.rundir.process_id import identify
from tests.shell import Shell, wait_for

ENDS = {
    "raise ValueError('no')": (1, "own_exception"),
    "sys.exit(3)": (3, "exit_code"),
    "os.kill(os.getpid(), 11)": (139, "segfault"),
}
SCRIPT = """
import os, pathlib, sys, time
print("training", flush=True)
while not pathlib.Path("go").exists():
    time.sleep(0.02)
{end}
"""


KILLED = ((), ("keeper",), ("supervisor",), ("supervisor", "keeper"))
FIRST = next(iter(ENDS))


@pytest.mark.parametrize(
    ("end", "killed"),
    [
        pytest.param(end, killed, marks=() if end == FIRST and killed else pytest.mark.slow)
        for end in ENDS
        for killed in KILLED
    ],
)
def test_how_it_ended_is_known_whoever_was_killed(shell: Shell, end: str, killed: tuple[str, ...]) -> None:
    command = shell.python("train.py", SCRIPT.format(end=end))
    assert shell.jackline("run", "--name", "mine", "--detach", "--", *command).code == 0
    wait_for(lambda: "training" in (shell.runs / "mine" / "out.log").read_text(), "its first line")
    state = shell.run_dir("mine").state()
    for name in killed:
        os.kill(state[name]["pid"], signal.SIGKILL)
        wait_for(lambda name=name: identify(state[name]["pid"]) is None, f"the end of the {name}")  # type: ignore[misc]
    began_s = time.time()
    (shell.work / "go").touch()
    wait_for(lambda: identify(state["child"]["pid"]) is None, "the end of the command")
    if "supervisor" in killed:
        shell.jackline("watch", "mine")
    wait_for(lambda: (shell.runs / "mine" / "attempts" / "001" / "exit.json").exists(), "the record of the end")
    found = json.loads(shell.jackline("status", "mine", "--json").out)
    code, cause = ENDS[end]
    is_unseen = len(killed) == 2 and end == "sys.exit(3)"  # nothing but its parent could know that number
    assert found["cause"] == ("unknown" if is_unseen else cause), found["explanation"]
    if len(killed) < 2:
        assert found["exit_code"] == code
    else:
        assert "nobody saw" in found["explanation"]
    ended = shell.run_dir("mine").exit()["ended_at_s"]
    first = state["started_at_s"] if len(killed) == 2 else began_s - 1
    assert first <= ended <= time.time()
    assert not shell.left_over()
