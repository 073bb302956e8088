"""The README's first minute: addresses that are the project's own, tables that say what the measured pages say."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def rows(text: str, first_cell: str) -> list[list[str]]:
    """The rows of the table whose heading begins with `first_cell`, without the heading."""
    lines = text.splitlines()
    begin = next(at for at, line in enumerate(lines) if line.startswith(f"| {first_cell} |".replace("|  |", "| |")))
    end = next(at for at in range(begin, len(lines)) if not lines[at].startswith("|"))
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[begin + 2 : end]]


def test_the_install_lines_use_the_projects_own_address() -> None:
    block = README.partition("## Install")[2].partition("```\n")[2].partition("```")[0]
    home = PROJECT["urls"]["Homepage"]
    addresses = re.findall(r"https://[^\s\"]+", block)
    assert len(addresses) == len(block.splitlines()) == 6
    assert set(addresses) == {home}


def test_the_install_lines_name_extras_that_are_there() -> None:
    extras = {name for group in re.findall(r"jackline\[([\w,]+)\]", README) for name in group.split(",")}
    assert extras and extras <= set(PROJECT["optional-dependencies"])


def test_the_table_of_kills_is_that_of_the_measured_page() -> None:
    measured = rows((ROOT / "docs" / "RELIABILITY.md").read_text(encoding="utf-8"), "method")
    shown = rows(README, "method")
    assert len(shown) >= 6
    for row in shown:
        assert row in [line[: len(row)] for line in measured], row


def test_the_support_table_agrees_with_the_project() -> None:
    said = dict(row[:2] for row in rows(README, ""))
    floor = PROJECT["requires-python"].removeprefix(">=")
    torch = next(word for word in PROJECT["optional-dependencies"]["train"] if word.startswith("torch>"))
    assert said["Python"].startswith(f"{floor} and newer")
    assert said["torch, for `attach` and recipes"].startswith(f"{torch.removeprefix('torch>=')} and newer")


def test_every_tool_of_the_table_has_its_part_in_the_comparison() -> None:
    heading = next(line for line in README.splitlines() if line.startswith("| | Jackline |"))
    tools = [cell.strip() for cell in heading.strip("|").split("|")][2:]
    page = (ROOT / "docs" / "COMPARISON.md").read_text(encoding="utf-8")
    names = {"W&B": "Weights & Biases"}
    for tool in tools:
        assert f"\n## {names.get(tool, tool)}\n" in page, tool
