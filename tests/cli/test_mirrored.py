"""Commands that only read take a mirror's place: its records are copied, and kept apart from this machine's runs."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jackline.checkpoint.mirror.bundle import TAIL_BYTES, pack_run, read_tail
from jackline.checkpoint.mirror.stories import Copies
from jackline.cli.programs import numbers
from jackline.machine.proc import job_in
from jackline.rundir import atomic
from jackline.rundir.layout import RunDir
from jackline.rundir.process_id import ProcessId, identify
from jackline.rundir.registry import copies_folder, is_copy
from jackline.rundir.run_file import describe_run, write_run_file
from jackline.rundir.status import read_status
from tests.deadline import HANGS_S

FAR = ProcessId(1, 1, "far-away", "some-boot")


def upload(
    mirror: Path,
    name: str,
    number: int,
    text: str,
    *ranks: dict[str, object],
    age_s: float = 0.0,
    process: ProcessId = FAR,
) -> None:
    """What the machine 'far-away' has put there."""
    draft = RunDir(mirror.parent / "of another machine" / name)
    shutil.rmtree(draft.path, ignore_errors=True)
    attempt = draft.attempt(1)
    attempt.path.mkdir(parents=True)
    write_run_file(draft, describe_run(name, kind="run", argv=["train"], settings={}, options={}, cwd=draft.path))
    atomic.write_json(attempt.start_file, {"child": process.to_json()})
    state = {
        "at_s": time.time() - age_s,
        "started_at_s": 1.0,
        "attempt": 1,
        "child": process.to_json(),
        "supervisor": process.to_json(),
        "ranks": list(ranks),
    }
    atomic.write_json(draft.supervisor_file, state)
    draft.out_log.write_text(text)
    for path in (draft.supervisor_file, draft.out_log):
        os.utime(path, (time.time() - age_s,) * 2)
    (mirror / name).mkdir(parents=True, exist_ok=True)
    (mirror / name / f"run-{number:06d}.tar.gz").write_bytes(pack_run(draft))


def jackline(*words: str) -> subprocess.CompletedProcess[str]:
    words = (sys.executable, "-m", "jackline", *words)
    return subprocess.run(words, capture_output=True, text=True, timeout=HANGS_S)


@pytest.fixture
def mirror(clean_environment: Path, tmp_path: Path) -> Path:
    return tmp_path / "far"


def test_a_mirror_is_read_as_a_run(mirror: Path) -> None:
    upload(mirror, "demo", 1, "2026-11-19T10:00:00.0Z step 1\n", age_s=30.0)
    for place in (str(mirror), f"{mirror}/demo", f"file://{mirror}/demo"):
        done = jackline("status", place)
        assert done.stdout.startswith("demo: alive on host 'far-away' 3"), done
        assert "the records of 'demo' are 3" in done.stderr
    assert jackline("logs", str(mirror)).stdout == "2026-11-19T10:00:00.0Z step 1\n"
    assert "is alive elsewhere" in jackline("why", str(mirror)).stdout
    listed = jackline("runs", "--runs-dir", str(mirror)).stdout
    assert [line.split()[0] for line in listed.splitlines()] == ["NAME", "demo"]
    assert "demo" not in jackline("runs").stdout  # a copy is none of this machine's runs
    refused = jackline("stop", f"{mirror}/demo")
    assert (refused.returncode, refused.stderr.splitlines()[0]) == (
        2,
        f"error: {mirror}/demo is a mirror, and is only read here",
    )


def test_programs_wait_for_a_run_through_its_mirror(mirror: Path) -> None:
    """`wait` and `events -f` see what is uploaded while they wait."""
    upload(mirror, "demo", 1, "")
    place, draft = f"{mirror}/demo", RunDir(mirror.parent / "of another machine" / "demo")
    now = json.loads(jackline("wait", place, "--timeout", "0s").stdout)
    assert (now["run"], now["state"], now["met"]) == ("demo", "elsewhere", None)
    assert now["is_timeout"] and now["text"] == "starting"
    waiting = [program(FAST, *words) for words in (("wait", place), ("events", place, "-f"))]
    for process in waiting:
        assert process.stderr is not None and "from the mirror" in process.stderr.readline()  # it has the first story
    add_end(draft)
    (mirror / "demo" / "run-000002.tar.gz").write_bytes(pack_run(draft))
    ended, told = (process.communicate(timeout=HANGS_S)[0] for process in waiting)
    assert json.loads(ended)["state"] == "finished"
    assert [process.returncode for process in waiting] == [0, 0]
    assert told.endswith("finished after 3 s\n")


def program(code: str, *words: str) -> subprocess.Popen[str]:
    argv = [sys.executable, "-c", code, *words]
    return subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def add_end(run: RunDir) -> None:
    event = {"at_s": time.time(), "event": "ended", "text": "finished after 3 s"}
    (run.path / "events-supervisor.jsonl").write_text(json.dumps(event) + "\n")
    atomic.write_json(run.attempt(1).exit_file, {"attempt": 1, "exit_code": 0, "cause": "finished"})


def test_no_value_is_missed_in_the_copies_of_a_long_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy holds the last 4 MiB, so what was read before is somewhere else in the next one."""
    monkeypatch.setattr(numbers, "is_copy", lambda run: True)
    path, whole = tmp_path / "metrics-0.jsonl", tmp_path / "whole"
    lines = [json.dumps({"step": step, "loss": step}) + "\n" for step in range(210_000)]

    def copy(count: int) -> None:
        whole.write_text("".join(lines[:count]))
        path.write_bytes(read_tail(whole, TAIL_BYTES))

    copy(100)
    tail = numbers.MetricsTail(RunDir(tmp_path))
    for before, count in ((100, 200), (200, 200_000), (200_000, 205_000), (205_000, 205_000), (205_000, 210_000)):
        copy(count)
        seen = tail.read().get("loss", [])
        if before == 200:
            assert seen[-1] == count - 1  # so much came at once that the copies do not meet
        else:
            assert seen == list(range(before, count))


