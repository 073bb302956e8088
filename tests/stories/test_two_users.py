"""Two people on one machine, for real: what one can do with the runs of the other.

Needs root, to become two users, and an interpreter that every user may execute.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from jackline.rundir.process_id import ProcessId, identify
from tests.deadline import HANGS_S
from tests.rundir.made import make_run, write_start, write_state
from tests.shell import wait_for


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """One test after another, whichever worker runs it: each ends all processes of the second user."""
    with open(Path(tempfile.gettempdir(), f"jackline-two-users-{os.getuid()}.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


SRC = Path(__file__).parents[2] / "src"
SECRET = "secret-" + "word"
LOOP = (
    "import pathlib, time\nprint('training', flush=True)\nwhile not pathlib.Path('go').exists(): time.sleep(0.05)\n"
)
ALICE, BOB = 54321, 54322


def find_interpreter() -> str | None:
    """A Python of this version that a user without rights can start."""
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    for path in (sys.executable, f"/usr/bin/{version}", f"/usr/local/bin/{version}"):
        with contextlib.suppress(OSError):
            if subprocess.run([path, "-c", "0"], user=BOB, group=BOB, extra_groups=[], cwd="/").returncode == 0:
                return path
    return None


class Person:
    """A user with a home, a runs folder and a shell."""

    def __init__(self, uid: int, folder: Path, python: str) -> None:
        self.uid, self.home, self.python = uid, folder / str(uid), python
        self.work, self.runs = self.home / "work", self.home / "runs"
        self.work.mkdir(parents=True)
        for path in (self.home, self.work):
            os.chown(path, uid, uid)
            path.chmod(0o755)
        packages = Path(click.__file__).parents[1]
        self.env = {
            "HOME": str(self.home),
            "PATH": "/usr/bin:/bin",
            "JACKLINE_RUNS": str(self.runs),
            "PYTHONPATH": f"{SRC}:{packages}",
            "PYTHONDONTWRITEBYTECODE": "1",
            "TERM": "xterm",
        }

    def does(self, *command: str, **env: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command,
            user=self.uid,
            group=self.uid,
            extra_groups=[],
            cwd=self.work,
            env={**self.env, **env},
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=HANGS_S,
            umask=0o022,
        )

    def jackline(self, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
        done = self.does(self.python, "-m", "jackline", *words, **env)
        assert "Traceback" not in done.stderr, done.stderr
        return done

    def start(self) -> Path:
        """A run in the background that goes on until it is stopped. Its hook and its mirror have a password."""
        words = ("--name", "mine", "--when-done", f"true https://me:{SECRET}@host/", "--mirror-patience", "1s")
        done = self.jackline("run", *words, "--detach", "--", self.python, "-c", LOOP)
        assert done.returncode == 0, done
        return self.runs / "mine"


@pytest.fixture
def people() -> Iterator[tuple[Person, Person]]:
    if os.geteuid() != 0:
        pytest.skip("only root can become two users")
    python = find_interpreter()
    if python is None:
        pytest.skip("no interpreter of this version can be started by other users here")
    folder = Path(tempfile.mkdtemp(prefix="two-users-"))
    folder.chmod(0o755)
    yield Person(ALICE, folder, python), Person(BOB, folder, python)
    for pid in [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]:
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}").stat().st_uid in (ALICE, BOB):
                os.kill(pid, signal.SIGKILL)
    shutil.rmtree(folder, ignore_errors=True)


def process_in(run: Path, name: str) -> ProcessId:
    found = ProcessId.from_json(json.loads((run / "supervisor.json").read_text())[name])
    assert found is not None
    return found


LOOKS = ("status", "why", "logs", "watch", "resume", "stop", "checkpoints list", "report", "events", "validate")
LOOKS += (
    "wait",
    "rescue",
    "fork",
    "plot",
    "goodput",
    "runs rm --yes",
    "send --once --to webhook:http://127.0.0.1:9/",
)


def test_another_user_can_do_nothing_with_a_private_run(people: tuple[Person, Person]) -> None:
    alice, bob = people
    run = alice.start()
    child = process_in(run, "child")
    for words in LOOKS:
        done = bob.jackline(*words.split(), str(run))
        assert done.returncode != 0, (words, done)
        assert "training" not in done.stdout, words
    assert "mine" not in bob.jackline("runs", "--runs-dir", str(alice.runs)).stdout
    assert bob.jackline("why", "--pid", str(child.pid), "--for", "0.2s").returncode != 0
    assert SECRET not in bob.does("ps", "-eo", "args").stdout
    own = [path for path in (*Path("/dev/shm").iterdir(), *Path("/tmp").iterdir()) if path.lstat().st_uid == ALICE]
    assert not [path for path in own if path.stat().st_mode & 0o077]
    assert identify(child.pid) == child
    assert alice.jackline("stop", "mine").returncode == 0
    wait_for(lambda: identify(child.pid) is None, "the end of the run")


def test_a_run_that_is_opened_for_reading_is_read_and_nothing_else(people: tuple[Person, Person]) -> None:
    alice, bob = people
    run = alice.start()
    child, supervisor = process_in(run, "child"), process_in(run, "supervisor")
    wait_for(lambda: "training" in (run / "out.log").read_text(), "its first line")
    subprocess.run(["chmod", "-R", "a+rX", str(run), str(alice.runs)], check=True)
    assert "mine" in bob.jackline("runs", "--runs-dir", str(alice.runs)).stdout
    assert json.loads(bob.jackline("status", str(run), "--json").stdout)["state"] == "alive"
    assert "training" in bob.jackline("logs", str(run)).stdout
    stopped = bob.jackline("stop", str(run))
    assert stopped.returncode == 2
    assert f"error: run 'mine' belongs to user '{ALICE}'" in stopped.stderr
    for words in (
        "runs rm --yes --force",
        "rescue",
        "validate",
        "fork",
        "send --once --to webhook:http://127.0.0.1:9/",
    ):
        assert bob.jackline(*words.split(), str(run)).returncode != 0, words
    assert not [path for path in (run, *run.rglob("*")) if path.lstat().st_uid == BOB]
    os.kill(supervisor.pid, signal.SIGKILL)
    wait_for(lambda: identify(supervisor.pid) is None, "the end of the supervisor")
    for words in (("watch", str(run), "--trust"), ("resume", str(run), "--trust")):
        taken = bob.jackline(*words)
        assert taken.returncode == 2, taken
        assert "cannot be trusted: it belongs to user" in taken.stderr
    assert identify(child.pid) == child
    (alice.work / "go").touch()
    wait_for(lambda: identify(child.pid) is None, "the end of the run")


def test_a_folder_of_another_user_ends_no_process_of_ours(people: tuple[Person, Person]) -> None:
    """Alice names a process of Bob in her run; Bob, who is told that it hangs, stops it."""
    alice, bob = people
    with subprocess.Popen(["sleep", "600"], user=BOB, group=BOB, extra_groups=[]) as innocent:
        try:
            process = identify(innocent.pid)
            assert process is not None
            run = make_run(alice.runs / "trap")
            write_start(run, process)
            write_state(run, process, attempt=1)
            for path in (alice.runs, run.path, *run.path.rglob("*")):
                os.chown(path, ALICE, ALICE)
            subprocess.run(["chmod", "-R", "a+rX", str(alice.runs)], check=True)
            assert bob.jackline("stop", str(run.path)).returncode == 2
            assert json.loads(bob.jackline("status", str(run.path), "--json").stdout)["state"] == "dead"
            assert innocent.poll() is None
        finally:
            innocent.kill()


def test_a_state_folder_that_another_user_prepared_is_not_used(people: tuple[Person, Person]) -> None:
    """For a user without a home it is in /tmp, where everybody can be first."""
    alice, bob = people
    place = Path(f"/tmp/jackline-state-{BOB}")
    if place.exists():
        pytest.skip(f"{place} is there already")
    run = make_run(alice.runs / "theirs")
    try:
        (place / "runs").mkdir(parents=True)
        (place / "runs" / "x.json").write_text(json.dumps({"path": str(run.path), "registered_at_s": 1.0}))
        for path in (place, *place.rglob("*"), alice.runs, run.path, *run.path.rglob("*")):
            os.chown(path, ALICE, ALICE)
            path.chmod(0o777)
        del bob.env["HOME"]
        assert "theirs" not in bob.jackline("runs").stdout
        command = (bob.python, "-c", "print('mine')")
        assert bob.jackline("run", "--name", "own", "--", *command).returncode == 0
        assert sorted(path.name for path in (place / "runs").iterdir()) == ["x.json"]
    finally:
        shutil.rmtree(place, ignore_errors=True)
