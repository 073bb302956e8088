"""What is trained, as far as memory is concerned: a model, a batch, a loss, and the options of a step.

Data only. A recipe, a user's function or a library call makes a Job; everything else in this package takes one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor, nn

from jackline.memory.plan.gpus import Precision
from jackline.memory.plan.model_settings import Algorithm, Parallel
from jackline.memory.predict.values import Routing

OptimizerKind = Literal["fused", "foreach", "for-loop"]


@dataclass(frozen=True)
class StepOptions:
    """How a step is computed."""

    precision: Precision = "bf16"
    optimizer: OptimizerKind = "fused"  # how AdamW is done
    is_recomputing: bool = False
    loss_chunk_rows: int = 0
    is_expandable: bool = True  # the allocator's expandable segments
    algorithm: Algorithm = "adamw"
    num_ranks: int = 1
    parallel: Parallel = "ddp"  # how several ranks share the work
    is_offloading: bool = False  # FSDP2 keeps weights, gradients and optimizer state on the host
    routing: Routing = "even"  # which experts a mixture of experts is assumed to choose


@dataclass(frozen=True)
class Job:
    """`build(options)` makes the model on the default device; `batch(n)` makes an example batch of n samples there;
    `loss(model, batch)` computes the scalar that is differentiated."""

    name: str
    build: Callable[[StepOptions], nn.Module]
    batch: Callable[[int], Any]
    loss: Callable[[nn.Module, Any], Tensor]
    global_batch: int
    options: StepOptions = field(default_factory=StepOptions)
    # What the model's own code can do. A user's own model is assumed to do neither.
    can_recompute: bool = False
    can_chunk_loss: bool = False
    note: str = ""
    # A person's own code, written for a GPU: while it is traced, PyTorch says that there is one.
    asks_for_gpu: bool = False
    # Instead of all of the above: builds everything and returns step(n), which does one whole step with n samples.
    own_step: Callable[[], Callable[[int], object]] | None = None
