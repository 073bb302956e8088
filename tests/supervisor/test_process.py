"""The keeper starts a command, knows how it ended, and leaves no debris: with real processes."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from jackline.checkpoint.mirror.upload import mirror_command
from jackline.checkpoint.staging.writer_process import default_command
from jackline.errors import JacklineError
from jackline.rundir.layout import AttemptDir, RunDir
from jackline.rundir.lock import RunLock
from jackline.rundir.process_id import is_alive, read_state
from jackline.supervisor.child import keeper, process
from jackline.supervisor.child.process import Command, CommandNotStarted, Ending, adopt_command, start_command
from jackline.supervisor.options import SuperviseOptions
from tests.deadline import HANGS_S
from tests.places import Unavailable, fill_bytes, fill_inodes, kept_full, read_only, small_disk


def wait_for(what: Callable[[], object], deadline_s: float = HANGS_S) -> object:
    until_s = time.monotonic() + deadline_s
    while time.monotonic() < until_s:
        found = what()
        if found:
            return found
        time.sleep(0.02)
    raise AssertionError(f"{what} did not come true within {deadline_s} s")


@pytest.fixture
def attempt(tmp_path: Path) -> AttemptDir:
    attempt = RunDir(tmp_path / "run").attempt(1)
    attempt.path.mkdir(parents=True)
    return attempt


def start(attempt: AttemptDir, code: str, **options: object) -> Command:
    return start_command(
        attempt,
        [sys.executable, "-c", code],
        cwd=str(attempt.path),
        env=dict(os.environ),
        options=SuperviseOptions(**options),  # type: ignore[arg-type]
    )


def ending_of(command: Command) -> Ending:
    ending = wait_for(command.ending)
    assert isinstance(ending, Ending)
    wait_for(command.is_settled)
    return command.ending() or ending


def test_the_exit_code_and_the_output_are_kept(attempt: AttemptDir) -> None:
    ending = ending_of(start(attempt, "import sys; print('out'); print('err', file=sys.stderr); sys.exit(7)"))
    assert (ending.exit_code, ending.signal) == (7, None)
    assert sorted(attempt.raw_out.read_text().split()) == ["err", "out"]


LEAVES_A_WORKER = """
import os, signal, sys, time
if os.fork() == 0:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    open("worker.tmp", "w").write(str(os.getpid())); os.rename("worker.tmp", "worker")
time.sleep(600)
"""


@pytest.mark.parametrize("who", [("keeper", "main"), ("main", "keeper")])
def test_workers_of_a_killed_command_are_ended_though_its_keeper_was_killed(
    attempt: AttemptDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, who: tuple[str, ...]
) -> None:
    monkeypatch.setattr(process, "SURVIVORS_MAY_SAVE_S", 0.5)
    monkeypatch.setenv("JACKLINE_RUN_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("JACKLINE_ATTEMPT", "1")
    command = start(attempt, LEAVES_A_WORKER)
    worker = int(str(wait_for(lambda: (attempt.path / "worker").exists() and (attempt.path / "worker").read_text())))
    other = subprocess.Popen(["sleep", "600"], env={**os.environ, "JACKLINE_ATTEMPT": "2"})
    try:
        assert command.end_survivors() == [], "the command is alive"
        for name in who:
            os.kill(command.keeper.pid if name == "keeper" else command.child.pid, signal.SIGKILL)
        wait_for(lambda: command.is_settled())
        found = command.end_survivors()
        # A process that was killed loses its environment, by which it is found, a moment before it is gone.
        wait_for(lambda: read_state(worker) in ("", "Z"))
        assert found in ([worker], []), "a keeper that was killed last may have ended the worker itself"
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


STARTS_ONE = """
import os, sys
from pathlib import Path
from jackline.rundir.layout import RunDir
from jackline.rundir.lock import RunLock
from jackline.supervisor.child.process import start_command
from jackline.supervisor.options import SuperviseOptions
run = RunDir(Path(sys.argv[1]))
lock = RunLock(run.lock)
assert lock.try_acquire()
argv = ["sh", "-c", "echo $$ > pid.tmp; mv pid.tmp pid; exec sleep 600"]
place = str(run.attempt(1).path)
start_command(
    run.attempt(1), argv, cwd=place, env=dict(os.environ), options=SuperviseOptions(), lock_fd=lock.fd
)
"""


def test_a_supervisor_killed_before_start_json_leaves_the_lock_to_the_keeper(attempt: AttemptDir) -> None:
    """Else the next start would see neither a supervisor nor a command, and start a second training."""
    run = RunDir(attempt.path.parents[1])
    held, reserved = Path(f"{attempt.start_file}.tmp"), Path(f"{attempt.wait_file}.tmp")
    os.mkfifo(held)
    os.mkfifo(reserved)
    supervisor = subprocess.Popen([sys.executable, "-c", STARTS_ONE, str(run.path)])
    held.read_bytes()  # the reserved blocks; the next opening to write waits for a reader, before start.json
    reserved.read_bytes()  # opened only now, so that the reader above is gone before the command is started
    reserved.unlink()
    child = int(str(wait_for(lambda: (attempt.path / "pid").exists() and (attempt.path / "pid").read_text())))
    supervisor.kill()
    supervisor.wait()
    try:
        lock = RunLock(run.lock)
        assert not attempt.start_file.exists()
        assert not lock.try_acquire()
        held.read_bytes()  # the keeper goes on
        assert wait_for(lock.try_acquire)
        lock.release()
    finally:
        os.kill(child, signal.SIGKILL)
        with contextlib.suppress(OSError):  # after a failure the keeper still waits for a reader
            os.close(os.open(held, os.O_RDONLY | os.O_NONBLOCK))


def test_split_streams_go_to_two_files(attempt: AttemptDir) -> None:
    ending_of(start(attempt, "import sys; print('out'); print('err', file=sys.stderr)", split_streams=True))
    assert (attempt.raw_out.read_text(), attempt.raw_err.read_text()) == ("out\n", "err\n")


def test_a_signal_is_told_from_an_exit_code(attempt: AttemptDir) -> None:
    command = start(attempt, "import time; time.sleep(600)")
    os.kill(command.child.pid, signal.SIGKILL)
    ending = ending_of(command)
    assert (ending.exit_code, ending.signal) == (None, signal.SIGKILL)


def test_the_command_has_default_signals_and_its_own_session(attempt: AttemptDir) -> None:
    code = (
        "import os, signal\n"
        "print(os.getsid(0) == os.getpid(), signal.getsignal(signal.SIGTERM) == signal.SIG_DFL,\n"
        "      signal.getsignal(signal.SIGHUP) == signal.SIG_DFL)"
    )
    ending_of(start(attempt, code))
    assert attempt.raw_out.read_text() == "True True True\n"


def test_a_program_that_cannot_be_executed_is_an_error_with_the_kernels_word(attempt: AttemptDir) -> None:
    script = attempt.path / "not-a-program"
    script.write_bytes(b"\x7fELF garbage")
    script.chmod(0o755)
    with pytest.raises(CommandNotStarted) as caught:
        start_command(attempt, [str(script)], cwd="/", env=dict(os.environ), options=SuperviseOptions())
    assert caught.value.errno == errno.ENOEXEC
    assert "Exec format error" in str(caught.value)


def test_workers_that_outlive_a_killed_command_are_ended(attempt: AttemptDir) -> None:
    code = (
        "import os, time\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    os.setsid(); time.sleep(600)\n"
        "open('worker', 'w').write(str(pid)); time.sleep(600)"
    )
    command = start(attempt, code)
    worker = int(str(wait_for(lambda: (attempt.path / "worker").exists() and (attempt.path / "worker").read_text())))
    os.kill(command.child.pid, signal.SIGKILL)
    ending = ending_of(command)
    assert [orphan["pid"] for orphan in ending.orphans] == [worker]
    assert not os.path.exists(f"/proc/{worker}")


# Stand-ins with the command lines of our own processes: each works until a file says that its work is done.
SAVING = """
import os, subprocess, sys, time
work = "import os, sys, time\\nwhile not os.path.exists(sys.argv[1]): time.sleep(0.02)\\n"
work += "open(sys.argv[2], 'w').close()"
for part, module in (("writer", "WRITER"), ("mirror", "MIRROR")):
    words = [f"may-{part}", f"{part}-done", "-m", module]
    process = subprocess.Popen([sys.executable, "-c", work, *words], start_new_session=True)
    open(f"{part}.tmp", "w").write(str(process.pid))
    os.rename(f"{part}.tmp", part)
