"""Documents: filters, splits, mixtures, damage; the same wherever reading began."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import zstandard

from jackline.data.cache.state import Counts, Cursor, ReadState, begin
from jackline.data.sources.bytefile import Patience, SourceUnavailable
from jackline.data.sources.documents import Surroundings, find_text_columns, is_in_validation, read_blocks
from jackline.data.spec import DataSpec, Source
from jackline.errors import JacklineError, UsageError
from tests.data.corpora import (
    jsonl_bytes,
    make_text,
    make_texts,
    read_texts,
    spec_of,
    write_csv,
    write_gz,
    write_jsonl,
    write_parquet,
    write_zst,
)
from tests.data.far_end import FakeTime, FarEnd, serving


def last_state(spec: DataSpec) -> ReadState:
    *_, last = read_blocks(spec, begin(len(spec.sources)), Surroundings())
    return last.after


def counts_of(spec: DataSpec) -> Counts:
    return last_state(spec).counts


def states_of(spec: DataSpec) -> Iterator[tuple[ReadState, int]]:
    """Every state between blocks, and how many texts lie before it."""
    count = 0
    for block in read_blocks(spec, begin(len(spec.sources)), Surroundings()):
        yield block.before, count
        count += len(block.texts)


def test_a_folder_of_mixed_formats_is_one_stream(tmp_path: Path) -> None:
    texts = make_texts(60)
    write_jsonl(tmp_path / "a.jsonl", texts[:10])
    write_zst(tmp_path / "b.jsonl.zst", texts[10:20])
    write_gz(tmp_path / "c.jsonl.gz", texts[20:30])
    write_parquet(tmp_path / "d.parquet", list(texts[30:40]))
    write_csv(tmp_path / "e.csv", texts[40:50])
    for number, text in enumerate(texts[50:]):
        (tmp_path / f"f{number}.txt").write_text(text, encoding="utf-8")
    spec = find_text_columns(spec_of(tmp_path), Surroundings())
    assert spec.sources[0].text_column == "text"
    assert read_texts(spec) == texts


def test_a_folder_that_begins_with_plain_text_still_finds_the_columns(tmp_path: Path) -> None:
    texts = make_texts(4)
    (tmp_path / "a.txt").write_text(texts[0], encoding="utf-8")
    write_jsonl(tmp_path / "b.jsonl", texts[1:2])
    (tmp_path / "c.jsonl").write_bytes(b"")
    (tmp_path / "d.jsonl").write_text(json.dumps({"content": texts[2], "n": 1}) + "\n", encoding="utf-8")
    write_parquet(tmp_path / "e.parquet", [texts[3]])
    spec = spec_of(tmp_path, max_damaged_fraction=0.2)
    assert read_texts(find_text_columns(spec, Surroundings())) == texts


def test_white_space_is_not_taken_off_where_a_long_document_was_cut(tmp_path: Path) -> None:
    book = " ".join(make_texts(8000, 60))
    (tmp_path / "a.txt").write_text(book, encoding="utf-8")
    assert read_texts(spec_of(tmp_path / "a.txt", strip=True)) == [book]


def test_reading_continues_at_every_state_and_through_json(tmp_path: Path) -> None:
    texts = make_texts(1500, 800)
    for number in range(3):
        write_zst(tmp_path / f"{number}.jsonl.zst", texts[number * 500 : (number + 1) * 500], num_frames=3)
    spec = spec_of(tmp_path, text_column="text")
    states = list(states_of(spec))
    assert len(states) >= 4
    for state, num_before in states:
        again = Cursor.from_json(json.loads(json.dumps(Cursor(state, 7).to_json())))
        assert again == Cursor(state, 7)
        assert read_texts(spec, again.state) == texts[num_before:]


def test_an_open_document_continues_in_the_next_block(tmp_path: Path) -> None:
    book = "\n".join(make_texts(5000, 80))
    (tmp_path / "a.txt").write_text("short", encoding="utf-8")
    (tmp_path / "b.txt").write_text(book, encoding="utf-8")
    (tmp_path / "c.txt").write_text("also short", encoding="utf-8")
    spec = spec_of(tmp_path)
    assert read_texts(spec) == ["short", book, "also short"]
    blocks = list(read_blocks(spec, begin(1), Surroundings()))
    assert [len(block.left_open) for block in blocks[:-1]] == [1] * (len(blocks) - 1)
    assert counts_of(spec).documents == 3
    for block in blocks[1:]:
        assert read_texts(spec, block.before)[-1] == "also short"


def test_empty_short_and_stripped_documents(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ["", "  \n ", "tiny", " long enough ", "日本語日本語"])
    spec = spec_of(path, text_column="text", min_chars=6)
    assert read_texts(spec) == [" long enough ", "日本語日本語"]
    assert counts_of(spec) == Counts(records=5, documents=2, empty=2, short=1)
    assert read_texts(replace(spec, strip=True)) == ["long enough", "日本語日本語"]


def test_max_examples_stops_reading_early(tmp_path: Path) -> None:
    for number in range(3):
        write_jsonl(tmp_path / f"{number}.jsonl", make_texts(10))
    opened: list[str] = []
    around = Surroundings(on_open=lambda index, found, file: opened.append(Path(found.name).name))
    spec = spec_of(tmp_path, text_column="text", max_examples=4)
    texts = [text for block in read_blocks(spec, begin(1), around) for text in block.texts]
    assert [text.decode() for text in texts] == make_texts(4)
    assert opened == ["0.jsonl"]


def test_the_splits_share_no_document_and_lose_none(tmp_path: Path) -> None:
    texts = make_texts(400)
    path = write_jsonl(tmp_path / "a.jsonl", texts + texts[:50])
    spec = spec_of(path, text_column="text", validation_fraction=0.2)
    train = read_texts(replace(spec, split="train"))
    validation = read_texts(replace(spec, split="validation"))
    assert not set(train) & set(validation)
    assert sorted(train + validation) == sorted(texts + texts[:50])
    assert 40 < len(validation) < 160
    assert read_texts(spec) == texts + texts[:50]


def test_the_same_text_is_on_the_same_side_with_other_white_space() -> None:
    for number in range(50):
        text = make_text(number).encode()
        assert is_in_validation(text, 0.3) == is_in_validation(b"\n" + text + b" \n", 0.3)


def test_a_mixture_keeps_its_weights_and_loses_nothing(tmp_path: Path) -> None:
    many = make_texts(6000, 300)
    first, second = write_jsonl(tmp_path / "a.jsonl", many[:4000]), write_jsonl(tmp_path / "b.jsonl", many[4000:])
    sources = (Source(str(first), 3.0, text_column="text"), Source(str(second), 1.0, text_column="text"))
    spec = replace(spec_of("x"), sources=sources)
    texts = read_texts(spec)
    assert sorted(texts) == sorted(many)
    of_first = set(many[:4000])
    head = texts[: len(texts) // 2]
    share = sum(text in of_first for text in head) / len(head)
    assert 0.65 < share < 0.85
    for state, num_before in states_of(spec):
        assert read_texts(spec, state) == texts[num_before:]


def test_a_mixture_never_cuts_into_an_open_document(tmp_path: Path) -> None:
    book = " ".join(make_texts(8000, 60))
    (tmp_path / "book.txt").write_text(book, encoding="utf-8")
    path = write_jsonl(tmp_path / "a.jsonl", make_texts(2000, 300))
    sources = (Source(str(tmp_path / "book.txt")), Source(str(path), text_column="text"))
    texts = read_texts(replace(spec_of("x"), sources=sources))
    assert book in texts
    assert len(texts) == 2001


def broken_folder(root: Path) -> list[str]:
    """Three zst shards of 300 documents as they come: empty ones, a long one, a corrupt line, a truncated frame."""
    texts = make_texts(900)
    texts[5] = ""
    texts[7] = make_text(7, 40_000)
    first, second, third = texts[:300], texts[300:600], texts[600:]
    write_zst(root / "1.jsonl.zst", first)
    lines = jsonl_bytes(second).split(b"\n")
    lines[10] = lines[10][:20]
    (root / "2.jsonl.zst").write_bytes(zstandard.compress(b"\n".join(lines)))
    whole = zstandard.compress(jsonl_bytes(third))
    (root / "3.jsonl.zst").write_bytes(whole[:-40])
    (root / "4.jsonl.zst").write_bytes(b"")
    return [text for text in first + second[:10] + second[11:] if text]


def test_broken_records_are_skipped_counted_and_nothing_else(tmp_path: Path) -> None:
    good = broken_folder(tmp_path)
    spec = spec_of(tmp_path, text_column="text", max_damaged_fraction=0.5)
    texts = read_texts(spec)
    assert texts[: len(good)] == good
    assert set(texts[len(good) :]) <= set(make_texts(900)[600:])
    counts = counts_of(spec)
    assert counts.damaged == {"bad JSON line": 1, "truncated zst file": 1, "empty file": 1}
    assert counts.empty == 1
    assert counts.documents == len(texts)


def test_too_much_damage_is_an_error_that_says_what_it_was(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(jsonl_bytes(make_texts(9)) + b"{broken\n")
    with pytest.raises(JacklineError) as caught:
        read_texts(spec_of(path, text_column="text"))
    assert str(caught.value) == (
        "error: 1 of the first 10 records cannot be read (10.0 %, allowed 1 %)\n"
        "       1 x bad JSON line\n"
        "       8 B lost of 2.4 KiB of text (0.33 %)\n"
        f"       {path}: byte 2,420, line 10: bad JSON line, 8 bytes\n"
        "hint: repair the source, or allow it: --max-damaged 0.1 (max_damaged in a recipe, max_damaged_fraction in "
        "Python)"
    )
    assert read_texts(spec_of(path, text_column="text", max_damaged_fraction=0.1)) == make_texts(9)


def test_a_wrong_source_stops_soon_not_at_its_end(tmp_path: Path) -> None:
    for number in range(20):
        (tmp_path / f"{number:02d}.jsonl").write_bytes(b"{broken\n" * 100_000)
    opened: list[str] = []
    around = Surroundings(on_open=lambda index, found, file: opened.append(found.name))
    with pytest.raises(JacklineError, match="records cannot be read"):
        list(read_blocks(spec_of(tmp_path, text_column="text"), begin(1), around))
    assert len(opened) == 1


def test_a_split_that_leaves_most_out_still_moves_on(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", make_texts(20_000, 200))
    spec = spec_of(path, text_column="text", split="validation", validation_fraction=0.002)
    blocks = list(read_blocks(spec, begin(1), Surroundings()))
    assert len(blocks) >= 4
    assert [block.file_bytes for block in blocks] == sorted({block.file_bytes for block in blocks})


def test_a_document_cut_by_a_broken_archive_is_closed(tmp_path: Path) -> None:
    book = "\n".join(make_texts(6000, 80)).encode()
    (tmp_path / "a.txt.zst").write_bytes(zstandard.compress(book)[:-100_000])
    (tmp_path / "b.txt").write_text("next", encoding="utf-8")
    spec = spec_of(tmp_path, max_damaged_fraction=0.5)
    texts = read_texts(spec)
    assert len(texts) == 2
    assert book.startswith(texts[0].encode())
    assert len(texts[0]) > 1 << 20
    assert texts[1] == "next"


def test_a_network_that_fails_changes_nothing_about_the_order(tmp_path: Path) -> None:
    texts = make_texts(900, 400)
    files = {f"{n}.jsonl.zst": zstandard.compress(jsonl_bytes(texts[n * 300 : n * 300 + 300])) for n in range(3)}
    files["t.parquet"] = write_parquet(tmp_path / "t.parquet", list(texts[:200])).read_bytes()
    with serving(FarEnd(files)) as far_end:
        spec = spec_of(far_end.url + "/{0..2}.jsonl.zst", far_end.address("t.parquet"), text_column="text")
        quiet = read_texts(spec)
        far_end.faults = ["drop:100", "503", "reset", "", "drop:50000", "429", "", "reset", "drop:30000"]
        assert read_texts(spec, around=Surroundings(FakeTime().patience())) == quiet
        assert not far_end.faults
    assert sorted(quiet) == sorted(texts + texts[:200])


def test_a_network_that_stays_away_stops_and_skips_nothing(tmp_path: Path) -> None:
    texts = make_texts(300, 100)
    with serving(FarEnd({"a.parquet": write_parquet(tmp_path / "a.parquet", list(texts)).read_bytes()})) as far_end:
        far_end.faults = ["", *["503"] * 1000]
        spec = spec_of(far_end.address("a.parquet"), text_column="text")
        patience = Patience(give_up_after_s=0.05, sleep=lambda seconds: None)
        with pytest.raises(SourceUnavailable, match="HTTP 503 Service Unavailable"):
            list(read_blocks(spec, begin(1), Surroundings(patience)))


def test_a_source_whose_format_nobody_knows_is_asked_about(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_text("x")
    with pytest.raises(UsageError) as caught:
        read_texts(spec_of(tmp_path / "a.bin"))
    assert str(caught.value) == (
        f"error: cannot tell the format of {tmp_path}/a.bin from its name\n"
        "hint: say it: format=txt, jsonl, csv, tsv or parquet (on the command line --format)"
    )
    assert read_texts(spec_of(tmp_path / "a.bin", format="txt")) == ["x"]


def test_a_source_without_any_record_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("")
    with pytest.raises(JacklineError, match=r"no file of .* holds a record with text"):
        find_text_columns(spec_of(tmp_path), Surroundings())
