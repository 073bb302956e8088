"""Records of every format: all of them, in order, from any place; broken ones counted by reason."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path

import pytest
import zstandard

from jackline.data.sources import records as records_module
from jackline.data.sources.bytefile import LocalFile
from jackline.data.sources.decompress import START
from jackline.data.sources.formats import Layout, choose_text_column, layout_of, read_records, string_columns
from jackline.data.sources.records import MAX_RECORD_BYTES, safe_cut
from jackline.errors import UsageError
from tests.data.corpora import jsonl_bytes, make_texts, write_csv, write_gz, write_jsonl, write_parquet, write_zst


def read(
    path: Path, layout: Layout, at: tuple[int, ...] = START
) -> tuple[list[str], Counter[str], list[tuple[int, ...]]]:
    """Texts, damage by reason, and every place between runs."""
    file = LocalFile(str(path))
    texts: list[str] = []
    damaged: Counter[str] = Counter()
    places = []
    for run in read_records(file, layout, at):
        for number, text in enumerate(run.texts):
            if number == 0 and run.starts_inside and texts:
                texts[-1] += text.decode()
            else:
                texts.append(text.decode())
        damaged.update(run.damaged)
        places.append(run.after)
    file.close()
    return texts, damaged, places


TEXTS = make_texts(900, 900)


def write(kind: str, folder: Path) -> tuple[Path, Layout]:
    layout = layout_of(f"a.{kind}", column="text")
    assert layout is not None
    path = folder / f"a.{kind}"
    if kind == "jsonl":
        write_jsonl(path, TEXTS)
    elif kind == "jsonl.zst":
        write_zst(path, TEXTS, num_frames=7)
    elif kind == "jsonl.gz":
        write_gz(path, TEXTS, num_members=3)
    elif kind == "parquet":
        write_parquet(path, list(TEXTS), rows_per_group=150)
    else:
        write_csv(path, TEXTS, delimiter="\t" if kind == "tsv" else ",")
    return path, layout


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.zst", "jsonl.gz", "parquet", "csv", "tsv"])
def test_every_record_comes_once_and_reading_continues_after_any_run(kind: str, tmp_path: Path) -> None:
    path, layout = write(kind, tmp_path)
    texts, damaged, places = read(path, layout)
    assert texts == TEXTS
    assert not damaged
    assert len(places) > 2
    num_before = 0
    file = LocalFile(str(path))
    for run in read_records(file, layout):
        num_before += len(run.texts)
        assert read(path, layout, run.after)[0] == TEXTS[num_before:]
    file.close()


def test_a_whole_file_is_one_document_in_pieces_that_join_again(tmp_path: Path) -> None:
    text = " ".join(TEXTS)
    path = tmp_path / "book.txt"
    path.write_text(text, encoding="utf-8")
    texts, _, places = read(path, Layout("txt"))
    assert texts == [text]
    assert len(places) >= 2
    for place in places[:-1]:
        assert text.encode().endswith(read(path, Layout("txt"), place)[0][0].encode())


def test_lines_and_blocks_of_text(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"one\r\ntwo\n\n \n\nthree\nfour\n\n\n\nfive")
    assert read(path, Layout("txt", documents="line"))[0] == ["one", "two", " ", "three", "four", "five"]
    assert read(path, Layout("txt", documents="block"))[0] == ["one\r\ntwo", "three\nfour", "five"]


@pytest.mark.parametrize("documents", ["line", "block"])
def test_borders_of_runs_do_not_depend_on_where_reading_began(documents: str, tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("\n\n".join(TEXTS), encoding="utf-8")
    layout = Layout("txt", documents=documents)  # type: ignore[arg-type]
    texts, _, places = read(path, layout)
    assert texts == TEXTS
    for number, place in enumerate(places[:-1]):
        assert read(path, layout, place)[2] == places[number + 1 :]


def test_a_byte_order_mark_is_not_text(tmp_path: Path) -> None:
    for name, layout in [("a.jsonl", Layout("jsonl", column="text")), ("a.txt", Layout("txt"))]:
        path = tmp_path / name
        path.write_bytes(b"\xef\xbb\xbf" + (b'{"text": "hello"}\n' if name == "a.jsonl" else b"hello"))
        assert read(path, layout)[0] == ["hello"]
    path = tmp_path / "a.csv"
    path.write_bytes(b"\xef\xbb\xbftext,n\nhello,1\n")
    assert read(path, Layout("csv", column="text"))[0] == ["hello"]


def test_broken_json_lines_are_counted_by_their_cause(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(
        b'{"text": "good"}\n{"text": "cut\n\n{"other": 1}\n{"text": 5}\n{"text": null}\n'
        b'{"text": "\xff\xfe"}\n[1, 2]\n{"text": "\\ud800"}\n {"text": "also good"} \r\n{"text": "x"} {"text": "y"}\n'
    )
    texts, damaged, _ = read(path, Layout("jsonl", column="text"))
    assert texts == ["good", "", "also good"]
    assert damaged == {
        "bad JSON line": 2,
        "no text column": 2,
        "text column is not text": 1,
        "text is not valid Unicode": 2,
    }


def test_only_a_line_feed_ends_a_json_line(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    texts = ["line\u2028separator", "next\x85line", "form\x0cfeed"]
    path.write_text(
        "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts), encoding="utf-8"
    )
    assert read(path, Layout("jsonl", column="text"))[0] == texts


def test_a_record_too_long_for_memory_is_passed_over_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    huge = b'{"text": "' + b"x" * (MAX_RECORD_BYTES + 3_000_000) + b'"}\n'
    path.write_bytes(b'{"text": "before"}\n' + huge + jsonl_bytes(["after", "more"]))
    texts, damaged, _ = read(path, Layout("jsonl", column="text"))
    assert texts == ["before", "after", "more"]
    assert damaged == {"record longer than 32.0 MiB": 1}


def test_only_a_line_that_is_not_utf8_is_lost(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes("naïve".encode("latin-1"))
    assert read(path, Layout("txt"))[:2] == ([""], {"text is not valid Unicode": 1})
    path.write_bytes(b"good\n" + "naïve".encode("latin-1") + b"\nalso good\n")
    assert read(path, Layout("txt"))[:2] == (["good\nalso good\n"], {"text is not valid Unicode": 1})
    lines = tmp_path / "b.txt"
    lines.write_bytes(b"good\n" + "naïve".encode("latin-1") + b"\nalso good\n")
    assert read(lines, Layout("txt", documents="line"))[:2] == (
        ["good", "also good"],
        {"text is not valid Unicode": 1},
    )


def test_csv_rows_with_quotes_newlines_and_faults(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(
        b'id,text\n1,"two\nlines"\n2,"say ""hi"""\n3\n4,"bad"quote\n5,\xff\n6,good\n7,"never closed\nto the end\n'
    )
    texts, damaged, _ = read(path, Layout("csv", column="text"))
    assert texts == ["two\nlines", 'say "hi"', "good"]
    assert damaged == {"bad csv row": 2, "text is not valid Unicode": 1, "csv quote never closed": 1}


