"""Files as they come: cut, empty, growing while they are read, looping links, pipes, endless lines, odd bytes."""

from __future__ import annotations

import gzip
import os
from pathlib import Path

import pytest
import zstandard

from jackline.data.cache.state import Counts, begin
from jackline.data.sources.bytefile import HttpFile, LocalFile, SourceChanged, SourceUnavailable
from jackline.data.sources.documents import Surroundings, read_blocks
from jackline.data.sources.listing import list_files
from jackline.data.sources.records import MAX_RECORD_BYTES
from jackline.data.spec import DataSpec
from tests.data.corpora import make_texts, read_texts, spec_of, write_csv, write_jsonl
from tests.data.far_end import FakeTime, FarEnd, serving


def counts_of(spec: DataSpec) -> Counts:
    *_, last = read_blocks(spec, begin(len(spec.sources)), Surroundings())
    return last.after.counts


@pytest.mark.parametrize("num_bytes", [200_000, 2_500_000])
@pytest.mark.parametrize("kind", ["gz", "zst"])
def test_a_whole_file_cut_by_a_broken_archive_is_counted(kind: str, num_bytes: int, tmp_path: Path) -> None:
    text = "\n".join(make_texts(num_bytes // 250)).encode()
    packed = gzip.compress(text) if kind == "gz" else zstandard.compress(text)
    (tmp_path / f"a.txt.{kind}").write_bytes(packed[: len(packed) * 4 // 5])
    (tmp_path / "b.txt").write_text("next")
    spec = spec_of(tmp_path, max_damaged_fraction=1.0)
    first, second = read_texts(spec)
    assert text.startswith(first.encode())
    assert len(first) > len(text) // 3
    assert second == "next"
    assert counts_of(spec).damaged == {f"truncated {kind} file": 1}


def test_rows_before_the_cut_of_a_csv_archive_are_kept(tmp_path: Path) -> None:
    texts = make_texts(600)
    packed = gzip.compress(write_csv(tmp_path / "a.csv", texts).read_bytes())
    path = tmp_path / "b.csv.gz"
    path.write_bytes(packed[: len(packed) * 2 // 3])
    spec = spec_of(path, text_column="text", max_damaged_fraction=1.0)
    found = read_texts(spec)
    assert len(found) > 300
    assert found == texts[: len(found)]
    assert counts_of(spec).damaged == {"truncated gz file": 1}


@pytest.mark.parametrize(
    "name", ["a.jsonl", "a.jsonl.zst", "a.jsonl.gz", "a.csv", "a.csv.gz", "a.parquet", "a.txt.gz"]
)
def test_an_empty_file_is_counted_where_a_record_should_be(name: str, tmp_path: Path) -> None:
    (tmp_path / f"a.{name}").write_bytes(b"")
    write_jsonl(tmp_path / "z.jsonl", make_texts(5))
    spec = spec_of(tmp_path, text_column="text", max_damaged_fraction=0.5)
    assert read_texts(spec) == make_texts(5)
    assert counts_of(spec).damaged == {"empty file": 1}


@pytest.mark.parametrize("documents", ["file", "line", "block"])
def test_an_empty_text_file_is_an_empty_document(documents: str, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"")
    (tmp_path / "b.txt").write_text("text")
    spec = spec_of(tmp_path, documents=documents)
    assert read_texts(spec) == ["text"]
    assert (counts_of(spec).empty, counts_of(spec).damaged) == (1, {})


def test_a_block_without_end_is_passed_over_as_one_record(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"before\n\n" + b"word word\n" * (MAX_RECORD_BYTES // 10 + 300_000) + b" \r\n\nafter\n")
    spec = spec_of(path, documents="block", max_damaged_fraction=1.0)
    assert read_texts(spec) == ["before", "after"]
    assert counts_of(spec).damaged == {"record longer than 32.0 MiB": 1}


@pytest.mark.parametrize(
    ("documents", "texts"),
    [
        ("file", ["one\r\ntwo\r\n \r\nthree\0x\r\n"]),
        ("line", ["one", "two", "three\0x"]),
        ("block", ["one\r\ntwo", "three\0x"]),
    ],
)
def test_marks_carriage_returns_and_nul_bytes(documents: str, texts: list[str], tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbfone\r\ntwo\r\n \r\nthree\0x\r\n")
    assert read_texts(spec_of(path, documents=documents)) == texts


def test_tables_from_another_system(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b'\xef\xbb\xbfid,text\r\n1,"x\r\ny"\r\n2,a\0b\r\n')
    (tmp_path / "b.jsonl").write_bytes(b'\xef\xbb\xbf{"text":"a\\u0000b"}\r\n\r\n{"text":"c"}\r\n')
    spec = spec_of(tmp_path)
    assert read_texts(spec) == ["x\r\ny", "a\0b", "a\0b", "c"]
    assert counts_of(spec).damaged == {}


def test_white_space_does_not_make_a_short_document_long(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ["a" + " " * 500, "\n" * 300 + "b", "c" * 10, "日本語" * 4])
    spec = spec_of(path, text_column="text", min_chars=10)
    assert read_texts(spec) == ["c" * 10, "日本語" * 4]
    assert counts_of(spec).short == 2


def test_links_that_lead_to_each_other_end(tmp_path: Path) -> None:
    for name, other in (("a", "b"), ("b", "a")):
        (tmp_path / name / "deep").mkdir(parents=True)
        (tmp_path / name / f"{name}.txt").write_text(name)
        (tmp_path / name / "deep" / "link").symlink_to(tmp_path / other)
    found = [file.name.removeprefix(f"{tmp_path}/") for file in list_files(str(tmp_path))]
    assert found == ["a/a.txt", "a/deep/link/b.txt", "b/b.txt", "b/deep/link/a.txt"]


def test_a_link_to_itself_is_named_not_left_out(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "x.txt").symlink_to(tmp_path / "x.txt")
    with pytest.raises(SourceUnavailable) as caught:
        read_texts(spec_of(tmp_path))
    assert str(caught.value) == f"error: cannot open {tmp_path}/x.txt: Too many levels of symbolic links"


def test_a_pipe_in_a_folder_is_refused_instead_of_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.txt")
    with pytest.raises(SourceUnavailable) as caught:
        read_texts(spec_of(tmp_path))
    assert str(caught.value) == (
        f"error: {tmp_path}/a.txt is not a file with bytes to go back to\n"
        "hint: pipes, sockets and devices cannot be read again after a death; write the data to a file first"
    )


@pytest.mark.parametrize("change", ["longer", "shorter", "other"])
def test_a_local_file_that_changes_while_it_is_read_is_refused(change: str, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", make_texts(9000))
    size = path.stat().st_size
    assert size > 2_000_000
    blocks = read_blocks(spec_of(path, text_column="text"), begin(1), Surroundings())
    next(blocks)
    if change == "longer":
        with open(path, "ab") as file:
            file.write(b'{"text": "more"}\n')
    elif change == "shorter":
        os.truncate(path, size - 1_000_000)
    else:
        with open(path, "r+b") as file:
            file.seek(size - 100)
            file.write(b"?")
    with pytest.raises(SourceChanged) as caught:
        list(blocks)
    now = path.stat().st_size
    what = "it was written to" if change == "other" else f"it was {size} bytes long and is {now} bytes now"
    assert str(caught.value) == (
        f"error: {path} changed while it was read: {what}\n"
        "hint: build a new cache from the file as it is now: `jackline data prepare --rebuild`"
    )


def test_an_archive_that_is_cut_while_it_is_read_is_a_change_not_damage(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    texts = make_texts(20_000)
    path.write_bytes(gzip.compress("".join(f'{{"text": "{text}"}}\n' for text in texts).encode(), 1))
    blocks = read_blocks(spec_of(path, text_column="text", max_damaged_fraction=1.0), begin(1), Surroundings())
    next(blocks)
    os.truncate(path, path.stat().st_size - 300_000)
    with pytest.raises(SourceChanged):
        list(blocks)


def test_a_new_file_under_an_old_name_does_not_disturb_who_reads_the_old_one(tmp_path: Path) -> None:
    texts = make_texts(9000)
    path = write_jsonl(tmp_path / "a.jsonl", texts)
    blocks = read_blocks(spec_of(path, text_column="text"), begin(1), Surroundings())
    found = [text.decode() for text in next(blocks).texts]
    write_jsonl(tmp_path / "new", ["other"]).replace(path)
    found += [text.decode() for block in blocks for text in block.texts]
    assert found == texts


def test_a_file_that_is_gone_in_the_middle_is_missed_not_passed_over(tmp_path: Path) -> None:
    for number in range(3):
        write_jsonl(tmp_path / f"{number}.jsonl", make_texts(9000))
    spec = spec_of(tmp_path, text_column="text")
    after = None
    for block in read_blocks(spec, begin(1), Surroundings()):
        after = block.after
        if str(after.sources[0].file).endswith("1.jsonl") and after.sources[0].at:
            break
    assert after is not None
    (tmp_path / "1.jsonl").unlink()
    with pytest.raises(SourceUnavailable) as caught:
        read_texts(spec, after)
    assert str(caught.value) == (
        f"error: {tmp_path}/1.jsonl is gone, and reading has to continue in it\n"
        "hint: put it back; nothing was skipped, and the same command resumes from there"
    )


def test_a_far_file_that_became_shorter_is_a_change_not_its_end() -> None:
    with serving(FarEnd({"a.bin": b"x" * 700_000})) as far_end:
        far_end.faults = ["drop:100000"]
        file = HttpFile(far_end.address("a.bin"), FakeTime().patience())
        assert len(file.read_at(0, 90_000)) == 90_000
        far_end.files["a.bin"] = b"x" * 50_000
        with pytest.raises(SourceChanged) as caught:
            file.read_at(90_000, 300_000)
        assert str(caught.value) == (
            f"error: {far_end.address('a.bin')} changed while it was read: it was 700000 bytes long and ends before "
            "byte 100000 now\n"
            "hint: build a new cache from the file as it is now: `jackline data prepare --rebuild`"
        )
        file.close()


def test_a_folder_named_like_a_file_is_a_folder(tmp_path: Path) -> None:
    (tmp_path / "a.txt").mkdir()
    (tmp_path / "a.txt" / "b.txt").write_text("b")
    assert read_texts(spec_of(tmp_path)) == ["b"]
    with pytest.raises(SourceUnavailable, match="is not a file with bytes to go back to"):
        LocalFile(str(tmp_path / "a.txt"))
