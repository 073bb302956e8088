"""Text from a run, made safe to print."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jackline.cli.text.safety import safe_lines, safe_text


@pytest.mark.parametrize(
    ("dangerous", "safe"),
    [
        ("plain text, größer, 学习, 🙂", "plain text, größer, 学习, 🙂"),
        ("\x1b[31mred\x1b[0m", "red"),
        ("\x1b[2J\x1b[Hcleared", "cleared"),
        ("\x1b]0;new title\x07text", "text"),
        ("\x1b]8;;http://evil.example\x1b\\link\x1b]8;;\x1b\\", "link"),
        ("\x1bPdevice control\x1b\\text", "text"),
        ("\x9b31mred", "red"),
        ("an unfinished \x1b[", "an unfinished "),
        ("50 %\r100 %\nnext\tcolumn", "50 % 100 % next column"),
        ("user\u202egnp.exe", "usergnp.exe"),
        ("\u2066isolated\u2069 \u200bzero\ufeff", "isolated zero"),
        ("bell\x07 back\x08space \x00", "bell backspace "),
        ("half \ud83d", "half ?"),
        ("two\u2028lines", "two lines"),
    ],
)
def test_what_could_fool_a_terminal_or_a_reader_is_gone(dangerous: str, safe: str) -> None:
    assert safe_text(dangerous) == safe


def test_long_text_is_cut_visibly() -> None:
    assert safe_text("x" * 50, 10) == "xxxxxxx..."


def test_values_that_are_not_text_are_shown_as_text() -> None:
    assert safe_text(None) == "None"
    assert safe_text(41) == "41"


def test_lines_are_kept_apart_and_counted() -> None:
    assert safe_lines("a\x1b[31m\nb\n" + "c\n" * 100, 3) == ["a", "b", "c"]


@given(st.text() | st.text(alphabet="\x1b[]P\\0;m\x07\x9b\u202eA"))
def test_no_control_or_format_character_survives(text: str) -> None:
    assert not [
        char for char in safe_text(text) if unicodedata.category(char) in ("Cc", "Cf", "Cs", "Co", "Zl", "Zp")
    ]


def test_half_a_password_is_not_left_by_cutting_a_text() -> None:
    address = "see sftp://me:secret-word@host/x"
    assert all("secr" not in safe_text(address, length) for length in range(1, 60))
