"""What the page is told: every recorded run, damaged ones too; the words of `status`; nothing twice."""

from __future__ import annotations

import json
import os
import shutil
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from jackline.cli.main import cli
from jackline.cli.pages.told import RunTeller
from jackline.dashboard import views
from jackline.dashboard.tails import clean, read_events, read_log
from jackline.dashboard.views import Site, key_of, merged
from jackline.review.goodput import Span
from jackline.rundir.layout import RunDir
from tests.dashboard.asking import ask
from tests.dashboard.conftest import GOLDEN

NOW = 1_794_100_000.0


def told(site: Site, run: RunDir) -> Any:
    kept = site.find(key_of(run))
    assert kept is not None
    return site.run_json(kept, NOW)


def test_the_list_has_every_run_with_its_state(site: Site, runs: Path) -> None:
    found = site.runs_json(NOW)
    assert found["is_whole"] and len(found["runs"]) == len(list(runs.iterdir()))
    states = {row["state"] for row in found["runs"]}
    assert {"finished", "dead", "elsewhere"} <= states
    for row in found["runs"]:
        assert row["word"] and row["tone"] in ("", "good", "warn", "bad")


def write_fork(run: RunDir, parent: str) -> None:
    shutil.copytree(GOLDEN / "format1-finished", run.path)
    contents = json.loads(run.run_file.read_text())
    contents.update(name=run.name, settings={**contents["settings"], "forked_from": parent})
    run.run_file.write_text(json.dumps(contents))


def test_forks_are_listed_below_the_run_they_come_from_and_each_names_the_other(runs: Path) -> None:
    parent = RunDir(runs / "format1-finished")
    for name, origin in {
        "child": "format1-finished at step 6",
        "grandchild": "child at step 9",
        "orphan": "gone at step 3",
        "forged": "../runs/format1-finished at step 1",
        "own": "own at step 2",
    }.items():
        write_fork(RunDir(runs / name), origin)
    site = Site(runs, RunTeller())
    rows = site.runs_json(NOW)["runs"]
    names = [row["name"] for row in rows]
    at = names.index("child")
    assert [(row["name"], row["depth"]) for row in rows[at : at + 2]] == [("child", 1), ("grandchild", 2)]
    assert rows[at - 1]["key"] == key_of(parent) and rows[at]["fork_of"] == "format1-finished at step 6"
    assert {row["name"] for row in rows if row["depth"]} == {"child", "grandchild"} and len(rows) == len(set(names))
    child, own = told(site, RunDir(runs / "child")), told(site, RunDir(runs / "own"))
    assert child["family"] == {
        "parent": {"key": key_of(parent), "name": "format1-finished", "step": "6"},
        "forks": [{"key": key_of(RunDir(runs / "grandchild")), "name": "grandchild", "step": "9"}],
    }
    assert ["fork of", "format1-finished at step 6"] in child["told"]["facts"]
    assert own["family"] == {"parent": None, "forks": []}
    assert told(site, RunDir(runs / "orphan"))["family"] == {"parent": None, "forks": []}


def test_a_dead_run_says_why_in_its_first_sentence(site: Site, runs: Path) -> None:
    found = told(site, RunDir(runs / "format1-killed-oom"))
    assert found["told"]["sentence"].startswith("Failed: the kernel killed it because memory ran out")
    assert found["told"]["tone"] == "bad" and found["told"]["resume"].startswith("jackline resume ")


def test_there_are_four_cards_for_every_run(site: Site, runs: Path) -> None:
    for path in runs.iterdir():
        cards = told(site, RunDir(path))["told"]["cards"]
        assert len(cards) == 4 and all(card["title"] and card["lines"] for card in cards)


def test_the_time_adds_up_to_the_wall_time(site: Site, finished: RunDir) -> None:
    found = told(site, finished)["time"]
    assert sum(found["seconds"].values()) == pytest.approx(found["wall_s"], abs=0.01)
    spans = found["spans"]
    assert all(one[1] == two[0] for one, two in pairwise(spans))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 10**6), st.sampled_from(["productive", "down", "hang"])), max_size=200))
