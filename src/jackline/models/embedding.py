"""Looking tokens up, with a gradient that is summed in float32 whatever the weights are in.

For bf16 torch sorts the ids instead of adding atomically, 1.5 ms of a step of GPT-2 on an H200, and rounds after each
addition. Owns that one function.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


def embed(table: nn.Embedding, ids: Tensor) -> Tensor:
    """`table(ids)`. A compiler never makes the float32 copy. Not an autograd.Function: torch keeps no compiled
    code of a graph that holds one."""
    weight = table.weight
    if weight.is_cuda and weight.dtype != torch.float32 and not torch.are_deterministic_algorithms_enabled():
        return functional.embedding(ids, weight.float()).to(weight.dtype)
    plain: Tensor = table(ids)
    return plain
