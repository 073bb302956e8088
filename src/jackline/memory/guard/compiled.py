"""What can be seen of a compiled model from outside: CUDA graphs, and whether a new batch size compiles again.

Private names of torch are read here and nowhere else. Each read is guarded: where a version of torch lacks the name,
there is no answer.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from torch import nn


def _contexts(model: nn.Module) -> Iterator[tuple[Any, bool]]:
    """(compiler configuration, is dynamic) of every compiled module in `model`."""
    for module in model.modules():
        context = getattr(module, "dynamo_ctx", None)
        if context is not None:
            yield getattr(context, "compiler_config", None), getattr(context, "_dynamic", None) is True
        call = getattr(module, "_compiled_call_impl", None)
        if call is not None:
            read = getattr(call, "get_compiler_config", None)
            yield (read() if callable(read) else None), False


def uses_cuda_graphs(model: nn.Module) -> bool:
    for config, _ in _contexts(model):
        if isinstance(config, dict) and "triton.cudagraphs" in config:
            if config["triton.cudagraphs"]:
                return True
        elif _default_has_graphs():
            return True
    return False


def _default_has_graphs() -> bool:
    config = sys.modules.get("torch._inductor.config")
    return bool(getattr(getattr(config, "triton", None), "cudagraphs", False))


def is_compiled_static(model: nn.Module) -> bool:
    """Whether a new batch size will be compiled before it runs."""
    return any(not is_dynamic for _, is_dynamic in _contexts(model))
