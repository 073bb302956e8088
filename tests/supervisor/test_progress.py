"""What is recognised as progress, what is not, and the pace that follows."""

from __future__ import annotations

import random
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jackline.supervisor.output.bars import parse_bar
from jackline.supervisor.output.journey import Journey
from jackline.supervisor.output.lines import parse_line
from jackline.supervisor.output.progress import Pace, Progress, parse_protocol


def bar(phase: str, done: float, total: float | None, unit: str, rate: float | None, eta: float | None) -> Progress:
    return Progress(phase, done, total, unit, None if rate is None else pytest.approx(rate), eta, "bar")


BARS = {
    " 45%|####      | 450/1000 [00:12<00:15, 36.1it/s]": bar("", 450, 1000, "it", 36.1, 15),
    "Epoch 1:   0%|          | 0/20 [00:00<?, ?batch/s]": bar("Epoch 1", 0, 20, "batch", None, None),
    "Map:  45%|████▌     | 450/1000 [00:12<00:15, 36.10 examples/s]": bar("Map", 450, 1000, "examples", 36.1, 15),
    "Downloading shards:  50%|█████     | 1/2 [00:33<00:33, 33.41s/it]": bar(
        "Downloading shards", 1, 2, "it", 1 / 33.41, 33
    ),
    "model-00001.safetensors:  12%|█▏        | 598M/4.98G [00:05<00:40, 109MB/s]": bar(
        "model-00001.safetensors", 598e6, 4.98e9, "B", 109e6, 40
    ),
    "Epoch 3: 45%|x| 45/100 [1:02:03<1 day, 2:03:04, 1.3it/s, loss=2.1, v_num=3]": bar(
        "Epoch 3", 45, 100, "it", 1.3, 93784
    ),
    "100%|██████████| 20/20 [00:01<00:00, 19.88it/s]": bar("", 20, 20, "it", 19.88, 0),
    "Loading checkpoint shards:  33%|███▎      | 1/3": bar("Loading checkpoint shards", 33, 100, "%", None, None),
    "450it [00:12, 36.1it/s]": bar("", 450, None, "it", 36.1, None),
    "rows: 12.3kit [00:12, 1.2kit/s]": bar("rows", 12300, None, "it", 1200, None),
    "Working ━━━━━━━━━━╺━━━━━━━━━━━━━━━━━━━  25% 0:00:01": bar("Working", 25, 100, "%", None, 1),
    "Working ━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━ 100% 0:00:09": bar("Working", 100, 100, "%", None, 0),
    "outer ━━━━╺━━━━━━━━━━━━━━━━━━━  1/10   0:00:01": bar("outer", 1, 10, "", None, 1),
    "   ━━━━━━━━━━━━━━━━━━━━━━━━━ 12.3/45.6 MB 3.2 MB/s eta 0:00:10": bar("", 12.3e6, 45.6e6, "B", 3.2e6, 10),
    "file.bin            45%[========>           ]  12.34M  3.21MB/s    eta 10s": bar(
        "file.bin", 12.34e6, pytest.approx(12.34e6 / 0.45), "B", 3.21e6, 10
    ),
    " 45 12.3M   45 5.5M    0     0  1234k      0  0:00:10  0:00:04  0:00:06 1300k": bar(
        "", 5.5e6, 12.3e6, "B", 1.3e6, 6
    ),
    "######################   45.2%": bar("", 45.2, 100, "%", None, None),
    " 12/100 [===>..........................] - ETA: 3s - loss: 2.3": bar("", 12, 100, "steps", None, 3),
    " 12/100 ━━━━━━━━━━━━━━━━━━━━ 3s 35ms/step - loss: 2.31": bar("", 12, 100, "steps", 1 / 0.035, 3),
    "resolving": None,
    "Receiving objects: 140% of what": None,
}

