"""The sizes of a model with Native Sparse Attention. No torch, so that listing them is cheap.

The default size was called 125M where it comes from; it has 155M parameters with GPT-2's vocabulary and 78M with
bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

from jackline.errors import UsageError
from jackline.models.shapes import GPT2_VOCAB


@dataclass(frozen=True)
class NSAShape:
    """All that decides how large the model is and what its attention reads. Lengths are in tokens."""

    num_layers: int = 12
    width: int = 768
    num_heads: int = 12
    num_groups: int = 2  # key/value heads; the query heads of one group choose their blocks together
    head_width: int = 64
    vocab_size: int = GPT2_VOCAB
    compressed_length: int = 32
    compressed_stride: int = 16
    block_length: int = 64  # of a block that can be selected
    num_blocks: int = 16  # selected per query, including the forced ones
    num_local: int = 2  # forced: the block a query is in and those just before it; block 0 is forced too
    window: int = 512
    rotary_base: float = 10_000.0
    is_dense: bool = False  # every token reads all before it, by one branch (dense.py)

    def __post_init__(self) -> None:
        if self.num_heads % self.num_groups:
            raise UsageError(f"{self.num_heads} heads cannot be shared by {self.num_groups} key/value groups")
        if self.head_width % 2:
            raise UsageError(f"head_width {self.head_width} is odd; rotary positions turn pairs")
        for name in ("compressed_length", "block_length"):
            if getattr(self, name) % self.compressed_stride:
                raise UsageError(
                    f"{name} {getattr(self, name)} is not a multiple of compressed_stride {self.compressed_stride}"
                )
        if self.num_blocks < self.num_local + 1:
            raise UsageError(
                f"num_blocks {self.num_blocks} has no room for block 0 and the {self.num_local} local blocks"
            )
        if self.compressed_length > self.reads_everything_up_to:
            raise UsageError(
                f"compressed_length {self.compressed_length} is longer than all {self.num_blocks} selected blocks:"
                " there would be nothing to choose them by"
            )
        if self.num_local < 1 or self.window < 1:
            raise UsageError("num_local and window must be at least 1: a token always sees itself")

    @property
    def heads_per_group(self) -> int:
        return self.num_heads // self.num_groups

    @property
    def mlp_width(self) -> int:
        return 4 * self.width

    @property
    def reads_everything_up_to(self) -> int:
        """The longest sequence in which every block is selected, so that nothing has to be chosen."""
        return self.num_blocks * self.block_length

    def num_compressed(self, length: int) -> int:
        """How many whole compressed blocks a sequence has."""
        return max(0, (length - self.compressed_length) // self.compressed_stride + 1)

    def num_selectable(self, length: int) -> int:
        """How many blocks of a sequence can be selected; the last one may be incomplete."""
        return -(-length // self.block_length)


def count_parameters(shape: NSAShape) -> int:
    """Exactly what `sum(p.numel() for p in NSAModel(shape).parameters())` gives."""
    branches = 1 if shape.is_dense else 3
    heads, memory = shape.num_heads * shape.head_width, 2 * branches * shape.num_groups * shape.head_width
    half = shape.head_width // 2
    gate = 0 if shape.is_dense else shape.head_width * half + half + 3 * half + 3
    attention = shape.width * (2 * heads + memory) + gate
    layer = attention + 2 * shape.width * shape.mlp_width + 2 * shape.width
    return shape.num_layers * layer + 2 * shape.vocab_size * shape.width + shape.width


def flops_per_token(shape: NSAShape, length: int) -> float:
    """FLOPs per token of one training step: 6 for each weight that is multiplied, 12 for each key that a query reads
    on average, times the width of all heads of all layers."""
    embedding = shape.vocab_size * shape.width
    read = _mean_reads(shape, length)
    return 6 * (count_parameters(shape) - embedding) + (
        12 * shape.num_layers * shape.num_heads * shape.head_width * read
    )


def _mean_reads(shape: NSAShape, length: int) -> float:
    """The mean number of keys that a query reads, over all three branches."""
    if shape.is_dense:
        return (length + 1) / 2
    block, others = shape.block_length, (shape.num_blocks - 1) * shape.block_length
    selected = sum(min(t + 1, others + t % block + 1) for t in range(length))
    near = sum(min(t + 1, shape.window) for t in range(length))
    count = shape.num_compressed(length)
    compressed = count * (length - shape.compressed_length + 1) - shape.compressed_stride * count * (count - 1) // 2
    return (selected + near + compressed) / length


NSA_SHAPES: dict[str, NSAShape] = {
    "m7c": NSAShape(),
    "m7c-bytes": NSAShape(vocab_size=256),
    "m7c-smoke": NSAShape(
        num_layers=6, width=256, num_heads=8, head_width=32, vocab_size=256,
        compressed_length=16, compressed_stride=8, block_length=32, num_blocks=8, window=256,
    ),
    "m7c-showcase": NSAShape(
        num_layers=1, width=128, num_heads=8, head_width=16, vocab_size=256,
        compressed_length=16, compressed_stride=8, block_length=32, num_blocks=8, window=64,
    ),
}  # fmt: skip
