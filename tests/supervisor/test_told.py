"""What output tells about the whole run: epochs, nested bars, a resume, metrics that are kept."""

from __future__ import annotations

import io
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tqdm import tqdm

from jackline.rundir.layout import RunDir
from jackline.rundir.records.metrics import read_series
from jackline.supervisor.output.bars import parse_bar
from jackline.supervisor.output.learned import Learner
from jackline.supervisor.output.numbers import read_numbers
from jackline.supervisor.output.progress import Progress
from jackline.supervisor.output.told import Told

NOW_S = 1_800_000_000.0


def hear(told: Told, *bars: str, start_s: float = 0.0, every_s: float = 1.0) -> Progress:
    for number, text in enumerate(bars):
        told.offer(parse_bar(text), NOW_S + start_s + number * every_s)
        told.take_bar(text, NOW_S + start_s + number * every_s)
    assert told.progress is not None
    return told.progress


def draw(total: int, *updates: int, **given: object) -> list[str]:
    """What a real tqdm writes while it is updated by these amounts."""
    paper = io.StringIO()
    bar = tqdm(total=total, file=paper, mininterval=0, miniters=1, ncols=80, **given)  # type: ignore[call-overload]
    for amount in updates:
        bar.update(amount)
    bar.close()
    return [text for text in paper.getvalue().strip("\r\n").split("\r") if text.strip()]


def test_a_resumed_bar_does_not_promise_an_end_that_its_jump_implies() -> None:
    # A trainer makes its bar at 0 and moves it to step 53 with its first update.
    texts = draw(100, 53, 1, 1, 1)
    told = Told()
    jumped = hear(told, *texts[:2], every_s=5.0)
    assert (jumped.done, jumped.eta_s) == (53, None), "one jump says nothing about the pace"
    later = hear(told, *texts[2:5], start_s=10.0, every_s=5.0)
    assert later.done == 56
    assert later.eta_s == pytest.approx(44 * 5.0, rel=0.05)


def test_a_resumed_bar_that_is_seldom_redrawn_does_not_promise_too_much_either() -> None:
    """tqdm learns from the jump that it may skip redraws; its own rate recovers only after many steps."""
    told = Told()
    bars = ["  0%|          | 0/60 [00:00<?, ?it/s]", " 53%|█████▎    | 32/60 [00:01<00:00, 31.97it/s]"]
    hear(told, *bars)
    later = [" 60%|██████    | 36/60 [00:03<00:02,  9.77it/s]", " 63%|██████▎   | 38/60 [00:04<00:03,  7.08it/s]"]
    found = hear(told, later[0], start_s=3.0)
    found = hear(told, later[1], start_s=4.0)
    assert found.eta_s == pytest.approx(11.0, rel=0.3), "two steps a second, 22 to go"


def test_a_fast_bar_from_the_start_keeps_its_pace() -> None:
    texts = draw(100, 20, 20, 20, 20)
    found = hear(Told(), *texts[:4], every_s=5.0)
    assert found.done == 60
    assert found.eta_s is not None


def test_a_new_bar_for_each_epoch_is_never_the_runs_end() -> None:
    told = Told()
    for _ in range(3):
        found = hear(told, *draw(10, *[1] * 10))
    found = hear(told, *draw(10, 1, 1)[:3])
    assert found.of == "epoch"
    assert told.step == 32


def test_an_evaluation_bar_does_not_move_the_step() -> None:
    told = Told()
    hear(told, *draw(100, 40))
    step = told.step
    hear(told, *draw(10, 1, 1, desc="Evaluating"))
    assert told.step == step


def test_the_loss_of_an_epochs_batch_gets_a_step_of_the_run(tmp_path: Path) -> None:
    told = Told(RunDir(tmp_path))
    lines = [
        f"epoch {epoch}/3 | batch {batch}/4 | loss {epoch}.{batch}" for epoch in (1, 2) for batch in (1, 2, 3, 4)
    ]
    told.take_lines(lines, NOW_S)
    told.close()
    (series,) = read_series(RunDir(tmp_path))
    assert [point.step for point in series.points] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert [point.epoch for point in series.points] == [1, 1, 1, 1, 2, 2, 2, 2]
    assert told.progress is not None
    assert (told.progress.done, told.progress.total, told.progress.of) == (8, 12, "run")


def test_a_line_about_the_end_of_an_epoch_does_not_turn_batches_into_epochs(tmp_path: Path) -> None:
    told = Told(RunDir(tmp_path))
    told.take_lines(
        ["| epoch   1 |   240/  249 batches | lr 20.00 | loss  5.63", "| end of epoch   1 | valid loss  5.90"], NOW_S
    )
    assert told.progress is not None
    assert (told.progress.done, told.progress.total, told.progress.unit) == (240, 249, "batches")
    found = {series.name: series.points[0].step for series in read_series(RunDir(tmp_path))}
    assert found == {"lr": 240, "loss": 240, "valid_loss": 240}


