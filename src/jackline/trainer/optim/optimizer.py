"""The optimizers of the trainer: torch's fused AdamW, one that keeps float32 masters of bf16 weights, Lion, Muon with
AdamW beside it, torch's Adafactor, and AdamW with states of 8 bits by bitsandbytes.

Owns which one a setting means, the update, and the clipping that goes with it. Masters are state like the moments
("master"), so checkpoints, retention and restore treat them as they treat any optimizer. On a GPU one Triton kernel
does widening, clipping, update and rounding in a single pass over memory (adamw_kernel.py); elsewhere the operators
of torch do the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from jackline import accelerator
from jackline.checkpoint.shards import is_distributed
from jackline.errors import UsageError
from jackline.memory.plan.gpus import Precision
from jackline.trainer.startup.precision import lower_weights

_EPS = 1e-8


def make_optimizer(
    model: nn.Module,
    *,
    lr: float,
    betas: tuple[float, float],
    weight_decay: float,
    precision: Precision,
    algorithm: str = "adamw",
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
    if algorithm == "muon":
        return _make_muon(model, groups, lr, betas)
    if algorithm != "adamw":
        return _MAKERS[algorithm](groups, lr, betas)
    if precision != "bf16-weights":
        return torch.optim.AdamW(groups, lr=lr, betas=betas, eps=_EPS, fused=True)
    masters = {weight: weight.detach().clone() for weight in trained}
    lower_weights(model, precision)
    return MasterAdamW(groups, masters, lr=lr, betas=betas)


def clip_gradients(optimizer: torch.optim.Optimizer, clip: float, by: str = "norm") -> Tensor:
    """The norm of all gradients, in float32, and cuts them to `clip` (0: not at all). Never waits for the device."""
    if by == "value" and clip > 0:
        weights = [weight for group in optimizer.param_groups for weight in group["params"]]
        norm = gradient_norm([weight.grad for weight in weights if weight.grad is not None])
        nn.utils.clip_grad_value_(weights, clip, foreach=True)
        return norm
    if isinstance(optimizer, MasterAdamW):
        return optimizer.clip_at_step(clip)
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    if clip > 0:
        return _whole(nn.utils.clip_grad_norm_(weights, clip, foreach=True))
    return _whole(gradient_norm([weight.grad for weight in weights if weight.grad is not None]))


def _whole(norm: Any) -> Tensor:
    """Of weights that are divided over ranks every rank knows only a part of the norm."""
    found: Tensor = norm.full_tensor() if is_distributed(norm) else norm
    return found


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


class Lion(torch.optim.Optimizer):
    """The sign of a mixture of momentum and gradient, with decoupled decay (Chen et al. 2023). One moment a weight.

    Its steps are larger than AdamW's: a learning rate three to ten times lower is usual.
    """

    def __init__(self, groups: Iterable[dict[str, Any]], *, lr: float, betas: tuple[float, float]) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        if closure is not None:
            raise TypeError("Lion takes no closure")
        for group in self.param_groups:
            weights = [weight for weight in group["params"] if weight.grad is not None]
            if not weights:
                continue
            gradients: list[Tensor] = [weight.grad for weight in weights]
            moments = [self._moment(weight) for weight in weights]
            (first, second), lr = group["betas"], float(group["lr"])
            moves = torch._foreach_lerp(moments, gradients, 1 - first)
            torch._foreach_sign_(moves)
            torch._foreach_mul_(list[Tensor](weights), 1 - lr * group["weight_decay"])
            torch._foreach_add_(list[Tensor](weights), moves, alpha=-lr)
            torch._foreach_lerp_(moments, gradients, 1 - second)
        return None

    def _moment(self, weight: nn.Parameter) -> Tensor:
        state = self.state[weight]
        if "exp_avg" not in state:
            state["exp_avg"] = torch.zeros_like(weight)
        moment: Tensor = state["exp_avg"]
        return moment


class MuonWithAdamW(torch.optim.Optimizer):
    """torch's Muon for the groups with `is_muon`, torch's AdamW for the others, as one optimizer with one state."""

    def __init__(self, groups: Sequence[dict[str, Any]], *, lr: float, betas: tuple[float, float]) -> None:
        super().__init__(groups, {"lr": lr, "weight_decay": 0.0})
        first, rest = self._parts()
        # Learning rates as for AdamW: updates are scaled to the size that AdamW's usually have.
        self._muon = torch.optim.Muon(first, lr=lr, momentum=0.95, adjust_lr_fn="match_rms_adamw")
        self._adamw = torch.optim.AdamW(rest, lr=lr, betas=betas, eps=_EPS) if rest else None

    def _parts(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        return (
            [group for group in self.param_groups if group["is_muon"]],
            [group for group in self.param_groups if not group["is_muon"]],
        )

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        if closure is not None:
            raise TypeError("MuonWithAdamW takes no closure")
        for inner, groups in zip((self._muon, self._adamw), self._parts(), strict=True):
            if inner is not None:
                # Each time: who restores a state may put other objects into their place.
                inner.state, inner.param_groups = self.state, groups
                inner.step()  # type: ignore[no-untyped-call]
        return None


def _make_muon(
    model: nn.Module, groups: list[dict[str, Any]], lr: float, betas: tuple[float, float]
) -> torch.optim.Optimizer:
    if not hasattr(torch.optim, "Muon"):
        raise UsageError(f"torch {torch.__version__} has no Muon", hint="it came with torch 2.9; optimizer=adamw")
    outer = _outer_weights(model)
    made: list[dict[str, Any]] = []
    for group in groups:
        inside = [weight for weight in group["params"] if weight.dim() == 2 and weight not in outer]
        rest = [weight for weight in group["params"] if not any(weight is other for other in inside)]
        made += [{**group, "params": inside, "is_muon": True}] if inside else []
        made += [{**group, "params": rest, "is_muon": False}] if rest else []
    if not any(group["is_muon"] for group in made):
        raise UsageError("optimizer=muon is for matrices, and this model has none inside", hint="optimizer=adamw")
    return MuonWithAdamW(made, lr=lr, betas=betas)


def _outer_weights(model: nn.Module) -> set[Tensor]:
    """Embeddings and heads: rows that stand for themselves, which Muon is not meant for."""
    found: set[Tensor] = set()
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) or name.rpartition(".")[2].endswith("head"):
            found |= set(module.parameters())
    return found


def _make_lion(groups: list[dict[str, Any]], lr: float, betas: tuple[float, float]) -> torch.optim.Optimizer:
    return Lion(groups, lr=lr, betas=betas)


def _make_adafactor(groups: list[dict[str, Any]], lr: float, betas: tuple[float, float]) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(groups, lr=lr)


def _make_8bit(groups: list[dict[str, Any]], lr: float, betas: tuple[float, float]) -> torch.optim.Optimizer:
    try:
        import bitsandbytes  # type: ignore[import-not-found]
    except ImportError:
        raise UsageError(
            "optimizer=adamw8bit needs bitsandbytes", hint="pip install bitsandbytes, or optimizer=adamw"
        ) from None
    made: torch.optim.Optimizer = bitsandbytes.optim.AdamW8bit(groups, lr=lr, betas=betas, eps=_EPS)
    return made


_MAKERS = {"lion": _make_lion, "adafactor": _make_adafactor, "adamw8bit": _make_8bit}
