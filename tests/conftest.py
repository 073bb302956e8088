"""What every test may count on: no setting of the person who runs it reaches Jackline; nothing leaves tmp_path."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import settings

# The same examples every time, so that a change is judged by itself; HYPOTHESIS_SEARCH=1 looks for new ones.
settings.register_profile("steady", derandomize=True, deadline=None)
settings.register_profile("search", deadline=None, max_examples=500)
settings.load_profile("search" if os.environ.get("HYPOTHESIS_SEARCH") else "steady")


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Runs and the registry live under tmp_path; JACKLINE_* of the outside is gone. Returns the runs folder."""
    for name in list(os.environ):
        if name.startswith("JACKLINE"):
            monkeypatch.delenv(name)
    runs = tmp_path / "runs"
    monkeypatch.setenv("JACKLINE_RUNS", str(runs))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    # Colours and widths of the terminal that happens to run the tests must not decide what they see.
    for name in ("NO_COLOR", "FORCE_COLOR", "CLICOLOR", "CLICOLOR_FORCE", "COLUMNS", "LINES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    return runs
