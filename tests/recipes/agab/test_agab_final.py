"""The table of predictions: whole, in the order of the file, and honest when the table is not what it was."""

from __future__ import annotations

import csv
from itertools import repeat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from jackline.checkpoint.engine import CheckpointEngine, EngineSettings
from jackline.recipes.agab.data.prepared import AffinitySettings, prepare_affinity
from jackline.recipes.agab.final import _load_best, _write_lines, write_predictions
from jackline.rundir.layout import RunDir
from jackline.trainer.report.console import Console
from tests.deadline import HANGS_S
from tests.recipes.agab.data.planted import write_small


def test_predictions_are_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "test_predictions.csv"
    with pytest.raises(ValueError, match="zip"):
        _write_lines(path, iter([(b"EVQ|DIQ", b"MKT")]), ["7.5,7.4\n", "8,8.1\n"])
    assert list(tmp_path.iterdir()) == []
    _write_lines(path, iter([(b"EVQ|DIQ", b"MKT"), (b"QVQ", b"MAA")]), ["7.5,7.4\n", "8,8.1\n"])
    assert path.read_text() == (
        "antibody_sequence,antigen_sequence,pKd,predicted_pKd\nEVQ|DIQ,MKT,7.5,7.4\nQVQ,MAA,8,8.1\n"
    )
    _write_lines(path, repeat((b"", b""), 1), ["7.5,7.4\n"])
    assert path.read_text() == "antibody_sequence,antigen_sequence,pKd,predicted_pKd\n,,7.5,7.4\n"
    assert list(tmp_path.iterdir()) == [path]


def test_each_prediction_stands_beside_its_own_sequences_or_beside_none(tmp_path: Path) -> None:
    table, path = write_small(tmp_path / "small.csv"), tmp_path / "test_predictions.csv"
    settings = AffinitySettings(str(table), cache_dir=tmp_path / "cache")
    data = prepare_affinity(settings, lambda line: None)
    predicted = np.linspace(6, 9, len(data.parts["test"])).astype(np.float32).astype(np.float64)

    def written() -> list[dict[str, str]]:
        with open(path, newline="") as file:
            return list(csv.DictReader(file))

    assert write_predictions(path, settings, data, predicted) == ""
    with open(table, newline="") as file:
        known = {(row["antibody_sequence"], row["antigen_sequence"]): row["pKd"] for row in csv.DictReader(file)}
    rows = written()
    # The label as the table has it, digit by digit, and every prediction as it was.
    assert [row["pKd"] for row in rows] == [
        known[row["antibody_sequence"], row["antigen_sequence"]].rstrip("0").rstrip(".") for row in rows
    ]
    assert [np.float32(row["predicted_pKd"]) for row in rows] == predicted.tolist()
    header, *lines = table.read_text().splitlines()
    for changed in (lines[::-1], lines[: len(lines) // 2]):  # in another order, and cut short
        table.write_text("\n".join([header, *changed]))
        assert write_predictions(path, settings, data, predicted) == f"{table} has changed since it was read"
        assert {row["antibody_sequence"] + row["antigen_sequence"] for row in written()} == {""}
        assert len(written()) == len(predicted)
    table.unlink()
    assert write_predictions(path, settings, data, predicted) == f"there is no file or folder {table}"
    assert len(written()) == len(predicted)


def test_a_best_head_with_a_flipped_bit_is_not_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = RunDir(tmp_path / "run")
    run_dir.path.mkdir()
    best = nn.Linear(3, 2)
    engine = CheckpointEngine(run_dir, EngineSettings())
    engine.save({"model": best}, step=5, metrics={})
    engine.close(timeout_s=HANGS_S)
    run: Any = SimpleNamespace(values={"best_step": 5}, step=9)
    head = nn.Linear(3, 2)
    parts: Any = SimpleNamespace(learner=SimpleNamespace(model=head))

    assert _load_best(parts, run, run_dir, Console()) == "the best head, of step 5"
    assert torch.equal(head.weight, best.weight)

    weights = run_dir.checkpoints / "step-00000005" / "model.safetensors"
    contents = bytearray(weights.read_bytes())
    contents[-1] ^= 1
    weights.write_bytes(contents)
    before = head.weight.clone()
    assert _load_best(parts, run, run_dir, Console()) == "the last head, of step 9"
    assert torch.equal(head.weight, before)
    assert "the best head, of step 5, cannot be loaded (" in capsys.readouterr().out
