"""Reading through a map of the page cache: the same bytes, and no way around a check."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from jackline.checkpoint.mapped import Mapped

SIZE = 3 * 4096 + 100


@pytest.fixture
def opened(tmp_path: Path) -> tuple[int, bytes]:
    content = os.urandom(SIZE)
    path = tmp_path / "file"
    path.write_bytes(content)
    return os.open(path, os.O_RDONLY), content


def test_what_was_just_written_is_cached_and_copied_whole(opened: tuple[int, bytes]) -> None:
    fd, content = opened
    mapped = Mapped(fd, SIZE)
    target = bytearray(SIZE - 4096)

    assert mapped.is_cached(4096, SIZE)
    mapped.copy(4096, memoryview(target))

    assert bytes(target) == content[4096:]
    mapped.close()
    os.close(fd)


def test_bytes_beyond_the_file_are_never_taken_from_the_map(opened: tuple[int, bytes]) -> None:
    fd, _ = opened
    mapped = Mapped(fd, SIZE)

    assert not mapped.is_cached(0, SIZE + 1)
    mapped.close()
    assert not mapped.is_cached(0, SIZE)
    os.close(fd)


def test_a_file_that_cannot_be_mapped_is_read_the_plain_way(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    assert not Mapped(reader, 4096).is_cached(0, 4096)
    os.close(reader)
    os.close(writer)
    (tmp_path / "empty").touch()
    fd = os.open(tmp_path / "empty", os.O_RDONLY)
    assert not Mapped(fd, 0).is_cached(0, 1)
    os.close(fd)
