"""What the sign of life tells while nothing else is said."""

from __future__ import annotations

from jackline.session.off import OffRun
from jackline.session.settings import Settings
from jackline.trainer.report.console import Console
from jackline.trainer.report.facts import doing_text


def test_work_between_two_steps_has_its_name_for_as_long_as_it_takes() -> None:
    console = Console()
    console.now("step 3/20, optimizer")

    with console.during("mask update 0, after step 2"):
        assert console.detail == "mask update 0, after step 2"
    assert console.detail == "step 3/20, optimizer"


def test_after_the_last_step_no_further_one_is_announced() -> None:
    run = OffRun(Settings(), {}, {}, None)
    steps = run.steps(total=2)
    next(steps)
    assert doing_text(run, 2) == "step 1/2 under way"
    for _ in steps:
        pass
    assert doing_text(run, 2) == "all 2 steps are done"
