"""A small corpus for all tests of a worker, tokenised once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.data.corpora import make_texts


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `text/*.txt`; caches of it go into `data`."""
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "text").mkdir()
    for number, text in enumerate(make_texts(300)):
        (folder / "text" / f"{number:03d}.txt").write_text(text)
    return folder
