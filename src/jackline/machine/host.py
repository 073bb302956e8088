"""Which machine this is: kernel, distribution, usable CPUs and RAM, notebook, container, batch job.

Owns the description that is stored with a run. Measures nothing that changes.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jackline.machine.cgroups import Mount, cgroup_folders, read_mounts
from jackline.machine.memory import effective_limit
from jackline.machine.procfs import read_fields, read_int, read_text

_NOTEBOOKS = (
    ("colab", ("COLAB_RELEASE_TAG", "COLAB_GPU", "COLAB_JUPYTER_TRANSPORT")),
    ("kaggle", ("KAGGLE_KERNEL_RUN_TYPE", "KAGGLE_URL_BASE")),
    ("jupyter", ("JPY_PARENT_PID", "JPY_SESSION_NAME", "JUPYTERHUB_USER")),
)
_JOBS = (
    ("slurm", "SLURM_JOB_ID"),
    ("kubernetes", "KUBERNETES_SERVICE_HOST"),
    ("lsf", "LSB_JOBID"),
    ("pbs", "PBS_JOBID"),
)


def describe_host(root: Path = Path("/"), environ: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Plain data for run.json and `doctor`; None where something does not apply."""
    environ = os.environ if environ is None else environ
    base = str(root).rstrip("/")
    limit = effective_limit(root=root)
    return {
        "kernel": os.uname().release,
        "architecture": os.uname().machine,
        "distribution": read_distribution(root),
        "cpu_count": os.cpu_count() or 1,
        "effective_cpus": effective_cpus(root),
        "ram_bytes": read_fields(f"{base}/proc/meminfo").get("MemTotal", 0),
        "memory_limit_bytes": limit.limit_bytes,
        "memory_limit_source": limit.source,
        "notebook": find_notebook(environ),
        "container": find_container(root, environ),
        "job": next((name for name, variable in _JOBS if environ.get(variable)), None),
        "python": ".".join(map(str, sys.version_info[:3])),
    }


def read_distribution(root: Path = Path("/")) -> str:
    for line in (read_text(f"{str(root).rstrip('/')}/etc/os-release") or "").splitlines():
        if line.startswith("PRETTY_NAME="):
            return line.partition("=")[2].strip().strip("\"'")
    return "unknown"


def effective_cpus(root: Path = Path("/")) -> float:
    """CPUs that this process may use: its affinity, or less when a cgroup limits its CPU time."""
    usable = float(len(os.sched_getaffinity(0)))
    for folder, version in cgroup_folders("cpu", root=root):
        quota = _quota_v2(folder) if version == 2 else _quota_v1(folder)
        if quota is not None:
            usable = min(usable, quota)
    return round(usable, 2)


def _quota_v2(folder: str) -> float | None:
    words = (read_text(f"{folder}/cpu.max") or "").split()
    return int(words[0]) / int(words[1]) if len(words) == 2 and words[0].isdigit() else None


def _quota_v1(folder: str) -> float | None:
    quota, period = read_int(f"{folder}/cpu.cfs_quota_us"), read_int(f"{folder}/cpu.cfs_period_us")
    return quota / period if quota and quota > 0 and period else None


def find_notebook(environ: Mapping[str, str]) -> str | None:
    """Colab and Kaggle run Jupyter too, so they are checked first."""
    return next((name for name, variables in _NOTEBOOKS if any(environ.get(key) for key in variables)), None)


def find_container(root: Path = Path("/"), environ: Mapping[str, str] | None = None) -> str | None:
    environ = os.environ if environ is None else environ
    if (root / ".dockerenv").exists():
        return "docker"
    if (root / "run/.containerenv").exists():
        return "podman"
    if environ.get("APPTAINER_CONTAINER") or environ.get("SINGULARITY_CONTAINER"):
        return "apptainer"
    mounts: list[Mount] = read_mounts(root=root)
    top = next((mount for mount in mounts if mount.point == "/"), None)
    return "container" if environ.get("container") or (top and top.filesystem == "overlay") else None
