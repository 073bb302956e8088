"""Tables and texts that fit their terminal."""

from __future__ import annotations

import pytest

from jackline.cli.text.paint import num_cells, paint, shorten, wants_color
from jackline.cli.text.table import Cell, Column, draw_table
from jackline.units import count_of, fold, format_short

COLUMNS = (Column("NAME", floor=10), Column("STATE"), Column("AGE", is_right=True), Column("PATH", rank=2))
ROWS = [["a", "alive", "3 s", "/runs/a"], ["a-long-name-of-a-run", "dead", "12 min", "/runs/a-long-name-of-a-run"]]


def test_columns_are_aligned_and_the_last_is_not_padded() -> None:
    assert draw_table(COLUMNS, ROWS, width=None) == (
        "NAME                  STATE     AGE  PATH\n"
        "a                     alive     3 s  /runs/a\n"
        "a-long-name-of-a-run  dead   12 min  /runs/a-long-name-of-a-run"
    )


def test_a_narrow_table_leaves_out_what_matters_least_then_cuts() -> None:
    assert draw_table(COLUMNS, ROWS, width=36) == (
        "NAME                  STATE     AGE\n"
        "a                     alive     3 s\n"
        "a-long-name-of-a-run  dead   12 min"
    )  # fmt: skip
    assert draw_table(COLUMNS, ROWS, width=28) == (
        "NAME           STATE     AGE\n"
        "a              alive     3 s\n"
        "a-long-nam...  dead   12 min"
    )  # fmt: skip


@pytest.mark.parametrize("width", range(24, 90))
def test_every_row_is_one_line_of_at_most_that_width(width: int) -> None:
    lines = draw_table(COLUMNS, [*ROWS, ["日本語の名前のラン", "alive", "1 s", "x"]], width=width).split("\n")
    assert len(lines) == 4
    assert max(map(num_cells, lines)) <= width


def test_a_colour_takes_no_room() -> None:
    rows = [[Cell("a", "bad"), "alive", "3 s", ""]]
    plain = draw_table(COLUMNS, rows, width=40)
    painted = draw_table(COLUMNS, rows, width=40, use_color=True)
    assert "\x1b[31ma\x1b[0m   " in painted
    assert plain.split("\n")[1] == "a     alive  3 s"


@pytest.mark.parametrize(
    ("env", "is_terminal", "wanted"),
    [
        ({}, True, True),
        ({}, False, False),
        ({"TERM": "dumb"}, True, False),
        ({"NO_COLOR": "1", "FORCE_COLOR": "1"}, True, False),
        ({"FORCE_COLOR": "1"}, False, True),
    ],
)
def test_colours_follow_the_terminal_and_the_variables(env: dict[str, str], is_terminal: bool, wanted: bool) -> None:
    assert wants_color(env, is_terminal=is_terminal) is wanted
    assert paint("x", "good", use_color=wanted) == ("\x1b[32mx\x1b[0m" if wanted else "x")


def test_a_long_line_is_folded_between_words() -> None:
    text = "  hint: one two three /a/path/that/is/longer/than/the/line four"
    folded = fold(text, 20, 8)
    assert folded.split("\n") == [
        "  hint: one two",
        "        three",
        "        /a/path/that/is/longer/than/the/line",
        "        four",
    ]
    assert "".join(folded.split()) == "".join(text.split())
    assert fold(text, None, 8) == text
    assert fold("a  b", 80) == "a  b"


def test_short_forms() -> None:
    assert [format_short(s) for s in (0.25, 41, 95, 11520, 200000, -3)] == [
        "0.2s",
        "41s",
        "1m35s",
        "3h12m",
        "2d7h",
        "-3.0s",
    ]
    assert [count_of(n, "era") for n in (0, 1, 1200)] == ["0 eras", "1 era", "1,200 eras"]
    assert shorten("abcdefgh", 6) == "abc..."
