"""Commands that only read take a mirror's place: its records are copied, and kept apart from this machine's runs."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jackline.checkpoint.mirror.bundle import pack_run
from jackline.checkpoint.mirror.stories import Copies
from jackline.rundir import atomic
from jackline.rundir.layout import RunDir
from jackline.rundir.process_id import ProcessId
from jackline.rundir.registry import copies_folder, is_copy
from jackline.rundir.run_file import describe_run, write_run_file
from jackline.rundir.status import read_status
from tests.deadline import HANGS_S

FAR = ProcessId(1, 1, "far-away", "some-boot")


def upload(mirror: Path, name: str, number: int, text: str, *ranks: dict[str, object], age_s: float = 0.0) -> None:
    """What the machine 'far-away' has put there."""
    draft = RunDir(mirror.parent / "of another machine" / name)
    shutil.rmtree(draft.path, ignore_errors=True)
    attempt = draft.attempt(1)
    attempt.path.mkdir(parents=True)
    write_run_file(draft, describe_run(name, kind="run", argv=["train"], settings={}, options={}, cwd=draft.path))
    atomic.write_json(attempt.start_file, {"child": FAR.to_json()})
    state = {
        "at_s": time.time() - age_s,
        "started_at_s": 1.0,
        "attempt": 1,
        "child": FAR.to_json(),
        "ranks": list(ranks),
    }
    atomic.write_json(draft.supervisor_file, state)
    draft.out_log.write_text(text)
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
