"""What is said of a validation, when a full one is worth it, and the alarms for a model that says the same of all."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from jackline.recipes.agab.metrics import Gain, measure
from jackline.recipes.agab.parts import Best
from jackline.recipes.agab.validation import gives_up, metrics_text, quick_places, worth_a_full
from jackline.trainer.sentinels.watch import EvalFacts, Facts, PairFacts, Sentinels, StepFacts

HEALTHY = PairFacts(num_rows=2396, num_distinct=2390, spread=0.8, wanted_spread=1.1, loss=1.2, train_loss=0.9)
FACTS = Facts(vocab_size=0, tokens_per_step=256)


def alarms(*validations: PairFacts) -> list[str]:
    watch = Sentinels(FACTS)
    found = []
    for number, pairs in enumerate(validations, start=1):
        facts = EvalFacts(1000 * number, [pairs.loss], pairs=pairs)
        found += [f"{alarm.kind}: {alarm.text}" for alarm in watch.look_eval(facts)]
    return found


def test_a_healthy_model_raises_no_alarm() -> None:
    assert alarms(HEALTHY, HEALTHY, replace(HEALTHY, loss=0.5)) == []


def test_nine_values_for_all_pairs_are_a_collapse_when_it_lasts() -> None:
    bad = replace(HEALTHY, num_distinct=9)
    assert alarms(bad) == []
    assert alarms(bad, HEALTHY, bad) == []
    assert alarms(bad, bad) == [
        "collapse: step 2,000: the predictions have collapsed: 9 different ones for 2,396 pairs,"
        " standard deviation 0.8 where the labels have 1.1"
    ]


def test_predictions_that_hardly_differ_are_a_collapse_too() -> None:
    narrow = replace(HEALTHY, spread=0.05)
    assert [text.split(":")[0] for text in alarms(narrow, narrow)] == ["collapse"]


def test_three_times_the_training_loss_is_an_overfit() -> None:
    assert alarms(replace(HEALTHY, loss=2.69)) == []
    assert alarms(replace(HEALTHY, loss=2.8)) == [
        "overfit: step 1,000: validation loss 2.8 is 3.1 times the training loss 0.9"
    ]


def test_before_a_hundred_steps_nothing_is_said() -> None:
    watch = Sentinels(FACTS)
    bad = replace(HEALTHY, num_distinct=9, loss=9.0)
    assert [alarm for step in (1, 50, 99) for alarm in watch.look_eval(EvalFacts(step, [9.0], pairs=bad))] == []


def test_a_handful_of_pairs_proves_nothing() -> None:
    few = PairFacts(num_rows=8, num_distinct=1, spread=0.0, wanted_spread=1.0, loss=9.0, train_loss=0.1)
    assert alarms(few, few, few) == []


def test_what_the_alarms_remember_survives_a_resume() -> None:
    first, second = Sentinels(FACTS), Sentinels(FACTS)
    bad = EvalFacts(100, [1.0], pairs=replace(HEALTHY, num_distinct=3))
    assert first.look_eval(bad) == []
    second.load_state_dict(first.state_dict())
    assert [alarm.kind for alarm in second.look_eval(bad)] == ["collapse"]


def test_a_loss_with_powers_of_the_error_may_jump_but_not_by_a_hundred_times() -> None:
    watch = Sentinels(FACTS)
    draw = np.random.default_rng(2)
    usual = [float(loss) for loss in np.exp(draw.normal(0, 0.3, 60))]
    losses = [*usual, 30.0, 1.0, 5000.0]
    found = [alarm for step, loss in enumerate(losses, 1) for alarm in watch.look(StepFacts(step=step, loss=loss))]
    assert [alarm.text.split(" from")[0] for alarm in found] == ["step 63: loss jumped to 5000"]


def test_only_what_is_better_beyond_noise_is_worth_a_full_validation() -> None:
    good = measure([1.0, 2.0, 3.0, 5.0], [1.0, 2.0, 4.0, 3.0])
    flat = measure([1.0, 1.0, 1.0, 1.0], [1.0, 2.0, 4.0, 3.0])
    assert worth_a_full(good, None, has_best=False) == (True, "the first")
    assert worth_a_full(flat, None, has_best=False) == (False, "never a best")
    for gain, expected in (
        (Gain(0.02, 0.01, 0.03), (True, "better than the best so far by 0.0200 ± 0.0100, beyond noise")),
        (Gain(0.02, -0.01, 0.05), (False, "+0.0200 ± 0.0300 to the best so far is within noise")),
        (Gain(-0.02, -0.02, -0.02), (False, "not better than the best so far (-0.0200)")),
    ):
        assert worth_a_full(good, gain, has_best=True) == expected


def test_the_words_of_a_validation() -> None:
    draw = np.random.default_rng(0)
    wanted = draw.normal(8, 1, 500)
    text = metrics_text(measure(wanted + draw.normal(0, 1, 500), wanted))
    assert text == (
        "Spearman 0.7205 (0.6696 to 0.7647), Pearson 0.7356, RMSE 0.9405, recall@9 62 %, 500 distinct of 500"
    )
    assert metrics_text(measure([7.0, 7.0, 7.0], [5.0, 6.0, 7.0])) == (
        "Spearman is not defined: all predictions are 7, RMSE 1.2910, 1 distinct of 3"
    )


@pytest.mark.parametrize(("count", "wanted"), [(2396, 240), (10, 10), (5, 1)])
def test_the_quick_pairs_are_the_same_ones_every_time(count: int, wanted: int) -> None:
    places = quick_places(count, wanted)
    assert len(np.unique(places)) == wanted and 0 <= places.min() <= places.max() < count
    assert np.array_equal(places, quick_places(count, wanted))


def stale_after(*found: float | None, is_epoch_end: bool = True) -> int:
    best = Best(torch.empty(0))
    for now in found:
        best.count(now, 0.01, is_epoch_end=is_epoch_end)
        after = Best(torch.empty(0))
        after.load_state_dict(best.state_dict())  # a resume between any two of them
        best = after
    return best.num_stale


def test_small_gains_add_up_before_early_stopping_counts_them_as_none() -> None:
    assert stale_after(0.5, 0.5, 0.4, None) == 3
    assert stale_after(0.5, 0.506, 0.512) == 0  # 0.012 in two steps
    assert stale_after(0.5, 0.506, 0.509) == 2
    assert stale_after(None, None) == 2
    assert stale_after(0.5, 0.4, 0.3, is_epoch_end=False) == 0


def test_a_short_validation_is_finished_although_the_end_was_asked_for() -> None:
    assert [gives_up(True, 0.5), gives_up(True, 60.0), gives_up(False, 60.0)] == [False, True, False]
