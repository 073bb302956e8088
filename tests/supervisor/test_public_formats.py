"""Progress and metrics of public programs, from their output as text (public_formats.txt)."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from jackline.supervisor.output.bars import parse_bar
from jackline.supervisor.output.told import Told

FILE = Path(__file__).with_name("public_formats.txt")
FACTS = ("done", "total", "unit", "of", "epoch", "epochs", "eta_s")


def read_sections() -> dict[str, tuple[dict[str, str], list[str]]]:
    found: dict[str, tuple[dict[str, str], list[str]]] = {}
    for section in FILE.read_text().split("\n## ")[1:]:
        head, *lines = section.rstrip("\n").split("\n")
        name, _, wanted = head.partition(" | ")
        found[name] = (dict(word.split("=", 1) for word in wanted.split()), lines)
    return found


SECTIONS = read_sections()


def listen(lines: list[str]) -> Told:
    told = Told()
    for second, line in enumerate(lines):
        now_s = 1_800_000_000.0 + second
        if line.startswith("~"):
            told.offer(parse_bar(line[1:]), now_s)
            told.take_bar(line[1:], now_s)
        else:
            told.take_lines([line], now_s)
    return told


def test_there_are_at_least_forty_formats() -> None:
    assert len(SECTIONS) >= 40


@pytest.mark.parametrize("name", SECTIONS)
def test_the_output_of_a_public_program_is_understood(name: str) -> None:
    wanted, lines = SECTIONS[name]
    told = listen(lines)
    numbers = {entry.name: entry.value if entry.text is None else float(entry.text) for entry in told.latest}
    for key, value in wanted.items():
        if key == "none":
            assert told.progress is None
        elif key == "guessed":
            assert told.progress is not None
            assert told.progress.is_guessed
        elif key in ("unit", "of"):
            assert told.progress is not None
            assert getattr(told.progress, key) == value
        elif key in FACTS:
            assert told.progress is not None
            assert getattr(told.progress, key) == pytest.approx(float(value))
        elif value == "nan":
            assert math.isnan(numbers[key] or 0.0)
        else:
            assert numbers.get(key) == pytest.approx(float(value)), numbers
