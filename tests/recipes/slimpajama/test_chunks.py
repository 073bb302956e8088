"""Chunks out of a stream: every token once and in order, from any chunk on, whatever the files look like."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard

from jackline.data.loader.live import open_live
from jackline.data.sources.bytefile import Patience
from jackline.data.spec import DataSpec, Source
from jackline.errors import CannotResume, JacklineError, UsageError
from jackline.recipes.slimpajama.chunks import ChunkLoader, ChunkSettings, ChunkSource
from jackline.session.stopping import NoMoreWaiting
from jackline.trainer.report.console import Console
from tests.data.corpora import (
    expected_bytes,
    jsonl_bytes,
    make_texts,
    write_gz,
    write_jsonl,
    write_parquet,
    write_zst,
)
from tests.data.far_end import FarEnd, serving

TEXTS = make_texts(40, num_words=30)
SETTINGS = ChunkSettings(seq_len=16, num_sequences=8)


def open_loader(url: str | Path, settings: ChunkSettings = SETTINGS, **spec: Any) -> ChunkLoader:
    made = DataSpec(sources=(Source(str(url)),), tokenizer="bytes", **spec)
    return ChunkLoader(ChunkSource(open_live(made, Patience(), lambda text: None), Console()), settings)


def read_all(loader: ChunkLoader) -> list[np.ndarray[Any, Any]]:
    found = [batch.tokens for batch in loader]
    loader.close()
    return found


def check_tokens(chunks: list[np.ndarray[Any, Any]], expected: np.ndarray[Any, Any], seq_len: int = 16) -> None:
    rows = np.concatenate(chunks)
    assert np.array_equal(rows[:-1, -1], rows[1:, 0])  # neighbours share a token
    flat = np.concatenate([rows[:, :-1].reshape(-1), rows[-1:, -1]])
    assert np.array_equal(flat, expected[: len(flat)])
    assert len(expected) - len(flat) < seq_len * 8


WRITERS: dict[str, Callable[[Path, list[str]], Path]] = {
    "one frame": lambda folder, texts: write_zst(folder / "a.jsonl.zst", texts),
    "many frames": lambda folder, texts: write_zst(folder / "a.jsonl.zst", texts, num_frames=9),
    "plain": lambda folder, texts: write_jsonl(folder / "a.jsonl", texts),
    "gzip": lambda folder, texts: write_gz(folder / "a.jsonl.gz", texts, num_members=3),
    "parquet": lambda folder, texts: write_parquet(folder / "a.parquet", list(texts), rows_per_group=7),
}


@pytest.mark.parametrize("kind", WRITERS)
def test_chunks_hold_every_token_in_order_and_go_on_from_any_of_them(kind: str, tmp_path: Path) -> None:
    path = WRITERS[kind](tmp_path, TEXTS)
    loader, states, chunks = open_loader(path), [], []
    for batch in loader:
        chunks.append(batch.tokens)
        states.append(json.loads(json.dumps(loader.state())))
    assert loader.is_exhausted
    check_tokens(chunks, expected_bytes(TEXTS))
    for at in range(0, len(states) - 1, 5):
        again = open_loader(path)
        again.seek(states[at])
        rest = read_all(again)
        assert all(np.array_equal(one, two) for one, two in zip(rest, chunks[at + 1 :], strict=True))
        assert (again.total_samples, again.total_skipped) == (loader.total_samples, loader.total_skipped)
    loader.close()


def test_a_position_is_that_of_a_document_and_resuming_reads_no_shard_before_it(tmp_path: Path) -> None:
    files = {
        f"{k}.jsonl.zst": write_zst(tmp_path / f"{k}", TEXTS[10 * k : 10 * k + 10]).read_bytes() for k in range(4)
    }
    with serving(FarEnd(files=files)) as far_end:
        loader = open_loader(far_end.address("{0..3}.jsonl.zst"))
        while loader.state()["cursor"] is None or "/2.jsonl" not in str(loader.state()["cursor"]["sources"][0][0]):
            next(loader)
        state, expected = loader.state(), next(loader).tokens
        loader.close()
        assert state["cursor"]["skip_tokens"] < max(len(text.encode()) + 1 for text in TEXTS)
        again = open_loader(far_end.address("{0..3}.jsonl.zst"))
        far_end.requests.clear()
        again.seek(state)
        assert np.array_equal(next(again).tokens, expected)
        again.close()
        assert {name for name, _ in far_end.requests} <= {"2.jsonl.zst", "3.jsonl.zst"}


def test_broken_and_empty_records_are_skipped_and_counted_and_the_rest_is_whole(tmp_path: Path) -> None:
    texts = make_texts(300, num_words=10)
    lines = jsonl_bytes([*texts[:50], "", " \n ", *texts[50:200]]).splitlines(keepends=True)
    lines.insert(20, b'{"text": "broken\n')
    (tmp_path / "0.jsonl.zst").write_bytes(zstandard.compress(b"".join(lines)))
    frames = b"".join(zstandard.compress(jsonl_bytes([text])) for text in texts[200:])
    (tmp_path / "1.jsonl.zst").write_bytes(frames[:-20] + bytes(20))  # the last frame is damaged
    loader = open_loader(tmp_path)
    check_tokens(read_all(loader), expected_bytes(texts[:299]))
    assert loader.total_skipped == 3  # the damaged frame comes after the last whole chunk
    assert 290 < loader.total_samples <= 299


def test_two_epochs_are_the_data_twice_and_chunks_go_across_the_border(tmp_path: Path) -> None:
    path = write_zst(tmp_path / "a.jsonl.zst", TEXTS)
    settings = replace(SETTINGS, epochs=2)
    loader, epochs, chunks, states = open_loader(path, settings), [], [], []
    for batch in loader:
        epochs.append(batch.epoch)
        chunks.append(batch.tokens)
        states.append(loader.state())
    loader.close()
    check_tokens(chunks, np.concatenate([expected_bytes(TEXTS)] * 2))
    assert epochs[0] == 0 and epochs[-1] == 1
    again = open_loader(path, settings)
    again.seek(states[-3])
    assert all(np.array_equal(one, two) for one, two in zip(read_all(again), chunks[-2:], strict=True))


def test_a_source_that_changed_is_refused_at_resume(tmp_path: Path) -> None:
    path = write_zst(tmp_path / "a.jsonl.zst", TEXTS)
    loader = open_loader(path)
    next(loader)
    state = loader.state()
    loader.close()
    with pytest.raises(CannotResume) as caught:
        open_loader(path, replace(SETTINGS, seq_len=8)).seek(state)
    assert str(caught.value) == (
        "error: the data of this checkpoint is not the data of this run: seq_len was 16, is 8\n"
        "hint: give the same source, tokenizer and sequence length, or start a new run"
    )
    write_zst(path, [f"other {text}" for text in TEXTS])
    with contextlib.closing(open_loader(path)) as again, pytest.raises(CannotResume) as caught:
        again.seek(state)
    assert str(caught.value) == (
        "error: the document at which this run stopped is not what it was: a.jsonl.zst\n"
        "hint: put the source back as it was, or start a new run with --new"
    )


def test_a_stream_that_cannot_be_had_or_holds_nothing_is_an_error(tmp_path: Path) -> None:
    path = write_zst(tmp_path / "a.jsonl.zst", ["", " "])
    loader = open_loader(path)
    with pytest.raises(JacklineError) as caught:
        next(loader)
    assert str(caught.value) == (
        f"error: {path} holds no document with text\nhint: check the path, the pattern and min_chars"
    )
    with pytest.raises(UsageError) as refused:
        open_live(DataSpec(sources=(Source(str(path)),), tokenizer="train"), Patience(), lambda text: None)
    assert str(refused.value) == (
        "error: a stream cannot train its tokenizer\nhint: --tokenizer gpt2, bytes, or a tokenizer.json"
    )


def test_lines_come_at_every_100_samples_and_for_every_sample_with_verbose(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_zst(tmp_path / "a.jsonl.zst", [*make_texts(250, num_words=5), ""])
    large = ChunkSettings(seq_len=16, num_sequences=500)
    loader = open_loader(path, large)
    next(loader)
    loader.close()
    quiet = capsys.readouterr().out
    assert re.findall(r"\[data\] accumulating chunk 1: ([\d,]+) samples, [\d,]+ of 8,000 tokens", quiet) == [
        "100",
        "200",
    ]
    assert re.search(
        r"\[data\] chunk 1 complete after \S+ s: 2\d\d samples, 0 skipped, 8,000 tokens; training", quiet
    )
    loader = open_loader(path, replace(large, is_verbose=True))
    next(loader)
    loader.close()
    samples = re.findall(r"\[data\] sample (\d+) of a\.jsonl\.zst: \d+ tokens; chunk 1 at", capsys.readouterr().out)
    assert [int(number) for number in samples] == list(range(1, len(samples) + 1))
    assert len(samples) > 200


def test_a_wish_to_end_is_heard_while_data_is_waited_for_and_moves_no_position(tmp_path: Path) -> None:
    frames = [zstandard.compress(jsonl_bytes([text])) for text in TEXTS]
    with serving(FarEnd(files={"a.jsonl.zst": b"".join(frames)})) as far_end:
        far_end.faults += ["", f"stall:{sum(map(len, frames[:6]))}"]
        loader = open_loader(far_end.address("a.jsonl.zst"))
        num_chunks = (sum(len(text.encode()) + 1 for text in TEXTS[:6]) - 1) // 128
        for _ in range(num_chunks):  # all that can be made of six documents, though the seventh never comes
            next(loader)
        state = loader.state()
        loader.stop_when(lambda: True)
        with pytest.raises(NoMoreWaiting):
            next(loader)
        assert loader.state() == state
        far_end.released.set()
        loader.close()


def test_once_a_chunk_is_there_the_sign_of_life_is_the_trainings_again(tmp_path: Path) -> None:
    made = DataSpec(sources=(Source(str(write_jsonl(tmp_path / "a.jsonl", TEXTS))),), tokenizer="bytes")
    console = Console()
    loader = ChunkLoader(ChunkSource(open_live(made, Patience(), lambda text: None), console), SETTINGS)
    console.now("step 3, backward")
    next(loader)
    assert console.detail == "step 3, backward"
    loader.close()
