"""Which machine this is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jackline.machine.host import describe_host, effective_cpus, find_container, find_notebook
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
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "True\n", done.stderr
