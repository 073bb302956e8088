"""`jackline events`: what happened, in order, from a cursor on, bounded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from jackline.cli.programs.events import SCHEMA, command, format_cursor, parse_cursor, read_events
from jackline.errors import UsageError
from jackline.rundir.layout import RunDir
from tests.docs.json_reference import check_answer

GOLDEN = Path(__file__).parents[1] / "golden"


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """Two files of events, whose times alternate."""
    run = RunDir(tmp_path / "run")
    run.path.mkdir()
    run.run_file.write_text((GOLDEN / "format1-finished" / "run.json").read_text())
    add(run.supervisor_events, *range(0, 10, 2))
    add(run.session_events(0), *range(1, 10, 2))
    return run


def add(path: Path, *numbers: int) -> None:
    with path.open("a") as file:
        for number in numbers:
            event = {"at_s": 1000.0 + number, "event": "note", "text": f"event {number}\n  more", "number": number}
            file.write(json.dumps(event) + "\n")


def call(run: RunDir, *words: str) -> Result:
    return CliRunner().invoke(command, [str(run.path), *words])


def numbers(text: str) -> list[int]:
    return [json.loads(line)["facts"]["number"] for line in text.splitlines()]


def test_events_of_all_files_come_in_order_of_time(run: RunDir) -> None:
    done = call(run, "--json")
    assert numbers(done.stdout) == list(range(10))
    for line in done.stdout.splitlines():
        check_answer(SCHEMA, json.loads(line))
    assert json.loads(done.stdout.splitlines()[0])["text"] == "event 0; more"


def test_a_cursor_gives_what_is_new_and_nothing_twice(run: RunDir) -> None:
    seen: list[int] = []
    cursor = "start"
    while lines := call(run, "--json", "--since", cursor, "--limit", "3").stdout.splitlines():
        seen += numbers("\n".join(lines))
        cursor = json.loads(lines[-1])["cursor"]
    assert seen == list(range(10))
    add(run.session_events(0), 10)
    add(run.session_events(1), 11)  # a rank that had no events before
    assert numbers(call(run, "--json", "--since", cursor).stdout) == [10, 11]


def test_more_than_the_limit_says_how_to_go_on(run: RunDir) -> None:
    done = call(run, "--since", "start", "-n", "2")
    assert done.stdout.splitlines() == [
        "1970-01-01 00:16:40 UTC  note                  event 0; more",
        "1970-01-01 00:16:41 UTC  note                  event 1; more",
    ]
    size = len(json.dumps({"at_s": 1000.0, "event": "note", "text": "event 0\n  more", "number": 0})) + 1
    assert done.stderr == f"[jackline] there are more: jackline events run --since 0:{size}.supervisor:{size}\n"


def test_without_a_cursor_the_newest_are_shown(run: RunDir) -> None:
    assert numbers(call(run, "--json", "-n", "4").stdout) == [6, 7, 8, 9]


def test_a_line_that_is_not_json_and_a_torn_one_are_passed_over(run: RunDir) -> None:
    with run.supervisor_events.open("a") as file:
        file.write('nonsense\n[1]\n{"at_s": 1020.0, "event": "note", "text": "torn')
    found, is_cut, _ = read_events(run, {}, 100)
    assert (len(found), is_cut) == (10, False)


def test_an_event_is_bounded(run: RunDir) -> None:
    event = {"at_s": 2000.0, "event": "note", "text": "long " * 10_000, **{f"fact{n}": "x" * 900 for n in range(99)}}
    run.session_events(2).write_text(json.dumps(event) + "\n")
    line = call(run, "--json", "-n", "1").stdout
    assert len(line) < 5000 and json.loads(line)["at_s"] == 2000.0


@pytest.mark.parametrize("text", ["", "x", "supervisor", "supervisor:-1", "0:1:2", "../a:1", "supervisor:1 "])
def test_what_is_no_cursor_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is not a cursor"):
        parse_cursor(text)


def test_a_cursor_survives_being_written() -> None:
    for cursor in ({}, {"supervisor": 12}, {"0": 5, "supervisor": 12, "11": 7}):
        assert parse_cursor(format_cursor(cursor)) == cursor
