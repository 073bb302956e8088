"""The writer process and its lock: deaths, orphans, second writers."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import jackline.checkpoint
from jackline.checkpoint.format.catalogue import LOCK, STATUS, list_names, read_notes
from jackline.checkpoint.format.manifest import Name
from jackline.checkpoint.format.verify import verify_checkpoint
from jackline.checkpoint.writer.disk import Disk
from jackline.checkpoint.writer.lock import Orphan, read_holder, read_work, treat_orphan
from jackline.checkpoint.writer.retention import Keep
from jackline.checkpoint.writer.serve import Options
from jackline.checkpoint.writer.upkeep import Upkeep
from jackline.checkpoint.writer.wire import Channel, Closed
from jackline.machine.disk import used_bytes
from jackline.rundir.process_id import is_alive
from tests.checkpoint.faults import kill_at, stop_at
from tests.checkpoint.light_trainer import LightTrainer, is_right, newest_whole, state_json
from tests.deadline import HANGS_S

HERE = Path(__file__).parent
SIZE = 50_000
FAULTY = (sys.executable, str(HERE / "faulty_writer.py"))

# A trainer that stages one state, says so, and then waits to be killed.
STAGES_AND_WAITS = f"""
import sys, time
sys.path.insert(0, {str(HERE.parents[1])!r})
from pathlib import Path
from tests.checkpoint.light_trainer import LightTrainer, state_json
trainer = LightTrainer(Path(sys.argv[1]), {SIZE}, tuple(sys.argv[2:]))
trainer.wait_for("ready")
trainer.writer.send(trainer.stage(1), state_json(1))
print("staged", trainer.writer.pid, flush=True)
time.sleep(600)
"""


def wait_until(is_so: Callable[[], object], what: str, timeout_s: float = HANGS_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < deadline, f"waited in vain for: {what}"
        time.sleep(0.005)


def wait_until_stopped(pid: int) -> None:
    """The fault says that it fires a moment before it does, and a SIGCONT must not come in between."""
    wait_until(lambda: read_work(pid)[1], "the writer to stop in its first write")


@pytest.fixture
def orphans() -> Iterator[list[int]]:
    """Writers that a test may leave behind."""
    pids: list[int] = []
    yield pids
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def start_and_stage(folder: Path, *writer: str) -> tuple[subprocess.Popen[str], int]:
    process = subprocess.Popen(
        [sys.executable, "-c", STAGES_AND_WAITS, str(folder), *writer], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    pid = int(process.stdout.readline().split()[1])
    process.stdout.close()
    return process, pid


def test_a_trainer_killed_after_staging_has_its_save_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, orphans: list[int]
) -> None:
    """The writer hangs in its first write until the trainer is surely dead, then continues."""
    fired = tmp_path / "fired"
    monkeypatch.setenv("FAULT", stop_at(1, call="write", fired=str(fired)).to_json())
    trainer, writer = start_and_stage(tmp_path / "c", *FAULTY)
    orphans.append(writer)
    wait_until_stopped(writer)
    trainer.kill()
    trainer.wait()
    assert list_names(tmp_path / "c") == []
    os.kill(writer, signal.SIGCONT)
    wait_until(lambda: list_names(tmp_path / "c") == [Name(1)], "the orphan to commit")
    wait_until(lambda: not Path(f"/proc/{writer}").exists(), "the orphan to end by itself")
    assert is_right(tmp_path / "c" / "step-00000001", 1, SIZE)


def test_the_next_attempt_waits_for_the_orphan_and_wakes_a_stopped_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, orphans: list[int]
) -> None:
    fired = tmp_path / "fired"
    monkeypatch.setenv("FAULT", stop_at(1, call="write", fired=str(fired)).to_json())
    trainer, writer = start_and_stage(tmp_path / "c", *FAULTY)
    orphans.append(writer)
    wait_until_stopped(writer)
    trainer.kill()
    trainer.wait()
    following = LightTrainer(tmp_path / "c", SIZE)
    assert following.wait_for("ready") is not None
    assert following.reports[0]["event"] == "waiting" and following.reports[0]["pid"] == writer
    assert newest_whole(tmp_path / "c") == (1, tmp_path / "c" / "step-00000001")
    assert (following.save(2) or {})["event"] == "committed"
    following.writer.let_go()


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("nth", range(1, 24, 3))
def test_trainer_and_writer_killed_together_around_any_call_leave_all_or_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nth: int, when: str
) -> None:
    folder = tmp_path / "c"
    first = LightTrainer(folder, SIZE)
    assert (first.save(1) or {})["event"] == "committed"
    first.writer.send({"op": "close"})
    assert first.writer.wait_end(HANGS_S)
    first.writer.let_go()
    fired = tmp_path / "fired"
    monkeypatch.setenv("FAULT", kill_at(nth, when, fired=str(fired)).to_json())  # type: ignore[arg-type]
    second = LightTrainer(folder, SIZE, FAULTY)
    second.writer.send(second.stage(2), state_json(2))
    wait_until(fired.exists, "the writer to be killed")
    second.writer.wait_end(HANGS_S)
    second.writer.let_go()
    found = newest_whole(folder)
    assert found is not None and found[0] in (1, 2) and is_right(found[1], found[0], SIZE)
    has_renamed = fired.read_text().split()[1] == "sync_folder" and nth > 22
    assert (found[0] == 2) == (has_renamed or (fired.read_text().split()[1] == "rename" and when == "after"))
    third = LightTrainer(folder, SIZE)
    assert third.wait_for("ready") is not None
    assert not [path for path in folder.iterdir() if path.name.startswith(".tmp")]
    assert (third.save(3) or {})["event"] == "committed"
    third.writer.let_go()


def test_a_second_writer_is_refused_while_the_first_trainer_lives(tmp_path: Path) -> None:
    trainer, writer = start_and_stage(tmp_path / "c")
    second = LightTrainer(tmp_path / "c", SIZE)
    report = second.wait_for("ready", "refused")
    assert report is not None and report["event"] == "refused"
    assert report["why"] == f"process {trainer.pid} is already writing checkpoints into this run"
    second.writer.let_go()
    trainer.kill()
    trainer.wait()
    wait_until(lambda: not Path(f"/proc/{writer}").exists(), "the orphan to end")
    third = LightTrainer(tmp_path / "c", SIZE)
    assert third.wait_for("ready") is not None
    third.writer.let_go()


def test_sigterm_lets_a_writer_finish_what_is_staged_and_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, orphans: list[int]
) -> None:
    fired = tmp_path / "fired"
    monkeypatch.setenv("FAULT", stop_at(1, call="write", fired=str(fired)).to_json())
    trainer = LightTrainer(tmp_path / "c", SIZE, FAULTY)
    orphans.append(trainer.writer.pid)
    trainer.writer.send(trainer.stage(1), state_json(1))
    wait_until_stopped(trainer.writer.pid)
    os.kill(trainer.writer.pid, signal.SIGTERM)
    os.kill(trainer.writer.pid, signal.SIGCONT)
    assert trainer.writer.wait_end(HANGS_S)
    trainer.writer.let_go()
    assert newest_whole(tmp_path / "c") == (1, tmp_path / "c" / "step-00000001")


# As the supervisor's own signals, which ask every Python process of a run where it is.
HANDLES_A_SIGNAL = """
import runpy, signal
signal.signal(signal.SIGUSR1, lambda *_: None)
runpy.run_module("jackline.checkpoint.writer.serve", run_name="__main__", alter_sys=True)
"""


def test_a_signal_does_not_keep_a_writer_busy_for_ever(tmp_path: Path, orphans: list[int]) -> None:
    """A busy writer takes a core, and it looks like progress: a training that hung was never called stuck."""
    trainer = LightTrainer(tmp_path / "c", SIZE, (sys.executable, "-c", HANDLES_A_SIGNAL))
    orphans.append(trainer.writer.pid)
    assert (trainer.save(1) or {})["event"] == "committed"
    os.kill(trainer.writer.pid, signal.SIGUSR1)
    asleep = []

    def is_asleep() -> bool:
        stat = Path(f"/proc/{trainer.writer.pid}/stat").read_text()
        asleep.append(stat.rpartition(")")[2].split()[0] == "S")
        return len(asleep) >= 40 and all(asleep[-40:])

    wait_until(is_asleep, "the writer to sleep again")
    trainer.writer.send({"op": "close"})
    assert trainer.writer.wait_end(HANGS_S)
    trainer.writer.let_go()


def test_half_a_message_of_a_dead_trainer_is_no_save(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair()
    child = os.fork()
    if child == 0:
        time.sleep(600)
        os._exit(0)
    from jackline.checkpoint.staging.writer_process import default_command, writer_environment
    from jackline.checkpoint.writer.serve import Options

    options = Options(tmp_path / "c", child)
    with theirs:
        writer = subprocess.Popen(
            [*default_command(), str(theirs.fileno()), options.to_json()],
            pass_fds=(theirs.fileno(),),
            env=writer_environment(),
        )
    ours.sendall(b'\x40\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00{"op":')
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert writer.wait(HANGS_S) == 0  # although the socket is still open, as in a forked data worker
    ours.close()
    assert list_names(tmp_path / "c") == []


def test_what_was_saved_is_read_back_and_noted(tmp_path: Path) -> None:
    trainer = LightTrainer(tmp_path / "c", SIZE)
    for step in range(1, 6):
        assert (trainer.save(step) or {})["event"] == "committed"
    trainer.writer.send({"op": "close"})
    assert trainer.writer.wait_end(HANGS_S)
    trainer.writer.let_go()
    notes = read_notes(tmp_path / "c", STATUS)
    assert sorted(notes) == [Name(3), Name(4), Name(5)]
    assert all(note["verified_at_s"] >= note["acknowledged_at_s"] for note in notes.values())


def test_a_bit_that_flips_before_it_is_read_back_keeps_the_older_ones_from_going(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = LightTrainer(tmp_path / "c", SIZE)
    for step in range(1, 4):
        assert (trainer.save(step) or {})["event"] == "committed"
    trainer.writer.send({"op": "close"})
    trainer.writer.wait_end(HANGS_S)
    trainer.writer.let_go()
    path = tmp_path / "c" / "step-00000003" / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[9000] ^= 1
    path.write_bytes(data)
    (tmp_path / "c" / STATUS).unlink()  # nobody remembers having read them
    again = LightTrainer(tmp_path / "c", SIZE)
    report = again.wait_for("damaged")
    assert report is not None and report["why"] == "model.safetensors has wrong bytes between 0 B and 52.8 KiB"
    assert (again.save(4) or {})["event"] == "committed"
    again.writer.send({"op": "close"})
    again.writer.wait_end(HANGS_S)
    again.writer.let_go()
    assert list_names(tmp_path / "c") == [Name(4), Name(2), Name(1)]


def test_a_deleted_lock_file_does_not_let_two_write(tmp_path: Path) -> None:
    trainer = LightTrainer(tmp_path / "c", SIZE)
    assert (trainer.save(1) or {})["event"] == "committed"
    (tmp_path / "c" / LOCK).unlink()
    assert (trainer.save(2) or {})["event"] == "committed"
    holder = read_holder(tmp_path / "c" / LOCK)
    assert holder.writer is not None and holder.writer.pid == trainer.writer.pid and is_alive(holder.writer)
    trainer.writer.let_go()


def test_a_clock_that_jumped_back_only_means_reading_again(tmp_path: Path) -> None:
    trainer = LightTrainer(tmp_path / "c", SIZE)
    assert (trainer.save(1) or {})["event"] == "committed"
    trainer.writer.send({"op": "close"})
    trainer.writer.wait_end(HANGS_S)
    trainer.writer.let_go()
    from jackline.checkpoint.format.catalogue import write_notes

    write_notes(tmp_path / "c", STATUS, {Name(1): {"verified_at_s": time.time() + 10**6}})
    again = LightTrainer(tmp_path / "c", SIZE)
    assert (again.wait_for("verified") or {})["name"] == "step-00000001"
    again.writer.let_go()


def test_orphans_are_treated_with_patience_but_not_for_ever() -> None:
    assert treat_orphan(Orphan("committing", False, 59.0)) == "wait"
    assert treat_orphan(Orphan("committing", True, 1.0)) == "continue"
    assert treat_orphan(Orphan("idle", False, 1.0)) == "ask to end"
    assert treat_orphan(Orphan("closing", False, 1.0)) == "ask to end"
    assert treat_orphan(Orphan("committing", False, 61.0)) == "kill"
    assert treat_orphan(Orphan("committing", True, 61.0)) == "kill"


def test_messages_of_any_size_pass_with_their_payloads_and_descriptors() -> None:
    left, right = socket.socketpair()
    ours, theirs = Channel(left), Channel(right)
    read_end, write_end = os.pipe()
    ours.send({"n": 1}, b"", fd=write_end)
    ours.send({"n": 2, "word": "ä"}, b"x" * 3_000_000)
    ours.send({"n": 3})
    got = []
    while len(got) < 3:
        ours.flush(0)
        message = theirs.receive()
        if message is not None:
            got.append(message)
    assert [message.body["n"] for message in got] == [1, 2, 3]
    assert got[1].payload == b"x" * 3_000_000 and got[1].body["word"] == "ä"
    assert got[0].fd is not None
    os.write(got[0].fd, b"hello")
    assert os.read(read_end, 5) == b"hello"
    for fd in (read_end, write_end, got[0].fd):
        os.close(fd)
    ours.close()
    with pytest.raises(Closed):
        theirs.receive()
    theirs.close()


def test_the_writer_and_all_it_needs_import_neither_torch_nor_numpy() -> None:
    package = Path(jackline.checkpoint.__file__).parent
    rooms = [path for room in ("format", "writer", "mirror") for path in (package / room).glob("*.py")]
    names = sorted(f"{path.parent.name}.{path.stem}" for path in rooms if path.stem != "__init__")
    assert len(names) > 15
    names += ["schedule", "ticket", "place", "rewind", "staging.writer_process"]
    code = (
        "import sys, importlib\n"
        f"for name in {names!r}: importlib.import_module('jackline.checkpoint.' + name)\n"
        "print(sorted({'torch', 'numpy', 'safetensors', 'fsspec', 'asyncio', 'multiprocessing'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=HANGS_S)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_a_json_module_in_the_users_folder_does_not_break_the_writer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit('wrong json')")
    monkeypatch.chdir(tmp_path)
    trainer = LightTrainer(tmp_path / "c", SIZE)
    assert (trainer.save(1) or {})["event"] == "committed"
    verify_checkpoint(tmp_path / "c" / "step-00000001")
    trainer.writer.let_go()


# -- what it may take of the disk ------------------------------------------------------------------------------------


def most_at_once(reports: list[dict[str, object]]) -> int:
    """The largest number of checkpoints that were there at one moment."""
    there, most = 0, 0
    for report in reports:
        there += {"committed": 1, "deleted": -1}.get(str(report["event"]), 0)
        most = max(most, there)
    return most


def test_saves_without_a_pause_do_not_keep_old_ones_from_being_deleted(tmp_path: Path) -> None:
    """The next save is always waiting already, so the writer never has an idle moment."""
    trainer = LightTrainer(tmp_path / "c", SIZE)
    assert trainer.wait_for("ready")
    count = 30
    body = trainer.stage(0)
    for step in range(1, count + 1):
        trainer.writer.send({**body, "step": step, "id": step}, state_json(step))
    while sum(report["event"] == "committed" for report in trainer.reports) < count:
        assert trainer.wait_for("committed"), trainer.reports
    trainer.writer.send({"op": "close"})
    assert trainer.writer.wait_end(HANGS_S)
    trainer.reports += trainer.writer.reports()
    trainer.writer.let_go()
    assert most_at_once(trainer.reports) <= 6  # 3 to keep, 2 not read back yet, 1 just written
    assert [name.step for name in list_names(tmp_path / "c")] == [30, 29, 28]


def test_a_save_that_interrupts_reading_back_does_not_keep_old_ones_from_being_deleted(tmp_path: Path) -> None:
    trainer = LightTrainer(tmp_path / "c", SIZE)
    assert trainer.wait_for("ready")
    for step in range(1, 5):  # of which the writer itself may have deleted one
        trainer.writer.send({**trainer.stage(step), "id": step}, state_json(step))
        assert trainer.wait_for("committed")
    os.kill(trainer.writer.pid, signal.SIGKILL)
    assert trainer.writer.wait_end(HANGS_S)
    trainer.writer.let_go()
    seen: list[object] = []
    upkeep = Upkeep(tmp_path / "c", Keep(last=2), Disk(), lambda: seen.count("verified") >= 2)
    for report in upkeep.work():
        seen.append(report["event"])  # noqa: PERF401 - the upkeep looks at it meanwhile
    assert seen.count("verified") == 2  # the third was interrupted
    assert [name.step for name in list_names(tmp_path / "c")] == [4, 3]


def options_with(folder: Path, budget_bytes: int, **keep: object) -> Options:
    return Options(folder, os.getpid(), Keep(**keep), disk_budget=budget_bytes)  # type: ignore[arg-type]


def save_all(folder: Path, budget_bytes: int, steps: range, **keep: object) -> list[dict[str, object]]:
    """The reports of a writer with this budget, after the saves of `steps` and its end."""
    trainer = LightTrainer(folder, SIZE, options=options_with(folder, budget_bytes, **keep))
    assert trainer.wait_for("ready")
    for step in steps:
        body = {**trainer.stage(step), "id": step, "metrics": {"loss": abs(step - 2)}}
        trainer.writer.send(body, state_json(step))
        assert trainer.wait_for("committed", "failed")
        assert used_bytes(folder) <= budget_bytes
    trainer.writer.send({"op": "close"})
    assert trainer.writer.wait_end(HANGS_S)
    trainer.reports += trainer.writer.reports()
    trainer.writer.let_go()
    return trainer.reports


def kinds_of(reports: list[dict[str, object]], kind: str) -> list[object]:
    return [report["step"] for report in reports if report["event"] == kind]


def test_a_disk_budget_is_never_passed_and_old_ones_make_room(tmp_path: Path) -> None:
    """A checkpoint takes about 120 kB here, and an eighth of the budget is for logs."""
    reports = save_all(tmp_path / "c", 560_000, range(1, 9), last=5)
    assert kinds_of(reports, "committed") == list(range(1, 9))
    assert len(list_names(tmp_path / "c")) < 5  # fewer than it may keep otherwise


def test_a_disk_budget_keeps_the_best_and_one_good_one(tmp_path: Path) -> None:
    reports = save_all(tmp_path / "c", 560_000, range(1, 9), last=2, best="loss")
    assert 2 in [name.step for name in list_names(tmp_path / "c")]
    assert kinds_of(reports, "committed")[-1] == 8


def test_a_save_that_no_deletion_makes_room_for_is_refused_by_name(tmp_path: Path) -> None:
    reports = save_all(tmp_path / "c", 240_000, range(1, 4), last=2)
    assert kinds_of(reports, "failed") and not kinds_of(reports, "deleted")
    (why, *_) = [str(report["why"]) for report in reports if report["event"] == "failed"]
    assert re.fullmatch(r"the disk budget of 234 KiB leaves no room: \S+ KiB needed, \S+ KiB used by this run", why)
    assert len(list_names(tmp_path / "c")) == 1
