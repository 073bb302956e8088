"""`jackline predict`: every row comes back in its place, with the number of the trained head, or with a reason."""

from __future__ import annotations

import csv
import io

import pytest

from jackline.errors import UsageError
from jackline.recipes.agab.final import PREDICTIONS
from jackline.recipes.agab.predict import Head, load_head, predict_table
from jackline.rundir.layout import RunDir
from jackline.trainer.config import resolve
from jackline.trainer.loop import train
from tests.recipes.agab.data.planted import write_small


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    folder = tmp_path_factory.mktemp("predict")
    words = [f"data={write_small(folder / 'small.csv')}", f"data_dir={folder / 'cache'}", "rehearse=no"]
    made = RunDir(folder / "runs" / "small")
    train(
        resolve(
            "agab", [*words, "epochs=2", "batch_size=64", "antibody_encoder=embedded", "antigen_encoder=embedded"]
        ),
        made,
    )
    return made


@pytest.fixture(scope="module")
def head(run: RunDir) -> Head:
    return load_head(str(run.path), "best", "cpu", None)


def predict(head: Head, text: str) -> tuple[list[dict[str, str]], list[dict[str, object]]]:
    out = io.StringIO()
    tally = predict_table(head, io.StringIO(text, newline=""), out, "pairs.csv")
    rows = list(csv.DictReader(io.StringIO(out.getvalue())))
    assert len(rows) == tally.rows == tally.predicted + len(tally.problems)
    return rows, tally.problems


def test_predictions_are_those_of_the_run_itself_and_other_columns_stay(run: RunDir, head: Head) -> None:
    with open(run.path / PREDICTIONS, newline="") as file:
        known = list(csv.DictReader(file))
    lines = ["name,Antigen_Sequence,antibody_sequence"]
    lines += [
        f'"pair, {number}",{row["antigen_sequence"]},{row["antibody_sequence"].lower()}'
        for number, row in enumerate(known)
    ]
    rows, problems = predict(head, "\ufeff" + "\r\n".join(lines))
    assert not problems and [row["name"] for row in rows] == [f"pair, {number}" for number in range(len(known))]
    for made, row in zip(rows, known, strict=True):
        assert float(made["predicted_pKd"]) == pytest.approx(float(row["predicted_pKd"]), abs=1e-4)


def test_a_row_that_cannot_be_predicted_keeps_its_place_and_is_named_by_its_line(head: Head) -> None:
    text = (
        "antibody_sequence,antigen_sequence,pKd,note\n"
        "EVQLVES|DIQMTQ,MKTAYIAK,nan,fine\n"
        "nan,MKTAYIAK,7,no antibody\n"
        'EVQLVES,"",7,"no\nantigen"\n'
        "EVQ1VES,MKTAYIAK,7,digit\n"
        "EVQLVES\n"
        "\n"
        "A|C|D,MKTAYIAK,7,three chains\n"
        "EVQLVES|DIQMTQ,MKTAYIAK,8,fine\n"
    )
    rows, problems = predict(head, text)
    assert problems == [
        {"line": 3, "problem": "antibody_sequence: empty sequence"},
        {"line": 4, "problem": "antigen_sequence: empty sequence"},
        {"line": 6, "problem": "antibody_sequence: illegal residue '1'"},
        {"line": 7, "problem": "too few columns"},
        {"line": 9, "problem": "antibody_sequence: more than two chains"},
    ]
    assert [row["note"] for row in rows] == [
        "fine",
        "no antibody",
        "no\nantigen",
        "digit",
        "",
        "three chains",
        "fine",
    ]
    assert rows[0]["predicted_pKd"] == rows[-1]["predicted_pKd"] != ""
    assert [bool(row["predicted_pKd"]) for row in rows] == [not row["problem"] for row in rows]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "pairs.csv has no column antibody_sequence and no column antigen_sequence"),
        ("antibody,antigen_sequence\nA,C\n", "pairs.csv has no column antibody_sequence"),
        ("antibody_sequence,antigen_sequence\n", "pairs.csv has no pairs: only a header"),
    ],
)
def test_what_is_no_table_of_pairs_is_refused(head: Head, text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        predict(head, text)
