"""What a person reads while a stream is trained on: every phase by name, every chunk with its counts."""

from __future__ import annotations

import re
from pathlib import Path

from tests.data.corpora import write_zst
from tests.session.nursery import Nursery

SCRIPT = Path(__file__).with_name("streaming.py")
# Ten bytes and the mark of a document's end: 187 of them are a chunk of 2,048 tokens and the one after it.
TEXTS = [f"number {k:03d}" for k in range(400)]
NUMBER = r"[\d.]+"
OURS = r"\[(data|train)\] (opening|stream|one chunk|accumulating|chunk)"


def test_header_accumulation_chunk_and_totals_are_told_in_order(nursery: Nursery, tmp_path: Path) -> None:
    write_zst(tmp_path / "data" / "example_train_0.jsonl.zst", [*TEXTS[:50], "", "", *TEXTS[50:]])
    words = ["--data", str(tmp_path / "data"), "--max-chunks", "2", "--tokens-per-chunk", "2048"]
    done = nursery.run(SCRIPT, [str(tmp_path / "runs" / "one"), *words, "--max-seq-length", "64"], tmp_path)
    assert done.code == 0, done.output
    told = [line for line in done.output.splitlines() if re.match(OURS, line)]
    wanted = [
        rf"\[data\] opening the stream {tmp_path / 'data'}, usually 1 to 30 s",
        rf"\[data\] stream open after {NUMBER} s, text in 'text'; read as it comes, nothing is cached",
        r"\[data\] one chunk is one step: 2,048 tokens, 32 sequences of 64; documents are packed, none is cut short",
        r"\[data\] accumulating chunk 1: 2,048 tokens before the step",
        r"\[data\] accumulating chunk 1: 98 samples, 2 skipped, 1,078 of 2,048 tokens",
        rf"\[data\] chunk 1 complete after {NUMBER} s: 187 samples, 2 skipped, 2,048 tokens; training on it",
        rf"\[train\] chunk 1: 187 samples, 2 skipped, 2,048 tokens; loss {NUMBER}, average {NUMBER}; "
        rf"step {NUMBER} s after {NUMBER} s of accumulation, [\d,.]+ tok/s; 2,048 tokens in all",
    ]
    assert len(told) >= len(wanted), done.output
    for line, pattern in zip(told, wanted, strict=False):
        assert re.fullmatch(pattern, line), f"{line}\nis not\n{pattern}\nin\n{done.output}"
    assert "[data] accumulating chunk 2: 100 samples, " in done.output
    assert "[end] chunks    2 of 2,048 tokens, 4,096 in all, average loss " in done.output
    assert re.search(r"^\[end\] samples   \d+ used, 2 skipped$", done.output, re.M)
