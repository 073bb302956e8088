"""The time a run needs against the time it has."""

from __future__ import annotations

from jackline.review.limits import Fit, judge_fit, limit_lines
from jackline.rundir.records.supervisor import ProgressRecord, TimeLimitRecord

NOW_S = 1_794_000_000.0  # 21:20:00 UTC
SLURM = TimeLimitRecord("Slurm", NOW_S + 3480, NOW_S + 3600, is_told=True)
COLAB = TimeLimitRecord("Colab", None, NOW_S + 3600)
GIVEN = TimeLimitRecord("given", NOW_S + 3600, NOW_S + 3600)


def going(eta_s: float | None, **more: object) -> ProgressRecord:
    return ProgressRecord(done=100, total=1000, unit="steps", rate_per_s=0.1, eta_s=eta_s, **more)  # type: ignore[arg-type]


def test_a_run_fits_or_misses_time_and_the_step_it_reaches_is_known() -> None:
    assert judge_fit(TimeLimitRecord(), going(10.0), NOW_S) is None
    assert judge_fit(SLURM, going(3000.0), NOW_S) == Fit(3480.0, True, -480.0)
    assert judge_fit(SLURM, going(9000.0), NOW_S) == Fit(3480.0, True, 5520.0, 448.0)
    assert judge_fit(COLAB, going(9000.0), NOW_S) == Fit(3600.0, False, 5400.0, 460.0)
    assert judge_fit(GIVEN, going(None), NOW_S) == Fit(3600.0, True)


def test_the_time_left_of_one_epoch_says_nothing_about_the_run() -> None:
    fit = judge_fit(SLURM, going(3.0, of="epoch"), NOW_S)
    assert fit is not None and fit.fits is None


def test_an_older_estimate_has_less_to_go() -> None:
    fit = judge_fit(SLURM, going(3500.0, at_s=NOW_S - 60), NOW_S)
    assert fit is not None and fit.missing_s == -40.0 and fit.fits


def test_an_estimate_that_has_passed_does_not_promise_that_the_run_fits() -> None:
    fit = judge_fit(SLURM, going(30.0, at_s=NOW_S - 60), NOW_S)
    assert fit is not None and fit.fits is None


def test_every_kind_of_limit_has_its_words() -> None:
    assert limit_lines(TimeLimitRecord(), going(1.0), NOW_S, is_saving=True) == []
    assert limit_lines(SLURM, going(3000.0), NOW_S, is_saving=True) == [
        "Slurm ends this job at 22:20 UTC; it is stopped and saved before, in 58 min",
        "fits",
    ]
    assert limit_lines(COLAB, going(9000.0), NOW_S, is_saving=True) == [
        "Colab ends this session at 22:20 UTC at the latest, in 1 h; nothing stops it before: `--time-limit` would",
        "does not fit: 1 h 30 min are missing; it gets to about 460 steps; `jackline resume` continues",
    ]
    assert limit_lines(GIVEN, going(None), NOW_S, is_saving=False) == ["it is stopped in 1 h (22:20 UTC)"]
    kaggle = TimeLimitRecord("Kaggle", NOW_S + 60, NOW_S + 120)
    assert limit_lines(kaggle, going(None), NOW_S, is_saving=False) == [
        "Kaggle ends this session at 21:22 UTC (its published limit); it is stopped before, in 1 min"
    ]
