"""Disks: how much is free, and whether a path is on a file system whose rename and fsync are reliable.

Owns statvfs and what the mount table says about disks. Measures no rates.
"""

from __future__ import annotations

import os
from pathlib import Path

from jackline.machine.cgroups import Mount, read_mounts
from jackline.machine.readings import DiskReading

_REMOTE = frozenset(
    ("9p", "afs", "beegfs", "ceph", "cifs", "drvfs", "gfs2", "glusterfs", "gpfs", "lustre", "ncpfs", "smb2", "smb3")
    + ("smbfs", "sshfs", "vboxsf", "virtiofs", "vmhgfs", "wekafs")
)
_REMOTE_STARTS = ("nfs", "fuse")
_LOCAL_FUSE = frozenset(("fuse.fuse-overlayfs", "fuse.lxcfs", "fuseblk", "fusectl"))


def read_disk(path: str | Path, *, root: Path = Path("/")) -> DiskReading | None:
    """The disk that holds a path or would hold it: the nearest existing folder counts. None when we lack the
    permission. A dead network mount may block here, as it blocks every program that accesses it."""
    place = Path(path).absolute()
    while not os.path.lexists(place) and place != place.parent:
        place = place.parent
    try:
        place = place.resolve()
        status = os.statvfs(place)
    except OSError:
        return None
    mount = find_mount(str(place), read_mounts(root=root))
    filesystem = mount.filesystem if mount else "unknown"
    return DiskReading(
        path=str(path),
        free_bytes=status.f_bavail * status.f_frsize,
        total_bytes=status.f_blocks * status.f_frsize,
        filesystem=filesystem,
        is_remote=is_remote_filesystem(filesystem),
    )


def find_mount(path: str, mounts: list[Mount]) -> Mount | None:
    """The mount of a path: the longest mount point above it; of equal ones the last, which hides the others."""
    best = None
    for mount in mounts:
        is_above = mount.point == "/" or path == mount.point or path.startswith(mount.point + "/")
        if is_above and (best is None or len(mount.point) >= len(best.point)):
            best = mount
    return best


def is_remote_filesystem(filesystem: str) -> bool:
    """Whether it is FUSE or a network file system, where a rename may not be atomic and an fsync may do nothing."""
    if filesystem in _LOCAL_FUSE:
        return False
    return filesystem in _REMOTE or filesystem.startswith(_REMOTE_STARTS)
