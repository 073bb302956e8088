"""What programs do otherwise without a GPU: compiled functions, FlexAttention, numbers in texts, shortcuts of an
evaluation.

Owns leading them back to the operators that `predict` has rules for.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch

_FLEX = "torch.nn.attention.flex_attention"


@contextlib.contextmanager
def as_on_gpu() -> Iterator[None]:
    """Run compiled functions operator by operator, and let FlexAttention take tensors of the meta device. What the
    program has not imported is left alone: torch's compiler takes a second."""
    with contextlib.ExitStack() as kept:
        if "torch._dynamo" in sys.modules:
            kept.enter_context(torch.compiler.set_stance("force_eager"))
        flex: Any = sys.modules.get(_FLEX)
        if flex is not None:
            _replace(kept, flex, "_validate_device", lambda *_: None)
            _replace(kept, flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
        _replace(kept, torch.Tensor, "__format__", _text)
        yield


_FORMAT: Any = torch.Tensor.__format__


def _text(value: torch.Tensor, spec: str) -> str:
    """`f"{loss:.3f}"`: PyTorch writes a number of the meta device only without a format."""
    return str(format(value.item(), spec) if value.is_meta and value.dim() == 0 else _FORMAT(value, spec))


def _replace(kept: contextlib.ExitStack, module: Any, name: str, value: Any) -> None:
    if hasattr(module, name):
        kept.callback(setattr, module, name, getattr(module, name))
        setattr(module, name, value)


@contextlib.contextmanager
def without_fast_path() -> Iterator[None]:
    """PyTorch's own transformer layers have one kernel for an evaluation, which the meta device has not. It needs
    less memory than the layers do one by one."""
    was_on = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(was_on)
