"""Reading tables of pairs: every format the same, every bad row counted by its reason, every bad file named."""

from __future__ import annotations

import csv
import gzip
import json
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from jackline.data.sources.records import MAX_RECORD_BYTES
from jackline.errors import JacklineError, UsageError
from jackline.recipes.agab.data.pairs import PairRules, PairTable, read_pairs, report, texts_of
from tests.recipes.agab.data.planted import write_small

ROWS = [("EVQLV|DIQMT", "MKTAYI", 7.5), ("QVQLQ", "MKTAYI", 8.25), ("EVQLV|DIQMT", "GSHMEE", 9.0)]
HEADER = "antibody_sequence,antigen_sequence,pKd"


def write(path: Path, *lines: str, header: str = HEADER) -> str:
    path.write_text("\n".join([header, *lines]) + "\n")
    return str(path)


def refusal(path: str, rules: PairRules | None = None) -> str:
    with pytest.raises(JacklineError) as caught:
        read_pairs(path, rules or PairRules())
    return str(caught.value)


def same(one: PairTable, other: PairTable) -> bool:
    return one.content_hash() == other.content_hash() and one.tally.counts() == other.tally.counts()


def test_every_format_gives_the_same_pairs(tmp_path: Path) -> None:
    lines = [f"{antibody},{antigen},{pkd}" for antibody, antigen, pkd in ROWS]
    plain = read_pairs(write(tmp_path / "a.csv", *lines), PairRules())
    text = (tmp_path / "a.csv").read_bytes()
    (tmp_path / "b.csv.gz").write_bytes(gzip.compress(text))
    (tmp_path / "c.csv.zst").write_bytes(zstandard.compress(text))
    (tmp_path / "d.tsv").write_bytes(text.replace(b",", b"\t"))
    (tmp_path / "e.csv").write_bytes(b"\xef\xbb\xbf" + text.replace(b"\n", b"\r\n").rstrip())
    quoted = [[f" {antibody.lower()} ", antigen, f" {pkd} ", "x"] for antibody, antigen, pkd in ROWS]
    with open(tmp_path / "f.csv", "w", newline="") as file:
        csv.writer(file, quoting=csv.QUOTE_ALL).writerows([[*HEADER.lower().split(","), "more"], *quoted])
    names = HEADER.split(",")
    records = [dict(zip(names, row, strict=True)) for row in ROWS]
    (tmp_path / "g.jsonl").write_text("\n".join(json.dumps(record) for record in records))
    table = pyarrow.table({name: [record[name] for record in records] for name in names})
    pyarrow.parquet.write_table(table, tmp_path / "h.parquet", row_group_size=2)
    for path in sorted(tmp_path.iterdir()):
        assert same(read_pairs(str(path), PairRules()), plain), path.name
    assert plain.pkd.tolist() == [7.5, 8.25, 9.0]
    assert plain.antibody_length.tolist() == [10, 5, 10]
    assert plain.antigen_length.tolist() == [6, 6, 6]
    assert (plain.antibody[0] == plain.antibody[2]).all()
    assert (plain.antibody[0] != plain.antibody[1]).any()
    assert list(texts_of(str(tmp_path / "h.parquet"), PairRules(), "antibody", np.array([0, 1]))) == [
        b"EVQLV|DIQMT",
        b"QVQLQ",
    ]
    whole_folder = read_pairs(str(tmp_path), PairRules())
    assert whole_folder.tally.used == 8 * len(ROWS)


def test_every_reason_is_counted_with_its_first_places(tmp_path: Path) -> None:
    lines = [
        "EVQLV,MKT,nan",
        "EVQLV,MKT,",
        "EVQLV,MKT,about 8",
        "EVQLV,MKT,n/a",
        "EVQLV,MKT,-2.96",
        "EVQLV,MKT,inf",
        "EVQLV,MKT,14.5",
        ",MKT,8",
        "|DIQ,MKT,8",
        "EVQLV, ,8",
        "EV-QLV*1,MKT,8",
        "EVQLV|,GSH M,8",
        "A|B|C,MKT,8",
        "EVQLV,MKT",
        'EV"QLV,"MK"T,8',
        "xbzjuo,MKT,4",
        f"EVQLV,{'M' * 100_001},8",
    ]
    table = read_pairs(write(tmp_path / "a.csv", *lines), PairRules())
    assert report(table.tally, PairRules()) == [
        "17 rows read, 1 pairs used, 16 left out",
        "left out 2: unreadable row: a.csv line 15, a.csv line 16",
        "left out 4: pKd missing or not a number: a.csv line 2 ('nan'), a.csv line 3 (''), "
        "a.csv line 4 ('about 8'), ...",
        "left out 3: pKd out of range [4, 14]: a.csv line 6 (-2.96), a.csv line 7 (inf), a.csv line 8 (14.5)",
        "left out 3: empty sequence: a.csv line 9 (antibody), a.csv line 10 (antibody), a.csv line 11 (antigen)",
        "left out 2: illegal residue: a.csv line 12 (antibody '*-1'), a.csv line 13 (antigen ' ')",
        "left out 1: longer than 100,000 residues: a.csv line 18 (antigen 100,001)",
        "left out 1: more than two chains: a.csv line 14 (antibody)",
    ]
    assert table.tally.counts() == {
        "rows": 17,
        "used": 1,
        "unreadable row": 2,
        "pKd missing or not a number": 4,
        "pKd out of range": 3,
        "empty sequence": 3,
        "illegal residue": 2,
        "longer than 100,000 residues": 1,
        "more than two chains": 1,
        "other affinity type": 0,
    }


