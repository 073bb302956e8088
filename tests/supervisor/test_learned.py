"""Counters and numbers of formats that nobody knows, as their programs print them from the first line to the last."""

from __future__ import annotations

import itertools

import pytest

from jackline.supervisor.output.progress import Progress
from jackline.supervisor.output.told import Told

NOW_S = 1_800_000_000.0


def hear(lines: list[str], *, every_s: float = 1.0) -> Told:
    told = Told()
    for number, text in enumerate(lines):
        told.take_lines([text], NOW_S + number * every_s)
    return told


def known(told: Told) -> Progress:
    assert told.progress is not None
    return told.progress


def numbers(told: Told) -> dict[str | None, float | None]:
    return {entry.name: entry.value for entry in told.latest}


def epochs(text: str, num_epochs: int = 3, num_batches: int = 40, every: int = 10) -> list[str]:
    """All lines of a training. 'e' and 'b' of 'E' and 'B', 'l' a number that always differs."""
    return [
        text.format(e=e, E=num_epochs, b=b, B=num_batches, l=9 / (e * num_batches + b))
        for e in range(1, num_epochs + 1)
        for b in range(every, num_batches + 1, every)
    ]


NESTED = [
    "Ep {e}/{E} ┊ mb {b}/{B} ┊ obj: {l:.4f} ┊ 410 img/s",
    "Ep {e}/{E} | mb {b}/{B} | obj: {l:.4f} | 410 img/s",
    "Runde {e} von {E}, Teil {b} von {B}, obj {l:.4f}",
    "mb {b}/{B} in ep {e}/{E} obj={l:.4f}",
    "({e}/{E}) <{b}/{B}> obj={l:.4f}",
    "gpu 0 ep={e}/{E} chunk={b}/{B} rows={b}000 obj={l:.4f}",
]


