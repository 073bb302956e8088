"""Disks: how much is free, and whether a path is on a file system whose rename and fsync are reliable.

Owns statvfs and what the mount table says about disks. Measures no rates.
"""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path

from jackline.immutable import immutable
from jackline.machine.cgroups import Mount, read_mounts

_REMOTE = frozenset(
    ("9p", "afs", "beegfs", "ceph", "cifs", "drvfs", "gfs2", "glusterfs", "gpfs", "lustre", "ncpfs", "smb2", "smb3")
    + ("smbfs", "sshfs", "vboxsf", "virtiofs", "vmhgfs", "wekafs")
)
_REMOTE_STARTS = ("nfs", "fuse")
_LOCAL_FUSE = frozenset(("fuse.fuse-overlayfs", "fuse.lxcfs", "fuseblk", "fusectl"))


_NO_DISKS = frozenset(
    (
        "proc",
        "sysfs",
        "cgroup",
        "cgroup2",
        "devpts",
        "mqueue",
        "debugfs",
        "tracefs",
        "securityfs",
        "pstore",
        "bpf",
        "squashfs",
    )
    + ("configfs", "hugetlbfs", "binfmt_misc", "autofs", "fusectl", "nsfs", "rpc_pipefs", "efivarfs", "iso9660")
)


@immutable
class DiskReading:
    path: str
    free_bytes: int
    total_bytes: int
    filesystem: str  # 'ext4', 'tmpfs', 'nfs4', 'fuse.drive' ...
    is_remote: bool  # FUSE, NFS and similar: rename and fsync are not reliable there


def writable_disks(*, root: Path = Path("/")) -> list[DiskReading]:
    """Every disk that is mounted here and can be written to. May block as `read_disk` may."""
    found = []
    for mount in read_mounts(root=root):
        if mount.filesystem in _NO_DISKS or mount.point.startswith(("/proc", "/sys", "/dev/pts")):
            continue
        try:
            status = os.statvfs(mount.point)
        except OSError:
            continue
        if status.f_blocks and not status.f_flag & os.ST_RDONLY:
            found.append(_reading(mount.point, status, mount.filesystem))
    return found


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
    return _reading(str(path), status, filesystem)


def _reading(path: str, status: os.statvfs_result, filesystem: str) -> DiskReading:
    return DiskReading(
        path=path,
        free_bytes=status.f_bavail * status.f_frsize,
        total_bytes=status.f_blocks * status.f_frsize,
        filesystem=filesystem,
        is_remote=is_remote_filesystem(filesystem),
    )


_FEW_INODES, _SOME_BYTES = 4, 64 << 10
# The errors with which a disk refuses to take more, or anything at all. EFBIG: `ulimit -f`.
REFUSALS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG)


def explain_refusal(error: OSError, path: str | Path) -> str:
    """Why the disk of `path` refused a write, in words: full, no inodes, quota, read-only; else the system's text."""
    if error.errno == errno.ENOSPC:
        return "the disk has no inodes left for another file" if is_out_of_inodes(path) else "the disk is full"
    known = {
        errno.EDQUOT: "the disk quota is used up",
        errno.EROFS: "the disk is read-only",
        errno.EFBIG: "the file would pass the size limit (ulimit -f)",
    }
    return known.get(error.errno or 0) or error.strerror or str(error)


def used_bytes(*folders: str | Path) -> int:
    """The disk space that the files in these folders take, holes not counted; a folder inside another counts once."""
    total, places = 0, {Path(folder).absolute() for folder in folders}
    waiting = [place for place in places if not any(above in place.parents for above in places)]
    while waiting:
        try:
            with os.scandir(waiting.pop()) as entries:
                for entry in entries:
                    with contextlib.suppress(OSError):  # deleted meanwhile
                        if entry.is_dir(follow_symlinks=False):
                            waiting.append(Path(entry.path))
                        total += entry.stat(follow_symlinks=False).st_blocks * 512
        except OSError:
            continue
    return total


def is_out_of_inodes(path: str | Path) -> bool:
    """Whether the disk of `path`, which need not exist, has room for bytes but for hardly any more files.

    Not "none at all": a file that could not be written was removed again and left its inode.
    """
    place = Path(path).absolute()
    while not os.path.lexists(place) and place != place.parent:
        place = place.parent
    try:
        status = os.statvfs(place)
    except OSError:
        return False
    return status.f_files > 0 and status.f_favail < _FEW_INODES and status.f_bavail * status.f_frsize > _SOME_BYTES


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
