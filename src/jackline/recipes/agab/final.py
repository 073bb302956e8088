"""The test set, once, by the best head: its numbers, and a table of every pair with its prediction.

Owns test_predictions.csv and test_metrics.json of a run, and where the best head's weights are found again. The pairs
of the test set were seen by nothing before.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator
from itertools import repeat
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load_file

from jackline.checkpoint.format.catalogue import list_names
from jackline.checkpoint.format.manifest import Damage
from jackline.checkpoint.format.verify import verify_checkpoint
from jackline.checkpoint.place import choose_place
from jackline.errors import JacklineError
from jackline.recipes.agab.data.pairs import texts_of
from jackline.recipes.agab.data.prepared import SIDES, AffinityData, AffinitySettings
from jackline.recipes.agab.data.residues import sequence_hash
from jackline.recipes.agab.metrics import Metrics, interval, measure
from jackline.recipes.agab.parts import AffinityParts
from jackline.rundir import atomic
from jackline.rundir.layout import RunDir
from jackline.session.off import OffRun
from jackline.session.run import Run
from jackline.trainer.report.console import Console

PREDICTIONS = "test_predictions.csv"
METRICS = "test_metrics.json"
Predict = Callable[[NDArray[np.int64]], NDArray[np.float64] | None]


def examine_test(
    parts: AffinityParts, run: Run | OffRun, folder: Path, console: Console, predict: Predict
) -> tuple[Metrics, str]:
    """(numbers, whose head it was). The weights of the loop are put back."""
    rows = np.asarray(parts.pairs.data.parts["test"], np.int64)
    kept = {name: value.clone() for name, value in parts.learner.model.state_dict().items()}
    who = _load_best(parts, run, RunDir(folder), console)
    try:
        predicted = predict(rows)
    finally:
        parts.learner.model.load_state_dict(kept)
    assert predicted is not None
    found = measure(predicted, parts.pairs.data.pkd[rows])
    ends = interval(found.spearman, found.num_rows)
    numbers = {**found.numbers(), "num_distinct": found.num_distinct, "num_pairs": found.num_rows}
    record = {"head": who, **numbers, "spearman_95": list(ends) if ends else None, "why_undefined": found.why or None}
    try:
        atomic.write_json(folder / METRICS, record)
        settings = parts.config.affinity_settings("cpu")
        trouble = write_predictions(folder / PREDICTIONS, settings, parts.pairs.data, predicted)
        if trouble:
            console.say(f"warning: {PREDICTIONS} has no sequences: {trouble}", "test")
    except OSError as error:  # a full disk must not make a failure of a training that is done
        console.say(f"warning: {PREDICTIONS} could not be written: {error}", "test")
    run.log({f"test_{name}": value for name, value in found.numbers().items()})
    return found, who


def _load_best(parts: AffinityParts, run: Run | OffRun, run_dir: RunDir, console: Console) -> str:
    """Into the model; what stands there now is used where the best one cannot be loaded, and that is said."""
    step = run.values.get("best_step")
    if step is None or step == run.step:
        return f"the last head, of step {run.step:,}" + (", which is the best" if step == run.step else "")
    trouble, checkpoints = "its checkpoint is not there", choose_place(run_dir).folder
    for name in list_names(checkpoints):  # newest first: of two of one step the one that counts
        if name.step != step:
            continue
        try:
            verify_checkpoint(checkpoints / str(name))
            parts.learner.model.load_state_dict(load_file(checkpoints / str(name) / "model.safetensors"))
        except (Damage, OSError, SafetensorError, RuntimeError) as error:
            trouble = str(error)
        else:
            return f"the best head, of step {step:,}"
    console.say(f"the best head, of step {step:,}, cannot be loaded ({trouble}): the last one is used", "test")
    return f"the last head, of step {run.step:,}"


def write_predictions(
    path: Path, settings: AffinitySettings, data: AffinityData, predicted: NDArray[np.float64]
) -> str:
    """Of the test set, in the order of the table, which is read again for the sequences. Where it is not what it was
    they are left empty, and why is returned."""
    rows = data.parts["test"]
    # The shortest digits that are the same float32: 8.32 and not 8.3199997.
    numbers = [
        f"{wanted!s},{made!s}\n" for wanted, made in zip(data.pkd[rows], predicted.astype(np.float32), strict=True)
    ]
    try:
        _write_lines(path, _sequences(settings, data, rows), numbers)
    except (JacklineError, OSError, ValueError) as error:  # ValueError: fewer rows than there were, or other bytes
        _write_lines(path, repeat((b"", b""), len(numbers)), numbers)
        if isinstance(error, ValueError):
            return f"{settings.path} has changed since it was read"
        return error.message if isinstance(error, JacklineError) else str(error)
    return ""


def _sequences(
    settings: AffinitySettings, data: AffinityData, rows: NDArray[np.int64]
) -> Iterator[tuple[bytes, bytes]]:
    """Antibody and antigen of each pair; an error when they are not those that were embedded."""
    texts = [texts_of(settings.path, settings.rules(), side, rows) for side in SIDES]
    places = data.antibody_row[rows], data.antigen_row[rows]
    for pair, *at in zip(zip(*texts, strict=True), *places, strict=True):
        for text, hashes, place in zip(pair, data.hashes, at, strict=True):
            if sequence_hash(text) != hashes[place].tobytes():
                raise ValueError("other sequences")
        yield pair


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
