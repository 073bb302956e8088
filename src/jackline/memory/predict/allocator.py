"""A replay of the CUDA caching allocator: what PyTorch reserves on the GPU for a given series of allocations.

Owns block rounding, the small and the large pool, best fit, splitting and merging, segments of fixed size and
expandable ones, and what happens at a cap. Knows nothing of tensors. Covers one stream; does not cover the
garbage-collection threshold and max_split_size, which Jackline never sets.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

MIB = 2**20
_BLOCK = 512
_SMALL = MIB  # allocations up to this size go to the small pool
_SMALL_SEGMENT = 2 * MIB
_LARGE_SEGMENT = 20 * MIB
_OWN_SEGMENT = 10 * MIB  # from this size on an allocation gets a segment of its own size
_ROUND_LARGE = 2 * MIB
# Far more than the memory of any GPU, so that a growing segment never reaches the next one. A whole number of pages.
_ADDRESS_SPACE = _LARGE_SEGMENT * 2**25


class ArenaFull(Exception):
    """The replayed GPU has no room for the next allocation."""

    def __init__(self, wanted_bytes: int, reserved_bytes: int, cap_bytes: int) -> None:
        super().__init__(f"{wanted_bytes} more bytes beside {reserved_bytes} are over the cap of {cap_bytes}")
        self.wanted_bytes = wanted_bytes
        self.reserved_bytes = reserved_bytes


@dataclass(eq=False)
class _Block:
    address: int
    size: int
    is_small: bool
    is_mapped: bool = True
    is_free: bool = True
    before: _Block | None = None
    after: _Block | None = None


class _Pool:
    """Free blocks ordered by (size, address), as in the allocator's ordered set."""

    def __init__(self, is_small: bool) -> None:
        self.is_small = is_small
        self.free: list[tuple[int, int]] = []
        self.blocks: dict[int, _Block] = {}
        self.unmapped: list[int] = []  # addresses; expandable segments only

    def add(self, block: _Block) -> None:
        insort(self.free, (block.size, block.address))
        self.blocks[block.address] = block

    def remove(self, block: _Block) -> None:
        del self.free[bisect_left(self.free, (block.size, block.address))]
        del self.blocks[block.address]

    def take_best(self, size: int) -> _Block | None:
        index = bisect_left(self.free, (size, 0))
        if index == len(self.free):
            return None
        # The last block of an expandable segment counts as large as it could grow, so it is taken last.
        while index + 1 < len(self.free) and self._reach(index + 1) < self._reach(index):
            index += 1
        block = self.blocks[self.free[index][1]]
        self.remove(block)
        return block

    def _reach(self, index: int) -> int:
        size, address = self.free[index]
        after = self.blocks[address].after
        return size + after.size if after is not None and not after.is_mapped else size


