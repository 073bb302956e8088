"""The tests do not depend on how they were started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.deadline import HANGS_S
from tests.marked import command_line

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


def test_tests_of_one_group_run_on_one_worker(tmp_path: Path) -> None:
    """With pytest 9.2 the groups of xdist alone have no effect."""
    for number in (1, 2):
        (tmp_path / f"test_{number}.py").write_text(
            "import os, pytest\n"
            'pytestmark = pytest.mark.xdist_group("both")\n'
            '@pytest.mark.parametrize("n", range(5))\n'
            "def test_it(n): open(os.environ['WORKERS'], 'a').write(os.environ['PYTEST_XDIST_WORKER'] + '\\n')\n"
        )
    (tmp_path / "conftest.py").write_text("from tests.conftest import pytest_xdist_make_scheduler\n")
    argv = [sys.executable, "-m", "pytest", "-q", "-n", "2", "--dist", "loadgroup", "-p", "no:cacheprovider", "."]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "WORKERS": str(tmp_path / "workers")}
    done = subprocess.run(argv, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=HANGS_S)
    assert done.returncode == 0, done.stdout + done.stderr
    workers = (tmp_path / "workers").read_text().split()
    assert len(workers) == 10 and len(set(workers)) == 1


def test_a_process_that_outlives_the_tests_fails_them_and_is_named_and_ended(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(
        "from tests.left_over import LeftOver\n"
        "def pytest_configure(config):\n"
        "    if not hasattr(config, 'workerinput'):\n"
        "        config.pluginmanager.register(LeftOver(patience_s=0.0))\n"
    )
    (tmp_path / "test_it.py").write_text(
        "import os, subprocess\n"
        "def test_it():\n"
        "    left = subprocess.Popen(['sleep', '1000'], start_new_session=True)\n"
        "    open(os.environ['LEFT'], 'w').write(str(left.pid))\n"
        "    left.returncode = 0\n"
    )
    argv = [sys.executable, "-m", "pytest", "-q", "-n", "1", "-p", "no:cacheprovider", "."]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "LEFT": str(tmp_path / "left")}
    done = subprocess.run(argv, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=HANGS_S)
    pid = (tmp_path / "left").read_text()
    assert "1 passed" in done.stdout and done.returncode == 1, done.stdout + done.stderr
    assert f"{pid} sleep 1000" in done.stdout and "test_it.py::test_it" in done.stdout
    assert command_line(int(pid)) in ("", "?")  # gone, or waiting for its new parent
