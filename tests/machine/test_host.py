"""Which machine this is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jackline.machine.host import (
    SessionEnd,
    describe_host,
    effective_cpus,
    find_container,
    find_notebook,
    find_session_end,
    parse_time_left,
)
from tests.deadline import HANGS_S
from tests.machine.test_memory import V2_MOUNT, machine, write


def test_the_description_is_plain_data_about_this_machine() -> None:
    host = describe_host()
    assert json.loads(json.dumps(host)) == host
    assert host["kernel"] == os.uname().release
    assert host["cpu_count"] == os.cpu_count()
    assert 0 < host["effective_cpus"] <= host["cpu_count"]
    assert 0 < host["memory_limit_bytes"] <= host["ram_bytes"]


@pytest.mark.parametrize(
    ("environ", "notebook"),
    [
        ({"COLAB_RELEASE_TAG": "release-1", "JPY_PARENT_PID": "1"}, "colab"),
        ({"KAGGLE_KERNEL_RUN_TYPE": "Interactive", "JPY_PARENT_PID": "1"}, "kaggle"),
        ({"JPY_PARENT_PID": "1"}, "jupyter"),
        ({"JPY_PARENT_PID": ""}, None),
        ({}, None),
    ],
)
def test_notebooks_are_told_by_their_environment(environ: dict[str, str], notebook: str | None) -> None:
    assert find_notebook(environ) == notebook


def test_containers_are_told_by_what_they_leave_behind(tmp_path: Path) -> None:
    assert find_container(tmp_path, {}) is None
    assert find_container(tmp_path, {"container": "lxc"}) == "container"
    assert find_container(tmp_path, {"APPTAINER_CONTAINER": "x.sif"}) == "apptainer"
    write(tmp_path, {"run/.containerenv": ""})
    assert find_container(tmp_path, {}) == "podman"
    write(tmp_path, {".dockerenv": ""})
    assert find_container(tmp_path, {}) == "docker"


def test_a_quota_of_cpu_time_counts_as_fewer_cpus(tmp_path: Path) -> None:
    root = machine(tmp_path, "0::/job", V2_MOUNT, {"sys/fs/cgroup/job/cpu.max": "50000 100000"})
    assert effective_cpus(root) == 0.5
    root = machine(tmp_path, "0::/job", V2_MOUNT, {"sys/fs/cgroup/job/cpu.max": "max 100000"})
    assert effective_cpus(root) == len(os.sched_getaffinity(0))


def test_a_quota_of_version_1_counts_too(tmp_path: Path) -> None:
    mount = "33 31 0:30 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
    files = {f"sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_{name}_us": count for name, count in
             (("quota", 30000), ("period", 100000))}  # fmt: skip
    assert effective_cpus(machine(tmp_path, "3:cpu,cpuacct:/job", mount, files)) == 0.3
    files["sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_quota_us"] = -1
    assert effective_cpus(machine(tmp_path, "3:cpu,cpuacct:/job", mount, files)) == len(os.sched_getaffinity(0))


def test_a_process_bound_to_one_cpu_has_one(tmp_path: Path) -> None:
    first = min(os.sched_getaffinity(0))
    code = f"import os; os.sched_setaffinity(0, {{{first}}})\nfrom jackline.machine.host import effective_cpus\n"
    code += "print(effective_cpus() <= 1)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=HANGS_S)
    assert done.stdout == "True\n", done.stderr


def first_process(root: Path, age_s: float) -> None:
    ticks = (time.clock_gettime(time.CLOCK_BOOTTIME) - age_s) * os.sysconf("SC_CLK_TCK")
    folder = root / "proc" / "1"
    folder.mkdir(parents=True)
    (folder / "stat").write_text("1 (in it) S " + "0 " * 18 + f"{max(0, ticks):.0f} 0 0\n")


def test_slurm_tells_when_its_job_ends(tmp_path: Path) -> None:
    environ = {"SLURM_JOB_ID": "41", "SLURM_JOB_END_TIME": "1794003600"}
    found = find_session_end(environ, now_s=1794000000.0, root=tmp_path)
    assert found == SessionEnd("Slurm", 1794003600.0, is_firm=True, is_told=True)
    # A shell that outlived its job has the old time in its environment.
    assert find_session_end(environ, now_s=1794003601.0, root=tmp_path) is None


def test_an_older_slurm_is_asked_with_squeue(tmp_path: Path) -> None:
    script = tmp_path / "squeue"
    script.write_text('#!/bin/sh\n[ "$*" = "-h -j 41 -o %L" ] && echo 1-02:03:04\n')
    script.chmod(0o755)
    environ = {"SLURM_JOB_ID": "41", "PATH": f"{tmp_path}:/usr/bin:/bin"}
    found = find_session_end(environ, now_s=1000.0, root=tmp_path)
    assert found == SessionEnd("Slurm", 1000.0 + 26 * 3600 + 184, is_firm=True, is_told=True)
    script.write_text("#!/bin/sh\necho UNLIMITED\n")
    assert find_session_end(environ, now_s=1000.0, root=tmp_path) is None
    assert find_session_end({**environ, "PATH": str(tmp_path / "none")}, now_s=1000.0, root=tmp_path) is None


@pytest.mark.parametrize(
    ("text", "seconds"), [("04", 4), ("03:04", 184), ("02:03:04", 7384), ("1-00:00:00", 86400), ("NOT_SET", None)]
)
def test_the_time_left_is_read_as_slurm_writes_it(text: str, seconds: float | None) -> None:
    assert parse_time_left(text) == seconds


def test_a_notebook_ends_when_its_platform_says(tmp_path: Path) -> None:
    first_process(tmp_path, 3600.0)
    now_s = time.time()
    kaggle = find_session_end({"KAGGLE_KERNEL_RUN_TYPE": "Batch"}, now_s=now_s, root=tmp_path)
    colab = find_session_end({"COLAB_RELEASE_TAG": "x"}, now_s=now_s, root=tmp_path)
    tpu = find_session_end({"KAGGLE_KERNEL_RUN_TYPE": "Batch", "TPU_NAME": "local"}, now_s=now_s, root=tmp_path)
    assert kaggle and colab and tpu
    assert (kaggle.platform, kaggle.is_firm, kaggle.is_told) == ("Kaggle", True, False)
    assert (colab.platform, colab.is_firm, colab.is_told) == ("Colab", False, False)
    assert round(kaggle.ends_at_s - tpu.ends_at_s) == pytest.approx(3 * 3600, abs=HANGS_S)
    assert find_session_end({}, now_s=now_s, root=tmp_path) is None
