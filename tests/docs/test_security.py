"""docs/SECURITY.md: every promise names tests, and those exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "SECURITY.md").read_text()


def promises() -> list[tuple[str, list[str]]]:
    table = PAGE.split("## The promises")[1].split("\n## ")[0]
    rows = [line.strip("|").split("|") for line in table.splitlines() if line.startswith("| ")][1:]
    return [(row[0].strip(), re.findall(r"`(tests/[^`]+)`", row[1])) for row in rows if "---" not in row[0]]


def test_every_promise_names_tests_that_exist() -> None:
    assert len(promises()) >= 20
    for promise, tests in promises():
        assert tests, f"no test for: {promise}"
        for test in tests:
            file, _, function = test.partition("::")
            nodes = ast.walk(ast.parse((ROOT / file).read_text()))
            names = {node.name for node in nodes if isinstance(node, ast.FunctionDef)}
            assert function in names, f"{test} does not exist"


def test_the_page_for_reports_is_there_and_names_this_one() -> None:
    assert "docs/SECURITY.md" in (ROOT / "SECURITY.md").read_text()
