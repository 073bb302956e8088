"""The test set, once, by the best head: its numbers, and a table of every pair with its prediction.

Owns test_predictions.csv and test_metrics.json of a run, and where the best head's weights are found again. The pairs
of the test set were seen by nothing before.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterable, Iterator
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load_file

from jackline.checkpoint.catalogue import list_names
from jackline.data.affinity.pairs import texts_of
from jackline.errors import JacklineError
from jackline.rundir import atomic
from jackline.rundir.layout import RunDir
from jackline.session.off import OffRun
from jackline.session.run import Run
from jackline.trainer.affinity_metrics import Metrics, interval, measure
from jackline.trainer.affinity_parts import AffinityParts
from jackline.trainer.voice import Voice

PREDICTIONS = "test_predictions.csv"
METRICS = "test_metrics.json"
Predict = Callable[[NDArray[np.int64]], NDArray[np.float64] | None]


def examine_test(
    parts: AffinityParts, run: Run | OffRun, folder: Path, voice: Voice, predict: Predict
) -> tuple[Metrics, str]:
    """(numbers, whose head it was). The weights of the loop are put back."""
    rows = np.asarray(parts.pairs.data.parts["test"], np.int64)
    kept = {name: value.clone() for name, value in parts.model.state_dict().items()}
    who = _load_best(parts, run, RunDir(folder), voice)
    try:
        predicted = predict(rows)
    finally:
        parts.model.load_state_dict(kept)
    assert predicted is not None
    found = measure(predicted, parts.pairs.data.pkd[rows])
    ends = interval(found.spearman, found.num_rows)
    numbers = {**found.numbers(), "num_distinct": found.num_distinct, "num_pairs": found.num_rows}
    record = {"head": who, **numbers, "spearman_95": list(ends) if ends else None, "why_undefined": found.why or None}
    atomic.write_json(folder / METRICS, record)
    _write_predictions(folder / PREDICTIONS, parts, rows, predicted)
    run.log({f"test_{name}": value for name, value in found.numbers().items()})
    return found, who


def _load_best(parts: AffinityParts, run: Run | OffRun, run_dir: RunDir, voice: Voice) -> str:
    """Into the model; what stands there now is used where the best one cannot be had, and that is said."""
    step = run.values.get("best_step")
    if step is None or step == run.step:
        return f"the last head, of step {run.step:,}" + (", which is the best" if step == run.step else "")
    names = [name for name in list_names(run_dir.checkpoints) if name.step == step]
    try:
        if not names:
            raise OSError("its checkpoint is not there")
        parts.model.load_state_dict(load_file(run_dir.checkpoints / str(names[0]) / "model.safetensors"))
    except (OSError, SafetensorError, RuntimeError) as error:
        voice.say(f"the best head, of step {step:,}, cannot be had ({error}): the last one is used", "test")
        return f"the last head, of step {run.step:,}"
    return f"the best head, of step {step:,}"


def _write_predictions(
    path: Path, parts: AffinityParts, rows: NDArray[np.int64], predicted: NDArray[np.float64]
) -> None:
    """With the sequences, read again from the table; without them where it is gone meanwhile."""
    wanted = parts.pairs.data.pkd[rows]
    order = np.argsort(rows)
    settings = parts.agab.affinity_settings("cpu")
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["antibody_sequence", "antigen_sequence", "pKd", "predicted_pKd"])
    rules = settings.rules()
    try:
        antibodies = texts_of(settings.path, rules, "antibody", rows[order])
        antigens = texts_of(settings.path, rules, "antigen", rows[order])
        lines = list(_lines(zip(antibodies, antigens, strict=False), order, wanted, predicted))
    except (JacklineError, OSError):
        lines = list(_lines(repeat((b"", b"")), order, wanted, predicted))
    writer.writerows(lines)
    atomic.write_whole(path, text.getvalue().encode())


def _lines(
    sequences: Iterable[tuple[bytes, bytes]], order: NDArray[Any], wanted: NDArray[Any], predicted: NDArray[Any]
) -> Iterator[list[str]]:
    for (antibody, antigen), place in zip(sequences, order, strict=False):
        yield [antibody.decode(), antigen.decode(), f"{wanted[place]:.8g}", f"{predicted[place]:.8g}"]


def read_metrics(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / METRICS).read_bytes())
    return found
