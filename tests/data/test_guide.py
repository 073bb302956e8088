"""The guide's own example and commands."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.deadline import HANGS_S

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "data.md"


def test_the_example_in_the_guide_runs(tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)
    environment = {**os.environ, "JACKLINE_DATA": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=HANGS_S
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "(8, 257)\n"


def test_every_option_the_guide_names_exists() -> None:
    text = GUIDE.read_text(encoding="utf-8")
    shown = subprocess.run(
        [sys.executable, "-c", "from jackline.cli.main import main; main()", "data", "prepare", "--help"],
        capture_output=True,
        text=True,
        timeout=HANGS_S,
    ).stdout
    named = set(re.findall(r"(?<!-)--[a-z][a-z-]+", text)) - {"--verify", "--rebuild"}
    assert named
    assert {option for option in named if option not in shown} == set()
