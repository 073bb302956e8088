"""Turns blocks of documents into arrays of tokens, in parallel, and returns them in source order.

Owns: cutting long texts into pieces, the token between documents, rows of per-document mode, the check of ids
against the vocabulary, and the bounded queue between reading and writing. No text is ever truncated: a document
longer than any context becomes many windows. Does not own the files that are read or written.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jackline.data.cache.state import ReadState
from jackline.data.sources.documents import Block
from jackline.data.sources.runs import RUN_BYTES, safe_cut
from jackline.data.spec import Rows
from jackline.data.tokenise.tokenizer import Encoded, Tokenizer
from jackline.errors import JacklineError

Tokens = NDArray[Any]
_PUT_AGAIN_S = 0.2


@dataclass(frozen=True)
class Packing:
    """How texts become tokens."""

    tokenizer: Tokenizer
    rows: Rows | None = None


@dataclass(slots=True)
class PackedBlock:
    """The tokens of one block and the states around it."""

    tokens: Tokens
    before: ReadState
    after: ReadState
    file_bytes: int = 0


def pack(block: Block, packing: Packing) -> PackedBlock:
    """One block's tokens, in the cache's dtype."""
    pieces, closes = _pieces(block)
    if not pieces:
        return PackedBlock(np.empty(0, packing.tokenizer.dtype), block.before, block.after, block.file_bytes)
    encoded = packing.tokenizer.engine.encode(pieces)
    _check_ids(encoded.ids, packing.tokenizer)
    if packing.rows is None:
        tokens = _with_borders(encoded, closes, packing.tokenizer)
    else:
        tokens = _in_rows(encoded, closes, packing.tokenizer, packing.rows)
    return PackedBlock(tokens, block.before, block.after, block.file_bytes)


def packed_blocks(blocks: Iterable[Block], packing: Packing, num_threads: int) -> Generator[PackedBlock, None, None]:
    """Blocks packed by `num_threads` threads; order and content do not depend on how many there are.

    At most `num_threads` + 2 blocks exist at a time, whatever the speed of reader, tokenizer and disk.
    """
    ready: queue.Queue[Future[PackedBlock] | BaseException | None] = queue.Queue(maxsize=num_threads + 1)
    stop = threading.Event()
    with ThreadPoolExecutor(num_threads, thread_name_prefix="jackline-tokenise") as pool:

        def read() -> None:
            last: BaseException | None = None
            try:
                for block in blocks:
                    if not put_if_wanted(ready, pool.submit(pack, block, packing), stop):
                        return
            except BaseException as error:
                last = error
            put_if_wanted(ready, last, stop)

        reader = threading.Thread(target=read, name="jackline-read", daemon=True)
        reader.start()
        try:
            while (item := ready.get()) is not None:
                if isinstance(item, BaseException):
                    raise item
                yield item.result()
        finally:
            stop.set()
            reader.join(timeout=5)


def put_if_wanted(ready: queue.Queue[Any], item: Any, stop: threading.Event) -> bool:
    """Wait for room in a bounded queue and put `item` there; False once `stop` is set."""
    while not stop.is_set():
        try:
            ready.put(item, timeout=_PUT_AGAIN_S)
            return True
        except queue.Full:
            continue
    return False


def _pieces(block: Block) -> tuple[list[bytes], NDArray[np.bool_]]:
    """Texts of at most a run each, and whether a document ends with the piece."""
    pieces: list[bytes] = []
    closes: list[bool] = []
    for number, text in enumerate(block.texts):
        while len(text) > RUN_BYTES:
            cut = safe_cut(text, RUN_BYTES)
            pieces.append(text[:cut])
            closes.append(False)
            text = text[cut:]  # noqa: PLW2901 - consumed from the front
        pieces.append(text)
        closes.append(number not in block.left_open)
    return pieces, np.array(closes, np.bool_)


def _check_ids(ids: Tokens, tokenizer: Tokenizer) -> None:
    if len(ids) and int(ids.max()) >= tokenizer.vocab_size:
        raise JacklineError(
            f"the tokenizer gave id {int(ids.max())}, its vocabulary has {tokenizer.vocab_size}",
            hint="the tokenizer's files do not belong together",
        )


def _with_borders(encoded: Encoded, closes: NDArray[np.bool_], tokenizer: Tokenizer) -> Tokens:
    """Ids with the border token after every finished document."""
    ids, lengths = encoded
    if tokenizer.eos_id is None:
        return ids.astype(tokenizer.dtype)
    ends = np.cumsum(lengths + closes)
    out = np.empty(int(ends[-1]), tokenizer.dtype)
    borders = (ends - 1)[closes]
    if len(lengths) * 256 < len(out):
        # For few long texts, copying slices costs a third of a mask over every token.
        starts = np.cumsum(lengths) - lengths
        for length, start, end, is_closed in zip(
            lengths.tolist(), starts.tolist(), ends.tolist(), closes.tolist(), strict=True
        ):
            out[end - is_closed - length : end - is_closed] = ids[start : start + length]
    else:
        is_text = np.ones(len(out), np.bool_)
        is_text[borders] = False
        out[is_text] = ids
    out[borders] = tokenizer.eos_id
    return out


def _in_rows(encoded: Encoded, closes: NDArray[np.bool_], tokenizer: Tokenizer, rows: Rows) -> Tokens:
    """Every document in rows of its own; its incomplete last row is padded with the border token or dropped."""
    stream = _with_borders(encoded, closes, tokenizer)
    per_piece = encoded.lengths + (closes if tokenizer.eos_id is not None else 0)
    ends = np.cumsum(per_piece)[closes].tolist()
    if not closes[-1]:
        ends.append(len(stream))
    made: list[Tokens] = []
    start = 0
    for end in ends:
        made += _rows_of(stream[start:end], rows, tokenizer.eos_id)
        start = end
    return np.concatenate(made) if made else np.empty(0, tokenizer.dtype)


def _rows_of(tokens: Tokens, rows: Rows, eos_id: int | None) -> list[Tokens]:
    made: list[Tokens] = []
    num_whole = 0 if len(tokens) < rows.tokens else (len(tokens) - rows.tokens) // rows.stride + 1
    if num_whole:
        windows = np.lib.stride_tricks.sliding_window_view(tokens, rows.tokens)[:: rows.stride]
        made.append(windows.reshape(-1))
    covered = (num_whole - 1) * rows.stride + rows.tokens if num_whole else 0
    rest = tokens[num_whole * rows.stride :]
    # A row of one token has nothing to predict.
    if rows.short == "pad" and eos_id is not None and covered < len(tokens) and len(rest) > 1:
        made.append(np.concatenate([rest, np.full(rows.tokens - len(rest), eos_id, tokens.dtype)]))
    return made
