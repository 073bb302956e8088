"""SparsAE's step as the memory plan sees it: the tensors and the order of their lives, no values that matter."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from jackline.memory.job import StepOptions
from jackline.models.gpt import GPT
from jackline.models.shapes import GPTShape
from jackline.trainer.recipes.sparsae import DISTILL_WEIGHT


def make_gpt(shape: GPTShape, options: StepOptions) -> GPT:
    return GPT(shape, is_recomputing=options.is_recomputing)


def divergence_sum(teacher: Tensor, student: Tensor) -> Tensor:
    """KL(student || teacher) of logarithms, summed; `teacher` is overwritten.

    The bits of `kl_div(teacher, student, log_target=True, reduction="sum")` and of its slopes, with one tensor of the
    logits' size less. Those are the largest of a step: 0.1 GB each for the tiny model and a batch of two.
    """
    return (student.exp() * teacher.neg_().add_(student)).sum()


class SparsaeModule(nn.Module):
    """The student that is trained, its averaged teacher, and one byte for each weight that can be switched off."""

    def __init__(self, student: GPT, teacher: GPT) -> None:
        super().__init__()
        self.student = student
        self.teacher = teacher.requires_grad_(False)
        for number, weight in enumerate(student.parameters()):
            if weight.dim() >= 2:
                self.register_buffer(f"mask_{number}", torch.ones_like(weight, dtype=torch.bool, requires_grad=False))

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        """Summed cross-entropy and divergence from the teacher, as every step after the first 500 has them."""
        with torch.no_grad():
            teacher = functional.log_softmax(self.teacher(ids).flatten(0, 1), dim=-1)
        student = functional.log_softmax(self.student(ids).flatten(0, 1), dim=-1)
        divergence = divergence_sum(teacher, student)
        loss: Tensor = functional.nll_loss(student, targets.flatten(), reduction="sum") + DISTILL_WEIGHT * divergence
        return loss
