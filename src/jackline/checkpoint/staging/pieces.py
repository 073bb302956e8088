"""Saving when memory cannot hold a second copy: through a small arena, piece by piece, while training waits.

This is slower, and the user is told so, but a machine with 12 GB can save 8 GB. Owns the copying and sending of
pieces; the writer keeps the parts.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from jackline.checkpoint.format.hashing import CHUNK_BYTES
from jackline.checkpoint.staging.arena import Arena
from jackline.checkpoint.staging.handover import Job, StateTooLarge, to_payload
from jackline.checkpoint.staging.lane import drain
from jackline.checkpoint.staging.layout import Image, Layout
from jackline.checkpoint.staging.link import WriterLink
from jackline.checkpoint.staging.moves import copy_memory
from jackline.checkpoint.staging.stage import Held, is_plain_memory
from jackline.checkpoint.state.capture import Source
from jackline.checkpoint.state.dtypes import as_stored
from jackline.checkpoint.ticket import Event
from jackline.units import format_bytes

NUM_SLOTS = 4
ARENA_BYTES = NUM_SLOTS * CHUNK_BYTES
PATIENCE_S = 600.0


def say_pieces(link: WriterLink, layout: Layout) -> None:
    """Tell it once."""
    if not link.is_in_pieces:
        link.is_in_pieces = True
        size = format_bytes(layout.size_bytes)
        text = f"memory has no room for a copy of the state ({size}); training waits while a save is written"
        link.events.append(Event("in_pieces", text, None, True))


def save_in_pieces(link: WriterLink, job: Job, layout: Layout, sources: Sequence[Source], arena: Arena) -> None:
    """Copy and hand over every chunk of every file, then end the save.

    Gives up when the writer does, or when another thread changed a tensor meanwhile.
    """
    drain({source.tensor.device for source in sources})
    held = Held(sources)
    try:
        payload = to_payload(job.tree)
    except StateTooLarge as problem:
        link.fail(job, str(problem))
        return
    job.tree = {}  # marks for the link that this save cannot be sent again
    link.job = job
    link.written.clear()
    link.send({**job.body, "op": "begin"})
    slots: list[int | None] = [None] * NUM_SLOTS
    number = 0
    for image in layout.images:
        for start in range(0, image.size_bytes, CHUNK_BYTES):
            slot = number % NUM_SLOTS
            if not _is_free(link, job, slots[slot]):
                return
            size = min(CHUNK_BYTES, image.size_bytes - start)
            fill_window(image, layout, sources, (start, size), (arena, slot * CHUNK_BYTES))
            piece = {"op": "piece", "id": job.number, "piece": number, "wants_report": True, "name": image.name}
            link.send({**piece, "offset": start, "size_bytes": size, "arena_offset": slot * CHUNK_BYTES})
            slots[slot], number = number, number + 1
    if not all(_is_free(link, job, waiting) for waiting in slots):
        return
    if changed := held.first_changed():
        link.send({"op": "cancel"})
        link.fail(job, f"another thread changed {changed} while it was being copied")
    else:
        job.ticket.outcome = "writing"
        link.send({**job.body, "op": "end", "is_in_pieces": True}, payload)


def fill_window(
    image: Image, layout: Layout, sources: Sequence[Source], window: tuple[int, int], into: tuple[Arena, int]
) -> None:
    """Put the bytes [start, start + size) of one file into the arena."""
    start, size = window
    arena, place = into
    header = image.header[start : start + size]
    if header:
        arena.write(header, place)
    for number in image.sources:
        tensor = sources[number].tensor
        begin = layout.offsets[number]
        end = begin + tensor.numel() * tensor.element_size()
        first, last = max(begin, start), min(end, start + size)
        if first < last:
            _copy_part(tensor, (first - begin, last - begin), arena, place + first - start)


def _is_free(link: WriterLink, job: Job, waiting: int | None) -> bool:
    """Wait until the writer has written that piece to the disk; False when the save is lost."""
    deadline = time.monotonic() + PATIENCE_S
    while waiting is not None and waiting not in link.written:
        if job.ticket.is_over:
            return False
        if time.monotonic() > deadline:
            link.fail(job, "the writer does not take the pieces")
            return False
        link.pump(0.1)
    return not job.ticket.is_over


def _copy_part(tensor: Tensor, part: tuple[int, int], arena: Arena, place: int) -> None:
    first, last = part
    if is_plain_memory(tensor):
        copy_memory([(arena.address + place, tensor.data_ptr() + first, last - first)])
        return
    stored = as_stored(tensor).contiguous().reshape(-1)  # makes a copy of one tensor at most
    item = stored.element_size()
    room = arena.tensor[place : place + last - first].view(stored.dtype)
    with torch.no_grad():
        room.copy_(stored[first // item : last // item])
