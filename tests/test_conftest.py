"""The tests do not depend on how they were started."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
CHILD = "import signal; print([signal.getsignal(each) == signal.SIG_IGN for each in (signal.SIGINT, signal.SIGHUP)])"


def test_a_child_hears_ctrl_c_and_a_hangup_also_when_the_tests_were_started_to_ignore_them() -> None:
    code = f"import subprocess, sys; {{}}subprocess.run([sys.executable, '-c', {CHILD!r}], check=True)"

    def ignore() -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    def said(first: str) -> str:
        argv = [sys.executable, "-c", code.format(first)]
        return subprocess.run(argv, cwd=ROOT, preexec_fn=ignore, capture_output=True, text=True).stdout

    assert said("import tests.conftest; ") == "[False, False]\n"
    # Without it they are deaf, so the above is the work of it.
    assert said("") == "[True, True]\n"
