"""A model compiled in parts computes what the plain one computes, and all its blocks share one compiled graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from jackline.models.gpt import GPT
from jackline.models.nsa.model import NSAModel
from jackline.models.nsa.shape import NSAShape
from jackline.models.shapes import GPTShape
from jackline.models.stack import Stack

SPARSE = NSAShape(
    num_layers=3, width=16, num_heads=2, num_groups=1, head_width=8, vocab_size=40, compressed_length=4,
    compressed_stride=2, block_length=4, num_blocks=3, num_local=1, window=8,
)  # fmt: skip


def models(is_recomputing: bool) -> dict[str, Stack]:
    torch.manual_seed(1)
    return {
        "gpt": GPT(GPTShape(3, 2, 16, context=16, vocab_size=40), is_recomputing=is_recomputing),
        "nsa": NSAModel(SPARSE, is_recomputing=is_recomputing),
    }


def gradients(model: Stack, ids: Tensor) -> tuple[Tensor, list[Tensor]]:
    loss = model(ids[:, :-1], ids[:, 1:])
    return loss.detach(), list(torch.autograd.grad(loss, list(model.parameters())))


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch's compiler looks at it, and hides the warning badly
@pytest.mark.parametrize("is_recomputing", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("name", ["gpt", "nsa"])
def test_a_model_of_three_blocks_is_compiled_as_one_block_and_trains_the_same(
    name: str, is_recomputing: bool
) -> None:
    graphs: list[Any] = []

    def keep(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    model = models(is_recomputing)[name]
    ids = torch.randint(0, 40, (2, 17), generator=torch.Generator().manual_seed(2))
    plain_loss, plain = gradients(model, ids)
    torch._dynamo.reset()
    model.compile(backend=keep, dynamic=False)
    loss, found = gradients(model, ids)
    torch.testing.assert_close(loss, plain_loss)
    torch.testing.assert_close(found, plain)
    assert len(graphs) == 3  # entry, block, exit
    model.forward(ids[:1, :-1], ids[:1, 1:])  # as it is evaluated, with another shape
    assert len(graphs) == 3


def test_hooks_of_a_compiled_model_are_called() -> None:
    """fully_shard gathers a block's weights in such hooks."""
    called: list[str] = []
    model = models(False)["gpt"]
    model.compile(backend="eager", dynamic=False)
    model.blocks[1].register_forward_pre_hook(lambda *_: called.append("block"))
    model.register_forward_hook(lambda *_: called.append("model"))
    model(torch.zeros((1, 4), dtype=torch.long))
    assert called == ["block", "model"]
