"""AdamW for the trainer: torch's own fused one, or one that keeps float32 masters of bf16 weights.

Owns the update and the clipping that goes with it. Masters are state like the moments ("master"), so checkpoints,
retention and restore treat them as they treat any optimizer. On a GPU one Triton kernel does widening, clipping,
update and rounding in a single pass over memory (adamw_kernel.py); elsewhere torch's operators do the same.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from jackline import accelerator
from jackline.memory.plan.gpus import Precision
from jackline.trainer.startup.precision import lower_weights

_EPS = 1e-8


def make_optimizer(
    model: nn.Module, *, lr: float, betas: tuple[float, float], weight_decay: float, precision: Precision
) -> torch.optim.Optimizer:
    """`model` is in float32 still; with bf16 weights it is lowered here, after its masters were taken.

    Matrices decay, vectors (biases, norms) do not.
    """
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    groups = [
        {"params": [weight for weight in trained if weight.dim() >= 2], "weight_decay": weight_decay},
        {"params": [weight for weight in trained if weight.dim() < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if precision != "bf16-weights":
        return torch.optim.AdamW(groups, lr=lr, betas=betas, eps=_EPS, fused=True)
    masters = {weight: weight.detach().clone() for weight in trained}
    lower_weights(model, precision)
    return MasterAdamW(groups, masters, lr=lr, betas=betas)


def clip_gradients(optimizer: torch.optim.Optimizer, clip: float) -> Tensor:
    """The norm of all gradients, in float32, and cuts them to `clip` (0: not at all). Never waits for the device."""
    if isinstance(optimizer, MasterAdamW):
        return optimizer.clip_at_step(clip)
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    if clip > 0:
        return nn.utils.clip_grad_norm_(weights, clip, foreach=True)
    return gradient_norm([weight.grad for weight in weights if weight.grad is not None])


def gradient_norm(gradients: list[Tensor]) -> Tensor:
    if not gradients:
        return torch.zeros(())
    # In float32 whatever they are in: a norm in bf16 has two digits.
    norms = torch._foreach_norm(gradients, 2, torch.float32)
    every = torch.stack(norms)
    return (every * every).sum().sqrt()  # vector_norm's code takes 47 MB of the host's memory on a GPU


class MasterAdamW(torch.optim.Optimizer):
    """AdamW over weights of low precision. State of a weight: step, exp_avg, exp_avg_sq, master, all float32."""

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        masters: dict[nn.Parameter, Tensor],
        *,
        lr: float,
        betas: tuple[float, float],
    ) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": _EPS, "weight_decay": 0.0, "fused": True})
        for weight, master in masters.items():
            self.state[weight] = {
                "step": torch.zeros((), dtype=torch.float32, device=master.device),
                "exp_avg": torch.zeros_like(master),
                "exp_avg_sq": torch.zeros_like(master),
                "master": master,
            }
        self._scale: Tensor | None = None  # what the gradients are divided by in the next step
        self._kernel: Any = None

    def clip_at_step(self, clip: float) -> Tensor:
        """The norm of now; the cut itself is done within the next step and costs no pass of its own."""
        norm = gradient_norm([weight.grad for _, weight in self._weights() if weight.grad is not None])
        self._scale = torch.clamp(norm / clip, min=1.0) if clip > 0 else None
        return norm

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        if closure is not None:
            raise TypeError("MasterAdamW takes no closure")
        scale, self._scale = self._scale, None
        for group in self.param_groups:
            weights = [weight for weight in group["params"] if weight.grad is not None]
            if weights and accelerator.is_on_gpu(weights[0]) and self._find_kernel():
                self._kernel.update(group, weights, self.state, scale)
            elif weights:
                self._update(group, weights, scale)
        return None

    def _update(self, group: dict[str, Any], weights: list[nn.Parameter], scale: Tensor | None) -> None:
        states = [self.state[weight] for weight in weights]
        masters = [state["master"] for state in states]
        wide = [weight.grad.float() for weight in weights if weight.grad is not None]
        steps = [state["step"] for state in states]
        torch._foreach_add_(steps, 1)
        torch._fused_adamw_(
            masters,
            wide,
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            steps,
            lr=float(group["lr"]),
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            amsgrad=False,
            maximize=False,
            grad_scale=scale,
            found_inf=None,
        )
        torch._foreach_copy_(list[Tensor](weights), masters)

    def _find_kernel(self) -> bool:
        if self._kernel is None:
            try:
                from jackline.trainer.optim.adamw_kernel import AdamWKernel

                self._kernel = AdamWKernel()
            except ImportError:  # a build of torch without Triton
                self._kernel = False
        return bool(self._kernel)

    def _weights(self) -> Iterable[tuple[dict[str, Any], nn.Parameter]]:
        for group in self.param_groups:
            for weight in group["params"]:
                yield group, weight
