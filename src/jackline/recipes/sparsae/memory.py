"""SparsAE's step as the memory plan sees it: the tensors and the order of their lives, no values that matter."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from jackline.memory.plan.gpus import Precision
from jackline.memory.predict.cuda_rules import CudaRules
from jackline.memory.predict.job import Job, StepOptions
from jackline.models.gpt import GPT
from jackline.models.loss import IGNORED
from jackline.models.shapes import GPTShape, describe_shape

_DISTILL_WEIGHT = 0.5  # any but 0: memory is the same


_ROWS = 64  # at a time: 13 MB of each tensor


def make_gpt(shape: GPTShape, options: StepOptions) -> GPT:
    return GPT(shape, is_recomputing=options.is_recomputing)


def divergence_sum(teacher: Tensor, student: Tensor) -> Tensor:
    """KL(student || teacher) of logarithms, summed; `teacher` is overwritten.

    The bits of `kl_div(teacher, student, log_target=True, reduction="sum")` and of its gradients, with one tensor
    of the logits' size less. Those are the largest of a step: 0.1 GB each for the tiny model and a batch of two.
    """
    return (student.exp() * teacher.neg_().add_(student)).sum()


def keeps_little(logits: Tensor) -> bool:
    """Whether the gradient is computed along with the loss, some rows at a time: on a CPU, where the host's memory is
    what is short. On a GPU that would be many small kernels."""
    return logits.is_cpu


def teachers(logits: Tensor) -> Tensor:
    """What `distilled` takes of the teacher: the logits themselves, or the logarithms of its probabilities."""
    logits = logits.float().flatten(0, 1)
    return logits if keeps_little(logits) else functional.log_softmax(logits, dim=-1)


def distilled(teacher: Tensor, logits: Tensor, targets: Tensor, weight: float) -> tuple[Tensor, Tensor, Tensor]:
    """Cross-entropy plus `weight` times the divergence from the teacher, and both alone; all summed."""
    logits = logits.float().flatten(0, 1)
    if keeps_little(logits):
        found: tuple[Tensor, Tensor, Tensor] = _InRows.apply(  # type: ignore[no-untyped-call]
            teacher, logits, targets.flatten(), weight
        )
        return found
    student = functional.log_softmax(logits, dim=-1)
    del logits
    loss = functional.nll_loss(student, targets.flatten(), reduction="sum")
    divergence = divergence_sum(teacher, student)
    return loss + weight * divergence, loss, divergence


class _InRows(torch.autograd.Function):
    """The logits are overwritten by their gradient, so that a step keeps two tensors of that size and not six. With
    s the student's logarithms and d how far they are from the teacher's, KL's gradient is exp(s) (d - KL of the row).
    """

    @staticmethod
    def forward(ctx: Any, teacher: Tensor, logits: Tensor, targets: Tensor, weight: float) -> Any:
        gradient = logits.detach()
        loss, divergence = (torch.zeros((), dtype=torch.float32) for _ in range(2))
        for rows, others, labels in zip(
            *(torch.split(part, _ROWS) for part in (gradient, teacher, targets)), strict=True
        ):
            student = functional.log_softmax(rows, dim=-1)
            loss += functional.nll_loss(student, labels, reduction="sum")
            apart = student - functional.log_softmax(others, dim=-1)
            shares = student.exp_()
            of_row = (shares * apart).sum(dim=-1, keepdim=True)
            divergence += of_row.sum()
            is_counted = (labels != IGNORED).to(rows.dtype)[:, None]
            rows.copy_(apart.sub_(of_row).mul_(weight).add_(is_counted).mul_(shares))
            rows.scatter_add_(1, labels.clamp(min=0)[:, None], -is_counted)
        ctx.gradient = gradient
        ctx.mark_non_differentiable(loss, divergence)
        return loss + weight * divergence, loss, divergence

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, outer: Tensor, *_: Any) -> Any:
        gradient, ctx.gradient = ctx.gradient, None  # for one backward pass: it is scaled in place
        return None, gradient.mul_(outer), None, None


class SparsaeModule(nn.Module):
    """The student that is trained, its averaged teacher, and one byte for each weight that can be switched off."""

    def __init__(self, student: GPT, teacher: GPT, distill_weight: float = _DISTILL_WEIGHT) -> None:
        super().__init__()
        self._weight = distill_weight
        self.student = student
        self.teacher = teacher.requires_grad_(False)
        for number, weight in enumerate(student.parameters()):
            if weight.dim() >= 2:
                self.register_buffer(f"mask_{number}", torch.ones_like(weight, dtype=torch.bool, requires_grad=False))

    def _apply(self, change: Any, recurse: bool = True) -> SparsaeModule:
        """The trainer lowers the student alone. Its teacher was copied before, and an average that moves by a
        thousandth a step would stand still in bf16: 2 bytes a weight that a plan once left out."""
        self.student._apply(change, recurse)  # type: ignore[no-untyped-call]
        return self

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        """Summed cross-entropy and divergence from the teacher, as every step after the first 500 has them."""
        self.teacher.eval()
        with torch.no_grad(), self._lowering(ids.device):
            teacher = teachers(self.teacher(ids))
        # In float32 also where the weights are bf16: logits are the largest tensors of a step.
        return distilled(teacher, self.student(ids), targets, self._weight)[0]

    def _lowering(self, device: torch.device) -> Any:
        """A float32 teacher of a bf16 student computes in bf16; with any other precision the step's own autocast is
        on already. Torch has none for the meta device."""
        if self.student.tokens.weight.dtype != torch.bfloat16:
            return contextlib.nullcontext()
        return CudaRules(torch.bfloat16) if device.type == "meta" else torch.autocast(device.type, torch.bfloat16)


def sparse_job(
    name: str, shape: GPTShape, batch_size: int, precision: Precision, *, is_recomputing: bool = False
) -> Job:
    """Student, teacher and masks, and the loss as every step after the warm-up has it."""
    return Job(
        name=f"sparsae {name}",
        build=lambda options: SparsaeModule(make_gpt(shape, options), make_gpt(shape, options)),
        batch=lambda count: torch.zeros((count, shape.context), dtype=torch.long),
        loss=lambda model, ids: model(ids, ids) / float(ids.numel()),
        global_batch=batch_size,
        options=StepOptions(precision=precision, is_recomputing=is_recomputing),
        can_recompute=True,
        note=describe_shape(f"sparsae {name}", shape),
    )
