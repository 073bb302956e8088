"""Whether Jackline runs in the environment of the training: `attach` must be importable there, supervision need not.

Owns the question to the other interpreter and the wording. Nothing of the user's code is imported.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import dataclass

import jackline
from jackline.extras import requirement

ASK_TIMEOUT_S = 10.0
_QUESTION = """\
import json, sys
try:
    from importlib.metadata import version
    found = version("jackline")
except Exception:
    found = None
print("::jackline-python " + json.dumps([sys.prefix, sys.executable, found]))
"""


@dataclass(frozen=True)
class OtherPython:
    """The interpreter that a person's own commands use. `version`: of the Jackline installed there, if any."""

    prefix: str
    executable: str
    version: str | None


def ask_python(interpreter: str | None = None) -> OtherPython | None:
    """The named interpreter, or what `python` means in this shell. None where there is none or it does not answer."""
    program = interpreter or shutil.which("python") or shutil.which("python3")
    if program is None:
        return None
    try:
        # -P would be right, but Python 3.10 does not know it; -I leaves the current folder out too.
        done = subprocess.run(
            [program, "-I", "-c", _QUESTION],
            capture_output=True, text=True, errors="replace", timeout=ASK_TIMEOUT_S, stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    for line in done.stdout.splitlines():
        if line.startswith("::jackline-python "):
            return OtherPython(*json.loads(line.removeprefix("::jackline-python ")))
    return None


def compare_environments(other: OtherPython | None) -> tuple[str, str] | None:
    """(text, hint) where Jackline's own environment is another one and that matters; None where it does not."""
    if other is None or other.prefix == sys.prefix:
        return None
    where = f"jackline runs in {sys.prefix}, your scripts run with {other.executable}"
    install = f"{other.executable} -m pip install {requirement('train')}"
    if other.version is None:
        return f"{where}, which has no jackline", f"run, status and why work; jackline.attach needs: {install}"
    if other.version != jackline.__version__:
        text = f"{where}: versions {jackline.__version__} and {other.version}"
        return text, f"use one version: {install}"
    return None
