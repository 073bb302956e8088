"""The table of predictions: whole, in the order of the file, and honest when the table is not what it was."""

from __future__ import annotations

import csv
from itertools import repeat
from pathlib import Path

import numpy as np
import pytest

from jackline.data.affinity.prepared import AffinitySettings, prepare_affinity
from jackline.trainer.affinity_final import _write_lines, write_predictions
from tests.data.affinity.planted import write_small


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