def test_a_csv_cell_of_many_kilobytes_is_no_fault(tmp_path: Path) -> None:
    path = write_csv(tmp_path / "a.csv", ["x" * 500_000])
    assert read(path, Layout("csv", column="text"))[0] == ["x" * 500_000]


def test_parquet_tolerates_other_columns_nulls_and_a_missing_one(tmp_path: Path) -> None:
    layout = Layout("parquet", column="text")
    path = write_parquet(tmp_path / "a.parquet", ["one", None, "three"], date=["x", "y", "z"], score=[1.0, 2.0, 3.0])
    assert read(path, layout)[:2] == (["one", "", "three"], {})
    other = tmp_path / "b.parquet"
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table({"body": ["a", "b"]}), other)
    assert read(other, layout)[:2] == ([], {"no text column": 2})


def test_a_damaged_row_group_is_counted_and_the_next_one_read(tmp_path: Path) -> None:
    texts = make_texts(120, 400)
    path = write_parquet(tmp_path / "a.parquet", list(texts), rows_per_group=40)
    data = bytearray(path.read_bytes())
    for at in range(len(data) // 2 - 60, len(data) // 2 + 60):
        data[at] ^= 0xA5
    path.write_bytes(data)
    found, damaged, _ = read(path, Layout("parquet", column="text"))
    assert list(damaged) == ["damaged parquet row group"]
    assert found[:40] == texts[:40]
    assert found[-40:] == texts[-40:]
    assert len(found) + damaged["damaged parquet row group"] == 120


def test_the_text_column_is_found_or_asked_for(tmp_path: Path) -> None:
    assert choose_text_column(["id", "text", "url"], None, "f") == "text"
    assert choose_text_column(["content", "id"], None, "f") == "content"
    assert choose_text_column(["only"], None, "f") == "only"
    with pytest.raises(UsageError) as caught:
        choose_text_column(["a", "b"], None, "x.csv")
    assert str(caught.value) == (
        "error: cannot tell which column of x.csv is the text: a, b\n"
        "hint: name it: text_column=NAME (on the command line --text-column NAME)"
    )
    with pytest.raises(UsageError) as caught:
        choose_text_column(["a", "b"], "c", "x.csv")
    assert str(caught.value) == "error: x.csv has no text column 'c'\nhint: its text columns are: a, b"
    path = write_parquet(tmp_path / "a.parquet", ["x"], n=[1])
    file = LocalFile(str(path))
    assert string_columns(file, Layout("parquet")) == ["text"]
    file.close()


@pytest.mark.parametrize(
    ("name", "container", "compression"),
    [
        ("a.jsonl", "jsonl", ""), ("a.jsonl.zst", "jsonl", "zst"), ("A.JSONL.GZ", "jsonl", "gz"),
        ("x/a.txt", "txt", ""),
        ("https://host/a.parquet?x=1", "parquet", ""), ("a.csv.gz", "csv", "gz"), ("a.tsv", "tsv", ""),
        ("a.py", "txt", ""),
    ],
)  # fmt: skip
def test_names_say_the_format(name: str, container: str, compression: str) -> None:
    layout = layout_of(name)
    assert layout is not None
    assert (layout.container, layout.compression) == (container, compression)


def test_a_name_that_says_nothing_says_nothing() -> None:
    assert layout_of("README") is None
    assert layout_of("a.bin") is None
    assert layout_of("a.bin", "jsonl") == Layout("jsonl")


def test_long_text_is_cut_between_two_words() -> None:
    text = b"alpha beta gamma"
    cut = safe_cut(text, 11)
    assert (text[:cut], text[cut:]) == (b"alpha", b" beta gamma")
    japanese = "日本語".encode() * 10
    for limit in range(4, 90):
        japanese[: safe_cut(japanese, limit)].decode()
    assert safe_cut(b"x" * 50, 20) == 20


def test_a_run_is_a_mebibyte() -> None:
    assert records_module.RUN_BYTES == 1 << 20


LINES = {
    "plain": jsonl_bytes(make_texts(50)),
    "byte order mark": b"\xef\xbb\xbf" + jsonl_bytes(make_texts(3)),
    "no last line end": jsonl_bytes(make_texts(3))[:-1],
    "blank lines and CR LF": jsonl_bytes(make_texts(4)).replace(b"\n", b"\r\n\n"),
    "broken": b'{"text": "a"}\n{"text": \n[1]\n\xff\n{"other": 1}\n{"text": "b"}\n',
    "longer than any record": jsonl_bytes(["before", "HUGE", "after"]),
    "one mark and nothing else": b"\xef\xbb\xbf",
}


@pytest.mark.parametrize("kind", LINES)
@pytest.mark.parametrize("ending", ["jsonl", "jsonl.zst", "jsonl.gz"])
def test_lines_as_they_arrive_are_the_lines_of_whole_runs_each_with_its_own_place(
    kind: str, ending: str, tmp_path: Path
) -> None:
    path = tmp_path / f"a.{ending}"
    pack = {"jsonl": bytes, "jsonl.zst": zstandard.compress, "jsonl.gz": gzip.compress}[ending]
    path.write_bytes(pack(LINES[kind].replace(b"HUGE", b"x" * (MAX_RECORD_BYTES + 3_000_000))))
    layout = layout_of(path.name, column="text")
    assert layout is not None
    texts, damaged, _ = read(path, layout)
    file = LocalFile(str(path))
    runs = list(read_records(file, layout, is_live=True))
    assert [text.decode() for run in runs for text in run.texts] == texts
    assert sum((Counter(run.damaged) for run in runs), Counter()) == damaged
    assert all(len(run.texts) + sum(run.damaged.values()) <= 1 for run in runs)
    for number in range(0, len(runs), 7):
        rest = read_records(file, layout, runs[number].after, is_live=True)
        assert [run.texts for run in rest] == [run.texts for run in runs[number + 1 :]]
    file.close()


def table(num_rows: int, *, lost: tuple[int, ...]) -> bytes:
    """A table in which some rows have an opening quote that nothing closes; `""` in the others closes none."""
    rows = (
        b'%d,"",text %d\n' % (number, number) if number not in lost else b'%d,x,"lost\n' % number
        for number in range(num_rows)
    )
    return b"id,note,text\n" + b"".join(rows)


def test_rows_behind_a_csv_quote_that_never_closes_are_read(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(table(50, lost=(5,)) + b"51,too few\n")
    texts, damaged, _ = read(path, Layout("csv", column="text"))
    assert texts == [f"text {number}" for number in range(50) if number != 5]
    assert damaged == {"csv quote never closed": 1, "bad csv row": 1}


def test_a_csv_cell_that_was_cut_off_gives_no_documents(tmp_path: Path) -> None:
    """Its lines are prose, now and then with as many commas as the table has."""
    path = tmp_path / "a.csv"
    prose = b"".join(b"line %d%s\n" % (number, b", with a comma" * (number % 3)) for number in range(300))
    path.write_bytes(b'id,text\n1,good\n2,"' + prose)
    assert read(path, Layout("csv", column="text"))[:2] == (["good"], {"csv quote never closed": 1})
    path.write_bytes(b'text\ngood\n"cut off\n' + b"like a row\n" * 300)
    assert read(path, Layout("csv", column="text"))[:2] == (["good"], {"csv quote never closed": 1})


@pytest.mark.parametrize("ending", ["csv", "csv.gz"])
def test_a_csv_record_without_end_is_given_up_at_its_limit_and_reading_continues_behind_its_quote(
    tmp_path: Path, ending: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jackline.data.sources.tables.MAX_RECORD_BYTES", 1 << 18)
    data = table(60_000, lost=(7, 50_000))
    path = tmp_path / f"a.{ending}"
    path.write_bytes(gzip.compress(data, 1) if ending == "csv.gz" else data)
    layout = layout_of(path.name, column="text")
    assert layout is not None
    texts, damaged, places = read(path, layout)
    assert texts == [f"text {number}" for number in range(60_000) if number not in (7, 50_000)]
    assert damaged == {"csv quote never closed": 2}
    assert len(places) > 2
    lengths = []
    for at in places:  # the same from every place between runs
        again = read(path, layout, at)[0]
        lengths.append(len(again))
        assert again == texts[len(texts) - len(again) :]
    assert sorted(lengths, reverse=True) == lengths and 0 < lengths[0] < 50_000


def test_csv_lines_that_are_open_however_one_looks_at_them_end_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And in bounded memory: as one row of a million cells they would not be."""
    monkeypatch.setattr("jackline.data.sources.tables.MAX_RECORD_BYTES", 1 << 20)
    path = tmp_path / "a.csv"
    path.write_bytes(b"id,text\n1,good\n" + b'a","b\n' * 1_000_000)
    assert read(path, Layout("csv", column="text"))[:2] == (["good"], {"csv quote never closed": 1})
