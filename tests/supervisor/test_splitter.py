"""The splitter gives the same pieces however the bytes were cut, loses nothing, and stays small."""

from __future__ import annotations

import re

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jackline.supervisor.output.splitter import MAX_PIECE_BYTES, LineSplitter, Piece, clean
from tests.counted import count_calls

# Bytes that matter come up often; everything else comes up too.
TELLING = [
    b"\n",
    b"\r",
    b"\r\n",
    b"\x1b[A",
    b"\x1b[2K",
    b"\x1b[?25l",
    b"\x1b",
    b"\xe2\x96\x88",
    b"\xe2",
    b"\x00",
    b"ab",
]
STREAMS = st.lists(st.sampled_from(TELLING) | st.binary(max_size=8), max_size=60).map(b"".join)


def split(*portions: bytes) -> list[Piece]:
    splitter = LineSplitter()
    pieces = [piece for portion in portions for piece in splitter.feed(portion)]
    return pieces + splitter.flush()


def cut(data: bytes, places: list[int]) -> list[bytes]:
    ends = sorted({min(place, len(data)) for place in places} | {len(data)})
    return [data[start:end] for start, end in zip([0, *ends], ends, strict=False)]


@given(STREAMS, st.lists(st.integers(0, 400), max_size=12))
@example(b"a\r\nb\rc", [2])
@example(b"bar\r\r\r\n", [4, 5, 6])
def test_any_cutting_of_any_bytes_gives_the_same_pieces(data: bytes, places: list[int]) -> None:
    assert split(*cut(data, places)) == split(data)


@given(st.lists(st.integers(0, 3 * MAX_PIECE_BYTES), max_size=6), st.sampled_from([b"x", b"\xe2\x96\x88", b"\xff"]))
@settings(max_examples=40, deadline=None)
def test_any_cutting_of_an_overlong_line_gives_the_same_pieces(places: list[int], unit: bytes) -> None:
    data = (unit * (2 * MAX_PIECE_BYTES))[: 2 * MAX_PIECE_BYTES + 77] + b"\nnext\n"
    assert split(*cut(data, places)) == split(data)


@given(STREAMS)
def test_nothing_is_lost_but_line_ends_and_escape_sequences(data: bytes) -> None:
    texts = "".join(piece.text for piece in split(data))
    assert texts == "".join(clean(part) for part in re.split(rb"[\r\n]+", data))


@given(STREAMS, st.lists(st.integers(0, 400), max_size=12))
def test_what_is_pending_and_what_was_given_add_up(data: bytes, places: list[int]) -> None:
    """Reading again from the first pending byte gives exactly the rest: what a new supervisor does."""
    splitter = LineSplitter()
    fed = 0
    given_so_far: list[Piece] = []
    for portion in cut(data, places):
        given_so_far += splitter.feed(portion)
        fed += len(portion)
        texts = [piece.text for piece in given_so_far + split(data[fed - splitter.num_pending_bytes :])]
        assert texts == [piece.text for piece in split(data)]


@given(STREAMS)
def test_no_control_character_reaches_the_log(data: bytes) -> None:
    assert not re.search("[\x00-\x08\x0a-\x1f\x7f-\x9f]", "".join(piece.text for piece in split(data)))


def test_lf_ends_a_line_cr_a_refresh_and_crlf_one_line() -> None:
    assert split(b"one\ntwo\r\nthree\rfour\n") == [
        Piece("one", "line"),
        Piece("two", "line"),
        Piece("three", "bar"),
        Piece("four", "line"),
    ]


def test_a_last_line_without_newline_is_kept() -> None:
    splitter = LineSplitter()
    assert splitter.feed(b"done\nno newline") == [Piece("done", "line")]
    assert splitter.partial == b"no newline"
    assert splitter.flush() == [Piece("no newline", "line")]
    assert splitter.flush() == []


def test_empty_lines_stay_and_empty_refreshes_go() -> None:
    assert split(b"\n\r\r\n\n") == [Piece("", "line"), Piece("", "line"), Piece("", "line")]
    assert split(b"\r\rx") == [Piece("x", "line")]


def test_what_is_not_utf8_is_shown_and_harmless() -> None:
    assert split(b"caf\xc3\xa9 \xff\xfe \x00\x07 \xe2\x82\n")[0].text == "café \\xff\\xfe \\x00\\x07 \\xe2\\x82"


def test_colours_and_cursor_moves_do_not_enter_the_log() -> None:
    data = b"\x1b[?25l\x1b[2K\x1b[1;31mred\x1b[0m \x1b]8;;http://x\x07link\x1b]8;;\x07 \x1b(B end\n"
    assert split(data) == [Piece("red link  end", "line")]


def test_rows_that_are_redrawn_are_refreshes_not_lines() -> None:
    first = b"outer 0\ninner 0"
    redraw = b"\r\x1b[2K\x1b[1A\x1b[2Kouter 1\ninner 1"
    kinds = [(piece.text, piece.kind) for piece in split(first + redraw + b"\nafter\n")]
    assert kinds == [
        ("outer 0", "line"),
        ("inner 0", "bar"),
        ("outer 1", "bar"),
        ("inner 1", "line"),
        ("after", "line"),
    ]


def test_an_overlong_line_comes_in_marked_pieces_of_bounded_size() -> None:
    pieces = split(b"x" * (2 * MAX_PIECE_BYTES + 5) + b"\n")
    assert [(len(piece.text), piece.is_continued) for piece in pieces] == [
        (MAX_PIECE_BYTES, True),
        (MAX_PIECE_BYTES, True),
        (5, False),
    ]


def test_a_line_of_exactly_the_limit_is_one_piece() -> None:
    assert [piece.is_continued for piece in split(b"x" * MAX_PIECE_BYTES + b"\n")] == [False]


@pytest.mark.parametrize("unit", [b"x", b"\r", b"\x1b[A", b"\xff"], ids=["text", "CR", "cursor up", "garbage"])
def test_the_buffer_stays_small_for_a_hundred_megabytes_without_a_line_end(unit: bytes) -> None:
    splitter = LineSplitter()
    portion = unit * ((1 << 20) // len(unit))
    held = 0
    for _ in range(100 if unit == b"x" else 5):
        splitter.feed(portion)
        held = max(held, len(splitter.partial))
    assert held <= MAX_PIECE_BYTES


def test_a_line_costs_three_calls() -> None:
    """Counted, not timed: neither CPU time nor its ratio to another loop's is the same on a crowded machine."""
    data = b"step 123456 loss 2.3456 lr 3e-4 tok/s 12345 abc\n" * 10_000
    splitter = LineSplitter()
    assert count_calls(lambda: splitter.feed(data)) <= 3.1 * 10_000
    assert len(splitter.feed(data)) == 10_000
