"""From a table to arrays: what the head is given."""

from __future__ import annotations

import csv
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jackline.recipes.agab.data import features, prepared
from jackline.recipes.agab.data.pairs import Hashes
from jackline.recipes.agab.data.prepared import AffinitySettings, prepare_affinity, unique_rows
from tests.deadline import HANGS_S
from tests.recipes.agab.data.planted import planted_rule, spearman, write_planted, write_small


def test_the_arrays_are_the_table(tmp_path: Path) -> None:
    path = write_small(tmp_path / "agab_small.csv")
    lines: list[str] = []
    data = prepare_affinity(AffinitySettings(str(path), cache_dir=tmp_path / "cache"), lines.append)
    with open(path) as file:
        rows = [row for row in csv.DictReader(file) if row["pKd"] != "nan" and float(row["pKd"]) > 0]
    assert data.pkd.tolist() == [np.float32(row["pKd"]) for row in rows]
    assert (data.antibody.shape, data.antibody.dtype) == ((485, 1024), np.float16)
    assert (data.antigen.shape, data.antigen.dtype) == ((12, 1280), np.float16)
    assert isinstance(data.antibody, np.memmap)
    assert not data.antibody.flags.writeable
    assert (data.antibody_row.dtype, data.antigen_row.dtype) == (np.int32, np.int32)
    for number in (0, 100, 484):
        texts = [rows[number][name].encode() for name in ("antibody_sequence", "antigen_sequence")]
        antibody = features.EmbeddedEncoder(1024).encode(texts[:1], lambda done: None)[0]
        antigen = features.EmbeddedEncoder(1280).encode(texts[1:], lambda done: None)[0]
        assert np.array_equal(data.antibody[data.antibody_row[number]], antibody)
        assert np.array_equal(data.antigen[data.antigen_row[number]], antigen)
    assert {name: part.dtype for name, part in data.parts.items()} == dict.fromkeys(
        ("train", "validation", "test"), np.dtype(np.int64)
    )
    assert lines[0] == "500 rows read, 485 pairs used, 15 left out"
    assert lines[3].startswith("split by antigen: train ")


def test_the_fingerprint_changes_with_whatever_changes_the_arrays_and_with_nothing_else(tmp_path: Path) -> None:
    path = write_small(tmp_path / "a.csv")
    moved = tmp_path / "elsewhere.csv"
    moved.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    less = tmp_path / "less.csv"
    less.write_bytes(b"\n".join(path.read_bytes().splitlines()[:-1]))

    def fingerprint(table: Path, **settings: Any) -> tuple[str, str]:
        data = prepare_affinity(
            AffinitySettings(str(table), cache_dir=tmp_path / "cache", **settings), lambda line: None
        )
        return data.fingerprint, data.identity

    same = {fingerprint(path), fingerprint(moved), fingerprint(path, device="cpu")}
    assert len(same) == 1
    others = [fingerprint(less), fingerprint(path, seed=1), fingerprint(path, split="random")]
    others.append(fingerprint(path, pkd_range=(7.0, 9.0)))
    assert len({*same, *others}) == 5


def test_long_work_says_how_far_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_small(tmp_path / "a.csv")
    shown = threading.Event()
    original = features.EmbeddedEncoder.encode

    def slow(self: Any, sequences: list[bytes], moved: Any) -> Any:
        moved(240)
        assert shown.wait(HANGS_S)
        return original(self, sequences, moved)

    def say(line: str) -> None:
        if line.startswith("encode 240 antibodies of 485 antibodies (49 %)"):
            assert line.endswith(", with embedded")
            shown.set()

    monkeypatch.setattr(features.EmbeddedEncoder, "encode", slow)
    monkeypatch.setattr(prepared, "TICK_S", 0.02)
    prepare_affinity(AffinitySettings(str(path), cache_dir=tmp_path / "cache"), say)
    assert shown.is_set()


