"""What of the affinity recipe takes memory: the head, and a step over rows of features. For plans."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from jackline.memory.plan.gpus import Precision
from jackline.memory.predict.job import Job, StepOptions
from jackline.recipes.agab.head import AffinityHead, count_parameters, focal_loss
from jackline.trainer.config import TrainConfig


def head_job(config: TrainConfig, num_inputs: int, precision: Precision) -> Job:
    def loss(model: nn.Module, features: Tensor) -> Tensor:
        made: Tensor = model(features)
        return focal_loss(made, features[:, 0], 2.0).mean()

    return Job(
        name=config.recipe,
        build=lambda options: AffinityHead(num_inputs, dropout=config.dropout),
        batch=lambda count: torch.zeros((count, num_inputs)),
        loss=loss,
        global_batch=config.batch_size,
        options=StepOptions(precision=precision),
        note=f"head over {num_inputs:,} features, {count_parameters(num_inputs):,} parameters",
    )
