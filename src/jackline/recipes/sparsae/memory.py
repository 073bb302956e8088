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
from jackline.models.shapes import GPTShape, describe_shape

_DISTILL_WEIGHT = 0.5  # any but 0: memory is the same


def make_gpt(shape: GPTShape, options: StepOptions) -> GPT:
    return GPT(shape, is_recomputing=options.is_recomputing)


def divergence_sum(teacher: Tensor, student: Tensor) -> Tensor:
    """KL(student || teacher) of logarithms, summed; `teacher` is overwritten.

    The bits of `kl_div(teacher, student, log_target=True, reduction="sum")` and of its gradients, with one tensor
    of the logits' size less. Those are the largest of a step: 0.1 GB each for the tiny model and a batch of two.
    """
    return (student.exp() * teacher.neg_().add_(student)).sum()


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
            teacher = functional.log_softmax(self.teacher(ids).float().flatten(0, 1), dim=-1)
        # In float32 also where the weights are bf16: logits are the largest tensors of a step.
        student = functional.log_softmax(self.student(ids).float().flatten(0, 1), dim=-1)
        loss = functional.nll_loss(student, targets.flatten(), reduction="sum")
        return loss + self._weight * divergence_sum(teacher, student)

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
