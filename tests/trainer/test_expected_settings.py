"""Settings that people expect: optimizers, clipping, schedules, early stopping. Each resumes bit for bit."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional

import jackline
from jackline.errors import UsageError
from jackline.memory.guard.step_state import seeded
from jackline.models.gpt import GPT
from jackline.models.shapes import GPTShape
from jackline.rundir.layout import RunDir
from jackline.trainer.config import TrainConfig, identity
from jackline.trainer.loop import train
from jackline.trainer.optim.optimizer import Lion, MuonWithAdamW, clip_gradients, make_optimizer
from jackline.trainer.optim.schedule import Schedule, describe_schedule, lr_at
from jackline.trainer.task import Ending
from jackline.trainer.trained.stored import read_weights

BETAS = (0.9, 0.99)


class Small(jackline.Recipe):
    dropout: float = 0.2
    batch_size: int = 4
    max_steps: int = 8
    lr: float = 0.02
    save_every_steps: int = 3
    eval_every: int = 2
    full_eval: bool = False
    rehearse: bool = False
    sentinels: str = "off"  # type: ignore[assignment]

    def make_model(self) -> nn.Module:
        return nn.Sequential(nn.Embedding(7, 6), nn.Linear(6, 6), nn.Dropout(self.dropout), nn.Linear(6, 7))

    def train_data(self) -> Any:
        return torch.randint(7, (18, 5))

    def val_data(self) -> Any:
        return torch.randint(7, (6, 5))

    def loss(self, model: nn.Module, batch: Any) -> Any:
        return functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


class Yielding(Small):
    """Its samples come from a generator that draws."""

    def train_data(self) -> Any:
        first = torch.randint(7, (1,))
        for _ in range(14):
            yield (first + torch.randint(7, (5,))) % 7


class Wide(Small):
    """With a matrix that is large enough for states of 8 bits: smaller ones stay in float32."""

    def make_model(self) -> nn.Module:
        return nn.Sequential(nn.Embedding(7, 64), nn.Linear(64, 64), nn.Dropout(self.dropout), nn.Linear(64, 7))


KINDS = {"a generator": Yielding, "wide": Wide}


def state_of(run: RunDir) -> tuple[str, dict[str, bytes], Any]:
    """The newest checkpoint: its name, its tensors, and the values that the run keeps."""
    newest = max(run.checkpoints.glob("step-*"))
    state = json.loads((newest / "state.json").read_text())
    return newest.name, {path.name: path.read_bytes() for path in newest.glob("*.safetensors")}, state["values"]


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"optimizer": "lion", "weight_decay": 0.1}, marks=pytest.mark.slow),
        pytest.param({"optimizer": "adafactor"}, marks=pytest.mark.slow),
        pytest.param({"optimizer": "muon", "weight_decay": 0.1}, marks=pytest.mark.slow),
        pytest.param({"clip_by": "value", "clip": 0.01}, marks=pytest.mark.slow),
        {"schedule": "one-cycle", "warmup_steps": 3, "optimizer": "lion"},
        pytest.param({"schedule": "wsd"}, marks=pytest.mark.slow),
        pytest.param({"schedule": "constant", "schedule_start": 2}, marks=pytest.mark.slow),
        {"patience": 2, "min_gain": 100.0},
        pytest.param({"ema": 0.9}, marks=pytest.mark.slow),
        {"ema": 0.9, "frozen": "0.*,1.bias", "optimizer": "muon"},
        {"recipe": "a generator"},
        {"recipe": "wide", "optimizer": "adamw8bit"},
    ],
    ids=lambda settings: "-".join(f"{name}={value}" for name, value in settings.items()),
)
def test_a_run_that_is_resumed_from_its_first_checkpoint_ends_as_before(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JACKLINE_TEST_EVERY_SAVE", "1")
    if settings.get("optimizer") == "adamw8bit":
        pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    kind = KINDS.get(settings.get("recipe", ""), Small)
    run, config = RunDir(tmp_path / "runs" / "one"), kind(**{"recipe": "small", "keep_last": 20, **settings})
    steps = train(config, run).steps
    assert steps == (6 if "patience" in settings else 8)  # step 2 is the first value, 4 and 6 bring no gain
    whole = state_of(run)
    first, *later = sorted(path for path in run.checkpoints.glob("step-*") if path.name > "step-00000000")
    assert first.name < "step-00000004" and later
    for path in run.checkpoints.glob("step-*"):
        if path != first:
            shutil.rmtree(path)
    assert train(config, run).steps == steps
    assert state_of(run) == whole
    if kind is Wide:
        assert torch.uint8 in {tensor.dtype for tensor in load_file(later[-1] / "optimizer.safetensors").values()}


def test_a_generator_has_no_length_and_says_so(tmp_path: Path) -> None:
    for name in ("epochs", "num_workers"):
        with pytest.raises(UsageError, match=f"{name}=2 needs data with a length, and train_data"):
            train(Yielding(recipe="yielding", **{name: 2}), RunDir(tmp_path / "runs" / name))


def test_the_average_is_validated_and_loaded_and_follows_the_weights(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "runs" / "one")
    config = Small(recipe="small", ema=0.5, frozen="0.weight", save_every_steps=8, full_eval=True, eval_share=1.0)
    ended = train(config, run)
    newest = max(run.checkpoints.glob("step-*"))
    model, average = (load_file(newest / f"{name}.safetensors") for name in ("model", "average"))
    assert set(average) == set(model) - {"0.weight"}, f"frozen weights are stored once: {set(average)}"
    assert not torch.equal(average["1.weight"], model["1.weight"])
    weights = read_weights(newest)
    assert torch.equal(weights["1.weight"], average["1.weight"])
    judge = config.make_model().eval()
    judge.load_state_dict(weights)
    with seeded(0):
        held = config.val_data()
    assert ended.val_loss == pytest.approx(float(config.loss(judge, held).detach()), abs=1e-6)


def test_label_smoothing_is_for_training_alone() -> None:
    torch.manual_seed(1)
    model, ids = GPT(GPTShape(1, 2, 8, context=6, vocab_size=16)), torch.randint(16, (2, 6))
    plain = float(model(ids, ids).detach())
    model.label_smoothing = 0.2
    wanted = functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten(), label_smoothing=0.2, reduction="sum")
    assert float(model(ids, ids).detach()) == pytest.approx(float(wanted.detach()), rel=1e-6) != plain
    model.loss_chunk_rows = 5
    assert float(model(ids, ids).detach()) == pytest.approx(float(wanted.detach()), rel=1e-6)
    model.eval()
    assert float(model(ids, ids).detach()) == pytest.approx(plain, rel=1e-6)


def test_a_separated_document_is_computed_as_if_it_were_alone() -> None:
    torch.manual_seed(1)
    model = GPT(GPTShape(2, 2, 8, context=12, vocab_size=16))
    model.separator = 15
    first, second, third = (torch.randint(15, (1, size)) for size in (4, 3, 5))
    end = torch.tensor([[15]])
    packed = model(torch.cat((first, end, second, end, third[:, :3]), dim=1))
    alone = [model(first), model(torch.cat((end, second), dim=1)), model(torch.cat((end, third[:, :3]), dim=1))]
    assert torch.allclose(packed, torch.cat(alone, dim=1), atol=1e-6)
    model.separator = None
    assert not torch.allclose(packed, model(torch.cat((first, end, second, end, third[:, :3]), dim=1)), atol=1e-3)


def set_gradients(model: nn.Module, value: float = 0.5) -> None:
    for weight in model.parameters():
        weight.grad = torch.full_like(weight, value)


def test_lion_moves_by_the_sign_and_decays_matrices_alone() -> None:
    model = nn.Linear(2, 2)
    nn.init.ones_(model.weight), nn.init.ones_(model.bias)
    made = make_optimizer(model, lr=0.1, betas=BETAS, weight_decay=0.5, precision="fp32", algorithm="lion")
    assert isinstance(made, Lion)
    set_gradients(model)
    made.step()
    assert torch.allclose(model.weight, torch.full((2, 2), 1 - 0.1 * 0.5 - 0.1))
    assert torch.allclose(model.bias, torch.full((2,), 0.9))
    assert torch.allclose(made.state[model.bias]["exp_avg"], torch.full((2,), 0.5 * (1 - BETAS[1])))


def test_muon_takes_matrices_inside_and_leaves_embedding_head_and_vectors_to_adamw() -> None:
    model = nn.ModuleDict({"tokens": nn.Embedding(7, 4), "up": nn.Linear(4, 4), "lm_head": nn.Linear(4, 7)})
    made = make_optimizer(model, lr=0.1, betas=BETAS, weight_decay=0.1, precision="fp32", algorithm="muon")
    assert isinstance(made, MuonWithAdamW)
    by_muon = [weight for group in made.param_groups if group["is_muon"] for weight in group["params"]]
    assert len(by_muon) == 1 and by_muon[0] is model["up"].weight
    assert sum(len(group["params"]) for group in made.param_groups) == count_weights(model)
    set_gradients(model)
    made.step()
    assert set(made.state[model["up"].weight]) == {"momentum_buffer"}
    assert "exp_avg_sq" in made.state[model["tokens"].weight]
    with pytest.raises(UsageError, match="this model has none inside"):
        make_optimizer(nn.Embedding(3, 3), lr=0.1, betas=BETAS, weight_decay=0, precision="fp32", algorithm="muon")


def test_states_of_8_bits_are_refused_in_words_where_bitsandbytes_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(UsageError, match="optimizer=adamw8bit needs bitsandbytes\nhint: pip install bitsandbytes"):
        make_optimizer(nn.Linear(2, 2), lr=0.1, betas=BETAS, weight_decay=0, precision="fp32", algorithm="adamw8bit")


def count_weights(model: nn.Module) -> int:
    return len(list(model.parameters()))


def test_clipping_by_value_cuts_each_number_and_tells_the_norm_before() -> None:
    model = nn.Linear(2, 1, bias=False)
    made = make_optimizer(model, lr=0.1, betas=BETAS, weight_decay=0.0, precision="fp32")
    model.weight.grad = torch.tensor([[3.0, -0.5]])
    assert float(clip_gradients(made, 1.0, "value")) == pytest.approx((9.25) ** 0.5)
    assert model.weight.grad.tolist() == [[1.0, -0.5]]


def test_one_cycle_goes_up_and_down_once() -> None:
    made = Schedule("one-cycle", 1.0, 0.01, 0, 100)
    rates = [lr_at(step, made) for step in range(100)]
    assert rates[0] == pytest.approx(0.04) and rates[30] == 1.0 and rates[99] == 0.01
    assert rates[:31] == sorted(rates[:31]) and rates[30:] == sorted(rates[30:], reverse=True)
    assert describe_schedule(made) == "one-cycle: from 0.04 up to 1 at step 30, then down to 0.01 at step 99"
    assert lr_at(0, Schedule("one-cycle", 1.0, 0.0, 0, 1)) == 0.0


def test_wrong_combinations_are_refused_and_names_of_earlier_runs_stay() -> None:
    with pytest.raises(UsageError, match="has an AdamW of its own"):
        TrainConfig(data="x", optimizer="lion", precision="bf16-weights")
    with pytest.raises(UsageError, match="clips by the norm alone"):
        TrainConfig(data="x", clip_by="value", precision="bf16-weights")
    with pytest.raises(UsageError, match="patience=2 counts validations, and eval_every=0"):
        TrainConfig(data="x", patience=2, eval_every=0)
    assert not {"optimizer", "clip_by", "patience", "min_gain"} & set(identity(TrainConfig(data="x")))
    assert "optimizer" in identity(TrainConfig(data="x", optimizer="lion"))


class Counted:
    """Numbers from 0, as a source of batches."""

    waited_s = 0.0
    place = 0

    def __iter__(self) -> Counted:
        return self

    def __next__(self) -> int:
        self.place += 1
        return self.place - 1

    def state(self) -> dict[str, Any]:
        return {"place": self.place}

    def seek(self, state: dict[str, Any]) -> None:
        assert set(state) == {"place"}
        self.place = state["place"]

    def num_windows(self) -> int | None:
        return None

    def close(self) -> None: ...


def test_an_end_is_kept_with_the_position() -> None:
    loader, other = Ending(Counted()), Ending(Counted())
    assert [next(loader), next(loader)] == [0, 1] and not loader.is_exhausted
    other.seek(loader.state())
    assert next(other) == 2
    loader.end_here()
    with pytest.raises(StopIteration):
        next(loader)
    other.seek(loader.state())
    assert other.is_exhausted and other.state() == loader.state()
