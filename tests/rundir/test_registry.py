"""Which runs exist on this machine, from any directory."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from jackline.rundir import registry
from jackline.rundir.registry import register, registered_runs, state_folder
from tests.rundir.made import make_run


def test_registered_runs_are_found_newest_first(tmp_path: Path) -> None:
    first, second = make_run(tmp_path / "a" / "one"), make_run(tmp_path / "b" / "two")
    assert all(register(run, vouched=True) for run in (first, second, first))
    assert [run.name for run in registered_runs()] == ["one", "two"]


def test_a_run_that_was_deleted_or_moved_is_passed_over(tmp_path: Path) -> None:
    run = make_run(tmp_path / "one")
    register(run, vouched=True)
    shutil.move(run.path, tmp_path / "moved")
    assert registered_runs() == []


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"path": 7}', json.dumps({"path": "/" + "x" * 5000}), json.dumps({"path": "/a\0b"})]
)
def test_damaged_entries_are_passed_over(tmp_path: Path, text: str) -> None:
    run = make_run(tmp_path / "one")
    register(run, vouched=True)
    (state_folder() / "runs" / "bad.json").write_text(text)
    assert [found.name for found in registered_runs()] == ["one"]


def test_an_entry_without_a_time_comes_last(tmp_path: Path) -> None:
    old, new = make_run(tmp_path / "old"), make_run(tmp_path / "new")
    register(new, vouched=True)
    (state_folder() / "runs" / "x.json").write_text(
        json.dumps({"path": str(old.path), "registered_at_s": "long ago"})
    )
    assert [run.name for run in registered_runs()] == ["new", "old"]


def test_the_oldest_entries_are_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "MAX_ENTRIES", 3)
    for number in range(5):
        register(make_run(tmp_path / f"run-{number}"), vouched=True)
    assert len(registered_runs()) == 3


def test_a_state_folder_that_cannot_be_written_is_no_reason_to_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    assert register(make_run(tmp_path / "one"), vouched=True) is False
    assert registered_runs() == []


def test_a_relative_state_home_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "state")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert state_folder() == tmp_path / ".local" / "state" / "jackline"


def test_a_user_without_a_home_still_has_a_state_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container that runs as a number nobody entered into passwd."""
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr("os.getuid", lambda: 4_000_000)
    assert state_folder() == Path("/tmp/jackline-state-4000000")
