"""TensorBoard files as TensorBoard's own reader sees them."""

from __future__ import annotations

import os
import signal
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

from jackline.rundir.layout import RunDir
from jackline.session.metrics import tensorboard
from jackline.session.metrics.tensorboard import Board, Curves, event_files, few_of_each
from tests.deadline import HANGS_S

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:tensorboard")


def points(folder: Path, tag: str = "loss") -> list[tuple[int, float]]:
    reader = EventAccumulator(str(folder))
    reader.Reload()
    return [(event.step, event.value) for event in reader.Scalars(tag)]


def raw_points(folder: Path) -> list[tuple[int, str]]:
    """Every point in every file, without the reader's own purging."""
    return [
        (event.step, value.tag)
        for path in event_files(folder)
        for event in EventFileLoader(str(path)).Load()
        for value in event.summary.value
    ]


def write(folder: Path, steps: range, value: float) -> None:
    board = Board(folder)
    for step in steps:
        board.add(step, {"loss": value, "lr": 0.5})
    board.close()


def test_what_was_added_is_read_at_once_without_closing(tmp_path: Path) -> None:
    board = Board(tmp_path / "tb")
    board.add(1, {"loss": 2.5, "lr": 0.25}, at_s=100.0)
    assert points(tmp_path / "tb") == [(1, 2.5)]
    assert points(tmp_path / "tb", "lr") == [(1, 0.25)]
    board.close()


def test_after_a_resume_every_step_is_there_once(tmp_path: Path) -> None:
    write(tmp_path, range(1, 11), 1.0)
    board = Board(tmp_path)
    board.rewind(6)
    assert [step for step, _ in points(tmp_path)] == [1, 2, 3, 4, 5, 6]
    for step in range(7, 13):
        board.add(step, {"loss": 2.0, "lr": 0.5})
    board.close()
    assert points(tmp_path) == [(step, 1.0 if step <= 6 else 2.0) for step in range(1, 13)]
    expected = [(step, tag) for step in range(1, 13) for tag in ("loss", "lr")]
    assert raw_points(tmp_path) == expected, "no reader may find a step twice"


def test_three_attempts_in_the_same_second_stay_in_order(tmp_path: Path) -> None:
    for first, last, value in ((1, 9, 1.0), (5, 9, 2.0), (3, 9, 3.0)):
        board = Board(tmp_path)
        board.rewind(first - 1)
        for step in range(first, last):
            board.add(step, {"loss": value})
        board.close()
    assert points(tmp_path) == [(1, 1.0), (2, 1.0), *((step, 3.0) for step in range(3, 9))]
    assert len(event_files(tmp_path)) == 3


def test_a_reader_that_was_open_all_the_while_forgets_the_steps_that_were_done_again(tmp_path: Path) -> None:
    write(tmp_path, range(1, 11), 1.0)
    reader = EventAccumulator(str(tmp_path))
    reader.Reload()
    assert len(reader.Scalars("loss")) == 10
    board = Board(tmp_path)
    board.rewind(6)
    board.add(7, {"loss": 2.0})
    board.close()
    reader.Reload()
    assert [(event.step, event.value) for event in reader.Scalars("loss")] == [
        *((step, 1.0) for step in range(1, 7)),
        (7, 2.0),
    ]


def test_a_kill_in_the_middle_leaves_a_file_that_is_read_and_gone_on_with(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys\nfrom pathlib import Path\nfrom jackline.session.metrics.tensorboard import Board\n"
        "board = Board(Path(sys.argv[1]))\n"
        "for step in range(1, 6): board.add(step, {'loss': 1.0})\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], timeout=HANGS_S)
    assert done.returncode == -signal.SIGKILL
    (file,) = event_files(tmp_path)
    whole = file.read_bytes()
    file.write_bytes(whole + struct.pack("<QI", 40, 0) + b"half a record")
    board = Board(tmp_path)
    board.rewind(5)
    assert file.read_bytes() == whole
    board.add(6, {"loss": 2.0})
    board.close()
    assert points(tmp_path) == [*((step, 1.0) for step in range(1, 6)), (6, 2.0)]


def test_numbers_that_are_not_finite_are_written_too(tmp_path: Path) -> None:
    board = Board(tmp_path)
    board.add(1, {"loss": float("nan")})
    board.close()
    ((step, value),) = points(tmp_path)
    assert step == 1 and value != value


def test_a_folder_that_cannot_be_written_is_said_once_and_training_continues(tmp_path: Path) -> None:
    (tmp_path / "tb").write_text("a file where the folder should be")
    said: list[str] = []
    board = Board(tmp_path / "tb", said.append)
    for step in range(3):
        board.add(step, {"loss": 1.0})
    board.close()
    assert not board.is_on and len(said) == 1
    assert said[0].startswith("no TensorBoard files are written ([Errno 17] File exists")
    assert said[0].endswith("); the numbers are in metrics-0.jsonl")


def test_without_the_package_it_says_so_and_does_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard.compat.proto.event_pb2", None)
    said: list[str] = []
    board = Board(tmp_path / "tb", said.append)
    board.rewind(3)
    board.add(1, {"loss": 1.0})
    board.close()
    text = "no TensorBoard files are written (tensorboard is not installed); the numbers are in metrics-0.jsonl"
    assert said == [text]
    assert not (tmp_path / "tb").exists()


def test_a_clock_that_was_set_back_does_not_put_the_new_file_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, range(1, 4), 1.0)
    monkeypatch.setattr(tensorboard.time, "time", lambda: 1_000_000.0)
    write(tmp_path, range(4, 6), 2.0)
    assert [step for step, _ in points(tmp_path)] == [1, 2, 3, 4, 5]
    assert os.path.basename(event_files(tmp_path)[-1]) > os.path.basename(event_files(tmp_path)[0])


# -- curves of an attached loop --------------------------------------------------------------------------------------


def logged(first: int, last: int, value: float) -> list[tuple[int, float, dict[str, float]]]:
    return [(step, 100.0 + step, {"loss": value}) for step in range(first, last + 1)]


def test_what_an_attached_loop_logs_is_in_its_curves_each_step_once(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    curves = Curves(run, print)
    curves.take(logged(1, 10, 1.0))
    curves.take([])
    curves.close()
    resumed = Curves(run, print)
    resumed.take([*logged(7, 12, 2.0), (12, 113.0, {"val_loss": 3.0})])
    resumed.close()
    assert points(run.tensorboard) == [*((step, 1.0) for step in range(1, 7)), *((s, 2.0) for s in range(7, 13))]
    assert points(run.tensorboard, "val_loss") == [(12, 3.0)]


def test_a_loop_that_logs_very_often_gets_a_few_points_a_second(tmp_path: Path) -> None:
    lines = [*logged(1, 1000, 1.0), (1000, 1.0, {"val_loss": 3.0})]
    found = few_of_each(lines, 20)
    assert [values for _, _, values in found].count({"loss": 1.0}) == 20
    assert (1000, 1.0, {"val_loss": 3.0}) in found
    assert [step for step, _, _ in found] == sorted(step for step, _, _ in found)
    assert few_of_each(logged(1, 20, 1.0), 20) == logged(1, 20, 1.0)


def test_our_own_trainer_writes_its_curves_itself(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.config_file.write_text("recipe: demo\n")
    Curves(run, print).take(logged(1, 3, 1.0))
    assert not run.tensorboard.exists()
