"""Sentinels beside real trainings of a very small model on real text: silent on the honest one, loud on each fault.

The numbers are those of the trainings themselves; nothing is made up but the fault.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from jackline.models.gpt import GPT
from jackline.models.shapes import GPTShape
from jackline.trainer.optim.schedule import Schedule, lr_at
from jackline.trainer.sentinels.floor import entropy_floor
from jackline.trainer.sentinels.tensors import first_bad_tensor
from jackline.trainer.sentinels.watch import Alarm, Facts, Sentinels, StepFacts

VOCAB, LENGTH, BATCH, STEPS = 256, 32, 16, 160
SCHEDULE = Schedule("cosine", 1e-2, 1e-3, warmup_steps=10, total_steps=STEPS)
Corrupt = Callable[[GPT, Tensor, int], tuple[Tensor, Tensor]]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def text() -> np.ndarray:
    """Source code that is on every machine; long enough for every window to be new."""
    with open(ast.__file__, "rb") as file:
        once = file.read()
    with open(torch.nn.functional.__file__, "rb") as file:
        return np.frombuffer(once + file.read(), np.uint8).astype(np.int64)


def honest(model: GPT, windows: Tensor, step: int) -> tuple[Tensor, Tensor]:
    return windows[:, :-1], windows[:, 1:]


def alarms_of(corrupt: Corrupt = honest, corpus: np.ndarray | None = None, lr_factor: float = 1.0) -> list[Alarm]:
    corpus = text() if corpus is None else corpus
    torch.manual_seed(0)
    model = GPT(GPTShape(1, 2, 32, context=LENGTH, vocab_size=VOCAB))
    optimizer = torch.optim.AdamW(model.parameters(), lr=SCHEDULE.lr)
    facts = Facts(VOCAB, SCHEDULE, BATCH * LENGTH, entropy_floor(corpus[:65_536], VOCAB))
    watch = Sentinels(facts, None, lambda: first_bad_tensor(model))
    order = np.random.default_rng(0).permutation((len(corpus) - 1) // LENGTH) * LENGTH
    alarms: list[Alarm] = []
    for step in range(1, STEPS + 1):
        places = order[BATCH * (step - 1) : BATCH * step]
        windows = torch.from_numpy(np.stack([corpus[at : at + LENGTH + 1] for at in places]))
        ids, targets = corrupt(model, windows, step)
        rate = lr_at(step - 1, SCHEDULE) * lr_factor
        for group in optimizer.param_groups:
            group["lr"] = rate
        loss = model(ids, targets) / float(targets.numel())
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        alarms += watch.look(StepFacts(step, loss.item(), rate, float(norm), windows=places.tolist()))
    return alarms


def test_an_honest_training_hears_nothing() -> None:
    assert alarms_of() == []


def test_an_honest_training_on_noise_hears_nothing() -> None:
    assert alarms_of(corpus=np.random.default_rng(1).integers(0, VOCAB, 120_000)) == []


def test_targets_that_were_not_shifted_are_a_leak() -> None:
    alarms = alarms_of(lambda model, windows, step: (windows[:, :-1], windows[:, :-1]))
    assert [alarm.kind for alarm in alarms] == ["loss-under-floor"]
    assert alarms[0].is_fatal


def test_a_leak_is_seen_on_noise_too() -> None:
    noise = np.random.default_rng(1).integers(0, VOCAB, 120_000)
    alarms = alarms_of(lambda model, windows, step: (windows[:, :-1], windows[:, :-1]), noise)
    assert [alarm.kind for alarm in alarms] == ["loss-under-floor"]


def test_a_rate_that_moves_nothing_is_flat_at_guessing_and_not_the_planned_rate() -> None:
    kinds = {alarm.kind for alarm in alarms_of(lr_factor=1e-6)}
    assert kinds == {"loss-flat", "wrong-lr"}


def test_weights_gone_to_nan_are_told_with_the_batch_and_the_tensor() -> None:
    def poison(model: GPT, windows: Tensor, step: int) -> tuple[Tensor, Tensor]:
        if step == 100:
            with torch.no_grad():
                model.blocks[0].up.weight[0, 0] = math.inf
        return honest(model, windows, step)

    (alarm,) = [alarm for alarm in alarms_of(poison) if alarm.kind == "not-finite"]
    assert alarm.text.startswith("step 100: loss is nan; its windows: ")
    assert "; first bad tensor: all 16 weights, by an update with it; the first is weight tokens.weight" in alarm.text


def test_labels_that_are_all_ignored_give_no_gradient() -> None:
    def ignore(model: GPT, windows: Tensor, step: int) -> tuple[Tensor, Tensor]:
        ids, targets = honest(model, windows, step)
        return ids, torch.full_like(targets, -100) if step >= 50 else targets

    alarms = [alarm for alarm in alarms_of(ignore) if alarm.kind == "zero-gradient"]
    assert alarms[0].text == "step 51: the gradient norm was exactly 0 for 2 steps: no weight learns anything"


def test_a_broken_batch_is_a_spike_with_its_windows() -> None:
    def garble(model: GPT, windows: Tensor, step: int) -> tuple[Tensor, Tensor]:
        if step == 120:
            windows = torch.randint(128, VOCAB, windows.shape)
        return honest(model, windows, step)

    alarms = alarms_of(garble)
    assert [alarm.kind for alarm in alarms] == ["loss-spike"]
    assert alarms[0].text.startswith("step 120: loss jumped to ") and "; its windows: " in alarms[0].text
