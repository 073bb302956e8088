"""Which tensor was the first to hold a NaN or an infinity. Called only after one was seen: it reads every value.

Owns the search; the alarm is `sentinels`'. Looks at the weights first (a bad update), then runs the batch forward
once more and watches every module's output, then looks at the gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from jackline.memory.guard.batches import list_tensors


def first_bad_tensor(model: nn.Module, run_batch: Callable[[], object] | None = None) -> str:
    """In words: 'weight blocks.3.up.weight: 12 of 1,048,576 values are not finite'. '' when none is found.

    `run_batch` runs the batch forward (it may be the loop's own step without update); it is called under no_grad.
    """
    named = [(f"weight {name}", weight) for name, weight in model.named_parameters()]
    bad = [found for name, weight in named if (found := _describe(name, weight))]
    if len(bad) == len(named) > 1:
        # A NaN in the norm of the gradients, which all are divided by.
        return f"all {len(named)} weights, by an update with it; the first is {bad[0]}"
    bad += [found for name, buffer in model.named_buffers() if (found := _describe(f"buffer {name}", buffer))]
    if bad:
        return bad[0]
    if run_batch is not None and (found := _first_bad_output(model, run_batch)):
        return found
    gradients = [(f"gradient of {name}", weight.grad) for name, weight in model.named_parameters()]
    late = [found for name, gradient in gradients if gradient is not None and (found := _describe(name, gradient))]
    # Backward goes from the last layer to the first: the bad gradient nearest the loss was the first one.
    return late[-1] if late else ""


def weights_without_gradient(model: nn.Module) -> list[str]:
    """Names of trained weights whose gradient is missing or all zero: what a cut graph looks like."""
    return [
        name
        for name, weight in model.named_parameters()
        if weight.requires_grad and (weight.grad is None or not bool(weight.grad.count_nonzero()))
    ]


def _describe(name: str, tensor: Tensor) -> str:
    if not tensor.is_floating_point():
        return ""
    bad = tensor.numel() - int(torch.isfinite(tensor.detach()).sum())
    return f"{name}: {bad:,} of {tensor.numel():,} values are not finite" if bad else ""


def _first_bad_output(model: nn.Module, run_batch: Callable[[], object]) -> str:
    found: list[str] = []

    def watch(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def look(module: nn.Module, args: Any, output: Any) -> None:
            if not found:
                found.extend(
                    text
                    for tensor in list_tensors(output)
                    if (text := _describe(f"output of {name} ({type(module).__name__})", tensor))
                )

        return look

    handles = [module.register_forward_hook(watch(name or "the model")) for name, module in model.named_modules()]
    try:
        with torch.no_grad():
            run_batch()
    except Exception as error:  # it is already going wrong; the search must not add a second death
        found.append(f"the batch could not be run again ({type(error).__name__}: {error})")
    finally:
        for handle in handles:
            handle.remove()
    return found[0] if found else ""