def test_what_an_encoder_does_not_read_is_told_on_every_call(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="language models need transformers")
    from tests.recipes.agab.data.tiny_models import write_esm

    path = tmp_path / "a.csv"
    lines = write_small(tmp_path / "small.csv").read_text().splitlines()
    path.write_text("\n".join(lines[:31]) + "\n")
    settings = AffinitySettings(
        str(path), cache_dir=tmp_path / "cache", antigen_encoder=str(write_esm(tmp_path / "esm"))
    )
    for _ in range(2):
        said: list[str] = []
        data = prepare_affinity(settings, said.append)
        assert (
            "warning: 1 of 12 antigens are longer than 1,022 residues (up to 3,000): esm reads their beginning only"
        ) in said
    assert data.antigen.shape == (12, 16)


def test_distinct_rows_are_numbered_in_the_order_of_their_first_pair() -> None:
    rng = np.random.default_rng(0)
    pool: Hashes = rng.integers(0, 2**63, (40, 2)).astype(np.uint64)
    pool[:10, 0] = pool[0, 0]  # the same first half, different sequences
    chosen = rng.integers(0, 40, 300)
    found = unique_rows(pool[chosen])
    numbers: dict[int, int] = {}
    expected = [numbers.setdefault(int(value), len(numbers)) for value in chosen]
    assert found.row.tolist() == expected
    assert np.array_equal(found.hashes, pool[list(numbers)])
    assert found.first_pair.tolist() == [chosen.tolist().index(value) for value in numbers]


def test_the_planted_rule_is_where_the_generator_says_it_is(tmp_path: Path) -> None:
    ceiling = write_planted(tmp_path / "a.csv", 600, 30, seed=5, noise=0.4)
    again = write_planted(tmp_path / "b.csv", 600, 30, seed=5, noise=0.4)
    assert (tmp_path / "a.csv").read_bytes() == (tmp_path / "b.csv").read_bytes()
    assert ceiling == again
    with open(tmp_path / "a.csv") as file:
        rows = list(csv.DictReader(file))
    rule = [planted_rule(*row["antibody_sequence"].split("|"), row["antigen_sequence"]) for row in rows]
    values = np.array([float(row["pKd"]) for row in rows])
    assert spearman(np.array(rule), values) == pytest.approx(ceiling, abs=1e-4)
    assert 0.8 < ceiling < 0.97
    assert write_planted(tmp_path / "c.csv", 50, 5, seed=5, noise=0.0) == pytest.approx(1.0)


def test_the_embedded_vectors_carry_the_rule_to_antigens_never_seen(tmp_path: Path) -> None:
    """Ridge regression on a few named features and their products: no head, no luck, and still near the ceiling."""
    ceiling = write_planted(tmp_path / "a.csv", 3000, 80, seed=6, noise=0.4)
    data = prepare_affinity(
        AffinitySettings(str(tmp_path / "a.csv"), cache_dir=tmp_path / "cache"), lambda line: None
    )
    hydropathy_charge = slice(22, 26)  # the first four properties' means of the first chain
    heavy = data.antibody[data.antibody_row, hydropathy_charge].astype(np.float64)
    light = data.antibody[data.antibody_row, 92:96].astype(np.float64)
    antigen = data.antigen[data.antigen_row, hydropathy_charge].astype(np.float64)
    parts = [np.ones((len(heavy), 1)), heavy, light, antigen]
    parts += [(one[:, :, None] * antigen[:, None, :]).reshape(len(heavy), -1) for one in (heavy, light)]
    design = np.concatenate(parts, axis=1)
    train, test = data.parts["train"], data.parts["test"]
    inner = design[train].T @ design[train] + 1e-3 * np.eye(design.shape[1])
    weights = np.linalg.solve(inner, design[train].T @ data.pkd[train])
    assert spearman(design[test] @ weights, data.pkd[test]) >= 0.9 * ceiling
