"""Settings: wrong ones fail at once and by name; the fingerprint knows every setting that changes a token."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jackline.data.spec import CacheSettings, DataSpec, Rows, Source
from jackline.errors import UsageError

SPEC = DataSpec((Source("data/*.txt"),))


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: DataSpec(()), "no data source given"),
        (lambda: Source("x", weight=0), "the weight of x must be above 0, not 0"),
        (lambda: Source("x", format="docx"), "format is 'docx'"),
        (lambda: Source("x", documents="page"), "documents is 'page'"),  # type: ignore[arg-type]
        (lambda: replace(SPEC, split="test"), "split is 'test'"),
        (lambda: replace(SPEC, split="validation"), "split=validation needs validation_fraction above 0"),
        (lambda: replace(SPEC, validation_fraction=1.0), "validation_fraction must be from 0 to below 1, not 1.0"),
        (lambda: replace(SPEC, max_tokens=0), "max_tokens must be at least 1, not 0"),
        (lambda: replace(SPEC, min_chars=-1), "min_chars must be from 0 to 65536, not -1"),
        (lambda: Rows(257, 300), "rows of 257 tokens every 300 tokens would lose text or never end"),
        (lambda: CacheSettings(eras_ahead=0), "eras_ahead must be at least 1, not 0"),
    ],
)
def test_a_wrong_value_is_named(make: Any, text: str) -> None:
    with pytest.raises(UsageError) as caught:
        make()
    assert caught.value.message == text


def test_a_misspelt_setting_is_an_error_with_the_nearest_name() -> None:
    with pytest.raises(UsageError) as caught:
        DataSpec.from_json({"sources": ["x"], "max_token": 5})
    assert str(caught.value) == "error: unknown data setting 'max_token'\nhint: did you mean 'max_tokens'?"
    with pytest.raises(UsageError, match="unknown data setting 'colum'"):
        DataSpec.from_json({"sources": [{"url": "x", "colum": "y"}]})


def test_a_spec_survives_json() -> None:
    spec = replace(SPEC, rows=Rows(257, 128), split="train", validation_fraction=0.1)
    assert DataSpec.from_json(spec.to_json()) == spec
    settings = CacheSettings(root=Path("/x"), max_cache_bytes=5)
    assert CacheSettings.from_json(settings.to_json()) == settings


@pytest.mark.parametrize(
    "change",
    [
        {"tokenizer": "bytes"}, {"eos": "none"}, {"split": "train", "validation_fraction": 0.1}, {"min_chars": 1},
        {"strip": True}, {"max_examples": 5}, {"max_tokens": 5}, {"rows": Rows(9, 9)}, {"era_tokens": 1 << 27},
        {"first_era_tokens": 1 << 10}, {"sources": (Source("data/*.md"),)},
        {"sources": (Source("data/*.txt", documents="line"),)}, {"sources": (Source("data/*.txt", weight=2.0),)},
    ],
)  # fmt: skip
def test_every_setting_that_changes_a_token_changes_the_fingerprint(change: dict[str, Any]) -> None:
    assert replace(SPEC, **change).fingerprint("t") != SPEC.fingerprint("t")


def test_what_changes_no_token_does_not_change_the_fingerprint() -> None:
    assert replace(SPEC, max_damaged_fraction=0.5).fingerprint("t") == SPEC.fingerprint("t")
    assert SPEC.fingerprint("t") != SPEC.fingerprint("u")


def test_a_path_means_the_same_from_every_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    here = SPEC.fingerprint("t")
    assert DataSpec((Source(f"{tmp_path}/data/*.txt"),)).fingerprint("t") == here
    (tmp_path / "sub").mkdir()
    monkeypatch.chdir(tmp_path / "sub")
    assert SPEC.fingerprint("t") != here
