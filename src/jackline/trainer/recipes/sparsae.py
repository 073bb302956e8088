"""SparsAE: a language model with a fixed share of its weights switched off, taught also by an average of itself.

Owns the recipe's sizes and settings and what of it takes memory: student, teacher, masks, and the loss of a step.
The search for masks and the loop are the trainer's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from jackline.errors import UsageError
from jackline.memory.cards import Card, Precision
from jackline.memory.job import Job, StepOptions
from jackline.memory.target import Candidate
from jackline.models.gpt import GPT
from jackline.models.shapes import SHAPES, count_parameters, describe_shape
from jackline.trainer.recipes.settings import parse_settings

DISTILL_WEIGHT = 0.5


@dataclass(frozen=True)
class Size:
    """What goes with a size when `model_size=auto` picks it: larger models get more data and a larger batch."""

    batch_size: int
    max_train_examples: int
    max_val_examples: int


SIZES = {
    "medium": Size(16, 100_000, 10_000),
    "small": Size(8, 50_000, 5_000),
    "tiny": Size(4, 30_000, 3_000),
}


@dataclass(frozen=True)
class SparsaeSettings:
    """0 means: as the size has it."""

    model_size: Literal["auto", "tiny", "small", "medium"] = "small"
    batch_size: int = 0
    seq_len: int = 256
    max_train_examples: int = 0
    max_val_examples: int = 0
    num_workers: int = 0
    sparsity: float = 0.8
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    recompute: bool = False

    def __post_init__(self) -> None:
        if self.batch_size < 0 or self.seq_len < 1 or self.num_workers < 0:
            raise UsageError("batch_size, seq_len and num_workers cannot be negative, and seq_len not 0")
        if not 0 <= self.sparsity < 1:
            raise UsageError(f"sparsity={self.sparsity} is not between 0 and 1")


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
        logits = self.student(ids).flatten(0, 1)
        student = functional.log_softmax(logits, dim=-1)
        divergence = functional.kl_div(teacher, student, log_target=True, reduction="sum")
        loss: Tensor = functional.nll_loss(student, targets.flatten(), reduction="sum") + DISTILL_WEIGHT * divergence
        return loss


def candidates(card: Card, words: Sequence[str]) -> tuple[Candidate, ...]:
    """What could be trained on this card, largest first; one unless model_size=auto. An explicit size is kept."""
    settings = parse_settings(SparsaeSettings, words, "sparsae")
    names = list(SIZES) if settings.model_size == "auto" else [settings.model_size]
    return tuple(_candidate(name, settings, card) for name in names)


def _candidate(name: str, settings: SparsaeSettings, card: Card) -> Candidate:
    size = SIZES[name]
    shape = replace(SHAPES[f"sparsae-{name}"], context=settings.seq_len)
    precision: Precision = card.precision if settings.precision == "auto" else settings.precision
    batch_size = settings.batch_size or size.batch_size

    def build(options: StepOptions) -> nn.Module:
        student, teacher = (GPT(shape, is_recomputing=options.is_recomputing) for _ in range(2))
        return SparsaeModule(student, teacher)

    job = Job(
        name=f"sparsae {name}",
        build=build,
        batch=lambda count: torch.zeros((count, settings.seq_len), dtype=torch.long),
        loss=lambda model, ids: model(ids, ids) / float(ids.numel()),
        global_batch=batch_size,
        options=StepOptions(precision=precision, is_recomputing=settings.recompute),
        can_recompute=True,
        note=describe_shape(f"sparsae {name}", shape),
    )
    shown = {
        "model_size": name,
        "parameters": count_parameters(shape),
        "is_head_tied": shape.is_tied,
        "batch_size": batch_size,
        "seq_len": settings.seq_len,
        "max_train_examples": settings.max_train_examples or size.max_train_examples,
        "max_val_examples": settings.max_val_examples or size.max_val_examples,
        "num_workers": settings.num_workers,
        "sparsity": settings.sparsity,
    }
    return Candidate(job, shown)
