"""Bytes of a file by both ways, and how each fails."""

import errno
import itertools
import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from jackline.checkpoint.format.manifest import Damage
from jackline.checkpoint.state import source as module
from jackline.checkpoint.state.source import Source

SIZE = (5 << 20) + 1234  # not whole pages


@pytest.fixture
def path(tmp_path: Path) -> Path:
    place = tmp_path / "file"
    place.write_bytes(random.Random(0).randbytes(SIZE))
    return place


@pytest.fixture
def cold(path: Path) -> Iterator[Source]:
    """The file is out of the page cache."""
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)
    source = Source(path, "file")
    if not source.is_on_disk(0, SIZE):
        pytest.skip("this file system cannot be read past its cache, or does not say what is in it")
    yield source
    source.close()


def read_all(source: Source, *, is_on_disk: bool, parts: int = 3) -> bytes:
    """Every sip into `parts` pieces of uneven lengths; what was returned must be what was filled."""
    found = bytearray(SIZE)
    step = source.sip_bytes(is_on_disk)
    for start in range(0, SIZE, step):
        sip = memoryview(found)[start : start + step]
        cuts = sorted(random.Random(start).sample(range(len(sip)), parts - 1))
        pieces = [sip[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(sip)], strict=True)]
        seen = source.read(pieces, start, is_on_disk=is_on_disk)
        assert b"".join(seen) == bytes(sip)
    return bytes(found)


def test_past_the_cache_the_same_bytes_come_into_any_pieces(path: Path, cold: Source) -> None:
    assert read_all(cold, is_on_disk=True) == path.read_bytes()


def test_reading_past_the_cache_leaves_nothing_in_it(cold: Source) -> None:
    read_all(cold, is_on_disk=True)
    assert cold.is_on_disk(0, SIZE)


def test_what_is_in_the_cache_is_read_from_it(path: Path) -> None:
    wanted = path.read_bytes()
    source = Source(path, "file")
    assert not source.is_on_disk(0, SIZE)
    assert read_all(source, is_on_disk=False) == wanted
    source.close()


def test_what_is_hashed_on_the_way_is_what_was_read_in_its_order(path: Path) -> None:
    wanted = path.read_bytes()
    source, found, seen = Source(path, "file"), bytearray(SIZE), bytearray()
    cuts = [0, 1, 4096, 700_001, 3 << 20, SIZE]
    pieces = [memoryview(found)[begin:end] for begin, end in itertools.pairwise(cuts)]
    source.read_hashed(pieces, 0, seen.extend)
    assert found == seen == wanted
    os.truncate(path, 3 << 20)
    with pytest.raises(Damage, match=r"^file ends at 3145728 bytes$"):
        source.read_hashed(pieces, 0, seen.extend)
    source.close()


@pytest.mark.parametrize("length", [1, 4096, 512 << 10, (512 << 10) + 1, 3_000_001, SIZE, 16 << 20])
def test_looks_lie_on_pages_from_the_first_byte_to_the_last(length: int) -> None:
    looks = module._looks(length)
    assert looks[0][0] == 0 and looks[-1][0] + looks[-1][1] > length - 4096
    assert all(at % 4096 == 0 and size > 0 and at + size <= length for at, size in looks)


def test_a_file_of_which_a_little_is_in_the_cache_is_on_the_disk(path: Path, cold: Source) -> None:
    fd = os.open(path, os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)  # nothing is read ahead
    os.pread(fd, 256 << 10, 1 << 20)
    os.close(fd)
    assert cold.is_on_disk(0, SIZE)


def test_a_file_that_was_cut_is_named_by_where_it_ends(path: Path, cold: Source) -> None:
    os.truncate(path, 3 << 20)
    with pytest.raises(Damage, match=r"^file ends at 3145728 bytes$"):
        read_all(cold, is_on_disk=True)
    with pytest.raises(Damage, match=r"^file ends at 3145728 bytes$"):
        read_all(cold, is_on_disk=False)


def fail_with(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(fd: int, buffer: memoryview, offset: int) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(module, "read_into", fail)


def test_a_disk_that_fails_is_damage(cold: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_with(errno.EIO, monkeypatch)
    with pytest.raises(Damage, match=r"^file cannot be read at 0 bytes: Input/output error$"):
        read_all(cold, is_on_disk=True)


def test_a_file_system_that_refuses_after_all_is_read_through_its_cache(
    path: Path, cold: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_with(errno.EINVAL, monkeypatch)
    assert read_all(cold, is_on_disk=True) == path.read_bytes()
    assert not cold.is_on_disk(0, SIZE)


def test_memory_that_looks_like_a_disk_is_read_as_a_file() -> None:
    place = Path(f"/dev/shm/jackline-test-{os.getpid()}")
    try:
        place.write_bytes(bytes(SIZE))
    except OSError as problem:
        pytest.skip(f"/dev/shm cannot be written here: {problem}")
    try:
        source = Source(place, "file")
        assert not source.is_on_disk(0, SIZE)
        assert read_all(source, is_on_disk=False) == bytes(SIZE)
        source.close()
    finally:
        place.unlink()
