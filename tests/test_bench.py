"""What the measuring scripts need besides being run: nothing is measured here."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def test_the_folder_that_agab_works_in_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = importlib.util.spec_from_file_location("bench_agab", ROOT / "bench" / "agab.py")
    assert spec is not None and spec.loader is not None
    agab = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(agab)
    monkeypatch.setattr(agab, "epoch", lambda options, work: {"is_there": work.is_dir()})
    monkeypatch.setattr(sys, "argv", ["agab.py", "--only", "epoch", "--work", str(tmp_path / "not" / "yet")])
    assert agab.main() == 0
    assert json.loads(capsys.readouterr().out.removeprefix("epoch"))["is_there"] is True
