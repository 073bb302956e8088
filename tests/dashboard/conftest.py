"""Run folders for the page: recorded ones, and one with numbers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jackline.cli.pages.told import RunTeller
from jackline.dashboard.guard import Rules
from jackline.dashboard.server import make_app
from jackline.dashboard.views import Site, key_of
from jackline.rundir.layout import RunDir
from tests.dashboard.asking import PORT, TOKEN, Served

GOLDEN = Path(__file__).parents[1] / "golden"


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with every recorded run; the user's own registry is out of sight."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    folder = tmp_path / "runs"
    for path in GOLDEN.glob("format1-*"):
        shutil.copytree(path, folder / path.name)
    return folder


@pytest.fixture
def site(runs: Path) -> Site:
    return Site(runs, RunTeller())


@pytest.fixture
def app(site: Site) -> Any:
    pytest.importorskip("starlette", reason="the extra 'dash' is not installed")
    return make_app(site, Rules(TOKEN, PORT))


@pytest.fixture
def served(runs: Path, tmp_path: Path) -> Iterator[Served]:
    """`jackline dash` on these runs."""
    found = Served(runs, tmp_path / "state")
    yield found
    found.close()


@pytest.fixture
def finished(runs: Path) -> RunDir:
    return RunDir(runs / "format1-finished")


@pytest.fixture
def key(finished: RunDir) -> str:
    return key_of(finished)


def write_metrics(run: RunDir, rows: list[dict[str, Any]], *, more: bool = False) -> None:
    with open(run.metrics(), "a" if more else "w") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
