"""The allocator's replay, against cases worked out by hand and against its own laws."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jackline.memory.predict.allocator import MIB, Arena, ArenaFull

GIB = 1024 * MIB


def test_blocks_are_rounded_to_512_bytes() -> None:
    arena = Arena(is_expandable=False)
    arena.allocate(1, 1)
    arena.allocate(2, 513)
    assert arena.allocated_bytes == 512 + 1024
    assert arena.reserved_bytes == 2 * MIB


@pytest.mark.parametrize(
    ("size", "segment"),
    [
        (512, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 1, 20 * MIB),
        (9 * MIB, 20 * MIB),
        (10 * MIB, 10 * MIB),
        (11 * MIB, 12 * MIB),
    ],
)
def test_a_fixed_segment_is_as_large_as_the_request_wants(size: int, segment: int) -> None:
    arena = Arena(is_expandable=False)
    arena.allocate(1, size)
    assert arena.reserved_bytes == segment


def test_a_large_block_is_not_split_for_the_last_megabyte() -> None:
    arena = Arena(is_expandable=False)
    arena.allocate(1, 20 * MIB)
    arena.free(1)
    arena.allocate(2, 19 * MIB)  # 1 MiB would be left over: it is given away
    assert arena.allocated_bytes == 20 * MIB
    arena.free(2)
    arena.allocate(3, 18 * MIB)
    assert arena.allocated_bytes == 18 * MIB


def test_the_smallest_block_that_is_large_enough_is_taken() -> None:
    arena = Arena(is_expandable=False)
    for name, size in ((1, 40 * MIB), (2, 24 * MIB), (3, 60 * MIB)):
        arena.allocate(name, size)
    for name in (1, 2, 3):
        arena.free(name)
    arena.allocate(4, 22 * MIB)  # splits the 24
    arena.allocate(5, 40 * MIB)
    arena.allocate(6, 60 * MIB)
    assert arena.reserved_bytes == 124 * MIB


def test_freed_neighbours_become_one_block_again() -> None:
    arena = Arena(is_expandable=False)
    arena.allocate(1, 40 * MIB)
    arena.free(1)
    for name in (2, 3, 4):
        arena.allocate(name, 12 * MIB)
    for name in (2, 4, 3):
        arena.free(name)
    arena.allocate(5, 40 * MIB)
    assert arena.reserved_bytes == 40 * MIB


def test_a_hole_between_two_blocks_is_fragmentation() -> None:
    arena = Arena(is_expandable=False)
    arena.allocate(1, 40 * MIB)
    arena.free(1)
    arena.allocate(2, 10 * MIB)
    arena.allocate(3, 10 * MIB)
    arena.free(2)
    arena.allocate(4, 24 * MIB)  # the 20 MiB behind block 3 are too few, the 10 before it too
    assert (arena.allocated_bytes, arena.reserved_bytes) == (34 * MIB, 64 * MIB)


def test_an_expandable_segment_grows_by_pages_behind_a_free_end() -> None:
    arena = Arena(is_expandable=True)
    arena.allocate(1, 30 * MIB)
    assert arena.reserved_bytes == 40 * MIB
    arena.allocate(2, 15 * MIB)  # 10 MiB are free at the end, one more page does
    assert arena.reserved_bytes == 60 * MIB
    arena.free(2)
    arena.allocate(3, 30 * MIB)
    assert arena.reserved_bytes == 60 * MIB


def test_at_the_cap_unused_segments_are_given_back_first() -> None:
    arena = Arena(is_expandable=False, cap_bytes=100 * MIB)
    arena.allocate(1, 60 * MIB)
    arena.free(1)
    arena.allocate(2, 80 * MIB)
    assert (arena.num_retries, arena.reserved_bytes) == (1, 80 * MIB)
    with pytest.raises(ArenaFull, match="41943040 more bytes beside 83886080 are over the cap of 104857600"):
        arena.allocate(3, 40 * MIB)


def test_at_the_cap_an_expandable_segment_gives_back_the_pages_in_its_holes() -> None:
    arena = Arena(is_expandable=True, cap_bytes=200 * MIB)
    arena.allocate(1, 100 * MIB)
    arena.allocate(2, 40 * MIB)
    arena.free(1)
    arena.allocate(3, 120 * MIB)  # the hole of 100 is too small: its pages move behind the 40
    assert (arena.num_retries, arena.reserved_bytes, arena.allocated_bytes) == (1, 160 * MIB, 160 * MIB)
    arena.allocate(4, 40 * MIB)
    assert arena.reserved_bytes == 200 * MIB


sizes = st.integers(1, 64 * MIB)
moves = st.lists(st.one_of(sizes, st.integers(-30, -1)), max_size=120)


@given(moves=moves, is_expandable=st.booleans(), is_capped=st.booleans())
@settings(max_examples=150, deadline=None)
def test_no_history_breaks_the_books(moves: list[int], is_expandable: bool, is_capped: bool) -> None:
    arena = Arena(is_expandable=is_expandable, cap_bytes=GIB if is_capped else None)
    live: dict[int, int] = {}
    for number, move in enumerate(moves):
        if move > 0:
            try:
                arena.allocate(number, move)
            except ArenaFull:
                continue
            live[number] = move
        elif live:
            name = sorted(live)[move % len(live)]
            arena.free(name)
            del live[name]
        assert arena.reserved_bytes >= arena.allocated_bytes >= sum(live.values())
        assert not is_capped or arena.reserved_bytes <= GIB
        assert_whole(arena)
    for name in list(live):
        arena.free(name)
    assert arena.allocated_bytes == 0


def assert_whole(arena: Arena) -> None:
    """Every block begins where the one before it ends, and no two free ones of a kind stand side by side."""
    blocks = [*arena._held.values(), *arena._small.blocks.values(), *arena._large.blocks.values()]
    for block in blocks:
        after = block.after
        if after is not None:
            assert after.before is block
            assert after.address == block.address + block.size
            assert not (block.is_free and after.is_free and block.is_mapped == after.is_mapped)
    mapped = sum(block.size for block in blocks if block.is_mapped)
    assert mapped == arena.reserved_bytes
