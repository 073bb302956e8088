"""Damaged text as people have it: located, counted in bytes, and never more lost than the damaged line or frame."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path

import pytest
import zstandard

from jackline.data.cache.state import Counts, Cursor, begin
from jackline.data.sources.documents import Surroundings, read_blocks
from jackline.data.spec import DataSpec
from jackline.errors import JacklineError
from tests.data.corpora import build_cache, jsonl_bytes, make_texts, read_texts, spec_of

TEXTS = make_texts(4000)


def counts_of(spec: DataSpec) -> Counts:
    *_, last = read_blocks(spec, begin(len(spec.sources)), Surroundings())
    return last.after.counts


def flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 0xFF]) + data[at + 1 :]


def undecodable(packed: bytes) -> bytes:
    """With one byte flipped in the middle, and noticed there: without a checksum that is not every byte."""
    for at in range(len(packed) // 2, len(packed)):
        try:
            zstandard.decompress(flipped(packed, at))
        except zstandard.ZstdError:
            return flipped(packed, at)
    raise AssertionError("no byte matters")


def test_one_bad_byte_in_a_large_text_loses_its_line_and_is_located(tmp_path: Path) -> None:
    lines = [f"line {number} of a long text" for number in range(200_000)]
    data = ("\n".join(lines) + "\n").encode()
    at = data.index(b"line 150000 ") + 7
    path = tmp_path / "a.txt"
    path.write_bytes(flipped(data, at))
    (text,) = read_texts(spec_of(path))
    assert text == "".join(f"{line}\n" for number, line in enumerate(lines) if number != 150_000)
    lost = counts_of(spec_of(path)).lost
    start = data.index(b"line 150000 ")
    (place,) = lost.places
    assert (place.file, place.offset, place.line) == (str(path), start, 150_001)
    assert (lost.text_bytes, lost.seen_bytes) == (len(lines[150_000]) + 1, len(data))


def test_of_a_line_without_end_only_the_words_around_a_bad_byte_are_lost(tmp_path: Path) -> None:
    data = b" ".join(b"word%d" % number for number in range(400_000))
    path = tmp_path / "a.txt"
    path.write_bytes(flipped(data, 2_500_000))
    (text,) = read_texts(spec_of(path))
    assert len(data) - len(text) == counts_of(spec_of(path)).lost.text_bytes <= 8192


@pytest.mark.parametrize("kind", ["zst", "gz"])
def test_half_of_an_archive_that_cannot_be_read_is_too_much_and_says_how_much(kind: str, tmp_path: Path) -> None:
    data = jsonl_bytes(TEXTS)
    packed = zstandard.compress(data) if kind == "zst" else gzip.compress(data)
    path = tmp_path / f"a.jsonl.{kind}"
    path.write_bytes(packed[: len(packed) // 2] if kind == "gz" else undecodable(packed))
    with pytest.raises(JacklineError) as caught:
        read_texts(spec_of(path, text_column="text"))
    text = str(caught.value)
    assert "cannot be read (" in text and "allowed 1 %" in text
    assert f"{path}: byte " in text
    allowed = spec_of(path, text_column="text", max_damaged_fraction=0.9)
    found, counts = read_texts(allowed), counts_of(allowed)
    assert found == TEXTS[: len(found)]
    lost_documents = len(TEXTS) - len(found)
    assert counts.records == pytest.approx(len(TEXTS), rel=0.1)
    assert counts.lost.records == pytest.approx(lost_documents, rel=0.2)
    if kind == "zst":  # the frame states how much text it had
        kept = len(jsonl_bytes(TEXTS[: len(found)]))
        assert counts.lost.text_bytes == len(data) - kept


@pytest.mark.parametrize("kind", ["zst", "gz"])
def test_after_a_damaged_frame_the_next_one_is_read(kind: str, tmp_path: Path) -> None:
    pack = zstandard.ZstdCompressor(write_checksum=True).compress if kind == "zst" else gzip.compress
    frames = [pack(jsonl_bytes(TEXTS[at : at + 400])) for at in range(0, 4000, 400)]
    frames[3] = flipped(frames[3], len(frames[3]) // 2)
    path = tmp_path / f"a.jsonl.{kind}"
    path.write_bytes(b"".join(frames))
    spec = spec_of(path, text_column="text", max_damaged_fraction=0.2)
    found = read_texts(spec)
    assert found[:1200] == TEXTS[:1200]
    assert found[-2400:] == TEXTS[1600:]
    start = len(b"".join(frames[:3]))
    assert start <= counts_of(spec).lost.places[0].offset < start + len(frames[3])
    for block in read_blocks(spec, begin(1), Surroundings()):
        again = Cursor.from_json(json.loads(json.dumps(Cursor(block.after).to_json())))
        *_, last = [block, *read_blocks(spec, again.state, Surroundings())]
        assert last.after.counts.lost == counts_of(spec).lost


@pytest.mark.parametrize("kind", ["zst", "gz"])
def test_a_checksum_that_does_not_match_makes_its_frame_suspect(kind: str, tmp_path: Path) -> None:
    pack = zstandard.ZstdCompressor(write_checksum=True).compress if kind == "zst" else gzip.compress
    packed = pack(jsonl_bytes(TEXTS))
    path = tmp_path / f"a.jsonl.{kind}"
    path.write_bytes(flipped(packed, len(packed) - (2 if kind == "zst" else 6)))
    with pytest.raises(JacklineError, match="with a wrong checksum"):
        read_texts(spec_of(path, text_column="text"))
    assert read_texts(spec_of(path, text_column="text", max_damaged_fraction=1.0)) == TEXTS


def test_the_limit_is_that_of_the_present_call_not_of_the_cache(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(jsonl_bytes(make_texts(9)) + b"{broken\n")
    spec = spec_of(path, text_column="text")
    with pytest.raises(JacklineError, match="1 of the first 10 records"):
        build_cache(spec, tmp_path / "cache", max_damaged_fraction=0.01)
    build_cache(spec, tmp_path / "cache", max_damaged_fraction=0.2)
    with pytest.raises(JacklineError, match="1 of the first 10 records"):
        build_cache(spec, tmp_path / "cache", max_damaged_fraction=0.01)


def test_a_cursor_of_an_earlier_version_keeps_its_meaning() -> None:
    old = {
        "sources": [["a.jsonl", [7, 0], "", False, 100, 50, 1]],
        "counts": [10, 9, 0, 0, 0],
        "damaged": {"bad JSON line": 1},
        "skip_tokens": 3,
        "documents": 9,
    }
    cursor = Cursor.from_json(old)
    assert cursor.state.counts.lost.records == 1
    assert (cursor.state.sources[0].num_lines, cursor.state.sources[0].encoding) == (-1, "")
    assert Cursor.from_json(cursor.to_json()) == cursor


# Random damage ------------------------------------------------------------------------------------------------------

LINES = [f"{number}: {text}" for number, text in enumerate(make_texts(300, 30))]


def damage(data: bytes, chosen: random.Random) -> bytes:
    """One of the things that happen to files."""
    kind = chosen.randrange(8)
    at = chosen.randrange(len(data))
    if kind == 0:
        return data[:at]
    if kind == 1:
        return data[:at] + bytes(chosen.randrange(256) for _ in range(chosen.randrange(1, 400))) + data[at:]
    if kind == 2:
        return data[:at] + b"\0" * 50 + data[at + 50 :]
    if kind == 3:
        return data.replace(b"\n", b"\r\n")
    if kind == 4:
        return data[:at] + b"\r" + data[at:]
    if kind == 5:
        return data[:at] + "naïve café à la crème\n".encode("latin-1") + data[at:]
    if kind == 6:
        return data[:at] + b"\xed\xa0\x80" + data[at:]
    for _ in range(chosen.randrange(1, 6)):
        data = flipped(data, chosen.randrange(len(data)))
    return data


def pack(data: bytes, ending: str, chosen: random.Random) -> bytes:
    step = chosen.choice([len(data), len(data) // 5 + 1])
    parts = [data[at : at + step] for at in range(0, len(data), step)]
    if ending.endswith(".gz"):
        return b"".join(gzip.compress(part, mtime=0) for part in parts)
    if ending.endswith(".zst"):
        compress = zstandard.ZstdCompressor(write_checksum=chosen.random() < 0.5).compress
        return b"".join(compress(part) for part in parts)
    return data


def content(ending: str) -> bytes:
    if ending.startswith("jsonl"):
        return b"".join(json.dumps({"text": line}, ensure_ascii=False).encode() + b"\n" for line in LINES)
    if ending.startswith("csv"):
        return b"id,text\n" + b"".join(b'%d,"%s"\n' % (number, line.encode()) for number, line in enumerate(LINES))
    return "".join(f"{line}\n" for line in LINES).encode()


def check_random_damage(seed: int, folder: Path) -> None:
    chosen = random.Random(seed)
    ending = chosen.choice(["txt", "jsonl", "csv"]) + chosen.choice(["", "", ".gz", ".zst"])
    documents = chosen.choice(["file", "line", "block"])
    path = folder / f"{seed}.{ending}"
    data = pack(content(ending), ending, chosen)
    path.write_bytes(damage(damage(data, chosen), chosen))
    spec = spec_of(path, text_column="text", documents=documents, max_damaged_fraction=1.0)
    found, counts = read_texts(spec), counts_of(spec)
    lost = counts.lost
    for text in found:
        text.encode()  # what is kept is text
    assert (read_texts(spec), counts_of(spec).lost) == (found, lost)  # the same each time
    assert bool(lost.text_bytes or lost.suspect_bytes or lost.records) == bool(counts.damaged)
    assert lost.text_bytes <= lost.seen_bytes
    if ending == "txt":
        size = path.stat().st_size
        assert lost.seen_bytes == size or counts.encodings
        if documents == "file" and not counts.encodings:
            assert len("".join(found).encode()) + lost.text_bytes == size
    untouched = set(LINES) & {line.rstrip("\r") for text in found for line in text.split("\n")}
    if not ending.endswith(("gz", "zst")) and not ending.startswith("csv"):
        whole = path.read_bytes().decode("utf-8", "surrogateescape")
        assert len(untouched) >= sum(f"{line}" in whole for line in LINES) - 12


@pytest.mark.parametrize("seed", range(0, 60, 6))
def test_random_damage_never_crashes_and_what_is_lost_is_counted(seed: int, tmp_path: Path) -> None:
    for number in range(seed, seed + 6):
        check_random_damage(number, tmp_path)


@pytest.mark.slow
def test_much_random_damage(tmp_path: Path) -> None:
    for seed in range(1000, 4000):
        check_random_damage(seed, tmp_path)


@pytest.mark.parametrize("ending", ["txt", "jsonl", "csv", "txt.gz", "jsonl.zst"])
def test_bytes_that_are_no_text_at_all_are_refused_by_name_and_offset(ending: str, tmp_path: Path) -> None:
    path = tmp_path / f"noise.{ending}"
    path.write_bytes(random.Random(3).randbytes(200_000))
    with pytest.raises(JacklineError) as caught:
        read_texts(spec_of(path, text_column="text"))
    assert f"{path}: byte " in str(caught.value)
