"""Text that is not UTF-8: recognised and named, or left alone; never decoded wrong without a word."""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import json
from pathlib import Path

import pytest
import zstandard

from jackline.data.cache.state import Counts, Cursor, begin
from jackline.data.sources.decompress import START, open_stream
from jackline.data.sources.documents import Surroundings, find_text_columns, read_blocks
from jackline.data.sources.encoding import DecodingStream, guess
from jackline.data.spec import DataSpec
from jackline.errors import JacklineError, UsageError
from tests.data.corpora import read_texts, spec_of
from tests.data.far_end import FarEnd, serving

FRENCH = [f"{n}. La crème brûlée du café était déjà là, à côté de l'hôtel." for n in range(400)]
MIXED = [f"{n}. naïve 日本語 текст 👩 don't" for n in range(400)]
MARKS = {"utf-16-le": codecs.BOM_UTF16_LE, "utf-16-be": codecs.BOM_UTF16_BE, "utf-8": codecs.BOM_UTF8,
         "utf-32-le": codecs.BOM_UTF32_LE, "utf-32-be": codecs.BOM_UTF32_BE}  # fmt: skip


def counts_of(spec: DataSpec) -> Counts:
    *_, last = read_blocks(spec, begin(len(spec.sources)), Surroundings())
    return last.after.counts


def content(kind: str, lines: list[str]) -> str:
    if kind == "jsonl":
        return "".join(json.dumps({"text": line}, ensure_ascii=False) + "\n" for line in lines)
    if kind == "csv":
        out = io.StringIO()
        csv.writer(out).writerows([["id", "text"], *([str(n), line] for n, line in enumerate(lines))])
        return out.getvalue()
    return "".join(f"{line}\n" for line in lines)


@pytest.mark.parametrize("kind", ["txt", "jsonl", "csv"])
@pytest.mark.parametrize(
    ("codec", "has_mark", "name"),
    [
        ("utf-8", False, None),
        ("utf-8", True, "UTF-8 with a byte order mark"),
        ("utf-16-le", True, "UTF-16, little-endian"),
        ("utf-16-be", True, "UTF-16, big-endian"),
        ("utf-16-le", False, "UTF-16, little-endian"),
        ("utf-16-be", False, "UTF-16, big-endian"),
        ("utf-32-le", True, "UTF-32, little-endian"),
        ("utf-32-be", False, "UTF-32, big-endian"),
        ("cp1252", False, "Windows-1252 (Latin-1)"),
        ("latin-1", False, "Windows-1252 (Latin-1)"),
    ],
)
def test_an_encoding_is_recognised_and_named(
    codec: str, has_mark: bool, name: str | None, kind: str, tmp_path: Path
) -> None:
    lines = MIXED if codec.startswith("utf") else FRENCH
    data = (MARKS[codec] if has_mark else b"") + content(kind, lines).encode(codec)
    for number, (ending, packed) in enumerate(
        {"": data, ".gz": gzip.compress(data), ".zst": zstandard.compress(data)}.items()
    ):
        path = tmp_path / f"{number}.{kind}{ending}"
        path.write_bytes(packed)
        spec = find_text_columns(spec_of(path, documents="line"), Surroundings())
        assert read_texts(spec) == lines
        assert counts_of(spec).encodings == ({name: 1} if name else {})
        assert counts_of(spec).damaged == {}


@pytest.mark.parametrize("codec", ["utf-16-le", "utf-32-be", "cp1252", "shift_jis"])
def test_reading_resumes_inside_a_file_of_another_encoding(codec: str, tmp_path: Path) -> None:
    lines = [f"{n} {'日本語テキスト' if codec == 'shift_jis' else 'déjà vu'} and more words" for n in range(60_000)]
    path = tmp_path / "a.txt"
    path.write_bytes("".join(f"{line}\n" for line in lines).encode(codec))
    spec = spec_of(path, documents="line", encoding=codec)
    blocks = list(read_blocks(spec, begin(1), Surroundings()))
    assert len(blocks) >= 2
    num_before = 0
    for block in blocks:
        again = Cursor.from_json(json.loads(json.dumps(Cursor(block.before).to_json())))
        assert read_texts(spec, again.state) == lines[num_before:]
        num_before += len(block.texts)


