from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from jackline.checkpoint.format.catalogue import list_names
from jackline.checkpoint.format.hashing import CHUNK_BYTES, best_algorithm
from jackline.checkpoint.format.manifest import Name
from jackline.checkpoint.format.verify import verify_checkpoint
from jackline.checkpoint.writer.commit import (
    DiskFull,
    Draft,
    Unacknowledged,
    clear_leftovers,
    delete_checkpoint,
    require_space,
)
from jackline.checkpoint.writer.disk import Disk, can_write_directly
from tests.checkpoint.faults import CALLS, FaultyDisk, fail_after, fail_at
from tests.checkpoint.states import write_small
from tests.places import Unavailable, small_disk


def test_a_save_is_whole_and_leaves_nothing_else(tmp_path: Path) -> None:
    place = write_small(tmp_path, 5)
    assert place == tmp_path / "step-00000005"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000005"]
    assert verify_checkpoint(place).step == 5


def test_the_order_is_files_then_manifest_then_folder_then_rename_then_parent(tmp_path: Path) -> None:
    disk = FaultyDisk()
    write_small(tmp_path, 1, disk=disk)
    assert disk.calls == [
        "make_folder",
        *("create", "reserve", "write", "sync", "close"),  # model.safetensors
        *("create", "reserve", "write", "sync", "close"),  # state.json
        *("create", "reserve", "write", "sync", "close"),  # manifest.json
        *("sync_folder", "rename", "sync_folder"),
    ]


def test_an_error_at_any_call_leaves_no_checkpoint_and_the_older_one_whole(tmp_path: Path) -> None:
    counting = FaultyDisk()
    write_small(tmp_path, 1, disk=counting)
    last = len(counting.calls)
    for number in (errno.ENOSPC, errno.EIO):
        for nth in range(1, last):
            disk = FaultyDisk(fail_at(None, nth=nth, with_errno=number))
            with pytest.raises(OSError) as caught:
                write_small(tmp_path, 2, disk=disk)
            assert disk.num_fired == 1 and caught.value.errno == number
            assert list_names(tmp_path) == [Name(1)]
            verify_checkpoint(tmp_path / "step-00000001")
            assert not [path for path in tmp_path.iterdir() if path.name.startswith(".tmp")], disk.calls


def test_a_parent_that_cannot_be_synced_after_the_rename_is_not_acknowledged_and_not_redone(tmp_path: Path) -> None:
    disk = FaultyDisk(fail_at("sync_folder", nth=2))
    with pytest.raises(Unacknowledged) as caught:
        write_small(tmp_path, 2, disk=disk)
    assert disk.num_fired == 1
    assert caught.value.strerror == "step-00000002 is written, but its folder could not be synced"
    assert list_names(tmp_path) == [Name(2)]  # whole, and may be loaded
    verify_checkpoint(tmp_path / "step-00000002")
    assert write_small(tmp_path, 2).name == "step-00000002-r1"  # a further try stands beside it
    assert write_small(tmp_path, 3).name == "step-00000003"


def test_an_fsync_error_is_never_tried_again_on_the_same_file(tmp_path: Path) -> None:
    disk = FaultyDisk(fail_after("sync", nth=1))
    with pytest.raises(OSError):
        write_small(tmp_path, 2, disk=disk)
    assert disk.calls.count("sync") == 1 and list_names(tmp_path) == []


def test_a_step_that_stands_is_never_replaced(tmp_path: Path) -> None:
    first = write_small(tmp_path, 4, content=b"a")
    before = (first / "model.safetensors").read_bytes()
    assert write_small(tmp_path, 4, content=b"b").name == "step-00000004-r1"
    assert write_small(tmp_path, 4, content=b"c").name == "step-00000004-r2"
    assert (first / "model.safetensors").read_bytes() == before
    assert list_names(tmp_path) == [Name(4, 2), Name(4, 1), Name(4)]


