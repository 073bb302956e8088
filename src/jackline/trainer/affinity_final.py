"""The test set, once, by the best head: its numbers, and a table of every pair with its prediction.

Owns test_predictions.csv and test_metrics.json of a run, and where the best head's weights are found again. The pairs
of the test set were seen by nothing before.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable
from itertools import repeat
from pathlib import Path

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
    """Line by line, with the sequences read again from the table; without them where it is not what it was."""
    settings, order = parts.agab.affinity_settings("cpu"), np.argsort(rows)
    rules, wanted = settings.rules(), parts.pairs.data.pkd[rows]
    numbers = [f"{wanted[place]:.8g},{predicted[place]:.8g}\n" for place in order]
    try:
        antibodies = texts_of(settings.path, rules, "antibody", rows[order])
        antigens = texts_of(settings.path, rules, "antigen", rows[order])
        _write_lines(path, zip(antibodies, antigens, strict=True), numbers)
    except (JacklineError, OSError, ValueError):
        _write_lines(path, repeat((b"", b""), len(numbers)), numbers)


def _write_lines(path: Path, sequences: Iterable[tuple[bytes, bytes]], numbers: list[str]) -> None:
    """Whole or absent. Residues and `|` need no quotes."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(temporary, "w") as file:
            file.write("antibody_sequence,antigen_sequence,pKd,predicted_pKd\n")
            for (antibody, antigen), text in zip(sequences, numbers, strict=True):
                file.write(f"{antibody.decode()},{antigen.decode()},{text}")
        os.replace(temporary, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()
