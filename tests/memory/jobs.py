"""Jobs to plan in tests: a GPT by name, as the recipes make them."""

from __future__ import annotations

import torch

from jackline.memory.predict.job import Job, StepOptions
from jackline.models.gpt import GPT
from jackline.models.shapes import SHAPES, GPTShape


def gpt_job(
    shape: GPTShape | str, *, length: int = 1024, global_batch: int = 8, options: StepOptions | None = None
) -> Job:
    size = SHAPES[shape] if isinstance(shape, str) else shape
    return Job(
        name=shape if isinstance(shape, str) else "a small GPT",
        build=lambda how: GPT(size, is_recomputing=how.is_recomputing, loss_chunk_rows=how.loss_chunk_rows),
        batch=lambda n: torch.zeros((n, length), dtype=torch.long),
        loss=lambda model, ids: model(ids, ids) / float(ids.numel()),
        global_batch=global_batch,
        options=options or StepOptions(),
        can_recompute=True,
        can_chunk_loss=True,
    )
