"""Packing: borders, long documents, rows; the same with any number of threads."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from jackline.data.cache.state import begin
from jackline.data.sources import records
from jackline.data.sources.documents import Block
from jackline.data.spec import Rows
from jackline.data.tokenise import encode
from jackline.data.tokenise.encode import Packing, pack, packed_blocks
from jackline.data.tokenise.tokenizer import from_json, load_tokenizer, train_bpe
from tests.data.corpora import expected_bytes, make_text, make_texts

BYTES = load_tokenizer("bytes")


def block_of(*texts: str, left_open: set[int] | None = None) -> Block:
    return Block([text.encode() for text in texts], left_open or set(), begin(1), begin(1))


def tokens_of(block: Block, **settings: Any) -> list[int]:
    tokens: list[int] = pack(block, Packing(BYTES, **settings)).tokens.tolist()
    return tokens


def test_a_border_stands_after_every_finished_document() -> None:
    assert tokens_of(block_of("ab", "c")) == [97, 98, 256, 99, 256]
    assert tokens_of(block_of("ab", "c", left_open={1})) == [97, 98, 256, 99]
    assert tokens_of(block_of()) == []


@pytest.mark.parametrize("num_words", [1, 5, 3000])
def test_few_long_and_many_short_texts_are_packed_alike(num_words: int) -> None:
    texts = make_texts(40, num_words)
    assert tokens_of(block_of(*texts)) == expected_bytes(texts).tolist()


def test_no_border_when_none_is_wanted() -> None:
    plain = load_tokenizer("bytes", eos="none")
    assert pack(block_of("ab", "c"), Packing(plain)).tokens.tolist() == [97, 98, 99]


def test_a_document_longer_than_any_context_is_packed_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    text = make_text(1, 2000)
    trained = from_json(train_bpe([text.encode()], 400))
    whole = trained.reference.encode([text.encode()]).ids.tolist()
    monkeypatch.setattr(encode, "RUN_BYTES", 500)
    monkeypatch.setattr(records, "RUN_BYTES", 500)
    pieces = pack(block_of(text), Packing(trained)).tokens.tolist()
    assert pieces == [*whole, trained.eos_id]


def test_rows_keep_documents_apart_and_lose_no_token() -> None:
    rows = Rows(4, 4)
    assert tokens_of(block_of("abcdefg", "x"), rows=rows) == [
        97, 98, 99, 100, 101, 102, 103, 256,
        120, 256, 256, 256,
    ]  # fmt: skip
    assert tokens_of(block_of("abcd"), rows=rows) == [97, 98, 99, 100]
    assert tokens_of(block_of("abcde"), rows=rows) == [97, 98, 99, 100, 101, 256, 256, 256]


def test_rows_with_overlap_and_dropped_ends() -> None:
    assert tokens_of(block_of("abcdef"), rows=Rows(4, 2, "drop")) == [
        97, 98, 99, 100,
        99, 100, 101, 102,
    ]  # fmt: skip
    assert tokens_of(block_of("abcdef"), rows=Rows(4, 2)) == [
        97, 98, 99, 100,
        99, 100, 101, 102,
        101, 102, 256, 256,
    ]  # fmt: skip
    assert tokens_of(block_of("ab"), rows=Rows(4, 2, "drop")) == []
    # The last full row is not lost, nor a document of exactly one row.
    assert len(tokens_of(block_of("abcde"), rows=Rows(6, 6, "drop"))) == 6


@pytest.mark.parametrize("num_threads", [1, 2, 4])
def test_blocks_come_out_in_order_with_any_number_of_threads(num_threads: int) -> None:
    texts = make_texts(200)
    blocks = [block_of(*texts[at : at + 7]) for at in range(0, 200, 7)]
    packed = [item.tokens for item in packed_blocks(blocks, Packing(BYTES), num_threads)]
    assert np.array_equal(np.concatenate(packed), expected_bytes(texts))


def test_only_a_few_blocks_exist_at_a_time() -> None:
    num_read = 0

    def endless() -> Iterator[Block]:
        nonlocal num_read
        while True:
            num_read += 1
            yield block_of("text")

    before = set(threading.enumerate())
    packed = packed_blocks(endless(), Packing(BYTES), 2)
    next(packed)
    for _ in range(50):
        next(packed)
    assert num_read <= 51 + 2 + 3
    packed.close()
    assert not [thread for thread in set(threading.enumerate()) - before if thread.name.startswith("jackline-")]


def test_an_error_of_the_reader_arrives_after_the_blocks_before_it() -> None:
    def failing() -> Iterator[Block]:
        yield block_of("one")
        yield block_of("two")
        raise RuntimeError("the source is gone")

    packed = packed_blocks(failing(), Packing(BYTES), 2)
    assert next(packed).tokens.tolist()[:3] == [111, 110, 101]
    assert next(packed).tokens.tolist()[:3] == [116, 119, 111]
    with pytest.raises(RuntimeError, match="the source is gone"):
        next(packed)