def test_a_validation_line_without_a_count_gets_the_step_before_it(tmp_path: Path) -> None:
    told = Told(RunDir(tmp_path))
    told.take_lines(["iter 100: loss 2.5", "validation: loss 2.7, accuracy 61.5%"], NOW_S)
    found = {series.name: series.points[0] for series in read_series(RunDir(tmp_path))}
    assert (found["validation_loss"].step, found["validation_loss"].value) == (100, 2.7)
    assert found["validation_accuracy"].value == 61.5


def test_what_a_session_logs_itself_is_not_kept_twice(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.metrics(0).write_text("")
    Told(run).take_lines(["step 1: loss 2.5"], NOW_S)
    assert not run.printed_metrics.exists()


def test_what_a_session_says_of_an_earlier_loss_is_no_loss_of_now(tmp_path: Path) -> None:
    """The receipt of a resume names the loss that a rewind went back behind."""
    line = "[jackline]   left out: the batches 80:90 of the run (on_spike: loss 2.644e+10 at step 90, usually 5.7)"
    run = RunDir(tmp_path)
    told = Told(run)
    told.take_lines([line], 100.0)
    assert [one.value for one in told.latest] == [
        2.644e10
    ]  # of a program without a session, which may be a run of ours
    run.metrics(0).write_text('{"step":1,"at_s":1.0,"loss":5.0}\n')
    told = Told(run)
    told.take_lines([line, "step 91 loss 4.25"], 102.0)
    assert [one.value for one in told.latest if one.name == "loss"] == [4.25]
    told = Told(run)
    told.take_lines([line], 104.0)
    assert told.latest == ()


def test_a_program_that_prints_without_end_fills_neither_time_nor_disk(tmp_path: Path) -> None:
    told = Told(RunDir(tmp_path))
    started_s = time.process_time()
    for poll in range(300):
        told.take_lines(
            [f"step {poll * 200 + line}: loss 2.5" + " x" * 300 for line in range(200)], NOW_S + poll / 10
        )
    assert time.process_time() - started_s < 4  # CPU time; every line of 60,000 would take more
    told.close()
    (series,) = read_series(RunDir(tmp_path))
    assert 50 < len(series.points) < 500
    assert told.progress is not None
    assert told.progress.done > 58_000


def test_a_rare_line_is_looked_at_among_many_frequent_ones() -> None:
    told = Told()
    told._budget_s = told._each_s = 1e-4  # as after a flood of lines: one line each time
    lines = [f"step {number} loss 0.5" for number in range(5)]
    told.take_lines([*lines, "validation: val_loss 0.25", *lines], NOW_S)
    assert {entry.name: entry.value for entry in told.latest} == {"loss": 0.5, "val_loss": 0.25}


def test_a_known_format_outweighs_a_guess() -> None:
    told = Told()
    told.take_lines(["step 5/10 loss 1.0", *(f"sweep {n} temperature {n}.5" for n in range(5))], NOW_S)
    assert told.progress is not None
    assert (told.progress.done, told.progress.is_guessed) == (5, False)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "HTTP Error 503: retry 3",
        "learning 3 things",
        "saved in 12.5 s",
        "loss function: cross entropy",
        "2026-11-16 10:00:00 listening on 127.0.0.1:8080",
        "epoch time: 12.5 s",
        "accelerate 1.2.3 is installed",
    ],
)
def test_a_line_that_only_looks_like_a_metric_is_left_alone(text: str) -> None:
    assert read_numbers(text) == {}


@pytest.mark.parametrize(
    "lines",
    [
        ["took 1.5 s", "took 1.7 s", "took 1.1 s", "took 1.2 s"],
        ["10:00:01 alive", "10:00:02 alive", "10:00:03 alive", "10:00:04 alive"],
        [f"2026-11-16 10:00:0{second} ping" for second in range(6)],
        ["worker 3 ready", "worker 1 ready", "worker 2 ready", "worker 4 ready"],
    ],
)
def test_repeated_lines_that_count_nothing_teach_nothing(lines: list[str]) -> None:
    learner = Learner()
    assert not any(learner.take(line) for line in lines)


SIGNS = st.sampled_from(
    [*"0123456789%|/[]:<>=#━█,.?s -{}'\"\t", "loss", "step ", "epoch ", "it/s", "nan", "e-", "val "]
)


@given(st.lists(st.lists(SIGNS, max_size=60).map("".join) | st.text(max_size=100), max_size=6))
def test_no_text_upsets_the_readers(texts: list[str]) -> None:
    told = Told()
    for text in texts:
        told.take_lines([text], NOW_S)
        told.take_bar(text, NOW_S)
        told.offer(parse_bar(text), NOW_S)


@pytest.mark.parametrize(
    "unit", ["loss ", "1.", "a=1, ", "[", "{'a': 1", "a b c ", "1/1 ", "epoch 1 ", "| 1 ", "1:11"]
)
def test_no_text_makes_the_readers_slow(unit: str) -> None:
    text = unit * (100_000 // len(unit))
    started_s = time.process_time()
    Told().take_lines([text], NOW_S)
    assert time.process_time() - started_s < 10  # CPU time; a runaway pattern takes minutes
