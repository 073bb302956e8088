"""The sizes of GPT models by name, with their true number of parameters. No torch, so that listing them is cheap.

Advertised sizes are wrong: 'sparsae-small' was called 125M and has 162M, because its head is not tied to the
embedding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from jackline.errors import UsageError

GPT2_VOCAB = 50_257


@dataclass(frozen=True)
class GPTShape:
    """Everything that decides how large a GPT is."""

    num_layers: int
    num_heads: int
    width: int
    context: int = 1024
    vocab_size: int = GPT2_VOCAB
    is_tied: bool = True  # the head shares the embedding's weights
    has_head_bias: bool = False
    dropout: float = 0.0
    activation: Literal["gelu", "relu"] = "gelu"

    def __post_init__(self) -> None:
        if self.width % self.num_heads:
            raise UsageError(f"width {self.width} is not a multiple of {self.num_heads} heads")

    @property
    def mlp_width(self) -> int:
        return 4 * self.width


def count_parameters(shape: GPTShape) -> int:
    """Exactly what `sum(p.numel() for p in GPT(shape).parameters())` gives; a tied head counts once."""
    width, mlp = shape.width, shape.mlp_width
    attention = 4 * width * width + 4 * width
    feed_forward = 2 * width * mlp + mlp + width
    norms = 4 * width
    head = (0 if shape.is_tied else shape.vocab_size * width) + (shape.vocab_size if shape.has_head_bias else 0)
    embeddings = (shape.vocab_size + shape.context) * width
    return embeddings + shape.num_layers * (attention + feed_forward + norms) + 2 * width + head


def _sparsae(num_layers: int, num_heads: int, width: int) -> GPTShape:
    return GPTShape(
        num_layers,
        num_heads,
        width,
        context=256,
        is_tied=False,
        has_head_bias=True,
        dropout=0.1,
        activation="relu",
    )


SHAPES: dict[str, GPTShape] = {
    "nano": GPTShape(4, 4, 256),
    "tiny": GPTShape(7, 8, 512),
    "small": GPTShape(12, 12, 768),
    "medium": GPTShape(24, 16, 1024),
    "xl": GPTShape(24, 16, 2048),
    "sparsae-tiny": _sparsae(6, 6, 384),
    "sparsae-small": _sparsae(12, 12, 768),
    "sparsae-medium": _sparsae(24, 16, 1024),
}


def find_shape(name: str) -> GPTShape:
    shape = SHAPES.get(name)
    if shape is None:
        raise UsageError(f"there is no model size '{name}'", hint="known sizes: " + ", ".join(SHAPES))
    return shape


def describe_shape(name: str, shape: GPTShape) -> str:
    """'small: 12 x 768, 12 heads, context 1024, 124,439,808 parameters, head tied to the embedding'."""
    head = "head tied to the embedding" if shape.is_tied else "head not tied"
    return (
        f"{name}: {shape.num_layers} x {shape.width}, {shape.num_heads} heads, context {shape.context},"
        f" {count_parameters(shape):,} parameters, {head}"
    )
