"""A training that begins with the weights of another, with some of them frozen: what fits, what does not, and why."""

from __future__ import annotations

import json
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from jackline.errors import UsageError
from jackline.models.gpt import GPT
from jackline.models.shapes import GPTShape
from jackline.rundir.layout import RunDir
from jackline.trainer.config import resolve
from jackline.trainer.trained.begin import begin_with, freeze
from jackline.trainer.trained.hf import export_hf
from tests.session.nursery import EVERY_SAVE, Nursery
from tests.trainer.test_trained import SCRIPT, SHAPE, in_hand, make_model

FEATURES = [
    *("packing=separate", "ema=0.8", "label_smoothing=0.1", "dropout=0.1", "frozen=positions.*,blocks.0.*"),
    *("deterministic=true", "seed=7"),
]


def begin(model: nn.Module, source: Path | str, tokenizer: str | None = None, **settings: Any) -> str:
    return begin_with(model, replace(resolve("demo").config, init_from=str(source), **settings), tokenizer)


def error_of(model: nn.Module, source: Path | str, tokenizer: str | None = None) -> str:
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(UsageError) as caught:
        begin(model, source, tokenizer)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items()), "nothing is taken"
    return str(caught.value)


@pytest.mark.parametrize("is_tied", [True, False])
def test_a_folder_of_transformers_fills_the_model_also_one_with_fewer_positions(
    is_tied: bool, tmp_path: Path
) -> None:
    given = make_model(replace(SHAPE, is_tied=is_tied, vocab_size=300))
    export_hf(in_hand(given), tmp_path / "hf")
    made = GPT(replace(SHAPE, is_tied=is_tied, context=20)).eval()
    assert begin(made, tmp_path / "hf") == f"begins with {41 - is_tied} tensors of {tmp_path / 'hf'}"
    ids = torch.arange(20)[None]
    with torch.inference_mode():
        assert torch.equal(made(ids)[..., :300], given(ids))


def test_a_plain_file_fills_any_model_and_partial_says_what_stays(tmp_path: Path) -> None:
    given, made = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5))
    file = tmp_path / "weights.safetensors"
    save_file(given.state_dict(), file)
    before = made[1].weight.detach().clone()
    assert error_of(made, file) == (
        f"error: init_from={file} does not fit this model: "
        "1.weight is 2x4 there, 5x4 here, 1.bias is 2 there, 5 here\n"
        "hint: give the settings of the model that it has; init_partial=true takes what fits"
    )
    assert begin(made, file, init_partial=True) == (
        f"begins with 2 tensors of {file}; as initialised: 1.weight is 2x4 there, 5x4 here, 1.bias is 2 there, 5 here"
    )
    assert torch.equal(made[0].weight, given[0].weight) and torch.equal(made[1].weight, before)


def test_what_cannot_be_begun_with_is_an_error_that_says_why(tmp_path: Path) -> None:
    export_hf(in_hand(make_model()), folder := tmp_path / "hf")
    assert f"init_from={tmp_path}/nowhere: there is no such file or folder" in error_of(
        GPT(SHAPE), tmp_path / "nowhere"
    )
    assert "init_from=no-such-run cannot be used" in error_of(GPT(SHAPE), "no-such-run")
    (tmp_path / "text.safetensors").write_text("no weights at all")
    assert "text.safetensors cannot be read" in error_of(GPT(SHAPE), tmp_path / "text.safetensors")
    assert "has 4 heads, this model 8" in error_of(GPT(replace(SHAPE, num_heads=8)), folder)
    wide = error_of(GPT(replace(SHAPE, width=64)), folder)
    assert "tokens.weight is 320x32 there, 320x64 here" in wide and wide.count("\n") == 1
    other = json.dumps({"model": {"vocab": {"a": 0, "b": 1}}})
    assert "was trained with another tokenizer: 257 tokens of its 257" in error_of(GPT(SHAPE), folder, other)
    assert "positions.weight is 48x32 there, 64x32 here" in error_of(GPT(replace(SHAPE, context=64)), folder)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert "has no model.safetensors\nhint: only safetensors are read" in error_of(GPT(SHAPE), folder)


def test_frozen_names_must_be_parameters_and_leave_something_to_train() -> None:
    model = GPT(GPTShape(2, 2, 8, context=4, vocab_size=8))
    freeze(model, "head.*, blocks.0.*")  # the head is tied: its weight has two names
    frozen = {name for name, weight in model.named_parameters() if not weight.requires_grad}
    assert "tokens.weight" in frozen and "blocks.1.up.weight" not in frozen and len(frozen) == 13
    with pytest.raises(UsageError, match=r"frozen=block.0.\* is no parameter of this model"):
        freeze(model, "block.0.*")
    with pytest.raises(UsageError, match="leaves nothing to train"):
        freeze(model, "*")


def test_a_fine_tuning_with_everything_on_is_bit_equal_after_a_kill(
    nursery: Nursery, corpus: Path, tmp_path: Path
) -> None:
    def train(name: str, *words: str, kill_at: str = "") -> tuple[int, str]:
        env = {**EVERY_SAVE, "KILL_AT": kill_at}
        ended = nursery.start(SCRIPT, [str(tmp_path / "runs" / name), str(corpus), *words], tmp_path, env).wait()
        return ended.code, ended.output

    code, text = train("base", "max_steps=4")
    assert code == 0, text
    tuned = [*FEATURES, "init_from=base"]
    code, text = train("whole", *tuned)
    assert code == 0 and "begins with 53 tensors of base" in text, text
    assert train("killed", *tuned, kill_at="6")[0] == -signal.SIGKILL
    code, text = train("killed", *tuned)
    assert code == 0 and "resuming from step-" in text, text
    base, whole, killed = (
        {file: load_file(newest(tmp_path, name) / f"{file}.safetensors") for file in ("model", "average")[: 2 - at]}
        for at, name in ((1, "base"), (0, "whole"), (0, "killed"))
    )
    for file, weights in whole.items():
        assert all(torch.equal(value, killed[file][name]) for name, value in weights.items()), file
    for name, value in base["model"].items():
        assert torch.equal(value, whole["model"][name]) == name.startswith(("positions.", "blocks.0.")), name


def newest(folder: Path, name: str) -> Path:
    return max(RunDir(folder / "runs" / name).checkpoints.glob("step-*"))