def test_merged_spans_cover_the_same_time_without_gaps(parts: list[tuple[int, str]]) -> None:
    spans, at = [], 0
    for length, use in parts:
        spans.append(Span(at, at + length, use, 1))
        at += length
    found = merged(tuple(spans), 20)
    assert len(found) <= 20
    if spans:
        assert (found[0].begin_us, found[-1].end_us) == (0, at)
        assert all(one.end_us == two.begin_us for one, two in pairwise(found))


def test_events_come_once_and_in_the_order_of_time(finished: RunDir) -> None:
    lines = [{"at_s": NOW + number, "event": "note", "text": f"note {number}"} for number in range(5)]
    finished.supervisor_events.write_text("".join(json.dumps(line) + "\n" for line in lines[::2]))
    finished.session_events(0).write_text("".join(json.dumps(line) + "\n" for line in lines[1::2]))
    first = read_events(finished, "")
    assert [event["text"] for event in first["events"]] == [f"note {number}" for number in range(5)] and first[
        "is_new"
    ]
    again = read_events(finished, first["cursor"])
    assert again["events"] == [] and not again["is_new"]
    with open(finished.supervisor_events, "a") as file:
        file.write(json.dumps({"at_s": NOW + 9, "event": "died", "text": "error: it died\nof this"}) + "\n")
    (last,) = read_events(finished, first["cursor"])["events"]
    assert last["text"] == "error: it died" and last["more"] == ["of this"] and last["is_warning"]


@pytest.mark.parametrize("cursor", ["", "x", "-1--1", "9" * 40, "1-2-3", "99999999-99999999"])
def test_a_cursor_that_is_none_of_ours_is_no_error(finished: RunDir, cursor: str) -> None:
    read_events(finished, cursor)


def test_the_log_is_read_on_from_its_cursor(finished: RunDir) -> None:
    finished.out_log.write_text("one\ntwo\nhalf")
    first = read_log(finished, None)
    assert first["lines"] == ["one", "two"] and first["is_new"]
    with open(finished.out_log, "a") as file:
        file.write(" line\nthree\n")
    more = read_log(finished, first["cursor"])
    assert more["lines"] == ["half line", "three"] and not more["is_new"]
    finished.out_log.write_text("new\n")
    assert read_log(finished, more["cursor"]) == {"cursor": 4, "lines": ["new"], "is_cut": False, "is_new": True}


def test_a_long_log_begins_with_a_whole_line(finished: RunDir) -> None:
    finished.out_log.write_text("".join(f"line {number:06}\n" for number in range(20_000)))
    found = read_log(finished, None)
    assert found["is_cut"] and found["lines"][0].startswith("line 0") and found["lines"][-1] == "line 019999"


def test_an_ended_run_is_read_again_only_when_it_changed(runs: Path) -> None:
    asked: list[str] = []

    class Counting(RunTeller):
        def tell(self, run: RunDir, *, now_s: float, short: bool) -> Any:
            asked.append(run.name)
            return super().tell(run, now_s=now_s, short=short)

    site = Site(runs, Counting())
    site.runs_json(NOW)
    once = asked.count("format1-finished")
    site.runs_json(NOW + 60)
    assert (once, asked.count("format1-finished")) == (1, 1)
    exit_file = RunDir(runs / "format1-finished").attempt(1).exit_file
    exit_file.write_text(exit_file.read_text())
    site.runs_json(NOW + 120)
    assert asked.count("format1-finished") == 2


def test_a_new_run_appears_and_a_deleted_one_goes(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jackline.dashboard.views.CATALOGUE_S", 0.0)
    site = Site(runs, RunTeller())
    before = {row["key"] for row in site.runs_json(NOW)["runs"]}
    shutil.copytree(GOLDEN / "format1-finished", runs / "another")
    added = {row["key"] for row in site.runs_json(NOW)["runs"]} - before
    assert added == {key_of(RunDir(runs / "another"))}
    shutil.rmtree(runs / "another")
    assert {row["key"] for row in site.runs_json(NOW)["runs"]} == before
    assert site.find(added.pop()) is None


JSON_FILES = ("run.json", "supervisor.json", "session-0.json", "timeline.jsonl", "metrics-0.jsonl", "events-0.jsonl")


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(JSON_FILES), st.binary(max_size=300), st.booleans())
def test_a_damaged_run_never_breaks_an_answer(
    tmp_path_factory: pytest.TempPathFactory, name: str, data: bytes, is_json: bool
) -> None:
    folder = tmp_path_factory.mktemp("damaged") / "runs"
    shutil.copytree(GOLDEN / "format1-stuck", folder / "one")
    wrong = b'{"at_s":' + json.dumps(data.decode("latin-1")).encode() + b',"verdict":[1],"memory":7,"loss":{}}\n'
    (folder / "one" / name).write_bytes(wrong if is_json else data)
    site = Site(folder, RunTeller())
    json.dumps(site.runs_json(NOW), allow_nan=False)
    kept = site.find(key_of(RunDir(folder / "one")))
    if kept is not None:
        for found in (
            site.run_json(kept, NOW), site.curves_json(kept, "whole.3"), site.events_json(kept, "1-1"),
            site.log_json(kept, 5, ""), site.config_json(kept), site.checkpoints_json(kept), site.stacks_json(kept),
        ):  # fmt: skip
            json.dumps(found, allow_nan=False, default=str)


