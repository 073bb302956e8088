"""The numbers that go with a checkpoint are those of its own step, where they can be had without waiting."""

from __future__ import annotations

import torch

from jackline.session.metrics.scalars import Scalars
from jackline.session.off import OffRun
from jackline.session.settings import Settings


def test_a_number_of_the_host_is_known_at_once_and_written_down_later() -> None:
    scalars = Scalars()
    scalars.log(10, {"val_loss": 3.9, "loss": torch.tensor(4.0)})
    scalars.send(1e9)
    scalars.resolve(wait=True)
    scalars.log(20, {"val_loss": 3.2})

    assert scalars.latest == {"val_loss": 3.9, "loss": 4.0}
    assert scalars.known() == {"val_loss": 3.2, "loss": 4.0}


def test_a_loop_reads_back_every_line_it_logged_in_order_and_once() -> None:
    scalars = Scalars()
    assert scalars.take() == []
    scalars.log(1, {"loss": 9.0})
    scalars.log(2, {"loss": torch.tensor(4.0)})
    scalars.log(2, {"val_loss": 3.9})
    expected = [(1, {"loss": 9.0}), (2, {"loss": 4.0}), (2, {"val_loss": 3.9})]
    assert [(step, values) for step, _, values in scalars.take()] == expected
    assert scalars.take(wait=True) == []
    assert [step for step, _, _ in scalars.resolve()] == [1, 2, 2], "the file gets them all the same"


def test_lines_that_the_reporting_thread_resolved_first_still_come_back_to_the_loop() -> None:
    scalars = Scalars()
    scalars.take()
    scalars.log(1, {"loss": 4.0})
    scalars.send(1e9)
    assert [step for step, _, _ in scalars.resolve()] == [1]
    assert [step for step, _, _ in scalars.take()] == [1]


def test_switched_off_a_loop_still_reads_its_own_numbers_back() -> None:
    run = OffRun(Settings(), {}, {}, None)
    run.logged()
    run.log(loss=torch.tensor(2.0), lr=0.1)
    assert run.logged(wait=True) == [(0, {"loss": 2.0, "lr": 0.1})]
