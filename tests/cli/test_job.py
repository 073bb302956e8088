"""A job of several machines: a run on each, one folder for checkpoints, one table of ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from jackline.checkpoint.place import choose_place, join_job
from jackline.cli.text.ranks import job_lines
from jackline.rundir.create import claim_run
from jackline.rundir.layout import RunDir
from jackline.rundir.records.ranks import machines_of_job
from jackline.rundir.registry import register
from jackline.rundir.run_file import describe_run


def machine(folder: Path, name: str, at_s: float, *ranks: dict[str, Any]) -> RunDir:
    run = RunDir(folder / name)
    run.path.mkdir(parents=True)
    join_job(run, str(folder / "demo.job"))
    state = {"at_s": at_s, "ranks": [{"world_size": 4, **rank} for rank in ranks]}
    (run.path / "supervisor.json").write_text(json.dumps(state))
    return run


def test_the_ranks_of_all_machines_are_one_table(tmp_path: Path) -> None:
    waits = {"what": "waiting for other ranks (all_reduce)", "file": "/me/train.py", "line": 13}
    a = machine(tmp_path, "demo-A", 100.0, {"rank": 0, **waits}, {"rank": 1, **waits})
    machine(tmp_path, "demo-B", 99.0, {"rank": 2, **waits}, {"rank": 3, "what": "sleeping"})
    machine(tmp_path / "elsewhere", "demo-C", 99.0, {"rank": 0, "what": "of another job"})
    own: list[dict[str, Any]] = [{"rank": 0, "world_size": 4}]
    assert job_lines(str(a.path), own, 101.0) == [
        "rank 3 of 4: sleeping",
        "ranks 0-2 of 4: waiting for other ranks (all_reduce) at /me/train.py:13",
        "machines: demo-A: ranks 0-1; demo-B: ranks 2-3",
    ]
    later = job_lines(str(a.path), own, 100.0 + 90)
    assert (
        later[-1]
        == "machines: demo-A: ranks 0-1, last seen 1 min 30 s ago; demo-B: ranks 2-3, last seen 1 min 31 s ago"
    )
    alone = RunDir(tmp_path / "alone")
    alone.path.mkdir()
    assert machines_of_job(alone.path) == []
    assert job_lines(str(alone.path), own, 100.0) == ["rank 0 of 4: running"]


def test_all_machines_of_a_job_commit_to_one_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    run = RunDir(tmp_path / "runs" / "job-A")
    contents = describe_run("job-A", kind="run", argv=["true"], settings={}, options={}, cwd=tmp_path)
    claim = claim_run(run, contents, hint="")
    assert claim is not None
    claim.release()
    register(run, vouched=True)
    assert choose_place(run).folder == run.checkpoints
    join_job(run, "")
    assert not run.job_file.exists()
    shared = tmp_path / "job"
    join_job(run, str(shared))
    assert choose_place(run).folder == shared / "checkpoints"
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "another machine"))
    assert choose_place(run).folder == run.checkpoints  # it was not made there
    other = machine(tmp_path / "runs", "job-B", 0.0)
    join_job(other, str(shared))
    monkeypatch.setenv("JACKLINE_RUN_DIR", str(other.path))
    assert choose_place(run).folder == shared / "checkpoints"  # a rank of the same job
    assert (shared / "checkpoints").is_dir()
    run.job_file.write_text('{"checkpoints": "relative"}')
    assert choose_place(run).folder == run.checkpoints
