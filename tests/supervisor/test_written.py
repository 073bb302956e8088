"""Where a command writes: its disks and its log, known before it ends; a leak of GPU memory told from a jump."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import deque
from pathlib import Path

from jackline.rundir.layout import RunDir
from jackline.supervisor.attempt.autopsy import lines_that_keep, steady_growth
from jackline.supervisor.attempt.written import WrittenFiles, measure
from tests.shell import wait_for

MIB = 1 << 20


def test_the_log_that_a_process_has_open_is_its_last_log(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    log = tmp_path / "logs" / "train.log"
    code = f"import sys; f = open({str(log)!r}, 'w'); f.write('ERROR lost\\n'); f.flush(); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE) as process:
        wait_for(lambda: log.exists() and log.stat().st_size, "the log")
        written = WrittenFiles(RunDir(tmp_path / "run"))
        written.poll(1.0, [process.pid])
        process.communicate()
    found = written.last_log(since_s=0.0, count=10)
    assert (found.path, found.lines, found.is_open) == (str(log), ("ERROR lost",), True)
    assert written.last_log(since_s=log.stat().st_mtime + 5, count=10).path == ""
    (disk,) = (disk for disk in written.disks([]) if disk.path == str(log))
    assert disk.total_bytes == os.statvfs(tmp_path).f_blocks * os.statvfs(tmp_path).f_frsize


def test_source_text_in_a_traceback_names_no_disk(tmp_path: Path) -> None:
    lines = (
        '  File "/w/train.py", line 4, in save',
        '    model.save_pretrained(os.environ["OUT"] + "/dev")',
        "    " + "^" * 20,
        f"OSError: cannot write '{tmp_path}/model.bin'",
    )
    places = [disk.path for disk in WrittenFiles(RunDir(tmp_path / "run")).disks(lines)]
    assert f"{tmp_path}/model.bin" in places
    lines = (lines[0], lines[1].replace("/dev", "/"), *lines[2:])
    assert "/" not in [disk.path for disk in WrittenFiles(RunDir(tmp_path / "run")).disks(lines)]


def test_each_disk_is_measured_once_and_devices_are_no_disks(tmp_path: Path) -> None:
    (tmp_path / "a").touch()
    found = measure([str(tmp_path / "a"), str(tmp_path / "not" / "there"), "/dev/full", "/proc/1/x"])
    assert [disk.path for disk in found] == [str(tmp_path / "a")]


def test_a_path_that_the_error_names_is_measured(tmp_path: Path) -> None:
    written = WrittenFiles(RunDir(tmp_path / "run"))
    line = f"OSError: cannot write '{tmp_path}/out/last.pt'"
    assert f"{tmp_path}/out/last.pt" in [disk.path for disk in written.disks([line])]


def test_growth_in_every_part_of_the_time_is_a_leak() -> None:
    leak = [(float(second), (1000 + 128 * second) * MIB) for second in range(60)]
    found = steady_growth(leak)
    assert found is not None
    assert found.grew_bytes == 59 * 128 * MIB
    warm_up = [(float(second), min(8000, 1000 + 2000 * second) * MIB) for second in range(60)]
    assert steady_growth(warm_up) is None
    spike = [(float(second), (2000 if second < 59 else 70_000) * MIB) for second in range(60)]
    assert steady_growth(spike) is None
    assert steady_growth(leak[:3]) is None
    assert steady_growth([]) is None
    assert steady_growth(deque(leak, maxlen=900)) == found  # as the supervisor keeps them


def test_lines_that_keep_a_tensor_are_found_in_the_scripts_of_the_traceback(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import torch\nlosses = []\nfor batch in data:\n    loss = model(batch)\n    losses.append(loss)\n"
        "    total += loss.item()\n    names.append(str(batch))\n    running_loss += loss\n"
    )
    tail = [
        "Traceback (most recent call last):",
        f'  File "{script}", line 4, in <module>',
        "    loss = model(batch)",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 128.00 MiB.",
    ]
    assert [frame.line for frame in lines_that_keep(tail)] == [5, 8]
    assert lines_that_keep(["ValueError: x"]) == ()
