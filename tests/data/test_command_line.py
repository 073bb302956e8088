"""`jackline data` as a person types it: real processes, data on stdout, talk on stderr."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from tests.data.corpora import all_tokens, expected_bytes, make_texts, open_cache_folder, write_jsonl

JACKLINE = [sys.executable, "-c", "from jackline.cli.main import main; main()", "data"]


def run(*words: str | Path, code: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([*JACKLINE, *map(str, words)], capture_output=True, text=True, timeout=120)
    assert done.returncode == code, done.stderr
    return done


def prepared(tmp_path: Path, *words: str) -> dict[str, Any]:
    done = run(
        "prepare", tmp_path / "in", "--tokenizer", "bytes", "--cache-dir", tmp_path / "cache", "--json", *words
    )
    facts: dict[str, Any] = json.loads(done.stdout)
    return facts


def test_prepare_show_and_bench(tmp_path: Path) -> None:
    texts = make_texts(300)
    write_jsonl(tmp_path / "in" / "a.jsonl", texts)
    facts = prepared(tmp_path)
    assert (facts["tokens"], facts["documents"], facts["is_finished"]) == (len(expected_bytes(texts)), 300, True)
    assert np.array_equal(all_tokens(open_cache_folder(Path(facts["folder"]))), expected_bytes(texts))

    shown = run("show", facts["folder"], "--verify").stdout.splitlines()
    assert shown[0].startswith(f"cache     {facts['folder']} (finished, ")
    assert shown[2] == f"tokens    {facts['tokens']:,} in 1 eras, 300 documents"
    assert shown[3] == "left out  0 empty, 0 too short, 0 of the other split; damaged: none"
    assert shown[4] == "tokenizer bytes, vocabulary 257, made by bytes"
    assert shown[5].startswith(f"begins    {texts[0][:40]!r}"[:-1])

    words = ("--seq-len", "64", "--batch-size", "4", "--seconds", "0.3", "--json")
    measured = json.loads(run("bench", facts["folder"], *words).stdout)
    assert measured["batches"] > 0
    assert measured["tokens_per_s"] > 0
    assert set(measured) == {
        "batches",
        "batches_per_s",
        "tokens_per_s",
        "waiting_percent",
        "threads",
        "first_batch_s",
    }


def test_preparing_again_does_nothing_and_rebuilding_does_it_anew(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "in" / "a.jsonl", make_texts(50))
    first = prepared(tmp_path)
    assert prepared(tmp_path) == first
    with open(path, "ab") as file:
        file.write(b'{"text": "one more"}\n')
    refused = run("prepare", tmp_path / "in", "--tokenizer", "bytes", "--cache-dir", tmp_path / "cache", code=1)
    assert "error: the source changed since the cache in" in refused.stderr
    assert prepared(tmp_path, "--rebuild")["documents"] == 51


def test_a_damaged_cache_is_named(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "in" / "a.jsonl", make_texts(50))
    facts = prepared(tmp_path)
    with open(Path(facts["folder"]) / "era-00000.tok", "r+b") as file:
        file.seek(100)
        file.write(b"\xff\xff")
    done = run("show", facts["folder"], "--verify", code=1)
    assert done.stderr.splitlines() == [
        f"error: 1 eras of {facts['folder']} are damaged: [0]",
        "hint: remove their era-*.tok files; they are built again from the source",
    ]


def test_a_mixture_with_filters_from_the_command_line(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", make_texts(40))
    write_jsonl(tmp_path / "b.jsonl", ["short", *make_texts(10)])
    done = run(
        "prepare", tmp_path / "a.jsonl", tmp_path / "b.jsonl", "--weights", "3,1", "--tokenizer", "bytes",
        "--min-chars", "20", "--max-examples", "45", "--cache-dir", tmp_path / "cache", "--json",
    )  # fmt: skip
    facts = json.loads(done.stdout)
    assert (facts["documents"], facts["short"]) == (45, 1)


def test_mistakes_are_usage_errors_with_a_hint(tmp_path: Path) -> None:
    cache = ("--cache-dir", tmp_path / "cache")
    missing = run("prepare", tmp_path / "nothing.txt", *cache, code=2)
    assert missing.stderr.splitlines()[-2:] == [
        f"error: there is no file or folder {tmp_path}/nothing.txt",
        "hint: check the path; globs like 'data/*.txt' work too",
    ]
    (tmp_path / "a.txt").write_text("text")
    wrong = run("prepare", tmp_path / "a.txt", "--weights", "1,2", *cache, code=2)
    assert wrong.stderr.splitlines() == [
        "error: --weights '1,2' does not give 1 numbers",
        "hint: write --weights 0.7,0.3",
    ]
    unknown = run("prepare", tmp_path / "a.txt", "--tokenizer", "gpt9", *cache, code=2)
    assert unknown.stderr.splitlines()[0] == "error: there is no tokenizer 'gpt9'"
    assert "No such option" in run("prepare", tmp_path / "a.txt", "--tokeniser", "bytes", code=2).stderr
    empty = run("show", tmp_path / "a.txt", "--tokenizer", "bytes", *cache, code=1)
    assert "is not a token cache yet" in empty.stderr


def test_ctrl_c_keeps_what_was_done_and_says_so(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "in" / "a.jsonl", make_texts(20_000, 150))
    words = ["prepare", str(tmp_path / "in"), "--tokenizer", "bytes", "--cache-dir", str(tmp_path / "cache")]
    child = subprocess.Popen([*JACKLINE, *words], stderr=subprocess.PIPE, text=True, start_new_session=True)
    deadline = time.monotonic() + 60
    while not list((tmp_path / "cache").glob("*/era-*")) and time.monotonic() < deadline:
        time.sleep(0.005)
    # As a terminal does it: to the whole group.
    import os

    os.killpg(child.pid, signal.SIGINT)
    _, said = child.communicate(timeout=60)
    assert child.returncode == 130
    assert said.splitlines()[-1] == "stopped; what was tokenised is kept, the same command goes on from there"
    assert prepared(tmp_path)["documents"] == 20_000


def test_a_line_comes_at_once_and_then_every_two_seconds(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "in" / "a.jsonl", make_texts(20))
    done = run("prepare", tmp_path / "in", "--tokenizer", "bytes", "--cache-dir", tmp_path / "cache")
    assert done.stderr.splitlines()[0] == "list 0 files"
    assert done.stderr.splitlines()[-1].startswith("ready in ")


def test_the_standard_library_needs_no_download(tmp_path: Path) -> None:
    words = ("--tokenizer", "bytes", "--max-examples", "5", "--cache-dir", tmp_path / "cache", "--json")
    facts = json.loads(run("prepare", "python-stdlib", *words).stdout)
    assert facts["documents"] == 5
    assert facts["tokens"] > 1000
