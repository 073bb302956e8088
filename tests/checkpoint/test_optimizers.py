"""Every optimizer, schedule and scaler torch has: saved, restored into a fresh one, training on identically."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.optim import lr_scheduler

from jackline.errors import CannotResume
from tests.checkpoint.states import fingerprint
from tests.checkpoint.test_roundtrip import load, save

OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda p: optim.SGD(p, lr=0.1, momentum=0.9),
    "sgd_fused": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "adam_amsgrad": lambda p: optim.Adam(p, lr=0.1, amsgrad=True),
    "adamw_foreach": lambda p: optim.AdamW(p, lr=0.1, foreach=True),
    "adamw_fused": lambda p: optim.AdamW(p, lr=0.1, fused=True),
    "adamw_loop": lambda p: optim.AdamW(p, lr=0.1, foreach=False),
    "adam_tensor_lr": lambda p: optim.Adam(p, lr=torch.tensor(0.1), foreach=False),
    "adagrad": lambda p: optim.Adagrad(p, lr=0.1),
    "adadelta": lambda p: optim.Adadelta(p, lr=0.1),
    "adamax": lambda p: optim.Adamax(p, lr=0.1),
    "asgd": lambda p: optim.ASGD(p, lr=0.1),
    "nadam": lambda p: optim.NAdam(p, lr=0.1),
    "radam": lambda p: optim.RAdam(p, lr=0.1),
    "rmsprop": lambda p: optim.RMSprop(p, lr=0.1, momentum=0.5, centered=True),
    "rprop": lambda p: optim.Rprop(p, lr=0.1),
    "adafactor": lambda p: optim.Adafactor(p, lr=0.1),
}


def make(build: Any, seed: int) -> tuple[nn.Module, optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
    model.append(nn.Linear(2, 2))
    model[3].requires_grad_(False)  # never gets any state
    groups = [{"params": model[0].parameters(), "weight_decay": 0.01}, {"params": model[2].parameters()}]
    return model, build([*groups, {"params": model[3].parameters()}])


def step(model: nn.Module, optimizer: optim.Optimizer, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    model(torch.randn(5, 4, generator=generator)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_continues_as_if_nothing_had_happened(tmp_path: Path, name: str) -> None:
    model, optimizer = make(OPTIMIZERS[name], 0)
    for seed in range(3):
        step(model, optimizer, seed)
    path = save(tmp_path, {"model": model, "optim": optimizer})
    other, fresh = make(OPTIMIZERS[name], 9)
    load(path, {"model": other, "optim": fresh})
    assert fingerprint({"o": fresh}) == fingerprint({"o": optimizer})
    for seed in range(3, 6):
        step(model, optimizer, seed)
        step(other, fresh, seed)
    assert fingerprint({"m": other, "o": fresh}) == fingerprint({"m": model, "o": optimizer})


def test_lbfgs_with_its_lists_of_tensors_continues(tmp_path: Path) -> None:
    def run(model: nn.Module, optimizer: optim.Optimizer, count: int) -> None:
        data = torch.randn(20, 3, generator=torch.Generator().manual_seed(1))

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = (model(data) - data.sum(1, keepdim=True)).square().mean()
            loss.backward()
            return loss

        for _ in range(count):
            optimizer.step(closure)

    def fresh(seed: int) -> tuple[nn.Module, optim.Optimizer]:
        torch.manual_seed(seed)
        model = nn.Linear(3, 1)
        return model, optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)

    model, optimizer = fresh(0)
    run(model, optimizer, 3)
    path = save(tmp_path, {"model": model, "optim": optimizer})
    other, second = fresh(1)
    load(path, {"model": other, "optim": second})
    run(model, optimizer, 2)
    run(other, second, 2)
    assert fingerprint({"m": other}) == fingerprint({"m": model})


def test_existing_state_is_filled_in_place_and_surplus_state_goes(tmp_path: Path) -> None:
    model, optimizer = make(OPTIMIZERS["adamw_loop"], 0)
    path_empty = save(tmp_path, {"optim": optimizer}, step=1)
    step(model, optimizer, 0)
    path = save(tmp_path, {"optim": optimizer}, step=2)
    step(model, optimizer, 1)
    parameter = next(iter(optimizer.state))
    address = optimizer.state[parameter]["exp_avg"].data_ptr()
    optimizer.state[parameter]["surplus"] = torch.ones(1)
    load(path, {"optim": optimizer})
    assert optimizer.state[parameter]["exp_avg"].data_ptr() == address
    assert "surplus" not in optimizer.state[parameter]
    load(path_empty, {"optim": optimizer})
    assert not optimizer.state


def test_fp32_state_of_bf16_weights_is_not_rounded(tmp_path: Path) -> None:
    """torch's own load_state_dict casts it to the weights' kind."""

    def build(seed: int) -> tuple[nn.Parameter, optim.Optimizer]:
        torch.manual_seed(seed)
        weight = nn.Parameter(torch.randn(8, dtype=torch.bfloat16))
        optimizer = optim.SGD([weight], lr=0.1, momentum=0.9)
        optimizer.state[weight] = {"master": torch.randn(8), "momentum_buffer": torch.randn(8)}
        return weight, optimizer

    _, optimizer = build(0)
    path = save(tmp_path, {"optim": optimizer})
    weight, other = build(1)
    other.state.clear()
    load(path, {"optim": other})
    assert other.state[weight]["master"].dtype is torch.float32
    assert fingerprint({"o": other}) == fingerprint({"o": optimizer})


def test_how_it_computes_is_the_persons_choice_and_a_change_is_said(tmp_path: Path) -> None:
    model, optimizer = make(OPTIMIZERS["adamw_foreach"], 0)
    step(model, optimizer, 0)
    path = save(tmp_path, {"optim": optimizer})
    other, fused = make(OPTIMIZERS["adamw_fused"], 0)
    restored = load(path, {"optim": fused})
    assert all(group["fused"] and group["lr"] == 0.1 for group in fused.param_groups)
    assert "optim.groups: fused is True now and was None; results may differ in the last bit" in restored.notes
    step(other, fused, 1)


def test_a_learning_rate_may_be_a_number_then_and_a_tensor_now(tmp_path: Path) -> None:
    weight = nn.Parameter(torch.zeros(2))
    number = optim.SGD([weight], lr=0.25)
    tensor = optim.SGD([weight], lr=torch.tensor(0.5), foreach=False)
    of_number = save(tmp_path, {"optim": number}, step=1)
    of_tensor = save(tmp_path, {"optim": tensor}, step=2)
    rate = tensor.param_groups[0]["lr"]
    load(of_number, {"optim": tensor})
    assert tensor.param_groups[0]["lr"] is rate and rate.item() == 0.25
    load(of_tensor, {"optim": number})
    assert number.param_groups[0]["lr"] == 0.5 and type(number.param_groups[0]["lr"]) is float


def test_another_optimizer_shape_is_refused(tmp_path: Path) -> None:
    _, optimizer = make(OPTIMIZERS["sgd"], 0)
    path = save(tmp_path, {"optim": optimizer})
    with pytest.raises(CannotResume) as caught:
        load(path, {"optim": optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)})
    assert str(caught.value) == (
        "error: optim is not the optimizer that was saved: it has parameter groups of [2] tensors, "
        "the checkpoint [2, 2, 2]\n"
        "hint: build what was saved (jackline.peek(name) gives its step and epoch before that), or start a new run"
    )
    with pytest.raises(CannotResume, match="optim was a Optimizer when it was saved and is a int now"):
        load(path, {"optim": 5})


def test_an_optimizer_with_its_own_state_dict_is_asked(tmp_path: Path) -> None:
    class Wrapped(optim.SGD):
        def state_dict(self) -> dict[str, Any]:
            return {"inner": super().state_dict(), "mine": torch.tensor([7.0])}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.seen = state["mine"]
            super().load_state_dict(state["inner"])

    weight = nn.Parameter(torch.zeros(2))
    first = Wrapped([weight], lr=0.5)
    path = save(tmp_path, {"optim": first})
    second = Wrapped([weight], lr=0.1)
    load(path, {"optim": second})
    assert second.seen.item() == 7 and second.param_groups[0]["lr"] == 0.5


SCHEDULES: dict[str, Any] = {
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda n: 0.9**n),
    "step": lambda o: lr_scheduler.StepLR(o, 2),
    "multistep": lambda o: lr_scheduler.MultiStepLR(o, [2, 4]),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 10),
    "restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "onecycle": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.3, total_steps=20),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=3),
    "linear": lambda o: lr_scheduler.LinearLR(o),
    "polynomial": lambda o: lr_scheduler.PolynomialLR(o, 10),
    "exponential": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "sequential": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o), lr_scheduler.ExponentialLR(o, 0.9)], [2]
    ),
    "chained": lambda o: lr_scheduler.ChainedScheduler([lr_scheduler.ConstantLR(o), lr_scheduler.StepLR(o, 2)]),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_continues(tmp_path: Path, name: str) -> None:
    def build() -> tuple[nn.Parameter, optim.Optimizer, Any]:
        weight = nn.Parameter(torch.zeros(2))
        optimizer = optim.SGD([weight], lr=0.1, momentum=0.9)
        return weight, optimizer, SCHEDULES[name](optimizer)

    def run(weight: nn.Parameter, optimizer: optim.Optimizer, schedule: Any, count: int) -> list[float]:
        rates = []
        for _ in range(count):
            weight.grad = torch.ones(2)
            optimizer.step()
            schedule.step()
            rates.append(optimizer.param_groups[0]["lr"])
        return rates

    first = build()
    run(*first, 3)
    path = save(tmp_path, {"optim": first[1], "schedule": first[2]})
    second = build()
    load(path, {"optim": second[1], "schedule": second[2]})
    assert run(*second, 6) == run(*first, 6)


def test_plateau_counters_scaler_and_averages_come_back(tmp_path: Path) -> None:
    def build() -> dict[str, Any]:
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        optimizer = optim.SGD(model.parameters(), lr=0.1)
        return {
            "model": model,
            "plateau": lr_scheduler.ReduceLROnPlateau(optimizer, patience=2),
            "scaler": torch.amp.GradScaler("cpu", init_scale=1024.0),
            "average": torch.optim.swa_utils.AveragedModel(model),
        }

    state = build()
    for value in (1.0, 2.0, 3.0):
        state["plateau"].step(value)
        state["average"].update_parameters(state["model"])
    state["scaler"].load_state_dict({**state["scaler"].state_dict(), "scale": 512.0, "_growth_tracker": 7})
    path = save(tmp_path, state)
    other = build()
    load(path, other)
    assert other["plateau"].state_dict() == state["plateau"].state_dict()
    assert other["scaler"].state_dict() == state["scaler"].state_dict()
    assert other["average"].n_averaged.item() == 3
