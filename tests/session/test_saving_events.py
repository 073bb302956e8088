"""What is told of saves that are skipped or fail again and again: once, then counted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from jackline.checkpoint.ticket import Event
from jackline.errors import UsageError
from jackline.rundir.layout import DISK_BUDGET_VARIABLE
from jackline.session.saving.saver import FOLD_S, Repeats, Saver
from jackline.session.settings import Settings, split


class Told:
    """A reporter that remembers."""

    def __init__(self) -> None:
        self.events: list[tuple[str, str, bool]] = []

    def __call__(self, kind: str, text: str, *, is_loud: bool = False, **fields: Any) -> None:
        self.events.append((kind, text, is_loud))


class Engine:
    """Only what a saver asks of one here: a list of events."""

    why_off = ""

    def __init__(self) -> None:
        self.waiting: list[Event] = []

    def poll(self) -> list[Event]:
        found, self.waiting = self.waiting, []
        return found

    def close(self) -> list[Event]:
        return self.poll()


@pytest.fixture
def told() -> Told:
    return Told()


def make_saver(told: Told) -> tuple[Saver, Engine, list[float]]:
    engine, now = Engine(), [1000.0]
    saver = Saver(engine, {}, Settings())  # type: ignore[arg-type]
    saver._repeats = Repeats(lambda: now[0])
    saver.report_to(told)
    return saver, engine, now


def skip(step: int) -> Event:
    why = "the save before it is still being written"
    return Event("skipped", f"step {step} was not saved: {why}", step, True)


def fail(step: int, why: str = "the disk is full") -> Event:
    return Event("failed", f"step {step} could not be saved: {why}", step, True, fields={"why": why})


def test_hundreds_of_skipped_saves_are_two_events(told: Told) -> None:
    saver, engine, now = make_saver(told)
    for step in range(1, 629):
        engine.waiting = (
            [skip(step), Event("committed", f"saved step-{step}", step)] if step % 3 == 0 else [skip(step)]
        )
        saver.poll(float(step), is_urgent=True)
    now[0] += FOLD_S
    saver.poll(1e6, is_urgent=True)
    skipped = [event for event in told.events if event[0] == "checkpoint_skipped"]
    assert skipped == [
        ("checkpoint_skipped", "step 1 was not saved: the save before it is still being written", False),
        (
            "checkpoint_skipped",
            "627 more saves were skipped (steps 2 to 628): the save before it is still being written",
            False,
        ),
    ]


def test_failures_are_told_at_once_then_counted_and_their_end_is_told(told: Told) -> None:
    saver, engine, now = make_saver(told)
    for step in range(10, 60, 10):
        engine.waiting = [fail(step)]
        saver.poll(float(step), is_urgent=True)
    assert told.events == [("checkpoint_failed", "step 10 could not be saved: the disk is full", True)]
    now[0] += FOLD_S
    saver.poll(1e6, is_urgent=True)
    assert told.events[1:] == [
        ("checkpoint_failed", "4 more saves were lost (steps 20 to 50): the disk is full", True)
    ]
    engine.waiting = [fail(60), Event("committed", "saved step-70", 70)]
    saver.poll(2e6, is_urgent=True)
    assert told.events[2:] == [
        ("checkpoint_failed", "1 more save was lost (step 60): the disk is full", True),
        ("checkpoint_works", "saving works again: step 70 is saved", True),
        ("checkpoint_committed", "saved step-70", False),
    ]


def test_another_reason_is_told_at_once_and_the_rest_at_the_end(told: Told) -> None:
    saver, engine, _ = make_saver(told)
    engine.waiting = [fail(1), fail(2), fail(3, "the disk is read-only")]
    saver.close()
    texts = [text for _, text, _ in told.events]
    assert "step 3 could not be saved: the disk is read-only" in texts


# -- the setting -----------------------------------------------------------------------------------------------------


def test_a_disk_budget_is_a_number_of_bytes_or_a_text_like_20G() -> None:
    assert split({"disk_budget": "20G", "model": torch.nn.Linear(1, 1)})[0].disk_budget == 20 << 30
    assert split({"disk_budget": 5000})[0].disk_budget == 5000
    assert split({"wait_for_disk_s": "5m"})[0].wait_for_disk_s == 300.0
    with pytest.raises(UsageError, match="'much' is not a size"):
        split({"disk_budget": "much"})
    with pytest.raises(UsageError, match="disk_budget=0 is too small"):
        split({"disk_budget": 0})


def test_the_smaller_of_the_two_budgets_holds(tmp_path: Path) -> None:
    settings = Settings(disk_budget=100)
    assert settings.budget({}) == 100
    assert settings.budget({DISK_BUDGET_VARIABLE: "60"}) == 60
    assert settings.budget({DISK_BUDGET_VARIABLE: "600"}) == 100
    assert Settings().budget({DISK_BUDGET_VARIABLE: "60"}) == 60
    assert Settings().budget({DISK_BUDGET_VARIABLE: ""}) is None