def test_a_mirror_that_is_silent_costs_wait_its_time_and_one_that_fails_is_no_end_of_the_run(mirror: Path) -> None:
    silent = program(SILENT, "wait", "s3://bucket/runs/demo", "--timeout", "0s")
    out, err = silent.communicate(timeout=HANGS_S)
    assert (silent.returncode, out) == (124, "")
    assert "error: the mirror has not answered within 0.1 s\nhint: check the network" in err

    upload(mirror, "demo", 1, "")
    cut = program(CUT_OFF, "wait", f"{mirror}/demo", "--timeout", "1h")
    assert cut.stderr is not None and "from the mirror" in cut.stderr.readline()
    assert "trying again" in cut.stderr.readline()
    assert cut.stderr.readline() == "its records are old by now\n"
    add_end(RunDir(mirror.parent / "of another machine" / "demo"))
    data = pack_run(RunDir(mirror.parent / "of another machine" / "demo"))
    (mirror / "demo" / "run-000002.tar.gz").write_bytes(data)
    assert json.loads(cut.communicate(timeout=HANGS_S)[0])["state"] == "finished"


SILENT = """
import sys, threading
from jackline.checkpoint.mirror import stories
from jackline.cli.main import main
from jackline.cli.programs import wait
stories.open_store = lambda place: threading.Event().wait()
wait.LEAST_FOR_A_MIRROR_S = 0.1
sys.argv[0] = "jackline"
main()
"""
FAST = """
import sys
from jackline.cli import mirrored
from jackline.cli.main import main
mirrored.RENEW_EVERY_S = 0.1
sys.stderr.reconfigure(line_buffering=True)
sys.argv[0] = "jackline"
main()
"""


