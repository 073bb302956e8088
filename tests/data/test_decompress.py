"""Compressed files: frames and members, places inside them, and damage told from the end."""

from __future__ import annotations

import gzip
import os
import random
from pathlib import Path

import pytest
import zstandard

from jackline.data.sources.bytefile import LocalFile
from jackline.data.sources.decompress import START, open_stream
from jackline.data.sources.frames import DamagedBytes, gzip_pieces, zstd_pieces
from tests.data.corpora import make_texts

RAW = "\n".join(make_texts(3000)).encode() + os.urandom(300_000) + b"\0" * 500_000
SKIPPABLE = (0x184D2A53).to_bytes(4, "little") + (11).to_bytes(4, "little") + b"passed over"


def zst_with_checksum(data: bytes) -> bytes:
    return zstandard.ZstdCompressor(write_checksum=True, write_content_size=False).compress(data)


FILES = {
    "plain": ("", RAW),
    "gz": ("gz", gzip.compress(RAW, 1)),
    "gz of members": ("gz", b"".join(gzip.compress(RAW[at : at + 99_999], 1) for at in range(0, len(RAW), 99_999))),
    "gz padded with zeros": ("gz", gzip.compress(RAW, 1) + b"\0" * 1000),
    "zst": ("zst", zstandard.compress(RAW)),
    "zst with checksum": ("zst", zst_with_checksum(RAW)),
    "zst of frames": ("zst", b"".join(zst_with_checksum(RAW[at : at + 99_999]) for at in range(0, len(RAW), 99_999))),
    "zst with skippable frames": ("zst", SKIPPABLE + zstandard.compress(RAW) + SKIPPABLE),
}


def read_all(path: Path, compression: str, at: tuple[int, ...] = START, step: int = 70_001) -> bytes:
    file = LocalFile(str(path))
    stream, out = open_stream(file, compression, at), bytearray()
    while data := stream.read(step):
        out += data
    file.close()
    return bytes(out)


@pytest.mark.parametrize("name", FILES)
def test_every_kind_of_file_is_read_whole(name: str, tmp_path: Path) -> None:
    compression, data = FILES[name]
    path = tmp_path / "file"
    path.write_bytes(data)
    assert read_all(path, compression) == RAW


@pytest.mark.parametrize("name", FILES)
def test_reading_continues_at_any_place(name: str, tmp_path: Path) -> None:
    compression, data = FILES[name]
    path = tmp_path / "file"
    path.write_bytes(data)
    chosen = random.Random(5)
    file = LocalFile(str(path))
    stream, num_read = open_stream(file, compression, START), 0
    for _ in range(12):
        num_read += len(stream.read(chosen.randrange(1, 120_000)))
        back = chosen.randrange(0, min(num_read, 50_000))
        assert read_all(path, compression, stream.place(back)) == RAW[num_read - back :]
    file.close()


def test_continuing_in_a_file_of_frames_costs_one_frame_not_the_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(FILES["zst of frames"][1])
    file = LocalFile(str(path))
    stream = open_stream(file, "zst", START)
    stream.read(500_000)
    frame_start, offset = stream.place(0)
    assert frame_start > 0
    assert offset == 500_000 - 5 * 99_999
    file.close()


@pytest.mark.parametrize("kind", ["gz", "zst"])
def test_bytes_before_a_truncation_are_given_out_and_then_it_is_named(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    whole = gzip.compress(RAW, 1) if kind == "gz" else zstandard.compress(RAW)
    path.write_bytes(whole[: len(whole) // 2])
    file = LocalFile(str(path))
    stream, out = open_stream(file, kind, START), bytearray()
    with pytest.raises(DamagedBytes, match=f"truncated {kind} file"):
        while data := stream.read(50_000):
            out += data
    assert len(out) > 1000
    assert RAW.startswith(bytes(out))
    file.close()


@pytest.mark.parametrize("kind", ["gz", "zst"])
def test_a_flipped_byte_is_damage_not_the_end(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    whole = bytearray(gzip.compress(RAW, 1) if kind == "gz" else zst_with_checksum(RAW))
    whole[-6] ^= 0xFF
    path.write_bytes(whole)
    with pytest.raises(DamagedBytes, match=f"damaged {kind} file"):
        read_all(path, kind)


@pytest.mark.parametrize("pieces", [gzip_pieces, zstd_pieces])
def test_a_file_that_expands_a_thousandfold_comes_in_small_pieces(pieces: object, tmp_path: Path) -> None:
    path = tmp_path / "bomb"
    zeros = b"\0" * (64 << 20)
    path.write_bytes(gzip.compress(zeros, 1) if pieces is gzip_pieces else zstandard.compress(zeros))
    file = LocalFile(str(path))
    sizes = [len(piece.data) for piece in pieces(file, 0)]  # type: ignore[operator]
    assert sum(sizes) == 64 << 20
    assert max(sizes) <= 1 << 20
    file.close()


def test_something_else_named_zst_is_damage(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"<html>not found</html>")
    with pytest.raises(DamagedBytes, match="damaged zst file"):
        read_all(path, "zst")
