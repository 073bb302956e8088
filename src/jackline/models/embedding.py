"""The embedding lookup with a gradient that is summed in float32, whatever the dtype of the weights.

For bf16 torch sorts the ids instead of adding atomically, which takes 1.5 ms of a step of GPT-2 on an H200, and it
rounds after each addition. Owns that one function.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


def embed(table: nn.Embedding, ids: Tensor) -> Tensor:
    """`table(ids)`. Compiled code never makes the float32 copy. This is not an autograd.Function, because torch does
    not cache the compiled code of a graph that contains one."""
    weight = table.weight
    if not weight.is_cpu and weight.dtype != torch.float32 and not torch.are_deterministic_algorithms_enabled():
        return functional.embedding(ids, weight.float()).to(weight.dtype)
    plain: Tensor = table(ids)
    return plain
