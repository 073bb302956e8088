"""The scripts people and CI run: they can be started, they parse, and those named in the README are there."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.deadline import HANGS_S

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted((ROOT / "scripts").iterdir())


def test_every_script_the_readme_names_is_there() -> None:
    named = set(re.findall(r"\bscripts/(\w+)", (ROOT / "README.md").read_text(encoding="utf-8")))
    assert {"demo", "test", "install"} <= named
    assert named <= {path.name for path in SCRIPTS}


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_a_script_can_be_started_says_what_it_does_and_stops_at_an_error(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    assert os.access(path, os.X_OK)
    assert lines[0] == "#!/usr/bin/env bash" and lines[1].startswith("# ")
    assert "set -euo pipefail" in lines
    done = subprocess.run(["bash", "-n", str(path)], capture_output=True, text=True, timeout=HANGS_S)
    assert (done.returncode, done.stderr) == (0, "")
