"""Handing a save to the writer while it is still being copied: the writer writes the parts that are already there.

Without this the disk would wait for the copy, which is a tenth to a fifth of the time. A save that turns out not to
be exact is cancelled; the writer commits nothing before it receives the end message. Small states are sent whole.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from jackline.checkpoint.format.hashing import CHUNK_BYTES, chunk_offsets
from jackline.checkpoint.format.manifest import MAX_STATE_BYTES
from jackline.checkpoint.staging.stage import Staging
from jackline.checkpoint.staging.writer_process import WriterProcess
from jackline.checkpoint.ticket import Ticket
from jackline.units import format_bytes

LEAST_BYTES = 64 << 20


@dataclass
class Job:
    """One save in progress. The thread turns `tree` into the payload, because writing JSON takes a while too."""

    number: int
    ticket: Ticket
    body: dict[str, Any]
    tree: dict[str, Any]
    staging: Staging | None = None
    payload: bytes = b""
    is_staged: bool = False
    sent_to: WriterProcess | None = None


class StateTooLarge(ValueError):
    """What is not a tensor takes more bytes than a resume reads back. The text says which part is the largest."""


def to_payload(tree: dict[str, Any]) -> bytes:
    """The bytes of state.json. Raises StateTooLarge: a checkpoint that cannot be loaded must not be acknowledged."""
    payload = _to_json(tree)
    if len(payload) > MAX_STATE_BYTES:
        sizes = {key: len(_to_json(value)) for key, value in tree.items()}
        largest = max(sizes, key=lambda key: sizes[key])
        raise StateTooLarge(
            f"values that are not tensors take {format_bytes(len(payload))}, and a resume reads "
            f"{format_bytes(MAX_STATE_BYTES)} at most; the largest part is '{largest}' with "
            f"{format_bytes(sizes[largest])}: keep long lists of numbers as tensors"
        )
    return payload


def _to_json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()


class HandOver:
    """Sends one save to one writer, chunk by chunk. `base` is the arena's address."""

    def __init__(self, writer: WriterProcess, job: Job, base: int) -> None:
        self._writer = writer
        self._job = job
        self._base = base
        self._chunks = list(_chunks(job.body["files"]))
        self._num_sent = 0
        self._is_begun = False
        is_large = sum(file["size_bytes"] for file in job.body["files"]) >= LEAST_BYTES
        self._is_useful = is_large and job.staging is not None and not job.staging.moving.is_empty

    def up_to(self, address: int) -> None:
        """Everything below `address` is copied: send the chunks below it."""
        if not self._is_useful or self._writer.is_gone:
            return
        if not self._is_begun:
            self._is_begun = True
            self._say({**self._job.body, "op": "begin"})
        while self._num_sent < len(self._chunks):
            chunk = self._chunks[self._num_sent]
            if chunk["arena_offset"] + chunk["size_bytes"] > address - self._base:
                break
            self._say({**chunk, "op": "piece", "id": self._job.number, "piece": self._num_sent})
            self._num_sent += 1

    def finish(self, writer: WriterProcess) -> bool:
        """Send the rest and the end. False when this writer did not receive the beginning: send it the whole save."""
        if not self._is_begun or writer is not self._writer:
            return False
        self.up_to(1 << 62)
        return self._writer.send({**self._job.body, "op": "end"}, self._job.payload)

    def cancel(self) -> None:
        if self._is_begun:
            self._say({"op": "cancel"})

    def _say(self, body: dict[str, Any]) -> None:
        """Send without waiting: the copy must continue, and the loop may be waiting for it."""
        self._writer.send(body, timeout_s=0)


def _chunks(files: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The chunks in the arena's order."""
    for file in files:
        for start in chunk_offsets(file["size_bytes"]):
            size = min(CHUNK_BYTES, file["size_bytes"] - start)
            yield {
                "name": file["name"],
                "offset": start,
                "size_bytes": size,
                "arena_offset": file["arena_offset"] + start,
            }
