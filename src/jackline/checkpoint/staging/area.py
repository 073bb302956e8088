"""The place a state is copied to: how large, laid out how, and whether there is memory for it at all.

Owns the arena's life: made once, made anew when the state outgrows it, shared with the writer each time.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from jackline.checkpoint.staging.arena import Arena
from jackline.checkpoint.staging.gather import GpuCopies
from jackline.checkpoint.staging.layout import Layout, lay_out_state, signature
from jackline.checkpoint.staging.pieces import ARENA_BYTES
from jackline.checkpoint.staging.stage import Stager, Staging
from jackline.checkpoint.state.capture import Source
from jackline.machine.memory import effective_limit, used_against

SPARE_BYTES = 512 << 20


def available_bytes() -> int:
    """Memory that may be taken: below the tightest limit, with some left for everybody else."""
    limit = effective_limit()
    return limit.limit_bytes - used_against(limit, [os.getpid()]) - SPARE_BYTES


class StagingArea:
    """Layout and arena of the present state. `share` tells the writer of new memory, `tell` people of the GPU's."""

    def __init__(
        self,
        share: Callable[[Arena], None],
        available: Callable[[], int] = available_bytes,
        copies: GpuCopies | None = None,
        tell: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._share = share
        self._available = available
        self._copies = copies
        self._tell = tell
        self._signature: tuple[object, ...] = ()
        self._layout: Layout | None = None
        self._written: Layout | None = None
        self._stager: Stager | None = None
        self.arena: Arena | None = None

    def place(self, sources: Sequence[Source]) -> Layout:
        """The layout of this state; the same object as before when nothing about it has changed."""
        now = signature(sources)
        if self._layout is None or now != self._signature:
            self._layout, self._signature = lay_out_state(sources), now
        return self._layout

    def make_room(self, layout: Layout, sources: Sequence[Source]) -> bool:
        """True when the whole state fits; False when only pieces of it do, for which there is room then."""
        if self.arena is not None and self.arena.size_bytes >= layout.size_bytes:
            return True
        self.close()
        is_whole = layout.size_bytes <= max(self._available(), ARENA_BYTES)
        size = layout.size_bytes if is_whole else ARENA_BYTES
        self.arena = Arena(size, is_pinned=any(source.tensor.is_cuda for source in sources))
        self._stager = Stager(self.arena, self._copies, self._tell)
        self._written = None
        self._share(self.arena)
        return is_whole

    def prepare(self, sources: Sequence[Source]) -> None:
        """All memory that a save of this state will need."""
        layout = self.place(sources)
        if self.make_room(layout, sources):
            assert self._stager is not None
            self._stager.prepare(layout, sources)

    def begin(self, layout: Layout, sources: Sequence[Source], *, is_overlapped: bool) -> Staging:
        """Starts the copy of a state that has room."""
        assert self.arena is not None and self._stager is not None
        if any(source.tensor.is_cuda for source in sources):
            self.arena.ready.wait()  # memory that is being pinned cannot be copied to meanwhile
        if self._written is not layout:
            for image in layout.images:
                self.arena.write(image.header, image.arena_offset)
            self._written = layout
        return self._stager.begin(layout, sources, is_overlapped=is_overlapped)

    def give_back_gpu(self) -> int:
        return self._stager.give_back() if self._stager is not None else 0

    def close(self) -> None:
        if self.arena is not None:
            if self._stager is not None:
                self._stager.close()
            self._stager = None
            self.arena.close()
            self.arena = None
