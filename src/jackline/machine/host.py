"""Which machine this is: kernel, distribution, CPUs and RAM, notebook, container, batch job and its end; programs.

Owns the description that is stored with a run, and when the platform takes the machine away. Measures nothing that
changes.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jackline.immutable import immutable
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

HOUR_S = 3600.0
_SQUEUE_PATIENCE_S = 5.0


@immutable
class SessionEnd:
    """When a platform ends the job or takes the machine away. `ends_at_s` is time.time().

    `is_firm`: Slurm has said so, or Kaggle publishes it as a fixed length. Colab only says "at most", and who pays
    gets more, so nothing is ended because of it.
    """

    platform: str  # 'Slurm', 'Kaggle', 'Colab'
    ends_at_s: float
    is_firm: bool
    is_told: bool = False  # by the platform itself, not computed from what it publishes


def find_session_end(environ: Mapping[str, str], *, now_s: float, root: Path = Path("/")) -> SessionEnd | None:
    """None where nothing is known, and for an end that has passed: then what is known is wrong."""
    found = _slurm_end(environ, now_s)
    if found is None and (length_s := longest_session_s(environ)) is not None:
        age_s = _session_age_s(root)
        name = (find_notebook(environ) or "").capitalize()
        if age_s is not None:
            found = SessionEnd(name, now_s - age_s + length_s, is_firm=name == "Kaggle")
    return found if found is not None and found.ends_at_s > now_s else None


def longest_session_s(environ: Mapping[str, str]) -> float | None:
    """What the notebook's platform publishes: Kaggle 12 hours (9 with a TPU), Colab 12 hours at most."""
    notebook = find_notebook(environ)
    if notebook == "kaggle":
        return 9 * HOUR_S if environ.get("TPU_NAME") or environ.get("TPU_ACCELERATOR_TYPE") else 12 * HOUR_S
    return 12 * HOUR_S if notebook == "colab" else None


def _session_age_s(root: Path) -> float | None:
    """The age of the container's first process: the machine itself may have been booted long before."""
    stat = read_text(f"{str(root).rstrip('/')}/proc/1/stat") or ""
    words = stat.rpartition(")")[2].split()
    if len(words) < 20 or not words[19].isdigit():
        return None
    started_s = int(words[19]) / os.sysconf("SC_CLK_TCK")
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started_s)


def _slurm_end(environ: Mapping[str, str], now_s: float) -> SessionEnd | None:
    """From the job's environment, which newer Slurm releases fill; else from `squeue`."""
    told = environ.get("SLURM_JOB_END_TIME", "")
    if told.isdigit():
        return SessionEnd("Slurm", float(told), is_firm=True, is_told=True)
    job = environ.get("SLURM_JOB_ID", "")
    if not job.isdigit():
        return None
    try:
        done = subprocess.run(
            ["squeue", "-h", "-j", job, "-o", "%L"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_SQUEUE_PATIENCE_S,
            env=dict(environ),
        )
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
    left_s = parse_time_left(done.stdout.strip()) if done.returncode == 0 else None
    return None if left_s is None else SessionEnd("Slurm", now_s + left_s, is_firm=True, is_told=True)


def parse_time_left(text: str) -> float | None:
    """Slurm's '1-02:03:04', '02:03:04', '03:04' or '04'; None for UNLIMITED and anything else."""
    match = re.fullmatch(r"(?:(\d+)-)?(?:(?:(\d+):)?(\d+):)?(\d+)", text)
    if match is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


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


def find_program(name: str) -> str | None:
    """`shutil.which`, without the compression libraries that `shutil` imports: 0.7 MB in every supervisor."""
    paths = (os.path.join(folder, name) for folder in os.get_exec_path())
    return next((path for path in paths if os.access(path, os.X_OK) and not os.path.isdir(path)), None)  # noqa: PTH112