@pytest.mark.parametrize("every", [5, 10, 20])
@pytest.mark.parametrize("text", NESTED)
def test_a_counter_that_starts_again_in_each_epoch_is_counted_through_the_run(text: str, every: int) -> None:
    lines = epochs(text, every=every)
    told = hear(lines[: 40 // every + 2])
    found = known(told)
    assert (found.done, found.total, found.of, found.epoch, found.epochs) == (40 + 2 * every, 120, "run", 2, 3)
    assert told.step == 40 + 2 * every
    assert found.eta_s == pytest.approx((80 - 2 * every) / every)
    told = hear(lines)
    assert numbers(told)["obj"] == pytest.approx(9 / 160, abs=1e-4)
    assert (known(told).done, known(told).total) == (120, 120)


@pytest.mark.parametrize(
    "text", ["Ep {e} mb {b}/{B} obj: {l:.4f}", "mb {b}/{B} obj: {l:.4f}", "{b} of {B}: obj {l:.4f}"]
)
def test_an_end_that_nobody_knows_is_not_named_after_one_epoch(text: str) -> None:
    told = hear(epochs(text)[:6])
    assert (known(told).done, known(told).total, known(told).of) == (20, 40, "epoch")
    assert told.step == 60
    assert numbers(told)["obj"] == pytest.approx(0.09)


def test_a_counter_without_totals_goes_on_in_the_next_epoch() -> None:
    told = hear(epochs("Ep {e} mb {b} obj: {l:.4f}")[:6])
    assert (known(told).done, known(told).total, known(told).epoch) == (20, None, 2)
    assert told.step == 60


def test_epochs_beside_a_counter_of_the_whole_run_change_nothing() -> None:
    lines = [f"pass {1 + i // 41}/3 it {i}/120 obj: {9 / i:.3f}" for i in range(10, 81, 10)]
    told = hear(lines[:3])
    assert known(told).of == "part", "it is not known yet what the first counter means"
    told = hear(lines)
    assert (known(told).done, known(told).total, known(told).of) == (80, 120, "run")


def test_the_epochs_of_one_fold_are_not_those_of_the_run() -> None:
    told = hear(
        epochs("Ep {e}/{E} | mb {b}/{B} | obj: {l:.4f}") + epochs("Ep {e}/{E} | mb {b}/{B} | obj: {l:.4f}")[:6]
    )
    assert (known(told).done, known(told).total, known(told).of) == (20, 40, "epoch")


def test_validation_between_the_epochs_neither_counts_nor_mixes_its_numbers() -> None:
    lines: list[str] = []
    for epoch in range(1, 5):
        lines += [f"[train] Ep {epoch}/4 ┊ mb {b}/40 ┊ obj: {epoch}.{b}" for b in range(10, 41, 10)]
        lines += [f"[val] Ep {epoch}/4 ┊ mb {b}/10 ┊ obj: 7.{b}" for b in range(5, 11, 5)]
        lines += [f"Ep {epoch}/4 done, q {epoch}.75"]
    told = hear(lines[:24])
    assert (known(told).done, known(told).total, known(told).unit) == (150, 160, "mb")
    told = hear(lines)
    assert (known(told).done, known(told).total, known(told).unit) == (160, 160, "mb")
    assert (numbers(told)["obj"], numbers(told)["val_obj"]) == (4.40, 7.10)


def test_an_unknown_counter_below_headings_is_in_their_epoch() -> None:
    lines = [
        line
        for epoch in (1, 2, 3)
        for line in (f"Epoch {epoch}/3", *(f"mb {b}/40 obj: {epoch}.{b}" for b in range(10, 41, 10)))
    ]
    told = hear(lines[:8])
    assert (known(told).done, known(told).total, known(told).epoch, known(told).of) == (60, 120, 2, "run")


def test_two_ranks_that_print_the_same_counter_count_once() -> None:
    lines = [f"ep {1 + i // 20}/3 mb {i % 20}/20 obj {9 / (i + 1):.3f}" for i in range(30) for _ in range(2)]
    assert (known(hear(lines)).done, known(hear(lines)).total) == (29, 60)


@pytest.mark.parametrize(
    "lines",
    [
        [f"[W] image {number}: no caption, skipped" for number in range(8, 90, 9)],
        [f"WARNING sample {number} is too long" for number in (3, 19, 22, 140, 141, 600, 777)],
        [f"could not decode clip {number}" for number in (3, 19, 22, 140, 141, 600, 777)],
        [f"queue {number} of 64, busy 0.{number}" for number in (3, 9, 31, 2, 17, 60, 12, 9, 33, 34, 1, 5)],
        [f"attempt {number} of 5 failed, sleeping {2**number} s" for number in range(1, 6)],
        [f"cache miss for key {number}" for number in (103, 119, 122, 1140, 1141, 1600, 9777, 9999)],
        [f"request {number} took 3 tries" for number in (12, 4, 99, 3, 45, 7, 80, 2)],
        list(
            itertools.chain.from_iterable(
                [f"reading row of {chr(97 + n)}{chr(97 + m)}" for m in range(25)] + [f"flushed buffer {n}"]
                for n in range(12)
            )
        ),
    ],
)
def test_a_number_that_only_names_a_thing_is_no_progress(lines: list[str]) -> None:
    assert hear(lines).progress is None


@pytest.mark.parametrize(
    "lines",
    [
        ["exported 0", "exported 20", "exported 40"],
        ["crawled 10 pages", "crawled 20 pages", "crawled 30 pages", "crawled 40 pages"],
    ],
)
def test_every_so_many_of_a_loop_are_progress(lines: list[str]) -> None:
    assert (known(hear(lines)).done, known(hear(lines)).is_guessed) == (40, True)


def test_a_learned_counter_with_a_total_outweighs_one_without() -> None:
    lines = [line for n in range(1, 9) for line in (f"packed {n} of 20 shards", f"item {n * 100}")]
    told = hear(lines, every_s=0.5)
    assert (known(told).done, known(told).total, known(told).unit) == (8, 20, "shards")


@pytest.mark.parametrize(
    ("text", "unit"),
    [
        ("tokenised {n:,} of {N:,} docs ({p}%)", "docs"),
        ("filtering: {n:_} / {N:_} rows kept", "rows"),
        ("tokens packed {n} von {N}", "packed"),
    ],
)
def test_large_numbers_are_read_and_a_preparation_is_not_the_run(text: str, unit: str) -> None:
    told = hear([text.format(n=n, N=50_000, p=n // 500) for n in range(5_000, 20_001, 5_000)])
    found = known(told)
    assert (found.done, found.total, found.unit, found.of) == (20_000, 50_000, unit, "part")


def test_the_files_of_a_preparation_are_counted_through_it() -> None:
    told = hear([f"shard {shard}/4 doc {doc}/100" for shard in (1, 2, 3) for doc in range(25, 101, 25)][:10])
    found = known(told)
    assert (found.phase, found.done, found.total, found.of) == ("shard", 250, 400, "part")


@pytest.mark.parametrize(
    "text", ["[dataloader] Ep {e}/{E} mb {b}/{B} obj {l:.4f}", "tokens {e} of {E}, {b}/{B}, nll {l:.4f}"]
)
def test_a_training_whose_first_word_is_of_a_preparation_is_the_run(text: str) -> None:
    found = known(hear(epochs(text)[:6]))
    assert (found.phase, found.done, found.total, found.of) == ("", 60, 120, "run")


def test_an_epoch_in_brackets_before_its_batch_is_not_the_batch() -> None:
    lines = epochs("[{e}/{E}] b{b}: {b}/{B} nll={l:.4f}")[:6]
    told = hear([*lines[:4], "[1/3] validation nll=0.5", *lines[4:]])
    assert numbers(told)["validation_nll"] == 0.5
    assert (known(told).done, known(told).total, known(told).epoch) == (60, 120, 2)


def test_thousands_and_millions_in_short() -> None:
    told = hear([f"seen {n / 10:.1f}k/50k rows, q={n}.5" for n in range(12, 80, 12)])
    assert (known(told).done, known(told).total, known(told).unit) == (7200, 50_000, "rows")
    told = hear([f"{n / 10:.1f}M of 3M samples, q={n}.5" for n in range(2, 8)])
    assert (known(told).done, known(told).total) == (700_000, 3_000_000)
    assert known(hear(["step 1_200/50_000 loss 0.5"])).total == 50_000


@pytest.mark.parametrize(
    ("setting", "line"),
    [
        ("max_iters = 600, eval_interval = 100", "iter {n}: loss 3.{n}, time 150.21ms"),
        ("Namespace(lr=0.1, max_steps=600, eval_steps=50)", "step {n} | loss 3.{n}"),
        ("  Total optimization steps = 600", "step {n}: loss=3.{n}"),
        ('  "total_updates": 600,', "update {n}, loss 3.{n}"),
    ],
)
def test_a_total_that_was_printed_as_a_setting_is_a_guess(setting: str, line: str) -> None:
    told = hear(["eval_iters: 20", "warmup_steps = 100", setting, *(line.format(n=n) for n in (10, 20, 30))])
    assert (known(told).done, known(told).total, known(told).is_guessed) == (30, 600, True)
    assert known(told).eta_s == pytest.approx(57)
    beyond = hear([setting, *(line.format(n=n) for n in (590, 600, 610))])
    assert (known(beyond).total, known(beyond).is_guessed) == (None, False)


def test_a_setting_that_was_printed_twice_and_not_the_same_is_not_believed() -> None:
    assert known(hear(["max_steps: 600", "max_steps: 50", "step 10 | loss 0.5"])).total is None


@pytest.mark.parametrize(
    "text", ["iteration={n} ({p:.1f}%) train/loss=3.{n} eta=0:00:46", "step {n} [{p:.0f} %] loss 3.{n} ETA: 46s"]
)
def test_a_percentage_beside_a_counter_tells_its_total(text: str) -> None:
    told = hear([text.format(n=n, p=100 * n / 240) for n in range(3, 181, 3)])
    found = known(told)
    assert (found.done, found.total, found.eta_s, found.is_guessed) == (180, 240, 46, True)


def test_percentages_that_fit_no_single_total_tell_none() -> None:
    told = hear([f"step {n} ({p}%) loss 3.5" for n, p in ((10, 45.1), (20, 44.0), (30, 61.2), (40, 99.0))])
    assert (known(told).done, known(told).total) == (40, None)


@pytest.mark.parametrize(
    ("header", "row"),
    [
        ("step,loss,lr,samples", "{n},0.{n},0.001,{m}"),
        ("step;loss;lr;samples", "{n};0.{n};0.001;{m}"),
        ("time\tstep\tloss\tlr\tsamples", "2026-11-16 10:00:00\t{n}\t0.{n}\t1e-3\t{m}"),
        ('"loss", "step", "lr", "samples"', "0.{n}, {n}, 0.001, {m}"),
    ],
)
def test_rows_of_csv_are_read_by_the_names_of_their_header(header: str, row: str) -> None:
    told = hear(["loading, please wait", header, *(row.format(n=n, m=n * 32) for n in (10, 15, 25))])
    assert (known(told).done, known(told).unit, known(told).is_guessed) == (25, "steps", True)
    assert numbers(told) == {"loss": 0.25, "lr": 0.001, "samples": 800}


def test_a_column_that_names_the_split_keeps_the_numbers_apart() -> None:
    told = hear(["epoch,split,energy,acc1", "3,train,-1.5,0.5", "3,val,-1.25,0.25", "3,val,,0.25"])
    assert (known(told).done, known(told).unit) == (3, "epochs")
    assert numbers(told) == {"energy": -1.5, "acc1": 0.5, "val_energy": -1.25, "val_acc1": 0.25}


def test_the_pause_after_each_epoch_is_in_the_time_left() -> None:
    """A validation of 100 s after each epoch of 40 s."""
    told, now_s = Told(), NOW_S
    for epoch in (1, 2):
        for batch in range(1, 41):
            now_s += 1.0
            told.take_lines([f"epoch {epoch}/4 | batch {batch}/40 | loss 0.5"], now_s)
            if (epoch, batch) == (2, 20):
                break
        now_s += 100.0
    found = known(told)
    assert (found.done, found.total) == (60, 160)
    assert found.eta_s == pytest.approx(100 + 3 * 100, rel=0.05)


def test_the_words_of_a_counter_in_a_sparse_print_still_end_its_epoch() -> None:
    """Each 40th of 100 batches is printed, so that an epoch ends after the line of its 80th."""
    told = hear([f"batch {batch}/100 loss 0.{epoch}{batch}" for epoch in (1, 2) for batch in (40, 80)])
    assert (known(told).done, known(told).of) == (80, "epoch")
    assert told.step == 180
