"""The README's picture shows what Jackline prints today, and is drawn from a real run."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import pytest

from tests.docs.picture import COLUMNS, COMMAND, FOLDER, Screen, draw, film, last_screen, play, structure

HINT = "[jackline] hint: "


def shown() -> list[str]:
    return structure((FOLDER / "run.txt").read_text(encoding="utf-8"))


def until_hint(lines: list[str]) -> list[str]:
    """The run until its first crash is explained, without the typed command."""
    begin = next(at for at, line in enumerate(lines) if line.startswith("[jackline]"))
    return lines[begin : next(at for at, line in enumerate(lines) if line.startswith(HINT)) + 1]


def test_the_same_crash_looks_the_same_today() -> None:
    """Until the first restart, which takes seconds. The whole picture is recorded again by a slow test."""
    today = structure(last_screen(film(COMMAND.replace("run ", "run --restart 0 ", 1))))
    assert until_hint(today) == until_hint(shown()), "the picture is out of date: scripts/picture"
    assert len(until_hint(today)) > 5


@pytest.mark.slow
@pytest.mark.zoo
def test_the_whole_run_looks_the_same_today() -> None:
    def lasting(lines: list[str]) -> list[str]:
        # A suspicion comes before the verdict or not, as the machine is busy or not.
        return [
            line for line in lines if not line.startswith(("[jackline] SUSPECT", "[jackline] stacks of", "step N/N"))
        ]

    assert lasting(structure(last_screen(film(COMMAND)))) == lasting(shown()), "scripts/picture"


def test_the_picture_is_whole_and_needs_nothing_from_elsewhere() -> None:
    text = (FOLDER / "run.svg").read_text(encoding="utf-8")
    root = ElementTree.fromstring(text)
    assert root.tag.endswith("svg") and root.get("role") == "img" and root.get("aria-label")
    drawn = "".join("".join(element.itertext()) for element in root.iter() if element.tag.endswith("}text"))
    for line in (FOLDER / "run.txt").read_text(encoding="utf-8").splitlines():
        assert line in drawn
    assert "href" not in text and "<script" not in text and "url(" not in text
    assert len(text) < 100_000


def test_a_line_that_is_overwritten_is_shown_for_a_while_and_its_successor_stays() -> None:
    versions = play([(0.1, "\r\x1b[2K\x1b[2mworking 1 s\x1b[0m"), (9.0, "\r\x1b[2Kdone <ok>\r\n")], "jackline x")
    assert last_screen(versions) == "$ jackline x\ndone <ok>\n"
    brief = [version for version in versions if version.until_s is not None]
    assert ["".join(sign for _, sign in version.cells) for version in brief] == ["working 1 s"]
    assert brief[0].until_s is not None and brief[0].until_s - brief[0].from_s == pytest.approx(0.7)
    assert "done &lt;ok&gt;" in draw(versions, "a test")


def test_a_long_line_wraps_as_in_a_terminal() -> None:
    screen = Screen()
    screen.feed("x" * 130)
    assert [len(row) for row in screen.rows] == [COLUMNS, 130 - COLUMNS]
