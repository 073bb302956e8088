"""Weights of another run are taken whole or not at all; the running loss comes back as it was."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from jackline.errors import UsageError
from jackline.models.gpt import GPT
from jackline.models.shapes import GPTShape
from jackline.recipes.slimpajama.method import RunningLoss, load_weights

SHAPE = GPTShape(2, 2, 16, context=8, vocab_size=64)


def write_weights(model: GPT, path: Path, *without: str) -> Path:
    values = {name: value for name, value in model.state_dict().items() if name not in ("head.weight", *without)}
    save_file(values, path)
    return path


def test_all_weights_are_taken_a_tied_head_with_its_embedding(tmp_path: Path) -> None:
    model, other = GPT(SHAPE), GPT(SHAPE)
    write_weights(model, tmp_path / "model.safetensors")
    load_weights(other, tmp_path)
    assert all(torch.equal(one, two) for one, two in zip(model.parameters(), other.parameters(), strict=True))
    assert other.head.weight is other.tokens.weight


def test_weights_that_are_missing_or_of_another_shape_are_named_and_nothing_is_changed(tmp_path: Path) -> None:
    path = write_weights(GPT(SHAPE), tmp_path / "less.safetensors", "norm.weight")
    model = GPT(SHAPE)
    before = [weight.clone() for weight in model.parameters()]
    with pytest.raises(UsageError) as caught:
        load_weights(model, path)
    assert str(caught.value) == (
        f"error: pretrained_checkpoint={path} is of another model: norm.weight does not fit\n"
        "hint: give the model_size, max_seq_length and tokenizer it was trained with"
    )
    path = write_weights(GPT(replace(SHAPE, context=4)), tmp_path / "short.safetensors")
    with pytest.raises(UsageError, match=r"positions\.weight does not fit"):
        load_weights(model, path)
    assert all(torch.equal(one, two) for one, two in zip(before, model.parameters(), strict=True))


def test_a_running_loss_is_the_mean_of_all_losses_also_after_a_resume() -> None:
    running, again = RunningLoss(), RunningLoss()
    for value in (3.0, 2.0):
        running.add(torch.tensor(value))
    again.load_state_dict(running.state_dict())
    again.add(torch.tensor(1.0))
    assert again.mean() == 2.0
    assert running.mean() == 2.5  # what was restored is a copy