def test_a_unit_that_is_not_valid_costs_its_line_and_is_located(tmp_path: Path) -> None:
    lines = [f"line {n} with words" for n in range(300)]
    data = bytearray(codecs.BOM_UTF16_LE + "".join(f"{line}\n" for line in lines).encode("utf-16-le"))
    start = data.index("line 200 ".encode("utf-16-le"))
    data[start + 4 : start + 6] = b"\x00\xd8"
    path = tmp_path / "a.txt"
    path.write_bytes(data + b"x")
    spec = spec_of(path, documents="line", max_damaged_fraction=0.1)
    assert read_texts(spec) == [*lines[:200], *lines[201:]]
    first, second = counts_of(spec).lost.places
    assert (first.offset, first.line) == (start, 201)
    assert (second.offset, second.line) == (len(data), 301)


def test_one_accent_in_ascii_is_damage_and_three_are_an_encoding() -> None:
    text = b"plain words\n" * 1000
    assert guess(text + b"caf\xe9\n")[0] == "utf-8"
    assert guess(text + b"caf\xe9 \xe0 la cr\xe8me\n")[0] == "cp1252"
    assert guess("Текст на русском языке\n".encode("cp1251") * 50)[0] == "unknown"
    assert guess("płaska łąka, żółta gęś\n".encode("cp1250") * 50)[0] == "unknown"
    assert guess("日本語のテキストです\n".encode("shift_jis") * 50)[0] == "unknown"
    assert guess("naïve\n".encode() * 50 + b"\xff\n")[0] == "utf-8"


def test_an_accent_after_a_long_ascii_text_still_decides(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"plain words\n" * 200_000 + "".join(FRENCH).encode("latin-1"))
    assert counts_of(spec_of(path)).encodings == {"Windows-1252 (Latin-1)": 1}
    assert read_texts(spec_of(path))[0].endswith("".join(FRENCH))


def test_text_in_no_known_encoding_is_refused_with_its_offset_and_read_when_it_is_named(tmp_path: Path) -> None:
    text = "plain\n" + "Текст на русском языке\n" * 50
    path = tmp_path / "a.txt"
    path.write_bytes(text.encode("cp1251"))
    with pytest.raises(JacklineError) as caught:
        read_texts(spec_of(path))
    assert f"{path}: byte 6, line 1: text in an unknown encoding" in str(caught.value)
    assert read_texts(spec_of(path, encoding="cp1251")) == [text]
    with pytest.raises(UsageError, match="there is no text encoding 'klingon'"):
        spec_of(path, encoding="klingon")
    with pytest.raises(UsageError, match="cannot be read from the middle"):
        spec_of(path, encoding="utf-7")


def test_a_remote_file_is_asked_for_once() -> None:
    data = content("txt", FRENCH * 40).encode("cp1252")
    with serving(FarEnd({"a.txt": data, "b.txt.gz": gzip.compress(data)})) as far_end:
        for name in far_end.files:
            before = len(far_end.requests)
            assert read_texts(spec_of(far_end.address(name), documents="line")) == FRENCH * 40
            assert len(far_end.requests) == before + 1


def test_the_decoded_stream_knows_the_place_of_every_character(tmp_path: Path) -> None:
    from jackline.data.sources.bytefile import LocalFile

    text = "".join(MIXED) * 10
    path = tmp_path / "a"
    path.write_bytes(text.encode("utf-16-be"))
    file = LocalFile(str(path))
    stream = DecodingStream(open_stream(file, "", START), "utf-16-be")
    assert stream.read(1 << 20) == text.encode()
    for number in range(0, len(text), 997):
        assert stream.place(len(text[number:].encode())) == (len(text[:number].encode("utf-16-be")), 0)
    file.close()
