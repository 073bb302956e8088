"""docs/SEED_COVERAGE.md names every behaviour once, and nothing in it that does not exist."""

from __future__ import annotations

import ast
import re
from collections import Counter
from dataclasses import dataclass, fields
from functools import cache
from importlib import import_module
from pathlib import Path

import click
import pytest

from jackline.cli.main import COMMANDS
from jackline.cli.options import ListByDefault
from jackline.trainer.config import TrainConfig
from jackline.trainer.recipe import RECIPES, load_recipe

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "docs" / "SEED_COVERAGE.md"
NUM_BEHAVIOURS = (27, 30, 33, 32, 32)  # of seeds 0 to 4
OPEN = r"open: (part [78]|after part 8)(: .+)?"
TESTS = r"`tests/[\w/]+\.py::test_\w+`(, `tests/[\w/]+\.py::test_\w+`)*"
WITH_SETTINGS = ("train", "plan", "doctor")  # commands that take a recipe and its settings


@dataclass(frozen=True)
class Row:
    id: str
    what: str
    where: str
    shown_by: str

    @property
    def tests(self) -> list[str]:
        return re.findall(r"`(tests/[^`]+::[^`]+)`", self.shown_by)

    @property
    def places(self) -> list[str]:
        return re.findall(r"`([^`]+)`", self.where)


@cache
def read_rows() -> tuple[Row, ...]:
    lines = [line for line in TABLE.read_text(encoding="utf-8").splitlines() if line.startswith("| S")]
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    assert [row[0] for row in cells if len(row) != 4] == []
    return tuple(Row(*row) for row in cells)


def test_every_behaviour_has_one_row_in_order() -> None:
    wanted = [f"S{seed}.{n}" for seed, count in enumerate(NUM_BEHAVIOURS) for n in range(1, count + 1)]
    found = [row.id for row in read_rows()]
    assert len(wanted) == 154
    assert [name for name, count in Counter(found).items() if count > 1] == []
    assert found == wanted


def test_a_row_has_a_place_and_a_test_or_says_that_it_is_open() -> None:
    assert [row for row in read_rows() if not is_well_formed(row)] == []


def is_well_formed(row: Row) -> bool:
    if row.where == "-":
        return bool(row.what and re.fullmatch(OPEN, row.shown_by))
    has_places = bool(row.places) and ", ".join(f"`{place}`" for place in row.places) == row.where
    return bool(row.what and has_places and re.fullmatch(rf"{TESTS}(; {OPEN})?", row.shown_by))


@pytest.mark.parametrize(
    ("where", "shown_by"),
    [
        ("-", "`tests/a.py::test_b`"),
        ("`a.py` and more", "`tests/a.py::test_b`"),
        ("`a.py`", ""),
        ("`a.py`", "open: part 7"),
        ("`a.py`", "`tests/a.py::test_b`; open: some day"),
        ("-", "open: part 70"),
    ],
)
def test_a_row_that_claims_without_showing_would_be_noticed(where: str, shown_by: str) -> None:
    assert not is_well_formed(Row("S0.1", "something", where, shown_by))


def test_every_test_that_is_named_exists() -> None:
    named = sorted({test for row in read_rows() for test in row.tests})
    assert len(named) > 100
    assert [test for test in named if test.split("::")[1] not in names_in(test.split("::")[0])] == []


@cache
def names_in(path: str) -> frozenset[str]:
    if not (ROOT / path).is_file():
        return frozenset()
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef))


def test_every_file_that_is_named_exists() -> None:
    named = sorted({place for row in read_rows() for place in row.places if not place.startswith("jackline ")})
    assert len(named) > 50
    assert [place for place in named if not is_file(place)] == []


def is_file(place: str) -> bool:
    is_document = place.startswith(("configs/", "docs/", "scripts/", "notebooks/"))
    return (ROOT / (place if is_document else f"src/jackline/{place}")).is_file()


def test_every_command_that_is_named_is_one_with_these_options() -> None:
    named = sorted({place for row in read_rows() for place in row.places if place.startswith("jackline ")})
    assert len(named) > 15
    assert [problem for place in named if (problem := find_problem(place))] == []


def find_problem(place: str) -> str:
    """What a person who types this would stumble over; empty when nothing."""
    name, *words = place.split()[1:]
    if name not in COMMANDS:
        return f"{place}: there is no such command"
    module = import_module(COMMANDS[name][0])
    command: click.Command = getattr(module, "command", None) or getattr(module, name)
    options = options_of(command)
    if isinstance(command, ListByDefault):
        options |= options_of(command.commands["list"])
    for word in words:
        if word.startswith("-"):
            if word.replace("_", "-") not in options:
                return f"{place}: {word} is no option"
        elif isinstance(command, click.Group) and word in command.commands:
            options |= options_of(command.commands[word])
        elif name in WITH_SETTINGS and word in RECIPES:
            options |= settings_of(load_recipe(word, TrainConfig))
        else:
            return f"{place}: what is {word}?"
    return ""


def options_of(command: click.Command) -> set[str]:
    return {option for parameter in command.params for option in parameter.opts}


def settings_of(config: TrainConfig) -> set[str]:
    names = [field.name for field in fields(config)] + list(config.ALIASES)
    return {f"--{name.replace('_', '-')}" for name in [*names, "config"]}


@pytest.mark.parametrize(
    ("place", "problem"),
    [
        ("jackline fly", "jackline fly: there is no such command"),
        ("jackline runs --lgs", "jackline runs --lgs: --lgs is no option"),
        ("jackline checkpoints fix", "jackline checkpoints fix: what is fix?"),
        ("jackline train demo --lambda_", "jackline train demo --lambda_: --lambda_ is no option"),
        ("jackline train sparsae --mask_opt_every", ""),
        ("jackline checkpoints verify --step", ""),
    ],
)
def test_a_command_that_does_not_exist_would_be_noticed(place: str, problem: str) -> None:
    assert find_problem(place) == problem
