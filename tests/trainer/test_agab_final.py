"""The table of predictions: whole, in the order of the file, and honest when the table is not what it was."""

from __future__ import annotations

from itertools import repeat
from pathlib import Path

import pytest

from jackline.trainer.affinity_final import _write_lines


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
