"""`jackline run` on a machine with a GPU, in a mount namespace where there is a device file of its driver. The
driver's tool is a program that prints what a real one printed."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

import pytest

from tests.shell import Shell
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


def test_a_run_on_a_machine_with_a_gpu_is_watched_to_its_end(shell: Shell, tmp_path: Path) -> None:
    dev, smi = tmp_path / "dev", tmp_path / "bin" / "nvidia-smi"
    dev.mkdir()
    smi.parent.mkdir()
    smi.write_text(SMI)
    smi.chmod(0o755)
    make = WITH_A_DRIVER.format(dev=shlex.quote(str(dev)))
    if subprocess.run(["unshare", "--mount", "sh", "-c", make], capture_output=True, check=False).returncode:
        pytest.skip("this machine does not let its user make a mount namespace")
    shell.env["PATH"] = f"{smi.parent}:{shell.env['PATH']}"
    script = shell.script(
        "train.py", "import time\nfor step in range(9):\n    print('step', step)\n    time.sleep(1)\n"
    )
    command = shlex.join([*JACKLINE, "run", "--name", "mine", "--", "python", script])
    done = shell.call(["unshare", "--mount", "sh", "-c", f"{make}\nexec {command}"])
    assert done.code == 0, done.err
    assert "[jackline] finished after " in done.err
    machine = (shell.runs / "mine" / "supervisor.json").read_text()
    assert "NVIDIA H200" in machine
    assert (shell.runs / "mine" / "supervisor.log").read_text() == ""
