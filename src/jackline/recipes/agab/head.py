"""The affinity head: from the two embeddings of an antibody-antigen pair to its pKd.

    head = AffinityHead(2304, dropout=0.3)          # 3,053,057 parameters
    head(features)                                  # [n], float32 whatever the rest computes in
    focal_loss(predicted, wanted, gamma=2.0)        # each pair's; the mean of them is the loss

Owns the layers, the first guess and the loss. Encoders are frozen and elsewhere: what they give is cached, and only
this is trained and saved.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from jackline.memory.plan.gpus import Precision
from jackline.memory.predict.job import Job, StepOptions
from jackline.trainer.config import TrainConfig

WIDTHS = (1024, 512, 256)
LAST_WIDTH = 128


class AffinityHead(nn.Module):
    """Three blocks Linear, GELU, Dropout, LayerNorm; one without a norm; one number.

    Features are taken as the encoders give them. Scaled to the same spread they fitted known antigens better and new
    ones worse: Spearman 0.863 against 0.884 on 20,000 planted pairs.
    """

    def __init__(self, num_inputs: int, *, dropout: float = 0.3) -> None:
        super().__init__()
        self.num_inputs = num_inputs
        layers: list[nn.Module] = []
        width = num_inputs
        for after in WIDTHS:
            layers += [nn.Linear(width, after), nn.GELU(), nn.Dropout(dropout), nn.LayerNorm(after)]
            width = after
        layers += [nn.Linear(width, LAST_WIDTH), nn.GELU(), nn.Dropout(dropout)]
        self.body = nn.Sequential(*layers)
        self.last = nn.Linear(LAST_WIDTH, 1)

    @torch.no_grad()
    def guess(self, pkd: float) -> None:
        """Before the first step every pair is given `pkd`, the training pairs' mean. From 0 the first errors would be
        7, and the loss of such an error is 30,000 times that of an error of 1."""
        self.last.weight.mul_(0.1)
        self.last.bias.fill_(pkd)

    def forward(self, features: Tensor) -> Tensor:
        hidden = self.body(features.to(self.last.weight.dtype))
        # bf16 has steps of 0.0625 around 9: a number rounded to it takes a dozen values over all of a test set.
        # A sum of products, because a matrix product would be rounded again under autocast.
        made: Tensor = (hidden.float() * self.last.weight.float()).sum(dim=-1) + self.last.bias.float()
        return made


def count_parameters(num_inputs: int) -> int:
    """Without building it."""
    total, width = 0, num_inputs
    for after in WIDTHS:
        total += width * after + after + 2 * after
        width = after
    return total + width * LAST_WIDTH + LAST_WIDTH + LAST_WIDTH + 1


def focal_loss(predicted: Tensor, wanted: Tensor, gamma: float) -> Tensor:
    """(1 + e^2)^gamma e^2 of each pair: errors beyond 1 count far more than their square.

    In double precision: the sixth power of what half precision can hold has 29 digits, and there are only as many
    numbers as pairs in the batch.
    """
    squared = (predicted.double() - wanted.double()).square()
    return (1.0 + squared).pow(gamma) * squared


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
