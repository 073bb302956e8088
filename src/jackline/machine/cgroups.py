"""The cgroups of a process, for version 1, 2 or both mounted (hybrid), and the mount table.

Owns finding the folders under /sys from /proc/PID/cgroup and the mount table, nearest first. `memory` knows what the
files in them mean for a limit. `root` is '/' except in tests, which build a tree of realistic files.
"""

from __future__ import annotations

import functools
import os
import re
from pathlib import Path

from jackline.immutable import immutable
from jackline.machine.procfs import read_text


@immutable
class Mount:
    """One line of mountinfo."""

    root: str  # the part of the file system that is mounted
    point: str
    filesystem: str
    source: str
    options: str  # options of the file system, e.g. 'rw,memory'


@immutable
class MemoryCgroup:
    """One folder of the memory controller."""

    path: str
    version: int

    def file(self, name: str) -> str:
        return f"{self.path}/{name}"


def read_mounts(pid: int | None = None, root: Path = Path("/")) -> list[Mount]:
    """The mount table as one process sees it, in mount order: a later line hides an earlier one."""
    text = read_text(f"{_base(root)}/proc/{pid or 'self'}/mountinfo") or ""
    return list(_parse_mounts(text))


@functools.lru_cache(maxsize=8)
def _parse_mounts(text: str) -> tuple[Mount, ...]:
    # Read once a second for the limit of a run's memory, and hardly ever different.
    return tuple(mount for mount in map(_parse_mount, text.splitlines()) if mount is not None)


def _parse_mount(line: str) -> Mount | None:
    left, separator, right = line.partition(" - ")
    fields, rest = left.split(), right.split()
    if not separator or len(fields) < 5 or len(rest) < 2:
        return None
    return Mount(_plain(fields[3]), _plain(fields[4]), rest[0], _plain(rest[1]), rest[2] if len(rest) > 2 else "")


_FREEZERS = (("freezer", 1, "freezer.state", "FROZEN"), ("", 2, "cgroup.events", "frozen 1"))


def _plain(text: str) -> str:
    """Decode a path; spaces in it are written as \\040."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


def _base(root: Path) -> str:
    return str(root).rstrip("/")


def memory_cgroups(pid: int | None = None, root: Path = Path("/")) -> list[MemoryCgroup]:
    """The memory cgroups that apply to a process, nearest first, up to the top of what is mounted here."""
    return [MemoryCgroup(folder, version) for folder, version in cgroup_folders("memory", pid, root)]


def cgroup_folders(controller: str, pid: int | None = None, root: Path = Path("/")) -> list[tuple[str, int]]:
    """(folder, version) of one controller, nearest first.

    With both versions mounted only one has the controller, but both are listed: the code that reads the files skips
    those that do not exist.
    """
    text = read_text(f"{_base(root)}/proc/{pid or 'self'}/cgroup")
    if text is None:
        return []
    mounts = read_mounts(pid, root) or read_mounts(None, root)
    found: list[tuple[str, int]] = []
    for line in text.splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and controllers == "":
            held = [mount for mount in mounts if mount.filesystem == "cgroup2"]
            found += [(folder, 2) for folder in _ancestors(held, path, root)]
        elif controller in controllers.split(","):
            held = [m for m in mounts if m.filesystem == "cgroup" and controller in m.options.split(",")]
            found += [(folder, 1) for folder in _ancestors(held, path, root)]
    return found


def is_frozen(pid: int, root: Path = Path("/")) -> bool:
    """Whether the cgroup of a process is frozen now. In both versions the file says so for its ancestors too."""
    for controller, version, file, word in _FREEZERS:
        folder = next((path for path, number in cgroup_folders(controller, pid, root) if number == version), None)
        if folder is not None and word in (read_text(f"{folder}/{file}") or ""):
            return True
    return False


def _ancestors(mounts: list[Mount], path: str, root: Path) -> list[str]:
    if not mounts:
        return []
    mount = mounts[-1]
    # In a container /proc/PID/cgroup may name the host's path (/docker/abc), while exactly that folder is mounted
    # here. In a cgroup namespace the path may start with /.. . In both cases only the mount point is visible.
    inside = _inside(path, mount.root)
    top = _base(root) + mount.point.rstrip("/")
    folder = top + (f"/{inside}" if inside else "")
    if not os.path.isdir(folder):  # noqa: PTH112
        folder = top
    found = []
    while len(folder) >= len(top):
        found.append(folder)
        folder = folder.rpartition("/")[0]
    return found


def _inside(path: str, mount_root: str) -> str:
    if path.startswith("/.."):
        return ""
    if mount_root == "/":
        return path.strip("/")
    if path == mount_root or path.startswith(mount_root + "/"):
        return path[len(mount_root) :].strip("/")
    return ""
