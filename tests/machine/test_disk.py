"""Free space and kind of file system."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from jackline.machine.cgroups import read_mounts
from jackline.machine.disk import explain_refusal, find_mount, is_remote_filesystem, read_disk, used_bytes

MOUNTS = """\
27 1 254:0 / / rw,relatime - ext4 /dev/vda rw
28 27 0:25 / /content/drive rw,nosuid - fuse.drive drive rw,user_id=0
29 27 0:30 / /data\\040sets ro - nfs4 server:/export rw,vers=4.2
30 27 0:31 / /data rw - xfs /dev/vdb rw
31 27 0:32 / /data rw - tmpfs tmpfs rw
broken line
"""


def mounts(tmp_path: Path) -> Path:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/mountinfo").write_text(MOUNTS)
    return tmp_path


@pytest.mark.parametrize(
    ("path", "filesystem"),
    [
        ("/home/me/runs", "ext4"),
        ("/content/drive/MyDrive/runs", "fuse.drive"),
        ("/content/driver", "ext4"),
        ("/data sets/x", "nfs4"),
        ("/data/x", "tmpfs"),
    ],
)
def test_a_path_is_on_the_longest_and_latest_mount_above_it(tmp_path: Path, path: str, filesystem: str) -> None:
    found = find_mount(path, read_mounts(root=mounts(tmp_path)))
    assert found is not None
    assert found.filesystem == filesystem


@pytest.mark.parametrize(
    "name", ["nfs", "nfs4", "cifs", "fuse.drive", "fuse.sshfs", "fuse", "9p", "ceph", "lustre", "virtiofs"]
)
def test_network_and_fuse_file_systems_are_remote(name: str) -> None:
    assert is_remote_filesystem(name)


@pytest.mark.parametrize("name", ["ext4", "xfs", "btrfs", "tmpfs", "overlay", "zfs", "fuseblk", "unknown"])
def test_disks_of_this_machine_are_not_remote(name: str) -> None:
    assert not is_remote_filesystem(name)


def test_a_folder_that_does_not_exist_yet_counts_as_its_parent(tmp_path: Path) -> None:
    wanted = read_disk(tmp_path)
    found = read_disk(tmp_path / "runs" / "not" / "yet")
    assert wanted is not None
    assert found is not None
    assert found.path == str(tmp_path / "runs" / "not" / "yet")
    assert (found.total_bytes, found.filesystem) == (wanted.total_bytes, wanted.filesystem)
    status = os.statvfs(tmp_path)
    assert found.total_bytes == status.f_blocks * status.f_frsize
    assert 0 < found.free_bytes <= found.total_bytes


def test_a_link_counts_as_the_disk_it_points_to(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/dev")
    found, wanted = read_disk(tmp_path / "link"), read_disk("/dev")
    assert found is not None
    assert wanted is not None
    assert found.filesystem == wanted.filesystem


def test_what_folders_take_counts_each_file_once(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "file").write_bytes(bytes(100_000))
    os.sync()
    whole = used_bytes(tmp_path / "a")
    assert 100_000 <= whole < 200_000
    assert used_bytes(tmp_path / "a", tmp_path / "a", tmp_path / "a" / "b") == whole
    assert used_bytes(tmp_path / "absent") == 0


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (errno.ENOSPC, "the disk is full"),
        (errno.EDQUOT, "the disk quota is used up"),
        (errno.EROFS, "the disk is read-only"),
        (errno.EFBIG, "the file would pass the size limit (ulimit -f)"),
        (errno.EIO, "Input/output error"),
    ],
)
def test_why_a_disk_refuses_has_a_name(tmp_path: Path, number: int, text: str) -> None:
    assert explain_refusal(OSError(number, os.strerror(number)), tmp_path) == text


def test_a_disk_without_inodes_is_not_called_full(tmp_path: Path) -> None:
    from tests.places import Unavailable, fill_inodes, small_disk

    try:
        with small_disk(tmp_path, "1M", inodes=20):
            fill_inodes(tmp_path)
            with pytest.raises(OSError) as refused:
                (tmp_path / "one more").touch()
            assert explain_refusal(refused.value, tmp_path) == "the disk has no inodes left for another file"
    except Unavailable as reason:
        pytest.skip(str(reason))
