"""Where every tensor of a state is stored: in which file, and where in the arena.

The arena holds one image after another. Each is laid out like its file: header, then tensors without holes, then
padding up to the next page. Pure: it computes places and copies nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jackline.checkpoint.format.header import ALIGNMENT, build_header, lay_out
from jackline.checkpoint.format.manifest import TENSORS
from jackline.checkpoint.state.capture import Source
from jackline.checkpoint.state.dtypes import stored_dtype, stored_shape


@dataclass(frozen=True)
class Image:
    """One tensor file. `sources` are the indices of its tensors in the state, in the order of the file."""

    name: str
    header: bytes
    size_bytes: int
    arena_offset: int
    sources: tuple[int, ...]


@dataclass(frozen=True)
class Layout:
    """All images.

    For every source, `offsets` is the place of its bytes in its file, `arena` the place in the arena.
    """

    images: tuple[Image, ...]
    offsets: tuple[int, ...]
    arena: tuple[int, ...]
    size_bytes: int

    @property
    def payload_bytes(self) -> int:
        return sum(image.size_bytes for image in self.images)


def signature(sources: Sequence[Source]) -> tuple[object, ...]:
    """Equal for two states with the same layout and copies, so that a layout is computed once, not every save."""
    return tuple(
        (source.key, source.name, tensor.dtype, tensor.shape, tensor.device, source.is_deferred)
        for source in sources
        for tensor in (source.tensor,)
    )


def lay_out_state(sources: Sequence[Source]) -> Layout:
    """Place all tensors."""
    by_key: dict[str, list[int]] = {}
    for number, source in enumerate(sources):
        by_key.setdefault(source.key, []).append(number)
    images: list[Image] = []
    offsets, arena = [0] * len(sources), [0] * len(sources)
    position = 0
    for key, numbers in by_key.items():
        by_name = {sources[number].name: number for number in numbers}
        placed = lay_out(
            (sources[n].name, stored_dtype(sources[n].tensor.dtype), stored_shape(sources[n].tensor)) for n in numbers
        )
        header = build_header(placed)
        for tensor in placed:
            offsets[by_name[tensor.name]] = len(header) + tensor.begin
            arena[by_name[tensor.name]] = position + len(header) + tensor.begin
        size = len(header) + max((tensor.end for tensor in placed), default=0)
        order = tuple(by_name[tensor.name] for tensor in placed)
        images.append(Image(key + TENSORS, header, size, position, order))
        position += -(-size // ALIGNMENT) * ALIGNMENT
    return Layout(tuple(images), tuple(offsets), tuple(arena), position)
