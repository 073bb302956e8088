"""`jackline run` on a machine with a GPU, in a mount namespace where there is a device file of its driver. The
driver's tool is a program that prints what a real one printed."""

from __future__ import annotations

import json
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.shell import Done, Shell
from tests.zoo import JACKLINE

pytestmark = pytest.mark.zoo

SMI = """#!/bin/sh
case "$*" in
  *query-compute-apps*) ;;
  *) echo "GPU-aaaa, 0, NVIDIA H200, 143771, 142241, 87, 22, 691.20, 700.00" ;;
esac
"""
# Another /dev, with the few devices that programs need and the one that a driver makes.
WITH_A_DRIVER = """
set -e
mount -t tmpfs none {dev}
for name in null zero full random urandom tty; do
  [ -e /dev/$name ] || continue
  touch {dev}/$name
  mount --bind /dev/$name {dev}/$name
done
mkdir {dev}/shm {dev}/pts
mount --bind /dev/shm {dev}/shm
ln -s /proc/self/fd {dev}/fd
touch {dev}/nvidiactl
mount --move {dev} /dev
"""


@pytest.fixture
def gpu_shell(shell: Shell, tmp_path: Path) -> Callable[..., Done]:
    """`jackline ...` on such a machine."""
    dev, smi = tmp_path / "dev", tmp_path / "bin" / "nvidia-smi"
    dev.mkdir()
    smi.parent.mkdir()
    smi.write_text(SMI)
    smi.chmod(0o755)
    make = WITH_A_DRIVER.format(dev=shlex.quote(str(dev)))
    if subprocess.run(["unshare", "--mount", "sh", "-c", make], capture_output=True, check=False).returncode:
        pytest.skip("this machine does not let its user make a mount namespace")
    shell.env["PATH"] = f"{smi.parent}:{shell.env['PATH']}"
    return lambda *words: shell.call(
        ["unshare", "--mount", "sh", "-c", f"{make}\nexec {shlex.join([*JACKLINE, *words])}"]
    )


def test_a_hang_is_found_though_a_neighbour_keeps_the_gpu_busy(shell: Shell, gpu_shell: Callable[..., Done]) -> None:
    script = shell.script(
        "hangs.py", "import threading\nprint('waits')\nthreading.Lock().acquire(); threading.Event().wait()\n"
    )
    limits = ("--stuck-after", "2", "--quiet-after", "1", "--on-stuck", "stop")
    done = gpu_shell("run", "--name", "mine", *limits, "--", "python", script)
    assert "STUCK" in done.err and "hangs.py:3" in done.err, done.err
    assert "the GPU works" not in done.err
    seen = json.loads((shell.runs / "mine" / "supervisor.json").read_text())["gpu"]
    assert [(gpu["name"], gpu["utilisation_percent"], gpu["is_ours"]) for gpu in seen] == [("NVIDIA H200", 87, False)]


def test_a_run_on_a_machine_with_a_gpu_is_watched_to_its_end(shell: Shell, gpu_shell: Callable[..., Done]) -> None:
    script = shell.script(
        "train.py", "import time\nfor step in range(9):\n    print('step', step)\n    time.sleep(1)\n"
    )
    done = gpu_shell("run", "--name", "mine", "--", "python", script)
    assert done.code == 0, done.err
    assert "[jackline] finished after " in done.err
    machine = (shell.runs / "mine" / "supervisor.json").read_text()
    assert "NVIDIA H200" in machine
    assert (shell.runs / "mine" / "supervisor.log").read_text() == ""
