"""The model, what moves its weights, and in which precision: the half of a step that is the same for every task."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from jackline.memory.plan.gpus import Precision
from jackline.trainer.optim.optimizer import clip_gradients, make_optimizer
from jackline.trainer.startup.device import device_name
from jackline.trainer.startup.precision import autocast, make_scaler

if TYPE_CHECKING:
    from jackline.trainer.config import TrainConfig


@dataclass(frozen=True)
class Learner:
    """`scaler` is None unless gradients are fp16. `clip` is the largest norm of the gradients; 0: any."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: Any
    precision: Precision
    device: torch.device
    device_name: str
    clip: float
    clip_by: str = "norm"
    average: nn.Module | None = None  # of the weights, in float32, with the decay `ema`; saved with them
    ema: float = 0.0

    def autocast(self) -> torch.autocast:
        return autocast(self.precision, self.device)

    def set_rate(self, rate: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group.get("lr_scale", 1.0)

    def unscale(self) -> None:
        """Gradients as they are, where a scaler made them larger."""
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)

    def move_weights(self) -> Tensor:
        """The update alone; gradients stay. Returns their norm before it was clipped."""
        norm = clip_gradients(self.optimizer, self.clip, self.clip_by)
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)  # not at all when a gradient is infinite
            self.scaler.update()
        return norm

    def update(self) -> Tensor:
        """A whole update from the gradients there are, which are then forgotten. Returns their norm."""
        self.unscale()
        norm = self.move_weights()
        self.forget_gradients()
        return norm

    @torch.no_grad()
    def follow(self, steps: int) -> None:
        """The average follows the weights, which have moved `steps` times. At first it follows faster, because it
        would keep the initial weights for long otherwise."""
        if self.average is None:
            return
        rate, state = 1 - min(self.ema, (1 + steps) / (10 + steps)), self.optimizer.state
        for average, weight in zip(self.average.parameters(), self.model.parameters(), strict=True):
            if weight.requires_grad:
                average.lerp_(state.get(weight, {}).get("master", weight.detach()).to(average.dtype), rate)
        for copied, value in zip(self.average.buffers(), self.model.buffers(), strict=True):
            copied.copy_(value)

    def judged(self) -> Learner:
        """What is validated: the average in the place of the model, where there is one. It has no bf16 weights."""
        if self.average is None:
            return self
        return replace(
            self, model=self.average, precision="bf16" if self.precision == "bf16-weights" else self.precision
        )

    def forget_gradients(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)


def make_learner(
    model: nn.Module,
    config: TrainConfig,
    precision: Precision,
    device: torch.device,
    own: torch.optim.Optimizer | None = None,
) -> Learner:
    """`model` is on its device, in float32: masters are taken from its weights before they are lowered. `own` is an
    optimizer that a person made; its groups keep the ratios of their learning rates."""
    betas = (config.beta1, config.beta2)
    average = _copy_of(model) if config.ema else None
    for group in own.param_groups if own is not None else ():
        group["lr_scale"] = float(group["lr"]) / config.lr
    optimizer = own or make_optimizer(
        model,
        lr=config.lr,
        betas=betas,
        weight_decay=config.weight_decay,
        precision=precision,
        algorithm=config.optimizer,
    )
    return Learner(
        model=model,
        optimizer=optimizer,
        scaler=make_scaler(precision, device),
        precision=precision,
        device=device,
        device_name=device_name(device),
        clip=config.clip,
        clip_by=config.clip_by,
        average=average,
        ema=config.ema,
    )


def _copy_of(model: nn.Module) -> nn.Module:
    """A copy of what is trained; frozen weights are shared."""
    frozen = {id(weight): weight for weight in model.parameters() if not weight.requires_grad}
    return copy.deepcopy(model, frozen).requires_grad_(False).eval()
