"""What is to be trained, as far as memory is concerned: a model, a batch, a loss, and how.

Data only. A recipe, a user's function or a library call makes a Job; everything else in this folder takes one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor, nn

from jackline.memory.plan.cards import Precision

OptimizerKind = Literal["fused", "foreach", "for-loop"]


@dataclass(frozen=True)
class StepOptions:
    """How a step is done."""

    precision: Precision = "bf16"
    optimizer: OptimizerKind = "fused"  # AdamW
    is_recomputing: bool = False
    loss_chunk_rows: int = 0
    is_expandable: bool = True  # the allocator's expandable segments


@dataclass(frozen=True)
class Job:
    """`build(options)` makes the model on the default device; `batch(n)` an example batch of n samples there;
    `loss(model, batch)` the scalar that is differentiated."""

    name: str
    build: Callable[[StepOptions], nn.Module]
    batch: Callable[[int], Any]
    loss: Callable[[nn.Module, Any], Tensor]
    global_batch: int
    options: StepOptions = field(default_factory=StepOptions)
    # What the model's own code can do; a stranger's model can do neither for us.
    can_recompute: bool = False
    can_chunk_loss: bool = False
    note: str = ""
