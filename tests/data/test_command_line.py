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
from tests.deadline import HANGS_S

JACKLINE = [sys.executable, "-c", "from jackline.cli.main import main; main()", "data"]


def run(*words: str | Path, code: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([*JACKLINE, *map(str, words)], capture_output=True, text=True, timeout=HANGS_S)
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
    assert shown[2] == f"tokens    {facts['tokens']:,} in 1 era, 300 documents"
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
    deadline = time.monotonic() + HANGS_S
    while not list((tmp_path / "cache").glob("*/era-*")) and time.monotonic() < deadline:
        time.sleep(0.005)
    # As a terminal does it: to the whole group.
    import os

    os.killpg(child.pid, signal.SIGINT)
    _, said = child.communicate(timeout=HANGS_S)
    assert child.returncode == 130
    assert said.splitlines()[-1] == "stopped; what was tokenised is kept, the same command resumes from there"
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


def errors_of(*words: str | Path, code: int = 2) -> list[str]:
    lines = run(*words, code=code).stderr.splitlines()
    return [line for line in lines if not line.startswith("list ")]


def test_garbage_is_answered_with_a_sentence(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "in" / "a.jsonl", make_texts(5))
    words = (path, "--tokenizer", "bytes", "--cache-dir", tmp_path / "cache")
    assert errors_of("bench", *words, "--threads", "-1") == ["error: num_threads must be from 0 to 64, not -1"]
    for seconds in ("nan", "-1", "0", "inf"):
        found = errors_of("bench", *words, "--seconds", seconds)
        assert found == [
            f"error: --seconds must be above 0 and finite, not {float(seconds)}",
            "hint: `jackline data --help` shows its options",
        ]
    assert errors_of("prepare", *words, "--max-damaged", "7") == [
        "error: --max-damaged must be from 0 to 1, not 7.0",
        "hint: 0.1 allows a tenth",
    ]
    assert errors_of("prepare", *words, "--eos", "nope") == [
        "error: the tokenizer has no token 'nope'",
        "hint: the bytes tokenizer knows eos=auto and eos=none",
    ]
    assert errors_of("prepare", "", "--tokenizer", "bytes") == ["error: an empty data source was given"]
    assert errors_of("prepare", "ftp://host/a.txt", "--tokenizer", "bytes") == [
        "error: 'ftp://host/a.txt' cannot be read: nobody here knows ftp://",
        "hint: a source is a path, http(s)://, hf://datasets/... or python-stdlib",
    ]


def test_a_cache_that_cannot_be_made_is_said(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", make_texts(5))
    found = errors_of("prepare", path, "--tokenizer", "bytes", "--cache-dir", path, code=1)
    assert found[0].startswith(f"error: cannot make the token cache {path}/")
    assert found[0].endswith(": Not a directory")
    assert found[1:] == ["hint: --cache-dir or JACKLINE_DATA names another place for it"]


def test_a_pattern_the_shell_unfolded_is_asked_to_be_quoted(tmp_path: Path) -> None:
    names = [str(tmp_path / f"a-file-with-quite-a-long-name-{number:04d}.txt") for number in range(3000)]
    assert errors_of("prepare", *names, "--tokenizer", "bytes") == [
        "error: 3,000 sources are too many for a mixture: at most 128",
        "hint: quote a pattern ('data/*.txt') or give the folder; its files are then one source",
    ]
    for name in names[:128]:
        Path(name).write_text("text")
    words = ("--tokenizer", "bytes", "--cache-dir", tmp_path / "cache", "--json")
    assert json.loads(run("prepare", *names[:128], *words).stdout)["documents"] == 128


def test_preparing_a_cache_folder_resumes_it(tmp_path: Path) -> None:
    texts = make_texts(4000, 120)
    path = write_jsonl(tmp_path / "in" / "a.jsonl", texts)
    words = ("--tokenizer", "bytes", "--cache-dir", tmp_path / "cache", "--json")
    part = json.loads(run("prepare", path, *words, "--max-cache-bytes", "3M").stdout)
    assert not part["is_finished"]
    whole = json.loads(run("prepare", part["folder"], "--json").stdout)
    assert (whole["is_finished"], whole["documents"]) == (True, 4000)
    assert json.loads(run("prepare", part["folder"], "--rebuild", "--json").stdout) == whole


def test_whoever_stops_listening_is_no_error(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "in" / "a.jsonl", make_texts(5))
    folder = prepared(tmp_path)["folder"]
    child = subprocess.Popen([*JACKLINE, "show", folder], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.close()
    _, said = child.communicate(timeout=HANGS_S)
    assert said == b""


def test_on_a_terminal_one_line_is_rewritten(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "in" / "a.jsonl", make_texts(2000))
    import os
    import pty

    ours, theirs = pty.openpty()
    words = ["prepare", str(tmp_path / "in"), "--tokenizer", "bytes", "--cache-dir", str(tmp_path / "cache")]
    child = subprocess.Popen([*JACKLINE, *words], stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    seen = b""
    while True:
        try:
            part = os.read(ours, 4096)
        except OSError:  # the far end is closed
            break
        if not part:
            break
        seen += part
    os.close(ours)
    assert child.wait(HANGS_S) == 0
    first, *rest = seen.decode().split("\r\n")
    assert first.startswith("\rlist 0 files")
    assert rest[0].startswith("cache     ")
    assert rest[-2].startswith("ready in ")
