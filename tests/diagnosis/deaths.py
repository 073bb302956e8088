"""Real deaths to judge: programs are run to their end, and what they left becomes the evidence."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

from jackline.diagnosis.deaths.diagnose import diagnose
from jackline.diagnosis.deaths.evidence import Evidence, Finding
from tests.deadline import HANGS_S

GIB = 1 << 30


def evidence(**facts: Any) -> Evidence:
    """An attempt of 41 s under a limit of 8 GiB; nothing was counted, unless the test says so."""
    known: dict[str, Any] = {
        "exit_code": None,
        "signal": None,
        "duration_s": 41.0,
        "ended_at_s": 1_800_000_000.0,
        "oom_kills_in_cgroup": 0,
        "oom_kills_on_machine": 0,
        "peak_memory_bytes": 3 * GIB,
        "last_memory_bytes": 2 * GIB,
        "memory_limit_bytes": 8 * GIB,
        "memory_limit_source": "MemTotal",
    }
    return Evidence(**{**known, **facts})


def said(text: str, **facts: Any) -> Evidence:
    """It printed this and ended with exit code 1."""
    return evidence(**{"exit_code": 1, "output_tail": tuple(textwrap.dedent(text).strip("\n").splitlines()), **facts})


def run_script(folder: Path, code: str, *arguments: str, **facts: Any) -> Evidence:
    """Run a real script named train.py to its end."""
    script = folder / "train.py"
    script.write_text(textwrap.dedent(code).strip("\n") + "\n")
    return run_command([sys.executable, str(script), *arguments], cwd=folder, **facts)


def run_command(argv: list[str], *, cwd: Path, **facts: Any) -> Evidence:
    done = subprocess.run(
        argv, cwd=cwd, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=HANGS_S
    )
    code = done.returncode
    return evidence(
        exit_code=code if code >= 0 else None,
        signal=-code if code < 0 else None,
        output_tail=tuple(done.stdout.decode("utf-8", "replace").splitlines()),
        **facts,
    )


def best(found: Evidence) -> Finding:
    return diagnose(found)[0]