def test_the_page_and_status_use_the_same_words(app: Any, runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JACKLINE_RUNS", str(runs))
    said = CliRunner().invoke(cli, ["status", "format1-stuck"], catch_exceptions=False).output
    found = ask(app, f"/api/runs/{key_of(RunDir(runs / 'format1-stuck'))}").json["told"]
    numbers = dict(found["facts"]).get("state", "").partition(" since")[0]
    assert numbers and numbers.partition(",")[0] in said


def test_a_run_folder_that_is_empty_is_said_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    found = Site(tmp_path / "no-such-folder", RunTeller()).runs_json(time.time())
    assert found["runs"] == [] and found["is_whole"]


def test_clean_cuts_long_lines() -> None:
    assert len(clean("x" * 10_000)) == 2000 and clean("a\tb") == "a\tb"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--behind-proxy", "https://x.org/"], "error: --behind-proxy takes a host, not 'https://x.org/'"),
        (["--port", "70000"], "70000 is not in the range"),
    ],
)
def test_a_wrong_option_is_refused_before_anything_is_served(words: list[str], said: str) -> None:
    done = CliRunner().invoke(cli, ["dash", *words])
    assert done.exit_code != 0 and said in done.output + str(done.exception)


def test_what_differs_from_another_run_is_listed_and_its_secrets_are_not(site: Site, runs: Path) -> None:
    for name, rate in (("format1-finished", "3e-4"), ("format1-killed-oom", "6e-4")):
        (runs / name / "config.yaml").write_text(f"lr: {rate}\napi_key: {rate[0]}secretsecret\n")
    one, other = (site.find(key_of(RunDir(runs / name))) for name in ("format1-finished", "format1-killed-oom"))
    assert one is not None and other is not None
    found = site.diff_json(one, key_of(other.run))
    assert ["settings", "lr", "3e-4", "6e-4"] in found["rows"] and found["with"] == "format1-killed-oom"
    assert "secretsecret" not in json.dumps(found)
    assert site.diff_json(one, "../../etc") == {"with": "", "rows": [], "num_rows": 0}
    assert site.diff_json(one, key_of(one.run))["rows"] == []


def test_a_busy_machine_lists_all_runs_at_once_and_their_curves_one_answer_after_another(
    site: Site, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(views, "LIST_WALL_S", -1.0)
    count = len(list(runs.iterdir()))
    answers = [site.runs_json(NOW) for _ in range(count)]
    assert [len(found["runs"]) for found in answers] == [count] * count
    with_curves = [sum(row["spark"] is not None for row in found["runs"]) for found in answers]
    assert with_curves == list(range(1, count + 1))
    assert [found["is_whole"] for found in answers] == [False] * (count - 1) + [True]


def test_tokens_of_a_step_are_known_from_a_recipes_config(site: Site, runs: Path) -> None:
    kept = site.find(key_of(RunDir(runs / "format1-finished")))
    assert kept is not None
    assert site.run_json(kept, 1.7941e9)["tokens_per_step"] is None
    kept.run.config_file.write_text("batch_size: 8\nseq_len: 128\n")
    assert site.run_json(kept, 1.7941e9)["tokens_per_step"] == 1024
    kept.run.config_file.write_text("batch_size: [8]\nseq_len: 1e99\n")
    os.utime(kept.run.config_file, ns=(1, 1))
    assert site.run_json(kept, 1.7941e9)["tokens_per_step"] is None
