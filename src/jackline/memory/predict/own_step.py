"""A person's own training step, with their own models and optimizers: GAN, distillation, an average of weights.

Owns tracing it. The function builds everything and returns `step(n)`, which does one whole step with n samples. What
exists when it returns are the weights; the updates of PyTorch's own optimizers are imitated, others run as they are.
"""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from jackline.memory.imagined.gpu import imagined_gpu
from jackline.memory.imagined.programs import as_on_gpu
from jackline.memory.plan.gpus import GpuModel
from jackline.memory.plan.model_settings import Algorithm
from jackline.memory.predict.cuda_rules import CudaRules, leaf_functions
from jackline.memory.predict.job import OptimizerKind, StepOptions
from jackline.memory.predict.optimizers import MetaOptimizer
from jackline.memory.predict.questions import Questions
from jackline.memory.predict.shortcuts import Unfilled
from jackline.memory.predict.trace import Recorder, Trace
from jackline.memory.predict.values import Values

Step = Callable[[int], object]
_NUM_STEPS = 2
_ALGORITHMS: dict[type[torch.optim.Optimizer], Algorithm] = {
    torch.optim.AdamW: "adamw",
    torch.optim.Adam: "adamw",
    torch.optim.SGD: "sgd",
    torch.optim.Adafactor: "adafactor",
}


def trace_own_step(make: Callable[[], Step], micro_batch: int, gpu: GpuModel) -> Trace:
    values = Values()
    recorder = Recorder(processors=gpu.processors, workspace_bytes=gpu.workspace_bytes, values=values)
    rules = CudaRules(
        has_flash=gpu.has_flash_attention,
        has_cudnn=gpu.has_cudnn_attention,
        on_weight_copy=lambda copy: recorder.add(copy, "weight_copies"),
        on_work=recorder.counter.add,
    )
    # What the step prints must not get into the plan's output.
    with contextlib.redirect_stdout(sys.stderr), torch.device("meta"), recorder:
        begin = recorder.mark()
        with Unfilled(values), Questions(values), imagined_gpu(gpu):
            step = make()
        recorder.label(recorder.survivors(begin), "weights")
        own = _imitated_optimizers(recorder)
        with leaf_functions(), rules.answers(), as_on_gpu(), own, rules, Questions(values), imagined_gpu(gpu):
            for number in range(_NUM_STEPS):
                gc.collect(0)
                recorder.phase = "step"
                recorder.counter.is_on = number == _NUM_STEPS - 1
                step(micro_batch)
    return recorder.finish(rules.class_sizes)


@contextlib.contextmanager
def _imitated_optimizers(recorder: Recorder) -> Iterator[None]:
    """On the meta device PyTorch would not choose the implementation that it chooses on CUDA."""
    imitated: dict[int, MetaOptimizer] = {}

    def step_of(algorithm: Algorithm) -> Callable[..., Any]:
        def step(optimizer: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> Any:
            found = closure() if closure is not None else None
            if id(optimizer) not in imitated:
                imitated[id(optimizer)] = _imitation(optimizer, algorithm)
            imitated[id(optimizer)].step()
            for tensor in imitated[id(optimizer)].state_tensors():
                recorder.add(tensor, "optimizer")
            return found

        return step

    kept = {kind: kind.step for kind in _ALGORITHMS}
    for kind, algorithm in _ALGORITHMS.items():
        kind.step = step_of(algorithm)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for kind, step in kept.items():
            kind.step = step  # type: ignore[method-assign]


def _imitation(optimizer: torch.optim.Optimizer, algorithm: Algorithm) -> MetaOptimizer:
    kind: OptimizerKind = "fused" if optimizer.defaults.get("fused") else "foreach"
    weights = [weight for group in optimizer.param_groups for weight in group["params"] if weight.requires_grad]
    if algorithm == "sgd" and not optimizer.defaults.get("momentum"):
        weights = []
    return MetaOptimizer(weights, StepOptions("fp32", kind, algorithm=algorithm))