class Arena:
    """The memory of one GPU. `allocate` and `free` take a name; the peaks match `torch.cuda.max_memory_*`."""

    def __init__(self, *, is_expandable: bool, cap_bytes: int | None = None) -> None:
        self.allocated_bytes = self.reserved_bytes = 0
        self.peak_allocated_bytes = self.peak_reserved_bytes = 0
        self.num_retries = 0  # how often it had to release memory to the GPU first
        self._is_expandable = is_expandable
        self._cap_bytes = cap_bytes
        self._small, self._large = _Pool(True), _Pool(False)
        self._held: dict[int, _Block] = {}
        self._next_address = _ADDRESS_SPACE

    def allocate(self, name: int, num_bytes: int) -> None:
        size = max(_BLOCK, _up(num_bytes, _BLOCK))
        pool = self._small if size <= _SMALL else self._large
        block = pool.take_best(size) or self._more(pool, size)
        self._split(pool, block, size)
        block.is_free = False
        self._held[name] = block
        self.allocated_bytes += block.size
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)

    def free(self, name: int) -> None:
        block = self._held.pop(name)
        self.allocated_bytes -= block.size
        block.is_free = True
        pool = self._small if block.is_small else self._large
        pool.add(self._merge(pool, block))

    def _split(self, pool: _Pool, block: _Block, size: int) -> None:
        rest = block.size - size
        # A large block of a fixed segment is not split if at most 1 MiB would remain: that rest counts as allocated.
        least = _BLOCK if pool.is_small or self._is_expandable else _SMALL + 1
        if rest < least:
            return
        other = _Block(block.address + size, rest, pool.is_small, before=block, after=block.after)
        if other.after is not None:
            other.after.before = other
        block.after, block.size = other, size
        pool.add(other)

    def _merge(self, pool: _Pool, block: _Block) -> _Block:
        """Join with free neighbours that are mapped alike; they leave the pool, and the result is not yet in it."""
        for neighbour in (block.before, block.after):
            if neighbour is None or not neighbour.is_free or neighbour.is_mapped != block.is_mapped:
                continue
            if neighbour.is_mapped:
                pool.remove(neighbour)
            else:
                pool.unmapped.remove(neighbour.address)
                del pool.blocks[neighbour.address]
            first, second = (neighbour, block) if neighbour is block.before else (block, neighbour)
            first.size += second.size
            first.after = second.after
            if first.after is not None:
                first.after.before = first
            block = first
        return block

    # Getting more memory from the GPU.

    def _more(self, pool: _Pool, size: int) -> _Block:
        for is_last_try in (False, True):
            block = self._grow(pool, size) if self._is_expandable else self._new_segment(pool, size)
            if block is not None:
                return block
            if is_last_try:
                break
            self.num_retries += 1
            self._give_back()
        raise ArenaFull(size, self.reserved_bytes, self._cap_bytes or 0)

    def _reserve(self, num_bytes: int) -> bool:
        if self._cap_bytes is not None and self.reserved_bytes + num_bytes > self._cap_bytes:
            return False
        self.reserved_bytes += num_bytes
        return True

    def _new_segment(self, pool: _Pool, size: int) -> _Block | None:
        if pool.is_small:
            segment = _SMALL_SEGMENT
        else:
            segment = _LARGE_SEGMENT if size < _OWN_SEGMENT else _up(size, _ROUND_LARGE)
        if not self._reserve(segment):
            return None
        self._next_address += _ADDRESS_SPACE
        return _Block(self._next_address, segment, pool.is_small)

    def _grow(self, pool: _Pool, size: int) -> _Block | None:
        """Map pages into the first unmapped range that has room; a free block right before it is used too."""
        candidate = self._room(pool, size)
        if not candidate.is_mapped:
            candidate, is_mapped = self._map(pool, candidate, min(candidate.size, size))
            if not is_mapped:
                return None
        while candidate.size < size:
            unmapped = candidate.after
            assert unmapped is not None and not unmapped.is_mapped
            candidate, is_mapped = self._map(pool, unmapped, min(size - candidate.size, unmapped.size))
            if not is_mapped:
                return None
        pool.remove(candidate)
        return candidate

    def _room(self, pool: _Pool, size: int) -> _Block:
        for address in pool.unmapped:
            block = pool.blocks[address]
            if block.before is not None and block.before.is_free:
                block = block.before
            reach, room = block, block.size
            while room < size and reach.after is not None and reach.after.is_free:
                reach = reach.after
                room += reach.size
            if room >= size:
                return block
        self._next_address += _ADDRESS_SPACE
        block = _Block(self._next_address, _ADDRESS_SPACE // 2, pool.is_small, is_mapped=False)
        insort(pool.unmapped, block.address)
        pool.blocks[block.address] = block
        return block

    def _map(self, pool: _Pool, block: _Block, size: int) -> tuple[_Block, bool]:
        """Map the first pages of an unmapped block, and join them with a free block before them."""
        mapped = _up(size, _SMALL_SEGMENT if pool.is_small else _LARGE_SEGMENT)
        if not self._reserve(mapped):
            return block, False
        pool.unmapped.remove(block.address)
        del pool.blocks[block.address]
        self._cut_unmapped(pool, block, mapped)
        block.is_mapped = True
        joined = self._merge(pool, block)
        pool.add(joined)
        return joined, True

    def _cut_unmapped(self, pool: _Pool, block: _Block, size: int) -> None:
        """The part of `block` after its first `size` bytes becomes, or stays, an unmapped block."""
        if block.size <= size:
            return
        rest = _Block(block.address + size, block.size - size, pool.is_small, False, before=block, after=block.after)
        if rest.after is not None:
            rest.after.before = rest
        block.after, block.size = rest, size
        insort(pool.unmapped, rest.address)
        pool.blocks[rest.address] = rest

    # Releasing memory when the GPU is full.

    def _give_back(self) -> None:
        for pool in (self._small, self._large):
            for block in [pool.blocks[address] for _, address in list(pool.free)]:
                if self._is_expandable:
                    self._unmap(pool, block)
                elif block.before is None and block.after is None:
                    pool.remove(block)
                    self.reserved_bytes -= block.size

    def _unmap(self, pool: _Pool, block: _Block) -> None:
        page = _SMALL_SEGMENT if pool.is_small else _LARGE_SEGMENT
        begin, end = _up(block.address, page), (block.address + block.size) // page * page
        if begin >= end:
            return
        pool.remove(block)
        if begin > block.address:
            head = block
            block = _Block(begin, head.address + head.size - begin, pool.is_small, before=head, after=head.after)
            if block.after is not None:
                block.after.before = block
            head.after, head.size = block, begin - head.address
            pool.add(head)
        if end < block.address + block.size:
            tail = _Block(end, block.address + block.size - end, pool.is_small, before=block, after=block.after)
            if tail.after is not None:
                tail.after.before = tail
            block.after, block.size = tail, end - block.address
            pool.add(tail)
        self.reserved_bytes -= block.size
        block.is_mapped = False
        merged = self._merge(pool, block)
        insort(pool.unmapped, merged.address)
        pool.blocks[merged.address] = merged


def _up(number: int, step: int) -> int:
    return -(-number // step) * step