def test_a_cell_that_a_program_wrote_for_nothing_is_no_protein(tmp_path: Path) -> None:
    lines = [f"{word},MKT,8" for word in ("nan", "NA", "None", "null", "<NA>", "nan|DIQ")]
    table = read_pairs(write(tmp_path / "a.csv", *lines, "EVQ,nan,8", "EVQ|nan,MKT,8", "EVQ,MKT,8"), PairRules())
    counts = {name: count for name, count in table.tally.counts().items() if count}
    assert counts == {"rows": 9, "used": 2, "empty sequence": 7}
    assert (table.antibody[0] == table.antibody[1]).all()  # the heavy chain alone


def test_the_small_table_of_the_seed(tmp_path: Path) -> None:
    table = read_pairs(str(write_small(tmp_path / "agab_small.csv")), PairRules())
    counts = {name: count for name, count in table.tally.counts().items() if count}
    assert counts == {"rows": 500, "used": 485, "pKd missing or not a number": 5, "pKd out of range": 10}
    assert len(np.unique(table.antigen, axis=0)) == 12
    assert table.antigen_length.max() == 3000


def test_parquet_cells_of_other_types_are_left_out_not_guessed(tmp_path: Path) -> None:
    table = pyarrow.table(
        {
            "antibody_sequence": ["EVQ", None, "EVQ", "EVQ"],
            "antigen_sequence": [7, 7, 7, 7],
            "pKd": ["8", "8", None, "x"],
        }
    )
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    assert refusal(str(tmp_path / "a.parquet")) == (
        f"error: none of the 4 rows of {tmp_path}/a.parquet can be used\n"
        "       left out 2: pKd missing or not a number: a.parquet row 3 (None), a.parquet row 4 ('x')\n"
        "       left out 1: empty sequence: a.parquet row 2 (antibody)\n"
        "       left out 1: illegal residue: a.parquet row 1 (antigen int)\n"
        "hint: check the columns, pkd_range and the sequences' letters"
    )


def test_mixed_scales_are_told_and_one_can_be_taken(tmp_path: Path) -> None:
    lines = ["EVQ,MKT,8,pKd", "EVQ,MKA,7,pKd", "EVQ,MKT,9,-log KD", "EVQ,MKT,5,ddG"]
    path = write(tmp_path / "a.csv", *lines, header=f"{HEADER},affinity_type")
    assert report(read_pairs(path, PairRules()).tally, PairRules()) == [
        "4 rows read, 4 pairs used, 0 left out",
        "warning: 3 affinity types are mixed, perhaps on different scales: pKd 2, -log KD 1, ddG 1; "
        "affinity_type=NAME takes one of them",
    ]
    one = PairRules(kinds=("pKd",))
    assert report(read_pairs(path, one).tally, one) == [
        "4 rows read, 2 pairs used, 2 left out",
        "left out 2: other affinity type: a.csv line 4 (-log KD), a.csv line 5 (ddG)",
    ]
    assert refusal(path, PairRules(kinds=("IC50",))).endswith(
        "\nhint: the affinity types there are: -log KD, ddG, pKd"
    )


def test_a_type_asked_of_a_table_without_types_is_told(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", "EVQ,MKT,8")
    assert refusal(path, PairRules(kinds=("pKd",))) == (
        f"error: none of the 1 rows of {path} can be used\n"
        "       left out 1: other affinity type: a.csv line 2 (none)\n"
        "hint: the table has no affinity_type; leave that setting out"
    )


def test_a_missing_column_names_the_columns_there_are(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", "x,y,1", header="heavy,antigen_sequence,Kd")
    assert refusal(path) == (
        f"error: {path} has no column antibody_sequence and no column pKd\n"
        "       its columns are: heavy, antigen_sequence, Kd\n"
        "hint: a table of pairs has antibody_sequence (heavy|light), antigen_sequence, pKd and perhaps affinity_type"
    )


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "has no column antibody_sequence and no column antigen_sequence and no column pKd"),
        (bytes(range(256)) * 50, "has no column antibody_sequence"),
        (HEADER.encode(), "has no row under its header"),
        (f'{HEADER}\nEVQ,MKT,8\n"EVQ,MKT,8\n'.encode(), "a quote that opens at line 3 is never closed"),
        (f"{HEADER}\nEVQ,MKT,8\n".encode() + b"A" * (MAX_RECORD_BYTES + (2 << 20)), "csv line without end"),
    ],
    ids=["empty", "binary", "header only", "open quote", "endless line"],
)
def test_a_table_that_is_none_is_refused_by_name(content: bytes, told: str, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(content)
    message = refusal(str(tmp_path / "a.csv"))
    assert str(tmp_path / "a.csv") in message
    assert told in message


def test_a_file_cut_short_is_an_error_and_not_a_smaller_data_set(tmp_path: Path) -> None:
    whole = gzip.compress(
        "\n".join([HEADER, *(f"EVQ,MKT{'A' * (i % 50)},{4 + i % 9}.5" for i in range(90_000))]).encode()
    )
    (tmp_path / "a.csv.gz").write_bytes(whole[: len(whole) // 2])
    message = refusal(str(tmp_path / "a.csv.gz"))
    assert message.startswith(f"error: {tmp_path}/a.csv.gz cannot be read on after line ")
    assert "truncated gz file" in message


def test_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x")
    assert refusal(str(tmp_path / "a.txt")) == (
        f"error: {tmp_path}/a.txt is not a table of pairs\n"
        "hint: it must be csv, tsv, jsonl or parquet (.gz and .zst too)"
    )
    assert refusal(str(tmp_path / "b.csv")).startswith(f"error: there is no file or folder {tmp_path}/b.csv")
    with pytest.raises(UsageError, match="pkd_range must go from a lower to a higher value"):
        PairRules((9.0, 4.0))