time.sleep(600)
"""


def test_a_save_and_an_upload_under_way_outlive_a_killed_command(attempt: AttemptDir) -> None:
    """They were ended like debris: a save of more than twelve seconds and a slow last upload were lost.

    Waits for the end of everything else, which the keeper tells by being gone; nothing here depends on how long
    a save or an upload takes."""
    command = start(attempt, SAVING.replace("WRITER", keeper.WRITER).replace("MIRROR", keeper.MIRROR))
    writer, mirror = (
        int(str(wait_for(lambda part=part: (attempt.path / part).exists() and (attempt.path / part).read_text())))
        for part in ("writer", "mirror")
    )
    command.send(signal.SIGKILL, "tree")
    ending = wait_for(command.ending)
    assert isinstance(ending, Ending) and ending.signal == signal.SIGKILL
    assert not command.is_settled(), "the next attempt resumes from what is being saved"
    (attempt.path / "may-writer").touch()
    wait_for(command.is_settled)
    last = command.ending()
    assert last is not None and last.orphans == ()
    assert (attempt.path / "writer-done").exists() and not os.path.exists(f"/proc/{writer}")
    assert os.path.exists(f"/proc/{mirror}"), "an upload takes as long as it takes, and nobody waits for it"
    (attempt.path / "may-mirror").touch()
    wait_for((attempt.path / "mirror-done").exists)


def test_the_keeper_knows_its_own_by_the_commands_they_are_started_with() -> None:
    """It imports nothing of ours, so it has the names by heart."""
    for command, module in ((default_command(), keeper.WRITER), (mirror_command(), keeper.MIRROR)):
        assert command[command.index("-m") + 1] == module


def test_work_left_in_the_background_by_a_command_that_ended_well_continues(attempt: AttemptDir) -> None:
    code = (
        "import os, time\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    os.setsid()\n"
        "    while not os.path.exists('go'): time.sleep(0.05)\n"
        "    print('worked in the background')\n"
        "else: os._exit(0)"
    )
    command = start(attempt, code)
    ending = wait_for(command.ending)
    assert isinstance(ending, Ending) and ending.exit_code == 0
    assert is_alive(command.keeper) and not command.is_settled()
    (attempt.path / "go").touch()
    wait_for(command.is_settled)
    assert attempt.raw_out.read_text() == "worked in the background\n"


def test_another_process_can_adopt_the_command_and_learn_its_exit_code(attempt: AttemptDir) -> None:
    own = start(attempt, "import os, time\nwhile not os.path.exists('go'): time.sleep(0.05)\nos._exit(9)")
    adopted = adopt_command(attempt)
    assert adopted is not None and adopted.ending() is None
    (attempt.path / "go").touch()
    assert ending_of(adopted).exit_code == 9
    wait_for(own.is_settled)


def test_a_terminal_is_given_on_request_and_takes_keys_from_a_fifo(attempt: AttemptDir) -> None:
    code = (
        "import sys, os; print(os.isatty(0), os.isatty(1), os.get_terminal_size()[0]); print('got', input('name? '))"
    )
    command = start(attempt, code, tty=True, columns=100)
    wait_for(lambda: "name? " in attempt.raw_out.read_text())
    with open(attempt.keyboard, "w") as keyboard:
        keyboard.write("anne\n")
    assert ending_of(command).exit_code == 0
    assert attempt.raw_out.read_text() == "True True 100\nname? got anne\n"


def test_when_the_keeper_is_killed_the_end_is_still_noticed(attempt: AttemptDir) -> None:
    command = start(attempt, "import os, time\nwhile not os.path.exists('go'): time.sleep(0.05)")
    os.kill(command.keeper.pid, signal.SIGKILL)
    wait_for(lambda: not is_alive(command.keeper))
    assert command.ending() is None
    (attempt.path / "go").touch()
    ending = wait_for(command.ending)
    assert isinstance(ending, Ending)
    # Whoever was not the parent cannot know the code: it says so instead of inventing one.
    assert (ending.exit_code, ending.signal) == (None, None)
    wait_for(command.is_settled)


WAITS = "import os, sys, time\nwhile not os.path.exists(sys.argv[1]): time.sleep(0.01)\nsys.exit(3)"


def start_on_small_disk(attempt: AttemptDir, go: Path, stack: contextlib.ExitStack) -> Command:
    """A command that ends with code 3 when `go` exists, and whose attempt is on a disk of its own."""
    try:
        stack.enter_context(small_disk(attempt.path, "1M", inodes=50))
    except Unavailable as reason:
        pytest.skip(str(reason))
    words = [sys.executable, "-c", WAITS, str(go)]
    return start_command(attempt, words, cwd="/", env=dict(os.environ), options=SuperviseOptions())


def test_the_exit_code_is_known_on_a_disk_that_is_full_at_the_end(attempt: AttemptDir, tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        command = start_on_small_disk(attempt, tmp_path / "go", stack)
        stack.enter_context(kept_full(attempt.path, fill_bytes))
        stack.enter_context(kept_full(attempt.path, fill_inodes))
        (tmp_path / "go").touch()
        assert ending_of(command).exit_code == 3
        adopted = adopt_command(attempt)  # by a supervisor that did not start it: from the file alone
        assert adopted is not None and ending_of(adopted).exit_code == 3


def test_the_exit_code_is_known_on_a_disk_that_is_read_only_at_the_end(attempt: AttemptDir, tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        command = start_on_small_disk(attempt, tmp_path / "go", stack)
        stack.enter_context(read_only(attempt.path))
        (tmp_path / "go").touch()
        assert ending_of(command).exit_code == 3
        assert not attempt.wait_file.exists()


def test_a_keeper_that_finds_no_room_starts_nothing_and_says_why(attempt: AttemptDir, tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(small_disk(attempt.path, "1M"))
        except Unavailable as reason:
            pytest.skip(str(reason))
        fill_bytes(attempt.path)
        with pytest.raises(JacklineError) as caught:
            start(attempt, f"open({str(tmp_path / 'started')!r}, 'w').close()")
        assert caught.value.message == f"cannot write to {attempt.path}: the disk is full"
        assert not (tmp_path / "started").exists()
