"""The memory of a GPT's training step by arithmetic: an answer in microseconds, without torch, within a few percent.

Owns the closed form for plain pre-norm GPTs with fused attention and AdamW. The trace (`predict`) knows better and
knows every model; this is for a first word before torch is imported, and a second opinion in tests.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class GptNumbers:
    num_parameters: int
    num_layers: int
    num_heads: int
    width: int
    vocab_size: int


@dataclass(frozen=True)
class StepNumbers:
    batch: int
    length: int
    is_low: bool  # bf16 or fp16 autocast
    is_recomputing: bool = False
    is_foreach: bool = False  # stock AdamW; the fused one needs less
    is_accumulating: bool = False


# Bytes a token and unit of width that a block keeps for its backward pass. In float32: the residual stream twice,
# both norms' outputs, qkv, attention's output, and the feed-forward's four-fold width before and after the GELU. In
# low precision the residual stream stays in float32 and the rest is half.
_KEPT_FLOAT32 = 4 * (2 + 2 + 3 + 1 + 4 + 4)
_KEPT_LOW = 4 * 2 + 2 * (2 + 3 + 1 + 4 + 4)
# Bytes a logit at the peak: log-probabilities, their gradient and the logits' gradient; in low precision the
# log-probabilities, their float32 copy, and its gradient.
_LOGIT_FLOAT32 = 12
_LOGIT_LOW = 10


def estimate_bytes(gpt: GptNumbers, step: StepNumbers) -> int:
    """Peak allocated, without cuBLAS's workspace."""
    tokens = step.batch * step.length
    static = 12 * gpt.num_parameters
    gradients = 4 * gpt.num_parameters
    kept_block = tokens * (gpt.width * (_KEPT_LOW if step.is_low else _KEPT_FLOAT32) + 4 * gpt.num_heads)
    kept = gpt.num_layers * (tokens * gpt.width * 4 if step.is_recomputing else kept_block)
    head = tokens * gpt.width * (6 if step.is_low else 8)
    logits = tokens * gpt.vocab_size * (_LOGIT_LOW if step.is_low else _LOGIT_FLOAT32)
    copies = 0
    if step.is_low:
        # Recomputed blocks cast their weights anew; only the head's copy lives at the peak.
        copies = 2 * (gpt.vocab_size * gpt.width if step.is_recomputing else gpt.num_parameters)
    at_loss = static + kept + head + logits + copies + (gradients if step.is_accumulating else 0)
    at_update = static + gradients + (4 * gpt.num_parameters if step.is_foreach else 0)
    return max(at_loss, at_update)
