"""`jackline predict RUN pairs.csv`: the pKd of pairs by a trained head, row by row, in a process that has torch.

Every row of the table comes back, in its order and with all its columns. One that cannot be predicted has an empty
prediction and the reason beside it. Owns reading and writing that table; encoders and head are those of the run.
"""

from __future__ import annotations

import csv
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch

from jackline.errors import JacklineError, UsageError
from jackline.recipes.agab.data.encoders import Encoder, open_encoder
from jackline.recipes.agab.data.residues import Refused, canonical_antibody, canonical_chain
from jackline.recipes.agab.data.rows import ANTIBODY, ANTIGEN
from jackline.recipes.agab.head import AffinityHead
from jackline.recipes.agab.recipe import AgabConfig
from jackline.trainer.trained.stored import find_checkpoint, read_config, read_weights
from jackline.units import count_of

PREDICTED, PROBLEM = "predicted_pKd", "problem"
SCHEMA = "jackline.predict/1"
_ROWS = 2048  # encoded and predicted at a time
_SHOWN = 20


@dataclass(frozen=True)
class Head:
    """A trained head with the encoders that it was trained over."""

    model: AffinityHead
    antibody: Encoder
    antigen: Encoder
    device: torch.device

    def predict(self, pairs: list[tuple[bytes, bytes]]) -> list[float]:
        sides = [
            _encode(encoder, texts)
            for encoder, texts in zip((self.antibody, self.antigen), zip(*pairs, strict=True), strict=True)
        ]
        features = torch.from_numpy(np.concatenate(sides, axis=1)).float().to(self.device)
        with torch.inference_mode():
            made: list[float] = self.model(features).cpu().tolist()
        return made


@dataclass
class Tally:
    rows: int = 0
    predicted: int = 0
    problems: list[dict[str, Any]] = field(default_factory=list)


def load_head(run: str, checkpoint: str, device: str, runs_dir: str | None) -> Head:
    own, folder = find_checkpoint(run, checkpoint, runs_dir)
    config = read_config(own)
    if not isinstance(config, AgabConfig):
        raise UsageError(
            f"run '{own.name}' is of recipe '{config.recipe}', which predicts no affinities",
            hint="jackline sample RUN for text; jackline.load(RUN) for the model of your own recipe",
        )
    root = Path(config.data_dir).expanduser() if config.data_dir else None
    antibody = open_encoder(config.antibody_encoder, "antibody", root, device)
    antigen = open_encoder(config.antigen_encoder, "antigen", root, device)
    weights = read_weights(folder)
    model = AffinityHead(antibody.dim + antigen.dim, dropout=0.0)
    try:
        model.load_state_dict(weights)
    except RuntimeError:
        raise JacklineError(
            f"the head of {folder.name} is not one over {antibody.name} and {antigen.name}",
            hint="have the encoders changed since the run was trained?",
        ) from None
    return Head(model.to(device).eval(), antibody, antigen, torch.device(device))


def predict_table(head: Head, source: IO[str], out: IO[str], name: str) -> Tally:
    """From one CSV to another. Raises UsageError where it is no table of pairs at all."""
    reader = csv.reader(source)
    header = [column.removeprefix("\ufeff").strip() for column in next(reader, [])]
    places = _columns(header, name)
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([*header, PREDICTED, PROBLEM])
    tally, rows = Tally(), _rows(reader)
    while chunk := list(islice(rows, _ROWS)):
        _predict_chunk(head, chunk, places, writer, tally, len(header))
    if not tally.rows:
        raise UsageError(
            f"{name} has no pairs: only a header", hint=f"columns {ANTIBODY} and {ANTIGEN}, one pair a line"
        )
    return tally


def _predict_chunk(
    head: Head, chunk: list[tuple[int, list[str]]], places: tuple[int, int], writer: Any, tally: Tally, width: int
) -> None:
    read = [_pair(cells, places) for _, cells in chunk]
    usable = [pair for pair in read if not isinstance(pair, str)]
    numbers = iter(head.predict(usable) if usable else [])
    for (line, cells), pair in zip(chunk, read, strict=True):
        tally.rows += 1
        shown, problem = "", ""
        if isinstance(pair, str):
            problem = pair
            tally.problems.append({"line": line, "problem": problem})
        else:
            shown = str(np.float32(next(numbers)))
            tally.predicted += 1
        writer.writerow([*cells, *[""] * (width - len(cells)), shown, problem])


