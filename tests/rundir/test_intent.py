"""Why an attempt ends, and with what the next should start."""

from __future__ import annotations

import json
from pathlib import Path

from jackline.rundir.intent import Intent, read_intent, write_intent
from jackline.rundir.layout import RunDir


def test_an_intent_comes_back_as_it_was_written(tmp_path: Path) -> None:
    attempt = RunDir(tmp_path).attempt(3)
    attempt.path.mkdir(parents=True)
    assert read_intent(attempt) is None
    assert write_intent(attempt, restart=True, why="memory", settings={"num_workers": 0})
    assert json.loads(attempt.intent_file.read_text()) == {
        "restart": True,
        "why": "memory",
        "settings": {"num_workers": 0},
    }
    assert read_intent(attempt) == Intent(True, "memory", {"num_workers": 0})


def test_without_an_attempt_or_a_folder_nothing_is_written_and_nothing_breaks(tmp_path: Path) -> None:
    assert not write_intent(None, restart=True, why="memory")
    assert not write_intent(RunDir(tmp_path / "gone").attempt(1), restart=True, why="memory")


def test_a_damaged_intent_is_none(tmp_path: Path) -> None:
    attempt = RunDir(tmp_path).attempt(1)
    attempt.path.mkdir(parents=True)
    attempt.intent_file.write_text('{"restart": "yes", "why": 4')
    assert read_intent(attempt) is None
    attempt.intent_file.write_text('{"restart": true, "why": 4, "settings": []}')
    assert read_intent(attempt) == Intent(True, "", {})