LINES = {
    "step 120/1000": (120, 1000, "steps"),
    "Epoch 3/10": (3, 10, "epochs"),
    "Epoch [3/10], Step [100/600], Loss: 0.1234": (100, 600, "steps"),
    "[INFO] iteration  100/ 5000 | loss 2.3": (100, 5000, "iterations"),
    "Train Epoch: 1 [640/60000 (1%)]\tLoss: 2.3": (640, 60000, ""),
    "iter 450: loss 2.1": (450, None, "iterations"),
    "step: 1,200 loss=1.2": (1200, None, "steps"),
    "step 450 | loss 2.1 | lr 3e-4": (450, None, "steps"),
    "{'loss': 2.1, 'learning_rate': 5e-05, 'epoch': 0.5}": (0.5, None, "epochs"),
    " 45%|####      | 450/1000 [00:12<00:15, 36.1it/s]": (450, 1000, "it"),
    "Epoch: 5 | loss: 2.1": (5, None, "epochs"),
}

NOT_PROGRESS = [
    "",
    "hello",
    "step 10/5",
    "batch size 32",
    "update available: 3.2 -> 3.3",
    "loaded 12/34 shards of 2024/11/15",
    "step up the learning rate",
    "Step 3.5 loss",
    "download 45% done",
    "=" * 80,
    "epochs = 10",
    "max_steps=1000",
]

PROTOCOL_LINES = {
    "::jackline phase=tokenise done=120 total=1000 unit=docs": ("tokenise", 120, 1000, "docs"),
    '::jackline phase="load \\"big\\" data" done=1': ('load "big" data', 1, None, ""),
    "::jackline phase='a b' done=1.5 colour=red": ("a b", 1.5, None, ""),
    "::jackline phase=save": ("save", 0, None, ""),
    "::jackline done=3 total=": ("", 3, None, ""),
}

MALFORMED = [
    "::jackline",
    "::jackline ",
    "::jackline hello",
    "::jackline unit=docs",
    "::jackline phase=x done=",
    "::jackline done=nan",
    "::jackline done=inf",
    "::jackline done=-1",
    "::jackline done=1 total=many",
    '::jackline phase="open done=1',
    "  ::jackline phase=x done=1",
    "::jackline phase=x, done=1 total",
]


@pytest.mark.parametrize("text", BARS, ids=lambda text: text.strip()[:40])
def test_a_bar_is_read(text: str) -> None:
    assert parse_bar(text) == BARS[text]


@pytest.mark.parametrize(
    ("text", "known"),
    [
        ("[Ep 09/12] batch  20/25 | ce=0.306", (20, 25, 9, 12)),
        ("ep 2/3: iter 5/100 loss 0.3", (5, 100, 2, 3)),
        ("step 5/100 loss 0.3", (5, 100, None, None)),
    ],
)
def test_a_short_word_for_an_epoch_counts_around_its_batches(text: str, known: tuple[float, ...]) -> None:
    found = parse_line(text)
    assert found is not None and (found.done, found.total, found.epoch, found.epochs) == known


@pytest.mark.parametrize("text", LINES)
def test_a_plain_step_line_is_read(text: str) -> None:
    found = parse_line(text)
    assert found is not None
    assert (found.done, found.total, found.unit) == LINES[text]


@pytest.mark.parametrize("text", NOT_PROGRESS)
def test_a_line_that_only_looks_like_progress_is_left_alone(text: str) -> None:
    assert parse_line(text) is None


@pytest.mark.parametrize("text", PROTOCOL_LINES)
def test_a_protocol_line_is_read(text: str) -> None:
    phase, done, total, unit = PROTOCOL_LINES[text]
    assert parse_protocol(text) == Progress(phase, done, total, unit, None, None, "protocol")


@pytest.mark.parametrize("text", MALFORMED)
def test_a_malformed_protocol_line_is_an_ordinary_line(text: str) -> None:
    assert parse_protocol(text) is None


