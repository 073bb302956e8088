"""The memory a state is copied to: its size, its layout, and whether there is enough memory at all.

Owns the arena's lifetime: created once, recreated when the state outgrows it, shared with the writer each time.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from jackline import accelerator
from jackline.checkpoint.staging.arena import Arena
from jackline.checkpoint.staging.gather import GpuCopies
from jackline.checkpoint.staging.layout import Layout, lay_out_state, signature
from jackline.checkpoint.staging.pieces import ARENA_BYTES
from jackline.checkpoint.staging.stage import Stager, Staging
from jackline.checkpoint.state.capture import Source
from jackline.machine.memory import effective_limit, used_against

SPARE_BYTES = 512 << 20


def available_bytes() -> int:
    """Memory that may be allocated: below the tightest limit, with a reserve for all other processes."""
    limit = effective_limit()
    return limit.limit_bytes - used_against(limit, [os.getpid()]) - SPARE_BYTES


class StagingArea:
    """Layout and arena of the current state.

    `share` passes new memory to the writer; `tell` reports GPU memory use.
    """

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
        """The layout of this state; the same object as before when nothing about the state has changed."""
        now = signature(sources)
        if self._layout is None or now != self._signature:
            self._layout, self._signature = lay_out_state(sources), now
        return self._layout

    def make_room(self, layout: Layout, sources: Sequence[Source]) -> bool:
        """Allocate the arena.

        True when the whole state fits; False when only pieces fit, and there is room for those.
        """
        if self.arena is not None and self.arena.size_bytes >= layout.size_bytes:
            return True
        self.close()
        is_whole = layout.size_bytes <= max(self._available(), ARENA_BYTES)
        size = layout.size_bytes if is_whole else ARENA_BYTES
        self.arena = Arena(size, is_pinned=any(accelerator.is_on_gpu(source.tensor) for source in sources))
        self._stager = Stager(self.arena, self._copies, self._tell)
        self._written = None
        self._share(self.arena)
        return is_whole

    def prepare(self, sources: Sequence[Source]) -> None:
        """Allocate all memory that a save of this state will need."""
        layout = self.place(sources)
        if self.make_room(layout, sources):
            assert self._stager is not None
            self._stager.prepare(layout, sources)

    def begin(self, layout: Layout, sources: Sequence[Source], *, is_overlapped: bool) -> Staging:
        """Start copying a state for which there is room."""
        assert self.arena is not None and self._stager is not None
        if any(accelerator.is_on_gpu(source.tensor) for source in sources):
            self.arena.ready.wait()  # memory cannot be copied to while it is being pinned
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
