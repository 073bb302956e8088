"""A disk that is full, out of inodes or read-only while a command runs: its end is known, commands still work."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.places import Unavailable, fill_bytes, fill_inodes, kept_full, make_room, read_only, small_disk
from tests.shell import Shell, wait_for

pytestmark = pytest.mark.zoo

# Waits to be told, so that the disk is full or read-only at this very moment.
WAITS = """
import os, sys, time
print("up", flush=True)
while not os.path.exists(sys.argv[1]): time.sleep(0.01)
sys.exit(int(sys.argv[2]))
"""


@pytest.fixture
def disk(shell: Shell) -> Iterator[Path]:
    shell.runs.mkdir(parents=True, exist_ok=True)
    try:
        with small_disk(shell.runs, "60M", inodes=200) as path:
            yield path
    except Unavailable as reason:
        pytest.skip(str(reason))


def start(shell: Shell, code: int = 3) -> Path:
    """A command under way, detached; returns the file that lets it end."""
    go = shell.work / "go"
    done = shell.jackline(
        "run", "--name", "x", "--detach", "--", *shell.python("waits.py", WAITS, str(go), str(code))
    )
    assert done.code == 0, done
    log = shell.runs / "x" / "out.log"
    wait_for(lambda: log.exists() and "up" in log.read_text(), "its first line in the log")
    return go


def works(shell: Shell, *words: str, code: int = 0) -> str:
    done = shell.jackline(*words)
    assert "Traceback" not in done.out + done.err, done
    assert done.code == code, done
    return done.out + done.err


def ended(shell: Shell) -> None:
    wait_for(lambda: not shell.left_over(), "all processes of the run to end")


@pytest.mark.parametrize("fill", [fill_bytes, fill_inodes])
def test_a_command_that_ends_on_a_full_disk_has_its_exit_code(
    shell: Shell, disk: Path, fill: Callable[[Path], None]
) -> None:
    go = start(shell)
    with kept_full(disk, fill):
        go.touch()
        ended(shell)
        assert "exit code 3" in works(shell, "why", "x")
        assert "exited with code 3" in works(shell, "status", "x")
        assert "exited with code 3" in works(shell, "runs")
        assert "up" in works(shell, "logs", "x")
        refusal = works(shell, "resume", "x", code=1)
    assert "the disk is full" in refusal or "no inodes left" in refusal, refusal
    make_room(disk)
    assert works(shell, "resume", "x", code=3)


def test_a_command_that_ends_on_a_read_only_disk_keeps_no_process_and_breaks_no_command(
    shell: Shell, disk: Path
) -> None:
    go = start(shell)
    with read_only(disk):
        go.touch()
        ended(shell)
        for words in (("status", "x"), ("why", "x"), ("runs",), ("logs", "x")):
            works(shell, *words)
        assert "read-only" in works(shell, "resume", "x", code=1)
    assert works(shell, "resume", "x", code=3)


@pytest.mark.parametrize("how", ["full", "read-only"])
def test_stop_ends_a_run_although_nothing_can_be_written(shell: Shell, disk: Path, how: str) -> None:
    start(shell)
    with contextlib.ExitStack() as stack:
        if how == "full":
            stack.enter_context(kept_full(disk, fill_bytes))
            stack.enter_context(kept_full(disk, fill_inodes))
        else:
            stack.enter_context(read_only(disk))
        said = works(shell, "stop", "x", "--grace", "5s")
        assert "has ended" in said
        ended(shell)
        works(shell, "status", "x")
    if how == "full":
        assert "`jackline stop`" in works(shell, "why", "x")


def test_a_new_command_on_a_full_disk_is_refused_with_the_cause_and_never_starts(shell: Shell, disk: Path) -> None:
    fill_bytes(disk)
    said = works(shell, "run", "--name", "y", "--", "touch", str(shell.work / "started"), code=2)
    assert "No space left on device" in said or "the disk is full" in said
    assert not (shell.work / "started").exists()
    assert [path.name for path in disk.iterdir()] == ["ballast"]
