"""The live view in a real terminal of 80 and of 120 columns: what a person sees, compared by structure."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.shell import Shell, wait_for
from tests.zoo import JACKLINE

pytestmark = pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed")

# It prints now and then, counts on, and ends when it is told to.
TRAINING = """
import os, time
step = 0
while not os.path.exists("go"):
    step += 1
    if step % 25 == 0:
        print(f"step {step}/100000 loss {3 / step ** 0.3:.4f}", flush=True)
    time.sleep(0.01)
raise ValueError("a long message that does not fit into one line of a terminal with eighty columns, as errors are")
"""
LIVE = re.compile(
    r"\[jackline\] step +[\d,]+/100,000(  +\d+%)?  loss \d\.\d{3,4}(  [\w.]+ \S+)*  [\d.]+/s  eta \w+(  ram [\d.]+M)?"
)


class Terminal:
    """One tmux server of its own, so that nobody else's sessions are touched."""

    def __init__(self, shell: Shell, folder: Path, columns: int) -> None:
        self._tmux = ["tmux", "-S", str(folder / "tmux"), "-f", "/dev/null"]
        self._shell, self.columns = shell, columns

    def type(self, command: str) -> None:
        env = [f"{name}={value}" for name, value in self._shell.env.items()]
        whole = f"cd {shlex.quote(str(self._shell.work))}; {command}; echo ENDED $?; exec cat"
        size = ["-x", str(self.columns), "-y", "50"]
        words = [*self._tmux, "new-session", "-d", *size, "env", *env, "bash", "-c", whole]
        subprocess.run(words, check=True, env=self._shell.env)

    def look(self, *words: str) -> list[str]:
        """The rows that are on the screen, without empty ones."""
        done = subprocess.run([*self._tmux, "capture-pane", "-p", *words], capture_output=True, check=True)
        return [row.rstrip() for row in done.stdout.decode().split("\n") if row.strip()]

    def wait_for(self, state: Callable[[list[str]], bool]) -> list[str]:
        rows: list[str] = []

        def is_there() -> bool:
            rows[:] = self.look()
            return state(rows)

        wait_for(is_there, f"the screen; it has {rows}")
        return rows

    def close(self) -> None:
        subprocess.run([*self._tmux, "kill-server"], capture_output=True)


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    made = Shell(tmp_path / "shell")
    yield made
    made.close()


@pytest.fixture(params=[80, 120])
def terminal(request: pytest.FixtureRequest, shell: Shell, tmp_path: Path) -> Iterator[Terminal]:
    made = Terminal(shell, tmp_path, request.param)
    yield made
    made.close()


def test_a_training_that_prints_has_one_live_line_below_its_own(terminal: Terminal, shell: Shell) -> None:
    script = shell.script("train.py", TRAINING)
    terminal.type(shlex.join([*JACKLINE, "run", "--name", "mine", "--", sys.executable, script]))
    rows = terminal.wait_for(lambda rows: bool(rows) and LIVE.fullmatch(rows[-1]) is not None)
    assert sum("[jackline] step " in row for row in rows) == 1
    assert len(rows[-1]) < terminal.columns
    assert ("ram" in rows[-1]) and (("%" in rows[-1]) or terminal.columns == 80)
    painted = terminal.look("-e")
    assert any(row.startswith("\x1b[32m[jackline] step ") for row in painted), painted

    (shell.work / "go").touch()
    rows = terminal.wait_for(lambda rows: any(row.startswith("ENDED") for row in rows))
    assert rows[-1] == "ENDED 1"
    ours = [row for row in rows if row.startswith("[jackline] ")]
    assert not any("[jackline] step " in row for row in ours)  # the live line is gone, the lines of the end stay
    first = next(row for row in ours if row.startswith("[jackline] error: ValueError: a long message"))
    words = " ".join(row.removeprefix("[jackline]").strip() for row in rows[rows.index(first) :])
    assert "one line of a terminal with eighty columns, as errors are" in words  # broken between words, none lost
    assert any(re.match(r"\x1b\[31m\[jackline\] error: ", row) for row in terminal.look("-e"))


def test_status_and_runs_fit(terminal: Terminal, shell: Shell) -> None:
    name = "a-name-as-long-as-they-get-" + "x" * 40
    ended = shell.jackline(
        "run", "--name", name, "--", sys.executable, shell.script("train.py", "raise SystemExit(3)")
    )
    assert ended.code == 3
    jackline = shlex.join(JACKLINE)
    terminal.type(f"{jackline} runs; echo; {jackline} status {name}")
    rows = terminal.wait_for(lambda rows: any(row.startswith("ENDED") for row in rows))
    assert rows[0].split()[:2] == ["NAME", "STATE"]
    assert rows[1].startswith("a-name-as-long-as-they")
    assert rows[2].startswith(f"{name}: exited with")  # one row for the run, then its status
    plain = shell.jackline("status", name).out
    words = {word for word in plain.split() if re.fullmatch(r"[a-z]+[:,;]?", word)}
    assert {"progress:", "log:", "command:"} & words
    assert words <= {word for row in rows for word in row.split()}  # none is broken
