"""The lines of a live view that stay: few, and each worth it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from jackline.cli.view.notes import Commentary
from jackline.rundir.layout import RunDir
from jackline.rundir.records.session import SessionRecord
from jackline.rundir.records.supervisor import SupervisorRecord
from tests.rundir.made import make_run

WALL_S = 1_794_000_000.0


class Story:
    """A run that is looked at twice a second."""

    def __init__(self, run: RunDir, *, from_start: bool = True) -> None:
        self.run = run
        self.now_s = 1000.0
        self.commentary = Commentary(run, self.now_s, from_start=from_start)
        self.session: dict[str, Any] = {"attempt": 1, "unit": "steps", "phase": "train"}
        self.lines: list[str] = []

    def passes(self, seconds: float, **changes: Any) -> list[str]:
        """What was said meanwhile."""
        self.session |= changes
        said = []
        for _ in range(int(seconds * 2)):
            self.now_s += 0.5
            state = SupervisorRecord.from_json({"attempt": 1, "at_s": WALL_S})
            session = SessionRecord.from_json(self.session)
            wall_s = WALL_S + self.now_s
            found = self.commentary.read(state, session, self.now_s, wall_s=wall_s, columns=68)
            said += [line.text for line in found]
        self.lines += said
        return said


def test_a_silent_training_gets_a_line_a_minute(tmp_path: Path) -> None:
    story = Story(make_run(tmp_path / "mine"))
    assert story.passes(59, done=10, total=100, metrics={"loss": 2.0}) == []
    (line,) = story.passes(2, done=20)
    assert line.endswith("  step  20/100   20%  loss 2.000")
    assert line[2] == line[5] == ":"  # the time of day


def test_a_command_that_prints_lines_of_its_own_gets_none(tmp_path: Path) -> None:
    story = Story(make_run(tmp_path / "mine"))
    for _ in range(300):
        story.passes(1, done=10)
        story.commentary.note_line(story.now_s)
    assert story.lines == []


def test_nothing_is_said_about_a_command_that_counts_nothing(tmp_path: Path) -> None:
    assert Story(make_run(tmp_path / "mine")).passes(300) == []


def test_an_evaluation_is_one_line_with_its_step_and_whether_it_is_the_best(tmp_path: Path) -> None:
    run = make_run(tmp_path / "mine")
    story = Story(run)
    story.passes(5, done=100, step=100, metrics={"loss": 2.0})
    run.metrics().write_text(json.dumps({"step": 90, "at_s": 1.0, "val_loss": 2.5, "val_acc": 0.25}) + "\n")
    best = {"name": "val_loss", "step": 90, "value": 2.5}
    said = story.passes(5, step=120, metrics={"loss": 1.9, "val_loss": 2.5, "val_acc": 0.25}, best=best)
    assert said == ["evaluation at step 90: val_loss 2.5, val_acc 0.25 (best so far)"]
    assert story.passes(20) == []  # the same numbers again are no new evaluation


def test_a_view_that_came_later_does_not_tell_old_evaluations(tmp_path: Path) -> None:
    story = Story(make_run(tmp_path / "mine"), from_start=False)
    assert story.passes(5, done=1, metrics={"val_loss": 2.5}) == []
    assert story.passes(5, metrics={"val_loss": 2.4}) == ["evaluation: val_loss 2.4"]


def test_our_own_trainer_tells_its_evaluations_itself(tmp_path: Path) -> None:
    run = make_run(tmp_path / "mine")
    run.config_file.write_text("recipe: demo\n")
    assert Story(run).passes(5, done=1, metrics={"val_loss": 2.5}) == []


def test_a_mirror_is_advised_once_and_only_without_one(tmp_path: Path) -> None:
    saved = {"at_s": WALL_S, "step": 3, "path": "x"}
    advice = "its checkpoints are on this machine only; --mirror PATH|URL keeps a copy elsewhere"
    story = Story(make_run(tmp_path / "mine"))
    assert story.passes(5, done=3) == []
    assert story.passes(50, last_checkpoint=saved) == [advice]
    mirrored = Story(make_run(tmp_path / "other"))
    assert mirrored.passes(5, done=3, last_checkpoint=saved, loss_bounds={"machine_s": 9.0}) == []


def test_an_hour_has_at_most_120_lines_whatever_the_loop_logs(tmp_path: Path) -> None:
    story = Story(make_run(tmp_path / "mine"))
    for second in range(3600):
        story.passes(1, done=second, step=second, metrics={"loss": 1.0, "val_loss": float(second)})
    assert 60 <= len(story.lines) <= 120
