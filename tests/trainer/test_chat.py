"""Conversations as data: which lines are taken, what is a target, and that packing keeps conversations apart."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from jackline.data.spec import sources_in
from jackline.data.tokenise.tokenizer import load_tokenizer
from jackline.errors import UsageError
from jackline.models.loss import IGNORED
from jackline.rundir.layout import RunDir
from jackline.trainer.chat import open_chat, parse, read_chats, split_answers, tokens_of, written
from jackline.trainer.config import resolve
from jackline.trainer.loop import train
from jackline.trainer.trained.evaluate import evaluate_run
from jackline.trainer.trained.load import load

MESSAGES = {"messages": [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]}
WORDS = (
    "seq_len=32 batch_size=4 max_steps=6 save_every_steps=3 eval_every=3 rehearse=no val_fraction=0.2 tokenizer=bytes"
)


def write(path: Path, *records: Any) -> Path:
    path.write_text("".join(f"{record if isinstance(record, str) else json.dumps(record)}\n" for record in records))
    return path


def bytes_of(tokens: list[int]) -> str:
    return bytes(token for token in tokens if token < 256).decode()


@pytest.mark.parametrize(
    ("record", "text"),
    [
        (MESSAGES, "User: 2+2?\nAssistant: 4"),
        ({"prompt": "2+2?", "completion": "4"}, "User: 2+2?\nAssistant: 4"),
        ({"instruction": "Add.", "input": "2 and 2", "output": "4"}, "User: Add.\n2 and 2\nAssistant: 4"),
        (
            {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
            "User: a\nAssistant: b",
        ),
    ],
)
def test_the_usual_forms_of_a_line_are_understood(record: Any, text: str) -> None:
    turns = parse(json.dumps(record))
    assert isinstance(turns, list) and written(turns) == text


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "it is not JSON"),
        ("[1]", "it is not an object"),
        ('{"text": "x"}', "it has neither messages nor one of prompt, question, instruction"),
        ('{"prompt": "x"}', "it has no answer: none of response, completion, answer, output"),
        ('{"prompt": "x", "response": " "}', "it has no answer"),
        ('{"messages": []}', "its messages are no list, or an empty one"),
        ('{"messages": [{"role": "user"}]}', "a message without a role and a text as its content"),
        ('{"messages": [{"role": "user", "content": "x"}]}', "it has no answer"),
        ('{"messages": [{"role": "assistant", "content": "x"}]}', "it begins with an answer"),
    ],
)
def test_a_line_that_cannot_be_used_says_why(line: str, words: str) -> None:
    assert parse(line) == words


def test_wrong_lines_are_named_and_an_empty_file_is_an_error(tmp_path: Path) -> None:
    path = write(tmp_path / "talks.jsonl", MESSAGES, "", {"prompt": "x"}, MESSAGES, "{")
    with pytest.raises(UsageError) as caught:
        list(read_chats(str(path)))
    assert str(caught.value).splitlines()[:3] == [
        "error: 2 lines of 4 cannot be used",
        f"       {path} line 3: it has no answer: none of response, completion, answer, output",
        f"       {path} line 5: it is not JSON",
    ]
    with pytest.raises(UsageError, match="there is no conversation in"):
        list(read_chats(str(write(tmp_path / "empty.jsonl"))))
    with pytest.raises(UsageError, match="is no JSONL of conversations"):
        list(read_chats(str(write(tmp_path / "talks.txt", "hello"))))


def test_bytes_that_are_no_utf8_are_named_by_line_and_place(tmp_path: Path) -> None:
    path = tmp_path / "talks.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "x", "response": "y"}\n{"prompt": "caf\xe9", "response": "y"}\n')
    with pytest.raises(UsageError) as caught:
        list(read_chats(str(path)))
    assert f"{path} line 2: it is not UTF-8 at byte 16" in str(caught.value)


def test_half_a_character_in_a_conversation_is_read_as_a_question_mark(tmp_path: Path) -> None:
    path = tmp_path / "talks.jsonl"
    path.write_text('{"prompt": "half \\ud83d", "response": "y"}\n' * 3)
    config = resolve("demo", [f"data={path}", "chat=true", "tokenizer=bytes", "seq_len=64", "val_fraction=0"]).config
    text, _ = open_chat(config, lambda words: None)
    first = [token if token >= 0 else ~token for token in text.rows[0].tolist()]
    assert b"half ?" in bytes(token for token in first if token < 256)


def test_conversations_on_another_machine_are_refused_in_words() -> None:
    for place in ("https://a.example/talks.jsonl", "hf:some/set"):
        with pytest.raises(UsageError, match=f"chat=true reads files of this machine, not {place}"):
            list(read_chats(place))


def test_several_files_of_conversations_are_read_in_turn_and_have_no_weights(tmp_path: Path) -> None:
    first, second = (write(tmp_path / name, {"prompt": "x", "response": name}) for name in ("a.jsonl", "b.jsonl"))
    assert [turns[1].text for turns in read_chats(f"{first},{second}")] == ["a.jsonl", "b.jsonl"]
    with pytest.raises(UsageError, match="weights mean nothing"):
        list(read_chats(f"{first}@0.7,{second}@0.3"))


def test_targets_are_the_answers_and_their_ends_alone() -> None:
    more = [*MESSAGES["messages"], {"role": "user", "content": "And?"}, {"role": "assistant", "content": "5"}]
    turns = parse(json.dumps({"messages": more}))
    assert isinstance(turns, list)
    tokens = tokens_of(turns, load_tokenizer("bytes"))
    ids, targets = split_answers(torch.tensor([[*tokens, 256]]))
    assert bytes_of(ids[0].tolist()) == written(turns)
    assert ids[0, 0] == 256, "it begins as every document does"
    assert [token for token in targets[0].tolist() if token != IGNORED] == [*b" 4\n", *b" 5", 256]


def test_conversations_are_packed_whole_and_too_long_ones_are_said(tmp_path: Path) -> None:
    talks = [{"prompt": "p" * size, "response": "yes"} for size in (3, 3, 20, 200, 3)]
    config = replace(
        resolve("demo", ["--quick", f"data={write(tmp_path / 'talks.jsonl', *talks)}"]).config,
        chat=True, val_fraction=0.0, seq_len=60,
    )  # fmt: skip
    said: list[str] = []
    text, held = open_chat(config, said.append)
    assert held is None and said == [
        "5 conversations, 3 rows of 60 tokens to train on",
        "1 conversation longer than seq_len=60: their ends are left out",
    ]
    ids, targets = split_answers(text.rows)
    assert [bytes_of(row.tolist()).count("User:") for row in ids] == [2, 1, 1]
    assert [bytes_of(row[row != IGNORED].tolist()) for row in targets] == [" yes yes", " yes", " yes"]
    with pytest.raises(UsageError, match="leaves no conversation to train on: 5 read, seq_len=8"):
        open_chat(replace(config, seq_len=8), said.append)


def test_a_model_is_tuned_on_conversations_and_loaded(tmp_path: Path) -> None:
    talks = write(tmp_path / "talks.jsonl", *({"prompt": f"{n}?", "response": str(n)} for n in range(40)))
    run = RunDir(tmp_path / "runs" / "chat")
    words = [*WORDS.split(), f"data={talks}", "chat=yes", "packing=separate", "--quick", "patience=5", "epochs=1"]
    ended = train(resolve("demo", words), run)
    assert ended.best is not None and ended.steps == 9
    trained = load(run.path, "latest")
    assert evaluate_run(trained, "", 4).loss == pytest.approx(ended.val_loss, abs=1e-5), "over answers alone"
    assert trained.complete("User: 3?\nAssistant:", num_tokens=3, seed=1) is not None


def test_several_sources_have_weights() -> None:
    assert sources_in("a.txt") == (("a.txt", 1.0),)
    assert sources_in("hf:some/set") == (("hf://datasets/some/set", 1.0),)
    assert sources_in("wiki/*.txt@0.7, hf:a/b@main/*.parquet ,c@.3") == (
        ("wiki/*.txt", 0.7),
        ("hf://datasets/a/b@main/*.parquet", 1.0),
        ("c", 0.3),
    )
