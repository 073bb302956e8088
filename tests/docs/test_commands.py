"""Every `jackline ...` that any page names can be typed: command, options and settings of a recipe exist.

Those of the guides to notebooks, ssh and trouble are run as well (tests/notebook/test_guides.py).
"""

from __future__ import annotations

import re
from pathlib import Path

import click
import pytest

from jackline.errors import JacklineError
from jackline.trainer.config import resolve_words
from jackline.trainer.recipe import RECIPES
from tests.notebook.test_guides import parse

ROOT = Path(__file__).parents[2]
LEFT_OUT = ("docs/reference/", "docs/SEED_COVERAGE.md")  # made from the code; has a test of its own
# What depends on files of a reader.
_THEIRS = re.compile("cannot read .*: No such file|names no data")
PAGES = sorted(
    name
    for path in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    if not (name := str(path.relative_to(ROOT))).startswith(LEFT_OUT)
)
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_TYPED = re.compile(r"^(?:\$ |!|ssh user@host )?(jackline .*)$")
# A pattern of a command, or only its beginning: `jackline train RECIPE [KEY=VALUE ...]`.
_PATTERN = re.compile(r"\.\.\.|[\[\]|<>…]|\bCMD\b")


def commands_of(text: str) -> list[str]:
    """Lines of blocks without the words beside them, and what stands in sentences."""
    blocks = [block for language, block in _BLOCK.findall(text) if language in ("", "sh", "bash", "console")]
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    typed = [re.split(r"\s{2,}|\s+# |\s+&&? *|\s+; ", match[1])[0] for line in lines if (match := _TYPED.match(line))]
    inline = re.findall(r"`(jackline [^`\n]+)`", _BLOCK.sub("", text))
    return [command.strip() for command in (*typed, *inline) if not _PATTERN.search(command)]


def problem_with(command: str) -> str:
    """What is wrong with it; '' for one that only lacks its arguments, as names in sentences do."""
    words = re.sub(r"(?<= )N\b", "1", command)  # a place for a number
    try:
        _, given = parse(words)
        recipe = given.get("recipe") or given.get("target")
        if words.split()[1] in ("train", "plan") and recipe in RECIPES:
            resolve_words(str(recipe), given["settings"])  # type: ignore[arg-type]
    except (click.MissingParameter, click.exceptions.Exit):  # --help and --version exit
        return ""
    except click.BadOptionUsage as error:
        return "" if "requires an argument" in error.message else f"{command}: {error.message}"
    except JacklineError as error:
        return "" if _THEIRS.search(error.message) else f"{command}: {error.message}"
    except (click.ClickException, AssertionError) as error:
        return f"{command}: {error.format_message() if isinstance(error, click.ClickException) else error}"
    return ""


@pytest.mark.parametrize("name", PAGES)
def test_every_command_of_a_page_can_be_typed(name: str) -> None:
    commands = commands_of((ROOT / name).read_text(encoding="utf-8"))
    assert [problem for problem in map(problem_with, commands) if problem] == []


def test_the_pages_have_commands_and_a_wrong_one_is_noticed() -> None:
    texts = [(ROOT / name).read_text(encoding="utf-8") for name in PAGES]
    assert sum(map(len, map(commands_of, texts))) > 250
    page = "```\njackline train demo --quick no_such=1   words\n```\n`jackline staus` and `jackline run ...`"
    commands = commands_of(page)
    assert commands == ["jackline train demo --quick no_such=1", "jackline staus"]
    assert all(problem_with(command) for command in commands)