SIGNS = st.sampled_from(
    [*"0123456789%|/[]:<>=#━█,.?s -", "step ", "it/s", "::jackline ", "eta ", "iB", "ms/", "'epoch': "]
)


@given(st.lists(SIGNS, max_size=80).map("".join) | st.text(max_size=200))
def test_no_text_upsets_the_parsers(text: str) -> None:
    for found in (parse_bar(text), parse_line(text), parse_protocol("::jackline " + text)):
        assert found is None or found.done >= 0


@pytest.mark.parametrize(
    "unit", ["=", "1,", "1%|", "━ ", "[=", "step 1 of ", "1/", "1s [", "'epoch': 1 ", "a:", "1 "]
)
def test_no_text_makes_the_parsers_slow(unit: str) -> None:
    text = unit * (100_000 // len(unit))
    started_s = time.process_time()
    parse_bar(text)
    parse_line(text)
    assert time.process_time() - started_s < 10  # CPU time; a runaway pattern takes minutes


def at(done: float, total: float | None = 1000.0, phase: str = "p") -> Progress:
    return Progress(phase, done, total, "steps", None, None, "line")


def test_a_steady_pace_gives_rate_and_time_left() -> None:
    pace = Pace()
    for second in range(20):
        found = pace.update(at(second * 10.0), second)
    assert (found.rate_per_s, found.eta_s) == (pytest.approx(10), pytest.approx(81))


def test_the_first_report_has_no_pace() -> None:
    found = Pace().update(at(5), 0.0)
    assert (found.rate_per_s, found.eta_s) == (None, None)


def test_one_long_pause_does_not_spoil_the_pace() -> None:
    pace = Pace()
    now_s = 0.0
    for step in range(40):
        now_s += 300.0 if step == 1 else 1.0  # the compile
        found = pace.update(at(float(step)), now_s)
    assert found.rate_per_s == pytest.approx(1.0, rel=0.1)


def test_noise_of_a_factor_of_two_moves_the_pace_little() -> None:
    noise = random.Random(7)
    pace, now_s = Pace(), 0.0
    for step in range(60):
        now_s += noise.uniform(0.7, 1.4)
        found = pace.update(at(float(step)), now_s)
    assert found.rate_per_s == pytest.approx(1 / 1.05, rel=0.15)


def test_a_new_epoch_starts_a_new_pace() -> None:
    pace = Pace()
    for second in range(10):
        pace.update(at(second * 100.0), second)
    assert pace.update(at(0.0), 10.0).rate_per_s is None
    assert pace.update(at(1.0), 11.0).rate_per_s == pytest.approx(1.0)


def test_nested_bars_keep_their_own_pace() -> None:
    pace = Pace()
    for second in range(10):
        outer = pace.update(at(second * 1.0, phase="outer"), second)
        inner = pace.update(at(second * 50.0, phase="inner"), second)
    assert (outer.rate_per_s, inner.rate_per_s) == (pytest.approx(1), pytest.approx(50))


def test_what_the_bar_says_itself_is_believed() -> None:
    found = Pace().update(Progress("", 5, 10, "it", 2.5, 2.0, "bar"), 0.0)
    assert (found.rate_per_s, found.eta_s) == (2.5, 2.0)


def test_a_later_line_about_the_same_steps_does_not_forget_their_total() -> None:
    """A crash that names its step was the last word about a run: how far it was seemed unknown."""
    journey = Journey()
    said = (
        "step 695/2000 loss 0.1",
        "step 700/2000 loss 0.1",
        "RuntimeError: CUDA error: an assert triggered at step 700",
    )
    found = [journey.take(progress, float(at)) for at, text in enumerate(said) if (progress := parse_line(text))]
    assert [(progress.done, progress.total) for progress in found] == [(695, 2000), (700, 2000), (700, 2000)]
    other = [journey.take(Progress("", done, None, "steps", None, None, "line"), 9.0) for done in (2500.0, 3.0)]
    assert [progress.total for progress in other] == [None, None]  # not of these 2,000
