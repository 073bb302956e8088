"""Conversations as training data (`chat=true`): JSONL in, rows of tokens out, with a loss over answers alone.

    {"messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]}
    {"prompt": "2 + 2?", "response": "4"}                    also: completion, answer
    {"instruction": "Add.", "input": "2 and 2", "output": "4"}

Owns what a line may look like, how a conversation is written as text, and how conversations are packed into rows.
In a row a token that is no target is stored as ~id. All rows are in memory: such data is small.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import xxhash

from jackline import accelerator
from jackline.data.sources.listing import list_files
from jackline.data.spec import is_remote, sources_in
from jackline.data.tokenise.tokenizer import Tokenizer, load_tokenizer
from jackline.errors import UsageError
from jackline.models.loss import IGNORED
from jackline.trainer.own.samples import Order, SampleLoader, Samples, SampleSet
from jackline.units import count_of

if TYPE_CHECKING:
    from torch import Tensor

    from jackline.data.loader.loader import Batch
    from jackline.trainer.config import TrainConfig

_ANSWERS = ("response", "completion", "answer", "output")
_QUESTIONS = ("prompt", "question", "instruction")
_SHOWN = 5
_SEVERAL = "several files: data=a.jsonl,b.jsonl"
_FORMS = 'a line is {"messages": [...]}, {"prompt": ..., "response": ...} or {"instruction": ..., "output": ...}'


@dataclass(frozen=True)
class Turn:
    role: str
    text: str

    @property
    def is_answer(self) -> bool:
        return self.role == "assistant"


@dataclass(frozen=True)
class ChatText:
    """Rows to train on and their tokenizer (`corpus.TrainText`)."""

    rows: Tensor
    tokenizer: Tokenizer
    first: str

    @property
    def vocab_size(self) -> int:
        return self.tokenizer.vocab_size

    @property
    def eos_id(self) -> int | None:
        return self.tokenizer.eos_id

    def make_loader(self, config: TrainConfig, device: torch.device) -> SampleLoader:
        order = Order(config.batch_size, config.seed, 0, config.epochs)
        samples = Samples(self.rows, list, name="the conversations", seed=config.seed)
        return SampleLoader(samples, order, pin_memory=accelerator.is_gpu(device))

    def first_text(self, first: Batch) -> str:
        return self.first

    def tokenizer_json(self) -> str | None:
        return self.tokenizer.json

    def close(self) -> None:
        """All is in memory."""


@dataclass
class _Packed:
    """`room` tokens to a row."""

    room: int
    eos_id: int
    rows: list[list[int]] = field(default_factory=list)
    num_cut: int = 0

    def add(self, tokens: list[int]) -> None:
        """A conversation that begins with the token between documents; the one after it ends its answer."""
        if len(tokens) + 1 > self.room:
            self.num_cut += 1
            tokens = tokens[: self.room - 1]
            if all(token < 0 for token in tokens):
                return  # nothing of its answer is left
        if not self.rows or len(self.rows[-1]) + len(tokens) + 1 > self.room:
            self.rows.append([])
        self.rows[-1] += tokens if not self.rows[-1] else [self.eos_id, *tokens[1:]]

    def tensor(self) -> Tensor:
        made = np.full((len(self.rows), self.room), ~self.eos_id, np.int64)
        for number, row in enumerate(self.rows):
            made[number, : len(row) + 1] = [*row, self.eos_id]
        return torch.from_numpy(made)


def open_chat(config: TrainConfig, say: Any) -> tuple[ChatText, SampleSet | None]:
    """The conversations of `data`; those with a share of the hashes are for validation."""
    tokenizer = load_tokenizer(config.tokenizer, use_fast=False)
    if tokenizer.eos_id is None:
        raise UsageError("chat=true needs a tokenizer with a token between documents", hint="tokenizer=gpt2 or bytes")
    packed = {part: _Packed(config.seq_len + 1, tokenizer.eos_id) for part in ("train", "validation")}
    count, first = 0, ""
    for turns in read_chats(config.data):
        text = written(turns)
        share = xxhash.xxh3_64_intdigest(text.encode("utf-8", "replace")) / 2**64
        packed["validation" if share < config.val_fraction else "train"].add(tokens_of(turns, tokenizer))
        count, first = count + 1, first or text
    train, held = packed["train"].tensor(), packed["validation"].tensor()
    if not len(train):
        raise UsageError(
            f"{config.data} leaves no conversation to train on: {count:,} read, seq_len={config.seq_len}",
            hint="more conversations, a smaller val_fraction, or a longer seq_len",
        )
    say(f"{count_of(count, 'conversation')}, {count_of(len(train), 'row')} of {config.seq_len:,} tokens to train on")
    if cut := packed["train"].num_cut + packed["validation"].num_cut:
        say(f"{count_of(cut, 'conversation')} longer than seq_len={config.seq_len}: their ends are left out")
    validation = SampleSet(Samples(held, list, name="the validation")) if len(held) else None
    return ChatText(train, tokenizer, first), validation


def read_chats(data: str) -> Iterator[list[Turn]]:
    """Every conversation of the files. Raises UsageError with the first wrong lines, all of them looked at."""
    wrong: list[str] = []
    count = num_wrong = 0
    for path in _files_of(data):
        with open(path, "rb") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                count += 1
                turns = parse(line)
                if isinstance(turns, str):
                    num_wrong += 1
                    wrong += [f"{path} line {number}: {turns}"] if len(wrong) < _SHOWN else []
                elif not wrong:
                    yield turns
    if wrong:
        more = f" (the first {_SHOWN})" if num_wrong > _SHOWN else ""
        raise UsageError(
            f"{count_of(num_wrong, 'line')} of {count:,} cannot be used{more}", detail=tuple(wrong), hint=_FORMS
        )
    if not count:
        raise UsageError(f"there is no conversation in {data}", hint=_FORMS)


def _files_of(data: str) -> Iterator[Path]:
    if is_remote(data):
        raise UsageError(
            f"chat=true reads files of this machine, not {data}", hint="download it first: data=FILE.jsonl"
        )
    sources = sources_in(data)
    if len({weight for _, weight in sources}) > 1:
        raise UsageError("chat=true takes each conversation once an epoch: weights mean nothing", hint=_SEVERAL)
    for url, _ in sources:
        for found in list_files(url, needs_known_ending=False):
            if not found.name.endswith(".jsonl"):
                raise UsageError(f"{found.name} is no JSONL of conversations", hint=_FORMS)
            yield Path(found.name)


def parse(line: str | bytes) -> list[Turn] | str:
    """The turns of a line, or what is wrong with it."""
    try:
        record = json.loads(line.decode("utf-8-sig") if isinstance(line, bytes) else line)
    except UnicodeDecodeError as error:
        return f"it is not UTF-8 at byte {error.start + 1}"
    except (ValueError, RecursionError):
        return "it is not JSON"
    if not isinstance(record, dict):
        return "it is not an object"
    messages = record.get("messages", record.get("conversations"))
    turns = _messages(messages) if messages is not None else _pair(record)
    if isinstance(turns, str):
        return turns
    if not any(turn.is_answer and turn.text.strip() for turn in turns):
        return "it has no answer"
    return turns if not turns[0].is_answer else "it begins with an answer"


_ROLES = {"human": "user", "gpt": "assistant", "model": "assistant", "bot": "assistant"}


def _messages(messages: Any) -> list[Turn] | str:
    if not isinstance(messages, list) or not messages:
        return "its messages are no list, or an empty one"
    turns = []
    for message in messages:
        given = message if isinstance(message, dict) else {}
        role, text = given.get("role", given.get("from")), given.get("content", given.get("value"))
        if not isinstance(role, str) or not isinstance(text, str):
            return "a message without a role and a text as its content"
        turns.append(Turn(_ROLES.get(role, role), text))
    return turns


def _pair(record: Mapping[str, Any]) -> list[Turn] | str:
    question = next((record[name] for name in _QUESTIONS if isinstance(record.get(name), str)), None)
    answer = next((record[name] for name in _ANSWERS if isinstance(record.get(name), str)), None)
    if question is None:
        return f"it has neither messages nor one of {', '.join(_QUESTIONS)}"
    if answer is None:
        return f"it has no answer: none of {', '.join(_ANSWERS)}"
    more = record.get("input")
    return [
        Turn("user", f"{question}\n{more}" if isinstance(more, str) and more else question),
        Turn("assistant", answer),
    ]


def written(turns: list[Turn]) -> str:
    """'User: 2 + 2?\\nAssistant: 4'."""
    return "\n".join(f"{turn.role.capitalize()}: {turn.text}" for turn in turns)


def tokens_of(turns: list[Turn], tokenizer: Tokenizer) -> list[int]:
    """The token between documents and the conversation; what is no answer as ~id."""
    assert tokenizer.eos_id is not None
    made = [~tokenizer.eos_id]
    for number, turn in enumerate(turns):
        begin = f"{turn.role.capitalize()}:"
        rest = f" {turn.text}" + ("\n" if number + 1 < len(turns) else "")
        made += [~token for token in _encode(begin, tokenizer)]
        made += [token if turn.is_answer else ~token for token in _encode(rest, tokenizer)]
    return made


def _encode(text: str, tokenizer: Tokenizer) -> list[int]:
    found: list[int] = np.asarray(tokenizer.reference.encode([text.encode("utf-8", "replace")]).ids).tolist()
    return found


def split_answers(tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Inputs and targets of rows; what is no answer is no target."""
    ids, targets = tokens[:, :-1], tokens[:, 1:]
    return torch.where(ids < 0, ~ids, ids), targets.masked_fill(targets < 0, IGNORED)