CUT_OFF = f"""
import pathlib, sys
from jackline.checkpoint.mirror.stories import Copies
from jackline.rundir import status
renew = Copies._renew_one
def renew_later(self, name):
    if list(pathlib.Path(self.place, name).glob("*2.tar.gz")) or not list(self.folder.glob("*/run.json")):
        return renew(self, name)
    if self.__dict__.setdefault("is_cut_off", False):
        status.stale_after_s = lambda run, is_afar: -1.0
        print("its records are old by now", file=sys.stderr, flush=True)
    self.is_cut_off = True
    raise OSError("cut off")
Copies._renew_one = renew_later
{FAST}
"""


def test_old_records_are_not_taken_for_life(mirror: Path) -> None:
    upload(mirror, "demo", 1, "", age_s=900.0)
    assert jackline("status", str(mirror)).stdout.startswith("demo: unknown from here: it was last seen ")
    done = jackline("watch", str(mirror))
    assert done.returncode == 2 and "last heard of 15 min" in done.stderr


def test_a_copy_is_renewed_and_never_half(mirror: Path) -> None:
    upload(mirror, "demo", 1, "first\n")
    copies = Copies(str(mirror))
    copies.renew()
    run = RunDir(copies.folder / "demo")
    assert is_copy(run) and copies.folder.parent == copies_folder()
    assert run.out_log.read_text() == "first\n"
    upload(mirror, "demo", 2, "first\nsecond\n")
    (mirror / "demo" / "run-000003.tar.gz").write_bytes(b"half an archive")
    (mirror / "not a run").mkdir()
    copies.renew()
    assert run.out_log.read_text() == "first\nsecond\n"
    assert read_status(run).is_heard_afar
    assert [path.name for path in copies.folder.iterdir()] == ["demo"]


def test_the_machines_of_a_job_are_one_table_also_in_a_mirror(mirror: Path) -> None:
    """Started by somebody else's launcher, they are known by the place where their ranks meet."""
    place = {"world_size": 3, "job": "10.0.0.1:29500", "what": "running"}
    upload(mirror, "job-A", 1, "", {"rank": 0, **place}, {"rank": 1, **place})
    upload(mirror, "job-B", 1, "", {"rank": 2, **place, "what": "sleeping"}, age_s=70.0)
    upload(mirror, "other", 1, "", {"rank": 2, **place, "job": "10.0.0.9:29500"})
    told = jackline("status", f"{mirror}/job-A").stdout
    assert "rank 2 of 3: sleeping" in told
    assert "ranks 0-1 of 3: running" in told
    assert "machines: job-A: ranks 0-1; job-B: rank 2" in told
    assert "rank 2 of 3: sleeping" in jackline("why", f"{mirror}/job-A").stdout


def test_places_that_are_no_mirror_are_named(mirror: Path) -> None:
    mirror.mkdir()
    assert jackline("status", f"file://{mirror}").stderr.splitlines() == [
        f"error: file://{mirror} holds no mirrored run",
        "hint: name the folder or URL that was given as --mirror",
    ]
    done = jackline("run", "--runs-dir", f"file://{mirror}", "--", "true")
    assert done.stderr.splitlines()[0] == f"error: runs are kept in a folder of this machine, not at file://{mirror}"
    for name in ("a", "b"):
        upload(mirror, name, 1, "")
    assert f"holds 2 runs: a, b\nhint: name one: {mirror}/a" in jackline("status", str(mirror)).stderr