@pytest.mark.parametrize(
    "size", [0, 1, 4095, 4096, 4097, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 5, 2 * CHUNK_BYTES]
)
@pytest.mark.parametrize("is_direct", [False, True])
def test_files_of_every_awkward_length_have_exactly_that_length(tmp_path: Path, size: int, is_direct: bool) -> None:
    if is_direct and not can_write_directly(tmp_path):
        pytest.skip("O_DIRECT does not work here; the way through the page cache is tested")
    import mmap

    memory = memoryview(mmap.mmap(-1, size + mmap.PAGESIZE))
    memory[:size] = os.urandom(size)
    draft = Draft(tmp_path, Name(1), best_algorithm(), Disk(), is_direct)
    file = draft.open_file("x.bin", size)
    draft.write(file, memory[: -(-size // 4096) * 4096], 0)
    entry = draft.finish_file(file)
    assert (draft.path / "x.bin").read_bytes() == memory[:size]
    assert entry.size_bytes == size and all(entry.chunks)
    draft.discard()


def test_a_file_with_a_missing_chunk_is_not_finished(tmp_path: Path) -> None:
    draft = Draft(tmp_path, Name(1), best_algorithm(), Disk())
    file = draft.open_file("x.bin", 2 * CHUNK_BYTES)
    draft.write(file, memoryview(bytes(CHUNK_BYTES)), 0)
    with pytest.raises(ValueError, match=r"x\.bin was not written whole"):
        draft.finish_file(file)
    draft.discard()
    assert list(tmp_path.iterdir()) == []


def test_short_writes_go_on_until_all_is_there(tmp_path: Path) -> None:
    class Stingy(Disk):
        def write(self, fd: int, data: memoryview, offset: int) -> int:
            return super().write(fd, data[:7], offset)

    assert verify_checkpoint(write_small(tmp_path, 1, disk=Stingy())).step == 1


def test_a_half_deleted_checkpoint_has_no_checkpoints_name(tmp_path: Path) -> None:
    place = write_small(tmp_path, 1)

    class Dying(Disk):
        def delete_folder(self, path: Path) -> None:
            (path / "manifest.json").unlink()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        delete_checkpoint(place, Dying())
    assert list_names(tmp_path) == []
    assert clear_leftovers(tmp_path, Disk()) != []
    assert list(tmp_path.iterdir()) == []


def test_what_a_dead_writer_left_is_cleared_and_nothing_else(tmp_path: Path) -> None:
    write_small(tmp_path, 1)
    (tmp_path / ".tmp-99-abcd-step-00000002").mkdir()
    (tmp_path / ".tmp-99-abcd-step-00000002" / "model.safetensors").write_bytes(b"x")
    (tmp_path / ".tmp-probe-99").write_bytes(b"")
    (tmp_path / "latest").write_text("step-00000001\n")
    (tmp_path / "my-own-notes.txt").write_text("hands off")
    assert len(clear_leftovers(tmp_path, Disk())) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "my-own-notes.txt", "step-00000001"]


def test_a_link_among_the_leftovers_is_removed_and_not_followed(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").write_text("x")
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    (folder / ".tmp-evil").symlink_to(precious)
    clear_leftovers(folder, Disk())
    assert (precious / "file").read_text() == "x" and list(folder.iterdir()) == []


def test_a_disk_without_room_is_found_before_a_byte_is_written(tmp_path: Path) -> None:
    class Small(Disk):
        def free_bytes(self, path: Path) -> int:
            return 200 << 20

    require_space(tmp_path, 100 << 20, Small())
    with pytest.raises(DiskFull) as caught:
        require_space(tmp_path, 150 << 20, Small())
    assert caught.value.free_bytes == 200 << 20
    assert caught.value.needed_bytes == (150 << 20) + (150 << 20) // 20 + (64 << 20)


def test_a_really_full_disk_loses_nothing(tmp_path: Path) -> None:
    try:
        with small_disk(tmp_path, "1M") as folder:
            for step in range(1, 100):
                try:
                    write_small(folder, step)
                except OSError as problem:
                    assert problem.errno == errno.ENOSPC
                    break
            else:
                pytest.fail("the disk never filled")
            names = list_names(folder)
            assert names[0] == Name(step - 1) and len(names) == step - 1
            for name in names:
                verify_checkpoint(folder / str(name))
    except Unavailable as reason:
        pytest.skip(str(reason))


def test_every_call_of_the_disk_can_be_made_to_fail() -> None:
    own = {name for name in vars(Disk) if not name.startswith("_")} - {"free_bytes", "write_back"}
    assert own == set(CALLS)
