"""`jackline eval RUN --data ...`: the loss of a trained model over a text, or over the data of an own recipe.

Owns which data that is and the mean over it. Nothing of the run is changed.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from jackline.data.build.builder import cache_folder
from jackline.data.build.supply import Data, open_data
from jackline.data.progress import Progress, describe
from jackline.errors import JacklineError, UsageError
from jackline.memory.guard.step_state import seeded
from jackline.models.gpt import GPT
from jackline.models.loss import IGNORED
from jackline.models.nsa.model import NSAModel
from jackline.rundir.layout import RunDir
from jackline.trainer.chat import open_chat, split_answers
from jackline.trainer.config import TrainConfig
from jackline.trainer.corpus import build_whole, cache_settings, refuse_empty, spec_of
from jackline.trainer.own.recipe import Recipe
from jackline.trainer.own.samples import Samples, SampleSet
from jackline.trainer.own.task import measured, open_samples
from jackline.trainer.trained.load import Trained
from jackline.trainer.validate.evaluate import TextWindows

_SEED = 1
_SILENT_S = 2.0


@dataclass(frozen=True)
class Result:
    """`num_tokens` is 0 for an own recipe, whose samples are counted; `more` are its other numbers."""

    loss: float
    data: str
    num_samples: int
    num_tokens: int
    seconds: float
    more: dict[str, float] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        perplexity = math.exp(min(self.loss, 700.0)) if self.num_tokens else None
        return {
            "data": self.data,
            "loss": self.loss,
            "perplexity": perplexity,
            "tokens": self.num_tokens or None,
            "samples": self.num_samples,
            "seconds": round(self.seconds, 3),
            **({"measured": self.more} if self.more else {}),
        }


def evaluate_run(trained: Trained, data: str, batch_size: int) -> Result:
    """`data` empty: what the run itself is validated on."""
    run = RunDir(trained.checkpoint.parent.parent)
    began_s = time.monotonic()
    if isinstance(trained.config, Recipe):
        return _evaluate_own(trained.config, trained.model, data, batch_size)
    if trained.config.chat:
        return _evaluate_chat(trained, data, batch_size)
    with _opened(run, trained.config, data) as found:
        windows = TextWindows(found, trained.config.seq_len)
        if not windows.num_windows:
            raise UsageError(
                f"{data or 'the validation set'} is shorter than one window of {trained.config.seq_len} tokens",
                hint="give more text",
            )
        total, tokens = _sum(trained, windows, batch_size)
    name = data or f"validation set of {run.name}"
    return Result(total / tokens, name, windows.num_windows, tokens, time.monotonic() - began_s)


def _evaluate_chat(trained: Trained, data: str, batch_size: int) -> Result:
    """Over the answers of conversations."""
    began_s, config = time.monotonic(), trained.config
    text, held = open_chat(replace(config, data=data, val_fraction=0.0) if data else config, lambda words: None)
    rows: SampleSet | None = SampleSet(Samples(text.rows, list, name="the conversations")) if data else held
    if rows is None:
        raise UsageError("this run kept no conversation for validation", hint="--data FILE.jsonl")
    total, tokens = 0.0, 0
    with torch.inference_mode():
        for given, _ in told(rows.read(batch_size, rows.num_windows, trained.device), rows.num_windows):
            ids, targets = split_answers(given)
            total += float(trained.model(ids, targets))
            tokens += int((targets != IGNORED).sum())
    name = data or "validation set"
    return Result(total / tokens, name, rows.num_windows, tokens, time.monotonic() - began_s)


def _sum(trained: Trained, windows: TextWindows, batch_size: int) -> tuple[float, int]:
    model, total, tokens = trained.model, 0.0, 0
    assert isinstance(model, GPT | NSAModel)
    with torch.inference_mode():
        for given, _ in told(windows.read(batch_size, windows.num_windows, trained.device), windows.num_windows):
            targets = given[:, 1:]
            total += float(model(given[:, :-1], targets))
            tokens += targets.numel()
    return total, tokens


def _report(progress: Progress) -> None:
    if progress.phase not in ("list", "done"):
        print(describe(progress), file=sys.stderr, flush=True)


def told(batches: Iterable[tuple[Any, int]], total: int) -> Iterator[tuple[Any, int]]:
    """The batches; where it takes long, a line about it every 2 s."""
    done, said_s = 0, time.monotonic()
    for given, size in batches:
        yield given, size
        done += size
        if time.monotonic() - said_s > _SILENT_S:
            said_s = time.monotonic()
            print(f"{done:,} of {total:,} samples", file=sys.stderr, flush=True)


@contextmanager
def _opened(run: RunDir, config: TrainConfig, data: str) -> Iterator[Data]:
    """All of the given text with the tokenizer of the run, or the validation split of its own."""
    if not data and not config.val_fraction:
        raise UsageError(f"run '{run.name}' kept no validation data", hint="--data FILE: a text to evaluate on")
    tokenizer = str(run.tokenizer_file) if run.tokenizer_file.exists() and data else config.tokenizer
    chosen = (
        replace(config, data=data, val_fraction=0.0, tokenizer=tokenizer, max_train_examples=0) if data else config
    )
    settings = cache_settings(chosen)
    try:
        refuse_empty(chosen)
        spec = spec_of(chosen, "train" if data else "validation")
        build_whole(cache_folder(spec, settings), settings, _report)
        opened = open_data(spec, settings, _report)
    except JacklineError as error:
        raise UsageError(f"{chosen.data} cannot be evaluated on: {error.message}", hint=error.hint) from None
    try:
        yield opened
    finally:
        opened.close()


def _evaluate_own(config: Recipe, model: nn.Module, data: str, batch_size: int) -> Result:
    """By the recipe's own `val_data` and `measure`."""
    if data:
        if "data" in config.UNUSED:
            raise UsageError(
                f"recipe '{config.recipe}' has no setting 'data'",
                hint="without --data its val_data() is evaluated; declare `data: str = ...` in its class to choose",
            )
        config = replace(config, data=data)
    began_s = time.monotonic()
    _, held = open_samples(config)
    if held is None:
        raise UsageError(f"recipe '{config.recipe}' has no val_data()", hint="define it: what is evaluated on")
    device = next(model.parameters()).device
    totals: dict[str, float] = {}
    count = 0
    with torch.inference_mode(), seeded(_SEED):
        for given, _ in told(held.read(batch_size, held.num_windows, device), held.num_windows):
            found = measured(config, model, given)
            totals["loss"] = totals.get("loss", 0.0) + float(found.loss)
            count += found.count
            for name, value in found.more.items():
                totals[name] = totals.get(name, 0.0) + float(value)
    more = {name: value / held.num_windows for name, value in totals.items() if name != "loss"}
    return Result(totals["loss"] / count, data or "val_data()", held.num_windows, 0, time.monotonic() - began_s, more)