def test_mirrors_of_the_same_relative_name_are_not_mixed_up(
    clean_environment: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for place in ("a", "b"):
        upload(tmp_path / place / "far", "demo", 1, f"of {place}\n")
        monkeypatch.chdir(tmp_path / place)
        assert jackline("logs", "far/demo").stdout == f"of {place}\n"
    monkeypatch.chdir(tmp_path / "b" / "far")
    for word in (".", "demo", "demo/", "../far"):
        assert jackline("logs", word).stdout == "of b\n", word


def test_an_archive_that_is_just_being_uploaded_is_not_used(mirror: Path) -> None:
    upload(mirror, "demo", 1, "first\n")
    upload(mirror, "demo", 2, "second\n")
    newest = mirror / "demo" / "run-000002.tar.gz"
    data = newest.read_bytes()
    newest.write_bytes(data[:-9])  # all files of the run are in this part
    copies = Copies(str(mirror))
    run = RunDir(copies.folder / "demo")
    copies.renew()
    assert run.out_log.read_text() == "first\n"
    newest.write_bytes(data)
    copies.renew()
    assert run.out_log.read_text() == "second\n"


def test_a_run_that_began_anew_there_leaves_nothing_of_the_one_before(mirror: Path) -> None:
    upload(mirror, "demo", 1, "of the first\n")
    copies = Copies(str(mirror))
    run = RunDir(copies.folder / "demo")
    copies.renew()
    atomic.write_json(run.attempt(1).exit_file, {"exit_code": 3})
    (run.path / "attempts/002").mkdir()
    atomic.write_json(run.attempt(2).exit_file, {"exit_code": 3})
    upload(mirror, "demo", 1, "of another one\n")
    copies.renew()
    assert run.out_log.read_text() == "of another one\n"
    assert [attempt.number for attempt in run.list_attempts()] == [1]
    assert read_status(run).state == "elsewhere"


def test_runs_that_cannot_be_read_do_not_hide_the_others(mirror: Path) -> None:
    upload(mirror, "demo", 1, "")
    for name in ("damaged", "no name\033[31m", ".hidden"):
        (mirror / name).mkdir()
        (mirror / name / "run-000001.tar.gz").write_bytes(b"half an archive")
    done = jackline("runs", "--runs-dir", str(mirror))
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["NAME", "demo"], done
    assert (
        "run 'damaged' of the mirror was left out: no record of run 'damaged' in the mirror is whole" in done.stderr
    )
    assert "\033" not in done.stderr
    assert jackline("status", f"{mirror}/damaged").returncode == 3


def test_a_process_of_this_machine_is_never_taken_for_a_copied_run(mirror: Path) -> None:
    """Who has written there may name any process, and machines may have the same name."""
    own = identify(os.getpid())
    assert own is not None
    rebooted = ProcessId(own.pid, own.start_ticks, own.host, "another boot")
    for number, process in enumerate((own, rebooted)):
        upload(mirror, f"demo-{number}", 1, "", process=process)
        place = f"{mirror}/demo-{number}"
        assert jackline("status", place).stdout.startswith(f"demo-{number}: alive on host '{own.host}' ")
        why = jackline("why", place).stdout
        assert "is alive elsewhere" in why and f"pid {own.pid}" not in why
        upload(mirror, f"demo-{number}", 2, "", process=process, age_s=900.0)
        assert jackline("status", place).stdout.startswith(f"demo-{number}: unknown from here")
        why = jackline("why", place).stdout
        assert "whether it lives cannot be told from here" in why
        assert "restarted" not in why and "nobody wrote down" not in why


def test_what_would_change_a_copy_is_refused(mirror: Path) -> None:
    upload(mirror, "demo", 1, "line\n")
    copies = Copies(str(mirror))
    copies.renew()
    copy = copies.folder / "demo"
    for place in (copy, f"{copies.folder}/../{copies.folder.name}/demo"):
        assert jackline("logs", str(place)).stdout == "line\n"
        for words in (["stop"], ["resume"], ["checkpoints"], ["fork"], ["runs", "rm", "--yes"]):
            done = jackline(*words, str(place))
            assert done.returncode == 2 and "is a copy of records in a mirror, and is only read" in done.stderr, done
    assert copy.is_dir()


def test_the_runs_of_a_mirror_are_in_the_order_of_their_last_signs(mirror: Path) -> None:
    for name, age_s in (("b-old", 4000.0), ("c-alive", 30.0), ("a-older", 9000.0)):
        upload(mirror, name, 1, "", age_s=age_s)
    listed = jackline("runs", "--runs-dir", str(mirror)).stdout
    assert [line.split()[0] for line in listed.splitlines()] == ["NAME", "c-alive", "b-old", "a-older"]
    supervisor_file = RunDir(Copies(str(mirror)).folder / "b-old").supervisor_file
    assert 3990 < time.time() - supervisor_file.stat().st_mtime < 4000 + HANGS_S
    upload(mirror, "d-older", 1, "", age_s=9000.0)
    assert jackline("status", "--runs-dir", str(mirror)).stdout.startswith("c-alive: ")


HANGING = """
import os, sys, threading
from jackline.checkpoint.mirror import stories
class Hanging:
    def names(self, folder):
        if not folder:
            return ["demo", "other"]
        os.write(1, b"asked\\n")  # print() writes a line and its end apart, and the other thread between them
        threading.Event().wait()
stories.open_store = lambda place: Hanging()
stories.Copies("s3://bucket/runs").renew()
"""


def test_ctrl_c_leaves_a_mirror_that_does_not_answer(clean_environment: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", HANGING], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as asking:
        assert asking.stdout is not None
        lines = [asking.stdout.readline() for _ in range(2)]  # so the main thread waits for both
        asking.send_signal(signal.SIGINT)
        _, told = asking.communicate(timeout=HANGS_S)
    assert lines == [b"asked\n"] * 2
    assert b"KeyboardInterrupt" in told


def test_a_state_folder_that_cannot_be_written_to_is_not_the_mirrors_fault(
    mirror: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    upload(mirror, "demo", 1, "")
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    done = jackline("status", str(mirror))
    assert done.stderr.splitlines()[-1] == "hint: set XDG_STATE_HOME to a folder of yours that can be written to"
    assert done.stderr.startswith("error: no copy of the mirror's records can be kept in ")


def test_damaged_ranks_in_a_mirror_are_left_out(mirror: Path) -> None:
    place = {"world_size": 3, "job": "10.0.0.1:29500", "what": "running"}
    upload(mirror, "job-A", 1, "", {"rank": 0, **place}, {"rank": [1], **place}, {"rank": "x", "world_size": {}})
    upload(mirror, "job-B", 1, "", {"rank": 2, **place}, {"rank": None, **place, "job": 7})
    done = jackline("status", f"{mirror}/job-A")
    assert "machines: job-A: rank 0; job-B: rank 2" in done.stdout, done


def test_a_live_run_of_another_machine_is_not_called_ended(mirror: Path, tmp_path: Path) -> None:
    """In a folder that both machines see."""
    upload(mirror, "demo", 1, "")
    runs = tmp_path / "of another machine"
    stop = jackline("stop", "demo", "--runs-dir", str(runs))
    assert stop.stderr.splitlines() == [
        "error: run 'demo' was last seen on 'far-away'; from here it cannot be stopped",
        "hint: stop it there: jackline stop demo",
    ]
    remove = jackline("runs", "rm", "demo", "--yes", "--runs-dir", str(runs))
    assert remove.stderr.splitlines() == [
        "error: run 'demo' is alive on another machine",
        "hint: end it there first: jackline stop demo",
    ]


def test_jobs_that_each_machine_has_for_itself_are_not_one(mirror: Path, tmp_path: Path) -> None:
    """Two machines that share a folder; on both `torchrun --nproc-per-node 2` meets at 127.0.0.1:29500."""
    for address in ("127.0.0.1", "localhost"):
        assert job_in({"MASTER_ADDR": address, "MASTER_PORT": "29500"}) == ""
    assert job_in({"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}) == "10.0.0.1:29500"
    place = {"world_size": 1, "job": "node:29500", "what": "running"}
    for name in ("job-A", "job-B"):
        upload(mirror, name, 1, "", {"rank": 0, **place})
    assert "machines:" not in jackline("status", "job-A", "--runs-dir", str(tmp_path / "of another machine")).stdout
