"""Sentinels on planted faults, and their silence on healthy runs."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np
import pytest

from jackline.trainer.optim.schedule import Schedule, lr_at
from jackline.trainer.sentinels.data import RepeatedData, interval_95
from jackline.trainer.sentinels.floor import Floor, entropy_floor
from jackline.trainer.sentinels.watch import Alarm, EvalFacts, Facts, Sentinels, StepFacts, Surroundings
from tests.counted import count_calls

SCHEDULE = Schedule("cosine", 3e-4, 3e-5, warmup_steps=100, total_steps=2000)
TEXT = Floor(0.25, "xz packs this data to 2.50 nats a token, and no model packs ten times better")
NOISE = Floor(5.27, "these tokens are noise, ln(256) = 5.55 nats each", is_noise=True)
FACTS = Facts(vocab_size=50_304, schedule=SCHEDULE, tokens_per_step=32_768, floor=TEXT)


def healthy(count: int = 600, seed: int = 0, vocab_size: int = 50_304) -> Iterator[StepFacts]:
    """A loss as real runs have it: from ln V down like a power, with noise; every window once."""
    rng = random.Random(seed)
    order = list(range(count * 8))
    rng.shuffle(order)
    for step in range(1, count + 1):
        loss = 2.9 + (math.log(vocab_size) - 2.9) / (1 + step / 25) ** 0.8 + rng.gauss(0, 0.06)
        yield StepFacts(
            step=step,
            loss=loss,
            lr=lr_at(step - 1, SCHEDULE),
            grad_norm=abs(rng.gauss(0.8, 0.1)),
            tokens_per_s=480_000 * rng.uniform(0.96, 1.04),
            data_wait_share=0.003,
            seconds=0.068,
            micro_batch=32,
            windows=[1024 * window for window in order[8 * (step - 1) : 8 * step]],
        )


def alarms_of(steps: Iterable[StepFacts], facts: Facts = FACTS) -> list[Alarm]:
    watch = Sentinels(facts)
    return [alarm for step in steps for alarm in watch.look(step)]


def only(alarms: list[Alarm], kind: str) -> Alarm:
    assert {alarm.kind for alarm in alarms} == {kind}, alarms
    return alarms[0]


@pytest.mark.parametrize("seed", range(20))
def test_a_healthy_run_hears_nothing(seed: int) -> None:
    assert alarms_of(healthy(seed=seed)) == []


# -- the floor


def leaking(count: int) -> Iterator[StepFacts]:
    for step in healthy(count):
        yield replace(step, loss=max(0.002, (step.loss or 0.0) - step.step / 20))


def test_a_loss_no_honest_model_could_have_is_called_a_leak() -> None:
    alarm = only(alarms_of(leaking(300)), "loss-under-floor")
    assert alarm.is_fatal
    loss = (
        "over 8 steps is lower than honest predictions can be (0.25: xz packs this data to 2.50 nats a token, and no"
    )
    assert f"{loss} model packs ten times better)" in alarm.text
    assert alarm.hint.startswith("the model very likely sees its targets: check that attention is causal")


def test_text_seen_a_second_time_may_be_known_by_heart() -> None:
    assert alarms_of(replace(step, epoch=1) for step in leaking(300)) == []


def test_the_loss_of_our_seed_on_random_bytes_is_found_at_once() -> None:
    facts = Facts(vocab_size=256, tokens_per_step=512, floor=NOISE)
    honest = [StepFacts(step, loss=math.log(256) + random.Random(step).gauss(0.02, 0.03)) for step in range(1, 400)]
    assert alarms_of(honest, facts) == [], "flat at ln V is the truth on noise"
    alarm = only(alarms_of([*honest[:50], StepFacts(51, loss=1.04)], facts), "loss-under-floor")
    assert alarm.text.startswith("step 51: loss 1.04 is lower than honest predictions can be (5.27: these tokens are")


def test_a_negative_loss_is_impossible_without_any_floor() -> None:
    alarm = only(alarms_of([StepFacts(3, loss=-0.1)], Facts(100)), "loss-under-floor")
    assert alarm.text == "step 3: loss -0.1 is below 0, which no cross-entropy can be"


def test_a_validation_loss_under_the_floor_is_a_leak_in_any_epoch() -> None:
    alarms = Sentinels(FACTS).look_eval(EvalFacts(900, [0.1, 0.12, 0.09]))
    assert "in validation is lower than honest predictions can be" in only(alarms, "loss-under-floor").text


def test_the_floor_of_text_noise_and_trivial_data() -> None:
    rng = np.random.default_rng(1)
    noise = entropy_floor(rng.integers(0, 256, 20_000), 256)
    assert noise is not None and noise.is_noise and noise.nats == pytest.approx(0.95 * math.log(256))
    wide = entropy_floor(rng.integers(0, 50_304, 262_144), 50_304)
    assert wide is not None and wide.is_noise
    words = (json.__doc__ or "") + (random.__doc__ or "") + (np.ndarray.__doc__ or "")
    text = entropy_floor(np.frombuffer(words.encode(), np.uint8), 256)
    assert text is not None and not text.is_noise and 0.1 < text.nats < 0.35
    zeros = entropy_floor(np.zeros(10_000, np.int64), 256)
    assert zeros is not None and zeros.nats < 0.01
    assert entropy_floor(np.zeros(100, np.int64), 256) is None


# -- flat


def test_a_model_that_stays_at_guessing_is_found_and_a_long_warm_up_is_not() -> None:
    facts = replace(FACTS, schedule=Schedule("constant", 1e-3, total_steps=500))
    flat = [StepFacts(step, loss=10.83, lr=1e-3) for step in range(1, 200)]
    alarms = alarms_of(flat, facts)
    expected = "loss 10.8300 is still about ln(V) = 10.8258, as at the start, after 50 steps: nothing is being learnt"
    assert [alarm.text for alarm in alarms] == [f"step 50: {expected}"]
    # Fine-tuning begins far below ln V and may stay there.
    assert alarms_of([StepFacts(step, loss=3.1, lr=1e-3) for step in range(1, 200)], facts) == []
    slow = Schedule("cosine", 1e-4, 0, warmup_steps=2000, total_steps=20_000)
    warming = [StepFacts(step, loss=10.83, lr=lr_at(step - 1, slow)) for step in range(1, 200)]
    assert alarms_of(warming, replace(FACTS, schedule=slow)) == []


# -- single numbers


def test_a_learning_rate_that_is_not_the_planned_one_is_found_in_its_first_step() -> None:
    wrong = (replace(step, lr=1e-4) if step.step == 500 else step for step in healthy())
    alarm = only(alarms_of(wrong), "wrong-lr")
    assert alarm.text == "step 500: the learning rate is 0.0001, the schedule says 0.0002716"
    # A scheduler that is one step ahead: off by one is seen in the warm-up.
    ahead = (replace(step, lr=lr_at(step.step, SCHEDULE)) for step in healthy(50))
    assert only(alarms_of(ahead), "wrong-lr").text.startswith("step 1: the learning rate is")


def test_gradients_of_nothing_are_found_in_the_second_step() -> None:
    cut = (replace(step, grad_norm=0.0) if step.step > 30 else step for step in healthy(60))
    alarm = only(alarms_of(cut), "zero-gradient")
    assert alarm.text == "step 32: the gradient norm was exactly 0 for 2 steps: no weight learns anything"


@pytest.mark.parametrize(("field", "name"), [("loss", "loss"), ("grad_norm", "gradient norm")])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_none_comes_with_the_ids_of_its_batch(field: str, name: str, value: float) -> None:
    steps = [replace(step, windows=list(range(step.step, step.step + 12))) for step in healthy(40)]
    steps[39] = replace(steps[39], **{field: value}, windows=[7, 8, 9])
    alarms = [alarm for alarm in alarms_of(steps) if alarm.kind == "not-finite"]
    assert [alarm.text for alarm in alarms] == [f"step 40: {name} is {value}; its windows: 7, 8, 9"]
    assert alarms[0].is_fatal and alarms[0].is_ruin


def test_the_scalers_search_is_no_alarm_until_it_does_not_end() -> None:
    skipped = [StepFacts(step, loss=9.0, grad_norm=math.inf, is_skipped=True) for step in range(1, 30)]
    assert alarms_of(skipped[:24]) == []
    alarm = only(alarms_of(skipped), "always-skipped")
    assert alarm.is_fatal and not alarm.is_ruin, "the weights are still good"
    assert alarm.text == "step 25: 25 steps in a row had infinite gradients and were skipped"


# -- spikes


def test_a_spike_is_told_with_its_batch_and_one_that_stays_as_a_divergence() -> None:
    jump = [replace(step, loss=9.5) if step.step == 400 else step for step in healthy()]
    alarm = only(alarms_of(jump), "loss-spike")
    assert alarm.text.startswith("step 400: loss jumped to 9.5 from 3.769; its windows: ")
    assert not alarm.is_fatal
    gone = [replace(step, loss=8.0) if step.step >= 400 else step for step in healthy()]
    alarms = alarms_of(gone)
    assert [alarm.kind for alarm in alarms] == ["loss-spike", "loss-diverged"]
    assert alarms[1].text.startswith("step 463: loss 8 has not come down for 64 steps; it was 3.769")


def test_small_batches_may_jump_about() -> None:
    rng = random.Random(3)
    facts = Facts(50_304, tokens_per_step=256, floor=TEXT)
    # One document in fifty is of another kind.
    steps = [StepFacts(step, loss=3.5 + rng.gauss(0, 0.3) + 2.0 * (rng.random() < 0.02)) for step in range(1, 800)]
    assert alarms_of(steps, facts) == []


# -- repeated data


def test_a_batch_given_out_twice_is_found() -> None:
    steps = list(healthy(50))
    steps[30] = replace(steps[30], windows=steps[29].windows)
    alarm = only(alarms_of(steps), "data-repeated")
    assert alarm.text.startswith("step 31: windows came a second time in epoch 0: ")


def test_a_new_epoch_may_see_everything_again() -> None:
    first = list(healthy(50))
    assert alarms_of([*first, *(replace(step, epoch=1) for step in first)]) == []


def test_a_position_lost_far_back_is_found_by_the_sample() -> None:
    rule = RepeatedData()
    per_step, total = 64, 400_000
    order = np.random.default_rng(0).permutation(total) * 1024

    def looked_at(first: int, count: int) -> list[Alarm]:
        places = range(first, first + count, per_step)
        return [a for at in places for a in rule.look(StepFacts(1, windows=order[at : at + per_step]))]

    assert looked_at(0, 300_000) == []
    rule.load(json.loads(json.dumps(rule.state())))
    assert looked_at(300_032, 64) == []
    # After a resume from the wrong place: 3 % of the epoch come again.
    assert looked_at(64_000, 12_800)
    assert len(json.dumps(rule.state())) < 60_000


def test_windows_twice_in_one_batch_are_found() -> None:
    alarm = only(alarms_of([StepFacts(1, windows=[5, 6, 5])]), "data-repeated")
    assert alarm.text == "step 1: windows came a second time in epoch 0: 5"


# -- speed


def slow_from(step_number: int, **changes: object) -> Iterator[StepFacts]:
    for step in healthy(300):
        slow = replace(step, seconds=0.2, tokens_per_s=160_000.0, **changes)
        yield slow if step.step >= step_number else step


def slowness(around: list[Surroundings] | None = None, **changes: object) -> Alarm:
    readings = iter(around or [])
    watch = Sentinels(FACTS, (lambda: next(readings)) if around else None)
    return only([alarm for step in slow_from(200, **changes) for alarm in watch.look(step)], "slow")


def test_a_drop_is_told_with_what_was_measured_inside_the_step() -> None:
    assert slowness(data_wait_share=0.7).text.endswith(": 70 % of a step is spent waiting for data")
    assert slowness(saved_s=0.12).text.endswith(": 0.1 s of a step is spent saving")
    shrunk = ": the micro-batch shrank from 32 to 16 after running out of memory"
    assert slowness(micro_batch=16).text.endswith(shrunk)
    unknown = slowness()
    assert unknown.text.startswith("step 215: 160,000 tokens/s, 66 % less than before (")
    assert unknown.text.endswith("): the cause was not found")


def test_a_drop_is_told_with_what_the_machine_says() -> None:
    base = Surroundings(0.0, others_cpu_s=100.0, queued_s=0.0, allocator_retries=0, swapped_bytes=0)
    began = replace(base, at_s=1000.0, others_cpu_s=200.0, queued_s=5.0)
    calm = replace(began, at_s=1004.0)

    def cause(now: Surroundings) -> str:
        return slowness([base, began, now]).text.partition("): ")[2]

    assert cause(calm) == "the cause was not found"
    hot = replace(calm, gpu_slowdown="too hot", gpu_clock_share=0.55)
    assert cause(hot) == "the GPU slowed itself down: too hot (clock at 55 % of its highest)"
    shared = replace(calm, gpu_others=("pid 42 (python other.py)",))
    assert cause(shared) == "others work on the same GPU: pid 42 (python other.py)"
    full = replace(calm, allocator_retries=3)
    assert cause(full) == "the GPU's memory is full: the allocator gave memory back and asked anew 3 times"
    assert cause(replace(calm, swapped_bytes=1 << 30)) == "1.0 GiB of it were swapped to disk"
    busy = replace(calm, others_cpu_s=206.0, queued_s=9.0)
    waits = "other processes use 1.5 CPUs, and threads of this one wait 1.0 s a second for theirs"
    assert cause(busy) == waits
    # Others busy on CPUs nobody here waits for are no cause.
    assert cause(replace(busy, queued_s=5.1)) == "the cause was not found"


def test_a_reading_that_fails_disturbs_nothing() -> None:
    def broken() -> Surroundings:
        raise OSError("the driver is gone")

    watch = Sentinels(FACTS, broken)
    alarms = [alarm for step in slow_from(200) for alarm in watch.look(step)]
    assert only(alarms, "slow").text.endswith("): the cause was not found")


def test_single_slow_steps_are_no_drop() -> None:
    assert alarms_of(replace(step, tokens_per_s=9e4, seconds=0.4) if step.step % 7 == 0 else step
                     for step in healthy()) == []  # fmt: skip


# -- validation


def test_a_new_best_within_the_noise_is_called_so() -> None:
    rng = random.Random(5)
    before = [3.0 + rng.gauss(0, 0.5) for _ in range(20)]
    watch = Sentinels(replace(FACTS, full_validation_parts=5000))
    assert watch.look_eval(EvalFacts(100, before, 1024)) == []
    # Better by 0.01 in the mean, but each part moves by 0.05.
    shifts = [rng.gauss(0, 0.05) for _ in before]
    mean = sum(shifts) / len(shifts)
    after = [loss + shift - mean - 0.01 for loss, shift in zip(before, shifts, strict=True)]
    (alarm,) = watch.look_eval(EvalFacts(200, after, 1024))
    assert alarm.kind == "validation-too-small"
    claim = "step 200: validation loss 2.8961 counts as the new best by 0.01, but 20 parts (20,480 tokens)"
    assert alarm.text == f"{claim} can only tell changes above 0.03"
    assert alarm.hint == "about 176 parts would tell, and there are 5,000: a larger eval_share"


def test_an_even_improvement_is_believed_however_different_the_texts_are() -> None:
    rng = random.Random(6)
    watch = Sentinels(FACTS)
    losses = [3.0 + rng.gauss(0, 0.8) for _ in range(40)]
    for number in range(10):
        assert watch.look_eval(EvalFacts(number, losses)) == []
        losses = [loss - 0.02 + rng.gauss(0, 0.005) for loss in losses]
    assert watch.look_eval(EvalFacts(11, [loss + 1 for loss in losses])) == [], "worse claims nothing"


def test_one_part_can_tell_nothing() -> None:
    watch = Sentinels(FACTS)
    watch.look_eval(EvalFacts(1, [3.0]))
    (alarm,) = watch.look_eval(EvalFacts(2, [2.9]))
    assert alarm.text == "step 2: validation has 1 part: whether 2.9000 is better cannot be told"


def test_the_interval_holds_the_truth_about_95_times_of_100() -> None:
    rng = random.Random(7)
    inside = 0
    for _ in range(1000):
        before = [rng.gauss(3, 1) for _ in range(8)]
        after = [loss - 0.1 + rng.gauss(0, 0.2) for loss in before]
        width = interval_95(before, after)
        mean = sum(after) / 8 - sum(before) / 8
        inside += width is not None and abs(mean + 0.1) <= width
    assert 930 <= inside <= 970


# -- together


def test_a_lasting_fault_is_said_seldom() -> None:
    cut = [StepFacts(step, grad_norm=0.0) for step in range(1, 4000)]
    steps = [int(alarm.text.split()[1].rstrip(":").replace(",", "")) for alarm in alarms_of(cut)]
    assert steps == [2, 202, 602, 1402, 3002]


def test_a_resumed_watch_says_what_an_unbroken_one_says() -> None:
    steps = [replace(step, loss=9.0) if step.step in (410, 411) else step for step in leaking(700)]
    unbroken = Sentinels(FACTS)
    whole = [alarm for step in steps for alarm in unbroken.look(step)]
    first = Sentinels(FACTS)
    heard = [alarm for step in steps[:405] for alarm in first.look(step)]
    second = Sentinels(FACTS)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    heard += [alarm for step in steps[405:] for alarm in second.look(step)]
    assert heard == whole and len(whole) >= 2
    assert second.num_alarms == unbroken.num_alarms == len(whole)


def test_a_state_of_another_version_is_no_reason_not_to_resume() -> None:
    watch = Sentinels(FACTS)
    watch.load_state_dict({"rules": {"of-the-future": {"x": 1}}})
    assert watch.look(StepFacts(1, loss=10.8)) == []


def test_a_healthy_step_costs_less_than_a_hundred_calls() -> None:
    """Counted, not timed: 75 calls are some 10 us on an idle machine, and any number of them on a crowded one."""
    watch = Sentinels(FACTS)
    steps = list(healthy(2000))
    assert count_calls(lambda: [watch.look(step) for step in steps]) < 100 * len(steps)


# -- the gates of sparse attention


def gated(entropy: float, largest: float, steps: Iterable[int]) -> Iterator[StepFacts]:
    """Healthy steps, some of which were looked at."""
    values = {
        "gate_entropy_least": entropy,
        "gate_max_most": largest,
        "gate_worst_layer": 4.0,
        "gate_compressed": 0.2,
        "gate_selected": 0.7,
        "gate_window": 0.1,
    }
    for step in healthy(300):
        yield replace(step, values=values) if step.step in steps else step


@pytest.mark.parametrize(("entropy", "largest"), [(0.08, 0.7), (0.5, 0.97)])
def test_a_layer_whose_gates_have_collapsed_is_told_the_third_time_it_is_seen(entropy: float, largest: float) -> None:
    alarm = only(alarms_of(gated(entropy, largest, range(50, 300, 50))), "gates")
    assert alarm.text == (
        f"step 150: the gates of layer 4 have collapsed: their entropy is {entropy:.2f} of 1.10, one branch gets"
        f" {largest:.2f} of the weight; over all layers most goes to 'selected' (0.70)"
    )
    assert alarm.hint == (
        "it was so at step 50 already: a lower lr or a longer warm-up from the start (--new), or from a checkpoint"
        " before that (`jackline resume --step N`, stop it, then --continue-with-changes)"
    )
    assert alarm.is_fatal and not alarm.is_ruin


def test_gates_that_are_well_or_collapse_once_hear_nothing() -> None:
    assert alarms_of(gated(0.9, 0.6, range(1, 300))) == []
    assert alarms_of(gated(0.01, 0.99, (50, 100))) == []
    assert alarms_of(gated(math.nan, math.nan, range(1, 300))) == []  # that is another sentinel's


def test_a_collapse_is_counted_on_after_a_resume() -> None:
    steps = list(gated(0.01, 0.99, (50, 100, 150)))
    first, second = Sentinels(FACTS), Sentinels(FACTS)
    assert [alarm for step in steps[:120] for alarm in first.look(step)] == []
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert only([alarm for step in steps[120:] for alarm in second.look(step)], "gates").text.startswith("step 150: ")