def _rows(reader: Any) -> Iterator[tuple[int, list[str]]]:
    while True:
        line = reader.line_num + 1
        try:
            cells = next(reader)
        except StopIteration:
            return
        if cells:
            yield line, cells


def _pair(cells: list[str], places: tuple[int, int]) -> tuple[bytes, bytes] | str:
    """The two sequences, or why there are none."""
    if max(places) >= len(cells):
        return "too few columns"
    antibody, antigen = canonical_antibody(cells[places[0]]), canonical_chain(cells[places[1]])
    if isinstance(antibody, Refused):
        return _words(ANTIBODY, antibody)
    return _words(ANTIGEN, antigen) if isinstance(antigen, Refused) else (antibody, antigen)


def _words(column: str, refused: Refused) -> str:
    return f"{column}: {refused.reason}" + (f" {refused.shown}" if refused.shown else "")


def _columns(header: list[str], name: str) -> tuple[int, int]:
    lower = [column.lower() for column in header]
    missing = [wanted for wanted in (ANTIBODY, ANTIGEN) if wanted not in lower]
    if missing:
        raise UsageError(
            f"{name} has no column {' and no column '.join(missing)}",
            detail=f"its columns are: {', '.join(header[:8])}" if any(header) else "it is empty",
            hint=f"a CSV with {ANTIBODY} (heavy|light) and {ANTIGEN}; other columns stay as they are",
        )
    return lower.index(ANTIBODY), lower.index(ANTIGEN)


def _encode(encoder: Encoder, texts: tuple[bytes, ...]) -> np.ndarray[Any, Any]:
    """Each different sequence once."""
    unique = list(dict.fromkeys(texts))
    rows = {text: number for number, text in enumerate(unique)}
    vectors = encoder.encode(unique, lambda count: None)
    return vectors[[rows[text] for text in texts]]


def main() -> None:
    request = json.loads(sys.argv[1])
    try:
        _run(request)
    except JacklineError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
    except (BrokenPipeError, KeyboardInterrupt):
        sys.exit(130)


def _run(request: dict[str, Any]) -> None:
    path = Path(request["pairs"])
    head = load_head(request["run"], request["checkpoint"], request["device"], request["runs_dir"])
    out = Path(request["out"]) if request["out"] else None
    try:
        with open(path, newline="", encoding="utf-8") as source:
            tally = _write(head, source, out, str(path))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UsageError(
            f"{path} cannot be read: {error}", hint=f"a CSV in UTF-8 with {ANTIBODY} and {ANTIGEN}"
        ) from None
    if request["as_json"]:
        print(
            json.dumps(
                {
                    "schema": SCHEMA,
                    "out": str(out),
                    "rows": tally.rows,
                    "predicted": tally.predicted,
                    "problems": tally.problems,
                }
            )
        )
        return
    for one in tally.problems[:_SHOWN]:
        print(f"{path} line {one['line']}: {one['problem']}", file=sys.stderr)
    more = len(tally.problems) - _SHOWN
    rest = f", {more:,} more in the column '{PROBLEM}'" if more > 0 else ""
    bad = f"; {count_of(len(tally.problems), 'row')} without a prediction{rest}" if tally.problems else ""
    print(f"{tally.predicted:,} of {count_of(tally.rows, 'pair')} predicted{bad}", file=sys.stderr)


def _write(head: Head, source: IO[str], out: Path | None, name: str) -> Tally:
    """To a file whole or not at all; else to the standard output."""
    if out is None:
        return predict_table(head, source, sys.stdout, name)
    draft = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    try:
        with open(draft, "w", newline="", encoding="utf-8") as file:
            tally = predict_table(head, source, file, name)
        os.replace(draft, out)
    finally:
        draft.unlink(missing_ok=True)
    return tally


if __name__ == "__main__":
    main()
