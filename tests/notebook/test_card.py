"""The card under a cell: what it says, that everything from a run stays text, and that it stays small."""

from __future__ import annotations

import json
import shutil
import xml.etree.ElementTree as ET
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from jackline.cli.view.run_view import read_view
from jackline.notebook.card import card_html, card_text, read_charts
from jackline.rundir.layout import RunDir

GOLDEN = Path(__file__).parents[1] / "golden"
NOW_S = 1_794_000_000.0
HOSTILE = "<img src=x onerror=alert(1)>"


class Tags(HTMLParser):
    def __init__(self, page: str) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.attributes: set[str] = set()
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.add(tag)
        self.attributes |= {name for name, _ in attrs}


def copy(tmp_path: Path, name: str) -> RunDir:
    shutil.copytree(GOLDEN / name, tmp_path / name)
    return RunDir(tmp_path / name)


def log(run: RunDir, count: int, name: str = "loss") -> None:
    rows = ({"step": step, "at_s": NOW_S, name: 1 / (step + 1), "lr": 3e-4} for step in range(count))
    run.metrics().write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize("name", sorted(path.name for path in GOLDEN.glob("format1-*")))
def test_every_recorded_run_has_a_card_without_script_and_address(name: str, tmp_path: Path) -> None:
    run = copy(tmp_path, name)
    log(run, 50)
    view = read_view(run, now_s=NOW_S)
    page = card_html(view, read_charts(run))
    tags = Tags(page)
    assert "svg" in tags.names
    assert not tags.names & {"script", "img", "iframe", "link", "a", "form", "input"}
    assert not {
        attribute for attribute in tags.attributes if attribute.startswith("on") or attribute in ("src", "href")
    }
    assert card_text(view).splitlines()[0].startswith(view.name)


def test_what_a_run_says_stays_text(tmp_path: Path) -> None:
    run = copy(tmp_path, "format1-killed-oom")
    log(run, 5, HOSTILE)
    with open(run.out_log, "a") as file:
        file.write(f"2026-11-16T12:00:00Z {HOSTILE}\n")
    page = card_html(read_view(run, now_s=NOW_S), read_charts(run))
    assert HOSTILE not in page and "&lt;img src=x" in page
    assert "img" not in Tags(page).names


def test_a_long_training_has_a_small_card_whose_chart_keeps_its_ends(tmp_path: Path) -> None:
    run = copy(tmp_path, "format1-finished")
    log(run, 200_000)
    charts = read_charts(run)
    assert len(charts) == 2 and sum(map(len, charts)) < 20_000
    drawing = ET.fromstring(charts[0].partition("</h5>")[2])
    assert drawing.get("role") == "img" and drawing.get("aria-label") == "loss"


def test_a_run_without_numbers_has_a_card_without_charts(tmp_path: Path) -> None:
    run = copy(tmp_path, "format1-finished")
    assert read_charts(run) == []
    page = card_html(read_view(run, now_s=NOW_S), [])
    assert "Finished" in page and "svg" not in Tags(page).names


def test_the_card_of_a_live_run_changes_with_each_drawing(tmp_path: Path) -> None:
    run = copy(tmp_path, "format1-finished")
    view = read_view(run, now_s=NOW_S)
    live = replace(view, status=replace(view.status, state="alive"))
    later = replace(live, now_s=NOW_S + 1.5)
    assert card_text(live) != card_text(later) and "As of 21:20:00 UTC." in card_text(live)
    assert card_html(live, []) != card_html(later, [])
    assert "As of" not in card_text(view) + card_html(view, [])
